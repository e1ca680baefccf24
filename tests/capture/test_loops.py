"""Loops over time become one op, whose steps and gradients are the eager model's."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from paraplan.capture.capture import capture
from paraplan.capture.reference import run_program
from paraplan.ir.model.program import Program
from paraplan.ir.model.scan import SCAN, scan_of

transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)
STEPS = 10


class Recurrent(nn.Module):
    """A layer of torch's own, and a loss of all it returns."""

    def __init__(self, layer: nn.RNNBase, given: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.begin = nn.Parameter(torch.randn(layer.num_layers * (1 + layer.bidirectional), 1, 4)) if given else None

    def forward(self, x: Tensor) -> Tensor:
        """The loss of x: [time, batch, 6] or [batch, time, 6]."""
        begin = self.begin if self.begin is None else self.begin.expand(-1, x.shape[1], -1)
        results, ends = self.layer(x, begin)
        last = ends[0] + ends[1].mean() if isinstance(ends, tuple) else ends
        return results.pow(2).mean() + last.sin().mean()


def targets(program: Program) -> Counter[str]:
    return Counter(op.target for segment in program.segments for op in program.kinds[segment.kind].graph.ops)


def held_against_eager(model: nn.Module, batch: dict[str, Tensor]) -> Program:
    """The program of a model in float64, whose loss and gradients are eager's."""
    program = capture(model, batch, precision="fp64")
    loss, grads = run_program(program, {n: p.detach() for n, p in model.named_parameters()}, {}, batch, 0)
    wanted = model(**batch)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-10, atol=1e-12)
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-11)
    return program


@pytest.mark.parametrize(
    ("layer", "loops"),
    [
        (nn.LSTM(6, 4, 2, batch_first=True), 2),
        (nn.LSTM(6, 8, proj_size=4, bidirectional=True), 2),
        (nn.GRU(6, 4, bias=False), 1),
        (nn.GRU(6, 4, 2, bidirectional=True), 4),
        (nn.RNN(6, 4), 1),
        (nn.RNN(6, 4, nonlinearity="relu", batch_first=True), 1),
    ],
)
def test_recurrent_layers_are_loops(layer: nn.RNNBase, loops: int) -> None:
    model = Recurrent(layer).double()
    shape = (4, STEPS, 6) if layer.batch_first else (STEPS, 4, 6)
    program = held_against_eager(model, {"x": torch.randn(shape, dtype=torch.float64)})
    assert targets(program)[SCAN] == 2 * loops


def test_a_loop_begins_with_the_state_it_is_given() -> None:
    model = Recurrent(nn.GRU(6, 4), given=True).double()
    program = held_against_eager(model, {"x": torch.randn(STEPS, 4, 6, dtype=torch.float64)})
    assert targets(program)[SCAN] == 2


def test_a_program_does_not_grow_with_the_length_of_a_sequence() -> None:
    counts = []
    for steps in (STEPS, 4 * STEPS):
        program = capture(Recurrent(nn.LSTM(6, 4)), {"x": torch.randn(steps, 4, 6)})
        counts.append(targets(program))
        loops = [scan_of(op.args) for kind in program.kinds for op in kind.graph.ops if op.target == SCAN]
        assert {loop.steps for loop in loops} == {steps}
        assert [loop.reverse for loop in loops] == [False, True]
    assert counts[0] == counts[1]


def test_the_weight_of_a_recurrence_has_its_gradient_made_over_all_steps_at_once() -> None:
    program = capture(Recurrent(nn.LSTM(6, 4)), {"x": torch.randn(STEPS, 4, 6)})
    backward = [scan_of(op.args) for kind in program.kinds for op in kind.graph.ops if op.target == SCAN][1]
    assert not any("grad_weight" in op.target for op in backward.body.ops)
    assert targets(program)["paraplan.linear_grad_weight"] == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mamba_of_transformers_is_as_large_for_any_length(precision: str) -> None:
    config = transformers.MambaConfig(
        vocab_size=32, hidden_size=8, state_size=4, num_hidden_layers=1, time_step_rank=2, use_cache=False
    )
    counts = []
    for steps in (16, 64):
        tokens = torch.zeros(2, steps, dtype=torch.long)
        model = transformers.MambaForCausalLM(config).train()
        counts.append(targets(capture(model, {"input_ids": tokens, "labels": tokens}, precision=precision)))
    assert counts[0] == counts[1] and counts[0][SCAN] == 2
