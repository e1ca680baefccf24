"""`make demo`: a small GPT-2 learns to write Python, planned for and trained on four processes of this machine.

It plans a byte-level GPT-2 architecture with random weights, trains it on the Python standard library's sources
until the loss has visibly fallen, and then runs the same steps on one device to show that nothing but where and
when has changed. Everything goes through the `paraplan` command, as a user would. Exit code 0 if the check holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paraplan.report.units import show_bytes, show_count, show_seconds, show_share

OUT = Path("out/demo")
MODEL = {"n_layer": 4, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": 128}
NO_DROPOUT = {"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
PLAN = ["--batch", "16", "--seq", "128"]
EXACT = ["--precision", "fp64", "--dp", "2", "--tp", "2"]
STEPS, CHECK_STEPS, LEARNING_RATE = 100, 3, "0.002"
MUST_FALL = 0.35
"""Share of the first loss that must be gone at the end."""

_plain = Console()
console = _plain if _plain.is_terminal else Console(width=140)


def paraplan(*args: str) -> dict[str, Any]:
    """Run the command, show what it shows, and return its JSON line; ends the demo where it fails."""
    console.print(f"\n[bold cyan]$ paraplan {' '.join(args)}[/bold cyan]", highlight=False, soft_wrap=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "paraplan.cli", *args, "--json"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        if last:
            print(last, flush=True)
        last = line.rstrip("\n")
    if process.wait():
        print(last)
        sys.exit(process.returncode)
    return json.loads(last)  # type: ignore[no-any-return]


def settings(of: dict[str, float]) -> list[str]:
    """As options of the command."""
    return [part for key, value in of.items() for part in ("--set", f"{key}={value}")]


def write_text(target: Path) -> int:
    """The standard library's own modules, one after another; returns how many bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(file.read_bytes() for file in sorted(library.glob("*.py")))
    target.write_bytes(text)
    return len(text)


def table(planned: dict[str, Any], trained: dict[str, Any], checked: dict[str, Any], seconds: float) -> Table:
    """What was promised and what happened."""
    found = Table(title="paraplan demo", title_justify="left", header_style="dim")
    for head in ("", "plan", "run"):
        found.add_column(head, justify="left")
    measured = trained["measured_peak_bytes"]
    ratio = f"{trained['predicted_peak_bytes'] / measured:.4f}"
    cores = len(os.sched_getaffinity(0))
    alone = "" if cores >= 4 else ", were there a core for each"
    found.add_row("devices", "4 processes (local:4)", "4 processes over Gloo")
    found.add_row(
        "step time",
        f"{show_seconds(planned['step_s'])}{alone}",
        f"{show_seconds(trained['step_s'])}, 4 processes on {cores} cores",
    )
    found.add_row(
        "bound, gap, status",
        f"{show_seconds(planned['bound_s'])}, {100 * planned['gap']:.1f} %, {planned['status']}",
        "",
    )
    found.add_row(
        "throughput",
        f"{show_count(planned['tokens_per_s'])} tokens/s",
        f"{show_count(16 * 128 / trained['step_s'])} tokens/s",
    )
    found.add_row(
        "peak memory per process",
        show_bytes(trained["predicted_peak_bytes"]),
        f"{show_bytes(measured)} (predicted / measured {ratio})",
    )
    found.add_row(
        "what every process did", "predicted entry by entry", "equal" if trained["entries_equal"] else "DIFFERS"
    )
    first, last = trained["loss"][0], trained["loss"][-1]
    found.add_row(f"loss over {STEPS} steps", "", f"{first:.3f} to {last:.3f} (down {show_share(first - last, first)})")
    errors = ", ".join(f"{what} {checked[f'max_rel_err_{what}']:.0e}" for what in ("loss", "grad", "param"))
    eager = f"eager model {checked['max_rel_err_eager']:.0e}"
    found.add_row(f"{CHECK_STEPS} steps on one device", "equal (float64, 1e-9)", f"largest error: {errors}; {eager}")
    found.add_row("took", f"{planned['total_s']:.1f} s to plan", f"{seconds:.0f} s in all")
    return found


def main() -> None:
    """The demo."""
    started = time.perf_counter()
    OUT.mkdir(parents=True, exist_ok=True)
    size = write_text(OUT / "stdlib.txt")
    console.print(f"training text: {show_bytes(size)} of the Python standard library, in {OUT / 'stdlib.txt'}")
    plan, exact, text = str(OUT / "plan.json"), str(OUT / "plan64.json"), str(OUT / "stdlib.txt")
    planned = paraplan("plan", "hf:gpt2", "local:4", *settings(MODEL), *PLAN, "-o", plan)
    trained = paraplan("run", plan, "--steps", str(STEPS), "--data", text, "--lr", LEARNING_RATE, "--clip", "1.0")
    without = settings({**MODEL, **NO_DROPOUT})
    paraplan("plan", "hf:gpt2", "local:4", *without, *PLAN, *EXACT, "-o", exact)
    checked = paraplan("run", exact, "--steps", str(CHECK_STEPS), "--data", text, "--lr", LEARNING_RATE, "--check")
    console.print()
    console.print(table(planned, trained, checked, time.perf_counter() - started))
    fallen = trained["loss"][-1] < (1 - MUST_FALL) * trained["loss"][0]
    held = trained["measured_peak_bytes"] <= trained["predicted_peak_bytes"]
    if not (fallen and held and trained["entries_equal"]):
        console.print("[bold red]the demo did not do what it promises[/bold red]: see the table")
        sys.exit(1)


if __name__ == "__main__":
    main()
