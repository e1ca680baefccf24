"""What an error says of plans that nearly fit: with that much memory there is one."""

from __future__ import annotations

import re

import pytest

from paraplan.ir.errors import SolverLimitError
from paraplan.planner.constraints import Constraints
from paraplan.planner.fits import search_room
from paraplan.planner.joint.bounding.relaxations import kept_bytes
from paraplan.planner.one_stage.nearest_plan import how_near
from paraplan.planner.search import find
from tests.captures import zoo_job


def test_a_plan_is_found_for_what_an_error_names() -> None:
    job = zoo_job("gpt2", 4)
    least = int(kept_bytes(job, False)) // 4 + 4096
    said = how_near(job, Constraints(memory_bytes=least), least, find)
    found = re.search(r"the leanest of 4 that .* needs ([\d.]+) (\w+), ([\d.]+) (\w+) more than the", said)
    assert found is not None, said
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    needed, over = (float(found[i]) * units[found[i + 1]] for i in (1, 3))
    assert needed - over == pytest.approx(least, rel=0.02)
    enough = int(needed * 1.01)
    plan = search_room(job, Constraints(memory_bytes=enough), 20.0, certify=False).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= enough
    assert how_near(job, Constraints(memory_bytes=enough), enough, find) == ""
    away = how_near(job, Constraints(memory_bytes=least // 4, offload="host"), least // 4, find)
    assert "states on host, parameters on host" in away and "offload=" not in away, away


def test_a_search_of_several_devices_that_finds_nothing_says_it() -> None:
    job = zoo_job("gpt2", 4)
    least = int(kept_bytes(job, False)) // 4 + 4096
    with pytest.raises(SolverLimitError, match=r"the leanest of 4 that .*offload='host'"):
        search_room(job, Constraints(memory_bytes=least), 2.0)
    with pytest.raises(SolverLimitError) as fault:
        search_room(job, Constraints(memory_bytes=least, pp=2), 2.0)
    assert "the leanest" not in str(fault.value)  # of pipelines none is known
