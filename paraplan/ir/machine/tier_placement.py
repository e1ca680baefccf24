"""Where a parameter, its optimizer states and its gradient are, and who updates it: one value, `TierPlacement`.

The fields are orthogonal facts, of which some combinations can be executed (`PLACEMENTS`); `contradictions` says of any
other what is wrong with it and the way out. As a text a placement is a name that follows from its fields:

    none                     all on the device
    host, disk               states there, updated by the host (ZeRO-Offload, Ren et al. 2021)
    all, disk-all            the stored parameter there too, in the storage of its state
    fetched, disk-fetched    states there, brought to the device to be updated (ZeRO-Infinity, Rajbhandari et al. 2021)
    fetched-grads, ...       the gradient waits there too

or some of its fields, "states=disk,update=device"; what is left out is as in the first placement that has the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tiers import NEAREST, TIERS
from paraplan.ir.option_words import Phrase

DEVICE, HOST = "device", "host"
"""Who updates a parameter. `DEVICE` is also how texts write the place that fields call ""."""


def _as_field(name: str, place: str) -> str:
    return f"{name}={place}"


class TierPlacement(NamedTuple):
    """Where a parameter and what belongs to it are, a tier or "" for the device, and who updates it.

    Attributes:
        params: the stored copy, which ops read.
        states: the optimizer's states and its copy.
        grads: the gradient until its update.
        update: `DEVICE` or `HOST`.
    """

    params: str = ""
    states: str = ""
    grads: str = ""
    update: str = DEVICE

    @property
    def update_tier(self) -> str:
        """Where the update is done: "" for the device, or a memory of the host."""
        return TIERS[self.states].updated_in if self.update == HOST and self.states else ""

    @property
    def is_staged(self) -> bool:
        """Whether states are brought to where they are updated, and back."""
        return self.update_tier != self.states

    @property
    def grads_wait(self) -> bool:
        """Whether the gradient is elsewhere than where the update is done, and comes to it with the states."""
        return self.grads != self.update_tier

    @property
    def can_be_late(self) -> bool:
        """Whether the host updates in place, beside a copy on the device that ops read meanwhile."""
        return self.update == HOST and not self.params and not self.is_staged

    @property
    def tiers(self) -> tuple[str, ...]:
        """Where something of a parameter is, at its update or between steps."""
        return tuple(dict.fromkeys(tier for tier in (self.update_tier, self.states) if tier))

    @property
    def frozen(self) -> TierPlacement:
        """Of a parameter that is not trained."""
        return _on(self.params, params=True)

    @property
    def text(self) -> str:
        """Its name."""
        if not self.states:
            return "none"
        parts = [
            *(["all"] if self.params else []),
            *(["fetched"] if self.update == DEVICE else []),
            *(["grads"] if self.grads_wait else []),
        ]
        return "-".join(parts if parts and self.states == NEAREST else [self.states, *parts])

    def contradictions(self, written: Callable[[str, str], object] = _as_field) -> tuple[Phrase, ...]:
        """Why no step can be executed so, and the way out; empty where one can.

        Args:
            written: a field with a place, as messages have it.
        """
        where = {"states": self.states, "params": self.params, "grads": self.grads}
        faults = [
            Phrase("{}: there is no such tier; there are {}", written(name, tier), (DEVICE, *TIERS))
            for name, tier in where.items()
            if tier and tier not in TIERS
        ]
        if self.update not in (DEVICE, HOST):
            faults.append(Phrase("{}: give {} or {}", written("update", self.update), DEVICE, HOST))
        if faults:
            return tuple(faults)
        states, updated = written("states", self.states or DEVICE), written("update", self.update)
        if self.update == HOST and not self.states:
            ways = (written("states", NEAREST), written("update", DEVICE))
            faults.append(
                Phrase("{}, and states are on the device, which updates them; give {}, or {}", updated, *ways)
            )
        if self.params not in ("", self.states):
            fault = "{} with {}: a parameter off the device is in its state's storage; give {}, or {}"
            ways = (written("states", self.params), written("params", DEVICE))
            faults.append(Phrase(fault, written("params", self.params), states, *ways))
        ends = dict.fromkeys(tier or DEVICE for tier in (self.update_tier, self.states))
        if self.grads not in (self.update_tier, self.states):
            fault = (
                "{} with {} and {}: a gradient is where its update is done, or beside the states that come to it; "
                f"give {' or '.join('{}' for _ in ends)}"
            )
            given = (written("grads", self.grads or DEVICE), states, updated)
            faults.append(Phrase(fault, *given, *(written("grads", end) for end in ends)))
        return tuple(faults)


def _on(tier: str, *, params: bool = False, update: str = HOST, grads: bool = False) -> TierPlacement:
    """States on a tier, and where asked for the parameter and its gradient; all on the device for ""."""
    if not tier:
        return TierPlacement()
    placed = TierPlacement(tier if params else "", tier, tier, update)
    return placed if grads else placed._replace(grads=placed.update_tier)


HERE = TierPlacement()
"""All on the device."""

PLACEMENTS: dict[str, TierPlacement] = {
    each.text: each
    for each in (
        HERE,
        *(
            _on(tier, params=params, update=update, grads=grads)
            for grads in (False, True)
            for tier in TIERS
            for update in (HOST, DEVICE)
            for params in (False, True)
        ),
    )
}
"""Every placement that can be executed, by name; those that ask for least first."""


def parse_placement(text: str) -> TierPlacement:
    """A placement by its name, or by some of its fields.

    Raises:
        ConstraintError: no placement is called or has these fields so; says why.
    """
    if "=" not in text:
        if text not in PLACEMENTS:
            raise ConstraintError(
                f"{text!r} is no placement: give one of {', '.join(PLACEMENTS)}, or fields as in "
                "'states=disk,update=device'"
            )
        return PLACEMENTS[text]
    given: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in TierPlacement._fields or name in given:
            raise ConstraintError(
                f"{text!r} is no placement: give each of {', '.join(TierPlacement._fields)} at most once"
            )
        given[name] = value if name == "update" or value != DEVICE else ""
    for placed in PLACEMENTS.values():
        if given.items() <= placed._asdict().items():
            return placed
    raise ConstraintError(f"{text!r} is no placement: {'; '.join(map(str, completed(given).contradictions()))}")


def completed(fields: Mapping[str, str]) -> TierPlacement:
    """A placement of some fields, executable or not, with the others as they follow from these."""
    states = fields.get("states", fields.get("params") or fields.get("grads", ""))
    update = fields.get("update", HOST if states else DEVICE)
    placed = TierPlacement(fields.get("params", ""), states, "", update)
    if states and states not in TIERS:
        return placed
    return placed._replace(grads=fields.get("grads", placed.update_tier))
