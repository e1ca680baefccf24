"""The side of `paraplan run` that people and scripts see: starting ranks, the table, the JSON, the verdict."""

from __future__ import annotations

import itertools
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from paraplan.ir.errors import CheckError, RuntimeFailure
from paraplan.ir.plan import Plan
from paraplan.jobs.files import read_with_programs
from paraplan.jobs.run import run
from paraplan.jobs.run_options import RunOptions
from paraplan.jobs.start_ranks import leave_job, start_ranks
from paraplan.report.units import show_bytes, show_seconds
from paraplan.terminal.output import out, print_json


def spawn(plan: Plan, args: Sequence[str], result_env: str) -> dict[str, Any]:
    """Start the same command on as many local processes as the plan has devices.

    Args:
        plan: of the run.
        args: of the command.
        result_env: the variable by which the first rank is told where its result goes.
    Returns:
        The first rank's result.
    Raises:
        RuntimeFailure: a rank failed; its own message has been printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "result.json")
        code = start_ranks(plan.cluster.num_devices, "paraplan.cli", list(args), {result_env: target})
        if code or not os.path.exists(target):
            raise RuntimeFailure(f"a rank failed (exit code {code}); its message is above")
        return json.loads(Path(target).read_text())  # type: ignore[no-any-return]


def run_rank(path: Path, options: RunOptions, as_json: bool, result_env: str) -> None:
    """Train as one rank of a job; the first one tells the steps and the result.

    Args:
        path: of the plan file.
        options: of the run.
        as_json: whether the result is printed as JSON.
        result_env: as of `spawn`.
    Raises:
        CheckError: `--check` found a difference, and no other process waits for the result.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a rank has nothing to say of it, nor to do
    data, programs = read_with_programs(path)
    console = out()
    first, told = os.environ["RANK"] == "0", itertools.count(1)
    every = max(1, options.steps // 20)

    def tell(step: int, loss: float, seconds: float) -> None:
        number = next(told)
        if first and (number % every == 1 % every or number == options.steps):
            console.print(f"step {step:>4}  loss {loss:.6f}  {seconds:.3f} s", highlight=False)

    result = run(data, programs, options, tell)
    if first:
        console.print(run_table(data, result))
        found = run_json(result)
        if target := os.environ.get(result_env):
            Path(target).write_text(json.dumps(found))
        elif as_json:
            print_json(found)
    leave_job()
    if first and result_env not in os.environ and (failure := check_failure(found)):
        raise CheckError(failure)


def run_json(result: Any) -> dict[str, Any]:
    """A run as the JSON object of `--json`."""
    errors = result.errors
    return {
        "first_step": result.first_step,
        "loss": result.loss,
        "max_rel_err_loss": errors and errors.loss,
        "max_rel_err_grad": errors and errors.grad,
        "max_rel_err_param": errors and errors.param,
        "max_rel_err_eager": errors and errors.eager,
        "eager_how": errors and errors.how,
        "check_failure": errors and errors.failure,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "measured_peak_bytes": max(result.measured_peak_bytes),
        "step_s": result.step_s,
        "measured_peak_bytes_per_rank": result.measured_peak_bytes,
        "compiled": result.compiled,
        "entries_equal": result.entries_equal,
        "entries_difference": result.entries_difference,
    }


def run_table(plan: Plan, result: Any) -> Table:
    """A run as people read it."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    measured = max(result.measured_peak_bytes)
    after = f", after {result.first_step} before" if result.first_step else ""
    table.add_row("loss", f"{result.loss[0]:.4f} to {result.loss[-1]:.4f} in {len(result.loss)} steps{after}")
    predicted_s = f" (predicted {show_seconds(plan.prediction.step_s)})" if plan.prediction else ""
    table.add_row("step", f"{show_seconds(result.step_s)}{predicted_s}")
    ratio = f", predicted / measured {result.predicted_peak_bytes / measured:.4f}" if measured else ""
    table.add_row(
        "peak memory", f"predicted {show_bytes(result.predicted_peak_bytes)}, measured {show_bytes(measured)}{ratio}"
    )
    if len(result.loss) == 1 and plan.optimizer.state_slots:
        table.add_row("", "in a single step the optimizer's states, made at its end, are not yet there")
    equal = (
        "every rank did what was predicted, entry by entry"
        if result.entries_equal
        else f"DIFFERS: {result.entries_difference}"
    )
    table.add_row("record", equal)
    if result.compiled:
        eager = {name: reason for name, reason in result.compiled.items() if reason}
        first = next(iter(eager.items()), None)
        kept = f"; {len(eager)} stay eager, e.g. {first[0]}: {first[1]}" if first else ""
        table.add_row("compiled", f"{len(result.compiled) - len(eager)} of {len(result.compiled)} blocks{kept}")
    if result.errors is not None:
        e = result.errors
        table.add_row(
            "one device", f"largest error of loss {e.loss:.1e}, gradients {e.grad:.1e}, parameters {e.param:.1e}"
        )
        if e.worst:
            table.add_row("", f"largest in {e.worst}")
        table.add_row("eager model", f"largest error {e.eager:.1e}{f' ({e.how})' if e.how else ''}")
        table.add_row("check", f"FAILED: {e.failure}" if e.failure else "everything within its limit")
    return table


def check_failure(result: dict[str, Any]) -> str:
    """Why a checked run is not what it should be; empty where it is, or where nothing was checked."""
    if result["check_failure"] is None:
        return ""
    wrong = result["check_failure"] or ("" if result["entries_equal"] else result["entries_difference"])
    return f"check failed: {wrong}" if wrong else ""
