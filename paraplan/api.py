"""The public face: `compile` makes a `Plan`; a `Plan` is saved, shown, simulated and executed.

Importing this loads neither torch nor a solver: what needs them is reached through `_part` on first use, so that
showing a plan is quick and needs no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from paraplan import __version__
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import predict, priced_on, simulate_plan
from paraplan.cost_models.simulator.rank_trace import Simulation
from paraplan.ir import plan as ir_plan
from paraplan.ir.errors import ClusterError, ConstraintError
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.cluster import ClusterSpec, check_cluster
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.options import check_keywords, from_keywords, takes_options, with_keywords
from paraplan.ir.process.lazy import lazy
from paraplan.ir.profile import Profile
from paraplan.jobs.files import Programs, profile_for, read_plan, write_plan
from paraplan.jobs.run_options import ExecutionKeywords, ExecutionOptions
from paraplan.jobs.versions import library_versions
from paraplan.lowering import lower
from paraplan.lowering.verification.verify_plan import check_plan
from paraplan.plan_options import CompileOptions, JobOptions, batches_apart, check_batch
from paraplan.planner.constraints import Constraints
from paraplan.report.explain import Explanation, explain, summary
from paraplan.report.html import html_fragment
from paraplan.report.memory_report import MemoryTold, memory_told
from paraplan.report.perfetto import chrome_trace
from paraplan.report.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from torch import nn

    from paraplan.capture.python_state.reading import Reads
    from paraplan.runtime.buckets import BucketTrainer
    from paraplan.runtime.trainer import Trainer

Progress = Callable[[str], None]

_PARTS = {
    "check_on_cluster": "paraplan.planner.mixed.listing",
    "check_pins": "paraplan.planner.alternatives.filed_pins",
    "check_param_names": "paraplan.planner.contradictions",
    "capture_with_reads": "paraplan.capture.capture",
    "plan_by": "paraplan.baselines.planners",
    "check_planner": "paraplan.baselines.planners",
    "as_a_whole": "paraplan.planner.schedules.full_rounds",
    "programs_of": "paraplan.planner.schedules.full_rounds",
    "Job": "paraplan.planner.assemble",
    "hf_batch": "paraplan.jobs.models",
    "model_ref": "paraplan.jobs.models",
    "make_trainer": "paraplan.jobs.trainers",
    "rehearse": "paraplan.jobs.checking.rehearse",
    "make_bucket_trainer": "paraplan.jobs.trainers",
    "check_buckets": "paraplan.runtime.buckets",
    "attributes_set": "paraplan.capture.python_state.dynamic",
}
_part = lazy(_PARTS)


@dataclass(frozen=True)
class Plan:
    """How one training step runs on a cluster.

    Attributes:
        data: the plan itself, a frozen value.
        given: what each class of ranks executes, where the plan was lowered as a whole; else None, until it is asked
            for (see `programs`).
        solve_s, total_s: how long it took to make; None for a loaded plan (files hold no timings).
        reads: what forward read of this process while it was captured; None for a loaded plan.
    """

    data: ir_plan.Plan
    given: tuple[RankProgram, ...] | None = field(default=None, compare=False, repr=False)
    solve_s: float | None = field(default=None, compare=False)
    total_s: float | None = field(default=None, compare=False)
    reads: Reads | None = field(default=None, compare=False, repr=False)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read and verify a plan file; nothing is imported or executed.

        Raises:
            InvalidPlanError: unreadable, truncated, an unknown key, a wrong type, or not legal.
            PlanMismatchError: made by a newer paraplan.
        """
        plan = read_plan(path, Programs(_part("programs_of"), _part("as_a_whole")))
        _part("check_pins")(plan)
        return cls(plan)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; equal plans make equal bytes."""
        write_plan(self.data, path)

    @cached_property
    def programs(self) -> tuple[RankProgram, ...]:
        """What each class of ranks executes."""
        return lower(self.data) if self.given is None else self.given

    @property
    def stages(self) -> tuple[ir_plan.Stage, ...]:
        """The stages."""
        return self.data.stages

    @property
    def prediction(self) -> ir_plan.Prediction:
        """What the simulator says of a step."""
        return self.data.prediction or predict(self.data, (), self.simulate(spans=False))

    @property
    def certificate(self) -> ir_plan.Certificate | None:
        """What was proved."""
        return self.data.certificate

    @cached_property
    def _simulation(self) -> Simulation:
        return simulate_plan(self.data, self.programs)

    def simulate(self, cluster: ClusterSpec | str | None = None, *, spans: bool = True) -> Simulation:
        """Price the plan, on its own cluster or as it is on another of as many devices.

        Args:
            cluster: the other.
            spans: whether every stretch of every stream is wanted, and memory around every step; without, a pipeline
                of many microbatches is carried on from its first ones, which takes the less time the more there are.
        Raises:
            PlanMismatchError: the other cluster has another number of devices.
            ClusterError: it cannot be read.
        """
        priced = self if cluster is None else self.on(cluster)
        if spans or "_simulation" in priced.__dict__:
            return priced._simulation
        return _part("as_a_whole")(priced.data).simulation  # type: ignore[no-any-return]

    def on(self, cluster: ClusterSpec | str) -> Plan:
        """The same decisions on another cluster of as many devices, priced anew; nothing is proved of it.

        Raises:
            PlanMismatchError: it has another number of devices.
        """
        return Plan(*priced_on(self.data, self.programs, as_cluster(cluster)))

    def explain(self) -> Explanation:
        """Layouts in words, where time and memory go."""
        return explain(self.data, self.programs, self._simulation)

    def memory(self, largest: int = 10) -> tuple[MemoryTold, ...]:
        """Per rank class, its peak taken apart, to the byte.

        Args:
            largest: how many of the largest tensors to tell.
        """
        return memory_told(self.data, self.programs, self._simulation, largest)

    def trace(self) -> bytes:
        """The simulated step as a Chrome trace (open in ui.perfetto.dev)."""
        return chrome_trace(self._simulation)

    @takes_options(ExecutionKeywords, ExecutionOptions)
    def executable(self, model: nn.Module, **options: Unpack[ExecutionKeywords]) -> Trainer:
        """This rank's trainer; joins torchrun's job if this process is part of one.

        Args:
            model: the model the plan was made for, with values; or on meta, and then no rank ever holds it whole.
            options: how it is executed, see `ExecutionOptions`.
        Raises:
            PlanMismatchError: another model (structure, what forward reads, its code), another loss function, or
                another number of processes or kind of device than the plan's.
            ConstraintError: `cuda_graphs` of a plan in whose steps the host decides or waits, or without room for them.
        """
        return _part("make_trainer")(  # type: ignore[no-any-return]
            self.data, self.programs, model, _execution(options), reads=self.reads
        )

    def check(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Any]],
        *,
        loss_fn: Callable[..., Any] | None = None,
        loss: str | Sequence[str] | Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> str:
        """Take a step for every batch with all ranks in this process, on CPU, and hold each against the eager model.

        What is compared: loss, every gradient, every parameter after the plan's optimizer, every buffer, against the
        captured program on one device and against the model itself, whose random ops draw the program's numbers. It
        takes the memory of all ranks and, below float64, that of the model in float64; use it on a small model.

        Args:
            model: the model the plan was made for, with values on cpu; it is not modified.
            batches: global batches by name; one with fewer rows is padded, as a trainer pads it.
            loss_fn, loss: as for `compile`.
            seed: base of the random seeds.
        Returns:
            The largest error against the eager model, and how it was compared.
        Raises:
            CheckError: a step differs; names the tensor, both values and the step.
            PlanMismatchError: another model, or batches that are not for the plan.
        """
        errors = _part("rehearse")(self.data, self.programs, model, batches, loss_fn, loss, seed)
        how = f" ({errors.how})" if errors.how else ""
        return f"{len(batches)} steps are the eager model's: largest error {errors.eager:.1e}{how}"

    def __str__(self) -> str:
        return summary(self.data, self.prediction)

    def __repr__(self) -> str:
        found = self.data.prediction
        told = f", step {show_seconds(found.step_s)}, peak {show_bytes(max(found.peak_bytes))}" if found else ""
        return f"<Plan of {self.data.model.display} on {self.data.cluster.name}{told}>"

    def _repr_html_(self) -> str:
        return html_fragment(self.explain())


@dataclass(frozen=True)
class Buckets:
    """One plan per shape of the batch or value of the model's `attributes`, for models trained on several.

    All keep every parameter in the same layouts: they share parameters and optimizer states."""

    plans: tuple[Plan, ...]
    attributes: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def compile(
        cls,
        model: nn.Module,
        cluster: ClusterSpec | str,
        buckets: Sequence[Mapping[str, Any]],
        *,
        constraints: Constraints | None = None,
        **options: Unpack[CompileOptions],
    ) -> Buckets:
        """Plan every bucket; the first one decides the mesh and where parameters live.

        Args:
            model, cluster: as for `compile`.
            buckets: per shape, what of `compile`'s options differs: {"seq": 128}, {"example_inputs": ...}. The one
                that matters most comes first; {"attributes": {"encoder.k": 3}} is taken while that is the value.
            constraints, options: the rest of them.
        """
        if not buckets:
            raise ConstraintError("buckets is empty: give one mapping of options per shape, e.g. [{'seq': 128}]")
        attributes = tuple(dict(each.get("attributes", {})) for each in buckets)
        given = {"pp": 1, **with_keywords(Constraints, constraints, options)}

        def plan(index: int, **more: Any) -> Plan:
            own = {name: value for name, value in buckets[index].items() if name not in ("attributes", "constraints")}
            own = with_keywords(Constraints, buckets[index].get("constraints"), own)
            with _part("attributes_set")((model,), attributes[index]):
                return compile(model, cluster, **{**given, **more, **own})

        first = plan(0)
        stage = first.data.stages[0]
        pins = {name: at.text for name, at in stage.params.items()}
        degrees = ("dp", "tp", "sp", "cp", "cp_mode", "ep", "zero", "mesh")
        pinned = any(given.get(name) is not None for name in degrees)
        mesh = {} if pinned else {"mesh": stage.mesh.shape}
        plans = (first, *(plan(index, **mesh, params=pins) for index in range(1, len(buckets))))
        _part("check_buckets")([plan.data for plan in plans])
        return cls(plans, attributes)

    @takes_options(ExecutionKeywords, ExecutionOptions)
    def executable(self, model: nn.Module, **options: Unpack[ExecutionKeywords]) -> BucketTrainer:
        """This rank's trainer for all shapes."""
        return _part("make_bucket_trainer")(  # type: ignore[no-any-return]
            [(plan.data, plan.programs, plan.reads) for plan in self.plans], model, self.attributes, _execution(options)
        )


@takes_options(CompileOptions, JobOptions, Constraints)
def compile(
    model: nn.Module,
    cluster: ClusterSpec | str,
    *,
    constraints: Constraints | None = None,
    **options: Unpack[CompileOptions],
) -> Plan:
    """Plan how a model trains on a cluster.

    Args:
        model: any nn.Module; on meta it costs no memory, and it is not modified.
        cluster: a spec, a file, a catalog name ("8xH100:4") or "local:4".
        constraints: pinned choices as one value; they may be given one by one as well.
        options: how the step is captured and planned (`JobOptions`), and pinned choices (`Constraints`).
    Raises:
        CaptureError, ConstraintError: the model cannot be captured; choices contradict each other, batch or cluster.
        InfeasibleError, SolverLimitError, ProfileError: proved that no plan fits; out of time; no times that fit.
        TypeError: there is no such option.
    """
    return compile_since(time.perf_counter(), model, cluster, constraints, options)


def compile_since(
    started: float,
    model: nn.Module,
    cluster: ClusterSpec | str,
    constraints: Constraints | None,
    options: Mapping[str, Any],
) -> Plan:
    """As `compile`, of which a part is done already.

    Args:
        started: since when the time limit runs, on the clock of `time.perf_counter`.
        model, cluster, constraints, options: as for `compile`.
    """
    check_keywords("compile", options, JobOptions, Constraints)
    pins = from_keywords(Constraints, with_keywords(Constraints, constraints, options))
    asked = from_keywords(JobOptions, options)
    _part("check_planner")(asked.strategy)
    job, reads, warning = captured_job(model, as_cluster(cluster), asked, pins)
    tell, passed_s = asked.progress or (lambda text: None), time.perf_counter() - started
    found = _part("plan_by")(asked.strategy, job, pins, asked.time_limit_s, tell, passed_s=passed_s)
    data = msgspec.structs.replace(found.plan, notes=(*found.plan.notes, *filter(None, (warning,))), pins=pins.as_data)
    check_plan(data)
    return Plan(data, None, found.solve_s, time.perf_counter() - started, reads)


def captured_job(model: nn.Module, spec: ClusterSpec, asked: JobOptions, pins: Constraints) -> tuple[Any, Reads, str]:
    """What is planned, what the model read as it was captured, and a warning about its profile ("": none).

    Args:
        model, spec: as for `compile`.
        asked: how the step is captured.
        pins: pinned choices, which are checked against the cluster.
    """
    check_batch(asked)
    if pins.params:
        _part("check_param_names")(pins, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    _part("check_on_cluster")(pins, spec)
    times, warning = _profiled(asked, spec)
    if asked.progress is not None:
        asked.progress(f"capturing {type(model).__name__}")
    program, reads, reference = _captured(model, asked, batches_apart(asked, pins.microbatches))
    optimizer = msgspec.structs.replace(OPTIMIZERS[asked.optimizer], accumulates=asked.accumulate)
    job = _part("Job")(program, spec, optimizer, reference, versions(), profile=times)
    return job, reads, warning


def _profiled(asked: JobOptions, spec: ClusterSpec) -> tuple[Profile | None, str]:
    if asked.profile is None:
        return None, ""
    return profile_for(asked.profile, spec, versions()["torch"], asked.profile_any)


def _captured(model: nn.Module, asked: JobOptions, apart: int) -> tuple[Program, Reads, ir_plan.ModelRef]:
    """The captured program, what it read, and which model it is of; `apart`: how many batches a step's batch is."""
    given = asked.example_inputs
    inputs = given if given is not None else _part("hf_batch")(model, asked.batch, asked.seq)
    program, reads = _part("capture_with_reads")(
        model,
        dict(inputs) if isinstance(inputs, Mapping) else inputs,
        loss_fn=asked.loss_fn,
        precision=asked.precision,
        loss=asked.loss,
        batch_dims=asked.batch_dims,
        dynamic=asked.dynamic,
        per_microbatch=apart,
    )
    made_here = given is None and asked.loss_fn is None and asked.loss is None
    return program, reads, _part("model_ref")(model, program, made_here=made_here)


def _execution(options: Mapping[str, Any]) -> ExecutionOptions:
    check_keywords("executable", options, ExecutionOptions)
    return from_keywords(ExecutionOptions, options)


def as_cluster(cluster: ClusterSpec | str) -> ClusterSpec:
    """A cluster from a spec or from text.

    Raises:
        ClusterError: it describes no machine.
    """
    if isinstance(cluster, ClusterSpec):
        return check_cluster(cluster)
    if not isinstance(cluster, str):
        raise ClusterError(f"cluster is a {type(cluster).__name__}: give a ClusterSpec, a file's name or '8xH100:4'")
    return parse_cluster(cluster)


def versions() -> dict[str, str]:
    """Of paraplan and the libraries that shape a plan, as far as they are installed."""
    return {"paraplan": __version__, **library_versions()}
