"""What a search tried is kept in the plan: few records, in its file, and old files are as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.plan import MOST_TRIED, Tried
from paraplan.ir.struct import from_json
from paraplan.jobs.files import EDITED, decode_plan, encode_plan
from paraplan.planner.alternatives.replan import constraints_of, family_of, job_of
from paraplan.planner.alternatives.tried import in_vain, kept, unreserved
from paraplan.planner.constraints import Constraints


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def plan() -> pp.Plan:
    return pp.compile(Net(), "local:2", example_inputs=(torch.zeros(8, 8),), time_limit_s=10.0)


def test_what_was_tried_is_in_the_plan_the_fastest_first(plan: pp.Plan) -> None:
    steps = [each.step_s for each in plan.data.tried if each.step_s is not None]
    assert len(steps) > 1 and steps == sorted(steps)
    assert plan.data.prediction is not None and steps[0] == pytest.approx(plan.data.prediction.step_s)
    assert len({each.what for each in plan.data.tried}) == len(plan.data.tried) <= MOST_TRIED
    assert {"dp=2 zero=1", "one stage"} <= {each.what for each in plan.data.tried}


def test_a_record_says_what_to_pin_to_come_to_it(plan: pp.Plan) -> None:
    usual = {each.what: each for each in plan.data.tried}["dp=2 zero=1"]
    assert usual.pins == {"dp": 2, "zero": 1, "recompute": "none"}
    again = pp.compile(Net(), "local:2", example_inputs=(torch.zeros(8, 8),), pp=1, **usual.pins)
    assert again.prediction.step_s == pytest.approx(usual.step_s)
    taken = msgspec.structs.replace(plan.data, tried=(msgspec.structs.replace(usual, step_s=_step_s(plan)),))
    assert family_of(taken) == Constraints(dp=2, zero=1)
    assert family_of(msgspec.structs.replace(plan.data, tried=())) == Constraints(pp=1, mesh=(2,))


def _step_s(plan: pp.Plan) -> float:
    return plan.prediction.step_s


def test_meshes_of_one_stage_are_records_too() -> None:
    plan = pp.compile(Net(), "local:4", example_inputs=(torch.zeros(8, 8),), pp=1).data
    assert [each.what for each in plan.tried if "axis0=2 axis1=2" in each.what]


def test_a_file_keeps_them_and_what_was_pinned(plan: pp.Plan, tmp_path: Path) -> None:
    pinned = pp.compile(Net(), "local:2", example_inputs=(torch.zeros(8, 8),), dp=2, memory="1GiB").data
    assert pinned.pins == {"dp": 2, "memory_bytes": 1 << 30}
    assert constraints_of(pinned) == Constraints(dp=2, memory_bytes=1 << 30)
    for data in (plan.data, pinned):
        loaded = decode_plan(encode_plan(data), "a file")
        assert loaded == data


def test_files_from_before_there_were_records_are_the_same_bytes(plan: pp.Plan) -> None:
    """Neither field is there, the digest is of what is, and the prediction is taken as it stands."""
    old = msgspec.structs.replace(plan.data, tried=(), pins={})
    written = encode_plan(old)
    assert not {"tried", "pins"} & set(json.loads(written))
    loaded = decode_plan(written, "a file")
    assert loaded == old and EDITED not in loaded.notes
    assert constraints_of(loaded) == Constraints() and job_of(loaded).program == plan.data.program


def test_a_file_may_not_have_endless_records(plan: pp.Plan) -> None:
    many = msgspec.structs.replace(plan.data, tried=(Tried(what="x", step_s=1.0),) * (MOST_TRIED + 1))
    with pytest.raises(InvalidPlanError, match=r"length <= 24.*tried"):
        decode_plan(encode_plan(many), "a file")


def test_edited_records_are_refused(plan: pp.Plan) -> None:
    bad = Tried(what="x", step_s=_step_s(plan), pins={"dp": "two"})
    with pytest.raises(InvalidPlanError, match="the plan's pins are none"):
        family_of(msgspec.structs.replace(plan.data, tried=(bad,)))


@pytest.mark.parametrize("pins", [{"dp": "two"}, {"nonsense": 1}, {"dp": -1}, {"place_states": "the moon"}])
def test_edited_pins_are_refused(plan: pp.Plan, pins: dict[str, object]) -> None:
    with pytest.raises(InvalidPlanError, match="the plan's pins are none"):
        constraints_of(msgspec.structs.replace(plan.data, pins=pins))


ALTERED: list[tuple[dict[str, Any], str]] = [
    ({"pins": {"memory_bytes": "x"}}, r"the plan's pins are none.*pins\.memory_bytes"),
    ({"pins": {"dp": 2, "foo": 1}}, r"the plan's pins are none.*unknown field `foo`"),
    ({"tried": [{"what": "x", "pins": {"dp": "two"}}]}, r"the plan's tried\[0\]\.pins are none.*tried\[0\]\.pins\.dp"),
]


@pytest.mark.parametrize(("change", "says"), ALTERED)
def test_files_with_edited_pins_are_refused_as_they_are_read(
    plan: pp.Plan, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(InvalidPlanError, match=says):
        pp.Plan.load(tmp_path / "plan.json")


def test_pins_are_data_and_back() -> None:
    asked = Constraints(mesh=[2, 4], pp=2, stages=[(0, 3), (3, 6)], params={"a": "R/R/R"}, memory_bytes="2GiB")  # type: ignore[arg-type]
    data = asked.as_data
    assert set(data) == {"mesh", "pp", "stages", "params", "memory_bytes"}
    assert msgspec.convert(json.loads(json.dumps(data)), Constraints) == asked
    assert from_json(msgspec.json.encode(data), Constraints, "pins", InvalidPlanError) == asked
    assert not Constraints().as_data


def test_what_allocators_have_no_room_for_says_so(plan: pp.Plan) -> None:
    """Of a search by the bytes alive: its plan is over, what is faster than the plan taken was not looked at."""
    least, second, *_ = sorted({each.step_s for each in plan.data.tried if each.step_s is not None})
    found = {each.step_s: each.why for each in unreserved(plan.data, 1.001 * second)}
    assert found[least].endswith("is over the budget") and found[second].endswith("was not looked at")
    assert not any(why for step_s, why in found.items() if step_s is not None and step_s > 1.001 * second)
    (alone,) = unreserved(msgspec.structs.replace(plan.data, tried=()), 1.0)
    assert alone.step_s == least and alone.why == found[least]


def test_the_slowest_and_what_gave_nothing_go_first_where_there_are_too_many() -> None:
    many = [Tried(what=str(at), step_s=float(at)) for at in reversed(range(30))]
    found = kept([in_vain("none", "x" * 1000), *many, Tried(what="0", step_s=0.5)])
    assert [each.step_s for each in found] == [0.5, *map(float, range(1, MOST_TRIED))]
    assert len(in_vain("none", "x" * 1000).why) == 200
    assert kept([many[0]]) == ()
