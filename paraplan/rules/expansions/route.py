"""A dropless mixture whose tokens go to the ranks of their experts and back: an all-to-all, exact, in known memory.

Along an axis of n ranks with T tokens each the experts are sharded and so are the tokens:

    forward     tokens to the ranks of their experts; experts; results back, added up over a token's ranks
    backward    tokens and gradients of results there; gradients of tokens and weights back

Every rank knows where all tokens go, for the ids and weights of their choices are gathered: a few numbers a token. Rows
are sent as chosen ("route": an all-to-all of unequal parts into buffers of equal size), so no token is dropped, and
received in buffers for the worst case, n·T rows: those that gathering the tokens takes as well. Time differs: the share
1 − C(E − E/n, k) / C(E, k) of n·T rows is sent where routing is even, which is what is priced. Buffers
padded to the worst case would move as many bytes as gathering does.

Sources: Lepikhin et al. 2020 (arXiv 2006.16668), the exchange; Gale et al. 2023 (arXiv 2211.15841), without dropping.
"""

from __future__ import annotations

import math

from paraplan.ir.machine.collectives import ALL_GATHER, ROUTE
from paraplan.ir.model.graph import Graph, Op
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


class _Exchange:
    """The steps around the experts: where tokens go, and rows sent there and back."""

    def __init__(self, op: Op, context: LocalContext, axis: int, first: int) -> None:
        """`first`: the place of the tokens among the op's inputs; ids, weights and experts follow."""
        self.steps = Steps(op, context, axis)
        values = self.steps.values
        self.ids, weights, stack = (f"in{first + index}" for index in (1, 2, 3))
        n, (self.tokens, choices), held = self.steps.size, values[self.ids].shape, values[stack].shape[0]
        total, start = self.steps.args[first + 6], self.steps.args[first + 7]
        self.sent_rows, self.all_rows = min(n, choices) * self.tokens, n * self.tokens
        self.expected = n * expected_rows(total, held, choices, self.tokens)
        counts = TensorSpec("int64", (n,))
        self.steps.add(
            "paraplan.route_plan",
            ("%" + self.ids, n, held, total),
            {"tokens": TensorSpec("int64", (self.sent_rows,)), "sent": counts},
        )
        gathered = [self.steps.exchange(ALL_GATHER, name, f"{name}*") for name in (self.ids, weights)]
        self.here = tuple(f"{name}.here" for name in gathered)
        self.steps.add(
            "paraplan.route_here",
            (*("%" + name for name in gathered), n, held, start),
            {**{name: values[of] for name, of in zip(self.here, gathered, strict=True)}, "received": counts},
        )

    def _spec(self, like: str, shape: tuple[int, ...]) -> TensorSpec:
        return TensorSpec(self.steps.values[like].dtype, shape)

    def _route(self, name: str, to: str, rows: int, ways: tuple[str, str]) -> str:
        return self.steps.exchange(ROUTE, name, to, ("%" + ways[0], "%" + ways[1], rows, self.expected), rows)

    def there(self, name: str) -> str:
        """A value's rows at the experts."""
        width = self.steps.values[name].shape[1]
        made = {f"{name}>": self._spec(name, (self.sent_rows, width))}
        rows = self.steps.add("aten.index_select.default", ("%" + name, 0, "%tokens"), made)
        return self._route(rows, f"{name}.there", self.all_rows, ("sent", "received"))

    def back(self, name: str, to: str) -> str:
        """Results at the tokens they are for, added up."""
        width = self.steps.values[name].shape[1]
        rows = self._route(name, f"{name}<", self.sent_rows, ("received", "sent"))
        return self.steps.add(
            "paraplan.route_add", ("%" + rows, "%tokens", self.tokens), {to: self._spec(name, (self.tokens, width))}
        )


def route_experts(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.experts` with tokens exchanged; see `OpDef.expand`."""
    exchange = _Exchange(op, context, axis, 0)
    steps = exchange.steps
    x = exchange.there("in0")
    args = ("%" + x, *("%" + name for name in exchange.here), *steps.args[3:])
    dtype = steps.values["in0"].dtype
    made = steps.add(op.target, args, {"made": TensorSpec(dtype, (exchange.all_rows, steps.values["in4"].shape[1]))})
    return steps.graph((exchange.back(made, "out"),))


def route_experts_grad(op: Op, context: LocalContext, axis: int) -> Graph:
    """The steps of `paraplan.experts_grad` with tokens and gradients exchanged; see `OpDef.expand`."""
    exchange = _Exchange(op, context, axis, 1)
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
