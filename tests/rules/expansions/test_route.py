"""Dropless experts with tokens exchanged: that the planner prices what is lowered, and what it expects to be sent."""

from __future__ import annotations

import itertools

import pytest

from paraplan.cost_models.costs import Costs
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.planner.sharding.prices import MeshPrices
from paraplan.rules.expansions.route import expected_rows
from paraplan.rules.strategies import op_strategies
from tests.rules.expansions.one_op_blocks import lowered, strategy

TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH = 24, 3, 8, 16, 32


def mixture(backward: bool, train: bool = True) -> Graph:
    """Experts, or their gradient, as a graph of one op."""
    rows, stack = TensorSpec("float32", (TOKENS, HIDDEN)), TensorSpec("float32", (EXPERTS, 2, WIDTH, HIDDEN))
    weights = TensorSpec("float32", (TOKENS, CHOICES))
    values = dict.fromkeys(("g", "x", "y", "gx"), rows) | {"weights": weights, "gw": weights}
    values["ids"] = TensorSpec("int64", (TOKENS, CHOICES))
    values |= dict.fromkeys(("w_in", "g_in"), stack)
    values |= dict.fromkeys(("w_out", "g_out"), TensorSpec("float32", (EXPERTS, HIDDEN, WIDTH)))
    given = ("%x", "%ids", "%weights", "%w_in", "%w_out", ":silu", EXPERTS, 0)
    if backward:
        outs = ("gx", "gw", *(("g_in", "g_out") if train else (None, None)))
        op = Op(target="paraplan.experts_grad", args=("%g", *given, train), outs=outs)
    else:
        op = Op(target="paraplan.experts", args=given, outs=("y",))
    return Graph(inputs=op.tensors, outputs=op.outs, values=values, ops=(op,))


@pytest.mark.parametrize("graph", [mixture(False), mixture(True), mixture(True, train=False)])
@pytest.mark.parametrize(
    ("key", "mesh"), [("route", (4,)), ("t|route", (3, 2)), ("route|f", (2, 2)), ("n|route", (2, 4))]
)
def test_the_planner_prices_what_is_lowered(graph: Graph, key: str, mesh: tuple[int, ...]) -> None:
    ranks = 1
    for size in mesh:
        ranks *= size
    costs = Costs(ClusterSpec.local(ranks), make_mesh(mesh, ("a", "b")[: len(mesh)]))
    priced = MeshPrices(costs, (1, *mesh))
    work = dict.fromkeys(priced.streams, 0.0)
    for instr in lowered(graph, key, mesh).instrs:
        if not instr.layout_change:
            work[costs.stream(instr)] += costs.instr_s(lowered(graph, key, mesh), instr)
    assert tuple(work.values()) == pytest.approx(priced.ops(graph.ops[0], graph, [strategy(graph, key, mesh)])[0])
    assert work[COMPUTE] > 0.0


def test_buffers_are_of_the_worst_case_and_the_price_of_even_routing() -> None:
    block = lowered(mixture(False), "route", (4,))
    there, back = (instr for instr in block.instrs if instr.target == "route")
    assert block.values[there.outs[0]].shape == (TOKENS, HIDDEN)  # type: ignore[index]
    assert block.values[back.outs[0]].shape == (3 * TOKENS // 4, HIDDEN)  # type: ignore[index]
    assert there.kind is InstrKind.COLLECTIVE
    sent = 4 * expected_rows(EXPERTS, 2, CHOICES, TOKENS // 4)
    assert there.args[-1] == back.args[-1] == sent
    assert sent < TOKENS


def test_rows_expected_against_all_draws() -> None:
    for experts, held, choices in ((8, 2, 3), (6, 3, 2), (4, 1, 1), (5, 5, 2), (4, 2, 4)):
        draws = list(itertools.combinations(range(experts), choices))
        assert expected_rows(experts, held, choices, len(draws)) == sum(min(draw) < held for draw in draws)


def test_experts_are_sharded_on_no_other_axis() -> None:
    graph = mixture(False)
    keys = {found.key.split(">")[0] for found in op_strategies(graph.ops[0], graph.values, (2, 2))}
    assert {"route|-", "t|route", "route|f", "e|e"} <= keys
    assert not {"route|route", "route|e", "e|route"} & keys
