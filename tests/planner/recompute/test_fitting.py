"""How much is saved where what a plan holds at its peak hardly says: long strides, and halves of what is left."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from paraplan.planner.assemble import Decisions
from paraplan.planner.recompute import stage_recompute
from paraplan.planner.recompute.kind_options import RematOption
from paraplan.planner.recompute.option_choice import added_s
from paraplan.planner.recompute.stage_recompute import COMPUTED, Fitted, _Fitting

SEGMENTS, LIMIT = 20, 110
OPTIONS = ((RematOption((), 10, 0.0), RematOption(("v",), 0, 0.1)),)


def _peak_bytes(saved: int) -> int:
    """Of a working set that stays as it is until little is saved."""
    return 50 + saved if saved > 60 else 115 if saved > 20 else 40 + saved


class _Made:
    """A plan that saves so much, and what making such plans came to."""

    def __init__(self, saved: int) -> None:
        self.saved, self.peak_bytes, self.over_bytes = saved, _peak_bytes(saved), dict[str, int]()
        trace = SimpleNamespace(spans=(), compute_s=3.0)
        step_s = 5.0 - saved / 100
        self.simulation = SimpleNamespace(
            traces=[trace], busiest=0, step_s=step_s, compute_s=step_s - 1.0, tier_peak_bytes={}
        )
        self.plan = self


def _fitting(made: list[int], **limits: float) -> _Fitting:
    def make(job: Any, decisions: Decisions) -> Any:
        made.append(10 * sum(not each for each in decisions.activations))
        return _Made(made[-1])

    program = SimpleNamespace(segments=[SimpleNamespace(kind=0)] * SEGMENTS)
    decisions = Decisions(None, 1, (), (), (), {})  # type: ignore[arg-type]
    given: Any = SimpleNamespace(program=program), decisions, LIMIT, _Made(200), OPTIONS, make
    return _Fitting(*given, **limits)


@pytest.fixture(autouse=True)
def _no_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_recompute, "peak_instant", lambda made: None)


def test_a_peak_that_hardly_depends_on_what_is_saved() -> None:
    made = list[int]()
    found = _fitting(made).found()
    assert isinstance(found, Fitted)
    most = max(saved for saved in range(0, 210, 10) if _peak_bytes(saved) <= LIMIT)
    assert found.plan.saved == most == 20  # type: ignore[attr-defined]
    assert found.extra_s == pytest.approx(0.1 * (SEGMENTS - 2))
    assert len(made) <= 7, "not one try per segment"


def test_what_promises_to_be_slow_is_not_made() -> None:
    made = list[int]()
    found = _fitting(made, below_s=3.0).found()
    assert not isinstance(found, Fitted) and found.is_slow and not made
    assert isinstance(_fitting(made, below_s=9.0).found(), Fitted)


def test_what_computes_for_longer_than_a_known_plan_takes_is_not_made() -> None:
    """Passes hide what it waits for; what is computed, and made again, is not less for them."""
    made = list[int]()
    kept = _fitting(made).kept.simulation
    again_s = OPTIONS[0][1].extra_s * (SEGMENTS - LIMIT // 10)
    found = _fitting(made, known_s=COMPUTED * (kept.compute_s + again_s)).found()
    assert not isinstance(found, Fitted) and found.is_slow and not made
    assert kept.compute_s + again_s < kept.step_s, "which it waits for might be hidden"
    assert isinstance(_fitting(made, known_s=kept.compute_s + 0.1 * SEGMENTS).found(), Fitted)


def test_promised_seconds_count_what_copies_wait_for() -> None:
    away = replace(OPTIONS[0][0], tier="host", copy_s=2.0)
    assert added_s([away, away, OPTIONS[0][1]], (3.0, 10.0), 1) == pytest.approx(0.1 + 1.0)
    assert added_s([away, away], (3.0, 10.0), 3) == pytest.approx(9.0 + 2.0)
