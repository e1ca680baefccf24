"""What is decided together, and what constraints are refused before anything is solved."""

from __future__ import annotations

from typing import Any

import pytest

from paraplan.ir.errors import ConstraintError, InfeasibleError, SolverLimitError
from paraplan.ir.machine.tier_placement import HERE, TierPlacement
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.decision_classes import grad_classes, param_classes
from paraplan.planner.one_stage import on_mesh
from paraplan.planner.options.param_pins import parse_param_pin
from paraplan.planner.pipeline.meshes import candidate_meshes
from paraplan.planner.search import search


def test_equal_layers_and_tied_weights_share_a_class(tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    program = tiny_gpt2.program
    classes = param_classes(program)
    named = {name: cls for cls in classes for name in cls.params}
    assert set(named) == set(program.params)
    assert sum(len(cls.params) for cls in classes) == len(program.params), "a parameter is in one class"
    first, second = (named[f"transformer.h.{layer}.mlp.c_fc.weight"] for layer in (0, 1))
    assert first is second and first.params == ("transformer.h.0.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.weight")
    tied = named["transformer.wte.weight"]
    assert tied.params == ("transformer.wte.weight",) and len(tied.slots) == 2
    assert len({kind for kind, _ in tied.slots}) == 2, "read by the embedding and by the head"
    assert all(cls.trained for cls in classes)
    assert named["transformer.wpe.weight"] is not tied


def test_gradients_that_meet_share_a_class(tiny_stacks) -> None:  # type: ignore[no-untyped-def]
    for tiny in tiny_stacks:
        for cls in grad_classes(tiny.program):
            for kind, index in cls.readers:
                reader = tiny.program.kinds[kind]
                assert reader.graph.values[reader.inputs[index]] == cls.spec
                assert reader.input_grads[index] is not None
            for kind, index in cls.makers:
                assert tiny.program.kinds[kind].tangents[index] is not None
    few, many = (grad_classes(tiny.program) for tiny in tiny_stacks)
    assert len(many) <= len(few), "depth adds no classes"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"dp": 0}, "dp=0: must be at least 1"),
        ({"tp": -2}, "tp=-2: must be at least 1"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"zero": 4}, "zero=4: must be 0, 1, 2 or 3"),
        ({"sp": True}, "sp=True needs a tensor-parallel axis"),
        ({"sp": True, "tp": 1, "dp": 4}, "sp=True needs a tensor-parallel axis"),
        (
            {"zero": 1, "tp": 4},
            "zero=1 .* tp=4 leaves none of 4 devices; leave zero out",
        ),
        ({"mesh": (4,), "dp": 4}, "give the mesh or the degrees"),
        ({"mesh": (3,)}, "3 places for 4 devices"),
        ({"mesh": (4, 0)}, "at least 1"),
        ({"dp": 2, "tp": 4}, "dp=2 times tp=4 is 8, the cluster has 4"),
        ({"dp": 3}, "dp=3 does not divide"),
        ({"tp": 8}, "tp=8 does not divide"),
        ({"pp": 2, "dp": 4}, "dp=4 does not divide the 2 devices that pp=2 leaves a stage of 4"),
        ({"pp": 2, "mesh": (4,)}, "4 places for 2 devices that pp=2 leaves a stage of 4"),
        ({"pp": 2, "dp": 2, "tp": 2}, "is 4, there are 2 devices that pp=2 leaves a stage of 4"),
    ],
)
def test_contradictions_are_refused(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        check_constraints(Constraints(**pins), 4)


def test_parameter_pins() -> None:
    assert parse_param_pin("w", "R,S0/P,S0/S0,S0") == ("R,S0", "P,S0", "S0,S0", HERE, False)
    assert parse_param_pin("w", "R/P/S0@host") == (
        "R",
        "P",
        "S0",
        TierPlacement(states="host", grads="host", update="host"),
        False,
    )
    assert parse_param_pin("w", "S0/R/S0@disk-all-fetched").place == TierPlacement("disk", "disk", "", "device")
    assert parse_param_pin("w", "S0/S0/S0@all") == (
        "S0",
        "S0",
        "S0",
        TierPlacement("host", "host", "host", "host"),
        False,
    )
    assert parse_param_pin("w", "R/P/S0+ahead") == ("R", "P", "S0", HERE, True)
    with pytest.raises(ConstraintError, match="give stored/grad/state"):
        parse_param_pin("w", "R/S0")


def test_faults_of_constraints_and_model(tiny_mlp) -> None:  # type: ignore[no-untyped-def]
    faults: tuple[tuple[dict[str, Any], str], ...] = (
        ({"params": {"nope": "R/R/R"}}, "'nope', which the model does not have.*up.weight"),
        ({"params": {"up.weight": "shard"}}, r"params\['up.weight'\] = 'shard': give stored/grad/state"),
        ({"dp": 2, "microbatches": 8}, "batch of 8 does not divide over 2 data-parallel ranks in 8 microbatches"),
        ({"microbatches": 3}, "microbatches=3 does not divide a batch of 8; give 2 or 4"),
    )
    for pins, message in faults:
        with pytest.raises(ConstraintError, match=message):
            search(tiny_mlp.job(2), Constraints(**pins), certify=False)
    job = tiny_mlp.job(2, memory_bytes=1000)
    with pytest.raises(InfeasibleError, match="leaves a plan no device memory"):
        search(job, Constraints(reserve_bytes=job.cluster.groups[0].device.memory_bytes), certify=False)


def test_meshes_worth_solving(tiny_mlp) -> None:  # type: ignore[no-untyped-def]
    def shapes(devices: int, constraints: Constraints) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
        return [(mesh.shape, mesh.axes) for mesh in candidate_meshes(tiny_mlp.job(devices), constraints)]

    assert shapes(4, Constraints()) == [((4,), ("axis0",)), ((2, 2), ("axis0", "axis1"))]
    assert [shape for shape, _ in shapes(8, Constraints())] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert shapes(8, Constraints(dp=2, tp=2)) == [((2, 2, 2), ("dp", "tp", "free"))]
    assert shapes(4, Constraints(dp=2, tp=2)) == [((2, 2), ("dp", "tp"))]
    assert shapes(4, Constraints(zero=1)) == [((4,), ("dp",))]
    assert shapes(4, Constraints(mesh=(2, 2))) == [((2, 2), ("axis0", "axis1"))]


def test_a_search_goes_on_where_one_mesh_found_nothing(tiny_mlp, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A mesh without a plan does not end the search; if none has one, what is not proved is not called infeasible."""
    solved = on_mesh.solve_mesh

    def grid_only(job, mesh, *rest):  # type: ignore[no-untyped-def]
        if mesh.shape == (4,):
            raise SolverLimitError("out of time")
        return solved(job, mesh, *rest)

    def nothing(job, mesh, *rest):  # type: ignore[no-untyped-def]
        raise SolverLimitError("out of time") if mesh.shape == (4,) else InfeasibleError("too large")

    monkeypatch.setattr(on_mesh, "solve_mesh", grid_only)
    assert search(tiny_mlp.job(4), Constraints(pp=1, recompute="none")).plan.stages[0].mesh.shape == (2, 2)
    monkeypatch.setattr(on_mesh, "solve_mesh", nothing)
    with pytest.raises(SolverLimitError):
        search(tiny_mlp.job(4), Constraints(pp=1, recompute="none"))
