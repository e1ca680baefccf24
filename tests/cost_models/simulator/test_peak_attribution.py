"""Peaks taken apart: the parts add up to the simulator's peak, to the byte, whatever the plan does."""

from __future__ import annotations

import functools
import random
from collections import Counter

import msgspec
import pytest

from paraplan.cost_models.constants import CUDA_BLOCK_BYTES
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import MemoryWalk
from paraplan.cost_models.simulator.peak_attribution import BytesRole, Peak, peak_of
from paraplan.cost_models.simulator.rank_trace import RankTrace
from paraplan.ir.execution.name import Role as OuterRole
from paraplan.ir.execution.rank_program import RankProgram, StepKind
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.program import Program
from paraplan.ir.model.sources import graph_of_block
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.lowering.blocks.remat import RECOMPUTE, recomputable
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.captures import program_of
from tests.lowering.memory_orders import ordered, random_schedule, with_copies
from tests.runtime.pipelines import cut, pipeline_of


def program(name: str) -> Program:
    return program_of(name, 0.1 if name == "gpt2" else 0.0)


@functools.cache
def pinned(name: str, devices: int, fate: str = "", **pins: int) -> Plan:
    """A plan whose saved values all take one fate ("": kept)."""
    job = Job(program(name), ClusterSpec.local(devices), OPTIMIZERS["adamw"], ModelRef(display=name), {})
    plan = search(job, Constraints(**pins), certify=False).plan
    if not fate:
        return plan
    choices = tuple(
        msgspec.structs.replace(choice, activations=dict.fromkeys(recomputable(plan.program.kinds[choice.kind]), fate))
        for choice in plan.stages[0].choices
    )
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(plan.stages[0], choices=choices),))


def pipeline(schedule: str) -> Plan:
    one = pinned("gpt2", 1, mesh=(1,), microbatches=4)
    return pipeline_of(one, schedule, 2, cut(len(one.program.segments), 2))


PLANS = {
    "gpt2 tp": lambda: pinned("gpt2", 2, tp=2),
    "gpt2 zero3": lambda: pinned("gpt2", 2, dp=2, zero=3, microbatches=2),
    "mlp": lambda: pinned("mlp", 2, dp=2),
    "pipeline": lambda: pipeline("1f1b"),
    "split backwards": lambda: pipeline("zb-h1"),
    "recomputation": lambda: pinned("gpt2", 2, RECOMPUTE, dp=2),
    "host": lambda: pinned("gpt2", 2, "host", dp=2, zero=3),
    "schedule": lambda: ordered(random_schedule(random.Random(1))),
    "schedule with copies": lambda: ordered(with_copies(random.Random(2))),
}


@functools.cache
def lowered(name: str) -> tuple[Plan, tuple[RankProgram, ...], tuple[RankTrace, ...]]:
    plan = PLANS[name]()
    programs = verify_plan(plan)
    return plan, programs, simulate_plan(plan, programs).traces


def by_role(peak: Peak, tier: str = "") -> Counter[BytesRole]:
    found: Counter[BytesRole] = Counter()
    for row in peak.roles:
        found[row.role] += row.nbytes if row.tier == tier else 0
    return found


def at(trace: RankTrace, step: int, instr: int) -> RankTrace:
    """A trace that says its peak is there."""
    return msgspec.structs.replace(trace, peak_step=step, peak_instr=instr)


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_are_the_peak(name: str) -> None:
    plan, programs, traces = lowered(name)
    for made, trace in zip(programs, traces, strict=True):
        peak = peak_of(made, trace, plan.program)
        found = by_role(peak)
        assert found.total() == peak.nbytes == trace.peak_bytes
        assert found[BytesRole.STATES] == made.optimizer_bytes
        params = sum(value.nbytes for value in made.outer.values() if value.role is OuterRole.PARAMETER)
        assert found[BytesRole.PARAMETERS] == params
        assert sum(each.nbytes for each in peak.tensors if not each.tier) == (
            trace.peak_bytes - made.optimizer_bytes - found[BytesRole.WORKSPACE]
        )


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_of_every_step_are_its_peak(name: str) -> None:
    plan, programs, traces = lowered(name)
    for made, trace in zip(programs, traces, strict=True):
        walk, every = MemoryWalk(made), max(1, len(made.steps) // 40)
        for index, step in enumerate(made.steps):
            levels, memory = dict(walk.levels), walk.advance(step)
            if index % every:
                continue
            if step.kind is StepKind.CALL:
                before = peak_of(made, at(trace, index, -1), plan.program)
                assert {tier: by_role(before, tier).total() for tier in levels} == levels
            inside = memory.profile.peak_instr if memory.profile is not None else -1
            if inside >= 0 or step.kind is not StepKind.CALL:
                found = by_role(peak_of(made, at(trace, index, inside), plan.program)).total()
                assert max(found, memory.before) == memory.peak, (index, step.kind)


def test_saved_activations_are_those_the_blocks_save() -> None:
    """Between the forward and the backward of a plan that keeps everything."""
    plan, (made,), (trace,) = lowered("gpt2 tp")
    first = next(i for i, step in enumerate(made.steps) if step.block.endswith(".B"))
    peak = peak_of(made, at(trace, first, -1), plan.program)
    walk = MemoryWalk(made)
    for step in made.steps[:first]:
        walk.advance(step)
    saved = {name: held.storage for name, held in walk.outer.items() if name.role is OuterRole.SAVED}
    handed_on = (OuterRole.VALUE, OuterRole.BATCH)
    boundary = {id(held.storage) for name, held in walk.outer.items() if name.role in handed_on}
    wanted = {id(storage): storage.nbytes for storage in saved.values() if id(storage) not in boundary}
    assert by_role(peak)[BytesRole.SAVED] == sum(wanted.values()) > 0
    assert {row.kind for row in peak.roles if row.role is BytesRole.SAVED} == {
        plan.program.segments[step.segment].kind for step in made.steps[:first] if step.segment >= 0
    }
    assert not by_role(peak)[BytesRole.RECOMPUTED]


def test_recomputed_activations_are_the_forward_s_ops_in_the_backward() -> None:
    plan, (made,), (trace,) = lowered("recomputation")
    graphs, seen = graph_of_block(plan.program), 0
    for index, step in enumerate(made.steps):
        if not step.block.endswith(".B"):
            continue
        block = made.blocks[step.block]
        graph = graphs(block)
        assert graph is not None
        again = [
            i
            for i, instr in enumerate(block.instrs)
            if instr.origin >= 0
            and graph.ops[instr.origin].phase is Phase.FORWARD
            and any(block.values[out].base == out for out in instr.outs if out)
        ]
        if again:
            seen += 1
            assert by_role(peak_of(made, at(trace, index, again[-1]), plan.program))[BytesRole.RECOMPUTED] > 0
        assert not by_role(peak_of(made, at(trace, index, -1), plan.program))[BytesRole.RECOMPUTED]
    assert seen > 2


def test_what_is_away_stands_beside() -> None:
    plan, (made,), (trace,) = lowered("host")
    peak = peak_of(made, trace, plan.program)
    assert 0 < by_role(peak, "host")[BytesRole.SAVED] <= trace.tier_peak_bytes["host"]
    assert by_role(peak, "host").total() == by_role(peak, "host")[BytesRole.SAVED]


def test_messages_are_told_apart() -> None:
    plan, programs, traces = lowered("pipeline")
    for made, trace in zip(programs, traces, strict=True):
        index = next(i for i, step in enumerate(made.steps) if step.kind is StepKind.RECV)
        found = by_role(peak_of(made, at(trace, index, -1), plan.program))
        assert found[BytesRole.MESSAGES] >= made.transfers[made.steps[index].transfer].nbytes


def test_rounding_is_of_cuda_and_beside_the_peak() -> None:
    plan, (made,), (trace,) = lowered("mlp")
    peak = peak_of(made, trace, plan.program, "cuda")
    sizes = [each.nbytes for each in peak.tensors]
    blocks = sum((size + CUDA_BLOCK_BYTES - 1) // CUDA_BLOCK_BYTES for size in sizes)
    assert peak.rounding_bytes == blocks * CUDA_BLOCK_BYTES - sum(sizes) > 0
    assert peak.nbytes == trace.peak_bytes
    assert peak_of(made, trace, plan.program).rounding_bytes == 0


@pytest.mark.parametrize("name", ["gpt2 zero3", "pipeline", "split backwards", "host"])
def test_nothing_is_held_only_to_be_given_up_for_another_value(name: str) -> None:
    """What a microbatch makes goes with its last reader, not when the next one takes the name."""
    _, programs, _ = lowered(name)
    for made in programs:
        walk, nexts = MemoryWalk(made), [set(made.outer) | {made.loss, *made.grads.values(), *made.metrics.values()}]
        for step in reversed(made.steps):
            written = {out for out in step.outs if out is not None}
            nexts.append((nexts[-1] - (written - nexts[0])) | set(step.args) | set(step.drops))
        for step, read in zip(made.steps, reversed(nexts[:-1]), strict=True):
            walk.advance(step)
            assert set(walk.outer) <= read, (step.action, set(walk.outer) - read)
