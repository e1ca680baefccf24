"""What the host spends on a step, single kernels beside torch's own, profiles, and NCCL with one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan as pp
from benchmarks.gpu import attentions
from benchmarks.gpu.place import Place, busy, median_ms, ratio
from benchmarks.gpu.training import RATE, Batch, eager_ms, text
from benchmarks.table import Case, Row
from paraplan.capture import capture
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.jobs.measuring.measure import launch_s
from paraplan.jobs.measuring.profile_ops import profile_program
from paraplan.runtime.executing import instructions, targets
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS


def _steps_of(plan: pp.Plan, model: nn.Module, batch: Batch) -> Callable[[], None]:
    """What takes a training step under a plan."""
    trainer = plan.executable(model)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=RATE)

    def step() -> None:
        trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def per_instruction(place: Place) -> Row:
    """A step of a model so small that the device waits for the host: ours beside eager's."""
    tiny = Place(place.device, True)
    torch.manual_seed(0)
    model, batch = text("gpt2", tiny, 2, 32, 4, (2, 16), 0.0)
    plan = pp.compile(model.train(), place.cluster(), example_inputs=batch, mesh=(1,), microbatches=1)
    count = sum(len(plan.programs[0].blocks[each.block].instrs) for each in plan.programs[0].steps if each.block)
    with place.alone():
        alone_us = 1e6 * launch_s(place.device)
        step = _steps_of(plan, model, batch)
        ours = median_ms(step, place, 30)
        device_ms, host_ms, _ = busy(step, place)
        theirs = eager_ms(model, batch, place, "fp32")
    return {
        "ms": ours,
        "device_ms": device_ms,
        "host_ms": host_ms,
        "reference_ms": theirs,
        "note": f"{count} instructions, {1e3 * ours / count:.1f} us each; one of torch's in a loop {alone_us:.1f} us",
        "failures": [],
    }


def _ours(place: Place, target: str, kernel: str) -> Callable[..., Any]:
    return targets.resolve(target, kernel if place.is_cuda else "")


def _kernel_cases(place: Place) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Ours and torch's, by name."""
    rows, columns = (16, 64) if place.small else (8192, 4096)
    vocabulary = 128 if place.small else 128256
    half = torch.bfloat16
    x = torch.randn(rows, columns, device=place.device, dtype=half)
    w, seed = torch.ones(columns, device=place.device, dtype=half), torch.tensor(7, device=place.device)
    logits = torch.randn(rows // 4, vocabulary, device=place.device, dtype=half)
    labels = torch.randint(0, vocabulary, (rows // 4,), device=place.device)
    drop = _ours(place, "paraplan.dropout", "triton")
    rms = _ours(place, "paraplan.rms_norm", "fused")
    top, total, picked, loss = (_ours(place, f"paraplan.ce_{n}", "triton") for n in ("max", "sumexp", "target", "loss"))

    def cross_entropy() -> Tensor:
        m = top(logits, -1, 0)
        s = total(logits, m, -1, 0)
        t = picked(logits, labels, -100, 0, vocabulary)
        return loss(m, s, t, labels, -100)  # type: ignore[no-any-return]

    return {
        "dropout": (lambda: drop(x, seed, 0.1, 3, (rows, columns), (0, 0)), lambda: F.dropout(x, 0.1)),
        "rms norm": (lambda: rms(x, 1, w, 1e-5), lambda: F.rms_norm(x, (columns,), w, 1e-5)),
        "cross-entropy": (cross_entropy, lambda: F.cross_entropy(logits, labels, reduction="sum")),
    }


def kernel(place: Place, name: str) -> Row:
    """One kernel beside torch's."""
    mine, theirs = _kernel_cases(place)[name]
    with place.alone():
        ours, reference = median_ms(mine, place, 30), median_ms(theirs, place, 30)
    return {"ms": ours, "reference_ms": reference, "failures": []}


def profiled(place: Place) -> Row:
    """Ops measured, a plan made of them, and twenty of its steps."""
    torch.manual_seed(0)
    model, batch = text("gpt2", place, 4, 1024, 16, (4, 1024), 0.0)
    precision = "fp32" if place.small else "bf16"
    program = capture(model.train(), batch, precision=precision)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        with place.alone():
            done = profile_program(program, path, device=place.device, ways=1)
        plan = pp.compile(
            model,
            place.cluster(),
            example_inputs=batch,
            precision=precision,
            mesh=(1,),
            microbatches=1,
            profile=path,
            profile_any=True,
        )
    with place.alone():
        took, said = median_ms(_steps_of(plan, model, batch), place, 20), 1e3 * plan.prediction.step_s
    failures = [f"{op}: {why}" for op, why in done.failed.items()]
    note = f"{done.measured} shapes; interpolation " + ", ".join(
        f"{kind} {error.median:.0%}" for kind, error in done.errors.items()
    )
    return {"ms": took, "predicted_ms": said, "time_ratio": ratio(took, said), "note": note, "failures": failures}


def collective(place: Place, name: str) -> Row:
    """A collective of one rank gives what it was given, and the program's stream waits for it."""
    backend = "nccl" if place.is_cuda else "gloo"
    joined = dist.is_initialized()
    if not joined:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        wrong = 0
        for _ in range(8):
            x = torch.randn(64 if place.small else 1 << 22, device=place.device)
            if place.is_cuda:
                torch.cuda._sleep(20_000_000)
            wanted = x * 2
            found = IMPLEMENTATIONS[name].start(x * 2, COLLECTIVES[name].reduction, 1, str(group.group_name))
            found = instructions.wait_holding(found)
            wrong += not torch.equal(found, wanted)
    finally:
        if not joined:
            dist.destroy_process_group()
    return {"failures": [f"{wrong} of 8 results differ"] if wrong else []}


def cases(place: Place) -> dict[str, dict[str, Case]]:
    """By part."""
    return {
        "host": {"per instruction": partial(per_instruction, place)},
        "speed": {name: partial(kernel, place, name) for name in ("dropout", "rms norm", "cross-entropy")}
        | attentions.speeds(place),
        "profile": {"gpt2": partial(profiled, place)},
        "nccl": {name: partial(collective, place, name) for name, record in COLLECTIVES.items() if not record.uneven},
    }
