"""A legal plan passes; each way of breaking one is refused with a reason, never with a crash."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import accumulate
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.ir.struct import from_json, to_json
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.lowering.verification.verify_program import verify_graph, verify_program
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from tests.lowering.toy import toy_graph, toy_plan, toy_program


@pytest.fixture(scope="module")
def plan() -> Plan:
    return toy_plan(Job(toy_program(), ClusterSpec.local(2), OPTIMIZERS["sgd"], ModelRef(display="toy"), {}), 2)


def mutated(plan: Plan, path: tuple[Any, ...], value: Any) -> Plan:
    """The plan with one entry of its data changed; `...` as value deletes it."""
    data = at = msgspec.json.decode(to_json(plan))
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return from_json(msgspec.json.encode(data), Plan, "test", InvalidPlanError)


def test_a_legal_plan_passes_and_round_trips(plan: Plan) -> None:
    assert len(verify_plan(plan)) == 1
    again = from_json(to_json(plan), Plan, "test", InvalidPlanError)
    assert again == plan and to_json(again) == to_json(plan)


STAGE = ("stages", 0)
CHOICE = (*STAGE, "choices", 0)
PREDICTION = {"step_s": 1.0, "peak_bytes": [1], "compute_s": 1.0, "exposed_comm_s": 0.0, "tokens_per_s": 1.0, "mfu": 0}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 9, "plan version 9"),
        (("num_microbatches",), 3, "does not divide into 3"),
        (("num_microbatches",), 0, "does not divide into 0"),
        (("num_microbatches",), 4, "only 2 of 4 backwards are done"),
        (("num_microbatches",), 1, "there are 1 microbatches"),
        (("stages",), [], "the stages end at segment 0 of 1"),
        ((*STAGE, "first"), 1, "expected to start at 0"),
        ((*STAGE, "stop"), 0, "expected to start at 0"),
        ((*STAGE, "stop"), 2, "2 segments|segment 2 of 1"),
        ((*STAGE, "segment_choice"), [], "0 segment choices for 1 segments"),
        ((*STAGE, "segment_choice"), [1], "no choice 1"),
        ((*STAGE, "segment_choice"), [-1], "no choice -1"),
        ((*CHOICE, "kind"), 1, "choice 0 is for kind 1"),
        ((*CHOICE, "ops"), ["a"], "kind k0 has 5 ops, the plan chooses for 1"),
        ((*CHOICE, "ops", 1), "z", r"aten.add.Tensor \(toy.py:1.*'z' is no legal strategy.*legal: -, a"),
        ((*CHOICE, "ops", 2), "a>S0", "no legal strategy"),
        ((*CHOICE, "input_grads"), [], "0 input_grads"),
        ((*CHOICE, "activations"), {"h": "forget"}, "no value that its forward makes|can be 'recompute'"),
        ((*STAGE, "mesh", "shape"), [3], "mesh of shape"),
        ((*STAGE, "mesh", "shape"), [2, 1], "mesh of shape"),
        ((*STAGE, "mesh", "shape"), [-2], "mesh of shape"),
        ((*STAGE, "mesh", "devices"), [0, 0], "repeat"),
        ((*STAGE, "mesh", "devices"), [0, 2], "outside the cluster"),
        ((*STAGE, "mesh", "devices"), [0, -1], "outside the cluster"),
        ((*STAGE, "batch"), {}, "batch:x.*gives no layout"),
        ((*STAGE, "batch", "x"), "S2", "cannot lie as 'S2'"),
        ((*STAGE, "batch", "x"), "P", "must not be partial"),
        ((*STAGE, "batch", "x"), "R,R", "on a mesh of 1 axes"),
        ((*STAGE, "batch", "x"), "Q", "stage 0, batch input x: no such placement"),
        ((*STAGE, "batch", "y"), "R", "no batch input 'y'"),
        ((*STAGE, "params", "a"), ..., "'a', which the plan gives no layout"),
        ((*STAGE, "params", "c"), {"stored": "R", "grad": "R", "state": "R"}, "no parameter 'c'"),
        ((*STAGE, "params", "a", "stored"), "P", "stored: 'P' must not be partial"),
        ((*STAGE, "params", "a", "state"), "P", "state: 'P' must not be partial"),
        ((*STAGE, "params", "a", "grad"), "Pmax", "partial sums only"),
        ((*STAGE, "params", "a", "grad"), "S1", "cannot lie as 'S1'"),
        ((*STAGE, "params", "a", "grad"), "Q", "stage 0, parameter a, grad: no such placement: 'Q'"),
        (("schedule", "rank_class"), [0], "has 1 ranks, the cluster 2"),
        (("schedule", "rank_class"), [0, 7], "rank 1: no schedule class 7"),
        (("schedule", "classes"), [["0F0", "0B0", "0REDUCE_GRAD", "0UPDATE"]], "only 1 of 2 backwards are done"),
        (("schedule", "classes", 0, 0), "0G0", "no such action"),
        (("cluster", "groups", 0, "devices_per_node"), 3, "has 2 ranks, the cluster 3"),
        (("cluster", "groups", 0, "nodes"), 0, "the plan's cluster"),
        (("program", "loss"), [], "has no loss"),
        (("program", "loss", 0, "numerator"), "s9.0", "do not exist"),
        (("program", "loss", 0, "denominator"), 0, "do not exist"),
        (("program", "segments", 0, "kind"), 3, "no kind 3"),
        (("program", "segments", 0, "params"), ["a"], "1 parameters for the 2"),
        (("program", "segments", 0, "params"), ["a", "z"], "no parameter 'z'"),
        (("program", "segments", 0, "inputs"), ["s0.0"], "reads 's0.0' before any segment makes it"),
        (("program", "kinds", 0, "tangents"), [], "0 tangents for 1"),
        (("program", "kinds", 0, "param_grads"), ["g", "zz"], "'zz' is no value"),
        (("program", "kinds", 0, "graph", "ops", 0, "source"), 9, "source 9 is none of its 1"),
        (("program", "batch_size"), 7, "does not divide"),
        (("program", "batch", "x", "spec", 0), "float7", "batch:x has an impossible spec"),
        (("program", "batch", "x", "spec", 1), [8, 5], r"segment 0 of kind .*: batch:x is .*, and its kind takes"),
        (("program", "kinds", 0, "graph", "values", "h", 1), [8], "are not such an op's|its rule says"),
        (("program", "apart"), 0, "apart 0: both are at least 1"),
        (("program", "kinds", 0, "outputs", 0), "dy", "'dy' is no result of its forward"),
        (("program", "kinds", 0, "param_grads"), ["g", ""], "'' is no value"),
        (("program", "kinds", 0, "tangents"), ["h"], "'h' is no input"),
        (("program", "kinds", 0, "graph", "ops", 1, "outs"), [], r"makes \[\]"),
        (("program", "kinds", 0, "graph", "ops", 1, "outs"), [None], r"makes \[None\]"),
        (("program", "kinds", 0, "graph", "ops", 1, "outs"), ["y", "y"], "give every result one name"),
        (("optimizer", "name"), "lion", "optimizer 'lion' is unknown; choose one of sgd"),
        (("optimizer", "state_slots"), -3, "state_slots is -3, torch's has 0"),
        (("optimizer", "workspace_slots"), 10**12, "workspace_slots is 1000000000000"),
        (("prediction",), {**PREDICTION, "peak_bytes": []}, "peak_bytes has 0 sizes for 1 classes"),
        (("prediction",), {**PREDICTION, "peak_bytes": [-1]}, "at least 0"),
        (("prediction",), {**PREDICTION, "reserved_bytes": [1, 1]}, "reserved_bytes has 2 sizes for 1 classes"),
    ],
)
def test_broken_plans_are_refused(plan: Plan, path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        verify_plan(mutated(plan, path, value))


@pytest.mark.parametrize("text", ["R,R", "S5", "Pmax", "X", "S0,"])
def test_broken_input_gradients_are_refused(tiny_stacks, text: str) -> None:  # type: ignore[no-untyped-def]
    good = random_plan(tiny_stacks[0].job(2), 0, 1)
    verify_plan(good)
    choices = good.stages[0].choices
    which = next(i for i, choice in enumerate(choices) if any(choice.input_grads))
    at = next(i for i, layout in enumerate(choices[which].input_grads) if layout)
    with pytest.raises(InvalidPlanError):
        verify_plan(mutated(good, ("stages", 0, "choices", which, "input_grads", at), text))
    with pytest.raises(InvalidPlanError, match="has no layout in the plan"):
        verify_plan(mutated(good, ("stages", 0, "choices", which, "input_grads", at), None))


def test_stages_that_do_not_follow_each_other_are_refused(plan: Plan) -> None:
    stages = (plan.stages[0], plan.stages[0])
    with pytest.raises(InvalidPlanError):
        verify_plan(msgspec.structs.replace(plan, stages=stages))


def test_another_schedule_of_the_same_actions_is_legal(plan: Plan) -> None:
    order = ("0F0", "0F1", "0B1", "0B0", "0REDUCE_GRAD", "0UPDATE")
    verify_plan(msgspec.structs.replace(plan, schedule=msgspec.structs.replace(accumulate(2, 2), classes=(order,))))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("ops", 0, "args", 0), "%y", "reads 'y' before it is made"),
        (("ops", 1, "outs"), ["h"], "'h' is made twice"),
        (("ops", 1, "outs"), ["new"], "made twice or has no spec"),
        (("ops", 0, "phase"), "B", "a forward op after a backward one"),
        (("ops", 0, "phase"), "S", "phase 'S' is none of a program's"),
        (("outputs", 0), "zz", "'zz' is an input or output but no value"),
        (("inputs", 0), "zz", "before it is made|no value"),
        (("values", "h", 0), "float7", "impossible spec"),
        (("values", "h", 1), [8, -4], "impossible spec"),
    ],
)
def test_broken_graphs_are_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = at = msgspec.json.decode(to_json(toy_graph()))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(InvalidPlanError, match=message):
        verify_graph(from_json(msgspec.json.encode(data), type(toy_graph()), "test", InvalidPlanError), "toy")


def test_captured_programs_are_legal(tiny_mlp, tiny_gpt2) -> None:  # type: ignore[no-untyped-def]
    for tiny in (tiny_mlp, tiny_gpt2):
        verify_program(tiny.program)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("inputs",), ["batch:zz"], "denominator 0 reads 'batch:zz'"),
        (("inputs",), [], "denominator 0: 0 inputs for 1"),
        (("graph", "outputs"), ["zz"], "denominator 0: 'zz' is an input or output but no value"),
        (("graph", "ops", 0, "outs"), ["zz"], "denominator 0, op 0 .*'zz' is made twice or has no spec"),
    ],
)
def test_broken_counts_are_refused(tiny_gpt2, path: tuple[Any, ...], value: Any, message: str) -> None:  # type: ignore[no-untyped-def]
    data = at = msgspec.json.decode(to_json(tiny_gpt2.program))
    for key in ("denominators", 0, *path[:-1]):
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(InvalidPlanError, match=message):
        verify_program(from_json(msgspec.json.encode(data), Program, "test", InvalidPlanError))
