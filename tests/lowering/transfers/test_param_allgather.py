"""Large parameters gathered a segment ahead: the same numbers, beside the segment before, no more than two at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from paraplan.cost_models.realised_plan import realised
from paraplan.ir.execution.rank_program import InstrKind, RankProgram
from paraplan.ir.plan import Plan
from paraplan.ir.process.memo import release_caches
from paraplan.ir.step_options import ROOMY
from paraplan.lowering.blocks import bundle
from paraplan.lowering.rank_classes import lower_anew
from paraplan.planner.assemble import decided
from paraplan.planner.constraints import Constraints
from paraplan.planner.evaluate_plan import as_decided, realise
from paraplan.planner.search import search
from tests.lowering.lockstep import run_plan


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every parameter is; plans lowered before, when not every one was, are forgotten, and so are these."""
    monkeypatch.setattr(bundle, "SMALL_BYTES", 0)
    release_caches()
    yield
    release_caches()


def planned(tiny, microbatches: int = 1) -> Plan:  # type: ignore[no-untyped-def]
    found = search(tiny.job(2), Constraints(dp=2, zero=3, microbatches=microbatches)).plan
    return msgspec.structs.replace(found, reduce_every=1)


def gathers(program: RankProgram, step: int) -> bool:
    """Whether a step issues gathers."""
    block = program.blocks.get(program.steps[step].block)
    return block is not None and any(i.kind is InstrKind.COLLECTIVE and i.target == "all_gather" for i in block.instrs)


def calls(program: RankProgram, action: str) -> list[int]:
    return [i for i, step in enumerate(program.steps) if step.segment >= 0 and step.block and step.action == action]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_beside_the_segment_before(tiny_gpt2, microbatches: int) -> None:  # type: ignore[no-untyped-def]
    plan = planned(tiny_gpt2, microbatches)
    here, ahead = (msgspec.structs.replace(plan, params_ahead=each) for each in (False, True))
    for each in (here, ahead):
        assert tiny_gpt2.worst_error(*run_plan(each, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9
    inside, before = lower_anew(here)[0], lower_anew(ahead)[0]
    for action in ("0F0", "0B0"):
        assert any(gathers(inside, step) for step in calls(inside, action))
        run = calls(before, action)
        assert not any(gathers(before, step) for step in run)
        for number, at in enumerate(run):
            for name in before.steps[at].args:
                made = [
                    i for i, step in enumerate(before.steps) if name in step.outs and step.block.startswith("gather")
                ]
                if not made or made[-1] > at:
                    continue
                arrived = max(i for i in made if i < at)
                issued = max(
                    i
                    for i, step in enumerate(before.steps[:arrived])
                    if step.block == before.steps[arrived].block + ".issue"
                    and set(step.outs) & set(before.steps[arrived].args)
                )
                assert number == 0 or (issued < run[number - 1] < arrived < at), "beside the segment before"
                assert number < 2 or issued > run[number - 2], "and not before that"


def test_what_is_held(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    """At most the parameters of the segment that follows, and not more than there is room for."""
    plan, job = planned(tiny_gpt2), tiny_gpt2.job(2)
    decisions = replace(decided(plan, plan.stages[0].mesh), options=ROOMY)
    options = [ROOMY.but(params_ahead=each) for each in (False, True)]
    here, ahead = (as_decided(job, replace(decisions, options=each)) for each in options)
    assert ahead.simulation.step_s < here.simulation.step_s
    widest = max(
        sum(plan.program.params[name].spec.nbytes for name in segment.params) for segment in plan.program.segments
    )
    assert here.peak_bytes < ahead.peak_bytes <= here.peak_bytes + widest
    assert realise(job, decisions, ahead.peak_bytes).plan.params_ahead
    tight = realise(job, decisions, ahead.peak_bytes - 1)
    assert not tight.plan.params_ahead and tight.peak_bytes < ahead.peak_bytes


def test_a_pipeline_without_room_for_it(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    """Where no plan fits with parameters gathered ahead, one that gathers them where they are read may."""
    pins = Constraints(pp=2, dp=2, zero=3, microbatches=4, schedule="1f1b", recompute="none", reserve_bytes=0)
    roomy = search(tiny_gpt2.job(4), pins).plan
    assert roomy.params_ahead
    here = realised(msgspec.structs.replace(roomy, params_ahead=False))
    assert here.peak_bytes < max(roomy.prediction.peak_bytes)
    less = here.peak_bytes
    while (tight := search(tiny_gpt2.job(4), msgspec.structs.replace(pins, memory_bytes=less)).plan).params_ahead:
        less = max(tight.prediction.peak_bytes) - 1
    assert max(tight.prediction.peak_bytes) <= less
