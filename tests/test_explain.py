"""`paraplan.explain`: every answer against plans made by hand of the same job."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.ir.errors import ConstraintError
from paraplan.report.diagnosis.sentences import more_memory_words

ROWS, LAYERS = 4096, 6
INPUTS = (torch.zeros(ROWS, 16),)


class Deep(nn.Module):
    """Layers whose activations are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def compiled(**options: object) -> pp.Plan:
    return pp.compile(Deep(), "local:2", example_inputs=INPUTS, **options)  # type: ignore[arg-type]


def step_s(plan: pp.Plan) -> float:
    return plan.prediction.step_s


@pytest.fixture(scope="module")
def roomy() -> pp.Plan:
    return compiled(dp=2, zero=0, microbatches=1)


@pytest.fixture(scope="module")
def tight(roomy: pp.Plan) -> pp.Plan:
    """Under two thirds of what keeping everything takes."""
    return compiled(dp=2, zero=0, microbatches=1, memory=2 * max(roomy.prediction.peak_bytes) // 3)


def test_a_gib_more_saves_what_memory_forces(roomy: pp.Plan, tight: pp.Plan) -> None:
    assert step_s(tight) > step_s(roomy)
    found = pp.explain(tight, time_limit_s=10)
    assert found.memory.budget_bytes == 2 * max(roomy.prediction.peak_bytes) // 3 >= found.memory.peak_bytes
    forced = [each for each in found.saving if each.forced]
    assert forced and all(each.over_bytes == each.peak_bytes - found.memory.budget_bytes for each in forced)
    more = found.more_memory
    assert more is not None and more.step_s == pytest.approx(step_s(roomy))
    assert more.again_s == pytest.approx(step_s(tight))
    assert more.saved_s == pytest.approx(step_s(tight) - step_s(roomy))
    assert any(word.startswith("no longer") for word in more.changed)


def test_a_gib_more_saves_nothing_where_memory_does_not_bind(roomy: pp.Plan) -> None:
    found = pp.explain(roomy, time_limit_s=10)
    assert found.more_memory is not None and found.more_memory.saved_s == 0.0 and not found.saving
    assert found.binding.parts[0].key == "compute" and found.step_s == step_s(roomy)
    assert pp.explain(roomy, time_limit_s=0).more_memory is None


def test_what_a_second_search_finds_is_not_taken_for_what_memory_is_worth(roomy: pp.Plan) -> None:
    """A plan that recomputes though nothing asks for it: memory is worth nothing, planning again all of it."""
    bad = compiled(dp=2, zero=0, microbatches=1, recompute="full")
    pins = {name: value for name, value in bad.data.pins.items() if name != "recompute"}
    found = pp.explain(pp.Plan(msgspec.structs.replace(bad.data, pins=pins), bad.programs), time_limit_s=10)
    more = found.more_memory
    assert more is not None and more.saved_s == 0.0 and more.again_s == pytest.approx(step_s(roomy), rel=0.01)
    words = " ".join(more_memory_words(found, more))
    assert "saves nothing" in words and "plan again" in words


def test_why_not_is_slower_and_says_where(roomy: pp.Plan) -> None:
    found = pp.explain(roomy, {"tp": 2}, time_limit_s=10)
    other = found.why_not
    by_hand = compiled(tp=2)
    assert other is not None and other.verdict == "slower" and other.breakdown is not None and other.step_s is not None
    assert other.step_s == pytest.approx(step_s(by_hand)) and other.plan.startswith("tp=2")
    assert other.dropped == "dp=2, zero=0, microbatches=1" and not other.kept
    longer = sum(each.there_s - each.here_s for each in other.differences)
    assert longer == pytest.approx(other.step_s - found.step_s, rel=1e-9)
    assert sum(each.here_s for each in other.differences) == pytest.approx(found.step_s)
    links = {each.key: each for each in other.differences}["in_node"]
    assert links.there_s > links.here_s  # a split layer's sums are waited for in every layer


def test_what_has_nothing_to_do_with_degrees_stays_pinned(roomy: pp.Plan, tight: pp.Plan) -> None:
    other = pp.explain(tight, {"recompute": "full"}, time_limit_s=10).why_not
    assert (
        other is not None and other.verdict == "slower" and other.kept.startswith("dp=2, zero=0, microbatches=1, mem")
    )
    assert {each.key: each for each in other.differences}["recomputation"].there_s > 0
    faster = pp.explain(tight, {"memory": "1GiB"}, time_limit_s=10).why_not
    assert faster is not None and faster.verdict == "faster" and faster.step_s == pytest.approx(step_s(roomy))
    free = pp.explain(tight, {"memory": None}, time_limit_s=10).why_not
    assert free is not None and free.step_s == faster.step_s and free.dropped.startswith("memory=")
    same = pp.explain(tight, {"overlap": 2}, time_limit_s=10).why_not
    assert same is not None and same.verdict == "as fast"


def test_why_not_contradicts(roomy: pp.Plan) -> None:
    other = pp.explain(roomy, {"tp": 2, "pp": 2}, time_limit_s=10).why_not
    assert other is not None and other.verdict == "contradicts"
    assert other.said == "tp=2 does not divide the 1 devices that pp=2 leaves a stage of 2"


def test_why_not_does_not_fit_and_how_much_is_over(roomy: pp.Plan) -> None:
    budget = max(roomy.prediction.peak_bytes) // 16
    found = pp.explain(roomy, {"memory": budget}, time_limit_s=10)
    other = found.why_not
    assert other is not None and other.verdict == "does not fit" and "no plan under" in other.said
    kept, again = other.over
    assert kept.peak_bytes == max(roomy.prediction.peak_bytes) > again.peak_bytes > budget
    for each in other.over:
        assert each.over_bytes == each.peak_bytes - budget
        assert sum(row.nbytes for row in each.parts) == each.peak_bytes


def test_a_pipeline_tells_every_position() -> None:
    plan = compiled(pp=2, schedule="gpipe", microbatches=4)
    found = pp.explain(plan, time_limit_s=0)
    assert [each.where for each in found.positions] == [
        f"stage {at} ({stage.first}:{stage.stop})" for at, stage in enumerate(plan.stages)
    ]
    idle = [each.waits_s for each in found.positions]
    assert found.binding.waits_s == min(idle) and max(idle) > 0


def test_what_is_told_in_a_notebook_and_as_json(roomy: pp.Plan) -> None:
    found = pp.explain(roomy, {"tp": 2}, time_limit_s=5)
    page = found._repr_html_()
    assert "Why not tp=2" in page and "What binds" in page and "planned anew" in page and "<script" not in page
    assert msgspec.json.decode(json.dumps(msgspec.to_builtins(found)), type=type(found)) == found


@pytest.mark.parametrize(
    ("why_not", "time_limit_s", "words"),
    [
        ({"tp": 2}, 0.0, "leaves no time"),
        ({}, 5.0, "pins nothing"),
        ({"tp": 0}, 5.0, "at least 1"),
        ({"tq": 2}, 5.0, "tp"),
    ],
)
def test_what_is_refused(roomy: pp.Plan, why_not: dict[str, int], time_limit_s: float, words: str) -> None:
    with pytest.raises((ConstraintError, TypeError), match=words):
        found = pp.explain(roomy, why_not, time_limit_s=time_limit_s)
        assert found.why_not is not None
        raise ConstraintError(found.why_not.said)
