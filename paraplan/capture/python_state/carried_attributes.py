"""Attributes that a forward reads and then changes: state that goes from step to step outside of any graph.

`self.steps += 1` is captured once and computed with its first value for ever. Three kinds do no harm and are let
through: a constant made where there was nothing (a mask, cached), what nothing is computed from (a second export makes
the same graph, with a value that can be counted up and appended to, and not used otherwise), and what is the same after
a second forward, which makes the same graph. Everything else is refused by name.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from paraplan.capture.python_state.values import ABSENT, is_plain
from paraplan.capture.source_lines import line_of_error
from paraplan.ir.errors import CaptureError
from paraplan.kernels.torch_private import OpOverload, tree_leaves, tree_map_only

_WAY_OUT = (
    "keep it as a buffer (register_buffer) that forward writes as a tensor, or have the training loop change it and "
    "declare it dynamic"
)
_MODE = "set it in the training loop, or put it back before forward ends"
_SETTLED = "; or run forward once on such a batch before, which settles it"


_DERIVED = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Of torch's recurrent layers: lists of their own parameters, made again whenever one is set."""


class Changed(NamedTuple):
    """An attribute, or an item of one, that was read and then changed.

    Attributes:
        owner: the caller's own object.
        name, item: as in `reads.Read`.
        was: before; `now`: after.
        where: what messages call it.
        constant: whether the tensors in `now` are computed from constants alone.
        line: where it was first read.
        is_read: False where it is written before anything reads it.
    """

    owner: Any
    name: str
    item: tuple[Any, ...]
    was: object
    now: object
    where: str
    constant: bool
    line: str = ""
    is_read: bool = True

    @property
    def is_carried(self) -> bool:
        """Whether a later step may compute with it."""
        return self.is_read and not self.is_cache and self.name not in _DERIVED

    @property
    def is_cache(self) -> bool:
        """Whether a constant was made where there was nothing."""
        is_nothing = self.was is None or self.was is ABSENT or (_is_container(self.was) and not self.was)
        return is_nothing and self.constant and bool(tensors_in(self.now))


def _is_container(value: object) -> bool:
    return isinstance(value, (list, dict, set, deque))


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in lists, mappings and the like."""
    leaves = list(value) if isinstance(value, (set, frozenset, deque)) else tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


Export = Callable[[Mapping[int, object]], tuple[str, Sequence[Changed]]]
"""Exports once more, each change's attribute (by its index) given another value first; the graph's text and what that
forward changed."""


def refuse_carried(changes: Sequence[Changed], graph: str, again: Export) -> None:
    """Refuse what is carried from step to step and may matter; warn of the rest that forward changes.

    Args:
        changes: what one export's forward read and then changed.
        graph: the text of the graph it made.
        again: exports once more; called with values for some of the changes, by index.
    Raises:
        CaptureError: names attribute, line and way out.
    """
    carried = {index: each for index, each in enumerate(changes) if each.is_carried}
    if not carried:
        return
    line, text = "", ""
    try:
        text, _ = again({index: _Unusable(each.name) for index, each in carried.items()})
    except CaptureError as fault:
        line = line_of_error(fault.__cause__ or fault)
    if text != graph:  # it was used, or asked whether it is None
        if not _is_steady(changes, carried, graph, again):
            first = next((each for each in carried.values() if each.name in line), next(iter(carried.values())))
            at = line or first.line
            raise CaptureError(
                f"{f'{at}: ' if at else ''}forward changes {first.where} ({_told(first)}) and computes with it, so "
                f"every step would be captured with its first value; "
                f"{_MODE if first.name == 'training' else _WAY_OUT}"
                f"{_SETTLED if _settles(changes, again) else ''}"
            ) from None
    modes = {each.was: each for each in carried.values() if each.name == "training"}
    for each in (*modes.values(), *(each for each in carried.values() if each.name != "training")):
        warnings.warn(
            f"forward changes {each.where} ({_told(each)}); nothing in a step depends on that, and a captured step "
            "leaves it as it is",
            stacklevel=2,
        )


def _is_steady(changes: Sequence[Changed], carried: Mapping[int, Changed], graph: str, again: Export) -> bool:
    """Whether a second forward changes nothing more and makes the same graph."""
    if not all(is_plain(each.now) for each in carried.values()):
        return False
    try:
        text, more = again({index: each.now for index, each in carried.items()})
    except CaptureError:  # what goes wrong in a second forward is no proof
        return False
    return text == graph and not any(each.is_carried for each in more)


def _settles(changes: Sequence[Changed], again: Export) -> bool:
    """Whether a second forward changes nothing of what the first has left, tensors by their shapes."""
    try:
        more = again({index: _with_values(each.now) for index, each in enumerate(changes)})[1]
    except CaptureError:
        return False
    return not any(each.is_read for each in more)


def _with_values(value: object) -> object:
    return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype), value)


def _told(each: Changed) -> str:
    if is_plain(each.was) and is_plain(each.now) and not _is_container(each.was):
        return f"{'absent' if each.was is ABSENT else repr(each.was)} to {each.now!r}"
    return "a tensor" if isinstance(each.now, Tensor) else f"a {type(each.now).__name__}"


def is_constant(node: fx.Node, names: Mapping[fx.Node, str]) -> bool:
    """Whether a value of an exported graph depends on no parameter, buffer, input or random number."""
    seen, queue = set(), [node]
    while queue:
        at = queue.pop()
        if at in seen:
            continue
        seen.add(at)
        if at.op == "placeholder" and not names.get(at, "").startswith("constant:"):
            return False
        if isinstance(at.target, OpOverload) and torch.Tag.nondeterministic_seeded in at.target.tags:
            return False
        queue += at.all_input_nodes
    return True


class _Used(Exception):
    """Something was made of a value that cannot be used."""


class _Unusable:
    """Counts, collects, and can be put to no use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name in _COLLECTS:
            return lambda *args, **kwargs: None
        raise _Used(name)

    def __setitem__(self, key: object, value: object) -> None:
        pass


_COLLECTS = ("append", "appendleft", "extend", "insert", "add", "update", "clear")
_COUNTS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_USES = (
    "bool",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "hash",
    "int",
    "float",
    "index",
    "complex",
    "str",
    "repr",
    "format",
    "len",
    "iter",
    "contains",
    "getitem",
    "neg",
    "pos",
    "abs",
    "round",
    "matmul",
    "rmatmul",
    "call",
)


def _count(self: _Unusable, *others: object) -> _Unusable:
    if all(isinstance(other, (int, float, complex, _Unusable)) for other in others):
        return self
    raise _Used(self._name)


def _use(self: _Unusable, *args: object) -> Any:
    raise _Used(self._name)


for _name in _COUNTS:
    for _spelled in (f"__{_name}__", f"__r{_name}__", f"__i{_name}__"):
        setattr(_Unusable, _spelled, _count)
for _name in _USES:
    setattr(_Unusable, f"__{_name}__", _use)
