"""What every benchmark shares: its command line, the table on the screen, and the same rows as JSON.

A benchmark is a dict of cases and the columns to show, and ends with

    if __name__ == "__main__":
        raise SystemExit(main("collectives", CASES, columns=("case", "ms")))

where a case is a function without arguments that gives a row, `{"ms": 1.2}`, or a list of them. The JSON is written
anew after every case, so a run that is cut off loses the case it was at; `--resume` goes on from what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

Row = dict[str, Any]
Case = Callable[[], Row | list[Row]]
Summary = Callable[[Sequence[Row]], Row]
ALL = "all"


def main(
    name: str,
    cases: Mapping[str, Case],
    columns: Sequence[str],
    argv: Sequence[str] | None = None,
    summary: Summary | None = None,
) -> int:
    """Run a benchmark's cases in order; show each one's rows when it is done, and keep them as one JSON list.

    Args:
        name: the benchmark's, as in `python -m benchmarks.<name>`.
        cases: what to run, by name; each gives one row or several. A row without a "case" gets the case's name.
        columns: which keys the table shows, in order. The JSON has every key.
        argv: the command line; None for the process' own.
        summary: of all rows, those gone on from included: one more, called "all", at the end.
    Returns:
        Exit code: 0; 1 when a row has something under "failures"; 2 when the pattern is malformed or matches no case,
        or the rows to go on from cannot be read. A case that raises ends the run; the rows so far are written.
    """
    options = _parser(name).parse_args(argv)
    try:
        pattern = re.compile(options.only or "")
    except re.error as fault:
        return _refuse(f"--only {options.only!r} is not a regular expression: {fault}")
    chosen = {case: run for case, run in cases.items() if pattern.search(case)}
    if not chosen:
        return _refuse(f"--only {options.only!r} matches none of the cases of {name}: {', '.join(cases)}")
    chosen = dict(list(chosen.items())[options.part[0] - 1 :: options.part[1]])
    if options.resume and options.json is None:
        return _refuse("--resume goes on from the rows of --json FILE; name the file")
    rows: list[Row] = []
    if options.resume and options.json.exists():
        try:
            rows = [row for row in json.loads(options.json.read_text()) if summary is None or row["case"] != ALL]
            done = {row["case"] for row in rows}
        except (ValueError, TypeError, KeyError) as fault:
            return _refuse(f"--resume: {options.json} is no JSON list of rows: {fault}")
        chosen = {case: run for case, run in chosen.items() if case not in done}
    chosen = dict(list(chosen.items())[: options.limit])
    made = (
        _run(chosen, 60 * options.minutes)
        if summary is None
        else _with_summary(_run(chosen, 60 * options.minutes), rows, summary)
    )
    for row in _shown(name, columns, rows.copy(), made):
        rows.append(row)
        if options.json is not None:
            _write(options.json, rows)
    return 1 if any(row.get("failures") for row in rows) else 0


def _write(path: Path, rows: Sequence[Row]) -> None:
    """All rows, in one go: a reader sees the old list or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps([_finite(row) for row in rows], indent=1, allow_nan=False) + "\n")
    beside.replace(path)


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--only", metavar="PATTERN", help="run the cases whose name matches this regular expression")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the rows as a JSON list of objects")
    parser.add_argument("--resume", action="store_true", help="keep FILE's rows and run the cases that have none there")
    parser.add_argument("--limit", metavar="N", type=int, help="run N cases at most, of those that are left")
    parser.add_argument("--minutes", metavar="M", type=float, default=math.inf, help="begin no case after M minutes")
    parser.add_argument(
        "--part", metavar="I/N", type=_part, default=(1, 1), help="run the I-th of N shares of the cases"
    )
    return parser


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 1/4 for the first of four")
    return int(index), int(count)


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _run(cases: Mapping[str, Case], most_s: float) -> Iterable[Row]:
    begun = time.perf_counter()
    for case, run in cases.items():
        started = time.perf_counter()
        if started - begun > most_s:
            return
        result = run()
        print(f"{case}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
        for row in result if isinstance(result, list) else [result]:
            yield {"case": case, **row}


def _with_summary(made: Iterable[Row], rows: Sequence[Row], summary: Summary) -> Iterable[Row]:
    """The rows, and one of all there are by then."""
    yield from made
    yield {"case": ALL, **summary(rows)}


def _shown(name: str, columns: Sequence[str], before: Sequence[Row], rows: Iterable[Row]) -> Iterable[Row]:
    """Pass rows through while a table of them and those before grows; no terminal is shown it at the end."""
    table = Table(title=name)
    for column in columns:
        table.add_column(column)
    console = Console()
    if not console.is_terminal:
        console.width = 160
    for row in before:
        table.add_row(*(_text(row.get(column)) for column in columns))
    with Live(table, console=console, vertical_overflow="visible", auto_refresh=False) as live:
        for row in rows:
            table.add_row(*(_text(row.get(column)) for column in columns))
            live.refresh()
            yield row
    if not console.is_terminal:
        console.print()  # a table that is not redrawn ends without a newline


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> Any:
    """JSON knows no infinity or NaN; both become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def in_fresh_process(module: str, *args: str) -> Row:
    """A row that `python -m benchmarks.<module> --job ARGS` prints as JSON, where nothing was cached or held before;
    what it crashes with is the row's failure.

    Args:
        module: the benchmark's.
        args: what it is to measure.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", "--job", *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"what": f"exit {done.returncode}", "failures": [f"exit {done.returncode}"]}
    return dict(json.loads(done.stdout.splitlines()[-1]))
