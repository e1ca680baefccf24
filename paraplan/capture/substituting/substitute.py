"""Replaces torch's ops in the forward graph by the canonical ones, which rules and kernels exist for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.flow import aten_name, value_of
from paraplan.capture.precision import brought_by
from paraplan.capture.rewriting import contractions
from paraplan.capture.rewriting.flattened import sink_merges
from paraplan.capture.rewriting.rewrite import Rewriter, remove_dead
from paraplan.capture.source_lines import line_of_stack
from paraplan.capture.substituting.recognise import recognise
from paraplan.capture.substituting.recognise_elementwise import recognise_elementwise
from paraplan.capture.substituting.substitute_attention import attention
from paraplan.capture.substituting.substitute_loss import LOSSES
from paraplan.capture.substituting.substitute_random import RANDOM_RULES, check_probability, recognise_depth
from paraplan.capture.substituting.substitute_tensor import TENSOR_RULES, join_selects
from paraplan.ir.errors import CaptureError
from paraplan.kernels.dtypes import dtype_name
from paraplan.kernels.torch_private import OpOverload

aten = torch.ops.aten
Rule = Callable[[Rewriter, fx.Node], fx.Node | None]
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "conv1d", "conv2d", "conv3d"})
_RECURRENT = frozenset({"gru", "lstm", "rnn_tanh", "rnn_relu"})


def arguments(node: fx.Node) -> dict[str, object]:
    """All arguments by the schema's names, defaults filled in."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found |= {argument.name: value for argument, value in zip(schema, node.args, strict=False)}
    return found | dict(node.kwargs)


def substitute(graph: fx.Graph, rewriter: Rewriter, precision: str) -> None:
    """Puts canonical ops in.

    Args:
        graph: the forward; is changed.
        rewriter: of that graph.
        precision: what was asked of capture, which messages about dtypes name.
    Raises:
        CaptureError: an op draws random numbers in a way that cannot be split over devices, multiplies different
            dtypes, drops with a probability outside of [0, 1], or reads a mask of native_dropout.
    """
    recognise_depth(rewriter, graph)
    recognise(rewriter, graph)
    recognise_elementwise(rewriter, graph)
    for node in list(graph.nodes):
        _reject_mixed(node, precision)
        rule = _RULES.get(_name(node.target)) if node.op == "call_function" else None
        made = rule(rewriter, node) if rule else None
        if made is not None:
            rewriter.replace(node, made)
    remove_dead(graph)
    for node in graph.nodes:
        if node.op == "call_function":
            _reject_random(node)
    sink_merges(graph, rewriter)
    join_selects(graph, rewriter)
    remove_dead(graph)


def _name(target: object) -> str:
    own = isinstance(target, OpOverload) and target.namespace == "paraplan"
    return f"paraplan.{target._schema.name.split('::')[1]}" if own else aten_name(target)  # type: ignore[attr-defined]


def _reject_random(node: fx.Node) -> None:
    if aten_name(node.target) in _RECURRENT and (not arguments(node)["dropout"] or not arguments(node)["train"]):
        return
    if isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
        line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
        raise CaptureError(
            f"{line}: {node.target} draws random numbers that cannot be reproduced over devices; draw them with "
            "torch.rand, randn, bernoulli or nn.Dropout, or pass them as an input"
        )


def _reject_mixed(node: fx.Node, precision: str) -> None:
    """Products of different dtypes, which fake tensors take and kernels do not."""
    if node.op != "call_function" or aten_name(node.target) not in _PRODUCTS:
        return
    dtypes = {dtype_name(value_of(x).dtype) for x in node.all_input_nodes}
    if len(dtypes) > 1:
        line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
        raise CaptureError(
            f"{line}: {node.target} multiplies {' by '.join(sorted(dtypes))}, which torch's kernels refuse; cast one "
            "operand (x.to(weight.dtype)), and give factories their dtype (torch.rand(..., dtype=x.dtype))"
            f"{brought_by(precision, ' '.join(dtypes))}"
        )


def _linear(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    x, w = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else None
    return rewriter.call(node, autograd.linear, x, w, bias, False)


def _weight(node: object) -> tuple[fx.Node, bool] | None:
    """A 2-D parameter (or its transpose) as (weight, transposed)."""
    if not isinstance(node, fx.Node) or value_of(node).dim() != 2:
        return None
    if (
        aten_name(node.target) in ("t", "transpose", "permute")
        and isinstance(node.args[0], fx.Node)
        and node.args[0].op == "placeholder"
    ):
        return node.args[0], False
    return (node, True) if node.op == "placeholder" else None


def _matmul(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    left, right = node.args[0], node.args[1]
    found, ranks = _weight(right), (value_of(left).dim(), value_of(right).dim())
    if found is not None and ranks[0] >= 2:
        return rewriter.call(node, autograd.linear, left, found[0], None, found[1])
    if ranks[0] > 2 and ranks[1] == 2:
        return rewriter.call(node, autograd.linear, left, right, None, True)
    if ranks[0] == 2 and ranks[1] > 2:
        turned = rewriter.call(node, aten.transpose.int, right, -1, -2)
        made = rewriter.call(node, autograd.linear, turned, left, None, False)
        return rewriter.call(node, aten.transpose.int, made, -1, -2)
    return _batched_matmul(rewriter, node) if min(ranks) > 1 and max(ranks) > 3 else None


def _batched_matmul(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """A product of matrices with several leading dims, broadcast first where they are."""
    batch = value_of(node).shape[:-2]
    operands = [
        x
        if value_of(x).shape[:-2] == batch
        else rewriter.call(node, aten.expand.default, x, [*batch, *value_of(x).shape[-2:]])
        for x in node.args[:2]
    ]
    return rewriter.call(node, autograd.matmul, *operands)


def _addmm(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    bias, x, w = node.args
    found = _weight(w)
    if found is None or value_of(bias).dim() != 1 or node.kwargs:
        return None
    return rewriter.call(node, autograd.linear, x, found[0], bias, found[1])


def _embedding(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    found = arguments(node)
    if found["scale_grad_by_freq"]:
        return None
    return rewriter.call(node, autograd.embedding, found["weight"], found["indices"], found["padding_idx"])


def _embedding_renorm(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """A table whose rows are shortened (`max_norm`), in place and past autograd (torch writes into a detached alias):
    the gradient of the table as it is then is the table's."""
    alias, aten = node.args[0], torch.ops.aten
    if not isinstance(alias, fx.Node) or alias.target != aten.detach.default:
        return None
    after = rewriter.call(node, aten.embedding_renorm.default, alias, *node.args[1:])
    change = rewriter.call(node, aten.sub.Tensor, after, alias)
    return rewriter.call(node, aten.add.Tensor, alias.args[0], change)


def _native_dropout(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """The mask output has no canonical form; a getitem of it stays dangling and is refused."""
    x, p = node.args[0], float(node.args[1])
    made = _dropped(rewriter, node, x, p, node.args[2] is not False)
    for user in list(node.users):
        if user.args[1] != 0:
            raise CaptureError(
                f"{line_of_stack(node.meta.get('stack_trace'))}: the mask of native_dropout is read; use F.dropout"
            )
        rewriter.replace(user, made)
    return None


def _dropout(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    return _dropped(rewriter, node, node.args[0], float(node.args[1]), node.args[2] is not False)


def _dropped(rewriter: Rewriter, node: fx.Node, x: fx.Node, p: float, train: bool) -> fx.Node:
    if not train or p == 0.0:
        return x
    check_probability(node, p)
    with rewriter.mode:
        value = torch.empty(value_of(x).shape, dtype=value_of(x).dtype)
    return rewriter.call(node, autograd.dropout, x, p, val=value)


def _rms_norm(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    found = arguments(node)
    dtype = torch.promote_types(value_of(found["input"]).dtype, torch.float32)  # what torch computes it in
    eps = torch.finfo(dtype).eps if found["eps"] is None else found["eps"]
    return rewriter.call(node, autograd.rms_norm, found["input"], len(found["normalized_shape"]), found["weight"], eps)


def _split(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    """Pieces of a split, chunk or unbind become slices or selects."""
    source = node.args[0]
    name = aten_name(node.target)
    rank = value_of(source).dim()
    dim = int(arguments(node)["dim"]) % rank
    sizes = [1] * len(node.meta["val"]) if name == "unbind" else [piece.shape[dim] for piece in node.meta["val"]]
    for user in list(node.users):
        index = int(user.args[1]) % len(sizes)
        start = sum(sizes[:index])
        target = (
            (aten.select.int, source, dim, index)
            if name == "unbind"
            else (aten.slice.Tensor, source, dim, start, start + sizes[index], 1)
        )
        rewriter.replace(user, rewriter.call(user, *target))
    return None


def _copied(rewriter: Rewriter, node: fx.Node) -> fx.Node:
    """copy(x, y), a write over all of x, is y in x's shape and dtype; autograd knows no formula for it."""
    source, wanted = node.args[1], value_of(node)
    assert isinstance(source, fx.Node)
    if value_of(source).dtype != wanted.dtype:
        source = rewriter.call(node, aten._to_copy.default, source, dtype=wanted.dtype)
    if value_of(source).shape != wanted.shape:
        source = rewriter.call(node, aten.expand.default, source, list(wanted.shape))
    return source


def _einsum(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    equation, operands = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    shapes = tuple(tuple(value_of(operand).shape) for operand in operands)
    if contractions.parse(equation, shapes) is None:
        return None
    return rewriter.call(node, contractions.einsum, equation, operands)


def _attention(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    return attention(rewriter, node, arguments(node))


def _tensor(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    return TENSOR_RULES[_name(node.target)](rewriter, node, arguments(node))


def _drawn(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    return RANDOM_RULES[aten_name(node.target)](rewriter, node, arguments(node))


def _loss(rewriter: Rewriter, node: fx.Node) -> fx.Node | None:
    return LOSSES[aten_name(node.target)](rewriter, node, arguments(node))


_RULES: dict[str, Rule] = {
    "linear": _linear,
    "einsum": _einsum,
    "copy": _copied,
    "matmul": _matmul,
    "mm": _matmul,
    "addmm": _addmm,
    "embedding": _embedding,
    "embedding_renorm": _embedding_renorm,
    "native_dropout": _native_dropout,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unbind", "tensor_split"), _split
    ),
    **dict.fromkeys(LOSSES, _loss),
    **dict.fromkeys(RANDOM_RULES, _drawn),
    **dict.fromkeys(TENSOR_RULES, _tensor),
}
