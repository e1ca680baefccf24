"""What a loop over time allocates inside, against its formula: never below, little above."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture.capture import capture
from paraplan.ir.model.scan import SCAN, scan_of
from paraplan.kernels.scan_kernels import run_scan
from paraplan.rules.workspace import loop_workspace
from paraplan.runtime.executing.tracker import Ledger, Tracker
from tests.rules.workspace.measuring import SLACK_BYTES

torch.set_num_threads(1)
STEPS, BATCH, WIDTH = 10, 32, 64


class Recurrent(nn.Module):
    """A layer and a loss."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].pow(2).mean()


class Scan(nn.Module):
    """A selective scan written out: rates and inputs [batch, time, width, state]."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rates = self.rate(x).sigmoid()
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = rates[:, t] * h + x[:, t]
            out.append((h * x[:, t]).sum(-1))
        return torch.stack(out, 1).pow(2).mean()


MODELS = [Recurrent(layer(WIDTH, WIDTH, batch_first=True)) for layer in (nn.LSTM, nn.GRU, nn.RNN)] + [Scan()]


@pytest.mark.parametrize("model", MODELS, ids=("lstm", "gru", "rnn", "scan"))
def test_a_loop_allocates_what_its_formula_says(model: nn.Module) -> None:
    program = capture(model, {"x": torch.randn(BATCH, STEPS, WIDTH)})
    loops = [scan_of(op.args) for kind in program.kinds for op in kind.graph.ops if op.target == SCAN]
    args = [op.args for kind in program.kinds for op in kind.graph.ops if op.target == SCAN]
    assert len(loops) == 2
    for loop, given in zip(loops, args, strict=True):
        sizes = [loop.body.values[name].shape for name in loop.body.inputs]
        tensors = [torch.randn(loop.steps, *size) for size in sizes[: loop.inputs]]
        tensors += [torch.randn(size) for size in sizes[loop.inputs :]]
        xs, rest = tensors[: loop.inputs], tensors[loop.inputs :]
        tracker, ledger = Tracker(), Ledger()
        for each in tensors:
            ledger.register(each)
        before = ledger.live_bytes
        with tracker, tracker.booking(ledger):
            made = run_scan(xs, rest[: loop.carries], rest[loop.carries :], str(given[3]))
        inside = ledger.peak_bytes - before - sum(x.untyped_storage().nbytes() for x in made)
        said = loop_workspace.scan([], None, given)
        assert inside <= said <= 1.03 * inside + SLACK_BYTES, (loop.reverse, inside, said)
