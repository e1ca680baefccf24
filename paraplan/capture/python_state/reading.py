"""One export's reading of Python: the recorder, the declared attributes, and what forward left in its attributes."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from paraplan.capture.python_state.aliases import names_of
from paraplan.capture.python_state.carried_attributes import Changed, is_constant, tensors_in
from paraplan.capture.python_state.code import PLAIN_DEFAULTS, Outside, Reached
from paraplan.capture.python_state.contents import content_digest, hooks_text
from paraplan.capture.python_state.dynamic import Attribute, attributes_set
from paraplan.capture.python_state.outside.snapshot import Change
from paraplan.capture.python_state.reads import Read, Recorder, declared_of, settings_of
from paraplan.capture.python_state.setting_keys import LOSS, LOSS_FN, SettingKey, SettingKind
from paraplan.capture.python_state.setting_paths import outside_value, put_at, set_at, value_at
from paraplan.capture.python_state.values import ABSENT, CONTAINERS, text_of


class Reads(NamedTuple):
    """What was read.

    Attributes:
        settings, code: as a `Program` keeps them.
        live: of objects of this process that no program names, with what was read as text.
        outside: globals and closures, as this process has them, likewise.
        links: (owner, attribute) that hold objects whose attributes were read.
    """

    settings: dict[str, str] = {}
    code: dict[str, str] = {}
    live: tuple[tuple[Read, str], ...] = ()
    outside: tuple[tuple[Outside, str], ...] = ()
    links: tuple[tuple[Any, str], ...] = ()


def code_of(model: nn.Module, loss_fn: object) -> dict[str, str]:
    """Digests of the user's functions that a forward and a loss function call, of the variables around those, of a loss
    object's attributes, and of hooks."""
    found = _code(model)
    for name, module in model.named_modules():
        if hooks := hooks_text(module):
            found[f"hooks of {type(module).__name__} {name!r}"] = hooks
    loss = {} if loss_fn is None else _code(loss_fn)
    if loss_fn is not None:
        loss["attributes"] = content_digest(loss_fn)
    return {**found, **{f"{LOSS_FN} {name}": text for name, text in loss.items()}}


def _code(root: object) -> dict[str, str]:
    reached = Reached([root])
    around: dict[str, list[object]] = {}
    for each in reached.outside.values():
        if not each.key and not _is_in_code(each):
            around.setdefault(each.where, []).append(outside_value(each))
    return {**reached.digests(), **{where: content_digest(values) for where, values in sorted(around.items())}}


def _is_in_code(each: Outside) -> bool:
    """Whether a value is a default argument that the function's own digest has."""
    return isinstance(each.root, types.FunctionType) and isinstance(outside_value(each), PLAIN_DEFAULTS)


def loss_text(loss_fn: object) -> str:
    """What a program calls its loss function."""
    return repr(loss_fn) if isinstance(loss_fn, nn.Module) else text_of(loss_fn)


class Reading:
    """What one export reads.

    Args:
        model: the fake copy.
        loss_fn: or None.
        memo: `copy.deepcopy`'s, of the copy.
        source: the model it is a copy of.
        attributes: those declared dynamic.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: object,
        memo: Mapping[int, Any] | None = None,
        source: nn.Module | None = None,
        attributes: Sequence[Attribute] = (),
    ) -> None:
        self.models = (model,) if source is None else (model, source)
        self.attributes = tuple(attributes)
        originals = {id(memo[id(each)]): each for each in (memo or {}).get(id(memo), ()) if id(each) in (memo or {})}
        declared = declared_of(self.models, [each.path for each in attributes])
        self.recorder = Recorder(model, lambda each: originals.get(id(each)), loss_fn, declared)
        self._left: list[tuple[Any, object]] = []
        self._written: list[tuple[Any, object]] = []
        self._around: list[Change] = []
        self.changes: list[Changed] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Under it, attributes are looked up through the recorder."""
        with self.recorder.watching():
            yield

    def reads(self, loss_fn: object, others: Mapping[str, object], choice: object) -> Reads:
        """All of it.

        Args:
            loss_fn: None where the model returns its loss.
            others: arguments of forward that are no tensors, by name.
            choice: which loss is trained on (`outputs.LossChoice`); None for the only one.
        """
        model = self.models[-1]
        names = names_of(model)
        found, outside = self.recorder.reads(names), self.recorder.outside()
        settings, unnamed = settings_of(model, found, outside)
        settings |= {str(SettingKey(SettingKind.ARGUMENT, name=name)): text_of(value) for name, value in others.items()}
        settings |= {LOSS: repr(choice)} if choice is not None else {}
        settings |= {LOSS_FN: loss_text(loss_fn)} if loss_fn is not None else {}
        live = tuple((each, text_of(each.value(names))) for each in unnamed)
        around = tuple((each, text_of(outside_value(each))) for each in outside)
        return Reads(settings, code_of(model, loss_fn), live, around, self.recorder.linked())

    def parted(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The inputs that the caller gives, and the declared attributes by path."""
        names = {each.name: each.path for each in self.attributes}
        given = {name: x for name, x in batch.items() if name not in names}
        return given, {path: batch[name] for name, path in names.items()}

    @contextmanager
    def of(self, attributes: Mapping[str, Tensor]) -> Iterator[None]:
        """Under it, reads are noted, and declared attributes are the given tensors."""
        with attributes_set(self.models, attributes):
            self.recorder.active = True
            try:
                yield
            finally:
                self.recorder.active = False

    def left(self) -> list[Tensor]:
        """The tensors in what forward changed: attributes after reading them, and what is around its code."""
        changed = self.recorder.changed()
        self._left = [(each, _kept(value_at(each.owner, each.name, each.item))) for each in changed]
        self._written = [(each, _kept(value_at(each.owner, each.name))) for each in self.recorder.written]
        self._around = self.recorder.around.note_changes()
        left = [*(now for _, now in self._left), *(each.now for each in self._around)]
        return [x.detach() for now in left for x in tensors_in(now)]

    def settle(self, graph: fx.Graph, names: Mapping[fx.Node, str], first: int) -> None:
        """Takes the results of `left` out of a graph's outputs, and adds what forward changed to `changes`.

        Args:
            graph: what was exported; its output node is changed.
            names: of its placeholders, as in `export.Exported`.
            first: number of the first of these results among the outputs.
        Raises:
            CaptureError: forward changed a global or a variable around it, and that is no cache of constants.
        """
        output = graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        at = first

        def are_constant(value: object) -> bool:
            nonlocal at
            nodes = results[at : at + len(tensors_in(value))]
            at += len(nodes)
            return all(not isinstance(node, fx.Node) or is_constant(node, names) for node in nodes)

        self.changes += [self._changed(each, now, are_constant(now)) for each, now in self._left]
        self.changes += [self._changed(each, now, False)._replace(is_read=False) for each, now in self._written]
        around = [(each, _as_changed(each, are_constant(each.now))) for each in self._around]
        output.args = ((*results[:first], *results[at:]),)
        told = {(id(each.owner), each.name) for each in self.changes}
        self.changes += [each for _, each in around if (id(each.owner), each.name) not in told]
        caches = {id(change) for change, each in around if each.is_cache}
        self.recorder.around.refuse(lambda change: id(change) in caches)

    def _changed(self, each: Any, now: object, constant: bool) -> Changed:
        copied_of = self.recorder.original(each.owner)
        owner = each.owner if copied_of is None else copied_of
        where = Read(owner, each.name, each.item, self.recorder.place_of(each), each.line).where
        return Changed(owner, each.name, each.item, each.was, now, where, constant, each.line)


class _Globals:
    """A module's globals as attributes."""

    def __init__(self, names: dict[str, object]) -> None:
        self.__dict__ = names


def _as_changed(each: Change, constant: bool) -> Changed:
    owner, name, where = each.binding
    return Changed(_Globals(owner) if isinstance(owner, dict) else owner, name, (), each.was, each.now, where, constant)


@contextmanager
def values_set(memo: Mapping[int, Any], changes: Sequence[Changed], values: Mapping[int, object]) -> Iterator[None]:
    """Under it, attributes of a copy have other values; what was not copied (objects of the loss function) gets its own
    back.

    Args:
        memo: `copy.deepcopy`'s, of the copy: copies by the id of what they are of.
        changes: name attributes of the caller's own objects.
        values: by the index of a change.
    """
    undo: list[tuple[Any, str, tuple[Any, ...], object]] = []
    try:
        for index, value in values.items():
            each = changes[index]
            owner = memo.get(id(each.owner), each.owner)
            if owner is each.owner:
                undo.append((owner, each.name, each.item, value_at(owner, each.name, each.item)))
            put_at(owner, each.name, each.item, value)
        yield
    finally:
        for owner, name, item, value in undo:
            if value is ABSENT and not item:
                delattr(owner, name)
            set_at(owner, name, item, value)


def _kept(value: object) -> object:
    """A value as it is now; tensors stay themselves."""
    return copy.copy(value) if isinstance(value, CONTAINERS) else value
