"""The modelled time of ops beside the measured one, at the sizes of large models and at local shapes of their parts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.place import Place, median_ms
from benchmarks.table import Case, Row
from examples.models.resnet import ResNet, images
from paraplan.capture import capture
from paraplan.cost_models.ops.roofline import op_time_s, work_of
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.jobs.measuring.local_ops import LocalOp, families
from paraplan.jobs.measuring.measure_ops import measure_op
from paraplan.jobs.models import hf_batch, hf_model

WAYS, SAMPLED = 8, 160
"""Devices of the largest mesh whose local shapes are drawn from, and how many of those are measured."""
TOLD_FROM = 20e-6
"""Seconds: shorter ops are left out of a row's worst ones, where what a launch takes decides."""

MODELS: dict[str, tuple[str, str, tuple[int, int], dict[str, Any]]] = {
    "llama 8b": (
        "llama",
        "bf16",
        (1, 8192),
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "num_hidden_layers": 1,
            "max_position_embeddings": 8192,
        },
    ),
    "gpt3 175b": (
        "gpt2",
        "bf16",
        (1, 2048),
        {"n_embd": 12288, "n_head": 96, "n_layer": 1, "vocab_size": 51200, "n_positions": 2048},
    ),
    "mixtral": (
        "mixtral",
        "bf16",
        (1, 4096),
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "num_hidden_layers": 1,
            "num_local_experts": 8,
            "output_router_logits": False,  # some versions of transformers count tokens by data
        },
    ),
}
MODELS["llama 8b fp8"] = ("llama", "fp8", *MODELS["llama 8b"][2:])
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
_SMALLER = {"llama": _SMALL, "mixtral": _SMALL, "gpt2": {"n_embd": 64, "n_head": 4, "vocab_size": 128}}


def language(small: bool, name: str) -> Program:
    """One layer of a model of `MODELS`, or a small one."""
    kind, precision, tokens, settings = MODELS[name]
    if small:
        settings, tokens = settings | _SMALLER[kind], (1, 32)
    model = hf_model(kind, settings, meta=True)
    return capture(model, hf_batch(model, *tokens), precision=precision)


def convolutions(small: bool) -> Program:
    """A ResNet-50, or a small one."""
    if small:
        return capture(ResNet((1, 1, 1, 1), 8, 16), images(2, 32, 16))
    with torch.device("meta"):
        model = ResNet((1, 1, 1, 1))
    return capture(model, images(64, 224, 1000), precision="bf16")


def chosen(program: Program, cluster: ClusterSpec, small: bool) -> list[LocalOp]:
    """All ops of one device, and some drawn from the local shapes of larger meshes."""
    parts = families(program, cluster, OPTIMIZERS["adamw"], WAYS)
    alone, *others = ({op.full_key: op for op in part.make()} for part in parts)
    rest = {key: op for part in others for key, op in part.items() if key not in alone}
    drawn = random.Random(0).sample(sorted(rest), min(len(rest), 8 if small else SAMPLED))
    return [*alone.values(), *(rest[key] for key in drawn)]


def compared(place: Place, make: Callable[[bool], Program]) -> list[Row]:
    """A row per kind of op, and one of all: measured and modelled sums, the median of their quotient, the worst ops.

    `points` has every op: its full key, its name, both times in seconds and the bytes it allocated inside.
    """
    device = place.cluster().groups[0].device
    kinds: dict[str, list[tuple[str, str, float, float, int]]] = defaultdict(list)
    failures = []
    program = make(place.small)
    with place.alone():
        for op in chosen(program, place.cluster(), place.small):
            work = work_of(op.target, op.flag, op.inputs, op.outputs)
            if work.kind == "view":
                continue
            try:
                made = measure_op(op, place.device)
            except Exception as fault:  # noqa: BLE001  (told; Triton has kinds of its own)
                failures.append(f"{op.target}: {type(fault).__name__}: {str(fault)[:100]}")
                continue
            kinds[f"{work.kind} {work.dtype}"].append(
                (op.full_key, op.target, made.seconds, op_time_s(work, device), made.workspace_bytes)
            )
    rows: list[Row] = []
    for kind, found in sorted(kinds.items()):
        off = sorted(
            ((took / said, target) for _, target, took, said, _ in found if took > TOLD_FROM), key=lambda each: each[0]
        )
        worst = off[:2] + off[-2:] if len(off) > 4 else off
        rows.append(
            {
                "kind": kind,
                "ms": 1e3 * sum(took for *_, took, _, _ in found),
                "predicted_ms": 1e3 * sum(said for *_, said, _ in found),
                "time_ratio": sum(took for *_, took, _, _ in found) / sum(said for *_, said, _ in found),
                "note": f"{kind}: {len(found)} ops, median {median(took / said for *_, took, said, _ in found):.2f}; "
                + ", ".join(f"{target} {ratio:.2f}" for ratio, target in worst),
                "points": found,
                "failures": sorted(set(failures))[:8] if not rows else [],
            }
        )
    return rows


COPIED = 256 << 20


def copied(place: Place) -> list[Row]:
    """Copies of 256 MiB to pinned host memory and back, alone and both ways at once, beside the link's rate."""
    count = 1 << 16 if place.small else COPIED
    link = place.cluster().groups[0].host
    here = [torch.zeros(count, dtype=torch.uint8, device=place.device) for _ in range(2)]
    there = [torch.zeros(count, dtype=torch.uint8, pin_memory=place.is_cuda) for _ in range(2)]
    side = torch.cuda.Stream() if place.is_cuda else None

    def out() -> None:
        there[0].copy_(here[0], non_blocking=True)

    def back() -> None:
        here[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        out()
        with torch.cuda.stream(side):
            back()

    said = 1e3 * count / link.bytes_per_s
    rows: list[Row] = []
    with place.alone():
        for name, call in (("out", out), ("back", back), ("both", both)):
            took = median_ms(call, place)
            rows.append({"ms": took, "predicted_ms": said, "time_ratio": took / said, "note": f"{name}: {link}"[:80]})
    return [{**row, "failures": []} for row in rows]


def programs() -> dict[str, Callable[[bool], Program]]:
    """What is measured, by name; small ones where they are asked for so."""
    made: dict[str, Callable[[bool], Program]] = {name: partial(language, name=name) for name in MODELS}
    return made | {"resnet": convolutions}


def cases(place: Place) -> dict[str, dict[str, Case]]:
    """By part."""
    made = programs()
    return {
        "ops": {name: partial(compared, place, make) for name, make in made.items()}
        | {"host link": partial(copied, place)}
    }
