"""What users write, checked: no false alarm, no crash, and random numbers replayed wherever they are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import paraplan
from paraplan.ir.errors import PlanMismatchError
from paraplan.jobs.checking.check import max_error
from paraplan.jobs.checking.differences import differences
from tests.jobs.checking.checked import Run, batch, captured, check, planned


class Base(nn.Module):
    """A classifier with something in its middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 6)
        self.setup()

    def setup(self) -> None:
        pass

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.last(self.middle(torch.tanh(self.first(x)))), y)


class Checkpointed(Base):
    def middle(self, h: Tensor) -> Tensor:
        def inner(t: Tensor) -> Tensor:
            return F.dropout(F.dropout(t, 0.3).sin(), 0.2)

        return checkpoint(inner, F.dropout(h, 0.1), use_reentrant=False)  # type: ignore[no-any-return]


class Drawn(Base):
    """Every function of torch that is captured as random."""

    def middle(self, h: Tensor) -> Tensor:
        keep = 0.8
        h = h + h.sin() / keep * (keep + torch.rand(h.shape[0], 1)).floor()
        h = F.alpha_dropout(F.dropout1d(h.view(2, 4, 16), 0.3, True), 0.2, True).reshape(8, 16)
        h = h + 0.1 * torch.randn_like(h) + torch.empty_like(h).exponential_(2.0) + torch.empty_like(h).uniform_(-1, 2)
        return h + torch.randint(0, 5, (16,)) + torch.bernoulli(torch.full((16,), 0.3)) + torch.empty(16).normal_(1, 3)


class Frozen(Base):
    """A parameter that is not trained has no copy of its own in float32."""

    def setup(self) -> None:
        self.first.bias.requires_grad_(False)


class Attending(Base):
    def setup(self) -> None:
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)

    def middle(self, h: Tensor) -> Tensor:
        return self.layer(h.view(2, 4, 16)).reshape(8, 16)  # type: ignore[no-any-return]


class InAnotherView(Base):
    """A dropout of heads put together, which the program has before that, beside draws of the same shape."""

    def setup(self) -> None:
        self.heads, self.joined = nn.Linear(16, 16), nn.Linear(16, 16)

    def middle(self, h: Tensor) -> Tensor:
        q = self.heads(F.dropout(h, 0.1)).view(2, 4, 2, 8).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(2, 4, 16)
        return F.dropout(self.joined(F.dropout(mixed, 0.2)), 0.1).reshape(8, 16)


class Unread(Base):
    """A draw that nothing reads: places cannot be matched."""

    def middle(self, h: Tensor) -> Tensor:
        F.dropout(h, 0.3)
        return F.dropout(h, 0.3)


class Odd(Base):
    """Parameters and buffers of every kind."""

    def setup(self) -> None:
        self.mask = nn.Parameter(torch.arange(16) % 2 == 0, requires_grad=False)
        self.order = nn.Parameter(torch.arange(16), requires_grad=False)
        self.unused, self.nothing = nn.Linear(3, 3), nn.Parameter(torch.zeros(0, 4))
        self.spectrum = nn.Parameter(torch.randn(9, dtype=torch.cfloat))
        self.table, self.first.weight.requires_grad = nn.Embedding(6, 16, sparse=True), False
        self.register_buffer("flag", torch.zeros(16, dtype=torch.bool))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("nan", torch.tensor([float("nan"), 1.0, float("inf")]))
        self.register_buffer("mean", torch.zeros(16))
        self.scale = torch.tensor(0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) + self.table(y)
        self.flag.copy_(h.detach().mean(0) > 0)
        self.nan.mul_(2)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        h = torch.where(self.mask, h, -h) * (self.order > 3) - self.mean
        h = torch.fft.irfft(torch.fft.rfft(h) * self.spectrum, n=16)
        return F.cross_entropy(self.last(h * self.scale), y)


class NoNumber(Base):
    def middle(self, h: Tensor) -> Tensor:
        return h * float("nan")


class Islands(Base):
    """Computes partly in float32, whatever its parameters are."""

    def middle(self, h: Tensor) -> Tensor:
        return F.layer_norm(h.float(), (16,)).to(h.dtype)


@dataclass
class Out:
    logits: Tensor
    loss: Tensor


class Returning(Base):
    def forward(self, x: Tensor, y: Tensor) -> Out:
        logits = self.last(torch.tanh(self.first(x)))
        return Out(logits, F.cross_entropy(logits, y))


@pytest.mark.parametrize(
    ("made", "precision"),
    [(Checkpointed, "fp64"), (Drawn, "fp64"), (InAnotherView, "fp64"), (Attending, "fp32")],
)
def test_random_numbers_are_replayed(made: type[Base], precision: str) -> None:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    errors = check(made(), lambda step: batch(step, dtype), precision=precision)
    assert errors.failure == "" and "replayed by position" in errors.how
    assert errors.eager <= (1e-9 if precision == "fp64" and "narrower" not in errors.how else 1e-5)


def test_draws_that_cannot_be_matched_share_numbers() -> None:
    errors = check(Unread())
    assert errors.failure == "" and errors.eager <= 1e-9
    assert "the eager model draws 8 x 16 numbers that the program does not" in errors.how


@pytest.mark.parametrize("made", [Odd, NoNumber, Returning], ids=lambda made: made.__name__)
def test_odd_models_pass(made: type[Base]) -> None:
    errors = check(made())
    assert errors.failure == "" and errors.eager <= 1e-9


def test_islands_are_detected() -> None:
    errors = check(Islands())
    assert errors.failure == "" and 1e-9 < errors.eager <= 1e-5
    assert "narrower floats" in errors.how


@pytest.mark.parametrize("made", [Attending, Frozen], ids=lambda made: made.__name__)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_half_precision_is_bounded_by_eager_rounding(precision: str, made: type[Base]) -> None:
    plan = planned(captured(made(), batch(0, torch.float32), precision), dp=2, microbatches=1)
    errors = Run(plan, made(), lambda step: batch(step, torch.float32)).steps(2)
    assert errors.failure == "" and 1e-5 < errors.eager < 1 and "times the rounding of eager" in errors.how


class Convolutions(nn.Module):
    """Norms over few numbers and thresholds behind them: a rounding moves an element over one, or does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.again = nn.Conv2d(16, 128, 3, stride=2, padding=1), nn.BatchNorm2d(128)
        self.third, self.groups = nn.Conv2d(128, 128, 3, stride=2, bias=False), nn.GroupNorm(8, 128)
        self.last = nn.Linear(128, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.again(self.second(F.relu(self.norm(self.first(x))))))
        return F.cross_entropy(self.last(F.relu(self.groups(self.third(x))).mean((2, 3))), y)


def images(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 3, 8, 8, generator=draw), "y": torch.randint(10, (8,), generator=draw)}


def failure(model: nn.Module, inputs: dict[str, Tensor], spoilt: str = "") -> str:
    """What the check of a step under bf16 says, one gradient off by 15 % of its largest element."""
    run = Run(planned(captured(model, inputs, "bf16"), microbatches=1), model, lambda step: inputs)
    loss, grads = float(run.trainer.step(inputs)), run.trainer.grads()
    if spoilt:
        grads[spoilt] = grads[spoilt] + 0.15 * grads[spoilt].abs().max()
    run.single.compare(inputs, None, loss, grads, None)
    return run.single.errors.failure


def test_rounding_is_also_that_under_autocast() -> None:
    """Eager bfloat16 moves nothing over a threshold here, and the plan, as autocast, does."""
    assert failure(Convolutions(), images(0)) == ""


@pytest.mark.parametrize("name", ["last.weight", "last.bias", "groups.weight"])
def test_wrong_gradients_are_seen_where_others_are_noisy(name: str) -> None:
    assert f"gradient of '{name}'" in failure(Convolutions(), images(0), name)


@pytest.mark.parametrize("name", ["first.weight", "last.weight", "last.bias"])
def test_wrong_gradients_of_a_well_conditioned_model_are_seen(name: str) -> None:
    inputs = batch(0, torch.float32)
    assert failure(Base(), inputs) == "" and f"gradient of '{name}'" in failure(Base(), inputs, name)


class Untrained(Base):
    """Parameters that forward never reads, or detached: no step updates them."""

    def setup(self) -> None:
        self.never, self.fixed = nn.Linear(4, 4), nn.Linear(16, 16)

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.fixed(h).sigmoid()
        return h * gate


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_parameters_without_gradients_pass(precision: str) -> None:
    plan = planned(captured(Untrained(), batch(0, torch.float32), precision), dp=2, microbatches=1)
    errors = Run(plan, Untrained(), lambda step: batch(step, torch.float32)).steps(2)
    assert errors.failure == ""


def test_a_loss_that_is_nan_is_told() -> None:
    errors = check(Base(), lambda step: {**batch(step), "x": batch(step)["x"] * float("nan")})
    assert errors.failure == "" and "the loss of step 1 is nan and little is compared" in errors.how


def test_a_loss_with_parameters_and_inputs_of_its_own() -> None:
    loss_layer = nn.Linear(6, 6).double()

    class Logits(Base):
        def setup(self) -> None:
            self.shift = loss_layer

        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return self.last(torch.tanh(self.first(x))) * scale

    def loss_fn(logits: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"ce": F.cross_entropy(logits, given["y"]), "size": logits.square().mean()}

    model = Logits()
    inputs = {**batch(), "scale": 0.5}
    chosen = {"ce": 1.0, "size": 0.25}
    plan = planned(captured(model, inputs, loss_fn=loss_fn, loss=chosen))
    run = Run(plan, model, lambda step: {**batch(step), "scale": 0.5}, loss_fn=loss_fn, choice=chosen)  # type: ignore[dict-item]
    run.inputs = batch
    assert run.steps(2).failure == ""


def test_the_measure() -> None:
    nan = torch.tensor([1.0, float("nan"), float("inf")])
    assert max_error({"a": nan}, {"a": nan.clone()})[0] == 0.0
    assert max_error({"a": nan}, {"a": torch.ones(3)})[0] == float("inf")
    assert max_error({"a": torch.tensor(1001)}, {"a": torch.tensor(1000)})[0] == float("inf")  # exact, however near
    assert max_error({"a": torch.tensor(1 + 1j)}, {"a": torch.tensor(1 + 0j)})[0] == 1.0
    assert max_error({}, {"a": torch.zeros(2)})[0] == 0.0
    assert max_error({}, {"a": torch.ones(2)})[0] == float("inf")
    assert max_error({"a": torch.ones(2)}, {"a": torch.ones(3)})[0] == float("inf")
    assert max_error({"a": torch.zeros(0)}, {"a": torch.zeros(0)})[0] == 0.0
    (found,) = differences({"a": torch.tensor([[1.0, 2.0]])}, {"a": torch.tensor([[1.0, 4.0]])}).values()
    assert (found.error, found.found, found.wanted, found.at) == (0.5, "2", "4", "at [0, 1]")


def test_a_step_that_overflows_in_fp16_is_skipped_everywhere() -> None:
    class Steep(Base):
        def middle(self, h: Tensor) -> Tensor:
            return h * 8

    class Summed(Steep):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.last(self.middle(torch.tanh(self.first(x)))), y, reduction="sum")

    plan = planned(captured(Summed(), batch(0, torch.float32), "fp16"), dp=2, microbatches=1)
    run = Run(plan, Summed(), lambda step: batch(step, torch.float32), scaled=True)
    assert run.steps(1).failure == "" and "overflow" in run.single.errors.how
    assert run.steps(4).failure == ""


class Labelled(nn.Module):
    """Tokens, of which a label says whether they count; dropout or none."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.drop, self.emb, self.head = drop, nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = F.dropout(self.emb(ids), self.drop, self.training)
        pairs = h.view(h.shape[0], 4, 2, 4).transpose(1, 2)
        mixed = torch.softmax(pairs @ pairs.transpose(-1, -2), -1) @ pairs
        h = mixed.transpose(1, 2).reshape(h.shape)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_a_smaller_last_batch_is_padded_as_the_trainer_pads_it(drop: float) -> None:
    def rows(count: int) -> dict[str, Tensor]:
        return {name: torch.randint(0, 16, (count, 4)) for name in ("ids", "labels")}

    plan = paraplan.compile(Labelled(drop), "local:2", example_inputs=rows(8), dp=2)
    assert plan.check(Labelled(drop), [rows(8), rows(6), rows(3)]).startswith("3 steps are the eager model's")


def test_a_smaller_batch_that_cannot_be_padded_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inputs = {"input": torch.randn(8, 4)}
    plan = paraplan.compile(model, "local:2", example_inputs=inputs, loss_fn=lambda y, b: y.square().mean(), dp=2)
    with pytest.raises(PlanMismatchError, match="cannot be padded"):
        plan.check(model, [{"input": torch.randn(6, 4)}], loss_fn=lambda y, b: y.square().mean())
