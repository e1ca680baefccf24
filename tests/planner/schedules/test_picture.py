"""Pictures: as wide as time, blank where a position stands still."""

from __future__ import annotations

import pytest

from paraplan.ir.errors import ConstraintError
from paraplan.planner.schedules.event_simulation import evaluate
from paraplan.planner.schedules.named import named_orders
from paraplan.planner.schedules.picture import draw
from paraplan.planner.schedules.schedule_problem import StageCosts


def test_drawn() -> None:
    found = evaluate(named_orders("1f1b", 2, 2), (StageCosts(),) * 2)
    assert draw(found, 18) == "0 F0F1    B0..  B1..\n1   F0B0..F1B1..\n"
    waves = evaluate(named_orders("hanayo", 1, 1), (StageCosts(),) * 2)
    assert draw(waves, 12) == "0 F0f0b0..B0..\n"
    with pytest.raises(ConstraintError, match="0 columns wide"):
        draw(found, 0)
