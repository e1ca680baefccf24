"""One step of a marked loop with its gradient, written down as `ir.model.scan_gradient.Step`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from paraplan.capture.convert import OpCollector, finish
from paraplan.capture.cutting.flow import Flow
from paraplan.capture.cutting.kinds import ALL_FORMS, write_body
from paraplan.capture.cutting.segments import ForwardGraph, Piece
from paraplan.capture.joint_graph import trace_joint
from paraplan.capture.rewriting.joined_grads import join_slices
from paraplan.ir.model.scan_gradient import LoopStep
from paraplan.kernels.torch_private import FakeTensorMode


def trace_step(
    nodes: Sequence[fx.Node],
    inputs: Sequence[Sequence[fx.Node]],
    outputs: Sequence[fx.Node],
    size: tuple[int, bool],
    mode: FakeTensorMode,
) -> LoopStep:
    """Traces a step.

    Args:
        nodes: its calls in order.
        inputs: nodes it is given: per-step inputs, carries, constants.
        outputs: the next carries, then the results.
        size: number of steps, and whether time runs backward.
        mode: the fake mode values live in.
    Raises:
        CaptureError: its gradient cannot be traced.
    """
    outside = tuple(node for group in inputs for node in group)
    flows = {node: Flow(carries=_is_float(node)) for node in (*outside, *nodes)}
    graph = ForwardGraph(nodes[0].graph if nodes else outside[0].graph, {}, {}, flows, ())
    joint = trace_joint(graph, Piece(tuple(nodes), (), outside, (), tuple(outputs)), mode)
    writer = OpCollector(ALL_FORMS)
    places = (node for node in joint.graph.nodes if node.op == "placeholder")
    xs, carries, constants = (
        [writer.add_input(next(places), f"{letter}{index}") for index in range(len(group))]
        for letter, group in zip("xck", inputs, strict=True)
    )
    tangents = [writer.add_input(next(places), f"g{n}") for n, there in enumerate(joint.tangents) if there]
    results = write_body(writer, joint.graph)
    made = [str(writer.ref(next(results)))[1:] for _ in outputs]
    grads = [_gradient(writer, next(results)) if want else None for want in joint.input_grads]
    for index, carry in enumerate(carries, len(xs)):
        if joint.tangents[index - len(xs)] and grads[index] is None:
            spec = writer.values[carry]
            grads[index] = writer.one("aten.full.default", (spec.shape, 0.0), spec, {"dtype": ":" + spec.dtype})
    return LoopStep(
        steps=size[0],
        inputs=len(xs),
        carries=len(carries),
        constants=len(constants),
        results=len(outputs) - len(carries),
        reverse=size[1],
        joint=join_slices(finish(writer, [*xs, *carries, *constants, *tangents], [*made, *grads])),
        tangents=joint.tangents,
    )


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()


def _gradient(writer: OpCollector, node: object) -> str | None:
    return None if node is None else str(writer.ref(node))[1:]
