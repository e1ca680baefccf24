"""The actions of a memory schedule, and their text: what a plan says of the order in which a step's ops run.

    R12         execute op 12
    F7          free tensor 7 (waits until a copy of it under way has ended)
    O7:host     begin copying tensor 7 to the host
    B7:host     allocate tensor 7 and begin copying it back; whoever reads it waits until the copy has ended

Ops and tensors are numbered as `lowering.flat` numbers those of a rank program. A tensor is a storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paraplan.ir.errors import InvalidPlanError


class Act(Enum):
    """What an action does."""

    RUN = "R"
    FREE = "F"
    OUT = "O"
    BACK = "B"


@dataclass(frozen=True)
class MemAction:
    """One action; `index` is an op's for RUN, else a tensor's; `tier` names where to or from."""

    act: Act
    index: int
    tier: str = ""

    def __str__(self) -> str:
        return f"{self.act.value}{self.index}" + (f":{self.tier}" if self.tier else "")


Actions = tuple[MemAction, ...]


def parse_actions(text: str) -> Actions:
    """`"R0 R1 F0"` to its actions.

    Raises:
        InvalidPlanError: a word is none.
    """
    found = []
    for word in text.split():
        head, _, tier = word[1:].partition(":")
        if word[0] not in "RFOB" or not (head.isascii() and head.isdigit()) or bool(tier) != (word[0] in "OB"):
            raise InvalidPlanError(
                f"no action of a memory schedule: {word!r} (R<op>, F<tensor>, O<tensor>:<tier>, B...)"
            )
        found.append(MemAction(Act(word[0]), int(head), tier))
    return tuple(found)


def format_actions(actions: Actions) -> str:
    """The inverse of `parse_actions`."""
    return " ".join(map(str, actions))


def run(op: int) -> MemAction:
    """Execute an op."""
    return MemAction(Act.RUN, op)


def free(tensor: int) -> MemAction:
    """Free a tensor."""
    return MemAction(Act.FREE, tensor)
