"""A dropless mixture whose tokens go to the ranks of their experts and back: an all-to-all, exact, in known memory.

Along an axis of n ranks with T tokens each the experts are sharded and so are the tokens:

    forward     tokens to the ranks of their experts; experts; results back, added up over a token's ranks
    backward    tokens and gradients of results there; gradients of tokens and weights back

Every rank knows where all tokens go, for the ids and weights of their choices are gathered: a few numbers a token. Rows
are sent as chosen ("route": an all-to-all of unequal parts into buffers of equal size), so no token is dropped, and
received in buffers for the worst case, n·T rows: those that gathering the tokens takes as well. Time differs: the share
1 − C(E − E/n, k) / C(E, k) of n·T rows is sent where routing is even, which is what is priced. Buffers
padded to the worst case would move as many bytes as gathering does.

Along two axes (nodes, and the ranks of each) it is the same twice. A token goes once to every node that has one of its
choices, to the rank there of its own place; what came to a rank goes on to those of its node that have them; results
are added up in the node, then over nodes. With P(e) = 1 − C(E − e, k) / C(E, k), on n nodes of m ranks a rank sends
(n − 1)·T·P(E / n) rows to other nodes, in place of the (n − 1)·m·T·P(E / nm) of one axis of n·m ranks, and then
(m − 1)·n·T·P(E / nm) inside its own. Buffers are those of that one axis, and n·T rows between the two.

Sources: Lepikhin et al. 2020 (arXiv 2006.16668), the exchange; Gale et al. 2023 (arXiv 2211.15841), without dropping;
DeepSeek-AI 2024 (arXiv 2412.19437, section 3.2.2), nodes first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paraplan.ir.machine.collectives import ALL_GATHER, ROUTE
from paraplan.ir.machine.mesh import R, Shard
from paraplan.ir.model.graph import Arg, Graph, Op
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import LocalContext, OpDims, Specs, register, replicated
from paraplan.rules.expansions.ring import Steps
from paraplan.rules.workspace import expert_workspace as workspace

ROUTED = ("paraplan.experts", "paraplan.experts_grad")


def expected_rows(experts: int, held: int, choices: int, tokens: int) -> int:
    """Rows that have one of their choices among some of the experts, where all are chosen alike.

    Args:
        experts: in all.
        held: of those, the ones in question.
        choices: of every row.
        tokens: rows.
    """
    missed = math.comb(experts - held, choices) / math.comb(experts, choices) if choices <= experts else 0.0
    return math.ceil(tokens * (1.0 - missed))


@dataclass(frozen=True)
class _Experts:
    """Those that tokens go to along an axis.

    Attributes:
        total: all there are, of which tokens choose.
        first: number of the first that a rank of the axis has.
        held: on each of its ranks (or, where another axis follows, on those that it is in front of).
        start: number of the first of those here.
    """

    total: int
    first: Arg
    held: int
    start: Arg


class _Exchange:
    """The steps around the experts along one axis: where rows go, and rows sent there and back.

    The rows are an op's tokens or, with `outer`, those that came over the axis before, on their way to those of the
    experts there that they chose.
    """

    def __init__(
        self, steps: Steps, choices: tuple[str, str], experts: _Experts, outer: _Exchange | None = None
    ) -> None:
        """`choices`: ids and weights of the rows."""
        self.steps, self.outer, values, n = steps, outer, steps.values, steps.size
        (self.tokens, each), counts = values[choices[0]].shape, TensorSpec("int64", (n,))
        self.sent_rows, self.all_rows = min(n, each) * self.tokens, n * self.tokens
        self.expected = n * expected_rows(experts.total, experts.held, each, self.tokens)
        level = "" if outer is None else f".{steps.axis}"
        self.rows, self.sent, self.received = (f"{name}{level}" for name in ("tokens", "sent", "received"))
        steps.add(
            "paraplan.route_plan",
            ("%" + choices[0], n, experts.held, experts.first),
            {self.rows: TensorSpec("int64", (self.sent_rows,)), self.sent: counts},
        )
        gathered = [steps.exchange(ALL_GATHER, name, f"{name}*") for name in choices]
        self.here = (f"{gathered[0]}.here", f"{gathered[1]}.here")
        steps.add(
            "paraplan.route_here",
            (*("%" + name for name in gathered), n, experts.held, experts.start),
            {**{name: values[of] for name, of in zip(self.here, gathered, strict=True)}, self.received: counts},
        )

    def _spec(self, like: str, shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(self.steps.values[like].dtype, shape)

    def _route(self, name: str, to: str, rows: int, ways: tuple[str, str]) -> str:
        return self.steps.exchange(ROUTE, name, to, ("%" + ways[0], "%" + ways[1], rows, self.expected), rows)

    def there(self, name: str) -> str:
        """A value's rows at the experts."""
        name = name if self.outer is None else self.outer.there(name)
        width = self.steps.values[name].shape[1]
        made = {f"{name}>": self._spec(name, (self.sent_rows, width))}
        rows = self.steps.add("aten.index_select.default", ("%" + name, 0, "%" + self.rows), made)
        return self._route(rows, f"{name}.there", self.all_rows, (self.sent, self.received))

    def back(self, name: str, to: str) -> str:
        """Results at the tokens they are for, added up: along this axis, then along those before."""
        width = self.steps.values[name].shape[1]
        rows = self._route(name, f"{name}<", self.sent_rows, (self.received, self.sent))
        made = {to if self.outer is None else f"{name}~": self._spec(name, (self.tokens, width))}
        added = self.steps.add("paraplan.route_add", ("%" + rows, "%" + self.rows, self.tokens), made)
        return added if self.outer is None else self.outer.back(added, to)


def _exchange(op: Op, context: LocalContext, axis: int, first: int) -> _Exchange:
    """The exchange along every axis that experts are sharded over, the first of which is `axis`; the last one.

    `first`: the place of the tokens among the op's inputs; ids, weights and experts follow.
    """
    steps, layout, experts = Steps(op, context, axis), context.in_layouts[first + 3], context.inputs[first + 3]
    choices, found = (f"in{first + 1}", f"in{first + 2}"), None
    total = held = experts.shape[0]
    begin: Arg = 0
    for level in (at for at, place in enumerate(layout) if place == Shard(dim=0)):
        held //= context.mesh_shape[level]
        upto = (*layout[: level + 1], *(R,) * (len(layout) - level - 1))
        start = context.offset(experts, upto, 0)
        found = _Exchange(steps.along(level), choices, _Experts(total, begin, held, start), found)
        choices, begin = found.here, start
    assert found is not None, "a route shards the experts"
    return found


def route_experts(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.experts` with tokens exchanged; see `OpDef.expand`."""
    exchange = _exchange(op, context, axis, 0)
    steps = exchange.steps
    x = exchange.there("in0")
    args = ("%" + x, *("%" + name for name in exchange.here), *steps.args[3:])
    dtype = steps.values["in0"].dtype
    made = steps.add(op.target, args, {"made": TensorSpec(dtype, (exchange.all_rows, steps.values["in4"].shape[1]))})
    return steps.graph((exchange.back(made, "out"),))


def route_experts_grad(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.experts_grad` with tokens and gradients exchanged; see `OpDef.expand`."""
    exchange = _exchange(op, context, axis, 1)
    steps = exchange.steps
    g, x = exchange.there("in0"), exchange.there("in1")
    args = ("%" + g, "%" + x, *("%" + name for name in exchange.here), *steps.args[4:])
    rows = (steps.values[x], steps.values[exchange.here[1]])
    specs = (*rows, *(steps.values[name] for name in ("in4", "in5")))
    names = ("gx", "gw", "g_in", "g_out")
    outs = tuple(None if out is None else name for out, name in zip(op.outs, names, strict=True))
    steps.values |= {name: spec for name, spec in zip(outs, specs, strict=True) if name is not None}
    steps.ops.append(Op(target=op.target, args=args, outs=outs))
    home = tuple(None if name is None else exchange.back(name, f"{name}^") for name in outs[:2])
    return steps.graph((*home, *outs[2:]))


def _whole(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    return replicated(inputs, outputs)


register("paraplan.route_plan", workspace=workspace.route_plan)(_whole)
register("paraplan.route_here", workspace=workspace.route_here)(_whole)


@register("paraplan.route_add")
def route_add(op: Op, inputs: Specs, outputs: Specs) -> OpDims:
    """`_ n, _ -> _ n`."""
    return OpDims((("_", "n"), ("_",)), (("_", "n"),), {"n": inputs[0].shape[1]}, {}, ((0,),))
