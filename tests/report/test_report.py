"""What the report says must add up to what the simulator says."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan.ir.execution.name import Role
from paraplan.ir.machine.mesh import make_mesh, parse_layout
from paraplan.ir.param_layouts import ParamLayouts
from paraplan.report.html import html_page
from paraplan.report.layouts import generic_name, layout_words, param_words
from paraplan.report.svg import merge_spans
from paraplan.report.units import show_bytes, show_count, show_seconds

MESH = make_mesh((2, 4), ("dp", "tp"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.pow(2).mean()


@pytest.fixture(scope="module")
def plan() -> pp.Plan:
    return pp.compile(Net(), "local:4", example_inputs=(torch.zeros(8, 16),), dp=2, tp=2, microbatches=2)


def test_memory_adds_up_to_the_peak(plan: pp.Plan) -> None:
    told = plan.explain()
    assert sum(row.nbytes for row in told.memory.parts) == told.memory.peak_bytes == max(plan.simulate().peak_bytes)
    by_name = {row.what: row.nbytes for row in told.memory.by_role()}
    assert by_name["optimizer states"] == plan.programs[0].optimizer_bytes
    assert all(nbytes >= 0 for nbytes in by_name.values())


def test_memory_of_every_class_in_words(plan: pp.Plan) -> None:
    (told,) = plan.memory(largest=50)
    (trace,) = plan.simulate().traces
    assert told.ranks == (0, 1, 2, 3) and max(told.curve) == trace.peak_bytes
    assert told.curve[-1] >= trace.memory[-1].live_bytes and min(told.curve) >= trace.start_bytes
    sizes = [row.nbytes for row in told.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row.count for row in told.largest) == told.count
    at_peak = {row.what: row.nbytes for row in told.by_role()}
    rest = at_peak["optimizer states"] + at_peak.get("workspace of the running op", 0)
    assert sum(row.count * row.nbytes for row in told.largest if not row.tier) == told.peak_bytes - rest
    rows = {row.name: row for row in told.largest}
    weights = [row for name, row in rows.items() if name.startswith("layers.") and row.what == "parameters"]
    assert sum(row.count for row in weights) == 8
    assert {row.layout for row in weights} == {
        "split over dp (dim 0)",  # gathered once a step
        "split over dp (dim 0) and split over tp (dim 1)",
    }
    grads = [row for row in told.largest if row.name.startswith("gradient of layers.")]
    assert grads and {row.what for row in grads} == {"gradients"}
    assert all("test_report.py" in row.source and row.made_by and row.read_by for row in grads)


def test_largest_rows_are_cut_at_rows_of_equal_tensors(plan: pp.Plan) -> None:
    (few,), (all_of_them,) = plan.memory(largest=3), plan.memory(largest=50)
    assert few.largest == all_of_them.largest[:3]


def test_time_adds_up_to_the_streams(plan: pp.Plan) -> None:
    told, simulation = plan.explain(), plan.simulate()
    assert sum(row.seconds for row in told.times) == pytest.approx(simulation.compute_s)
    assert sum(row.seconds for row in told.collectives) == pytest.approx(sum(simulation.comm_s.values()))


def test_every_parameter_is_told_once(plan: pp.Plan) -> None:
    rows = [row for kind in plan.explain().kinds[0] for row in kind.params]
    assert sum(row.count for row in rows) == len(plan.data.program.params)
    stored = sum(value.nbytes for value in plan.programs[0].outer.values() if value.role is Role.PARAMETER)
    assert sum(row.nbytes for row in rows) == stored


def test_html_is_well_formed_and_whole(plan: pp.Plan) -> None:
    class Checker(HTMLParser):
        open: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "br"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    checker = Checker()
    checker.open = []
    page = html_page(plan.explain())
    checker.feed(page)
    assert checker.open == []
    for words in (
        "layers.*.weight",
        "timeline of the busiest rank",
        "memory of a rank",
        show_seconds(plan.prediction.step_s),
    ):
        assert words in page, words
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_trace_holds_every_span(plan: pp.Plan) -> None:
    events = json.loads(plan.trace())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(plan.simulate().traces[0].spans)
    assert all(event["dur"] > 0 for event in spans)
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert counters[0] == plan.simulate().traces[0].start_bytes


def test_a_crowded_timeline_is_merged_without_losing_work(plan: pp.Plan) -> None:
    spans = [span for span in plan.simulate().traces[0].spans if span.stream == "compute"] * 400
    merged = merge_spans(spans, 1.0)
    assert len(merged) < len(spans)
    assert sum(span.busy_s for span in merged) == pytest.approx(sum(span.busy_s for span in spans))


@pytest.mark.parametrize(
    ("texts", "used", "words"),
    [
        (("R,R", "P,R", "R,R"), "R,R", "whole on every rank"),
        (("R,R", "P,R", "S0,R"), "R,R", "ZeRO-1 over dp"),
        (("R,R", "S0,R", "S0,R"), "R,R", "ZeRO-2 over dp"),
        (("S0,R", "S0,R", "S0,R"), "R,R", "ZeRO-3 over dp"),
        (("S0,S1", "S0,S1", "S0,S1"), "R,S1", "ZeRO-3 over dp and split over tp (dim 1)"),
        (("R,S0", "P,S0", "R,S0"), None, "split over tp (dim 0)"),
        (("R,R", "S0,S1", "S0,S1"), "R,R", "ZeRO-2 over dp and tp"),
    ],
)
def test_parameters_in_words(texts: tuple[str, str, str], used: str | None, words: str) -> None:
    layouts = ParamLayouts(stored=texts[0], grad=texts[1], state=texts[2])
    assert param_words(layouts, None if used is None else parse_layout(used), MESH) == words


def test_a_pipeline_says_who_holds_what() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    given = {"input": torch.randn(4, 8)}
    plan = pp.compile(
        model, "local:2", example_inputs=given, loss_fn=lambda out, _: out.square().mean(), pp=2, microbatches=2
    )
    rows = dict(plan.explain().facts)
    assert (rows["stage 0"], rows["stage 1"]) == ("segments 0:1 on axis0 1", "segments 1:2 on axis0 1")
    assert rows["parameters"] == "whole on every rank of its stage 100.0 %"


def test_layouts_in_words() -> None:
    assert layout_words(parse_layout("S0,P"), MESH) == "split over dp (dim 0) and partial sums over tp"
    assert generic_name("model.layers.12.mlp.weight") == "model.layers.*.mlp.weight"


def test_units() -> None:
    assert [show_bytes(n) for n in (12, 1536, 3 << 30)] == ["12 B", "1.50 KiB", "3.00 GiB"]
    assert [show_seconds(s) for s in (0, 1.5e-6, 0.0123, 12.34)] == ["0 s", "1.50 µs", "12.3 ms", "12.3 s"]
    assert [show_count(n) for n in (7, 8030261248, 0.25)] == ["7", "8.03 B", "0.25"]
