"""Plans and simulations on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paraplan.report.explain import Explanation, Fact, facts, stages_in_short, title, verdict
from paraplan.report.layouts import KindRow, merged_rows
from paraplan.report.units import Column, columns, show_bytes, show_seconds, show_share


def show_plan(console: Console, plan: Any) -> None:
    """Everything about a plan."""
    told: Explanation = plan.explain()
    console.print(f"[bold]{escape(told.title)}[/bold]")
    console.print(_facts((*told.facts, *((f"batch {name}", words) for name, words in told.batch))))
    _section(console, "Result")
    console.print(_facts(told.verdict))
    for index, rows in enumerate(told.kinds):
        _section(console, "Layouts" if len(told.kinds) == 1 else f"Layouts of stage {index}")
        for row in rows:
            console.print(_kind(row))
    _section(console, "Where compute time goes (busiest rank)")
    console.print(_times(told))
    _section(console, "Communication per step (busiest rank)")
    console.print(_collectives(told) if told.collectives else "none")
    _section(console, "Memory at the peak")
    console.print(_memory(told))
    _notes(console, told.notes)


def show_summary(console: Console, plan: Any, saved: Path | None) -> None:
    """The few lines a command that made a plan ends with.

    Args:
        console: shown on.
        plan: a public `Plan`.
        saved: where it was written; None where it was not.
    """
    data = plan.data
    console.print(f"[bold]{escape(title(data))}[/bold]")
    said = dict(facts(data))
    kept = [(name, said[name]) for name in ("schedule", "parameters", "activations") if name in said]
    asked = [(name, said[name]) for name in ("model", "batch")]
    console.print(_facts((*asked, *stages_in_short(data), *kept, *verdict(data, plan.prediction))))
    console.print(_kinds_in_words(merged_rows(data.program, data.stages)))
    _notes(console, data.notes)
    if plan.total_s is not None:
        console.print(f"[dim]planned in {plan.total_s:.1f} s, {plan.solve_s:.1f} s of it solving[/dim]")
    console.print(f"[dim]saved to {escape(str(saved))}[/dim]" if saved else "[dim]not saved; give -o plan.json[/dim]")


def show_simulation(console: Console, plan: Any, simulation: Any, trace: Path | None) -> None:
    """A price.

    Args:
        console: shown on.
        plan: a public `Plan`.
        simulation: of it.
        trace: where its timeline was written; None where it was not.
    """
    console.print(f"[bold]{escape(plan.data.model.display)} on {escape(plan.data.cluster.name)}[/bold]")
    console.print(_facts(verdict(plan.data, simulation)))
    table = _table(columns("stream", "busy", "of the step", numbers=2))
    for stream, seconds in {"compute": simulation.compute_s, **simulation.comm_s, **simulation.copy_s}.items():
        table.add_row(stream, show_seconds(seconds), show_share(seconds, simulation.step_s))
    console.print(table)
    if trace is not None:
        console.print(f"[dim]timeline in {escape(str(trace))}; open it in ui.perfetto.dev[/dim]")


def _section(console: Console, title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


def _notes(console: Console, notes: Iterable[str]) -> None:
    for note in notes:
        console.print(f"[yellow]note[/yellow] {escape(note)}")


def _facts(facts: Iterable[Fact]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in facts:
        table.add_row(escape(label), escape(value))
    return table


def _table(heads: Sequence[Column]) -> Table:
    """A table of these columns; numbers stand right."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(
            head.title,
            justify="right" if head.is_number else "left",
            no_wrap=head.is_number or head.title == "parameter",
            overflow="fold",
        )
    return table


def _kind(row: KindRow) -> Table:
    times = f"{row.instances} x " if row.instances > 1 else ""
    table = _table(columns("parameter", "shape", "layout", "stored/grad/state", "per rank", numbers=1))
    table.title, table.title_justify, table.title_style = f"{times}{row.label}", "left", "bold cyan"
    for param in row.params:
        shape = " x ".join(map(str, param.shape))
        table.add_row(
            escape(param.name),
            shape,
            param.words,
            f"{param.stored} / {param.grad} / {param.state}",
            show_bytes(param.nbytes),
        )
    if row.outputs:
        table.caption, table.caption_justify = f"hands on {'; '.join(map(escape, row.outputs))}", "left"
    return table


def _kinds_in_words(rows: Iterable[KindRow]) -> Table:
    table = _table((*columns("", numbers=1), *columns("layers", "layouts")))
    for row in rows:
        words: dict[str, list[str]] = {}
        for param in row.params:
            words.setdefault(param.words, []).append(_short(param.name))
        text = "; ".join(f"{', '.join(names)}: {how}" for how, names in words.items()) or "no parameters"
        table.add_row(str(row.instances), escape(row.label), escape(text))
    return table


def _short(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[-2:])


def _times(told: Explanation) -> Table:
    whole = sum(row.seconds for row in told.times)
    table = _table(columns("work", "kernels", "time", "share", numbers=3))
    for row in told.times:
        table.add_row(row.name, str(row.count), show_seconds(row.seconds), show_share(row.seconds, whole))
    return table


def _collectives(told: Explanation) -> Table:
    table = _table(columns("collective", "over", "for", "count", "bytes put in", "time", numbers=3))
    for row in told.collectives:
        table.add_row(
            row.name, row.axis, row.purpose, str(row.count), show_bytes(row.nbytes), show_seconds(row.seconds)
        )
    return table


def _memory(told: Explanation) -> Table:
    whole = told.memory.peak_bytes
    table = _table(columns("what", "bytes", "share", numbers=2))
    for row in told.memory.by_role():
        table.add_row(row.what, show_bytes(row.nbytes), show_share(row.nbytes, whole))
    table.add_row("[bold]peak[/bold]", f"[bold]{show_bytes(whole)}[/bold]", "")
    return table


def plan_json(found: Any) -> dict[str, Any]:
    """A plan as the JSON object of `plan --json`."""
    prediction, certificate = found.prediction, found.certificate
    return {
        "step_s": prediction.step_s,
        "peak_bytes": max(prediction.peak_bytes),
        "bound_s": certificate.bound_s,
        "gap": certificate.gap,
        "status": certificate.status,
        "solve_s": found.solve_s,
        "total_s": found.total_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
    }
