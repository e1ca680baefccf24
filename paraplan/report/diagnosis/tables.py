"""The tables of a diagnosis, as text, alike on a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paraplan.ir.plan import Tried
from paraplan.report.diagnosis.records import FASTER_WORDS, PART_WORDS, Breakdown, Diagnosis, WhyNot
from paraplan.report.diagnosis.sentences import part_words
from paraplan.report.memory_report import PartRow
from paraplan.report.units import Column, columns, show_bytes, show_seconds, show_share, show_signed_seconds

SAME = 1e-9
"""Relative difference of the steps of one plan."""


class Table(NamedTuple):
    """Rows under heads.

    Attributes:
        heads: a column each.
        rows: cells.
        sums, fine: numbers of rows that sum up others, and of those that are parts of them.
    """

    heads: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    sums: frozenset[int] = frozenset()
    fine: frozenset[int] = frozenset()


def parts_table(told: Breakdown) -> Table:
    """What a step goes into."""
    rows = tuple(
        (
            PART_WORDS[part.key],
            show_seconds(part.seconds),
            show_share(part.seconds, told.step_s),
            show_seconds(part.busy_s) if part.busy_s else "",
            part_words(told, part),
        )
        for part in told.parts
    )
    step = ("step", show_seconds(told.step_s), "", "", "")
    heads = (*columns("part", "of the step", "share", "at work", numbers=3), *columns(""))
    return Table(heads, (*rows, step), sums=frozenset({len(rows)}))


def positions_table(told: Sequence[Breakdown]) -> Table:
    """The same of every position of a pipeline, in shares of the step."""
    keys = [key for key in PART_WORDS if any(each.of(key) for each in told)]
    rows = ((each.ranks, each.where, *(show_share(each.of(key), each.step_s) for key in keys)) for each in told)
    return Table(columns("ranks", "holds", *map(PART_WORDS.__getitem__, keys), numbers=len(keys)), tuple(rows))


def filled_table(parts: Sequence[PartRow], whole: int, most: int | None = None) -> Table:
    """What fills a device, the largest first.

    Args:
        parts: of its memory.
        whole: bytes of all.
        most: rows; what is smaller is one more.
    """
    largest = [(row.what, row.nbytes) for row in sorted(parts, key=lambda row: -row.nbytes)]
    shown = largest[:most]
    if rest := sum(nbytes for _, nbytes in largest[len(shown) :]):
        shown.append(("all else", rest))
    rows = tuple((what, show_bytes(nbytes), show_share(nbytes, whole)) for what, nbytes in shown)
    return Table(columns("what fills it", "bytes", "share", numbers=2), rows)


def faster_table(told: Diagnosis) -> Table:
    """What a tenth more of everything at work is worth."""
    rows = (
        (
            FASTER_WORDS[each.what],
            f"{each.bytes_per_s / 1e9:.4g} GB/s" if each.bytes_per_s else "",
            show_seconds(each.step_s),
            show_seconds(each.saved_s) if each.saved_s > 0 else "nothing",
            show_share(each.saved_s, told.step_s) if each.saved_s > 0 else "",
            show_seconds(each.saved_s_per_gb_per_s) if each.saved_s_per_gb_per_s > 0 else "",
        )
        for each in told.faster
    )
    heads = columns("10 % faster", "rate", "step", "saved", "share", "saved for each GB/s more", numbers=5)
    return Table(heads, tuple(rows))


def difference_table(told: Diagnosis, other: WhyNot) -> Table:
    """This plan's step and memory beside another one's; of a plan whose step is known."""
    there_s = told.step_s if other.step_s is None else other.step_s
    longer = show_signed_seconds(there_s - told.step_s)
    parts = [
        (
            PART_WORDS[each.key],
            show_seconds(each.here_s),
            show_seconds(each.there_s),
            show_signed_seconds(each.there_s - each.here_s),
        )
        for each in other.differences
    ]
    work = [(f"computed: {name}", *cells) for name, *cells in _work_rows(told, other)]
    step = ("step", show_seconds(told.step_s), show_seconds(there_s), longer)
    peak = ("peak memory", show_bytes(told.memory.peak_bytes), show_bytes(other.peak_bytes), "")
    fine = range(len(parts) + 1, len(parts) + 1 + len(work))
    heads = columns("part", "this plan", other.asked, "difference", numbers=3)
    return Table(heads, (*parts, step, *work, peak), frozenset({len(parts)}), frozenset(fine))


def _work_rows(told: Diagnosis, other: WhyNot) -> tuple[tuple[str, ...], ...]:
    """Rows: classes of what is computed, recomputation and updates included, here, there, and the difference."""
    if other.breakdown is None:
        return ()
    here = {row.name: row.seconds for row in told.binding.work}
    there = {row.name: row.seconds for row in other.breakdown.work}
    longer = {name: there.get(name, 0.0) - here.get(name, 0.0) for name in dict.fromkeys((*here, *there))}
    return tuple(
        (name, show_seconds(here.get(name, 0.0)), show_seconds(there.get(name, 0.0)), show_signed_seconds(seconds))
        for name, seconds in sorted(longer.items(), key=lambda item: -abs(item[1]))
    )


def tried_table(told: Diagnosis) -> Table:
    """What else was tried, and why it is not the plan."""
    rows = tuple(_tried_row(told.step_s, each) for each in told.tried)
    return Table((*columns("plan", "step", "to this plan", "peak", "estimated", numbers=4), *columns("")), rows)


def _tried_row(step_s: float, each: Tried) -> tuple[str, str, str, str, str, str]:
    estimated = "" if each.estimated_s is None else show_seconds(each.estimated_s)
    if each.step_s is None:
        return each.what, "none", "", "", estimated, each.why
    longer = each.step_s - step_s
    same = abs(longer) <= SAME * step_s
    to = "this plan" if same else f"{show_signed_seconds(longer)} ({100 * longer / step_s:+.1f} %)"
    return each.what, show_seconds(each.step_s), to, show_bytes(each.peak_bytes), estimated, each.why
