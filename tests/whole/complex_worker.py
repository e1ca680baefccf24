"""What each of two ranks runs to train complex parameters over Gloo: `complex_worker.py <folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from paraplan.api import compile as compile_plan
from paraplan.capture.precision import default_dtype
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job
from tests.against_eager import doubled
from tests.whole.complex_models import Fourier, fields

PINS = {"zero3": {"dp": 2, "zero": 3, "offload_states": "host"}, "tp": {"tp": 2}, "pp": {"pp": 2}}


def wanted(model: nn.Module, steps: int) -> nn.Module:
    """The same model after some steps, clipped, in float64."""
    batch = {name: doubled(x) for name, x in fields().items()}
    with default_dtype(torch.float64):
        own = Fourier()
        for mine, given in zip(own.parameters(), model.parameters(), strict=True):
            mine.data = doubled(given.data)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            own(**batch).backward()
            nn.utils.clip_grad_norm_(own.parameters(), 0.1)
            optimizer.step()
        return own


def train(trainer: Trainer, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        trainer.step(fields())
        trainer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(trainer: Trainer, model: nn.Module) -> None:
    found = trainer.full_state_dict()
    for name, param in model.named_parameters():
        error = float((found[name] - param).detach().abs().max() / param.detach().abs().max())
        assert found[name].dtype == param.dtype and error < 1e-9, (name, error)


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Fourier()
    expected = wanted(model, 3)
    before: Trainer | None = None
    for name, pins in PINS.items():
        plan = compile_plan(model, "local:2", example_inputs=fields(), precision="fp64", optimizer="adamw", **pins)
        trainer = plan.executable(model)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
        train(trainer, optimizer, 3)
        assert_equal(trainer, expected)
        if name == "zero3":
            state = {"model": trainer.state_dict(), "optimizer": trainer.optimizer_state_dict(optimizer)}
            dcp.save(state, checkpoint_id=folder / "c")
            before = trainer
        if name == "tp":
            assert before is not None
            other = plan.executable(model, seed=7)
            optimizer = other.optimizer(torch.optim.AdamW, lr=1e-2)
            state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(optimizer, create=True)}
            dcp.load(state, checkpoint_id=folder / "c")
            other.load_state_dict(state["model"])
            other.load_optimizer_state_dict(optimizer, state["optimizer"])
            train(other, optimizer, 2)
            assert_equal(other, wanted(model, 5))
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
