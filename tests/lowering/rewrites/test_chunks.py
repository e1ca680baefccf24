"""Runs of ops in chunks: what is cut, what it saves, that nothing but memory and time changes, what is refused."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.codegen import build_modules
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.mesh import P, S
from paraplan.ir.model.graph import Phase
from paraplan.ir.plan import Plan, Split
from paraplan.ir.struct import from_json, to_json
from paraplan.lowering import lower
from paraplan.lowering.blocks.remat import RECOMPUTE, recomputable
from paraplan.lowering.rewrites.chunks import Chunks, chunkable_dims, chunks_of
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.lowering.lockstep import run_plan


@pytest.fixture(scope="module")
def plans(tiny_gpt2) -> dict[str, Plan]:  # type: ignore[no-untyped-def]
    return {
        "one": search(tiny_gpt2.job(1), Constraints(), certify=False).plan,
        "tp": search(tiny_gpt2.job(2), Constraints(tp=2), certify=False).plan,
        "dp": search(tiny_gpt2.job(2), Constraints(dp=2, microbatches=2), certify=False).plan,
    }


def head_of(plan: Plan) -> int:
    """The kind of the last segment."""
    return plan.program.segments[-1].kind


def with_split(plan: Plan, split: Split, kind: int, activations: tuple[str, ...] = ()) -> Plan:
    (stage,) = plan.stages
    choices = tuple(
        msgspec.structs.replace(choice, split=split, activations=dict.fromkeys(activations, RECOMPUTE))
        if choice.kind == kind
        else choice
        for choice in stage.choices
    )
    return msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, choices=choices),))


def logits_op(plan: Plan) -> int:
    ops = plan.program.kinds[head_of(plan)].graph.ops
    return next(index for index, op in enumerate(ops) if op.target == "paraplan.linear")


def analysed(plan: Plan, split: Split) -> Chunks:
    (stage,), program = plan.stages, plan.program
    last = len(program.segments) - 1
    strategies = PlanBlocks(plan).routes[0].parts[0].forwards[last].strategies
    return chunks_of(program.kinds[head_of(plan)], split, strategies, (plan.num_microbatches, *stage.mesh.shape))


@pytest.mark.parametrize("pins", ["one", "tp", "dp"])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("dim", ["a", "b"])
def test_a_chunked_head_changes_nothing_and_never_holds_all_logits(plans, tiny_gpt2, pins, at_once, dim) -> None:  # type: ignore[no-untyped-def]
    plan = plans[pins]
    op = logits_op(plan)
    again = () if at_once else plan.program.kinds[head_of(plan)].graph.ops[op].outs
    split = with_split(plan, Split(op=op, dim=dim, chunks=2, at_once=at_once), head_of(plan), again)
    split = from_json(to_json(split), Plan, "plan", InvalidPlanError)
    programs = verify_plan(split)
    assert tiny_gpt2.worst_error(*run_plan(split, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9
    whole = largest(lower(plan)[0], plan, op)
    assert largest(programs[0], plan, op) * 2 == whole
    backwards = [
        n for n, block in programs[0].blocks.items() if ".B" in n and any(op == i.origin for i in block.instrs)
    ]
    assert bool(backwards) != at_once, "the logits are made again, unless the backward has run beside the forward"


def largest(program, plan: Plan, op: int) -> int:  # type: ignore[no-untyped-def]
    """Bytes of the largest value that the op of the logits makes."""
    name = plan.program.kinds[head_of(plan)].name
    return max(
        block.values[out].nbytes
        for block in program.blocks.values()
        if block.name.startswith(name + ".")
        for instr in block.instrs
        for out in instr.outs
        if instr.origin == op and not instr.layout_change and out
    )


def test_what_is_cut_follows_from_the_rules(plans) -> None:  # type: ignore[no-untyped-def]
    plan = plans["one"]
    kind, op = plan.program.kinds[head_of(plan)], logits_op(plan)
    found = analysed(plan, Split(op=op, dim="a", chunks=4))
    for index, (each, choice) in enumerate(zip(kind.graph.ops, found.choices, strict=True)):
        whole = index < op or each.target in ("aten.constant_pad_nd.default", "aten.slice.Tensor")
        assert (choice is None) == whole, each.target
    made = {each.target: choice for each, choice in zip(kind.graph.ops, found.choices, strict=True) if choice}
    assert made["paraplan.linear"].outputs == (S(0),) and made["paraplan.ce_loss"].outputs == (P,)
    assert made["paraplan.linear_grad_weight"].outputs == (P,), "weights' gradients are sums over chunks"


def test_a_dim_may_be_any_that_divides(plans) -> None:  # type: ignore[no-untyped-def]
    plan = plans["tp"]
    kind, op = plan.program.kinds[head_of(plan)], logits_op(plan)
    strategies = PlanBlocks(plan).routes[0].parts[0].forwards[len(plan.program.segments) - 1].strategies
    assert {"a", "b"} <= set(chunkable_dims(kind, op, 4, strategies, (1, 2)))
    assert "b" not in chunkable_dims(kind, op, 8, strategies, (1, 2)), "12 positions"
    for dim, chunks, at in (("k", 2, op), ("b", 8, op), ("a", 1, op), ("a", 2, len(kind.graph.ops) - 1)):
        with pytest.raises(InvalidPlanError, match="cannot split"):
            lower(with_split(plan, Split(op=at, dim=dim, chunks=chunks), head_of(plan)))


def test_only_the_loss_is_differentiated_at_once(plans) -> None:  # type: ignore[no-untyped-def]
    plan = plans["one"]
    with pytest.raises(InvalidPlanError, match="numerators of the loss"):
        lower(with_split(plan, Split(op=0, dim="a", chunks=2, at_once=True), plan.program.segments[1].kind))


@pytest.mark.parametrize("pins", ["one", "tp", "dp"])
def test_every_op_of_every_kind_can_begin_a_run(plans, tiny_gpt2, pins) -> None:  # type: ignore[no-untyped-def]
    """Attention and dropout included, with everything recomputed: heads, positions, rows and columns."""
    plan = plans[pins]
    (stage,), program = plan.stages, plan.program
    parts, extended = PlanBlocks(plan).routes[0].parts[0], (plan.num_microbatches, *stage.mesh.shape)
    tried = set()
    for kind in range(len(program.kinds)):
        segment = next(i for i, s in enumerate(program.segments) if s.kind == kind)
        graph, strategies = program.kinds[kind].graph, parts.forwards[segment].strategies
        for op, each in enumerate(graph.ops):
            dims = (
                chunkable_dims(program.kinds[kind], op, 2, strategies, extended) if each.phase is Phase.FORWARD else ()
            )
            for dim in dims:
                if (each.target, dim) in tried or each.target.startswith("aten.view"):
                    continue
                tried.add((each.target, dim))
                again = recomputable(program.kinds[kind]) if op % 2 else ()
                split = with_split(plan, Split(op=op, dim=dim, chunks=2), kind, again)
                results = run_plan(split, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)
                assert tiny_gpt2.worst_error(*results) <= 1e-9, (kind, op, each.target, dim)
    assert len(tried) > 12


def test_the_simulator_foretells_a_chunked_step(plans) -> None:  # type: ignore[no-untyped-def]
    plan = plans["one"]
    split = with_split(plan, Split(op=logits_op(plan), dim="a", chunks=4, at_once=True), head_of(plan))
    programs = lower(split)
    assert simulate_plan(split, programs).step_s > simulate_plan(plan, lower(plan)).step_s, "more launches"
    build_modules(programs[0])
    made = [entry for entry in entries(programs[0]) if "grow_" in str(entry.key)]
    assert made, "sums over chunks grow in place"
