"""A plan as a fragment of HTML: facts, layouts, time, memory, timeline. No scripts, no libraries, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paraplan.report.explain import Card, Explanation, Fact
from paraplan.report.layouts import KindRow
from paraplan.report.svg import memory_svg, timeline_svg
from paraplan.report.units import Column, columns, show_bytes, show_seconds, show_share

STYLE = """
.pp{--pp-ink:#1c2330;--pp-soft:#667085;--pp-line:#e4e7ec;--pp-lane:#f2f4f7;--pp-fwd:#3f7fd1;--pp-bwd:#8a63c9;
--pp-upd:#d99a2b;--pp-comm:#2fa08a;--pp-limit:#d0453f;color:var(--pp-ink);font:13px/1.45 system-ui,-apple-system,
"Segoe UI",sans-serif;max-width:900px}
@media (prefers-color-scheme:dark){.pp{--pp-ink:#e6e9ef;--pp-soft:#98a2b3;--pp-line:#344054;--pp-lane:#262d3a}}
.pp h3{font-size:15px;margin:0 0 8px;font-weight:650}.pp h4{font-size:12px;margin:18px 0 6px;font-weight:650;
color:var(--pp-soft);text-transform:uppercase;letter-spacing:.04em}
.pp table{border-collapse:collapse;width:100%;margin:0;font-size:12.5px;color:inherit}
.pp td,.pp th{padding:3px 10px 3px 0;text-align:left;vertical-align:top;border:0;border-bottom:1px solid var(--pp-line);
background:none;color:inherit;white-space:normal}.pp th{color:var(--pp-soft);font-weight:500}
.pp td.n,.pp th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.pp .cards{display:flex;flex-wrap:wrap;gap:10px;margin:10px 0 12px}
.pp .card{border:1px solid var(--pp-line);border-radius:8px;padding:7px 14px;min-width:110px}
.pp .card b{display:block;font-size:17px;font-weight:650}
.pp .label{white-space:nowrap}.pp .card span,.pp .soft{color:var(--pp-soft)}
.pp .two{display:grid;grid-template-columns:1fr 1fr;gap:0 32px}
.pp .bar{display:inline-block;height:8px;border-radius:2px;background:var(--pp-fwd);vertical-align:middle}
.pp code{font:12px ui-monospace,Menlo,Consolas,monospace;background:none;color:inherit;padding:0;overflow-wrap:anywhere}
.pp details{margin:0}.pp summary{cursor:pointer;padding:3px 0}.pp svg.pp-svg{width:100%;height:auto;display:block}
.pp .pp-label,.pp .pp-tick{fill:var(--pp-soft);font-size:11px}.pp .pp-lane{fill:var(--pp-lane)}
.pp .pp-fwd{fill:var(--pp-fwd)}.pp .pp-bwd{fill:var(--pp-bwd)}
.pp .pp-upd{fill:var(--pp-upd)}.pp .pp-comm{fill:var(--pp-comm)}
.pp .pp-live{fill:var(--pp-fwd);opacity:.75}.pp .pp-crest{fill:var(--pp-fwd);opacity:.28}
.pp .pp-rule{stroke:var(--pp-soft);stroke-dasharray:2 3;opacity:.6}.pp .pp-limit{stroke:var(--pp-limit)}
.pp .key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 5px 0 12px}
"""


def html_fragment(told: Explanation) -> str:
    """The plan for a notebook cell or the body of a page."""
    kinds = "".join(_stage(index, rows, len(told.kinds)) for index, rows in enumerate(told.kinds))
    notes = "".join(f"<li>{escape(note)}</li>" for note in told.notes)
    rest = [fact for fact in told.verdict if fact[0] not in {label for label, *_ in told.cards}]
    return "".join(
        (
            f'<div class="pp"><style>{STYLE}</style><h3>{escape(told.title)}</h3>',
            _cards(told.cards),
            _facts((*told.facts, *((f"batch {name}", words) for name, words in told.batch), *rest)),
            f"<h4>Timeline of the busiest rank</h4>{timeline_svg(told.trace)}{_KEY}",
            f"<h4>Memory over the step</h4>{memory_svg(told.trace, told.memory_bytes)}",
            f'<div class="two"><div><h4>Where compute time goes</h4>{_times(told)}</div>',
            f"<div><h4>Memory at the peak</h4>{_memory(told)}</div></div>",
            f"<details><summary><b>Largest tensors at the peak</b> ({escape(told.memory.running)})</summary>"
            f"{_largest(told)}</details>",
            f"<h4>Communication per step and rank</h4>{_collectives(told)}<h4>Layouts</h4>{kinds}",
            f"<h4>Notes</h4><ul>{notes}</ul>" if notes else "",
            "</div>",
        )
    )


def html_page(told: Explanation) -> str:
    """A whole page."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(told.title)}</title></head>'
        f'<body style="margin:24px auto;max-width:900px">{html_fragment(told)}</body></html>'
    )


_KEY = (
    '<div class="key soft"><i style="background:var(--pp-fwd)"></i>forward'
    '<i style="background:var(--pp-bwd)"></i>backward'
    '<i style="background:var(--pp-upd)"></i>reduction and update'
    '<i style="background:var(--pp-comm)"></i>communication</div>'
)


def _cards(cards: Iterable[Card]) -> str:
    shown = (
        f'<div class="card"><span>{label}</span><b>{escape(value)}</b><span>{escape(beside)}</span></div>'
        for label, value, beside in cards
    )
    return f'<div class="cards">{"".join(shown)}</div>'


def _facts(facts: Iterable[Fact]) -> str:
    return html_table(
        (), ((f'<span class="soft label">{escape(label)}</span>', escape(value)) for label, value in facts)
    )


def _times(told: Explanation) -> str:
    whole = sum(row.seconds for row in told.times)
    rows = (
        (escape(row.name), html_bar(row.seconds, whole), show_seconds(row.seconds), show_share(row.seconds, whole))
        for row in told.times
    )
    return html_table(columns("", "", "time", "share", numbers=2), rows)


def _memory(told: Explanation) -> str:
    whole = told.memory.peak_bytes
    rows = (
        (escape(row.what), html_bar(row.nbytes, whole), show_bytes(row.nbytes), show_share(row.nbytes, whole))
        for row in told.memory.by_role()
    )
    return html_table(columns("", "", "bytes", "share", numbers=2), rows)


def _largest(told: Explanation) -> str:
    rows = (
        (
            f"<code>{escape(row.name)}</code>{_soft(row.of)}",
            str(row.count),
            show_bytes(row.nbytes),
            f"{' x '.join(map(str, row.shape))} {row.dtype}{_soft(row.layout)}",
            escape(row.what),
            f"{escape(row.made_by)}{_soft(row.source)}",
            f"{escape(row.read_by)}{_soft(row.read_source)}",
        )
        for row in told.memory.largest
    )
    heads = columns("tensor", "count", "bytes each", numbers=2)
    return html_table((*heads, *columns("shape", "what for", "made by", "read next by")), rows)


def _soft(text: str) -> str:
    return f'<div class="soft">{escape(text)}</div>' if text else ""


def html_bar(part: float, whole: float) -> str:
    return f'<span class="bar" style="width:{max(1, round(70 * part / whole)) if whole else 1}px"></span>'


def _collectives(told: Explanation) -> str:
    if not told.collectives:
        return '<p class="soft">No collectives.</p>'
    rows = (
        (
            escape(row.name),
            escape(row.axis),
            escape(row.purpose),
            str(row.count),
            show_bytes(row.nbytes),
            show_seconds(row.seconds),
        )
        for row in told.collectives
    )
    return html_table(columns("collective", "over", "for", "count", "bytes put in", "time", numbers=3), rows)


def _stage(index: int, rows: Sequence[KindRow], count: int) -> str:
    title = f"<p>stage {index}</p>" if count > 1 else ""
    return title + "".join(_kind(row) for row in rows)


def _kind(row: KindRow) -> str:
    params = (
        (f"<code>{escape(p.name)}</code>", " x ".join(map(str, p.shape)), escape(p.words), show_bytes(p.nbytes))
        for p in row.params
    )
    heads = columns("parameter", "shape", "layout", "stored per rank", numbers=1)
    table = html_table(heads, params) if row.params else ""
    handed = f'<div class="soft">hands on {escape("; ".join(row.outputs))}</div>' if row.outputs else ""
    times = f"{row.instances} x " if row.instances > 1 else ""
    return f"<details open><summary><b>{times}{escape(row.label)}</b></summary>{handed}{table}</details>"


def html_table(heads: Sequence[Column], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; columns of numbers stand right."""
    head = "".join(f"<th{_n(each.is_number)}>{escape(each.title)}</th>" for each in heads)
    numbers = {index for index, each in enumerate(heads) if each.is_number}
    body = "".join(
        "<tr>" + "".join(f"<td{_n(i in numbers)}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table>{f'<tr>{head}</tr>' if any(each.title for each in heads) else ''}{body}</table>"


def _n(numeric: bool) -> str:
    return ' class="n"' if numeric else ""
