"""`paraplan explain` on a terminal: what binds, what more would be worth, what else was tried, why not another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table as RichTable

from paraplan.report.diagnosis.records import Breakdown, Diagnosis, MemoryUse, MoreMemory, SavedMemory, WhyNot
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
from paraplan.report.units import show_seconds

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
    console.print(_shown(parts_table(told.binding)))
    if told.positions:
        _section(console, "Every position")
        console.print(_positions(told.positions))
    _section(console, "Memory")
    _memory(console, told.memory, told.saving)
    _section(console, SIMULATED)
    console.print(_shown(faster_table(told)))
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


def _shown(told: Table) -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in told.heads:
        justify: JustifyMethod = "right" if head.is_number else "left"
        table.add_column(escape(head.title), justify=justify, no_wrap=head.is_number, overflow="fold")
    for number, row in enumerate(told.rows):
        style = "bold" if number in told.sums else "dim" if number in told.fine else None
        table.add_row(*map(escape, row), style=style)
    return table


def _positions(told: Sequence[Breakdown]) -> RichTable:
    table = _shown(positions_table(told[:_POSITIONS]))
    for column in table.columns[2:]:
        column.no_wrap = False
    if len(told) > _POSITIONS:
        table.add_row("...", f"{len(told) - _POSITIONS} more")
    return table


def _memory(console: Console, use: MemoryUse, saving: Sequence[SavedMemory]) -> None:
    console.print(escape(memory_words(use)), highlight=False)
    console.print(_shown(filled_table(use.parts, use.peak_bytes, _PARTS)))
    for sentence in saving_words(saving):
        console.print(escape(sentence), highlight=False)


def _more(console: Console, told: Diagnosis, more: MoreMemory) -> None:
    _section(console, more_memory_title(more))
    for sentence in more_memory_words(told, more):
        console.print(escape(sentence), highlight=False)


def _tried(console: Console, told: Diagnosis) -> None:
    if not told.tried:
        console.print("[dim]nothing is recorded: there was one way alone, or an older version wrote the plan[/dim]")
        return
    console.print(_shown(tried_table(told)))


def _why_not(console: Console, told: Diagnosis, other: WhyNot) -> None:
    _section(console, f"Why not {escape(other.asked)}")
    for sentence in verdict_words(told, other):
        console.print(escape(sentence), highlight=False, soft_wrap=True)
    for over in other.over:
        console.print(escape(over_words(over)), highlight=False)
        console.print(_shown(filled_table(over.parts, over.peak_bytes, _PARTS)))
    if other.breakdown is not None and other.step_s is not None:
        console.print(_shown(difference_table(told, other)))
