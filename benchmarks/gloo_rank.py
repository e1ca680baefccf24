"""What every rank of `benchmarks.gloo` runs: `gloo_rank <model> <folder of plans> <file for rank 0's row>`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import torch

import paraplan as pp
from benchmarks.fuzz import LR, STEPS, Seen
from benchmarks.pipelines import small as piped
from benchmarks.zoo import build
from paraplan.jobs.checking.check import SingleDevice
from paraplan.jobs.models import Made
from paraplan.jobs.run import RunResult, account, full_grads, update
from paraplan.jobs.trainers import make_trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job

SGD: dict[str, float] = {"lr": LR, "momentum": 0.9}


def train(name: str, dropout: float, path: Path) -> tuple[Seen, float, str]:
    """Five steps of a plan; on rank 0 what differs from one device, from the eager model and from the prediction."""
    loaded, small = pp.Plan.load(path), piped(name[9:]) if name.startswith("pipeline ") else build(name, dropout)
    plan, programs = loaded.data, loaded.programs
    trainer = make_trainer(plan, programs, small.model)
    optimizer, result = trainer.optimizer(torch.optim.SGD, **SGD), RunResult()
    made, momentum = Made(small.model, None, small.loss_fn), partial(torch.optim.SGD, **SGD)
    single = SingleDevice(plan, made, momentum, 0) if trainer.rank == 0 else None
    for step in range(STEPS):
        trainer.record = step == STEPS - 1
        loss, grads = float(trainer.step(small.batch)), full_grads(trainer)
        update(trainer, optimizer, None, None)
        if trainer.record:
            account(trainer, programs, result)
        trainer.record = False
        state = trainer.full_state_dict(rank0_only=True)
        if single is not None:
            single.compare(small.batch, None, loss, grads, state, state)
    if single is None:
        return Seen(), 0.0, ""
    errors, peaks = single.errors, loaded.prediction.peak_bytes
    ratios = [peaks[plan.schedule.rank_class[rank]] / peak for rank, peak in enumerate(result.measured_peak_bytes)]
    seen = Seen(errors.loss, errors.grad, errors.param, result.entries_equal, min(ratios), max(ratios))
    return seen, errors.eager, result.entries_difference


def main() -> None:
    """All plans of a case, one after another in one job."""
    name, folder, found = sys.argv[1:]
    torch.set_num_threads(1)
    rank, _ = init_distributed("gloo")
    worst, equal, failures, eager = Seen(), 0, [], 0.0
    paths = sorted(Path(folder).glob("*.plan"))
    for path in paths:
        which, dropout = path.stem.rsplit(", dropout ", 1)
        seen, off, difference = train(name, float(dropout), path)
        worst, equal, eager = worst.widened(seen), equal + seen.equal, max(eager, off)
        failures += [f"{which}: {seen.fault()} {difference}".rstrip()] if rank == 0 and seen.fault() else []
    if rank == 0:
        row = {
            "plans": len(paths),
            "worst_loss": worst.loss,
            "worst_grad": worst.grad,
            "worst_param": worst.param,
            "eager": eager,
            "entries_equal": f"{equal}/{len(paths)}",
            "peak_ratio_min": worst.least_ratio,
            "peak_ratio_max": worst.most_ratio,
            "failures": failures,
        }
        Path(found).write_text(json.dumps(row))
    leave_job()


if __name__ == "__main__":
    main()
