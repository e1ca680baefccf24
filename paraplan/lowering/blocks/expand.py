"""An op whose strategy takes several instructions: its expansion, emitted step by step.

What the steps are is said by the op's rule (`OpDef.expand`), as a graph over local shapes; here they get the names,
strides, workspace and waits every instruction has. `finish` then puts each exchange beside the work before its result
is needed, so a ring overlaps by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.model.graph import Arg, Graph, map_refs
from paraplan.ir.model.tensor import TensorSpec


class Emitter(Protocol):
    """What an expansion needs of a block being built."""

    def place(
        self,
        target: str,
        args: tuple[Arg, ...],
        kwargs: dict[str, Arg],
        outs: tuple[str | None, ...],
        specs: Sequence[TensorSpec | None],
        inputs: list[str],
    ) -> None:
        """Emit one local op.

        Args:
            target, args, kwargs: the op.
            outs: local names of its results; None for absent ones.
            specs: of its results.
            inputs: local names of its tensors, in order.
        """

    def step(
        self, target: str, sources: Sequence[str], more: tuple[Arg, ...], out: str, shape: tuple[int, ...], axis: int
    ) -> None:
        """Emit a collective of the first source along a mesh axis.

        Args:
            target: the collective.
            sources: local names; the first is sent.
            more: further arguments, which say how.
            out, shape: local name and shape of the result.
            axis: of the mesh.
        """


def emit_expansion(emitter: Emitter, graph: Graph, inputs: Sequence[str], outs: tuple[str | None, ...]) -> None:
    """Emit the ops of an expansion.

    Args:
        emitter: of the block.
        graph: the expansion.
        inputs: local names behind its inputs.
        outs: local names its outputs get.
    """
    names = dict(zip(graph.inputs, inputs, strict=True))
    names |= {made: out for made, out in zip(graph.outputs, outs, strict=True) if made is not None and out is not None}
    stem = next(out for out in outs if out is not None)
    for op in graph.ops:
        for made in op.outs:
            if made is not None:
                names.setdefault(made, f"{stem}/{made}")
        sources = [names[name] for name in op.tensors]
        made_names = tuple(None if made is None else names[made] for made in op.outs)
        if op.target in COLLECTIVES:
            (out,), (made,) = made_names, op.outs
            assert out is not None and made is not None
            axis, more = int(op.kwargs["axis"]), op.args[len(sources) :]
            emitter.step(op.target, sources, more, out, graph.values[made].shape, axis)
            continue
        args = tuple(map_refs(arg, names.__getitem__) for arg in op.args)
        specs = tuple(None if made is None else graph.values[made] for made in op.outs)
        emitter.place(op.target, args, op.kwargs, made_names, specs, sources)
