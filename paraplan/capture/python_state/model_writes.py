"""What a forward writes, checked against the truth, so that no write is lost without a word.

A write under no_grad, or through a detached alias (`x.data`), to a value that a gradient flows through changes the
value and not the gradient, which is the derivative of no function that a graph could hold: refused by name. Some ops
write arguments that their schemas say they only read (running statistics of `instance_norm`): those known are written
out (`explicit`), and every other op that is given a parameter or buffer is run on a copy, really where that is small
and on fake tensors otherwise, and refused where the copy changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from paraplan.capture.source_lines import line_of_stack
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import OpOverload, fake_mode, tree_leaves, tree_map_only

aten = torch.ops.aten
MAX_ELEMENTS = 1 << 18
_UNDER_NO_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


def _instance_norm(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Running statistics are averages over samples of each sample's own."""
    if not use_input_stats or mean is None or var is None:
        return NotImplemented
    own = x.detach().flatten(2)
    count = own.shape[2]
    wide = torch.promote_types(own.dtype, mean.dtype)
    found = own.to(wide).var(2, correction=0), own.to(wide).mean(2)
    mean.copy_((1 - momentum) * mean + momentum * found[1].mean(0))
    var.copy_((1 - momentum) * var + momentum * count / (count - 1) * found[0].mean(0))
    return torch.instance_norm(x, weight, bias, None, None, True, momentum, eps, cudnn_enabled)


def _native_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    if not training or mean is None or var is None:
        return NotImplemented
    return aten._native_batch_norm_legit.default(x, weight, bias, mean, var, True, momentum, eps)  # type: ignore[no-any-return]


def explicit() -> dict[OpOverload, Callable[..., object]]:
    """A decomposition table of ops that write more than they say."""
    return {aten.instance_norm.default: _instance_norm, aten.native_batch_norm.default: _native_batch_norm}


def keep_written(program: ExportedProgram) -> None:
    """Looks for writes whose gradient an export would lose.

    A value that goes to what was detached (or made under no_grad) keeps its gradient: what is written is then a copy,
    if nothing else reads the memory after. (Making a write explicit else detaches what was written, too.)

    Args:
        program: as exported, in-place ops and no_grad regions in it; copies are made in it.
    Raises:
        CaptureError: there is a write to a value that a gradient flows through, where autograd would not see it, or
            one whose gradient no copy keeps; names the line.
    """
    trained = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER and _requires_grad(program, str(spec.target))
    }
    places = [node for node in program.graph_module.graph.nodes if node.op == "placeholder"]
    _look(program.graph_module, {node: node.name in trained for node in places}, set(places), True)


def _requires_grad(program: ExportedProgram, target: str) -> bool:
    param = program.state_dict.get(target)
    return isinstance(param, Tensor) and param.requires_grad


class _Memory(NamedTuple):
    """What a value is an alias of, and the last that detached it from that."""

    base: fx.Node
    fence: fx.Node | None = None


class _Aliases:
    """What the values of a graph are aliases of, as far as it has been looked at."""

    def __init__(self) -> None:
        self._of: dict[fx.Node, _Memory] = {}
        self.apart: dict[fx.Node, None] = {}

    def of(self, x: fx.Node) -> _Memory:
        """A value's; what was set apart is the base of its aliases."""
        found = self._of.get(x, _Memory(x))
        return _Memory(found.fence) if found.fence in self.apart else found  # type: ignore[arg-type]

    def add(self, node: fx.Node, source: fx.Node) -> None:
        """An alias of another value."""
        self._of[node] = self.of(source)

    def fence(self, node: fx.Node, source: fx.Node) -> None:
        """A detached alias."""
        self._of[node] = _Memory(self.of(source).base, node)

    def is_read_else(self, fence: fx.Node, at: fx.Node) -> bool:
        """Whether memory is read after a node, other than through a detached alias."""
        base = self._of[fence].base
        others = {node for node, memory in self._of.items() if memory.base is base and memory.fence is not fence}
        later = False
        for node in at.graph.nodes:
            if later and not {base, *others}.isdisjoint(node.all_input_nodes):
                return True
            later = later or node is at
        return False


def _look(module: fx.GraphModule, carries: dict[fx.Node, bool], given: set[fx.Node], grad: bool) -> None:
    """Finds the writes of a graph; `carries` says through which of its inputs a gradient flows, `given` are inputs of
    the whole, whose writes are told of otherwise."""
    aliases = _Aliases()
    own: set[fx.Node] = set()  # results of no_grad regions that share memory with nothing

    def flows(x: fx.Node) -> bool:
        memory = aliases.of(x)
        return carries.get(x, False) or (memory.fence is None and carries.get(memory.base, False))

    for node in module.graph.nodes:
        if node.op != "call_function":
            carries.setdefault(node, False)
            continue
        if node.target is _UNDER_NO_GRAD:
            inner = getattr(module, node.args[1].target)
            places = [each for each in inner.graph.nodes if each.op == "placeholder"]
            outer = [aliases.of(arg).base for arg in node.args[2:]]
            theirs = {place: flows(arg) for place, arg in zip(places, outer, strict=True)}
            here = {place for place, arg in zip(places, outer, strict=True) if arg in given}
            _look(inner, theirs, here, bool(node.args[0]))
            carries[node] = bool(node.args[0]) and any(map(flows, node.all_input_nodes))
            own |= set() if node.args[0] else set(_own_results(node, inner))
            continue
        for written in _written(node):
            base, fence = aliases.of(written)
            brings = grad and any(flows(x) for x in node.all_input_nodes if x is not written)
            hidden = base not in given and carries.get(base, False) and (fence is not None or not grad)
            if fence is not None and (hidden or brings) and base not in given and not aliases.is_read_else(fence, node):
                aliases.apart[fence] = None
            elif hidden:
                _refuse(node)
            elif brings and fence is not None:
                _refuse_brought(node)
            elif brings and base in own:
                aliases.apart[base] = None
            if brings:
                carries[aliases.of(written).base] = True
        source = _aliased(node)
        if node.target is aten.detach.default:
            aliases.fence(node, node.args[0])
        elif source is not None:
            aliases.add(node, source)
        stops = not grad or node.target is aten.detach.default or _is_made_like(node)
        carries[node] = not stops and _is_float(node) and any(map(flows, node.all_input_nodes))
    for node in aliases.apart:
        _copy(node)
    if aliases.apart:
        module.recompile()


def _own_results(call: fx.Node, inner: fx.GraphModule) -> Iterator[fx.Node]:
    """The results of a region, read one by one, that share memory with no other and no input of it."""
    roots = []
    for result in inner.graph.output_node().args[0]:  # type: ignore[union-attr]
        root, source = result, result
        while source is not None:
            root, source = source, _aliased(source) if isinstance(source, fx.Node) else None  # type: ignore[assignment,arg-type]
        roots.append(root)
    for user in call.users:
        root = roots[user.args[1]] if user.target is operator.getitem else None  # type: ignore[index]
        if isinstance(root, fx.Node) and root.op == "call_function" and roots.count(root) == 1:
            yield user


def _copy(node: fx.Node) -> None:
    """Has all readers of a value read a copy."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(aten.clone.default, (node,))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _refuse_brought(node: fx.Node) -> None:
    line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
    raise CaptureError(
        f"{line}: writes a value that a gradient flows through to a detached tensor, whose memory is also read under "
        "another name; write to a copy (x.detach().clone())"
    )


def _refuse(node: fx.Node) -> None:
    line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
    raise CaptureError(
        f"{line}: writes in place, where autograd does not see it (under no_grad, or through .data or detach()), to a "
        "value that a gradient flows through: its gradient is then that of another value. Write a new value instead: "
        "h = new for its own gradient, or h = h + (new - h).detach() to keep that of h"
    )


def _is_float(node: fx.Node) -> bool:
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in values)


def _is_made_like(node: fx.Node) -> bool:
    """Whether a call takes of a tensor its shape alone (`zeros_like`, `new_empty`)."""
    name = node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else ""
    return name.endswith("_like") or name.startswith("new_")


def _arguments(node: fx.Node) -> Iterator[tuple[Any, object]]:
    """Arguments of a call with their schema entries."""
    if isinstance(node.target, OpOverload):
        for index, entry in enumerate(node.target._schema.arguments):
            value = node.args[index] if index < len(node.args) else node.kwargs.get(entry.name)
            yield entry, value


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """What a call says it writes."""
    for entry, value in _arguments(node):
        if entry.alias_info is not None and entry.alias_info.is_write:
            yield from (x for x in tree_leaves(value) if isinstance(x, fx.Node))


def _aliased(node: fx.Node) -> fx.Node | None:
    """The first argument that a call's result may be an alias of."""
    if node.target is aten.detach.default:
        return node.args[0]  # type: ignore[return-value]
    for entry, value in _arguments(node):
        if entry.alias_info is not None and isinstance(value, fx.Node):
            return value
    return None


def refuse_hidden_writes(program: ExportedProgram) -> None:
    """Runs every op that is given a parameter or buffer and does not say that it writes it.

    Args:
        program: functional.
    Raises:
        CaptureError: one writes it all the same.
    """
    stored = {
        spec.arg.name: str(spec.target)
        for spec in program.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    }
    names: dict[fx.Node, str] = {}
    seen: set[str] = set()
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in stored:
            names[node] = stored[node.name]
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
            continue
        source = _aliased(node)
        if source is not None:
            names |= {node: names[source]} if source in names else {}
            continue
        held = [arg for arg in node.all_input_nodes if arg in names]
        key = f"{node.target} {fx.map_arg((node.args, node.kwargs), _text)}"
        if not held or key in seen:
            continue
        seen.add(key)
        for arg in _changed(node, held):
            name = names[arg].removeprefix("model.")
            line = line_of_stack(node.meta.get("stack_trace")) or "unknown line"
            raise CaptureError(
                f"{line}: {node.target} writes {name!r}, which it does not say: the write would be lost. "
                "Write it out, as buffer.copy_(...), or say so where the op is registered (mutates_args)"
            )


def _text(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return f"{value.dtype}{tuple(value.shape)}" if isinstance(value, Tensor) else "?"


def _changed(node: fx.Node, held: list[fx.Node]) -> list[fx.Node]:
    """Those of some arguments that a call changes; none where it cannot be run."""
    values = [arg.meta.get("val") for arg in node.all_input_nodes]
    if not all(isinstance(value, Tensor) for value in values):
        return []
    if sum(math.prod(value.shape) for value in values) > MAX_ELEMENTS:  # type: ignore[union-attr]
        with fake_mode(), torch.no_grad():
            tensors = {arg: _drawn(arg, torch.empty) for arg in node.all_input_nodes}
            before = {arg: tensors[arg]._version for arg in held}
            return [arg for arg in held if _ran(node, tensors) and tensors[arg]._version != before[arg]]
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        tensors = {arg: _drawn(arg, torch.rand) for arg in node.all_input_nodes}
        kept = {arg: tensors[arg].clone() for arg in held}
        return [arg for arg in held if _ran(node, tensors) and not torch.equal(tensors[arg], kept[arg])]


def _drawn(node: fx.Node, make: Callable[..., Tensor]) -> Tensor:
    value = node.meta["val"]
    if value.is_floating_point() or value.is_complex():
        return make(tuple(value.shape), dtype=torch.float64).to(value.dtype)
    return torch.zeros(tuple(value.shape), dtype=value.dtype)


def _ran(node: fx.Node, tensors: dict[fx.Node, Tensor]) -> bool:
    args, kwargs = tree_map_only(fx.Node, tensors.__getitem__, (node.args, node.kwargs))
    try:
        node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:  # noqa: BLE001  (random values may be no valid ones: then nothing is known of it)
        return False
    return True
