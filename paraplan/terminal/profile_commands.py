"""`paraplan profile` and `paraplan profile-links`: measuring, so that costs hold."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from paraplan.ir.errors import ClusterError, ConstraintError
from paraplan.ir.options import Option, Options, documented, from_keywords
from paraplan.ir.process.garbage import RARELY
from paraplan.ir.process.lazy import lazy
from paraplan.plan_options import JobOptions
from paraplan.terminal.command_options import AsJson, ModelName, Settings, with_options
from paraplan.terminal.model_settings import parse_settings
from paraplan.terminal.output import Progress, out, print_json

_PARTS = {
    "capture": "paraplan.capture",
    "make_model": "paraplan.jobs.models",
    "hf_batch": "paraplan.jobs.models",
    "profile_program": "paraplan.jobs.measuring.profile_ops",
    "CpuShare": "paraplan.jobs.measuring.profile_ops",
    "json_of": "paraplan.jobs.measuring.profile_ops",
    "measure_links": "paraplan.jobs.measuring.measure_links",
    "cluster_yaml": "paraplan.ir.machine.cluster_file",
    "to_json": "paraplan.ir.struct",
    "write_bytes": "paraplan.ir.struct",
    "read_run": "paraplan.jobs.record",
    "learn_into": "paraplan.jobs.record",
}
_part = lazy(_PARTS)


def add_to(app: typer.Typer) -> None:
    """Give the command its subcommands."""
    app.command("profile")(profile)
    app.command("profile-links")(profile_links)
    app.command("learn")(learn)


@documented
class MeasuringOptions(Options, frozen=True, kw_only=True):
    """How ops are measured."""

    threads: Annotated[int, Option("Of a CPU process.")] = 1
    processes: Annotated[int, Option("Of CPU, at work at once as in a step: they share the memory's bandwidth.")] = 1
    again: Annotated[bool, Option("Measure what is known once more, and pool both.")] = False


@with_options(
    JobOptions, MeasuringOptions, only=("batch", "seq", "optimizer", "precision", "threads", "processes", "again")
)
def profile(
    model: ModelName,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile; what it has is not measured again.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    devices: Annotated[int, typer.Option(help="Local shapes of meshes of up to so many devices.")] = 8,
    settings: Settings = None,
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Measure a model's ops on a device, at every local shape a plan may choose."""
    gc.set_threshold(*RARELY)
    job, how = from_keywords(JobOptions, options), from_keywords(MeasuringOptions, options)
    if min(devices, how.threads, how.processes) < 1:
        raise ConstraintError(f"--devices {devices}, --threads {how.threads}, --processes {how.processes}: at least 1")
    if how.processes > 1 and device != "cpu":
        raise ConstraintError(f"--processes {how.processes} with --device {device}: only CPU processes share a memory")
    with Progress() as tell:
        tell(f"loading {model}")
        made = _part("make_model")(model, parse_settings(settings or []), meta=True)
        inputs = made.example_inputs
        inputs = inputs if inputs is not None else _part("hf_batch")(made.model, job.batch, job.seq)
        tell(f"capturing {type(made.model).__name__}")
        program = _part("capture")(made.model, inputs, loss_fn=made.loss_fn, precision=job.precision)
        done = _part("profile_program")(
            program,
            output,
            device=device,
            ways=devices,
            optimizer=job.optimizer,
            cpu=_part("CpuShare")(how.threads, how.processes),
            again=how.again,
            tell=tell,
        )
    _show(done, output)
    if as_json:
        print_json(_part("json_of")(done))


def _show(done: Any, output: Path) -> None:
    console = out()
    held = done.profile
    console.print(
        f"{done.measured} local ops measured, {done.known} known already; {output} has {len(held.ops)} of "
        f"{held.device} ({held.name}), torch {held.torch}",
        highlight=False,
    )
    table = Table(title="interpolation, cross-validated", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in ("class", "points", "median error", "9 of 10 below"):
        table.add_column(column)
    for kind, errors in done.errors.items():
        table.add_row(kind, str(errors.points), f"{errors.median:.1%}", f"{errors.ninth_decile:.1%}")
    console.print(table)
    for target, why in sorted(done.failed.items()):
        console.print(f"not measured: {target}: {why.splitlines()[0][:160]}", highlight=False, markup=False)


def profile_links(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the cluster file.")],
    processes: Annotated[int | None, typer.Option(help="Ranks (default: one per GPU, else one per core).")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A profile that also takes every collective's times.")
    ] = None,
    largest: Annotated[int, typer.Option(metavar="MIB", help="Largest message.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Measure messages and collectives between local ranks, and write them as a cluster file's links."""
    if output.suffix not in (".yaml", ".yml", ".json"):
        raise ClusterError(f"--output {str(output)!r}: a cluster file ends in .yaml, .yml or .json")
    if largest < 1:
        raise ConstraintError(f"--largest {largest}: at least 1 MiB")
    with Progress() as tell:
        tell("looking at this machine")
        found = _part("measure_links")(processes, largest << 20, profile, tell)
    made = "Written by paraplan profile-links; paraplan cluster schema says what each field means."
    spec = found.cluster
    data = _part("to_json")(spec) if output.suffix == ".json" else _part("cluster_yaml")(spec, made).encode()
    _part("write_bytes")(output, data, "--output", ClusterError)
    console = out()
    for level, fit in found.links.items():
        console.print(
            f"{level}: {fit.bytes_per_s / 1e9:.3g} GB/s, {fit.latency_s * 1e6:.3g} us; off its measurements by "
            f"{fit.median_error:.1%} in the median, {fit.worst_error:.1%} at most ({fit.points} points)"
            + (f"; takes {share:.0%} of a core" if (share := spec.groups[0].in_node.device_share) else ""),
            highlight=False,
        )
    console.print(
        f"saved to {output}" + (f"; {found.collectives} times in {profile}" if profile else ""), highlight=False
    )
    if as_json:
        print_json(
            {
                "cluster": json.loads(_part("to_json")(spec)),
                "collectives": found.collectives,
                "links": {level: vars(fit) for level, fit in found.links.items()},
            }
        )


def learn(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="What paraplan run --record wrote.")],
    profile: Annotated[Path, typer.Option(metavar="FILE", help="The profile to refine; made where there is none.")],
    as_json: AsJson = False,
) -> None:
    """Refine a profile by the times of a recorded run."""
    seen = _part("read_run")(run)
    found = _part("learn_into")(profile, seen)
    out().print(
        f"{len(found.ops)} ops in {profile}: {found.new} new, {found.pooled} as known, {found.corrected} corrected; "
        f"the run's step was predicted at {seen.predicted_s * 1e3:.3g} ms and took "
        f"{sorted(seen.step_s)[len(seen.step_s) // 2] * 1e3:.3g} ms. Plan again with --profile {profile}",
        highlight=False,
    )
    if as_json:
        print_json({"ops": len(found.ops), "new": found.new, "pooled": found.pooled, "corrected": found.corrected})
