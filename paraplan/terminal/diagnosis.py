"""`paraplan explain` on a terminal: what binds, what more would be worth, what else was tried, why not another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paraplan.report.diagnosis.records import (
    FASTER_WORDS,
    PART_WORDS,
    Breakdown,
    Diagnosis,
    MemoryUse,
    MoreMemory,
    SavedMemory,
    WhyNot,
)
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
from paraplan.report.memory_report import PartRow
from paraplan.report.units import show_bytes, show_seconds, show_share, show_signed_seconds

_PARTS, _POSITIONS = 6, 16
"""Rows shown of what fills memory, and of a pipeline's positions."""


def show_diagnosis(console: Console, told: Diagnosis) -> None:
    """Everything found out."""
    bound = "" if not told.bound_s else f", of which {show_seconds(told.bound_s)} are proved to be needed"
    console.print(f"[bold]{escape(told.title)}[/bold]: {escape(told.plan)}", highlight=False)
    console.print(f"a step of {show_seconds(told.step_s)}{bound}", highlight=False)
    if told.why_not is not None:
        _why_not(console, told, told.why_not)
    _section(console, "What binds")
    console.print(binding_words(told), highlight=False)
    console.print(_breakdown(told.binding))
    if told.positions:
        _section(console, "Every position")
        console.print(_positions(told.positions))
    _section(console, "Memory")
    _memory(console, told.memory, told.saving)
    _section(console, SIMULATED)
    console.print(_faster(told))
    if told.more_memory is not None:
        _more(console, told, told.more_memory)
    _section(console, "What else was tried")
    _tried(console, told)
    for note in told.notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}")


def diagnosis_json(told: Diagnosis) -> dict[str, Any]:
    """The same as one object."""
    return msgspec.to_builtins(told)  # type: ignore[no-any-return]


def _section(console: Console, title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


def _table(*heads: str) -> Table:
    """Heads beginning with > are number columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        number = head.startswith(">")
        table.add_column(head.lstrip(">"), justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def _breakdown(told: Breakdown) -> Table:
    table = _table("part", ">of the step", ">share", ">at work", "")
    for part in told.parts:
        table.add_row(
            PART_WORDS[part.key],
            show_seconds(part.seconds),
            show_share(part.seconds, told.step_s),
            show_seconds(part.busy_s) if part.busy_s else "",
            escape(part_words(told, part)),
        )
    table.add_row("[bold]step[/bold]", f"[bold]{show_seconds(told.step_s)}[/bold]", "", "", "")
    return table


def _positions(told: Sequence[Breakdown]) -> Table:
    keys = [key for key in PART_WORDS if any(each.of(key) for each in told)]
    table = _table("ranks", "holds", *(f">{PART_WORDS[key]}" for key in keys))
    for column in table.columns[2:]:
        column.no_wrap = False
    for each in told[:_POSITIONS]:
        table.add_row(each.ranks, each.where, *(show_share(each.of(key), each.step_s) for key in keys))
    if len(told) > _POSITIONS:
        table.add_row("...", f"{len(told) - _POSITIONS} more")
    return table


def _memory(console: Console, use: MemoryUse, saving: Sequence[SavedMemory]) -> None:
    console.print(escape(memory_words(use)), highlight=False)
    console.print(_filled(use.parts, use.peak_bytes))
    for sentence in saving_words(saving):
        console.print(escape(sentence), highlight=False)


def _filled(parts: Sequence[PartRow], whole: int) -> Table:
    table = _table("what fills it", ">bytes", ">share")
    largest = sorted(parts, key=lambda row: -row.nbytes)
    for row in largest[:_PARTS]:
        table.add_row(row.what, show_bytes(row.nbytes), show_share(row.nbytes, whole))
    if rest := sum(row.nbytes for row in largest[_PARTS:]):
        table.add_row("all else", show_bytes(rest), show_share(rest, whole))
    return table


def _faster(told: Diagnosis) -> Table:
    table = _table("10 % faster", ">rate", ">step", ">saved", ">share", ">saved for each GB/s more")
    for each in told.faster:
        table.add_row(
            FASTER_WORDS[each.what],
            f"{each.bytes_per_s / 1e9:.4g} GB/s" if each.bytes_per_s else "",
            show_seconds(each.step_s),
            show_seconds(each.saved_s) if each.saved_s > 0 else "nothing",
            show_share(each.saved_s, told.step_s) if each.saved_s > 0 else "",
            show_seconds(each.saved_s_per_gb_per_s) if each.saved_s_per_gb_per_s > 0 else "",
        )
    return table


def _more(console: Console, told: Diagnosis, more: MoreMemory) -> None:
    _section(console, more_memory_title(more))
    for sentence in more_memory_words(told, more):
        console.print(escape(sentence), highlight=False)


def _tried(console: Console, told: Diagnosis) -> None:
    if not told.tried:
        console.print("[dim]nothing is recorded: there was one way alone, or an older version wrote the plan[/dim]")
        return
    table = _table("plan", ">step", ">to this plan", ">peak", ">estimated", "")
    for row in tried_words(told):
        table.add_row(*map(escape, row))
    console.print(table)


def _why_not(console: Console, told: Diagnosis, other: WhyNot) -> None:
    _section(console, f"Why not {escape(other.asked)}")
    for sentence in verdict_words(told, other):
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    for over in other.over:
        console.print(escape(over_words(over)), highlight=False)
        console.print(_filled(over.parts, over.peak_bytes))
    if other.breakdown is None or other.step_s is None:
        return
    table = _table("part", ">this plan", f">{escape(other.asked)}", ">difference")
    for each in other.differences:
        table.add_row(
            PART_WORDS[each.key],
            show_seconds(each.here_s),
            show_seconds(each.there_s),
            show_signed_seconds(each.there_s - each.here_s),
        )
    longer = show_signed_seconds(other.step_s - told.step_s)
    table.add_row(
        "[bold]step[/bold]",
        f"[bold]{show_seconds(told.step_s)}[/bold]",
        f"[bold]{show_seconds(other.step_s)}[/bold]",
        f"[bold]{longer}[/bold]",
    )
    for row in work_words(told, other):
        table.add_row(*(f"[dim]{escape(cell)}[/dim]" for cell in (f"computed: {row[0]}", *row[1:])))
    table.add_row("peak memory", show_bytes(told.memory.peak_bytes), show_bytes(other.peak_bytes), "")
    console.print(table)
