"""Lowering: values freed once, collectives early and waits late, shared blocks, plans that compute the right thing."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch

from paraplan.capture import run_program
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.names import LOSS
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, RankProgram, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import refs
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.sampling import random_plan
from paraplan.planner.search import search

from .lockstep import run_plan
from .toy import toy_plan, toy_program, toy_values


def toy_job() -> Job:
    return Job(toy_program(), ClusterSpec.local(2), OPTIMIZERS["sgd"], ModelRef(display="toy"), {})


def sample(tiny, seeds: range, devices: int = 4) -> list[Plan]:  # type: ignore[no-untyped-def]
    return [random_plan(tiny.job(devices), seed, 4) for seed in seeds]


def reads(instr: Instr) -> list[str]:
    return list(refs((instr.args, tuple(instr.kwargs.values()))))


def kept(plan: Plan) -> Plan:
    """The plan with every activation kept and nothing in chunks."""
    (stage,) = plan.stages
    choices = tuple(msgspec.structs.replace(choice, activations={}, split=None) for choice in stage.choices)
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=choices),))


def blocks_of(plans: list[Plan]) -> list[Block]:
    found = [block for plan in plans for block in lower(plan)[0].blocks.values()]
    assert any(instr.kind is InstrKind.COLLECTIVE for block in found for instr in block.instrs)
    return found


@pytest.fixture(scope="session")
def random_blocks(tiny_mlp, tiny_gpt2) -> list[Block]:  # type: ignore[no-untyped-def]
    return blocks_of(sample(tiny_mlp, range(10)) + sample(tiny_gpt2, range(6)))


def test_every_value_is_freed_once_or_handed_on(random_blocks: list[Block]) -> None:
    for block in random_blocks:
        kept = {name for name in (*block.outputs, *block.saved) if name is not None}
        made = [name for instr in block.instrs for name in instr.outs if name is not None]
        freed = [name for instr in block.instrs for name in instr.frees]
        assert len(set(made)) == len(made) and not set(made) & set(block.inputs)
        assert sorted(freed) == sorted(set(freed)), block.name
        assert set(freed) == (set(made) | set(block.inputs)) - kept, block.name
        for index, instr in enumerate(block.instrs):
            for name in instr.frees:
                assert name in (*reads(instr), *instr.outs), (block.name, name)
                assert all(name not in reads(later) for later in block.instrs[index + 1 :])


def test_collectives_are_waited_for_once(random_blocks: list[Block]) -> None:
    for block in random_blocks:
        issued = [instr.outs[0] for instr in block.instrs if instr.kind is InstrKind.COLLECTIVE]
        waited = [reads(instr)[0] for instr in block.instrs if instr.kind is InstrKind.WAIT]
        left = [name for name in issued if name in block.outputs]
        assert sorted(set(issued) - set(left)) == sorted(set(waited) - set(block.inputs))  # type: ignore[type-var]
        assert not left or (block.name.endswith((".issue", ".on")) and left[0] not in waited)
        for instr in block.instrs:
            if instr.kind is not InstrKind.WAIT:
                assert not set(reads(instr)) & set(issued), "only waits read what a collective issued"


def test_collectives_go_early_and_waits_late(random_blocks: list[Block]) -> None:
    """A collective follows the maker of its input (others, and what is laid out for them, aside); a wait precedes its
    first reader."""
    for block in random_blocks:
        made = dict.fromkeys(block.inputs, -1)
        made |= {name: index for index, instr in enumerate(block.instrs) for name in instr.outs if name is not None}
        for index, instr in enumerate(block.instrs):
            if instr.kind is InstrKind.COLLECTIVE:
                between = block.instrs[made[reads(instr)[0]] + 1 : index]
                assert all(other.kind is InstrKind.COLLECTIVE or other.layout_change for other in between), block.name
            elif instr.kind is InstrKind.WAIT:
                after = block.instrs[index + 1 :]
                first = next((i for i, other in enumerate(after) if instr.outs[0] in reads(other)), len(after))
                between = after[:first]
                # other waits of the same reader, and collectives, may lie between
                assert all(other.kind is not InstrKind.OP for other in between), (block.name, index, instr)


def test_ops_keep_the_order_of_the_graph(tiny_mlp, tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    plans = sample(tiny_mlp, range(10)) + sample(tiny_gpt2, range(6))
    for block in blocks_of([kept(plan) for plan in plans]):
        order = [i.origin for i in block.instrs if i.kind is InstrKind.OP and not i.layout_change and i.origin >= 0]
        assert all(a <= b for a, b in pairwise(order))


def alive_at(program: RankProgram) -> list[tuple[str, set[Name]]]:
    """(action, outer names alive as it starts), one entry per action."""
    alive = set(program.outer)
    found: list[tuple[str, set[Name]]] = []
    for step in program.steps:
        if not found or found[-1][0] != step.action:
            found.append((step.action, set(alive)))
        assert set(step.args) <= alive | ({step.args[0]} if step.kind is StepKind.ACCUMULATE else set()), (
            step,
            "reads what is gone",
        )
        assert set(step.drops) <= alive
        alive -= set(step.drops)
        if step.kind is StepKind.ACCUMULATE:
            alive.add(step.args[0])
            alive.discard(step.args[1])
        alive |= {out for out in step.outs if out is not None}
    found.append(("end", alive))
    return found


def test_what_microbatches_leave_behind(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    plans = [plan for plan in sample(tiny_gpt2, range(12), 2) if plan.num_microbatches > 1]
    assert plans
    for plan in plans:
        program = lower(plan)[0]
        found = alive_at(program)
        assert found[-1][1] == set(program.outer) | {LOSS}
        for action, alive in found:
            if action.startswith("0F") and action != "0F0":
                of_microbatch = {name for name in alive - set(program.outer) if "@" in str(name)}
                left = {name for name in of_microbatch if name.role is not Role.GROUPED}
                assert not left, (action, left)


def test_blocks_do_not_multiply_with_layers(tiny_stacks) -> None:  # type: ignore[no-untyped-def]
    constraints = Constraints(dp=2, zero=1)
    few, many = (lower(search(tiny.job(2), constraints, certify=False).plan)[0] for tiny in tiny_stacks)
    assert len(many.steps) > len(few.steps)
    names = {name for name in few.blocks if not name.startswith(("reduce", "restore"))}
    assert names == {name for name in many.blocks if not name.startswith(("reduce", "restore"))}
    assert len(many.blocks) == len(few.blocks)


@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("grad", ["P", "R", "S0"])
def test_parameters_that_share_a_gradient_do_not_share_its_storage(m: int, grad: str) -> None:
    params, batch = toy_values()
    plan = toy_plan(toy_job(), m, grad)
    block = next(b for name, b in lower(plan)[0].blocks.items() if name.endswith(".B"))
    a, b = (block.values[name] for name in block.outputs if name is not None)
    assert a.base != b.base
    loss, grads = run_program(plan.program, params, {}, batch)
    losses, found = run_plan(plan, params, {}, batch)
    assert losses == pytest.approx([float(loss)] * 2)
    assert grads["a"] is not None
    for name in ("a", "b"):
        torch.testing.assert_close(found[name], torch.full((4,), 8.0, dtype=torch.float64))


@pytest.mark.parametrize("devices", [2, 4, 6])
def test_random_plans_of_an_mlp_compute_its_step(tiny_mlp, devices: int) -> None:  # type: ignore[no-untyped-def]
    for seed in range(25):
        plan = random_plan(tiny_mlp.job(devices), seed, 4)
        error = tiny_mlp.worst_error(*run_plan(plan, tiny_mlp.params, tiny_mlp.buffers, tiny_mlp.batch))
        assert error <= 1e-9, (seed, plan.stages[0].mesh.shape, plan.num_microbatches)


@pytest.mark.parametrize("devices", [2, 4])
def test_random_plans_of_gpt2_compute_its_step(tiny_gpt2, devices: int) -> None:  # type: ignore[no-untyped-def]
    for seed in range(5):
        plan = random_plan(tiny_gpt2.job(devices), seed, 4)
        error = tiny_gpt2.worst_error(*run_plan(plan, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch))
        assert error <= 1e-9, (seed, plan.stages[0].mesh.shape, plan.num_microbatches)


def test_planned_gpt2_computes_its_step(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    for constraints in (
        Constraints(dp=4, zero=3, microbatches=2),
        Constraints(tp=4),
        Constraints(dp=2, tp=2, zero=2),
        Constraints(tp=4, sp=True),
    ):
        plan = search(tiny_gpt2.job(4), constraints, certify=False).plan
        assert tiny_gpt2.worst_error(*run_plan(plan, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9, (
            constraints
        )
