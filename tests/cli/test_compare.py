"""`paraplan compare`: strategies side by side, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_strategies_side_by_side(here: Path, command: Any) -> None:
    outcome = command(
        "compare", "zoo:net", "local:1", "--optimizer", "sgd", "--memory", "100%", "--memory", "1%", "--memory", "1MiB",
        "--strategies", "paraplan,chen-sqrt,dtr", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    found = json.loads(outcome.out.splitlines()[-1])
    rows = {(row["strategy"], row["budget_bytes"]): row for row in found["rows"]}
    assert len(rows) == 9
    full = found["peak_bytes"]
    least, roomy = sorted({budget for _, budget in rows} - {full})
    assert roomy == 1 << 20 and found["base_bytes"] < least < full
    for budget in (full, roomy):
        kept = rows["paraplan", budget]
        assert kept["step_s"] == pytest.approx(found["step_s"]) and kept["status"] == "optimal"
        assert kept["peak_bytes"] <= budget
    assert rows["paraplan", least]["why"].startswith("infeasible") and "alone needs" in outcome.out
    for line in outcome.out.splitlines():
        if line.startswith("paraplan"):
            assert "0.0 [0.0]" in line and "∅" in line


def test_planners_side_by_side(here: Path, command: Any) -> None:
    outcome = command("compare", "zoo:net", "local:2", "--strategies", "paraplan,ddp,megatron,gpipe", "--json")
    assert outcome.code == 0, outcome
    *table, last = outcome.out.splitlines()
    rows = {row["strategy"]: row for row in json.loads(last)["rows"]}
    assert list(rows) == ["paraplan", "ddp", "megatron", "gpipe"]
    assert all(row["step_s"] >= rows["paraplan"]["step_s"] * (1 - 1e-9) for row in rows.values() if "step_s" in row)
    assert rows["ddp"]["plan"].startswith("dp=2") and "pp=2" in rows["gpipe"]["plan"]
    assert sum(line.startswith(("paraplan ", "ddp ", "megatron ", "gpipe ")) for line in table) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("local:2", "--memory", "1MiB"), ("--memory is for one device", "paraplan plan --memory")),
        (("local:2", "--strategies", "paraplan,megatorn"), ("'megatorn' is unknown", "megatron")),
        (("local:1", "--strategies", "paraplan,magic"), ("'magic'", "chen-sqrt")),
        (("local:1", "--strategies", "chekmate"), ("did you mean checkmate-", "revolve")),
        (("local:1", "--memory", "much"), ("'much'", "2GiB", "60%")),
    ],
)
def test_what_is_refused(here: Path, command: Any, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    outcome = command("compare", "zoo:net", *arguments)
    assert outcome.code == 2
    assert all(word in outcome.err for word in words), outcome.err
