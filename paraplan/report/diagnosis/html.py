"""What is found out about a plan as a fragment of HTML, for notebooks: the terminal's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paraplan.report.diagnosis.records import Diagnosis, WhyNot
from paraplan.report.diagnosis.sentences import (
    SIMULATED,
    binding_words,
    memory_words,
    more_memory_title,
    more_memory_words,
    over_words,
    saving_words,
    verdict_words,
)
from paraplan.report.diagnosis.tables import (
    Table,
    difference_table,
    faster_table,
    filled_table,
    parts_table,
    positions_table,
    tried_table,
)
from paraplan.report.html import STYLE, html_bar, html_table
from paraplan.report.memory_report import PartRow
from paraplan.report.units import columns


class ShownDiagnosis(Diagnosis, frozen=True, kw_only=True):
    """A diagnosis that a notebook shows."""

    def _repr_html_(self) -> str:
        return diagnosis_html(self)


def diagnosis_html(told: Diagnosis) -> str:
    """Everything found out, for a notebook cell or the body of a page."""
    more, binds = told.more_memory, told.binding
    parts = _table(parts_table(binds), [part.seconds for part in binds.parts], binds.step_s)
    positions = f"<details><summary><b>Every position</b></summary>{_table(positions_table(told.positions))}</details>"
    return "".join(
        (
            f'<div class="pp"><style>{STYLE}</style><h3>{escape(told.title)}: {escape(told.plan)}</h3>',
            "" if told.why_not is None else _why_not(told, told.why_not),
            f"<h4>What binds</h4>{_lines([binding_words(told)])}{parts}",
            positions if told.positions else "",
            f"<h4>Memory</h4>{_lines([memory_words(told.memory)])}",
            f"{_filled(told.memory.parts, told.memory.peak_bytes)}{_lines(saving_words(told.saving))}",
            f"<h4>{SIMULATED}</h4>{_table(faster_table(told))}",
            "" if more is None else f"<h4>{more_memory_title(more)}</h4>{_lines(more_memory_words(told, more))}",
            f"<h4>What else was tried</h4>{_table(tried_table(told))}" if told.tried else "",
            f"<h4>Notes</h4>{_lines(told.notes)}" if told.notes else "",
            "</div>",
        )
    )


def _lines(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _table(told: Table, amounts: Sequence[float] = (), whole: float = 0.0) -> str:
    """A table; with amounts, a bar in every row that has one."""
    rows = [[_cell(told, number, cell) for cell in row] for number, row in enumerate(told.rows)]
    if not amounts:
        return html_table(told.heads, rows)
    bars = [*(html_bar(amount, whole) for amount in amounts), *[""] * (len(rows) - len(amounts))]
    barred = ([name, bar, *cells] for (name, *cells), bar in zip(rows, bars, strict=True))
    return html_table((told.heads[0], *columns(""), *told.heads[1:]), barred)


def _cell(told: Table, row: int, cell: str) -> str:
    text = escape(cell)
    return f"<b>{text}</b>" if row in told.sums else f'<span class="soft">{text}</span>' if row in told.fine else text


def _filled(parts: Sequence[PartRow], whole: int) -> str:
    return _table(filled_table(parts, whole), sorted((row.nbytes for row in parts), reverse=True), whole)


def _why_not(told: Diagnosis, other: WhyNot) -> str:
    over = "".join(f"{_lines([over_words(each)])}{_filled(each.parts, each.peak_bytes)}" for each in other.over)
    table = "" if other.step_s is None else _table(difference_table(told, other))
    return f"<h4>Why not {escape(other.asked)}</h4>{_lines(verdict_words(told, other))}{over}{table}"
