"""Values of the outer namespace that change their layout between blocks, small ones in bundles.

What a collective of few bytes takes is mostly latency, so small values wait for others that move alike (see `bundle`)
until there are enough of them (`bundle.is_full`); a large one goes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import BlockRole
from paraplan.ir.machine.reshard import Move
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.blocks.bundle import BUNDLE_BYTES, Key, bundle_key, is_full, local_bytes, move_together
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.steps.step_writer import BlockCache, SplitBlock, Transfer
from paraplan.lowering.transfers.transfer_queue import TransferQueue

Dims = tuple[int, ...]
Way = tuple[TensorSpec, tuple[Move, ...], str, str]
"""What the blocks of a value depend on: its spec, path, dtype and given dtype."""

IN_FLIGHT = 2
"""Collectives under way that hold their input until they are done."""


@dataclass(frozen=True)
class BundledValue:
    """A value and how it moves: alone where it is large, else with others that move alike.

    Attributes:
        source, result: its outer names before and after.
        spec: of the whole value, as it travels.
        path: the moves.
        dtype: what it is cast to on arrival; "" leaves it.
        given: the dtype it is cast from before; "" where it has that it travels in.
    """

    source: Name
    result: Name
    spec: TensorSpec
    path: tuple[Move, ...]
    dtype: str = ""
    given: str = ""


@dataclass
class BundleBlocks:
    """The blocks that move values.

    Attributes:
        blocks: of the rank.
        stem, role: of their names, and what they do.
        mesh_shape: extended.
        overwrites: whether a collective that can may work in its input.
    """

    blocks: BlockCache
    stem: str
    role: BlockRole
    mesh_shape: Dims
    overwrites: bool = True

    def transfer(self, values: Sequence[BundledValue]) -> Transfer:
        """The transfer of values that move alike."""
        ways = tuple((value.spec, value.path, value.dtype, value.given) for value in values)
        names = {f"x{index}": value.source for index, value in enumerate(values)}
        return Transfer(self.blocks.get(self.stem, self._split, ways), names, tuple(each.result for each in values))

    def _split(self, name: str, ways: Sequence[Way]) -> SplitBlock:
        """Issue and wait of one change of layout; inputs `x<i>`."""
        emitter = BlockEmitter(name, self.mesh_shape, self.role, overwrites=self.overwrites)
        names = [_put_in(emitter, f"x{index}", way) for index, way in enumerate(ways)]
        paths = [path for _, path, *_ in ways]
        if len(ways) == 1:
            results = [emitter.get(names[0], paths[0][-1].after)]
        else:
            locals_ = [emitter.get(local, path[0].before) for local, path in zip(names, paths, strict=True)]
            results = move_together(emitter, "moved", locals_, paths)
        for index, (local, (*_, dtype, _)) in enumerate(zip(results, ways, strict=True)):
            if dtype not in ("", emitter.values[local].dtype):
                results[index] = emitter.cast(local, dtype, f"{local}^{dtype}")
        return emitter.split(results)


class BundledTransfers:
    """Issues transfers of values, small ones that move alike in bundles.

    Args:
        blocks: that move them.
        queue: of the transfers.
        most_bytes: from how many bytes on a bundle is issued in any case.
        all_hold: count every transfer among those of which few are under way.

    Attributes:
        queue: of the transfers.
        widest_bytes: the most that one segment sends.
    """

    def __init__(self, blocks: BundleBlocks, queue: TransferQueue, most_bytes: int, all_hold: bool = False) -> None:
        self.queue, self.widest_bytes = queue, BUNDLE_BYTES
        self._blocks, self._most_bytes, self._all_hold = blocks, most_bytes, all_hold
        self._waiting: dict[Key, list[BundledValue]] = {}

    def arrived(self, value: BundledValue) -> None:
        """The result of a value exists."""
        raise NotImplementedError

    def send(self, value: BundledValue) -> None:
        """Take a value; it is issued once it is alone in its way or enough others go with it."""
        key = bundle_key(value.spec, value.path, self._blocks.mesh_shape)
        if key is None:
            self._issue((value,))
            return
        group = self._waiting.setdefault(key, [])
        group.append(value)
        if is_full(self._bytes(group), self.widest_bytes, self._most_bytes):
            self._issue(self._waiting.pop(key))

    def flush(self) -> None:
        """Issue the rest, and leave it under way."""
        for group in self._waiting.values():
            self._issue(group)
        self._waiting.clear()

    def wait_all(self) -> None:
        """Issue the rest, and wait for all."""
        self.flush()
        self.queue.wait_all()

    def _issue(self, values: Sequence[BundledValue]) -> None:
        holds = self._all_hold or any(not move.in_place for move in values[0].path)

        def arrived() -> None:
            for value in values:
                self.arrived(value)

        held = self._bytes(values) if holds else 0
        self.queue.issue(replace(self._blocks.transfer(values), held_bytes=held, arrived=arrived))

    def _bytes(self, values: Sequence[BundledValue]) -> int:
        return sum(local_bytes(each.spec, each.path[0].before, self._blocks.mesh_shape) for each in values)


def _put_in(emitter: BlockEmitter, local: str, way: Way) -> str:
    """The name of an input as it travels."""
    spec, path, _, given = way
    layout = path[0].before
    emitter.give(local, TensorSpec(given or spec.dtype, spec.shape), layout)
    if given in ("", spec.dtype):
        return local
    cast = emitter.cast(emitter.get(local, layout), spec.dtype, f"{local}^{spec.dtype}")
    emitter.define(cast, spec, layout)
    return cast
