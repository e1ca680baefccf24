"""Models with loops over time, held against eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paraplan.capture.capture import capture
from paraplan.capture.reference import run_program
from paraplan.ir.model.program import Program
from paraplan.ir.model.scan import SCAN

STEPS, WIDTH = 10, 4


class Net(nn.Module):
    """Calls a function of itself and x: [batch, time, width]."""

    def __init__(self, body: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rates = nn.Parameter(torch.rand(STEPS))
        self.cell, self.layers = nn.LSTMCell(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.in_place = nn.LeakyReLU(0.5, inplace=True)
        self.register_buffer("count", torch.zeros(()))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x)).pow(2).mean()


def held_against_eager(model: nn.Module, batch: dict[str, Tensor]) -> Program:
    """The program of a model in float64, whose loss and gradients are eager's."""
    program = capture(model, batch, precision="fp64")
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    loss, grads = run_program(program, {n: p.detach() for n, p in model.named_parameters()}, buffers, batch, 0)
    wanted = model(**batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=1e-12)
    for name, param in model.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-11)
    return program


def num_loops(program: Program) -> int:
    targets = Counter(op.target for segment in program.segments for op in program.kinds[segment.kind].graph.ops)
    return targets[SCAN]
