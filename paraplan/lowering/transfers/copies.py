"""Copies between the device and the tiers outside of it: one record of a copy, a block that issues and one that waits.

A value that is needed elsewhere than where it is stored is copied there, beside other work. Every such copy is one of

    offload      device -> tier, into a new storage    values that wait for the backward; gradients for the host
    prefetch     tier -> device                        those values back; parameters stored on a tier, or updated there
    bring, lift  tier -> device, or host memory        states, and gradients beside them, to where they are updated
    store, keep  there -> tier, over what it holds     updated states; gradients that are to wait beside states

One block issues some copies (`issue_block`), another waits for them (`wait_block`); `copy_transfer` makes a transfer of
both. A forward issues its own offloads, and a backward or a restoration waits for its own prefetches where it first
reads them (`BlockEmitter.offload`, `LaidValues.arrive`).

In a block, of a value `x` on the device and a tier "host",

    x -> x^host! (offload issued) -> x^host -> x^host? (prefetch issued) -> x

and of one `x` on a tier that is updated elsewhere: x -> x^? (brought) -> x^up, which is updated -> x^! (stored) -> x^.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.model.strides import contiguous_strides, is_dense
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.lowering.blocks.finish import finish_block
from paraplan.lowering.steps.step_writer import BlockCache, Transfer

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """A value that is copied to or from a tier.

    Attributes:
        target: how, as `Instr.target` has it.
        tier: outside of the device, where it goes or comes from.
        source: what is copied, called by its base.
        issued: the copy under way, likewise, as a block that did not issue it has it: in a storage of its own.
        done: what the copy is called once it was waited for.
        over: what it overwrites, of which the copy under way is a view; None where it makes a storage.
    """

    target: str
    tier: str
    source: LocalValue
    issued: LocalValue
    done: str
    over: LocalValue | None = None

    @classmethod
    def offload(cls, value: LocalValue, tier: str) -> Copy:
        """The copy of a value on the device to a tier."""
        there = f"{value.base}^{tier}"
        return cls("offload", tier, value, dense_copy(value, f"{there}!", tier), there)

    @classmethod
    def prefetch(cls, value: LocalValue, tier: str) -> Copy:
        """The copy of what `offload` left on a tier to the device, where it is called as the value was."""
        there = f"{value.base}^{tier}"
        return cls("prefetch", tier, dense_copy(value, there, tier), dense_copy(value, f"{there}?"), value.base)

    @classmethod
    def bring(cls, value: LocalValue, place: str) -> Copy:
        """The copy of a value on a tier to where it is updated: "" for the device, else the host's memory."""
        issued = msgspec.structs.replace(value, base=f"{value.base}^?", tier=place)
        return cls("lift" if place else "bring", value.tier, value, issued, f"{value.base}^up")

    @classmethod
    def store(cls, value: LocalValue, place: str) -> Copy:
        """The copy of what `bring` brought, over what it was brought from."""
        return cls._overwriting("store", msgspec.structs.replace(value, base=f"{value.base}^up", tier=place), value)

    @classmethod
    def keep(cls, value: LocalValue, over: LocalValue) -> Copy:
        """The copy of a value on the device over another one on a tier."""
        return cls._overwriting("keep", value, over)

    @classmethod
    def _overwriting(cls, target: str, source: LocalValue, over: LocalValue) -> Copy:
        issued = msgspec.structs.replace(over, base=f"{over.base}^!")
        return cls(target, over.tier, source, issued, f"{over.base}^.", over)

    @cached_property
    def back(self) -> Copy:
        """Of an offload, the copy back to the device, under the name the value had."""
        return Copy.prefetch(self.source, self.tier)

    @property
    def arrived(self) -> LocalValue:
        """The copy once it was waited for: a view of that under way."""
        return msgspec.structs.replace(self.issued, storage_bytes=0)

    @property
    def begun(self) -> LocalValue:
        """The copy under way in the block that issues it."""
        return self.issued if self.over is None else msgspec.structs.replace(self.over, storage_bytes=0)

    @property
    def issue(self) -> Instr:
        """What begins it."""
        over = () if self.over is None else ("%" + self.over.base,)
        args = ("%" + self.source.base, ":" + self.tier, *over)
        return Instr(kind=InstrKind.COPY, target=self.target, args=args, outs=(self.issued.base,))

    @property
    def wait(self) -> Instr:
        """What ends it, until which its source is held."""
        args = ("%" + self.issued.base, "%" + self.source.base)
        return Instr(kind=InstrKind.WAIT, target="wait", args=args, outs=(self.done,))

    def names(self, here: Name) -> dict[str, Name]:
        """Outer names by local ones, where `here` is the outer name of what is offloaded or updated."""
        source, issued, done = self.source.base, self.issued.base, self.done
        match self.target:
            case "offload":
                return {source: here, issued: here.leaving(self.tier), done: here.on(self.tier)}
            case "prefetch":
                return {source: here.on(self.tier), issued: here.coming(self.tier), done: here}
            case "bring" | "lift":
                return {source: here, issued: here.coming(), done: here.up}
        assert self.target == "store" and self.over is not None, self
        return {source: here.up, issued: here.leaving(), self.over.base: here}


class CopyWay(NamedTuple):
    """How the values of some use are copied.

    Attributes:
        make: the copy of a value to or from a tier, or to or from where it is updated.
        issue, wait: stems of the names of the block that issues copies and of the one that waits.
        role: of both blocks.
    """

    make: Callable[[LocalValue, str], Copy]
    issue: str
    wait: str
    role: BlockRole


def local_value(name: str, dtype: str, shape: Dims, strides: Dims | None = None, tier: str = "") -> LocalValue:
    """A value in a storage of its own.

    Args:
        name: in its block.
        dtype, shape: of a rank's part.
        strides: of it; None for row-major.
        tier: where it is stored; "" for the device.
    """
    strides, nbytes = strides or contiguous_strides(shape), math.prod(shape) * DTYPE_BYTES[dtype]
    return LocalValue(dtype=dtype, shape=shape, strides=strides, base=name, storage_bytes=nbytes, tier=tier)


def dense_copy(value: LocalValue, name: str, tier: str = "") -> LocalValue:
    """A value copied into a storage of its own: in its strides where those are dense, else row-major.

    Args:
        value: that is copied.
        name: of the copy.
        tier: where it is stored; "" for the device.
    """
    strides = value.strides if is_dense(value.shape, value.strides) else None
    return local_value(name, value.dtype, value.shape, strides, tier)


def issue_block(name: str, copies: tuple[Copy, ...], role: BlockRole) -> Block:
    """Issues copies.

    Args:
        name: of the block.
        copies: which.
        role: of the block.
    """
    given = [value for copy in copies for value in (copy.source, copy.over) if value is not None]
    known: dict[str, LocalValue] = {}
    for copy in copies:  # storages before what are views of them
        known |= {value.base: value for value in (copy.source, copy.over or copy.issued)}
    for copy in copies:
        known[copy.issued.base] = copy.begun
    made = tuple(copy.issued.base for copy in copies)
    instrs = [copy.issue for copy in copies]
    return finish_block(name, tuple(value.base for value in given), made, (), known, instrs, role)


def wait_block(name: str, copies: tuple[Copy, ...], role: BlockRole, dtypes: tuple[str, ...] = ()) -> Block:
    """Waits for copies, and casts those that are read in another dtype.

    Args:
        name: of the block.
        copies: which.
        role: of the block.
        dtypes: that readers of each want; left out, those that are copied.
    """
    known: dict[str, LocalValue] = {}
    instrs, given, made = list[Instr](), list[str](), list[str]()
    for copy, dtype in zip(copies, dtypes or [copy.issued.dtype for copy in copies], strict=True):
        read = (copy.issued, copy.source)
        given += [value.base for value in read]
        # A program's text lists what is updated elsewhere in orders of its own.
        known |= {value.base: value for value in (read[::-1] if copy.target == "store" else read)}
        if copy.target not in ("bring", "lift"):
            known[copy.done] = copy.arrived
        instrs.append(copy.wait)
        made.append(copy.done)
        if dtype != copy.issued.dtype:
            made[-1] = cast = f"{copy.done}^{dtype}"
            known[cast] = local_value(cast, dtype, copy.issued.shape, copy.issued.strides, copy.issued.tier)
            args, kwargs = ("%" + copy.done,), {"dtype": ":" + dtype}
            instrs.append(Instr(target="aten._to_copy.default", args=args, kwargs=kwargs, outs=(cast,)))
    known |= {copy.done: copy.arrived for copy in copies}
    return finish_block(name, tuple(given), tuple(made), (), known, instrs, role)


def copy_transfer(
    cache: BlockCache, way: CopyWay, copies: Mapping[Copy, Name], m: int = -1, segment: int = -1
) -> Transfer:
    """The transfer of copies that are issued together.

    Args:
        cache: the rank's blocks.
        way: in which they were made.
        copies: each with the outer name that `Copy.names` takes.
        m, segment: of both steps; -1 for none.
    """
    issues = cache.get(way.issue, issue_block, tuple(copies), way.role)
    waits = cache.get(way.wait, wait_block, tuple(copies), way.role)
    names = {local: name for copy, here in copies.items() for local, name in copy.names(here).items()}
    return Transfer((issues, waits), names, microbatch=m, segment=segment)
