"""Rings: what they are made of, how their steps overlap, and that the planner prices what is lowered."""

from __future__ import annotations

import pytest

from paraplan.cost_models.costs import Costs
from paraplan.ir.execution.offsets import offset_value, parse_offset
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import layout_text, make_mesh
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.planner.sharding.prices import MeshPrices
from paraplan.rules.strategies import op_strategies
from tests.rules.expansions.one_op_blocks import lowered, strategy

SHAPE, STATS = (2, 4, 12, 8), (2, 4, 12)


def attention(backward: bool, dtype: str = "float64") -> Graph:
    """Causal self-attention, or its gradient, as a graph of one op."""
    wide = "float32" if dtype == "bfloat16" else dtype
    values = dict.fromkeys(("g", "q", "k", "v", "out", "dq", "dk", "dv"), TensorSpec(dtype, SHAPE))
    values["lse"] = TensorSpec(wide, STATS)
    rest = (0.0, 0, True, 0.5, (2, 4, 12, 12), (0, 0, 0, 0))
    if backward:
        args = ("%g", "%q", "%k", "%v", None, None, "%out", "%lse", *rest, False)
        op = Op(target="paraplan.attention_grad", args=args, outs=("dq", "dk", "dv", None))
    else:
        op = Op(target="paraplan.attention", args=("%q", "%k", "%v", None, None, *rest), outs=("out", "lse"))
    return Graph(inputs=op.tensors, outputs=op.outs, values=values, ops=(op,))


def test_an_offset_may_turn() -> None:
    assert parse_offset("#0+3%4:256,m:1024") == (("0+3%4", 256), ("m", 1024))
    assert [offset_value("#1+3%4:256,m:1024", (9, rank), 2) for rank in range(4)] == [2816, 2048, 2304, 2560]


def test_keys_and_values_come_round_and_their_gradients_home() -> None:
    forward, backward = lowered(attention(False), "ring", (4,)), lowered(attention(True), "ring", (4,))
    assert sum(i.target == "permute" for i in forward.instrs) == 2 * 3
    assert sum(i.target == "permute" for i in backward.instrs) == 2 * 3 + 2 * 4
    starts = [i.args[10] for i in forward.instrs if i.target == "paraplan.attention"]
    assert starts == [(0, 0, "#0:3", f"#0{turn}:3") for turn in ("", "+3%4", "+2%4", "+1%4")]


def test_an_exchange_is_under_way_while_a_block_is_worked_on() -> None:
    for graph in (attention(False), attention(True)):
        block = lowered(graph, "ring", (4,))
        under_way, seen = set(), []
        for instr in block.instrs:
            if instr.kind is InstrKind.COLLECTIVE:
                under_way.add(instr.outs[0])
            elif instr.kind is InstrKind.WAIT:
                under_way.discard(instr.args[0].removeprefix("%"))
            elif instr.target == graph.ops[0].target:
                seen.append(sum("/key" in str(name) or "/value" in str(name) for name in under_way))
        assert seen == [2, 2, 2, 0]


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_summed_over_steps_is_float32_at_least(backward: bool) -> None:
    graph = attention(backward, "bfloat16")
    block = lowered(graph, "ring", (4,))
    sums = [i.outs[0] for i in block.instrs if i.target in ("paraplan.attention_merge", "aten.add.Tensor")]
    kept = [block.values[name].dtype for name in sums]
    assert kept == (["float32"] * 9 if backward else ["float32", "float32", "bfloat16"])
    for out in graph.ops[0].outs:
        assert out is None or out not in block.values or block.values[out].dtype == graph.values[out].dtype


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("key", "mesh"), [("ring", (4,)), ("b|ring", (2, 3)), ("ring|h", (2, 2)), ("ring|s", (3, 2))])
def test_the_planner_prices_what_is_lowered(backward: bool, key: str, mesh: tuple[int, ...]) -> None:
    graph = attention(backward)
    costs = Costs(
        ClusterSpec.local(mesh[0] * mesh[-1] if len(mesh) > 1 else mesh[0]), make_mesh(mesh, ("a", "b")[: len(mesh)])
    )
    block = lowered(graph, key, mesh)
    priced = MeshPrices(costs, (1, *mesh))
    work = dict.fromkeys(priced.streams, 0.0)
    for instr in block.instrs:
        if not instr.layout_change:
            work[costs.stream(instr)] += costs.instr_s(block, instr)
    (wanted,) = priced.ops(graph.ops[0], graph, (strategy(graph, key, mesh),)).tolist()
    assert tuple(work.values()) == pytest.approx(wanted)
    assert work[COMPUTE] > 0.0


def test_one_axis_at_most_is_a_ring_and_what_turns_is_not_sharded_further() -> None:
    keys = {s.key for s in op_strategies(attention(True).ops[0], attention(True).values, (2, 2))}
    assert {"ring|s", "ring|b", "ring|h", "t|s", "t|t"} <= keys
    assert not {"ring|ring", "ring|t", "t|ring"} & keys


def test_queries_are_sharded_with_whole_keys_and_keys_backward_alone() -> None:
    forward, backward = attention(False), attention(True)
    found = {s.key: s for s in op_strategies(forward.ops[0], forward.values, (2,))}
    assert set(found) == {"-", "b", "h", "s", "ring", "stripes"}
    assert [layout_text(layout) for layout in found["s"].inputs] == ["S2", "R", "R"]
    back = {s.key: s for s in op_strategies(backward.ops[0], backward.values, (2,))}
    assert [layout_text(layout) for layout in back["s"].computed if layout] == ["S2", "P", "P"]
    assert [layout_text(layout) for layout in back["t"].computed if layout] == ["P", "S2", "S2"]
