"""Mixtures, encoder-decoders, recurrences and tables: what they are captured to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from examples.models.lstm import factory
from paraplan.capture import capture, run_program
from paraplan.capture.rewriting import moments
from paraplan.ir.machine.mesh import S
from paraplan.ir.model.program import Program
from paraplan.kernels import expert_kernels
from paraplan.rules.strategies import op_strategies
from paraplan.rules.time_axis import program_micro
from paraplan.rules.workspace import expert_workspace
from tests.captures import program_of


def captured(name: str) -> Program:
    return program_of(name, 0.0)


def test_steps_of_a_short_recurrence_are_one_kind() -> None:
    model, batch = factory(4, 8)
    program = capture(model, batch)
    kinds = [segment.kind for segment in program.segments]
    assert len(program.kinds) <= 7
    assert max(kinds.count(kind) for kind in set(kinds)) >= 4


def test_layers_of_a_decoder_are_equal_up_to_the_last() -> None:
    kinds = [segment.kind for segment in captured("t5").segments]
    assert kinds[-7:-4] == kinds[-4:-1], "both read the encoder's output, one as its last reader"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_a_dim_of_weights_and_compute(name: str) -> None:
    program = captured(name)
    found = [(kind, op) for kind in program.kinds for op in kind.graph.ops if op.target.startswith("paraplan.experts")]
    assert {op.target for _, op in found} == {"paraplan.experts", "paraplan.experts_grad"}
    for kind, op in found:
        strategy = next(s for s in op_strategies(op, kind.graph.values, (2,)) if s.key.split(">")[0] == "e")
        sharded = [kind.graph.values[x] for x, lay in zip(op.tensors, strategy.inputs, strict=True) if lay[0] == S(0)]
        assert len(sharded) == 2 and all(len(spec.shape) >= 3 for spec in sharded), "both weights, and no token"


def test_a_balancing_loss_runs_once_on_the_whole_batch() -> None:
    program = captured("mixtral")
    tail = program_micro(program, 2).tail
    assert 0 < tail < len(program.segments)
    late = {name for segment in program.segments[tail:] for name in segment.params}
    assert not any("experts" in name or "embed" in name for name in late), "the layers run in microbatches"


def test_kernel_and_workspace_agree_on_the_block() -> None:
    assert expert_kernels.BLOCK_ROWS == expert_workspace.BLOCK_ROWS


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: moments.variance(x, (1,), 1.0, False), lambda x: x.var(1)),
        (lambda x: moments.deviation(x, (0, 1), 0.0, True), lambda x: x.std((0, 1), correction=0, keepdim=True)),
        (lambda x: moments.vector_norm(x, 2.0, (1,), False, None), lambda x: torch.linalg.vector_norm(x, dim=1)),
        (lambda x: moments.log_sum_exp(x, (1,), False), lambda x: x.logsumexp(1)),
    ],
)
def test_moments_and_their_gradients_are_torchs(ours, theirs) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    found, wanted = ours(x), theirs(x)
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, wanted)))


class Recurrent(nn.Module):
    """A layer of torch's own, and a loss."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].pow(2).mean()


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(6, 4, 2, batch_first=True),
        nn.LSTM(6, 8, proj_size=4, bidirectional=True),
        nn.GRU(6, 4, bias=False),
        nn.RNN(6, 4),
    ],
)
def test_recurrent_layers_are_unrolled(layer: nn.RNNBase) -> None:
    model, x = Recurrent(layer).double(), torch.randn(4, 6, 6, dtype=torch.float64)
    program = capture(model, {"x": x}, precision="fp64")
    assert not any("lstm" in op.target or "gru" in op.target for kind in program.kinds for op in kind.graph.ops)
    loss, grads = run_program(program, {n: p.detach() for n, p in model.named_parameters()}, {}, {"x": x}, 0)
    wanted = model(x)
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
