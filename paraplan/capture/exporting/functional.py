"""A functional graph without retracing, where the exported graph is functional but for spelling.

`run_decompositions` traces the whole model once more to make in-place writes explicit and to take composite ops apart:
as dear as the export itself, and paid per layer. Most transformers write nothing in place, and the few composite ops
they use can be respelled one node at a time. A graph with anything else in it is left to `run_decompositions`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from paraplan.capture.exporting.in_place import has_writes, make_functional, writes_of
from paraplan.capture.torch_private import is_region
from paraplan.kernels.torch_private import OpOverload, gives_alias, is_composite

aten = torch.ops.aten

KEPT = frozenset(
    {
        "aten.conv1d.default",
        "aten.conv2d.default",
        "aten.cross_entropy_loss.default",
        "aten.group_norm.default",
        "aten.layer_norm.default",
        "aten.linear.default",
        "aten.matmul.default",
        "aten.max_pool2d.default",
        "aten.adaptive_avg_pool2d.default",
        "aten.scaled_dot_product_attention.default",
        "aten.softmax.int",
        "aten.contiguous.default",
        "aten.__and__.Tensor",
        "aten.pad.default",
        "aten.broadcast_tensors.default",
        "aten.embedding_bag.padding_idx",
        "aten.conv_transpose2d.input",
        "aten.min.other",
        "aten.where.ScalarOther",
        "aten.upsample_bilinear2d.vec",
    }
)
"""Composite ops that decomposition keeps as they are, too (it drops `contiguous`, as cleaning does)."""


def functional(program: ExportedProgram) -> ExportedProgram | None:
    """The program with its graph respelled in place; None where that does not do.

    Args:
        program: as exported, no_grad regions detached.
    """
    graph = program.graph_module.graph
    if any(spec.kind is OutputKind.BUFFER_MUTATION for spec in program.graph_signature.output_specs):
        return None
    if _writes_in_regions(program.graph_module) or not _inline_grad_modes(program.graph_module):
        return None
    if not all(_respellable(node) for node in graph.nodes if node.op == "call_function"):
        return None
    _detach_constants(graph)
    writes = writes_of(graph, lambda target: str(target) in _MAKES)
    if writes is None or not all(_is_kept(write.target) for write in writes):
        return None
    make_functional(graph, writes)
    for node in list(graph.nodes):
        if node.op == "call_function":
            respell = _RESPELL.get(str(node.target))
            if respell is not None:
                respell(node)
    return program


def relink(module: fx.GraphModule) -> None:
    """Has all nodes listed as users of what they read: export leaves out those that nobody reads before a region."""
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            relink(child)


def keep_no_grad(module: fx.GraphModule) -> None:
    """Detaches what no_grad regions return, and of writes there what they write: inlining them would silently give it a
    gradient. What is written itself has none, and goes on being what later writes change: a detached one is not.

    Args:
        module: as exported; changed.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            inner = getattr(module, node.args[1].target)
            if node.args[0] is False:
                _detach_outputs(inner)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            keep_no_grad(child)


def _detach_outputs(module: fx.GraphModule) -> None:
    graph = module.graph
    writes = [node for node in graph.nodes if _is_write(node)]

    def detach(value: fx.Node) -> fx.Node:
        return value if value in writes else _called(graph, aten.detach.default, value)

    for node in writes:
        with graph.inserting_before(node):
            node.args = (node.args[0], *fx.map_arg(node.args[1:], detach))
    for root in dict.fromkeys(map(_root, writes)):
        if root.op != "placeholder":
            with graph.inserting_after(root):
                made = _called(graph, aten.detach.default, root)
            with graph.inserting_after(made):
                own = _called(graph, aten.clone.default, made)  # of a view, later gradients would be lost
            root.replace_all_uses_with(own, delete_user_cb=lambda user, made=made: user is not made)
    output = graph.output_node()
    with graph.inserting_before(output):
        output.args = fx.map_arg(output.args, detach)
    module.recompile()


def _called(graph: fx.Graph, target: OpOverload, value: fx.Node) -> fx.Node:
    made = graph.call_function(target, (value,))
    made.meta = dict(value.meta)
    return made


def _root(write: fx.Node) -> fx.Node:
    """What a write writes to, or a view of it."""
    found = write
    while gives_alias(found.target):
        source = found.args[0]
        assert isinstance(source, fx.Node)
        found = source
    return found


def _is_write(node: fx.Node) -> bool:
    """Whether a call writes its first argument in place and gives it back."""
    target = node.target
    is_mutable = isinstance(target, OpOverload) and target._schema.is_mutable
    return is_mutable and target._schema.name.endswith("_") and isinstance(node.meta.get("val"), Tensor)


def _detach_constants(graph: fx.Graph) -> None:
    """`detach_` of a number that forward wrote out, which has no gradient to lose, is no write."""
    for node in graph.nodes:
        if node.target is aten.detach_.default and node.args[0].target is aten.lift_fresh_copy.default:
            node.target = aten.detach.default


def _respellable(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    if "val" not in node.meta or str(target) in _LEFT:
        return False
    return target._schema.is_mutable or _is_kept(target)


def _is_kept(target: OpOverload) -> bool:
    """Whether an op that writes nothing stays, or is respelled."""
    return not is_composite(target) or str(target) in KEPT or str(target) in _RESPELL


def _writes_in_regions(module: fx.GraphModule) -> bool:
    """Whether anything is written under another grad mode, to what may be read under this one."""
    inner = [child for child in module.children() if isinstance(child, fx.GraphModule)]
    return any(has_writes(child.graph) or _writes_in_regions(child) for child in inner)


_MAKES = KEPT - {"aten.contiguous.default", "aten.broadcast_tensors.default", "aten.pad.default"}
"""Those whose results share memory with nothing."""

_LEFT = frozenset(
    {
        "aten.native_dropout.default",
        "aten.batch_norm.default",
        "aten.native_batch_norm.default",
    }
)


def _replace(node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _make(node: fx.Node, target: object, *args: object, **kwargs: object) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
    made.meta = dict(node.meta)
    return made


def _cast(node: fx.Node) -> None:
    source, made = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    if source.meta["val"].dtype == made.dtype:
        _replace(node, source)
    else:
        _replace(node, _make(node, aten._to_copy.default, source, dtype=made.dtype))


def _reshape(node: fx.Node) -> None:
    _replace(node, _make(node, aten.view.default, node.args[0], list(node.meta["val"].shape)))


def _transpose(node: fx.Node) -> None:
    dims = list(range(node.meta["val"].dim()))[::-1]
    _replace(node, _make(node, aten.permute.default, node.args[0], dims))


def _square(node: fx.Node) -> None:
    _replace(node, _make(node, aten.pow.Tensor_Scalar, node.args[0], 2))


def _dropout(node: fx.Node) -> None:
    source, p, train = node.args
    if not train or p == 0:
        assert isinstance(source, fx.Node)
        _replace(node, source)
        return
    pair = _make(node, aten.native_dropout.default, source, p, train)
    value: Tensor = node.meta["val"]
    pair.meta["val"] = (value, value.new_empty(value.shape, dtype=torch.bool))
    _replace(node, _make(node, operator.getitem, pair, 0))


def _clone(node: fx.Node) -> None:
    _replace(node, _make(node, aten.clone.default, node.args[0]))


def _chunk(node: fx.Node) -> None:
    source, parts, dim = (*node.args, 0)[:3]
    assert isinstance(source, fx.Node) and isinstance(parts, int) and isinstance(dim, int)
    size = -(-source.meta["val"].shape[dim] // parts)
    _replace(node, _make(node, aten.split.Tensor, source, size, dim))


def _expand(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].shape == node.meta["val"].shape:
        _replace(node, source)


_RESPELL: dict[str, Callable[[fx.Node], None]] = {
    "aten.to.dtype": _cast,
    "aten.to.device": _cast,
    "aten.to.dtype_layout": _cast,
    "aten.to.other": _cast,
    "aten.type_as.default": _cast,
    "aten.lift_fresh_copy.default": _clone,
    "aten.chunk.default": _chunk,
    "aten.reshape.default": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.unflatten.int": _reshape,
    "aten.numpy_T.default": _transpose,
    "aten.square.default": _square,
    "aten.dropout.default": _dropout,
    "aten.expand.default": _expand,
}


def _inline_grad_modes(module: fx.GraphModule) -> bool:
    """Puts no_grad regions in place of their calls; False where the graph has other regions."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and is_region(node.target):
            if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
                return False
            inner = getattr(module, node.args[1].target)
            if not _inline_grad_modes(inner):
                return False
            _inline(node, inner)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return not any(node.op in ("get_attr", "call_module") for node in graph.nodes)


def _inline(call: fx.Node, inner: fx.GraphModule) -> None:
    graph = call.graph
    known: dict[fx.Node, fx.Node] = {}
    placeholders = [node for node in inner.graph.nodes if node.op == "placeholder"]
    known.update(zip(placeholders, call.args[2:], strict=True))  # type: ignore[arg-type]
    with graph.inserting_before(call):
        for node in inner.graph.nodes:
            if node.op not in ("placeholder", "output"):
                known[node] = graph.node_copy(node, known.__getitem__)
    results = fx.map_arg(inner.graph.output_node().args[0], known.__getitem__)
    for user in list(call.users):
        _replace(user, results[user.args[1]])
    graph.erase_node(call)
