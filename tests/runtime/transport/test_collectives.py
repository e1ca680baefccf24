"""Every collective against its definition on dense arrays; over Gloo, see `worker.py`."""

from __future__ import annotations

from inspect import signature

import msgspec
import pytest
import torch

from paraplan.codegen import build_modules
from paraplan.cost_models.communication.collectives import TIMES_S
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.execution.name import Role
from paraplan.ir.execution.rank_program import Block, BlockRole, InstrKind, OuterValue, Step, StepKind
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.machine.mesh import R, make_mesh
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.runtime.executing.stepping import make_executors, step_together
from paraplan.runtime.transport.collectives import IMPLEMENTATIONS
from paraplan.runtime.transport.transport import Handle, InProcessTransport
from tests.named import named
from tests.runtime.programs import collectives_program, pair

from .collective_cases import Case, cases

X, MADE = named("x@0"), named("made@0")


def issued(case: Case, in_place: bool = False) -> tuple[list[torch.Tensor], list[Handle]]:
    """What ranks put in and have, in process; what may be overwritten once it is issued is."""
    record, n = COLLECTIVES[case.name], len(case.inputs)
    transport, inputs, handles = InProcessTransport(make_mesh((n,), ("dp",))), [x.clone() for x in case.inputs], []
    for rank, x in enumerate(inputs):
        assert not any(handle.done for handle in handles), "before all have issued it"
        handles.append(transport.issue(rank, case.name, x, case.reduction, 0, in_place, case.route(rank)))
        if record.in_place and not in_place:
            x.zero_()
    assert all(handle.done for handle in handles)
    return inputs, handles


def test_every_collective_has_a_time_an_implementation_and_cases() -> None:
    assert set(TIMES_S) == set(IMPLEMENTATIONS) == set(COLLECTIVES) == {case.name for case in cases(2)}
    changes = [record.change for record in COLLECTIVES.values() if record.change is not None]
    assert len(changes) == len(set(changes)), "resharding finds a collective by its change of placement"
    for name, record in COLLECTIVES.items():
        assert (IMPLEMENTATIONS[name].start_in_place is not None) == record.in_place
        assert (len(signature(IMPLEMENTATIONS[name].start).parameters) > 4) == record.uneven


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_in_process_it_is_what_it_is_by_definition(name: str, n: int) -> None:
    for case in cases(n):
        if case.name != name:
            continue
        inputs, handles = issued(case)
        for rank, (handle, wanted) in enumerate(zip(handles, case.wanted, strict=True)):
            route = case.route(rank)
            said = COLLECTIVES[name].result_shape(case.inputs[rank].shape, n, 0 if route is None else route.rows)
            assert said == tuple(wanted.shape)
            assert torch.equal(handle.out, wanted), case
            assert COLLECTIVES[name].in_place or torch.equal(inputs[rank], case.inputs[rank])
        if COLLECTIVES[name].in_place:
            inputs, handles = issued(case, in_place=True)
            assert all(handle.out is x for handle, x in zip(handles, inputs, strict=True))
            assert all(torch.equal(x, wanted) for x, wanted in zip(inputs, case.wanted, strict=True))


def lowered(case: Case) -> Block:
    """The step of an expansion that is such a collective of one value."""
    spec = TensorSpec("float64", tuple(case.inputs[0].shape))
    emitter = BlockEmitter("k0.0.F", (1, 2), BlockRole.FORWARD)
    emitter.give("x", spec, (R, R))
    shape = COLLECTIVES[case.name].result_shape(spec.shape, 2)
    emitter.step(case.name, [emitter.get("x", (R, R))], (), "made", shape, 0)
    return emitter.finish(("made",), ())


@pytest.mark.parametrize("name", [name for name, record in COLLECTIVES.items() if not record.uneven])
def test_lowered_emitted_and_priced_it_is_the_same(name: str) -> None:
    case = next(case for case in cases(2) if case.name == name)
    block = lowered(case)
    issue, wait = block.instrs
    assert (issue.kind, wait.kind) == (InstrKind.COLLECTIVE, InstrKind.WAIT)
    assert ("%x" in wait.args) != COLLECTIVES[name].in_place, "the input is held until others are done"
    costs = Costs(parse_cluster("1xh100:2"), pair())
    assert costs.instr_s(block, issue) == costs.moves.collective_s(name, 0, case.inputs[0].nbytes) > 0.0
    call = Step(kind=StepKind.CALL, action="0F0", block=block.name, args=(X,), outs=(MADE,))
    given = OuterValue(
        role=Role.BATCH, source="x", dtype="float64", shape=block.values["x"].shape, layout="R", nbytes=8
    )
    program = msgspec.structs.replace(
        collectives_program(), blocks={block.name: block}, outer={X: given}, steps=(call,)
    )
    transport, executors = make_executors(pair(), [program], (0, 0), [build_modules(program)])
    for executor, x in zip(executors, case.inputs, strict=True):
        executor.bind({X: x.clone()})
        executor.account.ledger.register(executor.outer[X])
    step_together(transport, executors, [program.steps] * 2)
    for executor, wanted in zip(executors, case.wanted, strict=True):
        assert torch.equal(executor.outer[MADE], wanted)
