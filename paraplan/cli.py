"""The paraplan command: plan, show, simulate, compare, run, cluster.

Loads quickly: what plans, prices and runs is imported through `_part` by the command that needs it. A fault is one
message on stderr and exit code 2; `--debug` shows where it came from. `--json` prints one object as the last line.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan import __version__
from paraplan.ir.collecting import RARELY
from paraplan.ir.errors import CheckError, ConstraintError, ParaplanError, RuntimeFailure
from paraplan.ir.lazy import lazy
from paraplan.terminal import clusters, profiles
from paraplan.terminal.progress import Progress, out, print_fault, print_json
from paraplan.terminal.settings import parse_degree, parse_mesh, parse_settings, parse_stages

app = typer.Typer(
    name="paraplan", help="Plans how a PyTorch model trains on a cluster, and runs the plan.", no_args_is_help=True,
    add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
app.add_typer(clusters.app, name="cluster")
profiles.add_to(app)
_PARTS = {
    "Plan": "paraplan.api",
    "compile": "paraplan.api",
    "compare_memory": "paraplan.comparing",
    "make_model": "paraplan.jobs.models",
    "RunOptions": "paraplan.jobs.run",
    "check_run": "paraplan.jobs.run",
    "check_local": "paraplan.jobs.run",
    "prepare_ranks": "paraplan.jobs.launch",
    "check_failure": "paraplan.terminal.run",
    "spawn": "paraplan.terminal.run",
    "run_rank": "paraplan.terminal.run",
    "STRATEGIES": "paraplan.planner.compare",
    "check_names": "paraplan.planner.compare",
    "show_plan": "paraplan.terminal.show",
    "plan_json": "paraplan.terminal.show",
    "show_summary": "paraplan.terminal.show",
    "show_simulation": "paraplan.terminal.show",
    "show_memory": "paraplan.terminal.memory",
    "memory_json": "paraplan.terminal.memory",
    "compare_table": "paraplan.terminal.compare",
    "compare_json": "paraplan.terminal.compare",
}
_part = lazy(_PARTS)
RESULT_ENV = "PARAPLAN_RESULT"
"""Where the first rank of a locally started run leaves its result for the command that started it."""

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
CpMode = Annotated[
    str | None, typer.Option(help="With --cp: gather, alltoall, ring or stripes in attention; chosen if not given.")
]
Recompute = Annotated[
    str | None,
    typer.Option(
        help="Activations of layers made again: none, selective, cheap, alternate, full or full-early-stop; chosen if "
        "not given."
    ),
]
SequenceParallel = Annotated[
    bool, typer.Option("--sp", help="With --tp: sequence-parallel activations between split layers.")
]
Overlap = Annotated[int, typer.Option(metavar="N", help="Products in up to N pieces beside their collectives (TP).")]
Offload = Annotated[
    str, typer.Option(help="Where activations may wait if memory is short: none, host, or disk (and host).")
]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="What a device may hold, e.g. 12GiB.")]
Reserve = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Device memory kept from the plan (default: as the cluster says; 0: none)."),
]
OffloadStates = Annotated[
    str | None,
    typer.Option(
        help="host: optimizer states on the host, updated there; all: parameters too; disk, disk-all: on disk; "
        "fetched, all-fetched, ...: updated on the device; disk-grads, ...: gradients wait there too; "
        "either, any, any-grads: states, parameters too, or gradients too, as chosen; none."
    ),
]
DelayedUpdate = Annotated[
    int | None, typer.Option(metavar="N", help="After N steps the host's updates may be one step late, if faster.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of an hf: model; repeatable.")
]
PerMicrobatch = Annotated[
    bool,
    typer.Option("--per-microbatch", help="Each microbatch is a batch by itself (batch norm, in-batch losses)."),
]
ProfileAny = Annotated[bool, typer.Option("--profile-any", help="Take another device's or torch version's times too.")]
Pipeline = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto", help="Pipeline-parallel degree, other degrees being within a stage; auto: the fastest."
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        help="With --pp: 1f1b (if not given), gpipe, interleaved, zb-h1, zb-v, hanayo, gems, chimera, or searched (the "
        "shortest found)."
    ),
]
StageBounds = Annotated[
    str | None, typer.Option(metavar="A:B,B:C", help="With --pp: segments of the stages; cut evenly if not given.")
]
Dynamic = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Attribute that training changes (tau): an input; repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


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
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="hf:<model_type>, module:factory or file.py:factory.")],
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A .yaml or .json file, a catalog name (8xH100:4), or local:4.")
    ],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the plan.")] = None,
    settings: Settings = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of the global batch (hf: models; default 8).")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence (hf: models; default 128).")] = None,
    mesh: Annotated[str | None, typer.Option(metavar="N,N", help="Logical mesh, e.g. 8,8.")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, nesterov, adam, adamw; sgd+decay ...")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, fp64, bf16, fp16 or fp8.")] = "fp32",
    memory: Memory = None,
    reserve: Reserve = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.")] = None,
    dp: Annotated[int | None, typer.Option(help="Data-parallel degree.")] = None,
    sp: SequenceParallel = False,
    cp: Annotated[int | None, typer.Option(help="Context-parallel degree: the sequence sharded throughout.")] = None,
    cp_mode: CpMode = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel degree: so many ranks of dp share experts.")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO level, 0 to 3.")] = None,
    pp: Pipeline = None,
    schedule: ScheduleName = None,
    stages: StageBounds = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches per step.")] = None,
    per_microbatch: PerMicrobatch = False,
    overlap: Overlap = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="Blocks through torch.compile; priced as fused.")] = False,
    reduce_dtype: Annotated[str | None, typer.Option(help="Of sums of gradients over ranks: fp32 or bf16.")] = None,
    dynamic: Dynamic = None,
    recompute: Recompute = None,
    offload: Offload = "none",
    offload_states: OffloadStates = None,
    delayed_update: DelayedUpdate = None,
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="For planning.")] = 60.0,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Measured times, from paraplan profile.")] = None,
    profile_any: ProfileAny = False,
    as_json: AsJson = False,
) -> None:
    """Plan a model for a cluster."""
    gc.set_threshold(*RARELY)  # the imports of torch and transformers too
    pins = {
        "mesh": parse_mesh(mesh), "dp": dp, "tp": tp, "sp": sp, "cp": cp, "cp_mode": cp_mode, "ep": ep, "zero": zero,
        "pp": parse_degree(pp), "schedule": schedule, "stages": parse_stages(stages), "dynamic": dynamic or (),
        "memory": memory, "reserve": reserve, "recompute": recompute, "microbatches": microbatches,
        "offload": offload, "offload_states": offload_states, "delayed_update": delayed_update, "overlap": overlap,
        "compiled": compiled, "reduce_dtype": reduce_dtype, "per_microbatch": per_microbatch,
    }  # fmt: skip
    with Progress() as tell:
        tell(f"loading {model}")
        made = _part("make_model")(model, parse_settings(settings or []), meta=True)
        found = _part("compile")(
            made.model, cluster, optimizer=optimizer, precision=precision, time_limit_s=time_limit, progress=tell,
            profile=profile, profile_any=profile_any, **_batch_of(model, made, batch, seq), **pins,
        )  # fmt: skip
        if output is not None:
            found.save(output)
    _part("show_summary")(out(), found, output)
    if as_json:
        print_json(_part("plan_json")(found))


def _batch_of(model: str, made: Any, batch: int | None, seq: int | None) -> dict[str, Any]:
    """What a model is captured on, as options of `compile`."""
    if made.example_inputs is not None and (batch is not None or seq is not None):
        raise ConstraintError(
            f"{model} brings its own example inputs, which say the batch: leave --batch and --seq out"
        )
    return {
        "example_inputs": made.example_inputs, "loss_fn": made.loss_fn, "batch": 8 if batch is None else batch,
        "seq": _sequence(made.model, seq),
    }  # fmt: skip


def _sequence(model: Any, given: int | None) -> int:
    """The sequence asked for, else 128 or what the model has positions for."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return given if given is not None else min(128, longest) if isinstance(longest, int) and longest > 0 else 128


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
    simulation = priced.simulate()
    if trace is not None:
        try:
            trace.write_bytes(priced.trace())
        except OSError as fault:
            raise ConstraintError(f"cannot write --trace {str(trace)!r}: {fault.strerror}") from None
    _part("show_simulation")(out(), priced, simulation, trace)
    if as_json:
        busy = {"compute": simulation.compute_s, **simulation.comm_s, **simulation.copy_s}
        print_json({
            "step_s": simulation.step_s, "peak_bytes": max(simulation.peak_bytes), "compute_s": simulation.compute_s,
            "exposed_comm_s": simulation.exposed_comm_s, "busy_s": busy, "tokens_per_s": priced.prediction.tokens_per_s,
            "mfu": priced.prediction.mfu, "exposed_copy_s": simulation.exposed_copy_s,
            "tier_peak_bytes": simulation.tier_peak_bytes,
        })  # fmt: skip


@app.command()
def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="hf:<model_type>, module:factory or file.py:factory.")],
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="Of one device: local:1, 1xH100, or a file.")],
    memory: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE|%", help="A budget, or a share of what is not always there."),
    ] = None,
    strategies: Annotated[str, typer.Option(help="Names joined by commas, or all.")] = "all",
    settings: Settings = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of the global batch (hf: models; default 8).")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens of a sequence (hf: models; default 128).")] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, momentum, nesterov, adam, adamw; sgd+decay ...")] = "adamw",
    precision: Annotated[str, typer.Option(help="fp32, fp64, bf16, fp16 or fp8.")] = "fp32",
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="For each strategy at each budget.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Compare memory strategies on one device: ours and the literature's."""
    gc.set_threshold(*RARELY)
    given = parse_settings(settings or [])
    names = tuple(_part("STRATEGIES")) if strategies == "all" else tuple(map(str.strip, strategies.split(",")))
    _part("check_names")(names)
    with Progress() as tell:
        tell(f"loading {model}")
        made = _part("make_model")(model, given, meta=True)
        found = _part("compare_memory")(
            made.model, cluster, memory or ["80%", "60%", "50%", "40%"], names, strategy_time_s=time_limit,
            progress=tell, optimizer=optimizer, precision=precision, **_batch_of(model, made, batch, seq),
        )  # fmt: skip
    out().print(_part("compare_table")(found))
    if as_json:
        print_json(_part("compare_json")(found))


@app.command()
def run(
    path: PlanFile,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 5,
    data: Annotated[
        str | None, typer.Option(metavar="FILE|DIR", help="Text, read byte by byte; random tokens without it.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 3e-4,
    seed: Annotated[int, typer.Option(help="Of weights, data and dropout.")] = 0,
    check: Annotated[bool, typer.Option("--check", help="Also run on one device and compare.")] = False,
    model: Annotated[
        str | None,
        typer.Option(help="module:factory or file.py:factory, where the plan cannot rebuild its model."),
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE|DIR", help="safetensors to start from; initialised from --seed without.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write a checkpoint of the run's end: all it goes on from.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="DIR", help="Go on from a checkpoint, of this or another plan of the model.")
    ] = None,
    record: Annotated[str | None, typer.Option(metavar="FILE", help="Times of its ops, for paraplan learn.")] = None,
    compile_blocks: Annotated[
        bool, typer.Option("--compile", help="Through torch.compile, each block checked against eager first.")
    ] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="Replay what is before and after the optimizer as CUDA graphs.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="For a rank's peers; default 300.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a plan for some steps, on local processes or under torchrun."""
    options = {
        "steps": steps, "data": data, "lr": lr, "seed": seed, "check": check, "model": model, "clip": clip,
        "weights": weights, "compile": compile_blocks, "record": record, "save": save, "resume": resume,
        "timeout": timeout, "cuda_graphs": cuda_graphs,
    }  # fmt: skip
    if "RANK" in os.environ:
        _part("run_rank")(path, options, as_json, RESULT_ENV)
        return
    loaded = _part("Plan").load(path)
    with Progress() as tell:
        tell("checking model, data and devices")
        _part("check_local")(loaded.data)
        _part("prepare_ranks")()
        _part("check_run")(loaded.data, _part("RunOptions")(**options))
    result = _part("spawn")(path, loaded.data, sys.argv[1:], RESULT_ENV)
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
            print_fault(fault)
        sys.exit(1 if isinstance(fault, CheckError) else 2)


if __name__ == "__main__":
    main()
