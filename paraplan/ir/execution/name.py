"""What a value of a rank's outer namespace is: a record of fields, printed as text that nobody reads back.

A `Name` says what a value is of, and how far along its way it is; `str` prints it, e.g. "d:s3.0@1+4.0". Equal fields
make equal names, and names of different values differ in a field. Names are keys of dicts everywhere, so each hashes
its fields once. `ir.execution.names` makes them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Role(StrEnum):
    """What a value is to the step; the text is how its name begins."""

    PARAMETER = "param"  # a parameter as it is stored
    STATE = "state"  # what the optimizer updates: a view or a copy of a parameter
    SLOTS = "slots"
    """An optimizer's other states of a parameter, one after another, where they are brought elsewhere to be updated."""
    BATCH, BUFFER, SEED = "batch", "buffer", "seed"
    LOSS_SCALE = "scale"  # what gradients are multiplied by, under fp16
    VALUE = "value"  # what a segment hands on
    VALUE_GRADIENT = "d"  # the gradient of that
    SAVED = "saved"  # a value inside a segment that its forward saves for its backward
    HALF = "half"  # a value that the first part of a backward keeps for the second
    ACCUMULATOR = "acc"  # a parameter's gradient as it accumulates
    GRADIENT = "grad"  # a parameter's gradient in the optimizer's layout
    TIED = "tied"  # that, summed over the groups of ranks that hold the parameter
    WAITING = "home"  # a parameter's gradient where it waits beside the states
    LATE = "late"  # a parameter's gradient, held since the step before
    MAGNITUDE = "magnitude"  # what is known of a gradient that waits: see `rank_program.MAGNITUDE`
    GROUPED = "part"  # a parameter's gradient, of several microbatches that are reduced together
    NEW_BUFFER = "new"  # a buffer's new value
    UNDER_WAY = "sum"  # what a collective has issued
    GATHERED = "whole"  # a parameter gathered ahead
    FETCHED = "here"  # a parameter copied to the device
    HELD = "held"  # a stored copy gathered for the step, or a cast of a weight
    DENOMINATOR = "den"
    TOTAL = "total"  # a denominator, summed over ranks
    TANGENT = "tangent"  # the gradient of a numerator
    NUMERATOR = "num"
    LOSS = "loss"
    OUTPUT = "output"  # what the model returns beside its loss


class Transit(StrEnum):
    """How far along a value is on its way between its home and a tier, or to where it is updated."""

    NONE = "none"
    LEAVING = "!"  # a copy away is issued
    THERE = ""  # it is on the tier
    COMING = "?"  # a copy back, or to where it is updated, is issued
    UP = "up"  # it is where it is updated


class Name(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The name of a value of the outer namespace.

    Attributes:
        role: what it is.
        source: what it is of: a parameter, an input of the batch, a buffer, a value of the program, or (of saved and
            half values) the value's name in the block that makes it.
        segment: whose it is, of what is inside a segment or made for one.
        number: of a seed, a denominator, a term of the loss, what is under way; the slot of a gathered or fetched
            parameter; the way to its accumulator of a `GROUPED` gradient.
        microbatch: which; as many as there are stands for all of them, -1 for none.
        action: during which a parameter is gathered or fetched.
        stage: of a `GROUPED` gradient.
        block: the block a value inside is of where that is no segment's.
        group: the group of ranks it came from, or whose share it is.
        adds: (segment, position among the block's outputs) of an addend of an accumulator; (): of the tail's gradient.
        dtype: what it was cast to.
        is_moved: whether it was brought to where it accumulates.
        tier, transit: see `Transit`.
        packed_for, sent_to: the group of ranks it was laid out for as a message, and that a part of it is sent to.
        piece: which of the parts of a message.
        version: how often a memory schedule makes it before.
        copy: of a copy to a tier that a memory schedule makes, how many like it come before; -1 of all else.
        back: of such a one on its way back, likewise.
    """

    role: Role
    source: str = ""
    segment: int = -1
    number: int = -1
    microbatch: int = -1
    action: str = ""
    stage: int = -1
    block: str = ""
    group: int = -1
    adds: tuple[int, ...] | None = None
    dtype: str = ""
    is_moved: bool = False
    tier: str = ""
    transit: Transit = Transit.NONE
    packed_for: int = -1
    sent_to: int = -1
    piece: int = -1
    version: int = 0
    copy: int = -1
    back: int = 0

    def __str__(self) -> str:
        text = self._stem()
        moves = self.transit is not Transit.NONE and self.copy < 0
        if moves and self.role is Role.VALUE:
            text += f"/{self.tier}{self.transit}"
        if self.microbatch >= 0:
            text += f"@{self.microbatch}"
        if self.group >= 0:
            text += f"<{self.group}"
        if self.adds is not None:
            text += "+" + ".".join(map(str, self.adds))
        if self.dtype:
            text += f"^{self.dtype}"
        if self.is_moved and self.role is not Role.NUMERATOR:
            text += "^"
        if moves and self.role is not Role.VALUE:
            text += f"{'' if self.role is Role.FETCHED else '^'}{self.tier}{self.transit}"
        if self.packed_for >= 0:
            text += f">{self.packed_for}"
        if self.sent_to >= 0:
            text += f">{self.sent_to}"
        if self.piece >= 0:
            text += f"#{self.piece}"
        if self.version:
            text += f"'{self.version}"
        return text + self._copied() if self.copy >= 0 else text

    def __repr__(self) -> str:
        return repr(str(self))

    def _copied(self) -> str:
        """The end of the text of a memory schedule's copy."""
        count, comes = f"'{self.copy}" if self.copy else "", self.transit is Transit.COMING
        if not comes:
            return f"^{self.tier}{self.transit}{count}"
        return f"^{self.tier}{count}{self.transit}" + (f"'{self.back}" if self.back else "")

    def _stem(self) -> str:
        """The text up to the microbatch."""
        match self.role:
            case Role.VALUE:
                return self.source
            case Role.SAVED:
                return f"{self.block or self.segment}/{self.source}"
            case Role.HALF:
                return f"{self.segment}^{self.source}"
            case Role.GATHERED | Role.FETCHED:
                return f"{self.role}:{self.segment}/{self.number}@{self.action}"
            case Role.SEED | Role.UNDER_WAY:
                return f"{self.role}:{self.number}"
            case Role.NUMERATOR:
                return f"{'whole:' if self.is_moved else ''}{self.role}{self.number}"
            case Role.DENOMINATOR | Role.TOTAL | Role.TANGENT:
                return f"{self.role}{self.number}"
            case Role.LOSS:
                return f"{self.role}:{self.source}" if self.source else self.role.value
            case Role.LOSS_SCALE:
                return "loss_scale"
            case Role.GROUPED:
                return f"{self.role}:{self.source}<{self.stage}.{self.number}"
            case _:
                return f"{self.role}:{self.source}"

    def addend(self, *place: int) -> Name:
        """What is added to it by a segment's backward: (segment, position among its block's outputs)."""
        return msgspec.structs.replace(self, adds=place)

    def cast(self, dtype: str) -> Name:
        """It in another dtype."""
        return msgspec.structs.replace(self, dtype=dtype)

    @property
    def moved(self) -> Name:
        """It where it accumulates."""
        return msgspec.structs.replace(self, is_moved=True)

    def of_group(self, group: int) -> Name:
        """A group of ranks' share of it, or what came from there."""
        return msgspec.structs.replace(self, group=group)

    def leaving(self, tier: str = "") -> Name:
        """Its copy to a tier, or to its home, under way."""
        return msgspec.structs.replace(self, tier=tier, transit=Transit.LEAVING)

    def on(self, tier: str) -> Name:
        """Its copy on a tier."""
        return msgspec.structs.replace(self, tier=tier, transit=Transit.THERE)

    def coming(self, tier: str = "") -> Name:
        """Its copy from a tier, or to where it is updated, under way."""
        return msgspec.structs.replace(self, tier=tier, transit=Transit.COMING)

    @property
    def up(self) -> Name:
        """Its copy where it is updated."""
        return msgspec.structs.replace(self, transit=Transit.UP)

    def packed(self, group: int) -> Name:
        """It as it is sent to a group of ranks."""
        return msgspec.structs.replace(self, packed_for=group)

    def part_for(self, group: int, piece: int) -> Name:
        """A part of it that is sent to a group of ranks."""
        return msgspec.structs.replace(self, sent_to=group, piece=piece)

    def part(self, piece: int) -> Name:
        """A part of it that is received."""
        return msgspec.structs.replace(self, piece=piece)

    def copied(self, tier: str) -> Name:
        """The copy to a tier that a memory schedule issues."""
        return msgspec.structs.replace(self, tier=tier, transit=Transit.LEAVING, copy=0)

    def again(self, count: int) -> Name:
        """It as a memory schedule makes it after so many like it."""
        if self.copy < 0:
            return msgspec.structs.replace(self, version=count)
        return msgspec.structs.replace(self, **{"back" if self.transit is Transit.COMING else "copy": count})
