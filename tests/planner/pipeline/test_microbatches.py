"""How many microbatches a search tries: every divisor of a replica's batch, before it says that nothing fits."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.pipeline.microbatches import most_first
from paraplan.planner.search import search
from tests.runtime.pipelines import job_of


class Deep(nn.Module):
    """Small parameters, large activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x.square().mean()


@cache
def program(rows: int) -> Program:
    with torch.device("meta"):
        return capture(Deep(), {"x": torch.randn(rows, 256, 16)})


def job(rows: int, devices: int) -> Job:
    return job_of(program(rows), devices, "adamw")


def planned(rows: int, devices: int, **pins: object) -> Plan:
    constraints = msgspec.convert({"recompute": "none", **pins}, Constraints)
    return search(job(rows, devices), constraints, certify=False).plan


def peak(plan: Plan) -> int:
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes)


@pytest.mark.parametrize(
    ("rows", "devices", "pins", "most", "usual"),
    [
        (7, 1, {}, 7, 1),
        (18, 2, {"dp": 2}, 9, 1),
        (18, 2, {"dp": 2, "zero": 3}, 9, 1),
        (12, 2, {"pp": 2, "schedule": "1f1b"}, 12, 4),
        (9, 2, {"pp": 2, "schedule": "1f1b"}, 9, 1),
    ],
)
def test_counts_that_are_no_powers_of_two_are_tried(
    rows: int, devices: int, pins: dict[str, object], most: int, usual: int
) -> None:
    lean, fat = (peak(planned(rows, devices, microbatches=count, **pins)) for count in (most, usual))
    assert lean < fat
    found = planned(rows, devices, memory_bytes=lean, **pins)
    assert peak(found) <= lean and found.num_microbatches == most
    with pytest.raises((InfeasibleError, SolverLimitError), match=rf"microbatches.*\b{most}\b"):
        planned(rows, devices, memory_bytes=lean // 2, **pins)


def test_fewest_that_fit_are_found() -> None:
    """Of 18 rows: 3, 6, 9 and 18 beside 1 and 2; where 2 are too few and 3 do, not 18."""
    at = {count: peak(planned(18, 1, microbatches=count)) for count in (2, 3, 18)}
    assert at[18] < at[3] < at[2]
    assert planned(18, 1, memory_bytes=at[3]).num_microbatches == 3


def test_what_is_needed_is_said_of_the_leanest_try() -> None:
    least = peak(planned(9, 1, microbatches=9))
    with pytest.raises(InfeasibleError, match=r"So it is in 9 microbatches; tried in vain: 1, 3, 9"):
        planned(9, 1, memory_bytes=least // 4)


def test_the_most_come_first_and_then_the_fewest() -> None:
    for fits, beyond, order in (
        ({3, 6, 9, 18}, 2, [18, 3]),
        ({18}, 2, [18, 3, 6, 9]),
        ({9, 18}, 3, [18, 6, 9]),
        ({6}, 2, [18, 9, 6]),
        (set[int](), 2, [18, 9, 6, 3]),
    ):
        asked: list[int] = []

        def tried(count: int, asked: list[int] = asked, fits: set[int] = fits) -> list[int]:
            asked.append(count)
            return [count] if count in fits else []

        found = most_first([3, 6, 9, 18], beyond, tried)
        assert asked == order and set(found) <= fits and bool(found) == bool(fits)
    assert most_first([], 1, lambda count: [count]) == []
