"""What a captured step has as constants of Python: modes of modules, hooks, methods, options of torch's modules, which
parameters and buffers there are, and whatever else forward and loss function read (numbers, text, lists, tensors that
are attributes, globals, closures).

Changing one afterwards (`model.bn.eval()`, `model.drop.p = 0`, `model.tau *= 0.9`) changes what the model computes and
not what was captured, so all are compared before every step: per module one look-up of all names and one comparison.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from paraplan.capture.hooks import global_hook_fault
from paraplan.capture.python_state.aliases import names_of
from paraplan.capture.python_state.code import HOOKS, from_key
from paraplan.capture.python_state.dynamic import as_tensor
from paraplan.capture.python_state.reading import Reads
from paraplan.capture.python_state.reads import declared_of
from paraplan.capture.python_state.setting_keys import SettingKind, setting_key
from paraplan.capture.python_state.setting_paths import outside_value, settings_in, value_at
from paraplan.capture.python_state.values import is_plain, named, same_text, text_of, token
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.model.program import Program
from paraplan.runtime.state.methods import Methods
from paraplan.runtime.state.registered import Registries

_OPTION = (bool, int, float, str, type(None))
_MODE = "training"


class Settings:
    """Those of a model as it is now.

    Args:
        model: is held weakly: what is gone cannot change.
        program: captured of it; says what its forward read.
        reads: what was read in this process, where the program was captured here.
        again: what a user does to have the model captured as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        reads: Reads | None = None,
        again: str = "call fit again with the model as it is to train",
    ) -> None:
        self._model, self._program, self._reads, self._again = weakref.ref(model), program, reads or Reads(), again
        self._modules = [_Module(name, module) for name, module in model.named_modules()]
        self._registered, self._methods = Registries(model), Methods(model)
        keys = [key for key in program.settings if setting_key(key).kind is SettingKind.GLOBAL]
        globals_ = ((from_key(key), program.settings[key]) for key in keys)
        outside = self._reads.outside or [(each, text) for each, text in globals_ if each is not None]
        self._names = names_of(model)
        values = [(each.where, text, each.value(self._names)) for each, text in self._reads.live]
        for where, text, value in (*values, *((each.where, text, outside_value(each)) for each, text in outside)):
            self._same(where, text, value)
        self._outside = [(each, *_snapshot(outside_value(each))) for each, _ in outside]
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        """Take the attributes as they are now."""
        program = self._program
        read: dict[int, tuple[Any, dict[tuple[str, tuple[Any, ...]], _Said]]] = {}
        declared = declared_of((model,), [entry.attribute for entry in program.batch.values() if entry.attribute])
        for name, module in model.named_modules():
            where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
            options = [key for key in (_MODE, *_options(module)) if (id(module), key) not in declared]
            said = {(key, ()): _Said(where, None) for key in options}
            read[id(module)] = (module, said)
        for _, place in settings_in(model, program):
            found = read.setdefault(id(place.owner), (place.owner, {}))[1]
            found.setdefault((place.name, place.item), _Said(place.where, place.path))
        for each, _ in self._reads.live:
            found = read.setdefault(id(each.owner), (each.owner, {}))[1]
            found.setdefault((each.name, each.item), _Said(each.where, None))
        self._owners = [_Owner(owner, said, self._names) for owner, said in read.values()]
        chains = {_Link(owner, name) for _, place in settings_in(model, program) for owner, name in place.chain}
        self._links = [*chains, *(_Link(owner, name) for owner, name in self._reads.links)]

    def check(self, evaluating: bool = False) -> None:
        """Whether they still are so; an evaluation may be taken in another mode.

        Raises:
            PlanMismatchError: one is not; names module and setting, what it was and is, and the way out.
        """
        model = self._model()
        if model is not None and any(owner.holds_registered for owner in self._owners):
            self._names.clear()
            self._names.update(names_of(model))
        if any(link.differs() for link in self._links):
            self._follow()
        for owner in self._owners:
            if owner.differs():
                self._refuse(owner, (_MODE,) if evaluating else ())
        for module in self._modules:
            if fault := module.fault():
                raise PlanMismatchError(f"{module.where} {fault} {self._again}")
        if fault := self._methods.fault():
            raise PlanMismatchError(f"{fault} {self._again}")
        if fault := global_hook_fault():
            raise PlanMismatchError(fault)
        if model is not None and (fault := self._registered.fault()):
            raise PlanMismatchError(f"{fault}; put it back, or {self._again}")
        for each, now_is, said in self._outside:
            if not now_is(outside_value(each)):
                now = text_of(outside_value(each))
                raise PlanMismatchError(
                    f"{each.where} was {said} when the step was captured and is {now} now; set it "
                    f"back, or make it an attribute of the model and declare it dynamic, or {self._again}"
                )

    def _same(self, where: str, was: str, value: object) -> None:
        now = text_of(value)
        if not same_text(was, now):
            raise PlanMismatchError(
                f"{where} was {was} when the step was captured and is {now} now; set it back, or {self._again}"
            )

    def _follow(self) -> None:
        """An object whose attributes forward reads was put in another's place: equal in them, or refused."""
        model = self._model()
        if model is None:
            return
        for key, place in settings_in(model, self._program):
            value = named(value_at(place.owner, place.name, place.item), self._names)
            self._same(place.where, self._program.settings[key], value)
        now_at = {id(was): now for link in self._links for was, now in (link.replaced(),) if now is not was}
        live = [(each._replace(owner=now_at.get(id(each.owner), each.owner)), text) for each, text in self._reads.live]
        for each, text in live:
            self._same(each.where, text, each.value(self._names))
        links = tuple((now_at.get(id(owner), owner), name) for owner, name in self._reads.links)
        self._reads = self._reads._replace(links=links, live=tuple(live))
        self._remember(model)

    def _refuse(self, owner: _Owner, but: tuple[str, ...]) -> None:
        different = owner.difference(but)
        if different is None:
            return
        name, item, said, was, now = different
        key = name + "".join(f"[{each!r}]" for each in item)
        ways = "set it back"
        if said.path is not None and "[" not in said.path and as_tensor(owner.value(name)) is not None:
            ways += f", declare it an input of the step (dynamic=[{said.path!r}])"
        raise PlanMismatchError(
            f"{said.where} was captured with {key}={was} and has {key}={now} now; {ways}, or {self._again}"
        )


class _Said(NamedTuple):
    """What messages call an attribute, and what `dynamic` calls it."""

    where: str
    path: str | None


def _snapshot(value: object) -> tuple[Callable[[object], bool], str]:
    """Whether a later value is still the same, and the text of the present one."""
    if is_plain(value):
        kept, kind = copy.deepcopy(value), type(value)
        return lambda now: type(now) is kind and (now is kept or bool(now == kept)), text_of(value)
    was = token(value)
    return lambda now: token(now) == was, text_of(value)


class _Owner:
    """The attributes of one module or object: those in its dictionary that `==` compares at once, others one by one."""

    def __init__(self, owner: Any, said: dict[tuple[str, tuple[Any, ...]], _Said], names: Mapping[int, str]) -> None:
        self._ref: Callable[[], Any] = _reference(owner)
        self._said, self._names = said, names
        held = getattr(owner, "__dict__", {})
        quick = [name for name, item in said if not item and name in held and is_plain(held[name])]
        self._quick = quick
        self._get = itemgetter(*quick, *quick[:1]) if len(quick) == 1 else itemgetter(*quick) if quick else None
        self._values = copy.deepcopy(self._get(held)) if self._get else ()
        self._types = list(map(type, self._values))
        others = [(name, item) for name, item in said if name not in quick or item]
        slow = [(name, item, value_at(owner, name, item)) for name, item in others]
        self._slow = [(name, item, *_snapshot(named(value, names))) for name, item, value in slow]
        self.holds_registered = any(named(value, names) is not value for _, _, value in slow)

    def _now(self, owner: Any, name: str, item: tuple[Any, ...]) -> object:
        return named(value_at(owner, name, item), self._names)

    def value(self, name: str) -> object:
        """One as it is."""
        return value_at(self._ref(), name)

    def differs(self) -> bool:
        """Whether one is another than it was."""
        owner = self._ref()
        if owner is None:
            return False
        if self._get is not None:
            try:
                now = self._get(owner.__dict__)
            except KeyError:
                return True
            if now != self._values or list(map(type, now)) != self._types:
                return True
        return bool(self._slow) and any(
            not now_is(self._now(owner, name, item)) for name, item, now_is, _ in self._slow
        )

    def difference(self, but: tuple[str, ...]) -> tuple[str, tuple[Any, ...], _Said, str, str] | None:
        """The first that is: name, item, what it is called, what it was and is; None where only those of `but` are."""
        owner = self._ref()
        for name, was in zip(self._quick, self._values, strict=False):
            now = value_at(owner, name)
            if name not in but and (type(now) is not type(was) or now != was):
                return name, (), self._said[name, ()], text_of(was), text_of(now)
        for name, item, now_is, text in self._slow:
            value = self._now(owner, name, item)
            if not now_is(value):
                said = text_of(value)
                return (
                    name,
                    item,
                    self._said[name, item],
                    text,
                    said if said != text else "another, or written in place,",
                )
        return None


class _Link:
    """An attribute that holds an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = _reference(owner), name
        self._held = _reference(value_at(owner, name))

    def differs(self) -> bool:
        """Whether it holds another."""
        owner = self._owner()
        return owner is not None and value_at(owner, self._name) is not self._held()

    def replaced(self) -> tuple[Any, Any]:
        """The object it held, and that it holds."""
        owner, was = self._owner(), self._held()
        return was, was if owner is None or was is None else value_at(owner, self._name)


class _Module:
    """The hooks, the methods and the children of one module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        self._ref = weakref.ref(module)
        self._hooks = self._hooks_of(module)
        self._has_hooks = any(self._hooks)
        self._children = [(key, _reference(child)) for key, child in module._modules.items()]
        self._class, self._class_forward = type(module), type(module).forward
        self._size, self._methods = len(vars(module)), _methods_of(module)

    @staticmethod
    def _hooks_of(module: nn.Module) -> list[tuple[int, ...]]:
        held = module.__dict__
        return [tuple(held[key]) if held.get(key) else () for key in HOOKS]

    def fault(self) -> str:
        """What was changed, and what to do; "" where nothing was."""
        module = self._ref()
        if module is None:
            return ""
        held = module.__dict__
        if (self._has_hooks or _any_hook(held)) and self._hooks_of(module) != self._hooks:
            return (
                "has other hooks than when the step was captured, and a captured step runs those of then; register "
                "them before, and"
            )
        if method := self._other_method(module, held):
            return (
                f"has another {method!r} than when the step was captured, and a captured step runs that of then; put "
                "it back, or"
            )
        children = held["_modules"]
        if not children and not self._children:
            return ""
        if len(children) != len(self._children):
            return "has other modules than when the step was captured; put them back, or"
        for key, child in self._children:
            if children.get(key) is not child():
                return f"has another module {key!r} than when the step was captured; put that back, or"
        return ""

    def _other_method(self, module: nn.Module, held: dict[str, Any]) -> str:
        """A method that was replaced, of the class or of the module alone; "" where none was."""
        if type(module) is not self._class:
            return "__class__"
        if self._class.forward is not self._class_forward:
            return "forward"
        for name, method in self._methods.items():
            if name not in held or held[name] is not method():
                return name
        if len(held) != self._size or ("forward" in held and "forward" not in self._methods):
            found = next((name for name in _methods_of(module) if name not in self._methods), "")
            self._size = self._size if found else len(held)
            return found
        return ""


def _methods_of(module: nn.Module) -> dict[str, Callable[[], Any]]:
    """Functions that a module holds itself in place of its class' methods."""
    cls = type(module)
    return {
        name: _reference(held)
        for name, held in vars(module).items()
        if callable(held) and name != "_compiled_call_impl" and callable(getattr(cls, name, None))
    }


def _any_hook(held: dict[str, Any]) -> bool:
    return bool(
        held["_forward_hooks"] or held["_forward_pre_hooks"] or held["_backward_hooks"] or held["_backward_pre_hooks"]
    )


def _reference(owner: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(owner)
    except TypeError:
        return lambda: owner


def _options(module: nn.Module) -> tuple[str, ...]:
    """Names of the options of a module of torch's own."""
    if not type(module).__module__.startswith("torch.nn.modules"):
        return ()
    return tuple(key for key, value in vars(module).items() if key[0] != "_" and isinstance(value, _OPTION))
