"""Costs on a mesh: memoised, streams, the slowest device, and a plan's prediction."""

import msgspec
import pytest

from paraplan.cost_models import costs as costs_module
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.machine.catalog import catalog_device, parse_cluster
from paraplan.cost_models.ops.roofline import op_cost, op_time_s
from paraplan.cost_models.predict import model_flops, predict
from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.execution.schedule import accumulate
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import BatchInput, Program, Segment, SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan, Stage

from .rank_programs import block, call, issue, op, own, program, view, wait

X, W = TensorSpec(dtype="float32", shape=(8, 16, 32)), TensorSpec(dtype="float32", shape=(64, 32))
Y = TensorSpec(dtype="float32", shape=(8, 16, 64))


def test_op_s_is_the_roofline_and_asked_for_once(monkeypatch) -> None:
    asked: list[str] = []
    original = costs_module.work_of
    monkeypatch.setattr(costs_module, "work_of", lambda target, *rest: asked.append(target) or original(target, *rest))
    costs = Costs(parse_cluster("2xH100"), make_mesh((2,), ("dp",)))
    times = {costs.op_s("paraplan.linear", (f"%x{k}", "%w", None, True), {}, (X, W), (Y,)) for k in range(5)}
    work = op_cost("paraplan.linear", (), {}, (X, W), (Y,))
    assert times == {op_time_s(work, catalog_device("H100"))} and asked == ["paraplan.linear"]


def test_causal_attention_is_not_priced_as_full() -> None:
    costs = Costs(parse_cluster("1xH100"), make_mesh((1,), ("dp",)))
    q = TensorSpec(dtype="bfloat16", shape=(8, 32, 4096, 128))
    lse = TensorSpec(dtype="float32", shape=(8, 32, 4096))

    def time(causal: bool) -> float:
        args = ("%q", "%k", "%v", None, None, 0.0, 0, causal, 0.1, (8, 32, 4096, 4096), (0, 0))
        return costs.op_s("paraplan.attention", args, {}, (q, q, q), (q, lse))

    assert time(True) < 0.55 * time(False)


def test_local_values_and_specs_price_alike() -> None:
    costs = Costs(ClusterSpec.local(2), make_mesh((2,), ("dp",)))
    local = [
        LocalValue(dtype=x.dtype, shape=x.shape, strides=(1,) * len(x.shape), base="v", storage_bytes=x.nbytes)
        for x in (X, W, Y)
    ]
    assert costs.op_s("paraplan.linear", (), {}, tuple(local[:2]), (local[2],)) == costs.op_s(
        "paraplan.linear", (), {}, (X, W), (Y,)
    )


def test_on_unequal_devices_the_slowest_counts() -> None:
    fast, slow = parse_cluster("4xH100:1").groups[0], parse_cluster("4xA100-80:1").groups[0]
    mixed = ClusterSpec(name="mixed", groups=(fast, slow), between_nodes=parse_cluster("4xH100:2").between_nodes)
    mesh = make_mesh((8,), ("dp",))
    work = op_cost("paraplan.linear", (), {}, (X, W), (Y,))
    assert Costs(mixed, mesh).work_s(work) == op_time_s(work, slow.device) > op_time_s(work, fast.device)
    assert Costs(mixed, make_mesh((4,), ("dp",))).work_s(work) == op_time_s(work, fast.device)


def test_streams_and_prices_of_instructions() -> None:
    costs = Costs(parse_cluster("1xH100:2"), make_mesh((2,), ("dp",)))
    code = block(
        "F",
        "x",
        "w",
        {"x": own("x", 64), "y": own("y", 64), "i": own("i", 64), "w": view("i", 64)},
        op("y", "x"),
        issue("i", "y"),
        wait("w", "i"),
    )
    assert [costs.stream(instr) for instr in code.instrs] == ["compute", "comm:between_nodes", "compute"]
    prices = [costs.instr_s(code, instr) for instr in code.instrs]
    assert prices[1] == costs.moves.collective_s("all_reduce", 0, 64) > prices[0] > prices[2] == 0.0


def tiny_plan(num_devices: int) -> Plan:
    """One linear layer twice over a batch of 8 sequences of 16, on CPU processes."""
    values = {"x": X, "w": W, "y": Y, "gy": Y, "gw": W}
    graph = Graph(
        inputs=("x", "w", "gy"),
        outputs=("y", "gw"),
        values=values,
        ops=(
            Op(target="paraplan.linear", args=("%x", "%w", None, True), outs=("y",)),
            Op(target="paraplan.linear_grad_weight", args=("%gy", "%x", True), outs=("gw",), phase=Phase.BACKWARD),
        ),
    )
    kind = SegmentKind(
        name="k0",
        graph=graph,
        params=("w",),
        inputs=("x",),
        outputs=("y",),
        tangents=("gy",),
        input_grads=(None,),
        param_grads=("gw",),
    )
    segment = Segment(kind=0, params=("w",), inputs=("batch:x",), outputs=("s0.0",))
    captured = Program(
        name="tiny",
        fingerprint="0",
        precision="fp32",
        batch_size=8,
        batch={"x": BatchInput(spec=X)},
        params={},
        buffers={},
        kinds=(kind,),
        segments=(segment, segment),
        loss=(),
    )
    stage = Stage(
        first=0, stop=2, mesh=make_mesh((num_devices,), ("dp",)), choices=(), segment_choice=(), batch={}, params={}
    )
    return Plan(
        made_with={},
        model=ModelRef(display="tiny"),
        program=captured,
        cluster=ClusterSpec.local(num_devices),
        num_microbatches=1,
        optimizer=OPTIMIZERS["sgd"],
        stages=(stage,),
        schedule=accumulate(1, num_devices),
    )


def test_predict_counts_model_flops_and_tokens() -> None:
    plan = tiny_plan(2)
    assert model_flops(plan.program) == 3 * 2 * (2 * 8 * 16 * 32 * 64)
    code = block("F", "x", "y", {"x": own("x", 800), "y": own("y", 800)}, op("y", "x", "x"))
    made = program([code], {"x0": 800}, [call("F", "x0", "y0", "x0")])
    found = predict(plan, (made,))
    step = 4e-6 + 1600 / 8e9
    assert found.step_s == found.compute_s == pytest.approx(step)
    assert found.peak_bytes == (1600,) and found.exposed_comm_s == 0.0
    assert found.tokens_per_s == pytest.approx(8 * 16 / step)
    assert found.mfu == pytest.approx(model_flops(plan.program) / (step * 2 * 5e10))
    (half,) = (msgspec.structs.replace(kind, graph=_in_halves(kind.graph)) for kind in plan.program.kinds)
    mixed = msgspec.structs.replace(plan, program=msgspec.structs.replace(plan.program, kinds=(half,)))
    assert predict(mixed, (made,)).mfu == pytest.approx(5 * found.mfu), "the rate of what multiplies: 1e10, not 5e10"


def _in_halves(graph: Graph) -> Graph:
    values = {name: msgspec.structs.replace(spec, dtype="bfloat16") for name, spec in graph.values.items()}
    return msgspec.structs.replace(graph, values=values)


def test_predict_on_a_step_that_does_nothing_divides_by_nothing() -> None:
    made = program([], {}, [])
    found = predict(tiny_plan(2), (made,))
    assert (found.step_s, found.tokens_per_s, found.mfu, found.peak_bytes) == (0.0, 0.0, 0.0, (0,))
    assert msgspec.json.encode(found)
