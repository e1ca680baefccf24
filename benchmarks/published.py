"""Published training results, predicted through the planner: a row's parallelism pinned, the rest as its user would.

    python -m benchmarks.published --published FOLDER [--only PATTERN] [--json FILE [--resume]]
        [--plans FOLDER]

FOLDER holds JSON files of published rows; `published_rows` says how they are read, `published_plans` how they are
planned. Only PATTERN (searched in "file row") are predicted; with --resume those already in --json are kept.

`memory_gib` is what the caching allocator is predicted to reserve, where the source says what it did.
`error_percent` is signed, predicted over published. Orderings: of all pairs of rows of a file, how many the prediction
ranks as published, and those that sources report by name. Left out: what was set looking at such rows, the rate of
matrix products and how much of it Hopper's power leaves, is fitted anew to the other files (`left_out`); nothing in
the package is changed by it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.published_plans import predict
from benchmarks.published_rows import Row, read_cases

COLUMNS = ("file", "row", "published", "predicted", "unit", "error_percent", "exposed", "bubble", "chosen", "cpu_s")


class Ordering(NamedTuple):
    """Two rows of a file, the first of which is published as the faster one."""

    says: str
    file: str
    faster: str
    slower: str


REPORTED = (
    Ordering("ZeRO-3 falls as GPUs double twice", "megatron_sc21_a100", "174.6B zero3 384", "174.6B zero3 1536"),
    Ordering("PTD falls as GPUs double twice", "megatron_sc21_a100", "174.6B ptd 384", "174.6B ptd 1536"),
    Ordering("PTD above ZeRO-3 at 384", "megatron_sc21_a100", "174.6B ptd 384", "174.6B zero3 384"),
    Ordering("PTD above ZeRO-3 at 1536", "megatron_sc21_a100", "174.6B ptd 1536", "174.6B zero3 1536"),
    Ordering("PTD above ZeRO-3, 530B", "megatron_sc21_a100", "529.6B ptd 560", "529.6B zero3 640"),
    Ordering("175B falls from 96 to 4608", "megatron_core_h100", "175B scaling 96", "175B scaling 4608"),
    Ordering("selective above full, 175B", "megatron_seqpar_a100", "175B selective 64", "175B full 64"),
    Ordering("selective above full, 1T", "megatron_seqpar_a100", "1T selective 512", "1T full 512"),
    Ordering("405B falls as GPUs double", "llama3_h100", "405B 8192", "405B 16384"),
    Ordering("405B falls at 131072 tokens", "llama3_h100", "405B 16384", "405B 16384 at 131072"),
)


def orderings(rows: list[Row]) -> tuple[int, int]:
    """(pairs ranked as published, pairs) among predicted rows of each file that were published unlike."""
    right = total = 0
    done = [row for row in rows if "predicted" in row]
    for a, b in itertools.combinations(done, 2):
        if a["file"] == b["file"] and a["published"] != b["published"]:
            total += 1
            right += (a["predicted"] < b["predicted"]) == (a["published"] < b["published"])
    return right, total


def reported(rows: list[Row]) -> list[str]:
    """What sources say by name, and what we predict of it."""
    done = {(row["file"], row["row"]): row for row in rows if "predicted" in row}
    lines = []
    for each in REPORTED:
        pair = [done.get((each.file, name)) for name in (each.faster, each.slower)]
        if pair[0] is None or pair[1] is None:
            continue
        was, now = (pair[0][key] / pair[1][key] for key in ("published", "predicted"))
        off = f"published {was:.3f}, predicted {now:.3f}, {now / was - 1:+.1%}"
        lines.append(f"{each.says}: {'yes' if now > 1 else 'NO'} ({off})")
    return lines


def by_value(rows: list[Row]) -> list[Row]:
    """Predicted rows that are judged by their value; those of ZeRO-3 of 2021 are by their order alone."""
    return [row for row in rows if "predicted" in row and "zero3" not in row.get("row", "")]


def mean_absolute_error(rows: list[Row]) -> float:
    """Of all rows judged by value, in percent."""
    return statistics.fmean([abs(row["error_percent"]) for row in by_value(rows)] or [0.0])


def left_out(rows: list[Row]) -> dict[str, float]:
    """Per file, the mean absolute error (a share) once the fitted constants are fitted to the other files alone.

    Fitted are two factors: on every device's rate of matrix products (`matmul` and `attention` together), and on that
    of Hopper beside it (`HOPPER_WATTS`). A row's throughput goes with a factor to the power of its `rate_slope`. The
    pair with the least mean absolute error of the other files' logarithms counts, of all on a grid of half percents; of
    equal ones the least changed. The other constants come from sources, and are left as they are.
    """
    done = by_value(rows)
    found = {}
    for file in dict.fromkeys(row["file"] for row in done):
        others = [row for row in done if row["file"] != file]
        if others:
            every, hopper = min(itertools.product(FACTORS, FACTORS), key=lambda pair: _misfit(others, *pair))
            found[file] = statistics.fmean(
                abs(math.expm1(_log_error(row, every, hopper))) for row in done if row["file"] == file
            )
    return found


FACTORS = tuple(sorted((step / 200 for step in range(-40, 41)), key=abs))
"""Logarithms of the factors tried, up to a fifth either way."""


def _misfit(rows: list[Row], every: float, hopper: float) -> float:
    return statistics.fmean(abs(_log_error(row, every, hopper)) for row in rows)


def _log_error(row: Row, every: float, hopper: float) -> float:
    """Logarithm of predicted over published, with other rates."""
    faster = every + (hopper if row["device"] in HOPPER else 0.0)
    return math.log(row["predicted"] / row["published"]) + row["rate_slope"] * faster


HOPPER = ("H100", "H200")


def show(rows: list[Row]) -> None:
    """Print everything."""
    table = Table(*COLUMNS, title="published")
    for row in rows:
        cells = (row.get(column, "–") for column in COLUMNS)
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console = Console(width=200)
    console.print(table)
    for row in rows:
        if "memory_gib" in row:
            told = f"{row['memory_gib']:.1f} GiB of {row['memory_published_gib']:.1f}"
            console.print(f"reserved, {row['row']}: {told} ({row['memory_error_percent']:+.1f} %)")
    worst = max((abs(row["error_percent"]) for row in by_value(rows)), default=0.0)
    console.print(f"mean absolute error: {mean_absolute_error(rows):.1f} %, at most {worst:.1f} %")
    right, total = orderings(rows)
    console.print(f"orderings: {right} of {total} pairs as published")
    for line in reported(rows):
        console.print(f"  {line}")
    apart = left_out(rows)
    for file, error in apart.items():
        console.print(f"left out {file}: mean absolute error {error:.1%} with rates of products fitted to the others")
    if apart:
        console.print(f"leave one file out: {statistics.fmean(apart[row['file']] for row in by_value(rows)):.1%}")
    console.print(f"processor seconds: {sum(row['cpu_s'] for row in rows):.0f}")


def run(argv: list[str] | None = None) -> int:
    """Predict, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published")
    parser.add_argument("--published", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="PATTERN", help='rows whose "file row" holds it')
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep the rows already in --json")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="write the plans there")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS")
    options = parser.parse_args(argv)
    if options.resume and options.json is None:
        parser.error("--resume continues a file: give --json as well")
    old = json.loads(options.json.read_text()) if options.resume and options.json.exists() else []
    known: dict[tuple[str, str], Row] = {(row["file"], row["row"]): row for row in old}
    cases = read_cases(options.published)
    for case in cases:
        key = (case.file, case.name)
        if key in known or not re.search(options.only, " ".join(key)):
            continue
        row = known[key] = predict(case, options.time_limit, options.plans)
        print(" ".join(key), row.get("predicted", row["chosen"]), row.get("tried", ""), file=sys.stderr, flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(list(known.values()), indent=1) + "\n")
    show([known[key] for case in cases if (key := (case.file, case.name)) in known])
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
