"""The joint forward and backward of a piece, recorded once with fake tensors.

`make_fx` runs over the piece's nodes and `autograd.grad` of its outputs. Every recorded op is labelled with its
phase and the source line it comes from: forward ops with the line of the node being run, backward ops with the
line of the forward node whose gradient is being computed (a hook on each autograd node says when).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx
from torch.func import functionalize

from paraplan.capture.canonical import autograd
from paraplan.capture.cutting.segments import ForwardGraph, Piece
from paraplan.capture.precision import pin_dtypes
from paraplan.capture.source_lines import line_of_stack
from paraplan.capture.torch_private import recording_graph, trace_ops
from paraplan.ir.errors import CaptureError, ParaplanError
from paraplan.ir.model.graph import Phase
from paraplan.kernels.torch_private import FakeTensorMode, OpOverload, gives_alias, tree_leaves, tree_map_only

LABEL = "paraplan_label"
Label = tuple[Phase, str]


class JointGraph(NamedTuple):
    """A recorded joint graph.

    Attributes:
        graph: placeholders in order params, inputs, constants, seed (if random), tangents; results in order
            outputs, asides, gradients of params, gradients of inputs.
        random: whether it takes a seed.
        tangents: per output, whether it takes a tangent.
        param_grads, input_grads: per parameter and input, whether a gradient is asked for.
    """

    graph: fx.Graph
    random: bool
    tangents: tuple[bool, ...]
    param_grads: tuple[bool, ...]
    input_grads: tuple[bool, ...]


class _Labels:
    """Labels nodes as they are recorded; `now` is what the next ones get."""

    def __init__(self) -> None:
        self.now: Label = (Phase.FORWARD, "")
        self._last: fx.Node | None = None

    def switch(self, label: Label) -> None:
        """Everything recorded since the last switch belonged to the old label."""
        graph = recording_graph()
        node = next(iter(graph.nodes), None) if self._last is None else self._last.next
        while node is not None and node.op != "root":
            node.meta[LABEL] = self.now
            self._last, node = node, node.next
        self.now = label


def _hook_gradients(result: object, labels: _Labels, source: str, seen: set[object]) -> None:
    """Has every new autograd node behind a result announce its source when it runs."""
    stack = [x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]

    def announce(grads: object) -> None:
        labels.switch((Phase.BACKWARD, source))

    while stack:
        grad_fn = stack.pop()
        if grad_fn in seen:
            continue
        seen.add(grad_fn)
        if type(grad_fn).__name__ != "AccumulateGrad":
            grad_fn.register_prehook(announce)
        stack += [parent for parent, _ in grad_fn.next_functions if parent is not None]


def line_of_node(node: fx.Node) -> str:
    """The user's line a node comes from."""
    return line_of_stack(node.meta.get("stack_trace"))


BY_STRIDES = frozenset(
    f"aten.{name}"
    for of in ("det", "slogdet", "solve_ex", "solve")
    for name in (f"_linalg_{of}", f"linalg_{of}", of, "logdet")
)
"""Ops that factor a matrix or its transpose, whichever lies row by row."""


def run_nodes(
    nodes: Sequence[fx.Node],
    env: dict[fx.Node, object],
    seed: Tensor | None,
    labels: _Labels,
    hook: bool,
    source_of: Callable[[fx.Node], str] = line_of_node,
) -> None:
    """Runs the nodes of a piece.

    Args:
        nodes: in order.
        env: values by node; results are put there.
        seed: of random ops; None where there are none.
        labels: of the ops that are recorded.
        hook: whether the ops of gradients are labelled as well, when autograd runs them.
        source_of: what ops of a node are labelled with.
    """
    seen: set[object] = set()
    slot = 0
    for node in nodes:
        source = source_of(node)
        labels.switch((Phase.FORWARD, source))
        args, kwargs = tree_map_only(fx.Node, lambda n: env[n], (node.args, node.kwargs))
        if node.target in autograd.RANDOM:
            kwargs = {**kwargs, "seed": seed, "slot": slot}
            slot += 1
        if str(getattr(node.target, "overloadpacket", "")) in BY_STRIDES:  # whose backward depends on how these lie
            args = tree_map_only(Tensor, Tensor.contiguous, args)  # as they do when it runs
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if hook:
            _hook_gradients(env[node], labels, source, seen)


def _untraceable(labels: _Labels, fault: Exception) -> CaptureError:
    """An op that runs while exporting and cannot be differentiated without data."""
    phase, source = labels.now
    what = "its backward" if phase is Phase.BACKWARD else "an op with its gradient"
    shaped = "; sizes must not depend on data: use masks and torch.where instead of indexing by what was found"
    why = f"{type(fault).__name__}: {str(fault).strip().splitlines()[0] if str(fault).strip() else ''}"
    remedy = shaped if "DynamicOutputShape" in why or "DataDependent" in why else ""
    return CaptureError(f"{source or 'somewhere in the forward'}: tracing {what} failed: {why}{remedy}")


def trace_joint(
    forward: ForwardGraph, piece: Piece, mode: FakeTensorMode, asides: Sequence[fx.Node] = ()
) -> JointGraph:
    """Records the joint graph of a piece.

    Args:
        forward: the whole forward.
        piece: of it.
        mode: under which tensors have no data.
        asides: nodes of the piece whose values are results too.
    """
    carries = forward.flows
    outside = [*piece.params, *piece.inputs]
    wanted = [carries[node].carries for node in outside]
    random = any(node.target in autograd.RANDOM for node in piece.nodes)
    tangents = tuple(carries[node].carries for node in piece.outputs)
    with mode:
        args = [_fake_like(node, want) for node, want in zip(outside, wanted, strict=True)]
        args += [_fake_like(node, False) for node in piece.constants]
        args += [torch.empty((), dtype=torch.int64)] if random else []
        args += [_fake_like(node, False) for node, want in zip(piece.outputs, tangents, strict=True) if want]

    labels = _Labels()

    def joint(*flat: Tensor) -> list[Tensor | None]:
        given = iter(flat)
        env: dict[fx.Node, object] = {node: next(given) for node in [*outside, *piece.constants]}
        seed = next(given) if random else None
        with torch.enable_grad():
            run_nodes(piece.nodes, env, seed, labels, hook=True)
            outputs = [env[node] for node in piece.outputs]
            labels.switch((Phase.BACKWARD, ""))
            leaves = [env[node] for node, want in zip(outside, wanted, strict=True) if want]
            heads = [out for out, want in zip(outputs, tangents, strict=True) if want]
            reached = [(out, g) for out, g in zip(heads, given, strict=True) if out.requires_grad]
            grads: Sequence[Tensor | None] = [None] * len(leaves)
            if reached and leaves:  # a float made of a comparison is an output no gradient passes
                outs, into = zip(*reached, strict=True)
                grads = torch.autograd.grad(outs, leaves, into, allow_unused=True)
            labels.switch((Phase.BACKWARD, ""))
        return [*outputs, *(env[node] for node in asides), *grads]

    with mode:
        try:
            module = trace_ops(joint)(*args)
        except ParaplanError:
            raise
        except Exception as fault:
            raise _untraceable(labels, fault) from fault
        if _writes_in_place(module.graph):
            _refuse_writes(module.graph, len(outside) + len(piece.constants))
            module = _without_mutation(module, args)
            _forward_first(module.graph, len(piece.outputs) + len(asides))
        if torch.get_default_dtype() != torch.float32:  # which it is where the program runs
            pin_dtypes(module.graph, mode)
    count = len(piece.params)
    return JointGraph(module.graph, random, tangents, tuple(wanted[:count]), tuple(wanted[count:]))


def _forward_first(graph: fx.Graph, num_outputs: int) -> None:
    """Functionalising makes views of what was written in place anew, where they are returned: after the backward.
    Those that the first results consist of are moved back into the forward, in their order."""
    needed = {node for node in graph.output_node().args[0][:num_outputs] if isinstance(node, fx.Node)}  # type: ignore[index,union-attr]
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    late, label = [], (Phase.FORWARD, "")
    for node in graph.nodes:
        label = node.meta.get(LABEL, label)  # what has none belongs to what is before it
        if node.op == "call_function" and label[0] is Phase.BACKWARD:
            late.append((node, label[1]))
    first = next((node for node, _ in late if node not in needed), None)
    for node, source in late:
        if first is not None and node in needed:
            node.meta[LABEL] = (Phase.FORWARD, source)
            first.meta.setdefault(LABEL, (Phase.BACKWARD, source))
            first.prepend(node)


def trace_forward(piece: Piece, mode: FakeTensorMode, source_of: Callable[[fx.Node], str] = line_of_node) -> fx.Graph:
    """Records the forward alone of a piece; placeholders as in `trace_joint`, the seed always among them.

    Args:
        piece: of the forward.
        mode: under which tensors have no data.
        source_of: what ops of a node are labelled with.
    """
    outside = [*piece.params, *piece.inputs, *piece.constants]
    with mode:
        args = [*(_fake_like(node, False) for node in outside), torch.empty((), dtype=torch.int64)]

    def run(*flat: Tensor) -> list[object]:
        labels = _Labels()
        env: dict[fx.Node, object] = dict(zip(outside, flat, strict=False))
        run_nodes(piece.nodes, env, flat[-1], labels, hook=False, source_of=source_of)
        labels.switch((Phase.FORWARD, ""))
        return [env[node] for node in piece.outputs]

    with mode, torch.no_grad():
        return trace_ops(run)(*args).graph


def _fake_like(node: fx.Node, requires_grad: bool) -> Tensor:
    value = node.meta["val"]
    return torch.empty(value.shape, dtype=value.dtype, device="cpu", requires_grad=requires_grad)


def _writes_in_place(graph: fx.Graph) -> bool:
    return any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in graph.nodes)


def _refuse_writes(graph: fx.Graph, num_given: int) -> None:
    """Writes of a user's function to what the piece was given, or to what is none of its arguments.

    Raises:
        CaptureError: there is one.
    """
    free = [node for node in graph.nodes if node.op == "placeholder"][num_given:]  # gradients, which are its own
    for node in graph.nodes:
        if not (isinstance(node.target, OpOverload) and node.target._schema.is_mutable):
            continue
        root = node
        while gives_alias(root.target) and isinstance(root.args[0], fx.Node):
            root = root.args[0]
        if root.op != "call_function" and root not in free:
            raise CaptureError(
                f"{node.meta[LABEL][1] or 'forward'}: a function of autograd writes a buffer, or what else it was "
                "given, in place, in its backward or by another name, which no captured step sees; write buffers in "
                "the model's forward"
            )


def _without_mutation(module: fx.GraphModule, args: Sequence[Tensor]) -> fx.GraphModule:
    """Some backward formulas write in place; records them again functionally, labels kept."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    output = module.graph.output_node()

    def again(*flat: Tensor) -> object:
        labels = _Labels()
        env: dict[fx.Node, object] = dict(zip(places, flat, strict=True))
        for node in nodes:
            labels.switch(node.meta[LABEL])
            given, named = tree_map_only(fx.Node, lambda n: env[n], (node.args, node.kwargs))
            env[node] = node.target(*given, **named)
        results = tree_map_only(fx.Node, lambda n: env[n], output.args[0])
        labels.switch((Phase.BACKWARD, ""))
        return results

    plain = [arg.detach() for arg in args]
    with torch.no_grad():
        return trace_ops(functionalize(again, remove="mutations"))(*plain)
