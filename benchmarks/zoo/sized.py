"""Models at the sizes papers on memory use, on the meta device, and their memory problems on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from examples.models.mlp import MLP
from examples.models.resnet import ResNet
from examples.models.unet import UNet
from examples.models.vgg import VGG
from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import plan_costs
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.device import Device
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.memory.flatten import Flattened, flatten
from paraplan.planner.search import search

Made = tuple[nn.Module, dict[str, Tensor]]


def _images(batch: int, size: int, classes: int, planes: bool = False) -> dict[str, Tensor]:
    shape = (batch, size, size) if planes else (batch,)
    return {"pixels": torch.randn(batch, 3, size, size), "labels": torch.zeros(shape, dtype=torch.long)}


def _resnet(*blocks: int) -> Made:
    return ResNet(blocks), _images(32, 224, 1000)


def _mlp(depth: int) -> Made:
    x = torch.randn(32768, 1024)
    return MLP(1024, 1024, depth), {"x": x, "y": torch.randn(32768, 1024)}


def decoder(kind: str, layers: int, width: int, heads: int, vocabulary: int, tokens: Tensor) -> Made:
    """GPT-2 or Llama of these sizes, each token a label; `tokens` is [batch, positions]."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional extra)

    positions = tokens.shape[1]
    sizes: dict[str, dict[str, object]] = {
        "gpt2": {"n_layer": layers, "n_embd": width, "n_head": heads, "n_positions": positions,
                 "bos_token_id": None, "eos_token_id": None},
        "llama": {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": width * 11 // 4,
                  "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": positions},
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes[kind], vocab_size=vocabulary, use_cache=False)
    return AutoModelForCausalLM.from_config(config), {"input_ids": tokens, "labels": tokens}


def _language(kind: str, layers: int, vocabulary: int) -> Made:
    width, heads = {"gpt2": (768, 12), "llama": (1024, 16)}[kind]
    return decoder(kind, layers, width, heads, vocabulary, torch.zeros(8, 1024, dtype=torch.long))


MODELS: dict[str, Callable[[], Made]] = {
    "vgg16": lambda: (VGG(pooled=7), _images(32, 224, 1000)),
    "resnet50": lambda: _resnet(3, 4, 6, 3),
    "resnet152": lambda: _resnet(3, 8, 36, 3),
    "unet": lambda: (UNet(), _images(8, 256, 2, planes=True)),
    "mlp8": lambda: _mlp(8),
    "mlp32": lambda: _mlp(32),
    "gpt2-4": lambda: _language("gpt2", 4, 8192),
    "gpt2-4-50k": lambda: _language("gpt2", 4, 50257),
    "gpt2-12": lambda: _language("gpt2", 12, 8192),
    "gpt2-12-50k": lambda: _language("gpt2", 12, 50257),
    "gpt2-24": lambda: _language("gpt2", 24, 8192),
    "gpt2-48": lambda: _language("gpt2", 48, 8192),
    "llama-8": lambda: _language("llama", 8, 32000),
}


def reference_cluster() -> ClusterSpec:
    """One device of max(flops / 60 T, bytes / 1.2 TB/s) + 3 us per op, with memory for anything."""
    rates = dict.fromkeys(("float64", "float32", "bfloat16", "float16"), 60e12)
    device = Device(
        kind="reference",
        memory_bytes=1 << 50,
        memory_bytes_per_s=1.2e12,
        flops_per_s=rates,
        launch_s=3e-6,
        backend="cpu",
    )
    cluster = parse_cluster("1xH100")
    return replace(cluster, groups=(replace(cluster.groups[0], device=device),))


@cache
def memory_problem(name: str) -> Flattened:
    """A model captured, lowered for one device and flattened, at the reference's costs."""
    with torch.device("meta"):
        return flattened(MODELS[name](), name)


def flattened(made: Made, name: str, optimizer: str = "adamw") -> Flattened:
    """A model on the meta device and its batch, captured, lowered for one device and flattened, at those costs."""
    model, batch = made
    job = Job(capture(model.train(), batch), reference_cluster(), OPTIMIZERS[optimizer], ModelRef(display=name), {})
    plan = search(job, Constraints(mesh=(1,), microbatches=1)).plan
    return flatten(lower(plan)[0], plan_costs(plan)[0])


def vgg19(batch: int) -> Made:
    """VGG-19 of the paper, without batch norm, on the meta device."""
    with torch.device("meta"):
        model = VGG((2, 2, 4, 4, 4), pooled=7)
        model.features = nn.Sequential(*(each for each in model.features if not isinstance(each, nn.BatchNorm2d)))
        return model, _images(batch, 224, 1000)
