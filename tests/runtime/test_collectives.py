"""Every collective against its definition on dense arrays; over Gloo, see `worker.py`."""

from __future__ import annotations

from inspect import signature

import pytest
import torch

from paraplan.cost_models.collectives import TIMES_S
from paraplan.ir.collectives import COLLECTIVES
from paraplan.ir.mesh import make_mesh
from paraplan.runtime.collectives import IMPLEMENTATIONS
from paraplan.runtime.transport import Handle, InProcessTransport

from .collective_cases import Case, cases


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
