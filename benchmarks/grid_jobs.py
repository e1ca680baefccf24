"""The jobs of `benchmarks.grids` and `benchmarks.restrictions`: models at published sizes, their batches and clusters.

Models are on the meta device. GPT-3 is Megatron-LM's model (`benchmarks.megatron_gpt`) in sizes of Narayanan et al.
2021, Table 1; Llama-3.1, Mixtral 8x7B, DeepSeek-V3 and T5-11B are Hugging Face's; ViT-G is of Zhai et al. 2022, Table
2; DLRM is `examples.models.dlrm` with 24 tables of four million rows. bf16 and AdamW throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.joint import llama
from benchmarks.megatron_gpt import GPTSettings, gpt_model
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.jobs.models import hf_model
from paraplan.planner.assemble import Job

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class GridJob:
    """A model, its batch and its cluster.

    Attributes:
        make: the model on the meta device.
        batch: what it is given, without values.
        cluster: as the command line writes it.
        has_experts: whether the grid has expert-parallel degrees too.
        memory_bytes: of a device, what may be used; None for all of it.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    cluster: str
    has_experts: bool = False
    memory_bytes: int | None = None

    def job(self) -> Job:
        """Captured."""
        program = capture(self.make(), self.batch(), precision="bf16")
        return Job(program, parse_cluster(self.cluster), OPTIMIZERS["adamw"], ModelRef(display=self.cluster), {})


def _tokens(batch: int, sequence: int) -> Callable[[], Batch]:
    def made() -> Batch:
        ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": torch.empty_like(ids)}

    return made


def _gpt(layers: int, hidden: int, heads: int) -> Callable[[], nn.Module]:
    of = GPTSettings(hidden=hidden, layers=layers, heads=heads, vocab=51200, sequence=2048, tied=True, flash=True)
    return lambda: gpt_model(of)


def _mixtral() -> nn.Module:
    return hf_model(
        "mixtral", {"max_position_embeddings": 4096, "use_cache": False, "vocab_size": 32000}, meta=True
    )  # the other sizes are the default's


def _deepseek() -> nn.Module:
    return hf_model("deepseek_v3", {"max_position_embeddings": 4096, "use_cache": False}, meta=True)


def _t5() -> nn.Module:
    sizes = {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128, "num_layers": 24, "num_decoder_layers": 24}
    return hf_model("t5", {**sizes, "vocab_size": 32128, "dropout_rate": 0.0, "use_cache": False}, meta=True)


def _text_to_text(batch: int, source: int, target: int) -> Callable[[], Batch]:
    def made() -> Batch:
        ids = torch.zeros(batch, source, dtype=torch.int64, device="meta")
        return {"input_ids": ids, "labels": torch.zeros(batch, target, dtype=torch.int64, device="meta")}

    return made


def _vit() -> nn.Module:
    sizes = {"hidden_size": 1664, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 16}
    return hf_model("vit", {**sizes, "image_size": 224, "patch_size": 14, "num_labels": 1000}, meta=True)


def _images(batch: int) -> Batch:
    pixels = torch.zeros(batch, 3, 224, 224, device="meta")
    return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.int64, device="meta")}


def _dlrm() -> nn.Module:
    from examples.models.dlrm import DLRM  # noqa: PLC0415  (beside the package, not part of it)

    with torch.device("meta"):
        return DLRM((24, 4_000_000), (1_000_000, 1_000_000), columns=128, dense=13, hidden=1024).train()


def _clicks(batch: int) -> Batch:
    def ids(count: int) -> Tensor:
        return torch.zeros(batch, count, dtype=torch.int64, device="meta")

    dense, clicked = torch.zeros(batch, 13, device="meta"), torch.zeros(batch, device="meta")
    return {"dense": dense, "stacked": ids(24), "single": ids(1), "bag": ids(8), "clicked": clicked}


JOBS: dict[str, GridJob] = {
    "Llama 8B, 8 H100": GridJob(lambda: llama(32, 4096, 14336, 32), _tokens(64, 8192), "8xH100:1"),
    "Llama 8B, 64 H100": GridJob(lambda: llama(32, 4096, 14336, 32), _tokens(256, 8192), "8xH100:8"),
    "Llama 70B, 256 H100": GridJob(lambda: llama(80, 8192, 28672, 64), _tokens(256, 8192), "8xH100:32"),
    "GPT 1.7B, 32 A100": GridJob(_gpt(24, 2304, 24), _tokens(512, 2048), "8xA100-80:4"),
    "GPT 18B, 256 A100": GridJob(_gpt(40, 6144, 48), _tokens(1024, 2048), "8xA100-80:32"),
    "GPT 175B, 1024 A100": GridJob(_gpt(96, 12288, 96), _tokens(1536, 2048), "8xA100-80:128"),
    "Mixtral 8x7B, 64 H100": GridJob(_mixtral, _tokens(512, 4096), "8xH100:8", has_experts=True),
    "T5 11B, 64 A100": GridJob(_t5, _text_to_text(2048, 512, 128), "8xA100-80:8"),
    "ViT-G, 32 A100": GridJob(_vit, lambda: _images(4096), "8xA100-80:4"),
    "DLRM, 16 A100": GridJob(_dlrm, lambda: _clicks(65536), "8xA100-80:2"),
    "Llama 405B, 16384 H100": GridJob(lambda: llama(126, 16384, 53248, 128), _tokens(2048, 8192), "8xH100:2048"),
    "DeepSeek-V3, 2048 H100": GridJob(_deepseek, _tokens(16384, 4096), "8xH100:256", has_experts=True),
    "GPT 1T, 3072 A100": GridJob(_gpt(128, 25600, 160), _tokens(3072, 2048), "8xA100-80:384"),
}

BINDING_JOBS: dict[str, GridJob] = {
    "Llama 8B, 8 H100, batch 16": GridJob(lambda: llama(32, 4096, 14336, 32), _tokens(16, 8192), "8xH100:1"),
    "Llama 8B, 32 H100": GridJob(lambda: llama(32, 4096, 14336, 32), _tokens(128, 8192), "8xH100:4"),
    "Llama 13B, 16 A100": GridJob(lambda: llama(40, 5120, 13824, 40), _tokens(32, 4096), "8xA100-80:2"),
    "Llama 32B, 32 H100": GridJob(lambda: llama(64, 5120, 27648, 40), _tokens(64, 8192), "8xH100:4"),
    "Llama 32B, 64 H100": GridJob(lambda: llama(64, 5120, 27648, 40), _tokens(64, 8192), "8xH100:8"),
    "Llama 70B, 64 H100": GridJob(lambda: llama(80, 8192, 28672, 64), _tokens(64, 8192), "8xH100:8"),
    "Llama 70B, 128 H100": GridJob(lambda: llama(80, 8192, 28672, 64), _tokens(512, 4096), "8xH100:16"),
    "GPT 18B, 64 A100": GridJob(_gpt(40, 6144, 48), _tokens(256, 2048), "8xA100-80:8"),
}
"""Where few devices hold a model: what is kept, made again and put together is most of the choice."""


def _tight(cluster: str, gib: float) -> GridJob:
    """0.6 billion parameters, of whose states a device has to hold an equal part."""
    return GridJob(lambda: llama(8, 2048, 5632, 16, 50_000), _tokens(16, 1024), cluster, memory_bytes=int(gib * 2**30))


TIGHT_JOBS: dict[str, GridJob] = {
    "Llama 0.6B, 4 RTX 4090 of 3 GiB": _tight("4xRTX4090", 3.0),
    "Llama 0.6B, 4 RTX 4090 of 3.5 GiB": _tight("4xRTX4090", 3.5),
    "Llama 0.6B, 4 RTX 4090 of 5 GiB": _tight("4xRTX4090", 5.0),
    "Llama 0.6B, 8 RTX 4090 of 2 GiB": _tight("4xRTX4090:2", 2.0),
    "Llama 0.6B, 16 RTX 4090 of 1 GiB": _tight("8xRTX4090:2", 1.0),
    "Llama 0.6B, 16 RTX 4090 of 1.5 GiB": _tight("8xRTX4090:2", 1.5),
}
"""Where few devices on a slow bus hardly hold a model however it is divided."""
