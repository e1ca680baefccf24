"""Random functions of torch -> counter-based uniform numbers and arithmetic, so that shards draw what the whole would.

Everything comes from `paraplan.uniform` by inversion: normals by the inverse error function, exponentials by the
logarithm. A Bernoulli draw of probability p is the dropout of a tensor of p: of value 1 or 0 in training, and p,
its mean, in an evaluation, which makes stochastic depth and dropout of whole channels the identity there, as they are
in eager. Numbers differ from those torch's generator would give; their distribution does not, but for the tails
(23 bits: nothing beyond 5.4 standard deviations).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting.rewrite import Rewriter
from paraplan.capture.source_lines import line_of_stack
from paraplan.ir.errors import CaptureError

aten = torch.ops.aten
Found = dict[str, object]
Draw = Callable[[Rewriter, fx.Node, Found], fx.Node | None]
_BELOW_ONE = {torch.bfloat16: 1 - 2.0**-8, torch.float16: 1 - 2.0**-11}


def check_probability(node: fx.Node, p: float) -> None:
    """Dropout's, which eager kernels check and no canonical op does.

    Raises:
        CaptureError: it is none.
    """
    if not 0.0 <= p <= 1.0:
        line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
        raise CaptureError(f"{line}: dropout's probability is {p}; give one from 0 to 1")


def _unit(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """Numbers in (0, 1) of the node's shape, in float32 at least."""
    wanted, like = value_of(node), node.args[0] if node.args else None
    dtype = torch.float64 if wanted.dtype == torch.float64 else torch.float32
    fits = isinstance(like, fx.Node) and (value_of(like).shape, value_of(like).dtype) == (wanted.shape, dtype)
    source = (
        rewriter.call(node, aten.detach.default, like)
        if fits
        else rewriter.call(node, aten.full.default, list(wanted.shape), 0.0, dtype=dtype)
    )
    with rewriter.mode:
        value = torch.empty(wanted.shape, dtype=dtype)
    return rewriter.call(node, autograd.uniform, source, val=value)


def _cast(rewriter: Rewriter, node: fx.Node, x: fx.Node) -> fx.Node:
    """In the node's dtype."""
    wanted = value_of(node).dtype
    return x if value_of(x).dtype == wanted else rewriter.call(node, aten._to_copy.default, x, dtype=wanted)


def _moved(rewriter: Rewriter, node: fx.Node, x: fx.Node, scale: object, shift: object) -> fx.Node:
    """scale · x + shift, either a number or a tensor."""
    if isinstance(scale, fx.Node) or scale != 1:
        x = rewriter.call(node, aten.mul.Tensor, x, scale)
    if isinstance(shift, fx.Node) or shift != 0:
        x = rewriter.call(node, aten.add.Tensor, x, shift)
    return x


def _uniform(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node:
    """rand, rand_like, uniform."""
    low, high = float(found.get("from", 0.0)), float(found.get("to", 1.0))  # type: ignore[arg-type]
    made = _cast(rewriter, node, _moved(rewriter, node, _unit(rewriter, node), high - low, low))
    most = _BELOW_ONE.get(value_of(node).dtype)
    if most is None or (low, high) != (0.0, 1.0):
        return made
    return rewriter.call(node, aten.clamp.default, made, None, most)


def _normal(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node:
    """randn, randn_like, normal: √2 · erf⁻¹(2u − 1)."""
    centred = _moved(rewriter, node, _unit(rewriter, node), 2.0, -1.0)
    made = rewriter.call(node, aten.mul.Tensor, rewriter.call(node, aten.erfinv.default, centred), math.sqrt(2.0))
    return _moved(rewriter, node, _cast(rewriter, node, made), found.get("std", 1.0), found.get("mean", 0.0))


def _exponential(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node:
    """−log(u) / λ."""
    made = rewriter.call(node, aten.log.default, _unit(rewriter, node))
    return _cast(rewriter, node, _moved(rewriter, node, made, -1.0 / float(found["lambd"]), 0.0))  # type: ignore[arg-type]


def _integer(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node | None:
    """randint and randint_like, in float32 where the range is below 2^23: ⌊low + (high − low) · u⌋."""
    low, high = found.get("low", 0), found["high"]
    if isinstance(low, fx.Node) or isinstance(high, fx.Node) or int(high) - int(low) >= 1 << 23:  # type: ignore[call-overload]
        return None
    made = _moved(rewriter, node, _unit(rewriter, node), float(int(high) - int(low)), 0.0)  # type: ignore[call-overload]
    made = rewriter.call(node, aten.floor.default, made)
    if max(abs(int(low)), abs(int(high))) > 1 << 24:  # type: ignore[call-overload]  # floats would round the sum
        made = rewriter.call(node, aten._to_copy.default, made, dtype=torch.int64)
    return _cast(rewriter, node, _moved(rewriter, node, made, 1, low))


def _permutation(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node:
    """randperm: the order of uniform numbers."""
    with rewriter.mode:
        value = torch.empty(value_of(node).shape, dtype=torch.float32)
    zeros = rewriter.call(node, aten.full.default, list(value.shape), 0.0, dtype=torch.float32)
    drawn = rewriter.call(node, autograd.uniform, zeros, val=value)
    pair = rewriter.call(node, aten.sort.default, drawn)
    return _cast(rewriter, node, rewriter.call(node, operator.getitem, pair, 1))


def _leaky(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node:
    """rrelu in training: a slope of its own, drawn between two bounds, for every negative element."""
    x, low, high = found["self"], float(found["lower"]), float(found["upper"])  # type: ignore[arg-type]
    if not found["training"]:
        return rewriter.call(node, aten.leaky_relu.default, x, (low + high) / 2)
    slope = _cast(rewriter, node, _moved(rewriter, node, _unit(rewriter, node), high - low, low))
    steep = rewriter.call(node, aten.mul.Tensor, x, slope)
    return rewriter.call(node, aten.where.self, rewriter.call(node, aten.gt.Scalar, x, 0), x, steep)


def _kept(rewriter: Rewriter, node: fx.Node, p: float, like: Tensor) -> fx.Node:
    """1 with probability p, else 0; p in an evaluation, as what drops p of it is the identity then."""
    whole = rewriter.call(node, aten.full.default, list(like.shape), p, dtype=like.dtype)
    if p in (0.0, 1.0):
        return whole
    with rewriter.mode:
        value = torch.empty(like.shape, dtype=like.dtype)
    drawn = rewriter.call(node, autograd.dropout, whole, 1.0 - p, val=value)
    rate = 1.0 - p
    if float(torch.full((), p, dtype=like.dtype).mul(1.0 / (1.0 - rate))) == 1.0:
        return drawn
    above = rewriter.call(node, aten.gt.Scalar, drawn, (1.0 + p) / 2)  # what is kept is p / p, rounded
    one = rewriter.call(node, aten.full.default, list(like.shape), 1.0, dtype=like.dtype)
    return rewriter.call(node, aten.where.self, above, one, drawn)


def _bernoulli(rewriter: Rewriter, node: fx.Node, found: Found) -> fx.Node:
    """Of one probability, or of a tensor of them: 1 where u < p."""
    p = found.get("p", node.args[0])
    if isinstance(p, fx.Node):
        return _cast(rewriter, node, rewriter.call(node, aten.lt.Tensor, _unit(rewriter, node), p))
    if not value_of(node).is_floating_point():  # has no mean
        return _cast(rewriter, node, rewriter.call(node, aten.lt.Scalar, _unit(rewriter, node), float(p)))  # type: ignore[arg-type]
    return _kept(rewriter, node, float(p), value_of(node))  # type: ignore[arg-type]


def _floored(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """⌊p + rand⌋ is a Bernoulli draw of p."""
    sum_ = node.args[0]
    if not isinstance(sum_, fx.Node) or aten_name(sum_.target) != "add" or len(sum_.users) != 1 or sum_.kwargs:
        return None
    for draw, p in (tuple(sum_.args), tuple(reversed(sum_.args))):
        plain = isinstance(draw, fx.Node) and aten_name(draw.target) == "rand" and len(draw.users) == 1
        if plain and isinstance(p, float) and 0 <= p <= 1:
            return _kept(rewriter, node, p, value_of(node))
    return None


def recognise_depth(rewriter: Rewriter, graph: fx.Graph) -> None:
    """Replaces the draws of stochastic depth, before `rand` is."""
    for node in list(graph.nodes):
        if aten_name(node.target) == "floor":
            made = _floored(rewriter, node)
            if made is not None:
                rewriter.replace(node, made)


RANDOM_RULES: dict[str, Draw] = {
    **dict.fromkeys(("rand", "rand_like", "uniform"), _uniform),
    **dict.fromkeys(("randn", "randn_like", "normal", "normal_functional"), _normal),
    "exponential": _exponential,
    "randperm": _permutation,
    "rrelu": _leaky,
    "bernoulli": _bernoulli,
    **dict.fromkeys(("randint", "randint_like"), _integer),
}
