"""Normal forms of ops of complex numbers (see `normal_forms`).

Lazy conjugates and negatives become values of their own: a view with a bit set has no meaning to a collective.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from paraplan.capture.convert import Names, OpCollector, spec_of
from paraplan.ir.model.graph import encode_number

Form = Callable[[OpCollector, fx.Node], Names]


def _elementwise(target: str, of_number: Callable[[complex], complex] = complex) -> Form:
    """The op `target`; of a number, what it makes of that."""

    def form(writer: OpCollector, node: fx.Node) -> Names:
        given, spec = node.args[0], spec_of(node.meta["val"])
        if not isinstance(given, fx.Node):
            args = (spec.shape, encode_number(of_number(complex(given))))  # type: ignore[arg-type]
            return writer.one("aten.full.default", args, spec, {"dtype": ":" + spec.dtype})
        return writer.one(target, (writer.ref(given),), spec)

    return form


def _same(writer: OpCollector, node: fx.Node) -> Names:
    return str(writer.ref(node.args[0]))[1:]


_CONJUGATE = _elementwise("aten._conj_physical.default", complex.conjugate)
_NEGATIVE = _elementwise("aten.neg.default", complex.__neg__)
COMPLEX_FORMS: dict[str, Form] = {
    **dict.fromkeys(("_conj", "_conj_copy", "conj_physical"), _CONJUGATE),
    **dict.fromkeys(("_neg_view", "_neg_view_copy"), _NEGATIVE),
    **dict.fromkeys(("resolve_conj", "resolve_neg"), _same),
    "view_as_real_copy": _elementwise("aten.view_as_real.default"),
    "view_as_complex_copy": _elementwise("aten.view_as_complex.default"),
}
