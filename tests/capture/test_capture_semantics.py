"""What capture must keep: no_grad, ties, frozen and unused parameters, losses, constants, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture
from paraplan.capture.precision import default_dtype
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.graph import Phase
from paraplan.ir.model.seeds import segment_seed
from paraplan.rules.time_axis import splittable
from tests.capture.models import MLP, batch_of, build, captured, eager, run, worst_error


class Base(nn.Module):
    """Two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


def check(model: nn.Module, batch: dict[str, Tensor], loss_fn=None, bound: float = 1e-9):
    """Captures in fp64 and compares with eager."""
    program = capture(model, batch, precision="fp64", loss_fn=loss_fn)
    loss, grads = run(program, model, batch)
    wanted_loss, wanted = eager(model, batch, "fp64", loss_fn)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=bound)
    assert worst_error(grads, wanted) <= bound
    return program, grads


X = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(3))}


def test_no_grad_block_that_reads_a_parameter() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.a.weight.abs().sum() + self.a(x).sum(-1, keepdim=True)
            return (self.b(self.a(x)) * scale).pow(2).mean()

    check(Model(), X)


def test_tied_weights_sum_their_gradients() -> None:
    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)) + x).pow(2).mean()

    program, _ = check(Model(), X)
    assert program.params["a.weight"].aliases == ("b.weight",) and "b.weight" not in program.params


def test_unused_parameter_has_no_gradient() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).pow(2).mean()

    program, grads = check(Model(), X)
    assert grads["b.weight"] is None and "b.weight" in program.params


def test_frozen_parameters_have_no_backward() -> None:
    model = MLP(3)
    model.blocks[0].requires_grad_(False)
    model.blocks[2].weight.requires_grad_(False)
    program, grads = check(model, batch_of("mlp"))
    assert grads["blocks.0.weight"] is None and not program.params["blocks.0.weight"].trainable
    first = program.kinds[program.segments[0].kind]
    assert not any(op.phase is Phase.BACKWARD for op in first.graph.ops)
    weights = [op for kind in program.kinds for op in kind.graph.ops if op.target == "paraplan.linear_grad_weight"]
    assert len(weights) == 2


def test_frozen_gpt2_body_trains_its_head() -> None:
    model, batch = build("gpt2", 3), batch_of("gpt2")
    for name, param in model.named_parameters():
        param.requires_grad_("ln_f" in name or "h.2" in name)
    program, grads = check(model, batch, bound=1e-5)
    assert {name for name, g in grads.items() if g is not None} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    assert len({s.kind for s in program.segments}) <= 7


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_cross_entropy_forms(reduction: str) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    labels = torch.randint(0, 8, (6,))
    labels[2] = -100
    weight = torch.rand(8, dtype=torch.float64)
    for extra in (
        {},
        {"label_smoothing": 0.1},
        {"weight": weight.float()},
        {"weight": weight.float(), "label_smoothing": 0.2},
    ):

        def loss_fn(out: Tensor, batch: dict[str, Tensor], extra=extra) -> Tensor:
            more = {k: v.to(out.dtype) if isinstance(v, Tensor) else v for k, v in extra.items()}
            return F.cross_entropy(out, labels_of(batch), reduction=reduction, **more)

        def labels_of(batch: dict[str, Tensor]) -> Tensor:
            return (batch["x"][:, 0] > 0).long() * 3

        program, _ = check(Model(), X, loss_fn, 1e-9)
        assert len(program.denominators) == (1 if reduction == "mean" else 0)


def test_cross_entropy_with_the_class_dim_second() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.a(x).transpose(1, 2), y, ignore_index=1)

    check(Model(), {"x": torch.randn(3, 4, 8), "y": torch.randint(0, 5, (3, 4))})


@pytest.mark.parametrize(
    "name", ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
)
def test_elementwise_losses_become_sums(name: str) -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    def loss_fn(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return getattr(F, name)(out, batch["x"].sigmoid())

    program, _ = check(Model(), X, loss_fn)
    assert not any(name in op.target for kind in program.kinds for op in kind.graph.ops)


ROWS = torch.arange(1.0, 7.0, dtype=torch.float64)
CLASSES = torch.arange(1.0, 9.0, dtype=torch.float64)
CLASS_LOSSES = {
    "per sample": lambda z, y: (F.cross_entropy(z, y, reduction="none") * ROWS).mean(),
    "focal": lambda z, y: ((1 - torch.exp(-F.cross_entropy(z, y, reduction="none"))) ** 2).sum(),
    "smoothed": lambda z, y: F.cross_entropy(z, y, reduction="none", label_smoothing=0.2).square().mean(),
    "shares": lambda z, y: F.cross_entropy(z, z.detach().softmax(-1), label_smoothing=0.1),
    "weighted shares": lambda z, y: F.cross_entropy(z, z.detach().softmax(-1), CLASSES.to(z.dtype)),
    "likelihood": lambda z, y: F.nll_loss(z.log_softmax(-1), y, ignore_index=2),
    "weighted likelihood": lambda z, y: F.nll_loss(z.log_softmax(-1), y, CLASSES.to(z.dtype), reduction="sum"),
    "likelihood of rows": lambda z, y: (
        F.nll_loss(z.view(2, 3, 8).log_softmax(-1).transpose(1, 2), y.view(2, 3), reduction="none").square().mean()
    ),
    "binary": lambda z, y: F.binary_cross_entropy(z.sigmoid(), (z.detach() > 0).to(z.dtype)),
    "weighted binary": lambda z, y: F.binary_cross_entropy(
        z.sigmoid(), z.detach().cos().square(), CLASSES.to(z.dtype), reduction="sum"
    ),
}


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_losses_of_classes_split_over_the_batch(name: str) -> None:
    class Model(Base):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return CLASS_LOSSES[name](self.b(self.a(x)), y)

    program, _ = check(Model(), {**X, "y": torch.tensor([0, 1, 2, 3, 4, 5])})
    assert splittable(program, 2) and splittable(program, 3)


def test_a_view_of_what_is_written_in_place_is_forward() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 7, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.pad(self.a(x), (1, 1, 1, 1), mode="circular")[:, :, 2:, :-2]).square().mean()

    program, _ = check(Model(), {"x": torch.randn(4, 3, 4, 4)})
    assert splittable(program, 2)
    for kind in program.kinds:
        phases = [op.phase for op in kind.graph.ops]
        assert phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)


def test_an_addend_added_to_itself_first_meets_one_gradient() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.a(x))
            return (self.b(h + h) - 1).abs().mean()

    program, _ = check(Model(), X)
    assert splittable(program, 2)


def test_floats_made_of_integers_are_float64() -> None:
    """A count the user takes the inverse of, positions and their frequencies, a mask times a number."""

    class Model(Base):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            angle = torch.arange(8) / 10.0 ** (torch.arange(8) / 7)
            keep = y >= 0
            rows = (
                (self.a(x) * angle.cos() * torch.linspace(-1, 1, 8) + torch.sqrt(y.clamp(min=0) + 1)[:, None])
                .square()
                .sum(-1)
            )
            return (rows * (keep * 0.3)).sum() / keep.sum()

    model, batch = Model(), {**X, "y": torch.tensor([1, 2, 3, -1, -1, 6])}
    loss, grads = run(capture(model, batch, precision="fp64"), model, batch)
    with default_dtype(torch.float64):
        wanted_loss, wanted = eager(model, batch, "fp64", None)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-14)
    assert worst_error(grads, wanted) <= 1e-14


def test_loss_of_several_terms() -> None:
    class Model(Base):
        def forward(self, x: Tensor, y: Tensor, keep: Tensor) -> dict[str, Tensor]:
            hidden = self.a(x)
            logits = self.b(hidden)
            rows = (logits.pow(2).sum(-1) * keep).sum() / keep.sum()
            return {"loss": F.cross_entropy(logits, y) * 0.5 + 0.1 * rows - hidden.mean() / 4}

    batch = {"x": X["x"], "y": torch.tensor([0, 1, -100, 3, 4, 5]), "keep": torch.tensor([1.0, 0, 1, 1, 0, 1])}

    class Wrapped(Model):
        pass

    program, _ = check(Wrapped(), batch, lambda out, _: out["loss"])
    assert len(program.loss) == 3 and len(program.denominators) == 2
    plain = capture(Model(), batch)
    assert len(plain.loss) == 3


def test_dropout_differs_between_instances_and_repeats_with_the_seed() -> None:
    model, batch = MLP(3, 0.5), batch_of("mlp")
    program = capture(model, batch, precision="fp64")
    first, again, other = (float(run(program, model, batch, seed)[0]) for seed in (1, 1, 2))
    assert first == again != other
    repeated = [s for s in program.segments if s.kind == program.segments[1].kind]
    assert len(repeated) >= 2


@pytest.mark.parametrize("kind", ("gpt2", "bert", "t5"))
def test_gradients_with_dropout_follow_the_loss(kind: str) -> None:
    """Directional derivative of the program's own loss (its masks depend on the seed alone)."""
    model, batch = build(kind, 2, 0.1), batch_of(kind)
    program = captured(kind, 2, 0.1, "fp64")
    _, grads = run(program, model, batch)
    start = {name: param.detach().double() for name, param in model.named_parameters()}
    step = {name: torch.randn_like(value) for name, value in start.items()}
    slope = sum(float((g * step[name]).sum()) for name, g in grads.items() if g is not None)
    losses = []
    model = model.double()
    for sign in (1, -1):
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(start[name] + sign * 1e-6 * step[name])
        losses.append(float(run(program, model, batch)[0]))
    assert (losses[0] - losses[1]) / 2e-6 == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_positional_inputs_and_inputs_without_a_batch_dim() -> None:
    class Model(Base):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return (self.b(self.a(x)) * table).pow(2).mean()

    program = capture(Model(), (X["x"], torch.randn(1, 8)))
    assert program.batch["x"].batch_dim == 0 and program.batch["table"].batch_dim is None and program.batch_size == 6
    with pytest.raises(CaptureError, match="batch_dims"):
        capture(Model(), (X["x"], torch.randn(8)))
    assert capture(Model(), (X["x"], torch.randn(8)), batch_dims={"table": None}).batch["table"].batch_dim is None


def test_small_constants_are_written_and_large_ones_refused() -> None:
    class Model(Base):
        def __init__(self, size: int):
            super().__init__()
            self.size = size

        def forward(self, x: Tensor) -> Tensor:
            table = torch.tensor([float(i) for i in range(self.size)])
            return (self.b(self.a(x)) * table[:8]).pow(2).mean()

    program, _ = check(Model(8), X, bound=1e-9)
    assert any(op.target == "paraplan.constant" for kind in program.kinds for op in kind.graph.ops)
    with pytest.raises(CaptureError, match="register_buffer"):
        capture(Model(5000), X)


def test_constant_mask_becomes_causal() -> None:
    class Model(Base):
        def forward(self, x: Tensor) -> Tensor:
            q = self.a(x).view(2, 3, 2, 4).transpose(1, 2)
            mask = torch.ones(3, 3, dtype=torch.bool).tril()
            return self.b(F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).reshape(6, 8)).pow(2).mean()

    program, _ = check(Model(), X)
    (op,) = [op for kind in program.kinds for op in kind.graph.ops if op.target == "paraplan.attention"]
    assert op.args[3] is None and op.args[7] is True


def test_segment_seeds_are_distinct_and_fit_int64() -> None:
    seeds = {segment_seed(base, step, segment) for base in (0, 1, 2**63) for step in range(4) for segment in range(4)}
    assert len(seeds) == 48 and all(0 <= seed < 2**63 for seed in seeds)
    assert segment_seed(7, 3, 1) == segment_seed(7, 3, 1)


class TestErrors:
    """Each message holds the user's line and a way out."""

    def test_data_dependent_control_flow(self) -> None:
        class Model(Base):
            def forward(self, x: Tensor) -> Tensor:
                if x.sum() > 0:  # the line to show
                    return self.a(x).mean()
                return self.b(x).mean()

        with pytest.raises(
            CaptureError, match=r"test_capture_semantics.py:\d+, in forward: if x.sum\(\) > 0.*torch.where"
        ):
            capture(Model(), X)

    def test_item(self) -> None:
        class Model(Base):
            def forward(self, x: Tensor) -> Tensor:
                return self.a(x).mean() * float(x.max().item())

        with pytest.raises(CaptureError, match=r"test_capture_semantics.py:\d+.*\.item\(\)"):
            capture(Model(), X)

    def test_missing_loss(self) -> None:
        class Model(Base):
            def forward(self, x: Tensor) -> Tensor:
                return self.a(x)

        with pytest.raises(CaptureError, match="loss_fn"):
            capture(Model(), X)
        batch = batch_of("gpt2")
        with pytest.raises(CaptureError, match="labels"):
            capture(build("gpt2"), {"input_ids": batch["input_ids"]})

    def test_nothing_to_train(self) -> None:
        model = MLP()
        model.requires_grad_(False)
        with pytest.raises(CaptureError, match="no trainable parameter"):
            capture(model, batch_of("mlp"))

    def test_random_numbers(self) -> None:
        class Model(Base):
            def forward(self, x: Tensor) -> Tensor:
                return self.a(x)[torch.multinomial(torch.ones(6), 3)].mean()

        with pytest.raises(CaptureError, match=r"test_capture_semantics.py:\d+.*random"):
            capture(Model(), X)

    def test_wrong_precision(self) -> None:
        with pytest.raises(CaptureError, match="fp4"):
            capture(MLP(), batch_of("mlp"), precision="fp4")
