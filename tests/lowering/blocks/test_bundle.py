"""Bundles: small tensors share a collective, large ones go alone and in place; reductions begin inside the backward."""

from __future__ import annotations

import msgspec
import pytest
import torch

from paraplan.cost_models.predict import simulate_plan
from paraplan.ir.execution.rank_program import Block, InstrKind, RankProgram, in_place
from paraplan.ir.machine.mesh import P, R, S
from paraplan.ir.machine.reshard import reshard_path
from paraplan.ir.plan import Plan
from paraplan.lowering.blocks import bundle
from paraplan.lowering.rank_classes import lower_anew
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.executing import instructions
from tests.lowering.lockstep import run_plan


def planned(tiny, zero: int, microbatches: int = 1) -> Plan:  # type: ignore[no-untyped-def]
    found = search(tiny.job(2), Constraints(dp=2, zero=zero, microbatches=microbatches)).plan
    return msgspec.structs.replace(found, reduce_every=1)


def issued(block: Block, target: str) -> list[str]:
    """Local names a collective of a kind reads."""
    return [str(i.args[0])[1:] for i in block.instrs if i.kind is InstrKind.COLLECTIVE and i.target == target]


def targets(program: RankProgram) -> list[str]:
    return [instr.target for step in program.steps if step.block for instr in program.blocks[step.block].instrs]


def spans(program: RankProgram, role: str) -> list[tuple[int, int]]:
    """Of every bundle of a role, the steps that issue it and wait for it."""
    begun: dict[str, int] = {}
    found = []
    for index, step in enumerate(program.steps):
        if step.block.startswith(role) and step.block.endswith(".issue"):
            begun.update(dict.fromkeys((out for out in step.outs if out), index))
        elif step.block.startswith(role):
            found.append((min(begun.pop(name) for name in step.args if name in begun), index))
    assert not begun
    return found


def runs(program: RankProgram, action: str) -> list[int]:
    return [i for i, step in enumerate(program.steps) if step.segment >= 0 and step.block and step.action == action]


def test_small_parameters_are_gathered_and_their_gradients_scattered_at_once(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    program = lower_anew(planned(tiny_gpt2, 3))[0]
    inside = {
        instr.target
        for step in program.steps
        if step.segment >= 0 and step.block
        for instr in program.blocks[step.block].instrs
    }
    assert inside.isdisjoint({"all_gather", "reduce_scatter"})
    assert targets(program).count("all_gather") == 2, "one in the forward, one in the backward"
    assert targets(program).count("reduce_scatter") == 1
    packs = [
        len(instr.args[0])
        for block in program.blocks.values()
        for instr in block.instrs
        if instr.target == "paraplan.pack"
    ]
    assert max(packs) > 8


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("state", ["S0,S0", "S0,R", "R,S0", "R,R"])
def test_gradients_are_summed_over_one_axis_and_scattered_over_another_at_once(
    tiny_gpt2,  # type: ignore[no-untyped-def]
    state: str,
    microbatches: int,
) -> None:
    """Parts of parts lie in a bundle as the second scatter wants them."""
    found = search(tiny_gpt2.job(4), Constraints(mesh=(2, 2), pp=1, microbatches=microbatches)).plan
    whole = next(each for each in found.stages[0].params.values() if each.stored == "R,R" and not each.fetched)
    layouts = {}
    for name, param in found.program.params.items():
        owner = state if param.spec.shape[0] % 4 == 0 else "R,R"
        layouts[name] = msgspec.structs.replace(whole, grad="P,P", state=owner, ahead=owner != "R,R")
    batch = msgspec.structs.replace(found.stages[0], params=layouts)
    plan = msgspec.structs.replace(found, stages=(batch,), reduce_every=1, prediction=None, certificate=None)
    program = lower_anew(plan)[0]
    scattered = sum(param.spec.shape[0] % 4 == 0 for param in found.program.params.values())
    assert scattered > 10 and targets(program).count("reduce_scatter") <= state.count("S0") * 2
    assert tiny_gpt2.worst_error(*run_plan(plan, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_bundles_sent_off_early(tiny_gpt2, zero: int, microbatches: int) -> None:  # type: ignore[no-untyped-def]
    """A group of segments is gathered beside the one before it; sums are under way beside the backward, few at once."""
    plan = msgspec.structs.replace(planned(tiny_gpt2, zero, microbatches), bundle_bytes=1)
    program = lower_anew(plan)[0]
    assert tiny_gpt2.worst_error(*run_plan(plan, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9
    if zero == 3:
        forward = runs(program, "0F0")
        gathers = [span for span in spans(program, "gather") if program.steps[span[0]].action == "0F0"]
        assert len(gathers) > 2
        for (issued, _), (_, before) in zip(gathers[1:], gathers, strict=False):
            assert before < issued, "at most one group is under way"
        hidden = [span for span in gathers if any(span[0] < at < span[1] for at in forward)]
        assert len(hidden) == len(gathers) - 1
    if zero >= 2:
        sums, backward = spans(program, "sums"), runs(program, "0B0")
        assert any(issued < at < waited for issued, waited in sums for at in backward)
        assert all(sum(a < at < b for a, b in sums) <= 3 for at in range(len(program.steps)))


def test_the_loss_goes_with_gradients(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    """One all-reduce for the denominator, one for everything else; under ZeRO-3 nothing is there to go with."""
    assert targets(lower_anew(planned(tiny_gpt2, 0))[0]).count("all_reduce") == 2
    assert targets(lower_anew(planned(tiny_gpt2, 3))[0]).count("all_reduce") == 2


def test_gradients_are_summed_at_once_in_place_and_during_the_backward(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    for microbatches in (1, 2):
        program = lower_anew(planned(tiny_gpt2, 0, microbatches))[0]
        sums = [step for step in program.steps if step.block.startswith("reduce")]
        assert [step.block for step in sums] == ["reduce.0.issue", "reduce.0"]
        first, second = (program.blocks[step.block] for step in sums)
        (collective,) = [instr for instr in first.instrs if instr.kind is InstrKind.COLLECTIVE]
        assert in_place(first, collective) and len(first.inputs) == len(program.grads) + 1, "and the loss"
        assert [instr.target for instr in second.instrs] == ["wait", "paraplan.unpack"]
        assert sums[1].action == "0REDUCE_GRAD"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_large_tensors_go_alone(tiny_gpt2, monkeypatch: pytest.MonkeyPatch, zero: int) -> None:  # type: ignore[no-untyped-def]
    plan = planned(tiny_gpt2, zero, 2)
    together = simulate_plan(plan, lower_anew(plan)).step_s
    monkeypatch.setattr(bundle, "SMALL_BYTES", 0)
    program = lower_anew(plan)[0]
    assert "paraplan.pack" not in targets(program)
    issues = [step for step in program.steps if step.block.startswith("reduce") and step.block.endswith(".issue")]
    if zero < 3:
        assert len(issues) == len(program.grads)
        assert all(step.action.startswith("0B") for step in issues), "begun as soon as they are final"
    assert tiny_gpt2.worst_error(*run_plan(plan, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9
    assert simulate_plan(plan, (program,)).step_s > together


def test_scattered_gradients_are_let_go_during_the_backward(tiny_gpt2, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """What a reduce-scatter reads lives until its wait, so few are under way."""
    plan = msgspec.structs.replace(planned(tiny_gpt2, 1), reducing_bytes=0)
    monkeypatch.setattr(bundle, "SMALL_BYTES", 0)
    under_way = most = 0
    for step in lower_anew(plan)[0].steps:
        if step.block.startswith("reduce"):
            under_way += 1 if step.block.endswith(".issue") else -1
            most = max(most, under_way)
    assert under_way == 0 and most == 3


def test_as_many_reductions_are_under_way_as_bytes_allow(tiny_gpt2, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """The plan's bound holds at every instant where it is above two, and changes no number."""
    plan = planned(tiny_gpt2, 1)
    monkeypatch.setattr(bundle, "SMALL_BYTES", 0)
    peaks, before = [], -1
    for allowed in (0, 60_000, 1 << 40):
        made = msgspec.structs.replace(plan, reducing_bytes=allowed)
        program = lower_anew(made)[0]
        sizes: dict[str, int] = {}
        held = most = count = 0
        for step in program.steps:
            if step.block.startswith("reduce") and step.block.endswith(".issue"):
                assert held <= allowed or count <= 2, "when the next one sets out"
                block = program.blocks[step.block]
                sizes[step.block] = sum(block.values[name].nbytes for name in block.inputs)
                held, count = held + sizes[step.block], count + 1
                most = max(most, count)
            elif step.block.startswith("reduce"):
                held, count = held - sizes[step.block + ".issue"], count - 1
        assert held == 0 and most > before
        before = most
        peaks.append(simulate_plan(made, (program,)).peak_bytes[0])
        assert tiny_gpt2.worst_error(*run_plan(made, tiny_gpt2.params, tiny_gpt2.buffers, tiny_gpt2.batch)) <= 1e-9
    assert peaks == sorted(peaks)


def test_loss_and_denominator_are_summed_beside_the_work(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    names = [step.block for step in lower_anew(planned(tiny_gpt2, 0))[0].steps if step.block]
    forward = names.index(next(name for name in names if name.endswith(".F")))
    backward = names.index(next(name for name in names if name.endswith(".B")))
    assert names.index("tangent0.issue") < forward < names.index("tangent0") < backward < names.index("loss")
    names = [step.block for step in lower_anew(planned(tiny_gpt2, 3))[0].steps if step.block]
    forward = names.index(next(name for name in names if name.endswith(".F")))
    assert forward < names.index("loss.issue") < names.index("tangent0")


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, 1, 2)])
def test_packing(dims: tuple[int, ...]) -> None:
    """Scattering what is packed gives every rank its chunks; gathering gives them back."""
    tensors = [torch.randn(4), torch.randn(6, 4), torch.randn(2, 3, 8).transpose(0, 2).contiguous().transpose(0, 2)]
    buffer = instructions.pack(tensors, 2, dims)
    shards = [x.chunk(2, dim) for x, dim in zip(tensors, dims, strict=True)]
    shapes = [tuple(parts[0].shape) for parts in shards]
    for rank, half in enumerate(buffer.chunk(2)):
        pieces = instructions.unpack(half, shapes)
        assert all(torch.equal(a, parts[rank]) for a, parts in zip(pieces, shards, strict=True))
        assert {piece.untyped_storage().data_ptr() for piece in pieces} == {buffer.untyped_storage().data_ptr()}
    joined = instructions.unpack_stacked(buffer, 2, shapes, dims)
    assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(joined, tensors, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in (buffer, *joined)}) == 4
    scalars = [torch.tensor(2.0), torch.randn(3, 2).t()]
    alone = instructions.unpack(instructions.pack(scalars, 1, (0, 0)), [(), (2, 3)])
    assert all(torch.equal(a, b) for a, b in zip(alone, scalars, strict=True))


def test_nothing_moves_along_an_axis_of_one_rank() -> None:
    assert reshard_path((4, 4), (R, S(0)), (R, R), (1, 1), frozen=1) == ()
    moves = reshard_path((4, 4), (R, P, S(1)), (R, R, R), (1, 1, 2), frozen=1)
    assert [move.axis for move in moves] == [2]
