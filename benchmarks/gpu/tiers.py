"""Copies to the host and to disk whose streams are held up, and training at the edge of a hard limit of memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import paraplan as pp
from benchmarks.gpu.place import Place, median_ms, ratio, watching
from benchmarks.gpu.training import RATE, STEPS, eager_losses, text
from benchmarks.table import Case, Row
from paraplan.runtime.transport.tier_copies import Copier

HELD_CYCLES = 20_000_000
"""Of the device's clock: some ten milliseconds, longer than the kernels that might run ahead of a copy."""


@contextmanager
def held_up(place: Place) -> Iterator[None]:
    """Copies begin late, and memory that nothing was written to yet holds NaN: what is read too early is seen."""
    if not place.is_cuda:
        yield
        return
    side = Copier._side

    def late(self: Copier, way: str) -> Any:
        stream = side(self, way)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(HELD_CYCLES)
        return stream

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is allocated
    try:
        with patch.object(Copier, "_side", late):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def _steps(plan: pp.Plan, model: nn.Module, batch: Mapping[str, Tensor]) -> list[float]:
    trainer = plan.executable(copy.deepcopy(model))
    optimizer, losses = trainer.optimizer(torch.optim.AdamW, lr=RATE), []
    for _ in range(STEPS):
        losses.append(float(trainer.step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


PLACES: dict[str, dict[str, Any]] = {
    "states on host": {"offload_states": "host"},
    "all on host": {"offload_states": "all"},
    "all fetched": {"offload_states": "all-fetched"},
    "states on disk": {"offload_states": "disk"},
    "all on disk, gradients too": {"offload_states": "disk-all-grads"},
    "activations on host": {"offload": "host", "recompute": "none", "share": 0.6},
}


def copies(place: Place, where: str) -> Row:
    """A plan whose tensors wait elsewhere, copies held up, against the same model with everything on the device."""
    torch.manual_seed(0)
    model, batch = text("gpt2", place, 4, 512, 8, (4, 512), 0.0)
    options = dict(PLACES[where])
    share = options.pop("share", None)
    common: dict[str, Any] = {"example_inputs": batch, "precision": "fp32", "mesh": (1,), "microbatches": 1}
    kept = pp.compile(model.train(), place.cluster(), **common)
    if share is not None:
        options["memory"] = int(share * max(kept.prediction.peak_bytes))
    away = pp.compile(model, place.cluster(), **common, **options)
    wanted = _steps(kept, model, batch)
    with held_up(place):
        found = _steps(away, model, batch)
    error = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    return {
        "error": error,
        "note": f"tiers {away.prediction.tier_peak_bytes}",
        "failures": ([] if error < 1e-5 else [f"losses {found}, on the device {wanted}"])
        + ([] if any(away.prediction.tier_peak_bytes.values()) else ["nothing is kept elsewhere"]),
    }


SHARES = (1.0, 0.97, 0.94)
WORKSPACES = 64 << 20
"""Of cuBLAS, which no plan speaks of: 32 MiB for every handle and stream on Hopper, and as much for what is rounded."""


def limited(place: Place, share: float) -> Row:
    """A user's loop within a share of what the model takes without recomputation; more than that is refused by the
    allocator."""
    torch.manual_seed(0)
    model, batch = text("gpt2", place, 12, 768, 12, (4, 1024), 0.0, few=(8, 64))
    wanted = eager_losses(model.train(), batch, place, RATE)
    model = model.to(place.device)
    given = {name: x.to(place.device) for name, x in batch.items()}
    whole = pp.fit(model, given, memory=1 << 40).plan.prediction.peak_bytes[0]
    budget = int(share * whole)
    fitted = pp.fit(model, given, memory=budget)
    with place.alone():
        return _edge(place, fitted, budget, given, wanted)


def _edge(place: Place, fitted: Any, budget: int, given: Mapping[str, Tensor], wanted: list[float]) -> Row:
    """Steps of a fitted model, the device its own; what its allocator rounds up is allowed beyond the budget."""
    optimizer, losses = torch.optim.AdamW(fitted.parameters(), lr=RATE), []

    def step() -> None:
        loss = fitted(**given)
        loss = loss if isinstance(loss, Tensor) else loss["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    if place.is_cuda:
        place.forget()
        total = torch.cuda.get_device_properties(0).total_memory
        rounded = fitted.plan.prediction.reserved_bytes[0] - fitted.plan.prediction.peak_bytes[0]
        allowed = budget + max(rounded, 0) + WORKSPACES
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
    try:
        for _ in range(STEPS):
            step()
        with watching(place) as room:
            took = median_ms(step, place)
    finally:
        if place.is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
    said = fitted.plan.prediction
    error = max(abs(float(a) - b) / abs(b) for a, b in zip(losses, wanted, strict=False))
    return {
        "error": error,
        "ms": took,
        "predicted_ms": 1e3 * said.step_s,
        "time_ratio": ratio(took, 1e3 * said.step_s),
        "peak_ratio": ratio(room.peak_bytes, said.peak_bytes[0]),
        "reserved_ratio": ratio(room.reserved_bytes, max(said.reserved_bytes, default=0)),
        "failures": [] if error < 1e-3 else [f"losses differ from eager's by {error:.1e}"],
    }


def cases(place: Place) -> dict[str, dict[str, Case]]:
    """By part."""
    return {
        "copies": {where: lambda a=where: copies(place, a) for where in PLACES},
        "memory": {f"{share:.0%}": lambda a=share: limited(place, a) for share in SHARES},
    }
