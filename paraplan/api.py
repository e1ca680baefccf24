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
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paraplan import __version__
from paraplan.cost_models.catalog import parse_cluster
from paraplan.cost_models.predict import predict, priced_on, simulate_plan
from paraplan.cost_models.simulate import Simulation
from paraplan.ir import plan as ir_plan
from paraplan.ir.cluster import ClusterSpec, check_cluster
from paraplan.ir.errors import ConstraintError
from paraplan.ir.lazy import lazy
from paraplan.ir.program import Program
from paraplan.ir.rank_program import RankProgram
from paraplan.ir.sizes import parse_bytes
from paraplan.ir.verify import verify_plan
from paraplan.jobs.files import profile_for, read_plan, write_plan
from paraplan.jobs.versions import library_versions
from paraplan.report.explain import Explanation, explain, summary
from paraplan.report.html import html_fragment
from paraplan.report.memory import MemoryTold, memory_told
from paraplan.report.perfetto import chrome_trace
from paraplan.report.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paraplan.ir.trace.reading import Reads
    from paraplan.runtime.buckets import BucketTrainer
    from paraplan.runtime.trainer import Trainer

Progress = Callable[[str], None]

_PARTS = {
    "capture_with_reads": "paraplan.ir.trace.capture",
    "search_room": "paraplan.planner.room",
    "Job": "paraplan.planner.assemble",
    "Constraints": "paraplan.planner.constraints",
    "warm_up_steps": "paraplan.planner.constraints",
    "hf_batch": "paraplan.jobs.models",
    "model_ref": "paraplan.jobs.models",
    "make_trainer": "paraplan.jobs.trainers",
    "rehearse": "paraplan.jobs.rehearse",
    "make_bucket_trainer": "paraplan.jobs.trainers",
    "check_buckets": "paraplan.runtime.buckets",
    "attributes_set": "paraplan.ir.trace.dynamic",
}
_part = lazy(_PARTS)


@dataclass(frozen=True)
class Plan:
    """How one training step runs on a cluster.

    Attributes:
        data: the plan itself, a frozen value.
        programs: what each class of ranks executes.
        solve_s, total_s: how long it took to make; None for a loaded plan (files hold no timings).
        reads: what forward read of this process while it was captured; None for a loaded plan.
    """

    data: ir_plan.Plan
    programs: tuple[RankProgram, ...] = field(repr=False)
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
        return cls(*read_plan(path))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; equal plans make equal bytes."""
        write_plan(self.data, path)

    @property
    def stages(self) -> tuple[ir_plan.Stage, ...]:
        """The stages."""
        return self.data.stages

    @property
    def prediction(self) -> ir_plan.Prediction:
        """What the simulator says of a step."""
        return self.data.prediction or predict(self.data, self.programs, self._simulation)

    @property
    def certificate(self) -> ir_plan.Certificate | None:
        """What was proved."""
        return self.data.certificate

    @cached_property
    def _simulation(self) -> Simulation:
        return simulate_plan(self.data, self.programs)

    def simulate(self, cluster: ClusterSpec | str | None = None) -> Simulation:
        """Price the plan, on its own cluster or as it is on another of as many devices.

        Raises:
            PlanMismatchError: the other cluster has another number of devices.
            ClusterError: it cannot be read.
        """
        return self._simulation if cluster is None else self.on(cluster)._simulation

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

    def executable(
        self, model: nn.Module, *, weights: str | Path | None = None, seed: int = 0, record: bool = False,
        compile: bool | str | Callable[..., Any] = False, compile_strict: bool = False, timeout_s: float | None = None,
        offload_folder: str | Path | None = None, paced: bool = False, loss_fn: Callable[..., Any] | None = None,
        cuda_graphs: bool = False,
    ) -> Trainer:  # fmt: skip
        """This rank's trainer; joins torchrun's job if this process is part of one.

        Args:
            model: the model the plan was made for, with values; or on meta, and then no rank ever holds it whole.
            weights: safetensors to read this rank's parts from: a file, an index, or a directory with either. Without
                them a model on meta is initialised, alike for every plan and number of ranks (see `runtime.weights`).
            seed: base of the random seeds (dropout, initialisation); the same on every rank.
            record: note every instruction and the memory it takes (slow).
            compile: run forward and backward blocks through torch.compile, each checked against eager on its first
                run; one that differs or does not compile on any rank stays eager on all, and a warning says why. Other
                than True, it is torch.compile's backend. `compile_strict`: such a block is a CodegenError instead.
            cuda_graphs: after two steps that are not recorded, what is before the optimizer and what is after it are
                replayed as CUDA graphs. The batch then stays in memory; a gradient that is held is not overwritten, a
                view of one is.
            offload_folder: of the files of tensors that wait on disk, removed as they go; left out, the system's.
            paced: CPU processes only: copies to and from host and disk take the time the plan's cluster says.
            loss_fn: compared with the one the plan was made with, if given; what runs is the plan's.
            timeout_s: how long a collective waits for its peers; left out, 300, or what a job joined before has.
        Raises:
            PlanMismatchError: another model (structure, what forward reads, its code), another loss function, or
                another number of processes or kind of device than the plan's.
            ConstraintError: `cuda_graphs` of a plan in whose steps the host decides or waits, or without room for them.
        """
        return _part("make_trainer")(  # type: ignore[no-any-return]
            self.data, self.programs, model, seed=seed, record=record, compile_blocks=compile, loss_fn=loss_fn,
            compile_strict=compile_strict, offload_folder=offload_folder, paced=paced, reads=self.reads,
            weights=weights, timeout_s=timeout_s, cuda_graphs=cuda_graphs,
        )  # fmt: skip

    def check(
        self, model: nn.Module, batches: Sequence[Mapping[str, Any]], *, loss_fn: Callable[..., Any] | None = None,
        loss: str | Sequence[str] | Mapping[str, float] | None = None, seed: int = 0,
    ) -> str:  # fmt: skip
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
        return summary(self.data, self._simulation)

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
        cls, model: nn.Module, cluster: ClusterSpec | str, buckets: Sequence[Mapping[str, Any]], **options: Any
    ) -> Buckets:
        """Plan every bucket; the first one decides the mesh and where parameters live.

        Args:
            model, cluster: as for `compile`.
            buckets: per shape, what of `compile`'s options differs: {"seq": 128}, {"example_inputs": ...}. The one
                that matters most comes first; {"attributes": {"encoder.k": 3}} is taken while that is the value.
            options: the rest of them.
        """
        if not buckets:
            raise ConstraintError("buckets is empty: give one mapping of options per shape, e.g. [{'seq': 128}]")
        attributes = tuple(dict(each.get("attributes", {})) for each in buckets)

        def plan(index: int, **more: Any) -> Plan:
            own = {name: value for name, value in buckets[index].items() if name != "attributes"}
            with _part("attributes_set")((model,), attributes[index]):
                return compile(model, cluster, **{**options, **more, **own})

        first = plan(0)
        stage = first.data.stages[0]
        pins = {name: at.text for name, at in stage.params.items()}
        degrees = ("dp", "tp", "sp", "cp", "cp_mode", "ep", "zero", "mesh")
        pinned = any(options.get(name) is not None for name in degrees)
        mesh = {} if pinned else {"mesh": stage.mesh.shape}
        plans = (first, *(plan(index, **mesh, params=pins) for index in range(1, len(buckets))))
        _part("check_buckets")([plan.data for plan in plans])
        return cls(plans, attributes)

    def executable(self, model: nn.Module, **options: Any) -> BucketTrainer:
        """This rank's trainer for all shapes; `options` as for `Plan.executable`."""
        return _part("make_bucket_trainer")(  # type: ignore[no-any-return]
            [(plan.data, plan.programs, plan.reads) for plan in self.plans], model, self.attributes, **options
        )


def compile(
    model: nn.Module,
    cluster: ClusterSpec | str,
    *,
    example_inputs: Mapping[str, Tensor] | Sequence[object] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    batch_dims: Mapping[str, int | None] | None = None,
    batch: int = 8, seq: int = 128, time_limit_s: float = 60.0, progress: Progress | None = None,
    mesh: Sequence[int] | None = None, dp: int | None = None, tp: int | None = None, sp: bool = False,
    cp: int | None = None, cp_mode: str | None = None, ep: int | None = None, zero: int | None = None,
    pp: int | Literal["auto"] | None = None, schedule: str | None = None,
    stages: Sequence[tuple[int, int]] | None = None, overlap: int = 1, compiled: bool = False,
    reduce_dtype: str | None = None,
    microbatches: int | None = None, per_microbatch: bool = False,
    memory: int | str | None = None, reserve: int | str | None = None, recompute: str | None = None,
    offload: str = "none", offload_states: str | None = None, delayed_update: bool | int | None = None,
    params: Mapping[str, str] | None = None, dynamic: Sequence[str] = (),
    loss: str | Sequence[str] | Mapping[str, float] | None = None, profile: str | Path | None = None,
    profile_any: bool = False,
) -> Plan:  # fmt: skip
    """Plan how a model trains on a cluster.

    Args:
        model: any nn.Module; on meta it costs no memory, and it is not modified.
        cluster: a spec, a file, a catalog name ("8xH100:4") or "local:4".
        example_inputs: one global batch, by forward's parameter names or in their order; left out for Hugging
            Face models, whose batch is then [batch, seq] tokens.
        loss_fn: (model output, batch by name) -> scalar loss; left out where the model returns its loss. Inputs by
            name that forward does not take (labels) are given to it alone.
        optimizer: what keeps states: sgd, momentum, nesterov, adam, adamw; with weight_decay sgd+decay, adam+decay ...
        precision: "fp32", "fp64", or "bf16", "fp8" (bf16, linear layers in float8) and "fp16" (float32 master weights;
            fp16 trains with `Trainer.scaler`).
        batch_dims: the batch dim of each input; dim 0 by default.
        batch, seq: size of the batch made for Hugging Face models.
        time_limit_s, progress: seconds for planning, capture apart (a note says if they ran out); told what is done.
        mesh, dp, tp, sp, cp, cp_mode, ep, zero, pp, schedule, stages, microbatches, params: pinned, see `Constraints`.
        per_microbatch: each of `microbatches` is a batch by itself, as in eager gradient accumulation: ops that mix
            samples (batch norm, in-batch losses) see one alone, buffers are written once a microbatch, and losses are
            averaged. It changes what is computed; where labels are counted, by those of all microbatches.
        memory: what a device may hold at most (else its memory less the reserve); bytes or "12GiB".
        reserve: what of a device's memory is kept from the plan, likewise; left out, what the cluster says of it
            (context, communication buffers, the allocator). What allocators reserve then fits; 0: nothing is kept, and
            the bytes alive alone decide.
        overlap: in how many pieces at most tensor parallelism's products go, beside their collectives; 1: none does.
        reduce_dtype: "fp32" or "bf16": what gradients are summed over ranks in, under half precisions. Left out, those
            reduced as they are made (ZeRO-2 and 3, tensor parallelism) are in the half precision, those reduced once a
            step (ZeRO-0 and 1) in float32, as accumulators and sums between stages always are.
        compiled: forward and backward blocks go through torch.compile, and are priced as it fuses them.
        recompute: "none", "selective", "cheap", "alternate", "full" or "full-early-stop" (of a layer, see
            `planner.constraints.PRESETS`); left out: chosen, and only where memory is short.
        offload: "host" or "disk" (both) lets activations, states and parameters be there if memory is short.
        offload_states: "host" has the host keep optimizer states and update, "all" keep parameters too; "disk" and
            "disk-all" keep them on disk; "fetched", "-fetched": the device updates; "-grads": gradients wait there too;
            "none" keeps all there; "either" leaves states to the planner, "any" parameters too, "any-grads" all.
        delayed_update: whether the host's updates may be one step late, beside the next step's work, if that is faster:
            after so many steps, True for 40. It changes what is computed (Ren et al. 2021, section 5.2).
        loss: where the model (or loss_fn) returns several scalars, which to train on: a name, names, weights by name
            (their weighted sum), or "sum" for all of them; `Trainer.metrics` then has each.
        profile, profile_any: measured times (`paraplan profile`); another device's or torch's too, said in the plan.
        dynamic: attributes that the training loop changes ("tau", "encoder.tau"): inputs; others must not be changed.
    Raises:
        CaptureError, ConstraintError: the model cannot be captured; choices contradict each other, batch or cluster.
        InfeasibleError, SolverLimitError, ProfileError: proved that no plan fits; out of time; no times that fit.
    """
    started, tell, spec = time.perf_counter(), progress or (lambda text: None), as_cluster(cluster)
    constraints = _part("Constraints")(
        mesh=None if mesh is None else tuple(mesh), dp=dp, tp=tp, sp=sp, cp=cp, cp_mode=cp_mode, ep=ep,
        zero=zero, pp=pp, schedule=schedule, stages=None if stages is None else tuple(map(tuple, stages)),
        microbatches=microbatches, memory_bytes=None if memory is None else parse_bytes(memory), recompute=recompute,
        offload=offload, offload_states=offload_states, reserve_bytes=None if reserve is None else parse_bytes(reserve),
        overlap=overlap, compiled=compiled, params=dict(params or {}), reduce_dtype=reduce_dtype or "",
        delayed_update=_part("warm_up_steps")(delayed_update),
    )  # fmt: skip
    keeper = _optimizer(optimizer)
    times, warning = (None, "") if profile is None else profile_for(profile, spec, versions()["torch"], profile_any)
    tell(f"capturing {type(model).__name__}")
    program, reads, reference = _captured(
        model, example_inputs, batch, seq, loss_fn=loss_fn, precision=precision, loss=loss,
        batch_dims=dict(batch_dims) if batch_dims else None, dynamic=tuple(dynamic),
        per_microbatch=_apart(per_microbatch, microbatches),
    )  # fmt: skip
    job = _part("Job")(program, spec, keeper, reference, versions(), profile=times)
    found = _part("search_room")(job, constraints, time_limit_s, tell)
    data = msgspec.structs.replace(found.plan, notes=(*found.plan.notes, *filter(None, (warning,))))
    programs = verify_plan(data)
    return Plan(data, programs, found.solve_s, time.perf_counter() - started, reads)


def _apart(per_microbatch: bool, microbatches: int | None) -> int:
    if not per_microbatch:
        return 1
    if microbatches is None:
        raise ConstraintError(
            "per_microbatch makes the number of microbatches part of what is computed, so it is yours to say: give "
            "microbatches=4 (--microbatches 4) or another divisor of the batch"
        )
    return microbatches


def _captured(
    model: nn.Module, example_inputs: Mapping[str, Tensor] | Sequence[object] | None, batch: int, seq: int, **how: Any
) -> tuple[Program, Reads, ir_plan.ModelRef]:
    """The captured program, what it read, and which model it is of; `how` goes to `capture`."""
    inputs = example_inputs if example_inputs is not None else _part("hf_batch")(model, batch, seq)
    program, reads = _part("capture_with_reads")(
        model, dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs), **how
    )
    made_here = example_inputs is None and how["loss_fn"] is how["loss"] is None
    return program, reads, _part("model_ref")(model, program, made_here=made_here)


def as_cluster(cluster: ClusterSpec | str) -> ClusterSpec:
    """A cluster from a spec or from text.

    Raises:
        ClusterError: it describes no machine.
    """
    return check_cluster(cluster) if isinstance(cluster, ClusterSpec) else parse_cluster(cluster)


def _optimizer(name: str) -> ir_plan.Optimizer:
    found = ir_plan.OPTIMIZERS.get(name)
    if found is None:
        raise ConstraintError(f"optimizer {name!r} is unknown; choose one of {', '.join(ir_plan.OPTIMIZERS)}")
    return found


def versions() -> dict[str, str]:
    """Of paraplan and the libraries that shape a plan, as far as they are installed."""
    return {"paraplan": __version__, **library_versions()}
