"""Makers of names: one function for each kind of value of a rank's outer namespace (`ir.execution.name`).

Names local to a block are plain strings, as are those of a `Program`'s values (see `program.source_of`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from paraplan.ir.execution.name import Name, Role
from paraplan.ir.model.program import Source, source_of
from paraplan.ir.process.memo import SESSION

LOSS, LOSS_SCALE = Name(Role.LOSS), Name(Role.LOSS_SCALE)
_ROLES = {
    Source.PARAMETER: Role.PARAMETER,
    Source.BATCH: Role.BATCH,
    Source.BUFFER: Role.BUFFER,
    Source.SEGMENT: Role.VALUE,
}
P = ParamSpec("P")


def _kept(make: Callable[P, Name]) -> Callable[P, Name]:
    """Equal names are the same objects, most of the time: dicts find those faster."""
    return SESSION.cached(1 << 14)(make)


@_kept
def param(name: str) -> Name:
    """A parameter as it is stored."""
    return Name(Role.PARAMETER, name)


@_kept
def state(name: str) -> Name:
    """What the optimizer updates of a parameter."""
    return Name(Role.STATE, name)


def slots(name: str) -> Name:
    """The optimizer's other states of a parameter."""
    return Name(Role.SLOTS, name)


def batch(name: str, m: int) -> Name:
    """A microbatch of an input."""
    return Name(Role.BATCH, name, microbatch=m)


def buffer(name: str) -> Name:
    """A buffer."""
    return Name(Role.BUFFER, name)


def seed(number: int, m: int = -1) -> Name:
    """A seed; of a microbatch where each is a batch by itself."""
    return Name(Role.SEED, number=number, microbatch=m)


@_kept
def value(name: str, m: int) -> Name:
    """What a value of the program is in a microbatch; a buffer is the same in all."""
    source, of = source_of(name)
    return Name(_ROLES[source], of, microbatch=m if source in (Source.SEGMENT, Source.BATCH) else -1)


@_kept
def grad_of(name: str, m: int) -> Name:
    """The gradient of a value of the program in a microbatch."""
    return Name(Role.VALUE_GRADIENT, name, microbatch=m)


@_kept
def saved(segment: int, local: str, m: int) -> Name:
    """A value inside a segment that is saved for its backward.

    Args:
        segment: whose it is.
        local: its name in the segment's block.
        m: the microbatch.
    """
    return Name(Role.SAVED, local, segment, microbatch=m)


def inside(block: str, local: str, m: int) -> Name:
    """A value inside a block that is no segment's.

    Args:
        block: the block's name.
        local: its name there.
        m: the microbatch.
    """
    return Name(Role.SAVED, local, microbatch=m, block=block)


@_kept
def half(segment: int, local: str, m: int) -> Name:
    """What the first part of a segment's backward keeps for the second.

    Args:
        segment: whose it is.
        local: its name in the segment's block.
        m: the microbatch.
    """
    return Name(Role.HALF, local, segment, microbatch=m)


@_kept
def accumulator(name: str) -> Name:
    """A parameter's gradient as it accumulates."""
    return Name(Role.ACCUMULATOR, name)


def grad(name: str) -> Name:
    """A parameter's gradient in the optimizer's layout."""
    return Name(Role.GRADIENT, name)


def tied(name: str) -> Name:
    """A parameter's gradient, summed over the groups of ranks that hold it."""
    return Name(Role.TIED, name)


def waiting(name: str) -> Name:
    """A parameter's gradient where it waits beside the states."""
    return Name(Role.WAITING, name)


def late(name: str) -> Name:
    """A parameter's gradient, held until the next step."""
    return Name(Role.LATE, name)


def magnitude(name: str) -> Name:
    """What is known of a parameter's gradient that waits."""
    return Name(Role.MAGNITUDE, name)


def grouped(name: str, stage: int, way: int, first: int) -> Name:
    """The sum of a parameter's gradients of a stage and several microbatches, from `first` on, that move alike.

    Args:
        name: of the parameter.
        stage: whose microbatches.
        way: to the accumulator, where there are several.
        first: of the microbatches.
    """
    return Name(Role.GROUPED, name, number=way, microbatch=first, stage=stage)


def new_buffer(name: str) -> Name:
    """A buffer's new value."""
    return Name(Role.NEW_BUFFER, name)


def under_way(number: int) -> Name:
    """What a collective has issued."""
    return Name(Role.UNDER_WAY, number=number)


@_kept
def gathered(segment: int, slot: int, action: str) -> Name:
    """A segment's parameter gathered ahead.

    Args:
        segment: that reads it.
        slot: of the parameter among the segment's.
        action: during which it is gathered.
    """
    return Name(Role.GATHERED, "", segment, slot, action=action)


@_kept
def fetched(segment: int, slot: int, action: str) -> Name:
    """A segment's parameter copied to the device.

    Args:
        segment: that reads it.
        slot: of the parameter among the segment's.
        action: during which it is copied.
    """
    return Name(Role.FETCHED, "", segment, slot, action=action)


def held(name: str) -> Name:
    """A parameter as it is held for the step."""
    return Name(Role.HELD, name)


def denominator(number: int, m: int = -1) -> Name:
    """What a denominator of the loss counts, in a microbatch or in all."""
    return Name(Role.DENOMINATOR, number=number, microbatch=m)


def total(number: int) -> Name:
    """The denominator of a term of the loss, summed over ranks."""
    return Name(Role.TOTAL, number=number)


def tangent(number: int) -> Name:
    """The gradient of a term's numerator."""
    return Name(Role.TANGENT, number=number)


def numerator(number: int) -> Name:
    """The numerator of a term of the loss, of all microbatches."""
    return Name(Role.NUMERATOR, number=number)


def loss(name: str = "") -> Name:
    """The loss; one of several by its name."""
    return Name(Role.LOSS, name)


def output(name: str, m: int = -1) -> Name:
    """What the model returns beside the loss, in a microbatch or in all."""
    return Name(Role.OUTPUT, name, microbatch=m)
