"""Whole models drawn at random, each under plans drawn at random, against the model trained by torch alone.

A model is a seed's composition of pieces (`benchmarks/random_models/pieces`): layers, losses, buffers, ties, writes
in place, branches, dtypes, written out as source text. Its plans are drawn too: degrees that a user pins, the planner's
own choice, random legal plans, pipelines of every schedule, recomputation and offloading. Every plan runs three steps
of SGD with momentum on all its ranks in this process, in float64, and is held against an eager loop over the user's own
module: the loss, every gradient, every parameter and every buffer of every step (models that draw random numbers:
against the captured program on one device, which draws the same), then the recorded entries and peaks against the
predicted ones.

A plan is `right`, `refused` (an error that names a model's or a choice's fault), `wrong`, or `raw`: any other
exception, crash or hang. Models whose numbers a last bit decides (a tie in a sort, an overflow) are drawn again. What
is wrong or raw is printed with the smallest model that still shows it, as a script that runs.

    python -m benchmarks.model_fuzz [--models 300] [--plans 6] [--seed 0] [--jobs 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.random_models.recipe import Recipe, build, draw, source_of
from benchmarks.random_models.shrink import shrunk
from benchmarks.random_models.trial import OUTCOMES, RAW, REFUSED, WRONG, is_steady, try_model

MOST_S = 300.0
"""What one model may take; it counts as hung thereafter."""


def steady(seed: int) -> Recipe:
    """The seed's model, or the next drawn from it whose numbers no last bit decides."""
    for attempt in range(20):
        recipe = draw(seed + attempt * 1_000_003)
        text, is_random = source_of(recipe)
        if is_steady(build(text, f"model_{recipe.seed}", is_random)):
            return recipe
    raise AssertionError(f"no steady model from seed {seed}")


def rows_of(seed: int, plans: int, shown: set[str]) -> list[dict[str, Any]]:
    """One model's outcomes, with a script for those whose reason was not shown yet."""
    recipe = steady(seed)
    text, is_random = source_of(recipe)
    found = try_model(build(text, f"model_{recipe.seed}", is_random), seed, plans)
    rows = [{"model": seed, **asdict(outcome)} for outcome in found]
    for index, row in enumerate(rows):
        if row["what"] in (WRONG, RAW) and reason(row["why"]) not in shown:
            shown.add(reason(row["why"]))
            row["source"] = shrunk(recipe, seed, plans, index, found[index])
    return rows


def worker(first: int, count: int, plans: int) -> None:
    """Try models one after the other; a line of JSON for each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shown: set[str] = set()
    for seed in range(first, first + count):
        print(json.dumps({"seed": seed, "rows": rows_of(seed, plans, shown)}), flush=True)


def outcomes(first: int, count: int, plans: int) -> Iterator[dict[str, Any]]:
    """All of a range of models, tried by processes that may die: what they were at is then a crash."""
    at, stop = first, first + count
    while at < stop:
        command = [sys.executable, "-m", "benchmarks.model_fuzz", "--worker", f"{at}:{stop - at}:{plans}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            limit = threading.Timer(MOST_S, process.kill)
            limit.start()
            for line in process.stdout:
                limit.cancel()
                yield from json.loads(line)["rows"]
                at += 1
                limit = threading.Timer(MOST_S, process.kill)
                limit.start()
            limit.cancel()
        if at < stop:
            why = f"the process ended with {process.wait()}, or took more than {MOST_S:.0f} s"
            yield {"model": at, "plan": "", "what": RAW, "why": why}
            at += 1


def reason(why: str) -> str:
    """A refusal without its names and numbers."""
    text = re.sub(r"\S*/\S*|%\w+|'[^']*'|\bk\d+\b|\([^()]*\)|\b\w+(\.\w+)+\b", "…", why)
    return re.sub(r"\d+", "N", text)[:110]


def show(rows: Sequence[dict[str, Any]], models: int, seconds: float) -> None:
    """The table, refusals by reason, and what is wrong."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    count = Counter(row["what"] for row in rows)
    table = Table(title="model_fuzz")
    for column in ("models", "plans", *OUTCOMES, "seconds"):
        table.add_column(column)
    table.add_row(str(models), str(len(rows)), *(str(count[what]) for what in OUTCOMES), f"{seconds:.0f}")
    console.print(table)
    for what in (REFUSED, WRONG, RAW):
        found = Counter(reason(row["why"]) for row in rows if row["what"] == what)
        for why, times in found.most_common():
            console.print(f"{what} {times} ({times / len(rows):.1%}): {why}", markup=False, highlight=False)
    for row in rows:
        if row["what"] in (WRONG, RAW):
            told = f"\nseed {row['model']}, plan {row['plan']!r}: {row['what']}, {row['why']}\n{row.get('source', '')}"
            console.print(told, markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 where a plan is wrong or raw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_fuzz")
    parser.add_argument("--models", type=int, default=300)
    parser.add_argument("--plans", type=int, default=6, help="per model")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every plan's outcome")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.worker:
        worker(*map(int, options.worker.split(":")))
        return 0
    started, rows, lock = time.perf_counter(), [], threading.Lock()

    def job(first: int, count: int) -> None:
        for row in outcomes(first, count, options.plans):
            with lock:
                rows.append(row)
                if options.json is not None:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
                if row["what"] in (WRONG, RAW):
                    print(
                        f"{row['model']} {row['plan']}: {row['what']} {row['why'][:200]}", file=sys.stderr, flush=True
                    )

    points = [options.seed + options.models * index // options.jobs for index in range(options.jobs + 1)]
    threads = [threading.Thread(target=job, args=(a, b - a)) for a, b in itertools.pairwise(points)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows.sort(key=lambda row: row["model"])
    show(rows, options.models, time.perf_counter() - started)
    return 1 if any(row["what"] in (WRONG, RAW) for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
