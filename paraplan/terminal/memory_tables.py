"""Memory of a plan on a terminal: per rank class the peak taken apart, the largest tensors, bytes over the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from paraplan.report.memory_report import MemoryTold, PartRow, TensorRow
from paraplan.report.units import columns, show_bytes, show_ranks, show_seconds, show_share

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH, _CODE = 12, 60


def show_memory(console: Console, title: str, told: Sequence[MemoryTold]) -> None:
    """Every rank class.

    Args:
        console: shown on.
        title: above.
        told: a rank class each.
    """
    console.print(f"[bold]{escape(title)}[/bold]")
    for each in told:
        _class(console, each, len(told) > 1)


def memory_json(told: Sequence[MemoryTold]) -> dict[str, Any]:
    """The same as one object."""
    return {"classes": msgspec.to_builtins(told)}


def _class(console: Console, told: MemoryTold, several: bool) -> None:
    if several:
        console.print(f"\n[bold cyan]{show_ranks(told.ranks)}[/bold cyan]")
    console.print(
        f"[dim]peak[/dim]     [bold]{show_bytes(told.peak_bytes)}[/bold] of {show_bytes(told.memory_bytes)} "
        f"({show_share(told.peak_bytes, told.memory_bytes)}), by {show_seconds(told.at_s)} of the step's "
        f"{show_seconds(told.step_s)}",
        highlight=False,
    )
    console.print(f"[dim]running[/dim]  {escape(told.running)}{_at(told.source)}", highlight=False, soft_wrap=True)
    _curve(console, told)
    console.print("\n[bold]At the peak[/bold]")
    console.print(_parts(told.parts, "peak"))
    for tier, parts in told.tiers.items():
        console.print(f"\n[bold]On {tier} then[/bold] (at most {show_bytes(told.tier_peak_bytes[tier])} in the step)")
        console.print(_parts(parts, f"on {tier}"))
    shown = sum(row.count for row in told.largest)
    nbytes = sum(row.count * row.nbytes for row in told.largest)
    console.print(
        f"\n[bold]Largest tensors then[/bold] ({shown} of {told.count}, {show_bytes(nbytes)})", highlight=False
    )
    for row in told.largest:
        _tensor(console, row)
    console.print(f"\n[dim]{_uncounted(told)}[/dim]", highlight=False)


def _curve(console: Console, told: MemoryTold) -> None:
    """A line of bars; its foot is the least of the step, since most bytes are always there."""
    low = min(told.curve)
    span = max(told.peak_bytes - low, 1)
    bars = "".join(_BARS[1 + (size - low) * (len(_BARS) - 2) // span] for size in told.curve[: console.width - 2])
    console.print(f"\n{bars}", highlight=False)
    console.print(f"[dim]bytes over the step, from {show_bytes(low)} to the peak[/dim]", highlight=False)


def _parts(parts: Sequence[PartRow], total: str) -> Table:
    whole = sum(row.nbytes for row in parts)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in columns("what", "of", "tensors", "bytes", "exactly", "share", numbers=4):
        justify: JustifyMethod = "right" if head.is_number else "left"
        table.add_column(head.title, justify=justify, no_wrap=head.is_number or head.title == "what")
    for row in parts:
        table.add_row(
            row.what,
            escape(row.of),
            str(row.count) if row.count > 1 else "",
            show_bytes(row.nbytes),
            str(row.nbytes),
            show_share(row.nbytes, whole),
        )
    table.add_row(f"[bold]{total}[/bold]", "", "", f"[bold]{show_bytes(whole)}[/bold]", f"[bold]{whole}[/bold]", "")
    return table


def _tensor(console: Console, row: TensorRow) -> None:
    """Some lines: name and shape; where it comes from; who needs it."""
    shape = f"{row.dtype} {' x '.join(map(str, row.shape)) or 'scalar'}"
    where = f" on {row.tier}" if row.tier else ""
    facts = "; ".join(part for part in (row.what + where, row.layout) if part)
    size = f"{show_bytes(row.nbytes):>{_WIDTH}}"
    times = f"{row.count} x " if row.count > 1 else ""
    lines = [f"[bold]{size}[/bold]  {times}{escape(row.name)}  [dim]{shape}; {escape(facts)}[/dim]"]
    if row.of:
        lines.append(f"[dim]of[/dim] {escape(row.of)}")
    if row.made_by:
        lines.append(f"[dim]made by[/dim] {escape(row.made_by)}{_at(row.source)}")
    if row.read_by:
        when = "now" if row.reads_now else "next"
        lines.append(f"[dim]read {when} by[/dim] {escape(row.read_by)}{_at(row.read_source)}")
    else:
        lines.append("[dim]not read again in this step[/dim]")
    pad = " " * (_WIDTH + 2)
    console.print(lines[0], highlight=False, soft_wrap=True)
    for line in lines[1:]:
        console.print(pad + line, highlight=False, soft_wrap=True)


def _at(source: str) -> str:
    """The user's line, its code cut short."""
    if not source:
        return ""
    where, colon, code = source.partition(": ")
    return f" [dim]at {escape(where + colon + (code if len(code) <= _CODE else code[: _CODE - 3] + '...'))}[/dim]"


def _uncounted(told: MemoryTold) -> str:
    rounding = (
        f"CUDA's allocator adds {show_bytes(told.rounding_bytes)} by rounding these {told.count} tensors up to 512 "
        "bytes each. "
        if told.rounding_bytes
        else ""
    )
    return (
        f"{rounding}Not in the peak: what the allocator rounds up or leaves in pieces, communication buffers, and the "
        "context; paraplan plan keeps room for them (--reserve)."
    )
