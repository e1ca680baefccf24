"""Options of placements: what they allow, one by one and together with `offload` and `offload_states`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tier_placement import PLACEMENTS, TierPlacement
from paraplan.planner.constraints import Constraints
from paraplan.planner.contradictions import check_constraints
from paraplan.planner.options.placements import KEYWORDS, OFFLOAD_STATES, PLACES, PlacementChoice

NEAR = ("none", "host", "all", "fetched", "all-fetched")
ALL = (*NEAR, "disk", "disk-all", "disk-fetched", "disk-all-fetched")


def allowed(**options: Any) -> tuple[str, ...]:
    return tuple(place.text for place in check_constraints(Constraints(**options), 1).places)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, ("none",)),
        ({"place_states": "host"}, ("host", "fetched")),
        ({"place_states": "host", "update_on": "host"}, ("host",)),
        ({"place_states": "host", "place_grads": "device"}, ("fetched",)),
        ({"place_states": "device,disk"}, ("none", "disk", "disk-fetched")),
        ({"place_states": "any"}, ("none", "host", "fetched")),
        (
            {"place_states": "any", "offload": "disk", "place_params": "device"},
            ("none", "host", "fetched", "disk", "disk-fetched"),
        ),
        ({"place_states": "any", "place_params": "any"}, NEAR),
        ({"place_params": "host"}, ("all", "all-fetched")),
        ({"place_params": "device", "offload": "host"}, ("none", "host", "fetched")),
        ({"place_params": "disk", "update_on": "device"}, ("disk-all-fetched",)),
        ({"place_grads": "disk"}, ("disk-grads", "disk-fetched-grads")),
        ({"update_on": "host"}, ("host",)),
        ({"update_on": "device", "offload": "host"}, ("none", "fetched", "all-fetched")),
        ({"offload": "host"}, NEAR),
        ({"offload": "disk"}, ALL),
        ({"offload_states": "host", "place_states": "host"}, ("host",)),
        ({"offload_states": "any", "place_grads": "device"}, ("none", "fetched", "all-fetched")),
    ],
)
def test_what_options_allow(options: dict[str, str], names: tuple[str, ...]) -> None:
    assert allowed(**options) == names


def test_words_allow_what_they_always_did() -> None:
    for name, place in PLACEMENTS.items():
        for offload in ("none", "host", "disk"):
            assert Constraints(offload_states=name, offload=offload).places == (place,)
    for offload in ("none", "host", "disk"):
        every = ALL if offload == "disk" else NEAR
        assert allowed(offload_states="either", offload=offload) == ("none", "host", "fetched")
        assert allowed(offload_states="any", offload=offload) == every
        waiting = [name for name in PLACEMENTS if name.endswith("grads") and name.removesuffix("-grads") in every]
        assert allowed(offload_states="any-grads", offload=offload) == (*every, *waiting)


def test_a_word_is_its_fields() -> None:
    for word, choice in OFFLOAD_STATES.items():
        fields = {KEYWORDS[name]: said for name, said in choice._asdict().items() if said is not None}
        for offload in ("none", "host", "disk"):
            assert (
                Constraints(offload=offload, **fields).places
                == Constraints(offload=offload, offload_states=word).places
            )


def test_every_choice_allows_what_it_says_or_says_why_not() -> None:
    places, who = (None, "device", "host", "disk", "any"), (None, "device", "host", "any")
    for *said, offload in itertools.product(places, places, places, who, ("none", "host", "disk")):
        choice = PlacementChoice(*said)
        options = {KEYWORDS[name]: value for name, value in choice._asdict().items()}
        try:
            found = check_constraints(Constraints(offload=offload, **options), 1).places
        except ConstraintError as fault:
            assert "give " in str(fault) and all(
                f"{name}={value!r}" in str(fault) for name, value in options.items() if value
            )
            continue
        assert found and all(_has(place, choice) for place in found)


def _has(place: TierPlacement, choice: PlacementChoice) -> bool:
    """Whether a placement has what was said and is no place."""
    meant = {"states": choice.states, "params": choice.params, "grads": choice.grads}
    at_place = all(said in (None, "any", getattr(place, name) or "device") for name, said in meant.items())
    return at_place and choice.update in (None, "any", place.update)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"place_states": "tape"}, f"place_states='tape': one of {', '.join(PLACES)}, any, or several with commas"),
        ({"update_on": "disk"}, "update_on='disk': one of device, host, any"),
        ({"place_states": "device", "update_on": "host"}, "'device', update_on='host': .*give place_states='host'"),
        ({"offload_states": "host", "update_on": "device"}, "that word says update_on='host'; give one of them"),
        ({"place_params": "host", "dp": 1, "zero": 1}, "place_params='host' with zero=1: .*give zero=3 or 0"),
        ({"place_states": "disk", "delayed_update": 1}, "with place_states='disk' there is nothing"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        allowed(**options)


def test_rungs_allow_more_and_more() -> None:
    for offload in ("host", "disk"):
        tiers = Constraints(offload=offload).tiers
        for choice in (
            OFFLOAD_STATES["any"],
            PlacementChoice("disk", "any"),
            PlacementChoice(params="any", update="host"),
        ):
            rungs = [set(each.allowed(tiers)) for each in choice.rungs(tiers)]
            assert all(rungs) and all(less < more for less, more in itertools.pairwise(rungs))
    assert [each.given for each in OFFLOAD_STATES["any"].rungs(("host",))] == [
        OFFLOAD_STATES[word].given for word in ("either", "any", "any-grads")
    ]
