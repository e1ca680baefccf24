"""Normal forms of indexing and repetition (see `normal_forms`)."""

from __future__ import annotations

from torch import fx

from paraplan.capture.convert import Names, OpCollector, spec_of
from paraplan.capture.rewriting.normal_forms import view_to
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.tensor import TensorSpec


def _spec(node: fx.Node) -> TensorSpec:
    return spec_of(node.meta["val"])


def _indices(writer: OpCollector, given: object) -> tuple[Arg, ...]:
    return tuple(None if index is None else writer.ref(index) for index in given)  # type: ignore[attr-defined]


def _index(writer: OpCollector, node: fx.Node) -> Names:
    return writer.one("paraplan.index", (writer.ref(node.args[0]), _indices(writer, node.args[1])), _spec(node))


def _index_put(writer: OpCollector, node: fx.Node) -> Names:
    accumulate = bool(node.args[3]) if len(node.args) > 3 else bool(node.kwargs.get("accumulate", False))
    args = (writer.ref(node.args[0]), _indices(writer, node.args[1]), writer.ref(node.args[2]), accumulate)
    return writer.one("paraplan.index_put", args, _spec(node))


def _repeat(writer: OpCollector, node: fx.Node) -> Names:
    """repeat -> every repeated dim apart, widened, and merged again."""
    name, spec = str(writer.ref(node.args[0]))[1:], _spec(node)
    times = tuple(int(n) for n in node.args[1])  # type: ignore[union-attr]
    sizes = (1,) * (len(times) - len(writer.values[name].shape)) + writer.values[name].shape
    if 0 in (*times, *sizes):
        return None
    apart: list[int] = []
    wide: list[int] = []
    for n, size in zip(times, sizes, strict=True):
        apart += [1, size] if n > 1 and size > 1 else [size]
        wide += [n, size] if n > 1 and size > 1 else [n * size]
    name = view_to(writer, name, apart)
    if apart != wide:
        name = writer.one("aten.expand.default", ("%" + name, tuple(wide)), TensorSpec(spec.dtype, tuple(wide)))
    return view_to(writer, name, spec.shape)


INDEX_FORMS = {
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    **dict.fromkeys(("index_put", "_unsafe_index_put", "_index_put_impl"), _index_put),
    "repeat": _repeat,
}
