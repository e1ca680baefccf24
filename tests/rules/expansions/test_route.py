"""Dropless experts with tokens exchanged: that the planner prices what is lowered, and what it expects to be sent."""

from __future__ import annotations

import itertools

import pytest
import torch

from paraplan.cost_models.communication.collectives import input_bytes_of
from paraplan.cost_models.costs import Costs
from paraplan.ir.execution.rank_program import InstrKind
from paraplan.ir.execution.streams import COMPUTE
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.mesh import make_mesh
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.kernels.route_kernels import route_plan
from paraplan.lowering.implement import call_of
from paraplan.planner.sharding.prices import MeshPrices
from paraplan.rules.device_kernels.kernel_counts import launch_count
from paraplan.rules.expansions.route import expected_rows
from paraplan.rules.strategies import axis_choices, dims_of, op_strategies
from paraplan.rules.time_axis import extend
from paraplan.runtime.executing.launch_counts import LaunchCounter
from tests.rules.cases import case, randn
from tests.rules.examples import Example, whole_first
from tests.rules.expansions.one_op_blocks import lowered, strategy

TOKENS, CHOICES, EXPERTS, HIDDEN, WIDTH = 24, 3, 8, 16, 32
MANY = 8 * 10_000


def mixture(backward: bool, train: bool = True, tokens: int = TOKENS) -> Graph:
    """Experts, or their gradient, as a graph of one op."""
    rows, stack = TensorSpec("float32", (tokens, HIDDEN)), TensorSpec("float32", (EXPERTS, 2, WIDTH, HIDDEN))
    weights = TensorSpec("float32", (tokens, CHOICES))
    values = dict.fromkeys(("g", "x", "y", "gx"), rows) | {"weights": weights, "gw": weights}
    values["ids"] = TensorSpec("int64", (tokens, CHOICES))
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
    ("key", "mesh"),
    [
        *[("route", (4,)), ("t|route", (3, 2)), ("route|f", (2, 2)), ("n|route", (2, 4))],
        *[("route|route", (2, 4)), ("t|route|route", (3, 2, 2)), ("route|f|route", (2, 2, 2))],
    ],
)
def test_the_planner_prices_what_is_lowered(graph: Graph, key: str, mesh: tuple[int, ...]) -> None:
    ranks = 1
    for size in mesh:
        ranks *= size
    costs = Costs(ClusterSpec.local(ranks), make_mesh(mesh, ("a", "b", "c")[: len(mesh)]))
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


def test_experts_are_sharded_on_no_other_axis_but_by_routes() -> None:
    for graph in (mixture(False), mixture(True)):
        keys = {found.key.split(">")[0] for found in op_strategies(graph.ops[0], graph.values, (2, 2))}
        assert {"route|-", "t|route", "route|f", "e|e", "route|route"} <= keys
        assert not {"route|e", "e|route"} & keys


def test_routes_over_several_axes_divide_tokens_and_experts_by_all() -> None:
    """8 experts, 24 tokens: 16 ranks have no expert each, 5 no equal tokens."""
    graph = mixture(False)
    for mesh, legal in (((2, 4), True), ((2, 2, 2), True), ((2, 8), False), ((1, 5), False)):
        keys = {found.key for found in op_strategies(graph.ops[0], graph.values, mesh)}
        assert ("|".join(["route"] * len(mesh)) in keys) == legal


def test_launches_of_the_plan_are_those_priced() -> None:
    block = lowered(mixture(False), "route|route", (2, 2))
    ids = torch.rand(TOKENS, EXPERTS).topk(CHOICES)[1]
    plans = [instr for instr in block.instrs if instr.target == "paraplan.route_plan"]
    assert [instr.args[1:3] for instr in plans] == [(2, 4), (2, 2)]
    for instr in plans:
        n, held = map(int, instr.args[1:3])  # type: ignore[arg-type]
        with LaunchCounter() as counter:
            route_plan(ids, n, held, 4)
        assert len(counter.launches) == launch_count("cuda", instr.target, instr.kernel, call_of(block, instr))


ROUTINGS = {
    "as drawn, some by nobody": lambda: torch.rand(TOKENS, EXPERTS - 3).topk(2)[1] + 1,
    "all to one": lambda: torch.full((TOKENS, 1), 5),
    "all to two ranks of one node": lambda: torch.tensor([[2, 0, 3]]).repeat(TOKENS, 1),
    "all to ranks of two nodes": lambda: torch.tensor([[6, 1]]).repeat(TOKENS, 1),
    "some to nobody": lambda: torch.where(torch.rand(TOKENS, 3) < 0.5, EXPERTS, torch.rand(TOKENS, 8).topk(3)[1]),
    "to nobody": lambda: torch.full((TOKENS, 2), EXPERTS),
    "every rank's to the next node": lambda: (torch.arange(TOKENS)[:, None] // 6 * 2 + 4) % 8 + torch.tensor([0, 1]),
    "to all": lambda: torch.rand(TOKENS, EXPERTS).topk(EXPERTS)[1],
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("key", "mesh"),
    [
        *[("route|route", (2, 2)), ("route|route", (2, 4)), ("route|route", (4, 2)), ("route|route|route", (2, 2, 2))],
        *[("t|route|route", (3, 2, 2)), ("route|f|route", (2, 2, 2)), ("route|t|route", (2, 2, 2))],
    ],
)
def test_two_levels_give_what_one_device_gives(routing: str, key: str, mesh: tuple[int, ...]) -> None:
    """Forward and backward in float64 (to 1e-12), buffers as foretold, every rank's rows agreed on with its peers."""
    torch.manual_seed(0)
    ids = ROUTINGS[routing]()
    x, g, weights = randn(TOKENS, HIDDEN), randn(TOKENS, HIDDEN), randn(*ids.shape)
    stacks, rest = (randn(EXPERTS, 2, WIDTH, HIDDEN), randn(EXPERTS, HIDDEN, WIDTH)), (":silu", EXPERTS, 0)
    names = tuple(f"%{name}" for name in "abcdef")
    for example in (
        Example("paraplan.experts", case([x, ids, weights, *stacks], *names[:5], *rest)),
        Example("paraplan.experts_grad", case([g, x, ids, weights, *stacks], *names, *rest, True)),
    ):
        found = next(each for each in example.strategies(mesh) if each.key == key)
        example.check(whole_first(found), mesh)


def test_microbatches_go_in_two_levels_too() -> None:
    torch.manual_seed(0)
    args = [randn(TOKENS, HIDDEN), torch.rand(TOKENS, EXPERTS).topk(2)[1], randn(TOKENS, 2)]
    stacks = [randn(EXPERTS, 2, WIDTH, HIDDEN), randn(EXPERTS, HIDDEN, WIDTH)]
    names = (f"%{name}" for name in "abcde")
    example = Example("paraplan.experts", case([*args, *stacks], *names, ":silu", EXPERTS, 0))
    dims = dims_of(example.op, example.graph.values)
    micro = next(choice for choice in axis_choices(dims) if choice.key == "t")
    found = op_strategies(example.op, example.graph.values, (2, 2), micro, 3)
    example.check(extend(next(each for each in found if each.key == "route|route"), micro), (2, 2), 3)


def _between_nodes(key: str, mesh: tuple[int, ...], nodes: int, backward: bool) -> float:
    """Priced bytes of tokens, results and gradients that a rank sends to other nodes."""
    block = lowered(mixture(backward, tokens=MANY), key, mesh)
    routes = [instr for instr in block.instrs if instr.target == "route" and instr.axis == 0]
    nbytes = (input_bytes_of(each.target, each.args, block.values[each.args[0][1:]]) for each in routes)  # type: ignore[index]
    ranks = mesh[0]
    return sum(nbytes) * (ranks - ranks // nodes) / ranks


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (2, 4), (4, 2)])
def test_fewer_bytes_are_priced_between_nodes_than_of_one_axis(nodes: int, local: int, backward: bool) -> None:
    """In the ratio of the chances that a node, or a rank, has one of a token's choices."""
    one, two = (
        _between_nodes(key, mesh, nodes, backward)
        for key, mesh in (("route", (nodes * local,)), ("route|route", (nodes, local)))
    )
    assert two < one
    ranks = nodes * local
    node, rank = (expected_rows(EXPERTS, EXPERTS // each, CHOICES, MANY) for each in (nodes, ranks))
    assert two / one == pytest.approx(node / (local * rank), rel=0.01)


@pytest.mark.parametrize("choices", [1, 2, 4])
def test_a_token_goes_once_to_a_node(choices: int) -> None:
    """Rows that leave a node, counted: as many of either way where tokens choose once, fewer else; and what goes on
    in the node is what one axis sends there."""
    torch.manual_seed(0)
    ids = torch.rand(200, EXPERTS).topk(choices)[1]
    sent = route_plan(ids, 8, 1)[1].view(2, 4).sum(1)
    over = route_plan(ids, 2, 4)[1]
    assert (over < sent).all() if choices > 1 else (over == sent).all()
    for node in range(2):
        arrived = ids[((ids >= 4 * node) & (ids < 4 * node + 4)).any(1)]
        assert len(arrived) == over[node]
        assert route_plan(arrived, 4, 1, 4 * node)[1].tolist() == route_plan(ids, 8, 1)[1].view(2, 4)[node].tolist()


def test_rows_expected_at_either_level_are_those_of_even_routing() -> None:
    """Every rank has every draw of 3 of 8 experts once: what is sent then is what is priced, at both levels."""
    draws = torch.combinations(torch.arange(EXPERTS), CHOICES)
    block = lowered(mixture(False, tokens=4 * len(draws)), "route|route", (2, 2))
    priced = {instr.axis: instr.args[-1] for instr in block.instrs if instr.target == "route"}
    assert priced[0] == sum(route_plan(draws, 2, 4)[1].tolist())
    came = torch.cat([draws[(draws < 4).any(1)]] * 2)
    assert priced[1] == sum(route_plan(came, 2, 2, 0)[1].tolist())
