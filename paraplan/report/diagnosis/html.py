"""What is found out about a plan as a fragment of HTML, for notebooks: the terminal's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from paraplan.report.diagnosis.records import FASTER_WORDS, PART_WORDS, Breakdown, Diagnosis, WhyNot
from paraplan.report.diagnosis.sentences import (
    SIMULATED,
    binding_words,
    memory_words,
    more_memory_title,
    more_memory_words,
    over_words,
    part_words,
    saving_words,
    tried_words,
    verdict_words,
    work_words,
)
from paraplan.report.html import STYLE, html_bar, html_table
from paraplan.report.memory_report import PartRow
from paraplan.report.units import show_bytes, show_seconds, show_share, show_signed_seconds


def diagnosis_html(told: Diagnosis) -> str:
    """Everything found out, for a notebook cell or the body of a page."""
    more = told.more_memory
    return "".join(
        (
            f'<div class="pp"><style>{STYLE}</style><h3>{escape(told.title)}: {escape(told.plan)}</h3>',
            "" if told.why_not is None else _why_not(told, told.why_not),
            f"<h4>What binds</h4>{_lines([binding_words(told)])}{_parts(told.binding)}",
            _positions(told.positions),
            f"<h4>Memory</h4>{_lines([memory_words(told.memory)])}",
            f"{_filled(told.memory.parts, told.memory.peak_bytes)}{_lines(saving_words(told.saving))}",
            f"<h4>{SIMULATED}</h4>{_faster(told)}",
            "" if more is None else f"<h4>{more_memory_title(more)}</h4>{_lines(more_memory_words(told, more))}",
            f"<h4>What else was tried</h4>{_tried(told)}" if told.tried else "",
            f"<h4>Notes</h4>{_lines(told.notes)}" if told.notes else "",
            "</div>",
        )
    )


def _lines(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _parts(told: Breakdown) -> str:
    rows = (
        (
            escape(PART_WORDS[part.key]),
            html_bar(part.seconds, told.step_s),
            show_seconds(part.seconds),
            show_share(part.seconds, told.step_s),
            show_seconds(part.busy_s) if part.busy_s else "",
            escape(part_words(told, part)),
        )
        for part in told.parts
    )
    return html_table(("part", "", "#of the step", "#share", "#at work", ""), rows)


def _positions(told: Sequence[Breakdown]) -> str:
    if not told:
        return ""
    keys = [key for key in PART_WORDS if any(each.of(key) for each in told)]
    heads = ("ranks", "holds", *(f"#{PART_WORDS[key]}" for key in keys))
    rows = ((each.ranks, each.where, *(show_share(each.of(key), each.step_s) for key in keys)) for each in told)
    return f"<details><summary><b>Every position</b></summary>{html_table(heads, rows)}</details>"


def _filled(parts: Sequence[PartRow], whole: int) -> str:
    rows = (
        (escape(row.what), html_bar(row.nbytes, whole), show_bytes(row.nbytes), show_share(row.nbytes, whole))
        for row in sorted(parts, key=lambda row: -row.nbytes)
    )
    return html_table(("what fills it", "", "#bytes", "#share"), rows)


def _faster(told: Diagnosis) -> str:
    rows = (
        (
            escape(FASTER_WORDS[each.what]),
            f"{each.bytes_per_s / 1e9:.4g} GB/s" if each.bytes_per_s else "",
            show_seconds(each.step_s),
            show_seconds(each.saved_s) if each.saved_s > 0 else "nothing",
            show_share(each.saved_s, told.step_s) if each.saved_s > 0 else "",
            show_seconds(each.saved_s_per_gb_per_s) if each.saved_s_per_gb_per_s > 0 else "",
        )
        for each in told.faster
    )
    return html_table(("10 % faster", "#rate", "#step", "#saved", "#share", "#saved for each GB/s more"), rows)


def _tried(told: Diagnosis) -> str:
    rows = (tuple(map(escape, row)) for row in tried_words(told))
    return html_table(("plan", "#step", "#to this plan", "#peak", "#estimated", ""), rows)


def _why_not(told: Diagnosis, other: WhyNot) -> str:
    over = "".join(f"{_lines([over_words(each)])}{_filled(each.parts, each.peak_bytes)}" for each in other.over)
    table = ""
    if other.step_s is not None:
        rows = [
            (
                escape(PART_WORDS[each.key]),
                show_seconds(each.here_s),
                show_seconds(each.there_s),
                show_signed_seconds(each.there_s - each.here_s),
            )
            for each in other.differences
        ]
        longer = show_signed_seconds(other.step_s - told.step_s)
        rows.append(("<b>step</b>", show_seconds(told.step_s), show_seconds(other.step_s), f"<b>{longer}</b>"))
        rows += [
            (f'<span class="soft">computed: {escape(name)}</span>', *cells) for name, *cells in work_words(told, other)
        ]
        rows.append(("peak memory", show_bytes(told.memory.peak_bytes), show_bytes(other.peak_bytes), ""))
        table = html_table(("part", "#this plan", f"#{other.asked}", "#difference"), rows)
    return f"<h4>Why not {escape(other.asked)}</h4>{_lines(verdict_words(told, other))}{over}{table}"
