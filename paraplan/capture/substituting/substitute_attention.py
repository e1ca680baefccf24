"""scaled_dot_product_attention -> the canonical attention, with repeated key/value heads folded back into groups."""

from __future__ import annotations

import math

import torch
from torch import fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.rewriting.rewrite import Rewriter
from paraplan.capture.substituting.substitute_random import check_probability

aten = torch.ops.aten
_PASS = frozenset({"view", "_unsafe_view", "reshape", "clone", "contiguous", "alias"})


def attention(rewriter: Rewriter, node: fx.Node, found: dict[str, object]) -> fx.Node | None:
    """The canonical form of an sdpa node, or None where it has none (then it stays as plain torch ops).

    Args:
        rewriter: places the new nodes.
        node: the sdpa call.
        found: its arguments by name.
    """
    q, k, v, mask = (found[name] for name in ("query", "key", "value", "attn_mask"))
    rank = value_of(q).dim()
    if rank not in (3, 4) or value_of(k).dim() != rank or value_of(v).dim() != rank:
        return None
    if rank == 3:
        q, k, v = (rewriter.call(node, aten.unsqueeze.default, x, 1) for x in (q, k, v))
        mask = (
            rewriter.call(node, aten.unsqueeze.default, mask, 1)
            if mask is not None and value_of(mask).dim() == 3
            else mask
        )
    k, v = _unrepeat(k, v)
    if value_of(q).shape[1] % value_of(k).shape[1] or value_of(k).shape[1] != value_of(v).shape[1]:
        return None
    if not value_of(q).shape[0] == value_of(k).shape[0] == value_of(v).shape[0]:
        return None
    while mask is not None and value_of(mask).dim() < 4:
        mask = rewriter.call(node, aten.unsqueeze.default, mask, 0)
    scale = found["scale"]
    factor = 1.0 / math.sqrt(value_of(q).shape[-1]) if scale is None else float(scale)
    p = float(found["dropout_p"])
    args = (q, k, v, mask, bool(found["is_causal"]), factor)
    if p != 0:
        check_probability(node, p)
        shape = (*value_of(q).shape[:3], value_of(v).shape[3])
        with rewriter.mode:
            value = torch.empty(shape, dtype=value_of(q).dtype)
        made = rewriter.call(node, autograd.attention_dropout, *args, p, val=value)
    else:
        made = rewriter.call(node, autograd.attention, *args)
    return rewriter.call(node, aten.squeeze.dim, made, 1) if rank == 3 else made


def _unrepeat(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The group heads behind repeat_kv of both key and value, where both repeat alike."""
    key, value = _group_source(k), _group_source(v)
    if key is None or value is None or value_of(key).shape[1] != value_of(value).shape[1]:
        return k, v
    return key, value


def _group_source(node: fx.Node) -> fx.Node | None:
    """x of view(expand(unsqueeze(x, 2), [b, g, r, t, d]), [b, g·r, t, d])."""
    seen = node
    while aten_name(seen.target) in _PASS:
        seen = seen.args[0]
    if aten_name(seen.target) != "expand" or value_of(seen).dim() != 5:
        return None
    inner = seen.args[0]
    if aten_name(inner.target) != "unsqueeze" or inner.args[1] not in (2, -3):
        return None
    b, g, r, t, d = value_of(seen).shape
    source = inner.args[0]
    if tuple(value_of(node).shape) != (b, g * r, t, d) or tuple(value_of(source).shape) != (b, g, t, d):
        return None
    return source
