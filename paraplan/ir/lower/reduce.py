"""Bringing gradients to the layout the optimizer updates in: begun inside the backward, small ones together.

A gradient is final when the last microbatch's backward has passed the first segment that uses its parameter. Its
reduction is issued there and waited for after the backward. Small gradients wait for others that move alike (see
`bundle`); large ones are reduced in place, as nobody else reads the accumulator any more. What is scattered holds its
input until it is done, so of those at most `IN_FLIGHT` are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from paraplan.ir.lower.bundle import BUNDLE_BYTES, Key, bundle_key, is_small, move_together
from paraplan.ir.lower.emit import BlockEmitter
from paraplan.ir.lower.parted import Parted, PartedCalls
from paraplan.ir.mesh import Layout, R, local_shape, parse_layout
from paraplan.ir.plan import ParamLayouts
from paraplan.ir.reshard import Move, reshard_path
from paraplan.ir.tensor import TensorSpec

Dims = tuple[int, ...]

IN_FLIGHT = 2


@dataclass(eq=False)
class _Flight:
    """A reduction under way: what ends it, and whether it holds its input until then."""

    end: Callable[[], None]
    holds: bool


@dataclass
class Reductions:
    """The gradient reductions of a step.

    Attributes:
        layouts: of every parameter.
        specs: of every gradient as it accumulates.
        mesh_shape: of the stage.
        calls: writes steps.
        grads: parameter -> outer name of its reduced gradient.
    """

    layouts: Mapping[str, ParamLayouts]
    specs: Mapping[str, TensorSpec]
    mesh_shape: Dims
    calls: PartedCalls
    grads: dict[str, str] = field(default_factory=dict)
    _waiting: dict[Key, list[str]] = field(default_factory=dict)
    _flying: list[_Flight] = field(default_factory=list)
    _made: dict[object, Parted] = field(default_factory=dict)

    def final(self, names: Iterable[str]) -> None:
        """These parameters' gradients are complete: begin what can begin."""
        for name in names:
            path = self._path(name)
            if not path:
                self.grads[name] = f"acc:{name}"
                continue
            spec, key = self.specs[name], bundle_key(self.specs[name].dtype, path)
            if key is None or not is_small(spec, path[0], self._extended):
                self._send((name,))
                continue
            group = self._waiting.setdefault(key, [])
            group.append(name)
            if sum(self._nbytes(each) for each in group) >= BUNDLE_BYTES:
                self._send(tuple(self._waiting.pop(key)))

    def end(self) -> None:
        """Begin the rest, and wait for all."""
        for group in self._waiting.values():
            self._send(tuple(group))
        self._waiting.clear()
        for flight in self._flying:
            flight.end()
        self._flying.clear()

    @property
    def _extended(self) -> Dims:
        return (1, *self.mesh_shape)

    def _layout(self, name: str) -> Layout:
        return (R, *parse_layout(self.layouts[name].grad))

    def _path(self, name: str) -> tuple[Move, ...]:
        target = (R, *parse_layout(self.layouts[name].state))
        return reshard_path(self.specs[name].shape, self._layout(name), target, self._extended, frozen=1)

    def _nbytes(self, name: str) -> int:
        spec = self.specs[name]
        return TensorSpec(spec.dtype, local_shape(spec.shape, self._layout(name), self._extended)).nbytes

    def _send(self, names: tuple[str, ...]) -> None:
        key = tuple((self.specs[name], self.layouts[name].grad, self.layouts[name].state) for name in names)
        if key not in self._made:
            self._made[key] = self._blocks(f"reduce.{len(self._made)}", names)
        given = {f"grad{index}": f"acc:{name}" for index, name in enumerate(names)}
        end = self.calls.begin(self._made[key], given, tuple(f"grad:{name}" for name in names))
        self.grads.update({name: f"grad:{name}" for name in names})
        holds = any(move.kind != "all_reduce" for move in self._path(names[0]))
        self._flying.append(_Flight(end, holds))
        flying = [flight for flight in self._flying if flight.holds]
        if len(flying) > IN_FLIGHT:
            self._flying.remove(flying[0])
            flying[0].end()

    def _blocks(self, name: str, names: tuple[str, ...]) -> Parted:
        """Issue and wait of one reduction; inputs `grad<i>`."""
        emitter = BlockEmitter(name, self._extended, overwrites=True)
        given = [f"grad{index}" for index in range(len(names))]
        for local, param in zip(given, names, strict=True):
            emitter.give(local, self.specs[param], self._layout(param))
        if len(names) == 1:
            target = (R, *parse_layout(self.layouts[names[0]].state))
            return emitter.parted([emitter.get("grad0", target)])
        locals_ = [emitter.get(local, self._layout(param)) for local, param in zip(given, names, strict=True)]
        return emitter.parted(move_together(emitter, "grads", locals_, [self._path(param) for param in names]))
