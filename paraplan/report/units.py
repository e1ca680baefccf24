"""Quantities as people read them: GiB, ms, counts. Seconds and bytes stay plain numbers everywhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


class Column(NamedTuple):
    """The head of a table's column, and whether the column is of numbers, which stand right."""

    title: str
    is_number: bool = False


def columns(*titles: str, numbers: int = 0) -> tuple[Column, ...]:
    """Heads, of which as many as said, the last ones, are of numbers.

    Args:
        titles: of the columns, in order.
        numbers: how many of the last ones are of numbers.
    """
    first = len(titles) - numbers
    return tuple(Column(title, index >= first) for index, title in enumerate(titles))


def show_bytes(nbytes: float) -> str:
    """`1610612736` as "1.50 GiB"."""
    for unit, size in _BYTES:
        if abs(nbytes) >= size:
            return f"{nbytes / size:.{_digits(nbytes / size)}f} {unit}"
    return f"{nbytes:.0f} B"


def show_seconds(seconds: float) -> str:
    """`0.0123` as "12.3 ms"."""
    for unit, size in _SECONDS:
        if abs(seconds) >= size:
            return f"{seconds / size:.{_digits(seconds / size)}f} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-6:.2g} µs"


def show_signed_seconds(seconds: float) -> str:
    """`-0.0123` as "-12.3 ms", `0.0123` as "+12.3 ms"."""
    return f"{'+' if seconds > 0 else '-' if seconds < 0 else ''}{show_seconds(abs(seconds))}"


def show_count(number: float) -> str:
    """`8030261248` as "8.03 B"."""
    for unit, size in _COUNTS:
        if abs(number) >= size:
            return f"{number / size:.{_digits(number / size)}f} {unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.2g}"


def show_share(part: float, whole: float) -> str:
    """A percentage; empty where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def show_ranks(ranks: Iterable[int]) -> str:
    """`(0, 1, 2, 3, 6)` as "ranks 0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(runs) > 1 or any(first != last for first, last in runs) else ''} {text}"


def _digits(value: float) -> int:
    """Three significant digits, at most two decimals."""
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
