"""The paraplan command: plan, show, explain, simulate, compare, run, cluster.

Loads quickly: what plans, prices and runs is imported through `_part` by the command that needs it. A fault is one
message on stderr and exit code 2; `--debug` shows where it came from. `--json` prints one object as the last line.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan import __version__
from paraplan.ir.errors import CheckError, ConstraintError, InvalidPlanError, ParaplanError, RuntimeFailure
from paraplan.ir.option_words import OptionValue
from paraplan.ir.process.garbage import RARELY
from paraplan.ir.process.lazy import lazy
from paraplan.ir.struct import check_writable
from paraplan.jobs.run_options import RunOptions
from paraplan.plan_options import JobOptions
from paraplan.planner.constraints import Constraints
from paraplan.terminal import cluster_commands, profile_commands
from paraplan.terminal.command_options import AsJson, ModelName, Settings, flags_of, parse_pins, with_options
from paraplan.terminal.model_settings import parse_settings
from paraplan.terminal.output import Progress, out, print_fault, print_json

app = typer.Typer(
    name="paraplan",
    help="Plans how a PyTorch model trains on a cluster, and runs the plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cluster_commands.app, name="cluster")
profile_commands.add_to(app)
_PARTS = {
    "Plan": "paraplan.api",
    "compile_since": "paraplan.api",
    "explain": "paraplan.explaining",
    "show_diagnosis": "paraplan.terminal.diagnosis",
    "diagnosis_json": "paraplan.terminal.diagnosis",
    "compare_memory": "paraplan.comparing",
    "compare_plans": "paraplan.comparing",
    "make_model": "paraplan.jobs.models",
    "check_run": "paraplan.jobs.run",
    "check_local": "paraplan.jobs.run",
    "prepare_ranks": "paraplan.jobs.start_ranks",
    "check_failure": "paraplan.terminal.run_output",
    "spawn": "paraplan.terminal.run_output",
    "run_rank": "paraplan.terminal.run_output",
    "STRATEGIES": "paraplan.baselines.compare",
    "check_names": "paraplan.baselines.compare",
    "PLANNERS": "paraplan.baselines.planners",
    "as_cluster": "paraplan.api",
    "show_plan": "paraplan.terminal.show",
    "plan_json": "paraplan.terminal.show",
    "show_summary": "paraplan.terminal.show",
    "show_simulation": "paraplan.terminal.show",
    "show_memory": "paraplan.terminal.memory_tables",
    "memory_json": "paraplan.terminal.memory_tables",
    "compare_table": "paraplan.terminal.compare_table",
    "compare_json": "paraplan.terminal.compare_table",
    "plans_table": "paraplan.terminal.compare_table",
    "plans_json": "paraplan.terminal.compare_table",
}
_part = lazy(_PARTS)
RESULT_ENV = "PARAPLAN_RESULT"
"""Where the first rank of a locally started run leaves its result for the command that started it."""

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"paraplan {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plans how a PyTorch model trains on a cluster, and runs the plan."""


@app.command()
@with_options(Constraints, JobOptions)
def plan(
    model: ModelName,
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A .yaml or .json file, a catalog name (8xH100:4), or local:4.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    settings: Settings = None,
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Plan a model for a cluster."""
    started = time.perf_counter()
    gc.set_threshold(*RARELY)  # the imports of torch and transformers too
    if output is not None:
        check_writable(output, "plan file", InvalidPlanError)
    with Progress() as tell:
        made = _loaded(model, settings, options, tell)
        given = {"progress": tell, **_captured_on(made), **options}
        found = _part("compile_since")(started, made.model, cluster, None, given)
        if output is not None:
            found.save(output)
    _part("show_summary")(out(), found, output)
    if as_json:
        print_json(_part("plan_json")(found))


def _loaded(model: str, settings: list[str] | None, options: Mapping[str, Any], tell: Progress) -> Any:
    """The model of a name, on meta.

    Raises:
        ConstraintError: `--batch` or `--seq` with a model that says its batch itself.
    """
    given = parse_settings(settings or [])
    tell(f"loading {model}")
    made = _part("make_model")(model, given, meta=True)
    for word in ("batch", "seq"):
        if made.example_inputs is not None and options[word] is not None:
            raise ConstraintError(
                "{} beside example_inputs of {}, which say the batch: leave it out",
                OptionValue(word, options[word]),
                model,
            )
    return made


def _captured_on(made: Any) -> dict[str, Any]:
    return {"example_inputs": made.example_inputs, "loss_fn": made.loss_fn}


@app.command()
def show(
    path: PlanFile,
    memory: Annotated[
        bool, typer.Option("--memory", help="Only memory: every rank's peak taken apart, the largest tensors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a plan: layouts, where time and memory go, what was proved."""
    loaded = _part("Plan").load(path)
    if not memory and as_json:
        raise ConstraintError("show --json prints memory as an object: give --memory too; prices are simulate --json")
    if not memory:
        _part("show_plan")(out(), loaded)
        return
    told = loaded.memory()
    _part("show_memory")(out(), f"{loaded.data.model.display} on {loaded.data.cluster.name}", told)
    if as_json:
        print_json(_part("memory_json")(told))


@app.command()
def simulate(
    path: PlanFile,
    cluster: Annotated[str | None, typer.Option(help="Price it on another cluster of as many devices.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Price a plan again."""
    loaded = _part("Plan").load(path)
    priced = loaded if cluster is None else loaded.on(cluster)
    simulation = priced.simulate(spans=trace is not None)
    if trace is not None:
        try:
            trace.write_bytes(priced.trace())
        except OSError as fault:
            raise ConstraintError(f"cannot write --trace {str(trace)!r}: {fault.strerror}") from None
    _part("show_simulation")(out(), priced, simulation, trace)
    if as_json:
        busy = {"compute": simulation.compute_s, **simulation.comm_s, **simulation.copy_s}
        print_json(
            {
                "step_s": simulation.step_s,
                "peak_bytes": max(simulation.peak_bytes),
                "compute_s": simulation.compute_s,
                "exposed_comm_s": simulation.exposed_comm_s,
                "busy_s": busy,
                "tokens_per_s": priced.prediction.tokens_per_s,
                "mfu": priced.prediction.mfu,
                "exposed_copy_s": simulation.exposed_copy_s,
                "tier_peak_bytes": simulation.tier_peak_bytes,
            }
        )


@app.command()
def explain(
    path: PlanFile,
    why_not: Annotated[
        str | None,
        typer.Option(
            metavar="tp=8,pp=4",
            help="What the same job comes to with other options of paraplan plan, set side by side.",
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="For each plan made anew; 0: none is (what a GiB more memory is worth)."),
    ] = 20.0,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: what binds it, what more would be worth, what else was tried, why it is not another."""
    pins = None if why_not is None else parse_pins(why_not, Constraints)
    loaded = _part("Plan").load(path)
    with Progress() as tell:
        found = _part("explain")(loaded, pins, time_limit_s=time_limit, progress=tell)
    _part("show_diagnosis")(out(), found)
    if as_json:
        print_json(_part("diagnosis_json")(found))


@app.command()
@with_options(JobOptions, only=("batch", "seq", "optimizer", "precision"))
def compare(
    model: ModelName,
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="Of one device (local:1, 1xH100) or of several; or a file.")
    ],
    memory: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE|%", help="On one device: a budget, or a share of what is not always there."),
    ] = None,
    strategies: Annotated[str, typer.Option(help="Names joined by commas, or all.")] = "all",
    settings: Settings = None,
    *,
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="For each strategy (60), on one device at each budget (10)."),
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Compare strategies: on one device memory strategies, on several whole plans; ours and others'."""
    gc.set_threshold(*RARELY)
    alone = _part("as_cluster")(cluster).num_devices == 1
    if memory and not alone:
        raise ConstraintError(
            f"--memory is for one device (local:1, 1xH100), and {cluster} has several: leave it out, or plan with "
            "paraplan plan --memory"
        )
    every = (*_part("STRATEGIES"),) if alone else ("paraplan", *(n for n in _part("PLANNERS") if n != "megatron-grid"))
    names = every if strategies == "all" else tuple(map(str.strip, strategies.split(",")))
    if alone:
        _part("check_names")(names)
    limit = {} if time_limit is None else {"strategy_time_s": time_limit}
    with Progress() as tell:
        made = _loaded(model, settings, options, tell)
        given = {**_captured_on(made), **options, **limit, "progress": tell}
        if alone:
            found = _part("compare_memory")(made.model, cluster, memory or ["80%", "60%", "50%", "40%"], names, **given)
        else:
            found = _part("compare_plans")(made.model, cluster, names, **given)
    out().print(_part("compare_table" if alone else "plans_table")(found))
    if as_json:
        print_json(_part("compare_json" if alone else "plans_json")(found))


@app.command()
@with_options(RunOptions)
def run(path: PlanFile, *, as_json: AsJson = False, **options: Any) -> None:
    """Train a plan for some steps, on local processes or under torchrun."""
    asked = RunOptions(**options)
    if "RANK" in os.environ:
        _part("run_rank")(path, asked, as_json, RESULT_ENV)
        return
    loaded = _part("Plan").load(path)
    with Progress() as tell:
        tell("checking model, data and devices")
        _part("check_local")(loaded.data)
        _part("prepare_ranks")()
        _part("check_run")(loaded.data, asked)
    result = _part("spawn")(loaded.data, sys.argv[1:], RESULT_ENV)
    if as_json:
        print_json(result)
    if failure := _part("check_failure")(result):
        raise CheckError(failure)


def main() -> None:
    """Entry point: faults become one message on stderr and exit code 2."""
    debug = "--debug" in sys.argv
    sys.argv[1:] = [text for text in sys.argv[1:] if text != "--debug"]
    if not debug:
        warnings.simplefilter("ignore", FutureWarning)
    try:
        app(prog_name="paraplan")
    except ParaplanError as fault:
        if debug or ("RANK" in os.environ and isinstance(fault, RuntimeFailure)):
            raise
        if os.environ.get("RANK", "0") == "0":
            print_fault(fault, flags_of(Constraints, JobOptions, RunOptions))
        sys.exit(1 if isinstance(fault, CheckError) else 2)


if __name__ == "__main__":
    main()
