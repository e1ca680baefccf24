"""Losses that are more than one mean: sums of themselves, functions of means, learned weights, counts in buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan
from paraplan.capture import capture
from paraplan.capture.reference import run_program
from paraplan.ir.errors import CaptureError
from paraplan.ir.model.program import Program
from paraplan.ir.plan import Plan
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from tests.against_eager import doubled, eager_error
from tests.runtime.pipelines import cut, job_of, pipeline_of

Shape = Callable[["Net", Tensor, Tensor, Tensor], object]


class Net(nn.Module):
    """Two layers and a head, with what losses like to have beside: a learned scale, class weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 6))
        self.shape = shape

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> object:
        h = torch.tanh(self.a(x))
        return self.shape(self, self.c(h + torch.tanh(self.b(h))), y, t)


def net(shape: Shape) -> Net:
    torch.manual_seed(0)
    return Net(shape).train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 6, (4,), generator=generator)
    y[1] = -100
    return {"x": torch.randn(4, 8, generator=generator), "y": y, "t": torch.randn(4, 6, generator=generator)}


def wide() -> dict[str, Tensor]:
    return {name: doubled(x) for name, x in batch().items()}


def planned(program: Program, devices: int, **pins: int) -> Plan:
    return search(job_of(program, devices, "momentum"), Constraints(**pins), certify=False).plan


def loss_of(model: nn.Module, given: object) -> Tensor:
    return model(**given)  # type: ignore[arg-type, no-any-return]


LINEAR: dict[str, Shape] = {
    "added to itself": lambda m, z, y, t: (lambda l: l + l)(F.cross_entropy(z, y)),
    "three times": lambda m, z, y, t: (lambda l: l + l + l)(F.cross_entropy(z, y)),
    "and its multiple": lambda m, z, y, t: (lambda l: 2 * l + l)(F.mse_loss(z, t)),
    "and scaled by a parameter": lambda m, z, y, t: (lambda l: l + l * m.scale)(F.cross_entropy(z, y)),
    "learned uncertainty": lambda m, z, y, t: F.cross_entropy(z, y) * torch.exp(-m.scale) + m.scale,
    "less a constant": lambda m, z, y, t: 1 - F.cross_entropy(z, y) / 3,
    "stacked": lambda m, z, y, t: torch.stack([F.cross_entropy(z, y), F.mse_loss(z, t)]).sum(),
    "each sample's": lambda m, z, y, t: (F.cross_entropy(z, y, reduction="none") * t.mean(1)).mean(),
    "class weights": lambda m, z, y, t: F.cross_entropy(z, y, weight=m.weights),
    "class weights computed": lambda m, z, y, t: F.cross_entropy(z, y, weight=torch.softmax(m.weights, 0)),
}
CURVED: dict[str, Shape] = {
    "root": lambda m, z, y, t: F.mse_loss(z, t).sqrt(),
    "square": lambda m, z, y, t: F.cross_entropy(z, y) ** 2,
    "maximum": lambda m, z, y, t: torch.maximum(F.mse_loss(z, t), F.l1_loss(z, t)),
    "logsumexp": lambda m, z, y, t: torch.logsumexp(torch.stack([F.mse_loss(z, t), F.l1_loss(z, t)]), 0),
    "worst samples": lambda m, z, y, t: torch.topk((z - t).pow(2).mean(1), 2).values.mean(),
    "over itself": lambda m, z, y, t: (lambda l: l / l.detach())(F.mse_loss(z, t)),
    "and scaled by what is detached": lambda m, z, y, t: (lambda l: l + l * z.detach().abs().mean())(F.mse_loss(z, t)),
    "quotient": lambda m, z, y, t: F.mse_loss(z, t) / F.l1_loss(z, t),
}


@cache
def program_of(name: str) -> Program:
    """Of a net with that loss."""
    return capture(net((LINEAR | CURVED)[name]), batch(), precision="fp64")


@pytest.mark.parametrize("name", [*LINEAR, *CURVED])
def test_a_loss_equals_eager_on_one_device_and_under_data_parallel(name: str) -> None:
    shape = (LINEAR | CURVED)[name]
    program = program_of(name)
    for plan in (planned(program, 1, microbatches=1), planned(program, 2, dp=2, microbatches=1)):
        assert eager_error(plan, net(shape), batch(), loss_of) <= 1e-9


@pytest.mark.parametrize("name", [*LINEAR, *CURVED])
def test_the_captured_program_alone_gives_a_loss_and_its_gradients(name: str) -> None:
    """What plans are checked against; counts of class weights come from buffers."""
    model = net((LINEAR | CURVED)[name]).double()
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    loss, grads = run_program(program_of(name), {name: x.detach() for name, x in params.items()}, buffers, wide())
    own = loss_of(model, wide())
    own.backward()
    assert abs(float(loss) - float(own)) <= 1e-12
    for name, x in params.items():
        found = grads.get(name)
        assert x.grad is None or (found is not None and torch.allclose(found, x.grad, atol=1e-12))


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_loss_equals_eager_over_microbatches_and_stages(name: str) -> None:
    program = program_of(name)
    one = planned(program, 1, microbatches=2)
    for plan in (one, pipeline_of(one, "1f1b", 2, cut(len(program.segments), 2))):
        assert eager_error(plan, net(LINEAR[name]), batch(), loss_of) <= 1e-9


NAMED: dict[str, tuple[Shape, dict[str, float]]] = {
    "one loss twice": (lambda m, z, y, t: (lambda l: {"loss": l, "nll": l})(F.cross_entropy(z, y)), {}),
    "weighted": (lambda m, z, y, t: (lambda l: {"a": l, "b": l})(F.mse_loss(z, t)), {"b": 0.5}),
    "and its multiple": (lambda m, z, y, t: (lambda l: {"a": l, "b": -2 * l})(F.mse_loss(z, t)), {}),
    "sum and parts": (
        lambda m, z, y, t: (lambda l, k: {"a": l + k, "b": l, "c": k})(F.mse_loss(z, t), F.cross_entropy(z, y)),
        {"a": 2.0},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_losses_that_are_one_node_are_each_counted(name: str) -> None:
    shape, weights = NAMED[name]
    names = list(net(shape)(**batch()))
    choice = {each: weights.get(each, 1.0) for each in names}

    def total(model: nn.Module, given: object) -> Tensor:
        found = loss_of(model, given)
        return sum(weight * found[each] for each, weight in choice.items())  # type: ignore[call-overload, no-any-return]

    program = capture(net(shape), batch(), precision="fp64", loss=choice)
    for plan in (planned(program, 1, microbatches=2), planned(program, 2, dp=2, microbatches=1)):
        assert eager_error(plan, net(shape), batch(), total) <= 1e-9


def test_fit_counts_a_loss_as_often_as_it_is_added() -> None:
    model, free = net(LINEAR["added to itself"]).double(), net(LINEAR["added to itself"]).double()
    fitted = paraplan.fit(model, wide(), memory="1GiB", cluster="local:1", time_limit_s=2)
    for each in (fitted, free):
        each(**wide()).backward()
    torch.testing.assert_close(model.a.weight.grad, free.a.weight.grad, rtol=1e-9, atol=0)


def test_where_all_labels_are_ignored_the_loss_is_nan_and_gradients_are_zero() -> None:
    model = net(lambda m, z, y, t: F.cross_entropy(z, y)).double()
    fitted = paraplan.fit(model, wide(), memory="1GiB", cluster="local:1", time_limit_s=2)
    loss = fitted(**(wide() | {"y": torch.full((4,), -100)}))
    loss.backward()
    assert bool(loss.isnan())
    assert not any(bool(param.grad.count_nonzero()) for param in model.parameters() if param.grad is not None)
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("name", ["square", "worst samples", "and scaled by what is detached"])
def test_a_function_of_a_mean_equals_eager_over_microbatches(name: str) -> None:
    program = capture(net(CURVED[name]), batch(), precision="fp64")
    assert eager_error(planned(program, 1, microbatches=2), net(CURVED[name]), batch(), loss_of) <= 1e-9


def test_class_weights_may_count_the_batch() -> None:
    def counted(model: Net, z: Tensor, y: Tensor, t: Tensor) -> Tensor:
        seen = F.one_hot(y.clamp(0), 6).sum(0).to(z.dtype)
        return F.cross_entropy(z, y, weight=1 / (seen + 1))

    program = capture(net(counted), batch(), precision="fp64")
    for pins in ({"dp": 2, "microbatches": 1}, {"tp": 2, "microbatches": 1}, {"dp": 2, "microbatches": 2}):
        assert eager_error(planned(program, 2, **pins), net(counted), batch(), loss_of) <= 1e-9


@pytest.mark.parametrize(
    "shape",
    [
        lambda m, z, y, t: {"nll": F.cross_entropy(z, y), "logits": z},
        lambda m, z, y, t: (z, F.cross_entropy(z, y)),
    ],
)
def test_the_only_scalar_of_an_output_is_the_loss(shape: Shape) -> None:
    model, free = net(shape).double(), net(shape).double()
    fitted = paraplan.fit(model, wide(), memory="1GiB", cluster="local:1", time_limit_s=2)
    for each in (fitted, free):
        result = each(**wide())
        loss = result["nll"] if isinstance(result, dict) else result[1]
        loss.backward()
    torch.testing.assert_close(model.a.weight.grad, free.a.weight.grad, rtol=1e-9, atol=0)


class Reversal(torch.autograd.Function):
    """Hands its input on, and a gradient of the other sign back (Ganin et al. 2016)."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


class Adversarial(nn.Module):
    """Two heads of one encoder, one behind a gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.label, self.domain = nn.Linear(8, 6), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        h = self.encoder(x)
        back = Reversal.apply(h)  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.label(h), y) + F.mse_loss(self.domain(back), t)


def test_a_segment_that_hands_its_input_on_is_planned() -> None:
    torch.manual_seed(0)
    model = Adversarial()
    program = capture(model, batch(), precision="fp64")
    handed = [o for s in program.segments for o in program.kinds[s.kind].outputs if o in program.kinds[s.kind].inputs]
    assert handed
    for plan in (planned(program, 1, microbatches=2), planned(program, 2, dp=2, zero=3)):
        assert eager_error(plan, model, batch(), loss_of) <= 1e-9


def test_a_loss_function_with_parameters_of_its_own_is_refused_by_its_line() -> None:
    scale = nn.Parameter(torch.tensor(2.0))
    head = nn.Linear(8, 6)
    with pytest.raises(CaptureError, match=r"test_loss_terms.py.*shape \(\) that requires a gradient is no parameter"):
        capture(head, {"input": torch.randn(4, 8)}, loss_fn=lambda out, given: (out * scale).pow(2).mean())
    loss_fn = nn.MSELoss()
    captured = capture(
        head, {"input": torch.randn(4, 8)}, loss_fn=lambda out, given: loss_fn(out, 2 * scale.detach() + out.detach())
    )
    assert list(captured.params) == ["weight", "bias"]
