"""Training a plan for some steps on this rank: what `paraplan run` does on each process."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paraplan.capture.python_state.dynamic import with_attributes
from paraplan.cost_models.predict import simulate_plan
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.rank_program import RankProgram
from paraplan.ir.machine.mesh import Layout, parse_layout
from paraplan.ir.model.program import master_dtype, trained_params
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.plan import Plan
from paraplan.jobs.checking.check import LargestErrors, SingleDevice
from paraplan.jobs.data import RandomBatches, TextBatches
from paraplan.jobs.model_identity import check_model
from paraplan.jobs.models import Made, plan_model
from paraplan.jobs.optimizers import OPTIMIZER_CLASSES
from paraplan.jobs.record import check_recordable, write_run
from paraplan.jobs.run_options import ExecutionOptions, RunOptions
from paraplan.jobs.trainers import check_devices, check_graphs, make_trainer
from paraplan.lowering import lower
from paraplan.lowering.steps.delayed_update import in_phase
from paraplan.runtime.optimizers.scaling import Scaler
from paraplan.runtime.state.params import pad
from paraplan.runtime.state.training_state import checkpoint_metadata
from paraplan.runtime.state.weights import fill, parameters_on_meta, values_of
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.process_groups import check_timeout

STEPS_RECORDED = 5
PEAK_TOLERANCE = 0.02
"""By how much of the predicted peak of memory a checked run may exceed it."""


@dataclass
class RunResult:
    """What happened; rank 0's is complete.

    Attributes:
        loss: per step.
        step_s: median time of a step, the first and the recorded one left out where others remain.
        predicted_peak_bytes: the plan's, of the rank with the most.
        measured_peak_bytes: per rank.
        undeclared: per rank, the op that allocates most inside beyond what its rule says; "": none does.
        entries_equal: whether every rank did exactly what was predicted.
        entries_difference: the first difference.
        errors: of the check; None where there was none.
        compiled: blocks to compile -> "", or why they stay eager.
        first_step: the steps taken before, in the run that is resumed.
    """

    loss: list[float] = field(default_factory=list)
    step_s: float = 0.0
    predicted_peak_bytes: int = 0
    measured_peak_bytes: list[int] = field(default_factory=list)
    undeclared: list[str] = field(default_factory=list)
    entries_equal: bool = True
    entries_difference: str = ""
    errors: LargestErrors | None = None
    compiled: dict[str, str | None] = field(default_factory=dict)
    first_step: int = 0


def check_run(plan: Plan, options: RunOptions) -> None:
    """Everything that can be refused before any process is started.

    Raises:
        ParaplanError: the model is another one, the data does not fit, the machine has no such devices, or a number or
            folder is impossible.
    """
    check_options(options)
    if options.cuda_graphs:
        check_graphs(plan, lower(plan))
    check_devices(plan.cluster)
    if options.record is not None:
        check_recordable(plan, options.compile or plan.compiled)
    made = plan_model(plan, options.model, meta=True)
    check_model(plan, made.model, made.loss_fn)
    if options.weights is not None:
        values_of(plan.program, made.model, options.weights)
    _batches(plan, made, options)


def check_options(options: RunOptions) -> None:
    """Refuse numbers and folders that no run can have.

    Raises:
        ConstraintError: names the option.
        PlanMismatchError: there is no checkpoint to resume from.
    """
    if not 0 <= options.lr < math.inf:
        raise ConstraintError(f"--lr {options.lr}: a number of at least 0")
    if options.clip is not None and not options.clip > 0:
        raise ConstraintError(f"--clip {options.clip}: a number above 0; leave it out for no clipping")
    if options.timeout is not None:
        check_timeout(options.timeout, "--timeout ")
    if options.save is not None:
        _check_folder(Path(options.save))
    if options.resume is not None:
        checkpoint_metadata(options.resume)
    if options.check and options.resume is not None:
        raise ConstraintError(
            "--check compares with a single device from its first step on, which has no states to --resume from; give "
            "one of them"
        )


def _check_folder(path: Path) -> None:
    """Refuse, before the training for it is done, a checkpoint's folder that cannot be made or written."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), path)
    said = "" if there.is_dir() else ": there is a file in its place"
    try:
        if not said:
            tempfile.TemporaryFile(dir=there).close()
    except OSError as fault:
        said = f": nothing can be written in {there} ({fault.strerror})"
    if said:
        raise ConstraintError(f"--save {path}{said}; give a folder to be made or written")


def check_local(plan: Plan) -> None:
    """Refuse a plan that this machine alone cannot run.

    Raises:
        PlanMismatchError: it has several nodes, or more GPUs than there are here.
    """
    cluster = plan.cluster
    nodes = sum(group.nodes for group in cluster.groups)
    if nodes > 1:
        raise PlanMismatchError(
            f"the plan is for {nodes} nodes ({cluster.name}); start it on each: torchrun --nnodes={nodes} "
            f"--nproc-per-node={cluster.groups[0].devices_per_node} "
            "--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT -m paraplan run ..."
        )
    if cluster.backend == "cuda" and torch.cuda.device_count() < cluster.num_devices:
        raise PlanMismatchError(
            f"the plan is for {cluster.num_devices} GPUs ({cluster.name}), this machine has {torch.cuda.device_count()}"
        )


def _batches(plan: Plan, made: Made, options: RunOptions) -> Callable[[int], dict[str, Tensor]]:
    if options.data is None:
        return RandomBatches(plan, made, options.seed)
    return TextBatches(plan, made, options.data, options.seed)


def run(
    plan: Plan, programs: tuple[RankProgram, ...], options: RunOptions, tell: Callable[[int, float, float], None]
) -> RunResult:
    """Train on this rank.

    Args:
        plan, programs: verified.
        options: what to run.
        tell: told (step, loss, seconds) after each step, on every rank.
    Raises:
        ParaplanError: what does not belong together, or a step that failed.
    """
    check_options(options)
    made = _skeleton(plan, options)
    batches = _batches(plan, made, options)
    training = _Training(plan, programs, made, options)
    trainer, first = training.trainer, training.trainer.steps_done
    if options.check and trainer.rank == 0:
        fill(plan.program, made.model, values_of(plan.program, made.model, options.weights, options.seed))
    single = None
    if options.check and trainer.rank == 0:
        single = SingleDevice(plan, made, training.optimizer_of, options.seed)
    recorded = recorded_step(plan, options.steps)
    peaks = plan.prediction.peak_bytes if plan.prediction else simulate_plan(plan, programs).peak_bytes
    result = RunResult(predicted_peak_bytes=max(peaks), first_step=first)
    times = []
    for step in range(options.steps):
        batch = with_attributes(plan.program, made.model, batches(first + step))
        trainer.record = step == recorded
        loss, grads, seconds = training.step(batch)
        times.append(seconds)
        if step == recorded:
            account(trainer, programs, result)
        trainer.record = False
        if options.check:
            params = trainer.full_tensors(rank0_only=True)
            if single is not None:
                single.compare(batch, options.clip, loss, grads, params, params)
        result.loss.append(loss)
        tell(first + step, loss, seconds)
    trainer.flush()
    if options.save is not None:
        trainer.save(options.save, training.optimizer, None, training.scaler)
    usual = [seconds for step, seconds in enumerate(times) if step not in (0, recorded)] or times
    result.step_s, result.errors = statistics.median(usual), single.errors if single is not None else None
    result.compiled = trainer.compiled
    if result.errors is not None and not result.errors.failure and "" not in result.compiled.values():
        result.errors.failure = peak_failure([peaks[index] for index in plan.schedule.rank_class], result)
    if options.record is not None:
        seconds_of = training.op_seconds(lambda step: batches(first + options.steps + step))
        write_run(Path(options.record), plan, trainer.state.executor.program, seconds_of, usual)
    return result


class _Training:
    """This rank's trainer with the run's optimizer, resumed where that is asked for.

    Attributes:
        trainer, optimizer: of this rank.
        scaler: of the loss, under fp16.
        optimizer_of: makes such an optimizer of parameters.
    """

    def __init__(self, plan: Plan, programs: tuple[RankProgram, ...], made: Made, options: RunOptions) -> None:
        execution = ExecutionOptions(
            seed=options.seed,
            compile=options.compile,
            weights=options.weights,
            loss_fn=made.loss_fn,
            timeout_s=options.timeout,
            cuda_graphs=options.cuda_graphs,
        )
        self._options = options
        self.trainer = trainer = make_trainer(plan, programs, made.model, execution)
        self.scaler = trainer.scaler() if plan.program.precision == "fp16" else None
        cls, extra = OPTIMIZER_CLASSES[plan.optimizer.name]
        self.optimizer = trainer.optimizer(cls, lr=options.lr, **extra)
        self.optimizer_of = partial(cls, lr=options.lr, **extra)
        if options.resume is not None:
            trainer.resume(options.resume, self.optimizer, None, self.scaler)

    def step(self, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], float]:
        """A step and its update: the loss, whole gradients before clipping where the run is checked, and seconds."""
        started = time.perf_counter()
        loss = float(self.trainer.step(batch))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        grads = full_grads(self.trainer) if self._options.check else {}
        self._update()
        return loss, grads, time.perf_counter() - started

    def op_seconds(self, batches: Callable[[int], dict[str, Tensor]]) -> Mapping[tuple[str, int], list[float]]:
        """(block, instruction) -> seconds of each call, over some further steps taken op by op."""
        with self.trainer.timed() as found:
            for step in range(STEPS_RECORDED):
                self.trainer.step(batches(step))
                self._update()
        return found

    def _update(self) -> None:
        update(self.trainer, self.optimizer, self._options.clip, self.scaler)


def peak_failure(predicted: Sequence[int], result: RunResult) -> str:
    """Which rank needed more memory than predicted for it, beyond `PEAK_TOLERANCE`; "" where none did."""
    ranks = zip(predicted, result.measured_peak_bytes, result.undeclared, strict=True)
    for rank, (most, measured, undeclared) in enumerate(ranks):
        if measured > (1 + PEAK_TOLERANCE) * most:
            why = undeclared or "the plan's prediction is not that of its program: plan again"
            return (
                f"rank {rank} had {measured} bytes at its peak of memory, {most} were predicted (at most "
                f"{PEAK_TOLERANCE:.0%} more); {why}"
            )
    return ""


def undeclared_workspace(program: RankProgram, workspaces: Mapping[tuple[str, int], int]) -> str:
    """The op that was seen to allocate most inside beyond what its instruction says; "" where none does.

    Args:
        program: of the rank.
        workspaces: (block, instruction) -> bytes it was seen to make and drop inside.
    """
    over = {
        place: seen - program.blocks[place[0]].instrs[place[1]].workspace_bytes
        for place, seen in workspaces.items()
        if place[0] in program.blocks and place[1] >= 0
    }
    place = max(over, key=lambda each: over[each], default=None)
    if place is None or over[place] <= 0:
        return ""
    instr = program.blocks[place[0]].instrs[place[1]]
    return (
        f"{instr.target} ({place[0]}[{place[1]}]) allocates {workspaces[place]} bytes inside and its rule says "
        f"{instr.workspace_bytes}: give the rule a workspace that says what its kernel does"
    )


def recorded_step(plan: Plan, steps: int) -> int:
    """The step that is recorded: the second, or the first that updates with what the one before held; or the last."""
    return min(1 if plan.delayed_update is None else plan.delayed_update + 1, steps - 1)


def _skeleton(plan: Plan, options: RunOptions) -> Made:
    """The model without values where its configuration makes it, so that no rank ever holds it whole.

    A factory's is as the factory makes it.
    """
    torch.manual_seed(options.seed)
    from_configuration = plan.model.hf_type is not None and (options.model or "hf:").startswith("hf:")
    with parameters_on_meta() if from_configuration else nullcontext():
        return plan_model(plan, options.model, meta=False)


def update(trainer: Trainer, optimizer: torch.optim.Optimizer, clip: float | None, scaler: Scaler | None) -> None:
    """Clip, update and, in a recorded step, note what the update did; gradients are gone after it.

    Args:
        trainer, optimizer: of this rank.
        clip: the largest norm of gradients; None for no clipping.
        scaler: of the loss, under fp16.
    """
    if clip is not None:
        trainer.clip_grad_norm_(clip)
    step = optimizer.step if scaler is None else lambda: scaler.step(optimizer)
    if trainer.record:
        state = trainer.state
        with trainer.transport.tracker.updating(state.executor.account.ledger, state.homes()):
            step()
    else:
        step()
    if scaler is not None:
        scaler.update()
    optimizer.zero_grad()


def full_grads(trainer: Trainer) -> dict[str, Tensor]:
    """Whole gradients by parameter name, on every rank (all must call)."""
    state, program = trainer.state, trainer.plan.program

    def held(name: str) -> tuple[Tensor, Layout]:
        outer, grad = state.program.outer[outer_names.state(name)], state.params[name].grad
        assert grad is not None, "a trained parameter has a gradient"
        return pad(state.waiting.value(name, grad), outer.shape), parse_layout(outer.layout)

    found = {}
    for name in trained_params(program):
        spec = program.params[name].spec
        spec = TensorSpec(master_dtype(program.precision, spec.dtype), spec.shape)
        # a copy: what is held here must not keep the program's own gradients alive
        found[name] = trainer.whole(name, spec, held).cpu().clone()
    return found


def account(trainer: Trainer, programs: Sequence[RankProgram], result: RunResult) -> None:
    """What this rank did in its recorded step against what was predicted, gathered from all ranks (all must call).

    Args:
        trainer: of this rank; its last step was recorded.
        programs: of the plan, per rank class.
        result: where it is noted.
    """
    program = in_phase(programs[trainer.plan.schedule.rank_class[trainer.rank]], trainer.state.phase)
    wanted, found = list(entries(program)), trainer.entries
    difference = ""
    for index, (want, got) in enumerate(zip(wanted, found, strict=False)):
        if want.key != got.key:
            place = f"rank {trainer.rank}, entry {index} ({want.note or want.target})"
            difference = f"{place}: predicted {want.key}, recorded {got.key}"
            break
    if not difference and len(wanted) != len(found):
        difference = f"rank {trainer.rank}: {len(wanted)} entries predicted, {len(found)} recorded"
    mine = (trainer.peak_bytes, difference, undeclared_workspace(program, trainer.state.executor.account.workspaces))
    everyone: list[tuple[int, str, str]] = [mine]
    if dist.is_initialized():
        gathered: list[tuple[int, str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        everyone = [each for each in gathered if each is not None]
    result.measured_peak_bytes = [peak for peak, *_ in everyone]
    result.undeclared = [undeclared for *_, undeclared in everyone]
    result.entries_difference = next((text for _, text, _ in everyone if text), "")
    result.entries_equal = not result.entries_difference
