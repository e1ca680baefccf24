"""A plan at the edge of memory trains under a hard limit of its peak and the stated reserve, and that limit bites."""

from __future__ import annotations

import pytest

from benchmarks.hard_limit import run_within, tight_plan

SEED = 9  # one rank, recomputing
REFUSALS = ("can't allocate memory", "could not create a primitive", "bad_alloc", "MemoryError")
"""How torch's allocator, oneDNN's scratch, C++ and Python say that there is no memory: who asks first is chance."""


def test_a_tight_plan_lives_within_its_peak_and_the_reserve(capfd: pytest.CaptureFixture[str]) -> None:
    plan, keeping, _ = tight_plan(SEED)
    (peak,) = plan.prediction.peak_bytes
    (group,) = plan.data.cluster.groups
    assert peak < keeping
    limit = peak + sum(each.nbytes for each in plan.data.cluster.reserves_of(group.device))
    assert limit <= group.device.memory_bytes
    code, used = run_within(plan, SEED, limit)
    assert code == 0 and peak < used <= limit
    code, _ = run_within(plan, SEED, used - peak)  # a reserve that is short by the plan's own bytes
    said = capfd.readouterr().err
    assert code and any(refusal in said for refusal in REFUSALS), said
