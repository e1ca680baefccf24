"""Recomputation in the lowering: what is saved, what is executed again and where, and what is refused."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.rank_program import Block, InstrKind
from paraplan.ir.model.graph import Phase
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.blocks.remat import RECOMPUTE, read_by_backward, recomputable, remat_of
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.lowering.lockstep import run_plan


@pytest.fixture(scope="module")
def plan(tiny_gpt2) -> Plan:  # type: ignore[no-untyped-def]
    return search(tiny_gpt2.job(2), Constraints(tp=2), certify=False).plan


def recomputing(plan: Plan, share: int) -> Plan:
    """The plan with every `share`-th value made again."""
    (stage,) = plan.stages
    choices = tuple(
        msgspec.structs.replace(
            choice, activations=dict.fromkeys(recomputable(plan.program.kinds[choice.kind])[::share], RECOMPUTE)
        )
        for choice in stage.choices
    )
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=choices),))


def origins(block: Block) -> list[int]:
    return [i.origin for i in block.instrs if i.kind is InstrKind.OP and not i.layout_change and i.origin >= 0]


@pytest.mark.parametrize("share", [1, 2, 3])
def test_ops_are_executed_again_once_and_just_in_time(plan: Plan, tiny_gpt2, share: int) -> None:  # type: ignore[no-untyped-def]
    recomputed = recomputing(plan, share)
    assert tiny_gpt2.worst_error(*run_plan(recomputed, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9
    program = lower(recomputed)[0]
    seen = 0
    for name, block in program.blocks.items():
        if not name.endswith(".B"):
            continue
        kind = next(kind for kind in plan.program.kinds if kind.name == name.split(".")[0])
        choice = next(c for c in recomputed.stages[0].choices if plan.program.kinds[c.kind] is kind)
        phases = [op.phase for op in kind.graph.ops]
        again = [index for index in origins(block) if phases[index] is Phase.FORWARD]
        assert set(again) == set(remat_of(kind, choice.activations).again)
        backward = [index for index in origins(block) if phases[index] is Phase.BACKWARD]
        assert backward == sorted(backward)
        made = {out for index in set(again) for out in kind.graph.ops[index].outs}
        assert not made & set(block.inputs), "what is made again is not saved"
        if again and backward:
            order = origins(block)
            for index in set(again):
                after = order[order.index(index) + 1 :]
                readers = [r for r in order if set(kind.graph.ops[index].outs) & set(kind.graph.ops[r].tensors)]
                until = after[: min(after.index(r) for r in readers if r in after)] if set(readers) & set(after) else []
                assert all(phases[between] is Phase.FORWARD for between in until), "it stands before its first reader"
        seen += len(again)
    assert seen > 0


def test_recomputing_everything_saves_nothing_but_outputs(plan: Plan) -> None:
    kept, recomputed = lower(plan)[0], lower(recomputing(plan, 1))[0]
    assert any(block.saved for block in kept.blocks.values())
    for kind in plan.program.kinds:
        values = recomputable(kind)
        remat = remat_of(kind, dict.fromkeys(values, RECOMPUTE))
        assert all(name not in values for name in remat.saved)
        assert set(remat.saved) <= read_by_backward(kind) | {name for op in kind.graph.ops for name in op.tensors}
    held = [sum(len(block.saved) for block in program.blocks.values()) for program in (kept, recomputed)]
    assert held[1] < held[0]


def test_what_cannot_be_recomputed_is_refused(plan: Plan) -> None:
    kind = next(kind for kind in plan.program.kinds if recomputable(kind))
    with pytest.raises(InvalidPlanError, match=r"no value that its forward makes"):
        remat_of(kind, {kind.outputs[0]: RECOMPUTE})
    with pytest.raises(InvalidPlanError, match=r"it can be 'recompute'"):
        remat_of(
            kind, {next(name for each in plan.program.kinds for name in recomputable(each) if each is kind): "drop"}
        )
