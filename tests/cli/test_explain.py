"""`paraplan explain`: what it shows, its JSON, and what of --why-not is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paraplan.ir.errors import ConstraintError
from paraplan.planner.constraints import Constraints
from paraplan.terminal.command_options import parse_pins

HEADINGS = (
    *("Why not tp=2", "What binds", "Memory", "The same plan where something is 10 % faster (simulated, nothing is "),
    *("1.00 GiB more memory on every device (planned anew)", "What else was tried"),
)


def test_everything_is_told_in_order(command: Any, plan_file: Path) -> None:
    outcome = command("explain", "plan.json", "--why-not", "tp=2", "--time-limit", "5", "--json")
    assert outcome.code == 0, outcome.err
    *lines, last = outcome.out.splitlines()
    assert lines[0] == "Net on local:2: dp=2, 1 microbatch" and lines[1].startswith("a step of ")
    places = [next(at for at, line in enumerate(lines) if line.startswith(heading)) for heading in HEADINGS]
    assert places == sorted(places)
    found = json.loads(last)
    assert found["plan"] == "dp=2, 1 microbatch" and found["more_memory"]["saved_s"] == 0.0
    assert sum(part["seconds"] for part in found["binding"]["parts"]) == pytest.approx(found["step_s"])
    assert found["why_not"]["asked"] == "tp=2" and found["why_not"]["dropped"] == "dp=2"
    differences = sum(each["there_s"] - each["here_s"] for each in found["why_not"]["differences"])
    assert differences == pytest.approx(found["why_not"]["step_s"] - found["step_s"])
    assert any(line.startswith("step") and line.count("µs") + line.count("ms") == 3 for line in lines)


def test_a_contradiction_is_an_answer(command: Any, plan_file: Path) -> None:
    outcome = command("explain", "plan.json", "--why-not", "tp=2,pp=2", "--time-limit", "5")
    assert outcome.code == 0, outcome.err
    assert "it is a contradiction: tp=2 does not divide the 1 devices that pp=2 leaves a stage of 2" in outcome.out
    assert "no longer pinned, as for this plan: dp=2" in outcome.out


def test_without_time_nothing_is_planned(command: Any, plan_file: Path) -> None:
    outcome = command("explain", "plan.json", "--time-limit", "0")
    assert outcome.code == 0 and "more memory" not in outcome.out and "mesh" not in outcome.err
    outcome = command("explain", "plan.json", "--time-limit", "0", "--why-not", "tp=2")
    assert outcome.code == 2 and "--time-limit" in outcome.err
    for none in ("-1", "nan"):
        outcome = command("explain", "plan.json", "--time-limit", none)
        assert outcome.code == 2 and f"a time limit of {float(none)} s: give a number of seconds" in outcome.err


@pytest.mark.parametrize(
    ("text", "pins"),
    [
        ("tp=8,pp=4", {"tp": 8, "pp": 4}),
        ("--tp=8, --pp=auto", {"tp": 8, "pp": None}),
        ("mesh=8,8,pp=2", {"mesh": (8, 8), "pp": 2}),
        ("pp=2,stages=0:3,3:6,microbatches=4", {"pp": 2, "stages": ((0, 3), (3, 6)), "microbatches": 4}),
        ("tp=2,sp", {"tp": 2, "sp": True}),
        ("sp=false,cp_mode=ring", {"sp": False, "cp_mode": "ring"}),
        ("memory=12GiB,states=host,disk", {"memory": 12 << 30, "place_states": "host,disk"}),
        ("compile", {"compiled": True}),
    ],
)
def test_pins_are_read_as_the_command_line_reads_its_options(text: str, pins: dict[str, object]) -> None:
    assert parse_pins(text, Constraints) == pins


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tq=8", ("'tq' is no option", "did you mean tp")),
        ("zzz=8", ("'zzz' is no option", "there are mesh, dp")),
        ("8", ("'8' is no option with a value", "tp=8,pp=4")),
        ("tp", ("tp has no value", "tp=")),
        ("tp=two", ("tp='two'", "number")),
        ("tp=2,tp=4", ("given twice",)),
        ("sp=perhaps", ("sp=perhaps", "sp alone")),
        ("mesh=a", ("mesh='a'", "every axis")),
        ("pp=x", ("pp='x'", "auto")),
    ],
)
def test_pins_that_are_none_are_refused_with_the_way_out(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConstraintError) as fault:
        parse_pins(text, Constraints)
    assert all(word in str(fault.value) for word in words), fault.value
