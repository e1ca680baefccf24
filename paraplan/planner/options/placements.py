"""Which placements of states, parameters and gradients the user's options allow.

`place_states`, `place_params` and `place_grads` are places, `update_on` who updates: one, several with commas, or any.
What executes (`ir.machine.tier_placement.PLACEMENTS`) and has all that is said is allowed. What is left out:

    states, params    as `offload` allows; else the device, and states where the others ask for them
    grads             where their update is done
    update            either
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tier_placement import DEVICE, HOST, PLACEMENTS, TierPlacement, completed
from paraplan.ir.machine.tiers import NEAREST, TIERS
from paraplan.ir.option_words import OptionValue

ANY = "any"
"""Every place of the device and the tiers that `offload` allows (the nearest where it allows none); either updater."""


PLACES = (DEVICE, *TIERS)
NAMES = ", ".join(PLACES)


class PlacementChoice(NamedTuple):
    """What is said of placements, texts as of the options; None: nothing."""

    states: str | None = None
    params: str | None = None
    grads: str | None = None
    update: str | None = None

    def rungs(self, tiers: Sequence[str]) -> tuple[PlacementChoice, ...]:
        """Choices to be searched one after another, each with more than the one before.

        Where parameters may leave the device as the planner chooses: states alone, to the first tier; all that is
        allowed; at last, where nothing is said of gradients, those that wait elsewhere than at their update too.
        """
        if self.params != ANY or self.grads is not None:
            return (self,)
        states = f"{DEVICE},{(*tiers, NEAREST)[0]}" if self.states == ANY else self.states
        every = (self._replace(states=states, params=DEVICE), self, self._replace(grads=ANY))
        by_places = {each.allowed(tiers): each for each in reversed(every)}
        return tuple(each for places, each in reversed(by_places.items()) if places)

    def allowed(self, tiers: Sequence[str]) -> tuple[TierPlacement, ...]:
        """The placements of parameters that are not pinned by name.

        Args:
            tiers: that `offload` allows.
        """
        places = self._places(tiers)
        return tuple(
            each
            for each in PLACEMENTS.values()
            if each.states in places["states"]
            and each.params in places["params"]
            and (not each.grads_wait if self.grads is None else each.grads in places["grads"])
            and each.update in places["update"]
        )

    def _places(self, tiers: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Per field the values that are allowed, of gradients where something is said."""
        every = ("", *(tiers or (NEAREST,)))
        usual = every if tiers else ("",)
        params, grads = _places(self.params, every), _places(self.grads, every)
        asked = [tier for tier in (*params, *grads) if tier]
        if self.update == HOST:
            asked += every
        return {
            "states": _places(self.states, every) or (*usual, *asked),
            "params": params or usual,
            "grads": grads,
            "update": tuple(self.update.split(",")) if self.update not in (None, ANY) else (DEVICE, HOST),
        }

    def check(self, tiers: Sequence[str]) -> None:
        """Refuse what no placement has.

        Raises:
            ConstraintError: so it is; says why of what comes first.
        """
        if self.allowed(tiers):
            return
        places = {name: found for name, found in self._places(tiers).items() if getattr(self, name) is not None}
        tried = [completed(dict(zip(places, each, strict=True))) for each in itertools.product(*places.values())]
        faults = next(found for placed in tried if (found := placed.contradictions(_as_option)))
        raise ConstraintError("; ".join(["{}: {}", *["{}"] * (len(faults) - 1)]), self.given, *faults)

    @property
    def given(self) -> tuple[OptionValue, ...]:
        """What is said, as options."""
        return tuple(OptionValue(KEYWORDS[name], said) for name, said in self._asdict().items() if said is not None)


KEYWORDS = {"states": "place_states", "params": "place_params", "grads": "place_grads", "update": "update_on"}
"""The option of each field."""


def _as_option(field: str, place: str) -> OptionValue:
    return OptionValue(KEYWORDS[field], place)


def _places(said: str | None, every: Sequence[str]) -> tuple[str, ...]:
    if said is None:
        return ()
    found = [every if part == ANY else ("",) if part == DEVICE else (part,) for part in said.split(",")]
    return tuple(itertools.chain.from_iterable(found))


OFFLOAD_STATES: dict[str, PlacementChoice] = {
    **{
        name: PlacementChoice(each.states or DEVICE, each.params or DEVICE, each.grads or DEVICE, each.update)
        for name, each in PLACEMENTS.items()
    },
    "either": PlacementChoice(f"{DEVICE},{NEAREST}", DEVICE, None, ANY),
    "any": PlacementChoice(ANY, ANY, None, ANY),
    "any-grads": PlacementChoice(ANY, ANY, ANY, ANY),
}
"""What the words of `offload_states` say: names of placements, "either" (states are the planner's choice), "any"
(parameters too), "any-grads" (and where gradients wait)."""

ON_DEVICE = OFFLOAD_STATES["none"]
ANYWHERE = OFFLOAD_STATES["any"]


def merged(word: str | None, said: PlacementChoice) -> PlacementChoice:
    """What a word of `offload_states` and the other options say together.

    Raises:
        ConstraintError: they contradict each other.
    """
    if word is None:
        return said
    found = OFFLOAD_STATES[word]
    for name, given in said._asdict().items():
        meant = getattr(found, name)
        if None not in (given, meant) and given != meant:
            option = KEYWORDS[name]
            raise ConstraintError(
                "{} beside {}: that word says {}; give one of them",
                *(OptionValue("offload_states", word), OptionValue(option, given), OptionValue(option, meant)),
            )
    return PlacementChoice(*(given if meant is None else meant for meant, given in zip(found, said, strict=True)))


def check_place(keyword: str, said: str) -> None:
    """Places with commas, or any."""
    _check_parts(keyword, said, (*PLACES, ANY))


def check_updater(keyword: str, said: str) -> None:
    """Who updates, or any."""
    _check_parts(keyword, said, (DEVICE, HOST, ANY))


def _check_parts(keyword: str, said: str, known: Sequence[str]) -> None:
    if any(part not in known for part in said.split(",")):
        raise ConstraintError("{}: one of {}, or several with commas", OptionValue(keyword, said), tuple(known))
