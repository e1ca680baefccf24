"""Training steps on one device as users take them, against eager PyTorch and against what the plan predicts."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from benchmarks.gpu.place import Place, busy, median_ms, no_waiting, ratio, watching
from benchmarks.replaying import NotedGraphs
from benchmarks.table import Case, Row
from benchmarks.zoo.sized import decoder
from examples.models.resnet import ResNet, images
from examples.models.unet import UNet
from paraplan.cost_models.simulator.graph_memory import graphs_bytes
from paraplan.runtime.executing.graphs import CudaGraphs
from paraplan.runtime.trainer import Trainer

Batch = dict[str, Tensor]
Make = Callable[[], tuple[nn.Module, Batch]]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
FAR = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2, "fp8": 1e-1}
"""How far losses of three steps may be from eager's in float32, relative."""
STEPS = 3


def text(
    kind: str,
    place: Place,
    layers: int,
    width: int,
    heads: int,
    tokens: tuple[int, int],
    p: float,
    few: tuple[int, int] = (2, 16),
) -> tuple[nn.Module, Batch]:
    """A language model of these sizes, or small ones and `few` tokens; p of every dropout."""
    if place.small:
        layers, width, heads, tokens = 2, 32, 4, few
    words = 512 if place.small else 32000
    ids = torch.randint(0, words, tokens)
    model, batch = decoder(kind, layers, width, heads, words, ids)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = p
        if hasattr(module, "attn_dropout") and isinstance(module.attn_dropout, nn.Dropout):
            module.attn_dropout.p = p
    return model, batch


def _experts(place: Place) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  (optional extra)

    width = 32 if place.small else 512
    config = AutoConfig.for_model(
        "mixtral",
        num_hidden_layers=2,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        num_local_experts=4,
        use_cache=False,
    )
    ids = torch.randint(0, 512, (2, 16 if place.small else 512))
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


def _vision(place: Place, large: bool = False) -> Any:
    from transformers import AutoConfig, AutoModelForImageClassification  # noqa: PLC0415  (optional extra)

    width, layers = (32, 2) if place.small else (1024, 24) if large else (768, 12)
    config = AutoConfig.for_model(
        "vit",
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=max(2, width // 64),
        image_size=32 if place.small else 224,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
        problem_type="single_label_classification",
    )
    size, count = (32, 2) if place.small else (224, 32)
    pixels, labels = torch.randn(count, 3, size, size), torch.randint(0, 10, (count,))
    return AutoModelForImageClassification.from_config(config), {"pixel_values": pixels, "labels": labels}


def _unet(place: Place) -> Any:
    width, count, size = (8, 2, 16) if place.small else (64, 8, 256)
    return UNet(width, groups=4), {**images(count, size, 2), "labels": torch.randint(0, 2, (count, size, size))}


def _resnet(place: Place) -> Any:
    if place.small:
        return ResNet((1, 1, 1, 1), 8, 16), images(2, 32, 16)
    return ResNet((3, 8, 36, 3)), images(32, 224, 1000)


class Attention(nn.Module):
    """One causal attention, with grouped heads, between two products.

    Eager takes no kernel for grouped heads in float32 but the one with a matrix of scores: there they are repeated.
    """

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p, kept = heads, p, width // 4
        self.qkv, self.out = nn.Linear(width, width + 2 * kept, bias=False), nn.Linear(width, width, bias=False)
        self.sizes = (width, kept, kept)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the result of x, [batch, positions, width]."""
        b, s, width = x.shape
        d = width // self.heads
        q, k, v = (part.view(b, s, -1, d).transpose(1, 2) for part in self.qkv(x).split(self.sizes, -1))
        if q.dtype == torch.float32 and not torch.compiler.is_exporting():
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True, enable_gqa=True)
        return self.out(made.transpose(1, 2).reshape(b, s, width)).float().square().mean()


def _attention(place: Place, positions: int, p: float) -> Any:
    width, positions = (32, 16) if place.small else (1024, positions)
    return Attention(width, 4 if place.small else 16, p), {"x": torch.randn(1, positions, width)}


def _values(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found["loss"]


def eager_losses(model: nn.Module, batch: Batch, place: Place, rate: float) -> list[float]:
    """Losses of plain steps in float32."""
    model = copy.deepcopy(model).to(place.device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=rate), []
    given = {name: x.to(place.device) for name, x in batch.items()}
    for _ in range(STEPS):
        loss = _values(model(**given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    del model, optimizer, given, loss
    place.forget()
    return losses


def eager_ms(model: nn.Module, batch: Batch, place: Place, precision: str) -> float:
    """A step of eager's quickest: parameters in half precision, a fused update."""
    half = HALF.get(precision, torch.float32)
    model = copy.deepcopy(model).to(place.device, half)
    fused = {"fused": True} if place.is_cuda else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    given = {name: x.to(place.device, half if x.is_floating_point() else x.dtype) for name, x in batch.items()}

    def step() -> None:
        _values(model(**given)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return median_ms(step, place)


RATE = 1e-4


def trained(place: Place, make: Make, precision: str = "bf16", deterministic: bool = True, **options: Any) -> Row:
    """A model's steps under the plan of one device.

    Args:
        place: where.
        make: gives the model, on the CPU, and a batch.
        precision: of the plan; eager's losses are float32's.
        deterministic: whether the model draws no random numbers, so that losses are comparable.
        options: of `Plan.executable`, and "plan" for those of `compile`; "graphs" for steps that are replayed.
    """
    torch.manual_seed(0)
    model, batch = make()
    model = model.train()
    with place.alone():
        wanted = eager_losses(model, batch, place, RATE)
    planned: Mapping[str, Any] = options.pop("plan", {})
    graphs = options.pop("graphs", False)
    plan = pp.compile(
        model, place.cluster(), example_inputs=batch, precision=precision, mesh=(1,), microbatches=1, **planned
    )
    with place.alone():
        return _run(place, plan, (model, batch), Taken(precision, deterministic, graphs, planned, wanted), options)


class Taken(NamedTuple):
    """How steps of a plan are taken; `trained` says what each is.

    Attributes:
        precision, deterministic, graphs, planned: as there.
        wanted: losses of eager's steps.
    """

    precision: str
    deterministic: bool
    graphs: bool
    planned: Mapping[str, Any]
    wanted: list[float]


def _run(place: Place, plan: pp.Plan, job: tuple[nn.Module, Batch], taken: Taken, options: Mapping[str, Any]) -> Row:
    """A plan's steps, the device its own."""
    model, batch = job
    precision, deterministic, graphs, planned, wanted = taken
    batch = {name: x.to(place.device) for name, x in batch.items()}  # as eager has it
    place.forget()
    others, reserved = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if place.is_cuda else (0, 0)
    trainer = plan.executable(copy.deepcopy(model), **options)
    if graphs:
        trainer.replay(CudaGraphs() if place.is_cuda else NotedGraphs(("_local_scalar_dense",)))
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=RATE)
    scaler = trainer.scaler() if precision == "fp16" else None
    losses = []

    def step() -> Tensor:
        loss = trainer.step(batch)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss

    for _ in range(STEPS):
        losses.append(float(step()))
    with watching(place, others, reserved) as room:
        ours = median_ms(step, place)
    device_ms, host_ms, most = busy(step, place)
    failures = []
    error = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)) if deterministic else None
    if error is not None and error > FAR[precision]:
        failures.append(f"losses {losses}, eager's in float32 {wanted}")
    if scaler is None and not planned.get("offload_states"):
        failures += _waits(place, step)
    if graphs and not trainer.replayed.replays["before"]:  # type: ignore[union-attr]
        failures.append(f"no step was replayed: {trainer.replayed.reason}")  # type: ignore[union-attr]
    said = plan.prediction
    row: Row = {
        "error": error,
        "ms": ours,
        "predicted_ms": 1e3 * said.step_s,
        "time_ratio": ratio(ours, 1e3 * said.step_s),
        "device_ms": device_ms,
        "host_ms": host_ms,
        "kernels": most,
        "reference_ms": eager_ms(model, batch, place, precision),
        "peak_ratio": ratio(room.peak_bytes, max(said.peak_bytes)),
        "reserved_ratio": ratio(room.reserved_bytes, max(said.reserved_bytes, default=0)),
        "failures": failures,
    }
    if graphs:  # what lies in the pool counts as allocated only while it is captured
        held = graphs_bytes(plan.programs[0]).peak
        row |= {"peak_ratio": None, "reserved_ratio": ratio(room.reserved_bytes, held)}
    return row


def _waits(place: Place, step: Callable[[], object]) -> list[str]:
    """Whether the host waits for the device within a step."""
    try:
        with no_waiting(place):
            step()
    except Exception as fault:  # noqa: BLE001  (told)
        return [f"a step waits for the device: {str(fault)[:200]}"]
    return []


def _resumed(place: Place) -> Row:
    """Steps, a checkpoint, and the same steps from it."""
    torch.manual_seed(0)
    model, batch = text("gpt2", place, 2, 256, 4, (2, 128), 0.1)
    plan = pp.compile(model.train(), place.cluster(), example_inputs=batch, precision="bf16", mesh=(1,), microbatches=1)

    def start() -> tuple[Trainer, Any]:
        trainer = plan.executable(copy.deepcopy(model))
        return trainer, trainer.optimizer(torch.optim.AdamW, lr=1e-3)

    def steps(trainer: Trainer, optimizer: Any) -> list[float]:
        found = []
        for _ in range(STEPS):
            found.append(float(trainer.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
        return found

    with tempfile.TemporaryDirectory() as folder:
        first = start()
        steps(*first)
        first[0].save(Path(folder) / "checkpoint", first[1])
        wanted = steps(*first)
        second = start()
        second[0].resume(Path(folder) / "checkpoint", second[1])
        found = steps(*second)
    return {
        "error": max(abs(a - b) for a, b in zip(found, wanted, strict=True)),
        "failures": [] if found == wanted else [f"losses {found}, without a checkpoint {wanted}"],
    }


def _attended(place: Place, positions: int, p: float) -> Row:
    return trained(place, partial(_attention, place, positions, p), deterministic=not p)


def full_sizes(place: Place) -> dict[str, Make]:
    """Models at the sizes they are trained at here."""
    return {
        "gpt2": partial(text, "gpt2", place, 24, 1024, 16, (4, 1024), 0.1),
        "llama 1b": partial(text, "llama", place, 16, 2048, 32, (1, 2048), 0.0),
        "vit l": partial(_vision, place, True),
        "unet": partial(_unet, place),
        "resnet152": partial(_resnet, place),
    }


def cases(place: Place) -> dict[str, dict[str, Case]]:
    """By part."""
    gpt2, llama = partial(text, "gpt2", place, 24, 1024, 16, (4, 1024)), partial(text, "llama", place)
    models: dict[str, Case] = {
        "gpt2 p 0": lambda: trained(place, partial(gpt2, 0.0)),
        "gpt2 p 0.1": lambda: trained(place, partial(gpt2, 0.1), deterministic=False),
        "gpt2 fp32": lambda: trained(place, partial(gpt2, 0.0), "fp32"),
        "llama 1b": lambda: trained(place, partial(llama, 16, 2048, 32, (1, 2048), 0.0)),
        "vit l": lambda: trained(place, partial(_vision, place, True)),
        "mixtral": lambda: trained(place, partial(_experts, place)),
        "unet": lambda: trained(place, partial(_unet, place)),
        "resnet152": lambda: trained(place, partial(_resnet, place), "fp32" if place.small else "bf16"),
    }
    sizes = (1024,) if place.small else (1024, 8192, 32768)
    attention: dict[str, Case] = {
        f"{size} p {p}": lambda a=(size, p): _attended(place, *a)  # type: ignore[misc]
        for size in sizes
        for p in (0.0, 0.1)
    }
    small = partial(text, "gpt2", place, 4, 512, 8, (4, 512), 0.0)
    rest: dict[str, Case] = {
        "fp16": lambda: trained(place, small, "fp16"),
        "fp8": lambda: trained(place, small, "fp8"),
        "compile": lambda: trained(place, small, compile="aot_eager" if place.small else True),
        "states on host": lambda: trained(place, small, plan={"offload_states": "host"}),
        "checkpoint": lambda: _resumed(place),
    }
    graphs: dict[str, Case] = {
        f"gpt2 {precision} p {p}": lambda a=(precision, p): trained(  # type: ignore[misc]
            place, partial(text, "gpt2", place, 4, 512, 8, (4, 512), a[1]), a[0], not a[1], graphs=True
        )
        for precision, p in (("bf16", 0.0), ("bf16", 0.1), ("fp16", 0.0))
    }
    graphs["gpt2 medium"] = lambda: trained(place, partial(gpt2, 0.0), graphs=True)
    return {"attention": attention, "train": models, "rest": rest, "graphs": graphs}
