"""What an error says of plans that nearly fit: with that much memory there is one."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import with_reserved
from paraplan.ir.errors import InfeasibleError, SolverLimitError
from paraplan.ir.plan import Plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.fits import search_room
from paraplan.planner.joint.bounding.relaxations import kept_bytes
from paraplan.planner.one_stage import nearest_plan
from paraplan.planner.one_stage.nearest_plan import _reserved_within, how_near
from paraplan.planner.one_stage.roomier import needed_bytes
from paraplan.planner.schedules.full_rounds import programs_of
from paraplan.planner.search import find, search
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


def test_what_is_proved_not_to_fit_names_what_does() -> None:
    job = zoo_job("gpt2", 4)
    with pytest.raises(InfeasibleError, match=r"at least .* are missing .*would do with [\d.]+ \w+$") as fault:
        search_room(job, Constraints(memory_bytes=int(kept_bytes(job, False)) // 8), 2.0)
    number, unit = str(fault.value).rsplit(" ", 2)[1:]
    enough = int(1.01 * float(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit])
    plan = search_room(job, Constraints(memory_bytes=enough), 20.0, certify=False).plan
    assert plan.prediction is not None and max(plan.prediction.peak_bytes) <= enough


@pytest.mark.parametrize("budget", [6 << 20, 24 << 20])
def test_what_allocators_need_is_enough_for_them(budget: int) -> None:
    """What they give back as they come to a limit hangs on the limit: more of it may be needed within more."""
    job = replace(zoo_job("gpt2", 4), cluster=parse_cluster("4xH100"))
    plan = search(job, Constraints(dp=4, zero=3, pp=1), certify=False).plan
    programs = programs_of(plan)
    needed = needed_bytes(_reserved_within(plan, budget))
    assert needed <= budget or needed_bytes(with_reserved(plan, programs, needed)) <= needed


def test_a_number_that_holds_for_another_limit_alone_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def reserved(plan: Plan, programs: object, room: int) -> Plan:
        asked.append(room)
        taken = {10: 24, 24: 30, 30: 28}.get(room, room)
        assert plan.prediction is not None
        prediction = msgspec.structs.replace(plan.prediction, reserved_bytes=(taken,))
        return msgspec.structs.replace(plan, prediction=prediction)

    monkeypatch.setattr(nearest_plan, "with_reserved", reserved)
    plan = search(zoo_job("gpt2", 4), Constraints(dp=4, pp=1), certify=False).plan
    assert needed_bytes(_reserved_within(plan, 10)) == 28 and asked == [10, 24, 30]


def test_a_search_of_several_devices_that_finds_nothing_says_it() -> None:
    job = zoo_job("gpt2", 4)
    least = int(kept_bytes(job, False)) // 4 + 4096
    with pytest.raises(SolverLimitError, match=r"the leanest of 4 that .*offload='host'"):
        search_room(job, Constraints(memory_bytes=least), 2.0)
    with pytest.raises(SolverLimitError) as fault:
        search_room(job, Constraints(memory_bytes=least, pp=2), 2.0)
    assert "the leanest" not in str(fault.value)  # of pipelines none is known
