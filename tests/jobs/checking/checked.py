"""A small model with a bit of everything, its plans in this process, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.graph import Op
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import LargestErrors, SingleDevice
from paraplan.jobs.models import Made
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.runtime.in_process import InProcessTrainer

torch.set_num_threads(1)
Tensors = dict[str, Tensor]


class Net(nn.Module):
    """Batch norm, dropout, noise, a counter, a constant and two loss terms; also a weight that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 6)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor(1000))
        self.register_buffer("fixed", torch.linspace(0.5, 1.5, 16))
        self.temperature = 0.7

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += 1
        h = self.drop(torch.tanh(self.norm(self.hidden(x)))) * self.fixed
        logits = self.out(h * torch.rand(16)) / self.temperature
        return F.cross_entropy(logits, y) + 0.1 * h.square().mean()


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> Tensors:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 8, generator=draw).to(dtype), "y": torch.randint(6, (8,), generator=draw)}


def captured(model: nn.Module, inputs: Any = None, precision: str = "fp64", **how: Any) -> Program:
    return capture(model, batch() if inputs is None else inputs, precision=precision, **how)


def planned(program: Program, **pins: Any) -> Plan:
    ranks = (pins.get("dp") or 1) * (pins.get("pp") or 1)
    job = Job(program, ClusterSpec.local(ranks), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    return search(job, Constraints(**pins), certify=False).plan


class Run:
    """Steps of a plan and their check; `spoil` functions are called with the trainer and what is about to be compared.

    Args:
        plan: what runs.
        model: what it is held against, and starts from.
        inputs: by step.
        seed: of the run; the check's is 0.
        loss_fn, choice: how the model is trained.
        scaled: with a gradient scaler.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        inputs: Callable[[int], Tensors] = batch,
        seed: int = 0,
        loss_fn: Any = None,
        choice: Any = None,
        scaled: bool = False,
    ) -> None:
        programs = verify_plan(plan)
        modules = [build_modules(each) for each in programs]
        self.trainer = InProcessTrainer(plan, programs, modules, model, seed)
        self.trainer.record, self.inputs = False, inputs
        self.scaler = self.trainer.scaler() if scaled else None
        made = Made(model, inputs(0), loss_fn)
        self.single = SingleDevice(plan, made, lambda params: torch.optim.AdamW(params, lr=1e-2), 0, choice)

    def steps(
        self,
        count: int = 1,
        before: Callable[[InProcessTrainer], None] | None = None,
        after: Callable[[InProcessTrainer], None] | None = None,
        found: Callable[[Tensors, Tensors], None] | None = None,
    ) -> LargestErrors:
        """Take steps; `before` the update, `after` it, and on the (gradients, tensors) found."""
        trainer = self.trainer
        for step in range(count):
            loss = float(trainer.step(self.inputs(step)))
            if before is not None:
                before(trainer)
            scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())
            grads = {name: grad / scale for name, grad in trainer.grads().items()}
            trainer.apply_optimizer(torch.optim.AdamW, scaler=self.scaler, lr=1e-2)
            if after is not None:
                after(trainer)
            tensors = {**trainer.params(), **trainer.buffers()}
            if found is not None:
                found(grads, tensors)
            self.single.compare(self.inputs(step), None, loss, grads, tensors, tensors)
        return self.single.errors


def check(model: nn.Module, inputs: Callable[[int], Tensors] = batch, steps: int = 2, **how: Any) -> LargestErrors:
    """A model's plan of one device, checked."""
    return Run(planned(captured(model, inputs(0), **how)), model, inputs).steps(steps)


def with_ops(program: Program, change: Callable[[Op], Op]) -> Program:
    """The program with every op changed."""
    kinds = []
    for kind in program.kinds:
        graph = msgspec.structs.replace(kind.graph, ops=tuple(map(change, kind.graph.ops)))
        kinds.append(msgspec.structs.replace(kind, graph=graph))
    return msgspec.structs.replace(program, kinds=tuple(kinds))
