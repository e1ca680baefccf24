"""Activations that wait on the host or on disk: the numbers of the single device, and exactly what was predicted."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import Instr, InstrKind, RankProgram, StepKind
from paraplan.ir.model.graph import refs
from paraplan.ir.plan import Plan
from paraplan.lowering.blocks.remat import RECOMPUTE, recomputable, remat_of
from paraplan.lowering.verification.verify_plan import verify_plan
from tests.whole.offloaded_values import PINS, case, kept, trained_as_one_device

FATES = {"host": ("host",), "disk": ("disk",), "mixed": ("host", "disk", "", RECOMPUTE, "host")}


def pinned(plan: Plan, fates: tuple[str, ...]) -> Plan:
    """The plan with the values its backward needs taking these fates in turn ("": kept)."""
    (stage,) = plan.stages
    choices = []
    for choice in stage.choices:
        names = recomputable(plan.program.kinds[choice.kind])
        drawn = {name: fates[index % len(fates)] for index, name in enumerate(names)}
        choices.append(
            msgspec.structs.replace(choice, activations={name: fate for name, fate in drawn.items() if fate})
        )
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=tuple(choices)),))


def copies(program: RankProgram) -> list[tuple[str, str]]:
    """(what, tier) of every copy, in the order they are issued."""
    blocks = [program.blocks[step.block] for step in program.steps if step.kind is StepKind.CALL]
    return [(instr.target, instr.tier) for block in blocks for instr in block.instrs if instr.kind is InstrKind.COPY]


@pytest.mark.parametrize("fates", FATES)
@pytest.mark.parametrize("pin", PINS)
@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_equal_and_as_predicted(name: str, pin: str, fates: str) -> None:
    given, plan = case(name), pinned(kept(name, pin), FATES[fates])
    programs = verify_plan(plan)
    simulation = simulate_plan(plan, programs)
    found = copies(programs[0])
    assert {tier for _, tier in found} == set(FATES[fates]) - {"", RECOMPUTE}
    assert found.count(("prefetch", "host")) == found.count(("offload", "host"))
    trainer = trained_as_one_device(plan, programs, given)
    for rank in range(2):
        assert [entry.key for entry in trainer.entries(rank)] == [entry.key for entry in entries(programs[0])]
        assert 1.0 <= simulation.peak_bytes[0] / trainer.peak_bytes(rank) <= 1.001
        assert trainer.tier_peak_bytes(rank) == simulation.tier_peak_bytes != {}


def test_the_step_keeps_less_on_the_device() -> None:
    plan = kept("gpt2", "zero3")
    peaks = {
        fate: simulate_plan(made, verify_plan(made)).peak_bytes[0]
        for fate, made in {"": plan, **{fate: pinned(plan, (fate,)) for fate in ("host", RECOMPUTE)}}.items()
    }
    assert peaks["host"] < peaks[""] and peaks[RECOMPUTE] < peaks[""]


def test_copies_are_issued_early_and_waited_for_late() -> None:
    (program,) = verify_plan(pinned(kept("gpt2", "tp"), ("host",)))
    calls = [step for step in program.steps if step.kind is StepKind.CALL and step.segment >= 0]
    forward = [index for index, step in enumerate(calls) if step.block.endswith(".F")]
    for before, now in itertools.pairwise(forward):
        if any(instr.target == "offload" for instr in program.blocks[calls[before].block].instrs):
            following = calls[now + 1]
            assert (following.block[:4], following.segment) == ("away", calls[before].segment), "a segment later"
    for index, step in enumerate(calls):
        if step.block.startswith("back"):
            behind = next(later for later in calls[index + 1 :] if later.block.endswith(".B"))
            assert behind.segment in (step.segment, step.segment + 1), "one segment ahead, or the first of all"
    for name, block in program.blocks.items():
        issued = [at for at, instr in enumerate(block.instrs) if instr.target == "offload"]
        for at in issued:
            source = str(block.instrs[at].args[0])[1:]
            made = next(i for i, instr in enumerate(block.instrs) if source in instr.outs)
            assert all(block.instrs[i].issues for i in range(made + 1, at)), name
        waits = [i for i in block.instrs if i.kind is InstrKind.WAIT and i.axis < 0 and name.endswith(".B")]
        for wait in waits:
            after = block.instrs[block.instrs.index(wait) + 1 :]
            reader = next(i for i, instr in enumerate(after) if f"%{wait.outs[0]}" in refs_of(instr))
            assert all(instr.kind is InstrKind.WAIT or instr.issues for instr in after[:reader]), "not too early"


def refs_of(instr: Instr) -> set[str]:
    return {f"%{name}" for name in refs((instr.args, tuple(instr.kwargs.values())))}


def test_a_fate_that_does_not_exist_is_refused() -> None:
    kind = next(kind for kind in case("mlp").program.kinds if recomputable(kind))
    name = recomputable(kind)[0]
    with pytest.raises(InvalidPlanError, match=r"is 'tape'; it can be 'recompute', 'rerun', 'host', 'disk'"):
        remat_of(kind, {name: "tape"})
