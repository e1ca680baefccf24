"""What is planned where nothing else was found: all sharded, all made again, in the most microbatches."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from paraplan.baselines.planners import choosing, plan_by
from paraplan.capture import capture
from paraplan.ir.errors import InfeasibleError, NoPlanError, SolverLimitError
from paraplan.planner import fits
from paraplan.planner.assemble import Job
from paraplan.planner.best_plan import BestPlan
from paraplan.planner.constraints import Constraints
from paraplan.planner.deadline import Deadline
from paraplan.planner.fits import search_room
from paraplan.planner.joint.bounding.relaxations import kept_bytes
from paraplan.planner.one_stage.all_sharded import all_sharded
from paraplan.planner.one_stage.least_memory import HARDLY, LeastMemory
from paraplan.planner.one_stage.roomier import needed_bytes
from paraplan.planner.search import find
from tests.captures import zoo_job

FREE = Constraints()


def pins_of(given: Constraints) -> list[tuple[Any, ...]]:
    words = ("dp", "tp", "sp", "zero", "microbatches", "recompute")
    return [tuple(getattr(pins, word) for word in words) for pins in all_sharded(zoo_job("gpt2", 4), given)]


def test_what_is_sharded_over_all_devices() -> None:
    rows = zoo_job("gpt2", 4).program.batch_size
    every = pins_of(FREE)
    degrees = [(4, None, False, 3, rows // 4), (1, 4, True, None, rows), (2, 2, True, 3, rows // 2)]
    assert every == [(*each, recompute) for each in degrees for recompute in ("full", "none")]
    assert pins_of(Constraints(tp=2)) == every[-2:]
    assert pins_of(Constraints(tp=2, recompute="full")) == every[-2:-1]
    assert pins_of(Constraints(dp=4, zero=1, microbatches=1)) == [(4, None, False, 1, 1, r) for r in ("full", "none")]
    assert pins_of(Constraints(mesh=(2, 2), recompute="none")) == [(None, None, False, None, rows, "none")]
    assert all(pins.pp == 1 for pins in all_sharded(zoo_job("gpt2", 4), FREE))
    assert not pins_of(Constraints(pp=2)) and not pins_of(Constraints(schedule="1f1b"))
    for away, params in ((Constraints(offload="host"), "host"), (Constraints(offload_states="host"), "device")):
        assert pins_of(away) == every
        held = {(pins.placing.states, pins.placing.params) for pins in all_sharded(zoo_job("gpt2", 4), away)}
        assert held == {("host", params)}, "what may leave the device does"
    whole = next(all_sharded(zoo_job("gpt2", 4), FREE))
    assert whole not in list(all_sharded(zoo_job("gpt2", 4), whole)), "it was searched"


@pytest.mark.parametrize(
    ("fits", "given", "room"),
    [(None, FREE, 1.0), (4, FREE, HARDLY), (4, Constraints(tp=4), 1.0), (2, Constraints(tp=2), 1.0), (3, FREE, 0.0)],
)
def test_what_room_is_told_at_once(fits: int | None, given: Constraints, room: float) -> None:
    """By the degree of tensor parallelism in which the leanest plan fits, if there is one."""
    job = zoo_job("gpt2", 4)
    whole = find(job, Constraints(dp=4, microbatches=1), certify=False)

    def searched(_: Job, pins: Constraints, *rest: object, **more: object) -> BestPlan:
        if pins.tp != fits:
            raise InfeasibleError("no")
        return whole

    assert LeastMemory(searched, job, Deadline(10.0), lambda _: None).room(given) == room
    assert LeastMemory(searched, job, Deadline(10.0), lambda _: None).room(Constraints(pp=2)) == 1.0, "none is known"


def test_a_search_that_found_nothing_falls_back_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late it is: two of them take a second or two. In fewer microbatches it is not looked for then."""
    find, asked = fits.find, list[Constraints]()

    def searched(job: Job, constraints: Constraints, *rest: Any, **more: Any) -> BestPlan:
        asked.append(constraints)
        if constraints.recompute is None:
            now[0] += 100.0
            raise SolverLimitError("nothing fits")
        return find(job, constraints, 60.0, certify=False)

    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(fits, "find", searched)
    found = search_room(zoo_job("gpt2", 4), FREE, 15.0).plan
    assert len(asked) == 3 and (asked[1].dp, asked[1].zero, asked[1].recompute) == (4, 3, "full")
    assert found.num_microbatches == zoo_job("gpt2", 4).program.batch_size // 4
    assert any("time limit of 15 s ran out" in note for note in found.notes)


class _Vocabulary(nn.Module):
    """Of which what the loss reads, made again, is most of what is held."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(1 << 14, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.tanh(self.hidden(self.words(ids))) @ self.words.weight.T
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_what_holds_more_for_being_made_again_is_kept() -> None:
    with torch.device("meta"):
        program = capture(_Vocabulary(), {"ids": torch.zeros(32, 64, dtype=torch.int64)}, precision="fp32")
    job = replace(zoo_job("gpt2", 4), program=program)

    def needed(recompute: str) -> int:
        (*_, pins) = (each for each in all_sharded(job, FREE) if each.recompute == recompute)
        return max(needed_bytes(find(job, pins, 10.0, certify=False).plan), 0)

    assert {each.recompute for each in all_sharded(job, FREE)} == {"full", "none"}
    assert needed("none") <= needed("full")


def test_a_plan_of_least_memory_takes_no_more_time_than_it_has_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made again where that fits, and microbatches are as few as fit."""
    with torch.device("meta"):
        program = capture(_Vocabulary(), {"ids": torch.zeros(32, 64, dtype=torch.int64)}, precision="fp32")
    job, asked = replace(zoo_job("gpt2", 4), program=program), list[tuple[Any, ...]]()

    def found(of: Job, pins: Constraints, *given: Any, **more: Any) -> BestPlan:
        if pins.recompute is None:
            raise SolverLimitError("nothing in time")
        made = find(of, pins, *given, **more)
        asked.append((pins.recompute, made.plan.num_microbatches, made.step_s))
        return made

    def peak(count: int) -> int:
        pins = Constraints(dp=4, zero=3, recompute="none", microbatches=count)
        return max(find(job, pins, 10.0, certify=False).plan.prediction.peak_bytes)

    monkeypatch.setattr(fits, "find", found)
    tight = Constraints(memory_bytes=peak(2), reserve_bytes=0)
    plan = search_room(job, tight, 30.0).plan
    assert asked[0][:2] == ("full", 8) and asked[1][:2] == ("none", 8)
    assert [each[:2] for each in asked[2:]] == [("none", 4), ("none", 2)] and plan.num_microbatches == 2
    assert plan.prediction.step_s == min(step_s for _, _, step_s in asked)


@pytest.mark.parametrize("made", [1, 2, 3])
def test_an_interrupt_gives_the_plan_of_least_memory_that_there_is(monkeypatch: pytest.MonkeyPatch, made: int) -> None:
    known: list[BestPlan] = []

    def found(of: Job, pins: Constraints, *given: Any, **more: Any) -> BestPlan:
        if pins.recompute is None:
            raise SolverLimitError("nothing in time")
        if len(known) == made:
            raise KeyboardInterrupt
        known.append(find(of, pins, *given, **more))
        return known[-1]

    monkeypatch.setattr(fits, "find", found)
    plan = search_room(zoo_job("gpt2", 4), FREE, 30.0).plan
    assert plan.prediction.step_s == min(each.step_s for each in known) and len(known) == made


@pytest.mark.parametrize("pins", [FREE, Constraints(pp=2), Constraints(dp=4, zero=0)])
def test_what_parameters_alone_leave_no_room_for_is_refused_before_any_search(pins: Constraints) -> None:
    job = zoo_job("gpt2", 4)
    each = kept_bytes(job, False) / 4
    tight = msgspec.structs.replace(pins, memory_bytes=int(0.9 * each))
    with pytest.raises(InfeasibleError, match=r"sharded over all 4 devices, take at least .* are missing"):
        search_room(job, tight, 15.0, lambda text: pytest.fail(text))
    with pytest.raises(NoPlanError) as fault:
        search_room(zoo_job("gpt2", 1), msgspec.structs.replace(FREE, memory_bytes=int(0.9 * each)), 1.0)
    assert "over all" not in str(fault.value) and "The least budget found to do" in str(fault.value)


def test_of_a_planner_s_tries_the_last_is_made_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those before it fits, and it holds least."""
    now, asked = [0.0], list[str | None]()

    def tried(task: Any, answer: Constraints) -> BestPlan:
        asked.append(answer.recompute)
        now[0] += 20.0
        raise SolverLimitError("it does not fit")

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(choosing, "plan_answer", tried)
    with pytest.raises(SolverLimitError, match="none of 2 tries fits"):
        plan_by("megatron-grid", zoo_job("gpt2", 4), FREE, 15.0)
    assert asked == ["none", "full"]
