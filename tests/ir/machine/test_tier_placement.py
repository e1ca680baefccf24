"""Placements: names, fields, and what cannot be executed."""

from __future__ import annotations

import itertools

import pytest

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.tier_placement import PLACEMENTS, TierPlacement, parse_placement
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.param_layouts import ParamLayouts

EVERY = [TierPlacement(*each) for each in itertools.product(*[("", *TIERS)] * 3, ("device", "host"))]


def test_names_are_a_promise() -> None:
    promised = [
        *("none", "host", "all", "fetched", "all-fetched", "disk", "disk-all", "disk-fetched", "disk-all-fetched"),
        *("fetched-grads", "all-fetched-grads", "disk-grads", "disk-all-grads", "disk-fetched-grads"),
        "disk-all-fetched-grads",
    ]
    assert [name for name, place in PLACEMENTS.items() if {*place.tiers} <= {"host", "disk"}] == promised
    assert PLACEMENTS["disk-all-fetched-grads"] == TierPlacement("disk", "disk", "disk", "device")
    assert PLACEMENTS["disk"] == TierPlacement("", "disk", "host", "host")


def test_what_has_no_contradiction_can_be_executed() -> None:
    assert {each for each in EVERY if not each.contradictions()} == set(PLACEMENTS.values())


@pytest.mark.parametrize("name", PLACEMENTS)
def test_layouts_have_a_placement(name: str) -> None:
    layouts = ParamLayouts(stored="S0", grad="S0", state="S0").placed(PLACEMENTS[name])
    assert layouts.place == PLACEMENTS[name] == parse_placement(name)
    assert layouts.text == "S0/S0/S0" + (f"@{name}" if name != "none" else "")
    assert (layouts.update_tier, layouts.staged) == (PLACEMENTS[name].update_tier, PLACEMENTS[name].is_staged)
    assert bool(layouts.grad_tier) == PLACEMENTS[name].grads_wait


def test_fields_are_a_placement_or_say_why_not() -> None:
    """Every choice of some fields: the first placement that has them, or what contradicts what."""
    words = {"params": ("device", *TIERS), "states": ("device", *TIERS), "grads": ("device", *TIERS)}
    given = [
        dict(zip(names, values, strict=True)) for names, values in _choices({**words, "update": ("device", "host")})
    ]
    for fields in given:
        text = ",".join(f"{name}={value}" for name, value in fields.items())
        meant = {name: "" if value == "device" and name != "update" else value for name, value in fields.items()}
        fitting = [each for each in PLACEMENTS.values() if meant.items() <= each._asdict().items()]
        if fitting:
            assert parse_placement(text) == fitting[0]
        else:
            with pytest.raises(ConstraintError, match=r"is no placement: .*; give (states|grads|update)="):
                parse_placement(text)


def _choices(words: dict[str, tuple[str, ...]]) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    found = []
    for count in range(1, len(words) + 1):
        for names in itertools.combinations(words, count):
            found += [(names, values) for values in itertools.product(*(words[name] for name in names))]
    return found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tape", "give one of none, host, all"),
        ("states=tape", f"states=tape: there is no such tier; there are device, {', '.join(TIERS)}"),
        ("states=host,states=disk", "at most once"),
        ("place=host", "give each of params, states, grads, update"),
        ("states=host,update=nobody", "update=nobody: give device or host"),
        ("states=host,grads=disk", "grads=disk with states=host and update=host: .*; give grads=host$"),
        ("states=disk,grads=device,update=host", "give grads=host or grads=disk$"),
        ("params=disk,states=host", "in its state's storage; give states=disk, or params=device$"),
        ("states=device,update=host", "give states=host, or update=device$"),
    ],
)
def test_what_cannot_be_says_the_way_out(text: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        parse_placement(text)
