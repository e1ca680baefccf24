"""What users write beside layers: functions of autograd, hooks, random numbers, tensors written over."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.ir.errors import CaptureError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.kernels import reference_kernels
from paraplan.lowering.verification.verify_plan import verify_plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.in_process import InProcessTrainer
from tests.capture.models import eager, run, worst_error
from tests.numerics import relative_error

X = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)}


class Written(nn.Module):
    """Two linears around what a test writes between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.tanh(self.first(x)))).pow(2).mean()


def as_eager(between: Callable[[Tensor], Tensor]) -> None:
    model = Written(between).double()
    program = capture(model, X, precision="fp64")
    loss, grads = run(program, model, X)
    wanted_loss, wanted = eager(model, X, "fp64", None)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-12)
    assert worst_error(grads, wanted) <= 1e-12


class Reversed(torch.autograd.Function):
    """The identity, whose gradient turns round (Ganin, Lempitsky 2015)."""

    @staticmethod
    def forward(ctx, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


class Fired(torch.autograd.Function):
    """A step with a slope made up, and how far from it; in the new style."""

    @staticmethod
    def forward(x: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
        return (x > threshold).to(x.dtype), x - threshold

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: object) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, fired: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
        x, threshold = ctx.saved_tensors
        grad = fired / (1 + (x - threshold).abs()) ** 2 + apart
        return grad, -grad.sum(0)


class Noisy(torch.autograd.Function):
    """Draws inside, where nobody can follow."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def test_functions_of_autograd_keep_their_backward() -> None:
    as_eager(lambda x: Reversed.apply(x, 0.5) + Reversed.apply(x.sin(), 2.0))
    as_eager(lambda x: torch.cat(Fired.apply(x, x.mean(0)), -1)[:, 4:12])


class Factor:
    """A number that no text of the object shows."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "Factor()"


class Side(enum.Enum):
    LEFT = 2.0
    RIGHT = 3.0

    def __repr__(self) -> str:
        return "a side"


class Scaled(torch.autograd.Function):
    """Times the number of an object, with a slope made up."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor.value
        return x * factor.value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.factor * grad, None


def _scaled_by(value: float) -> type[torch.autograd.Function]:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * value

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return 2 * value * grad

    return Own


class Layers(nn.Module):
    """Equal layers, each with a function of its own after it."""

    def __init__(self, after: Callable[[int, nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.after = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), after
        for index, layer in enumerate(self.layers):
            layer.value = 1.0 + index

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.after(index, layer, torch.tanh(layer(x)))
        return x.pow(2).mean()


OF_LAYERS: dict[str, Callable[[int, nn.Module, Tensor], Tensor]] = {
    "object": lambda index, layer, x: Scaled.apply(x, Factor(1.0 + index)),
    "module": lambda index, layer, x: Scaled.apply(x, layer),
    "enum": lambda index, layer, x: Scaled.apply(x, Side.LEFT if index % 2 else Side.RIGHT),
    "class": lambda index, layer, x: _scaled_by(1.0 + index).apply(x),
}


@pytest.mark.parametrize("kind", OF_LAYERS)
def test_functions_of_equal_text_that_compute_something_else(kind: str) -> None:
    model = Layers(OF_LAYERS[kind]).double()
    loss, grads = run(capture(model, X, precision="fp64"), model, X)
    wanted_loss, wanted = eager(model, X, "fp64", None)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-12)
    assert worst_error(grads, wanted) <= 1e-12


def test_equal_functions_of_equal_layers_are_one_kind() -> None:
    equal = capture(Layers(lambda index, layer, x: Reversed.apply(x, 0.5)).double(), X, precision="fp64")
    differing = capture(Layers(lambda index, layer, x: Reversed.apply(x, 0.5 + index)).double(), X, precision="fp64")
    assert len(equal.kinds) < len(differing.kinds)


SCALE = Factor(1.0)


def test_functions_whose_numbers_change_in_a_forward_are_refused() -> None:
    def of_a_global(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        SCALE.value = 1.0 + index
        return Scaled.apply(x, SCALE)

    factor = Factor(1.0)

    def of_a_variable(index: int, layer: nn.Module, x: Tensor) -> Tensor:
        made = Scaled.apply(x, factor)
        factor.value *= 1.5
        return made

    for after in (of_a_global, of_a_variable):
        with pytest.raises(CaptureError, match=r"Scaled\.apply is called, and what it reads of Python .* is changed"):
            capture(Layers(after).double(), X, precision="fp64")


def test_tensors_that_a_function_is_not_given_are_refused() -> None:
    def scaled(x: Tensor) -> Tensor:
        return Scaled.apply(x, Factor(torch.tensor(2.0)))

    with pytest.raises(CaptureError, match="a function of autograd reads a tensor that is none of its arguments"):
        capture(Written(scaled).double(), X, precision="fp64")


class Doubling(TorchDispatchMode):
    """Makes something else of an op than a graph has."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.ops.aten.sin.default else made


def test_what_changes_ops_or_saved_tensors_unseen_is_refused() -> None:
    def dispatched(x: Tensor) -> Tensor:
        with Doubling():
            return x.sin()

    def packed(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda saved: saved.float(), lambda saved: saved.double()):
            return x.sin()

    def on_host(x: Tensor) -> Tensor:
        with save_on_cpu():
            return x.sin()

    for between, said in ((dispatched, "Doubling, a TorchDispatchMode"), (packed, "saved_tensors_hooks")):
        with pytest.raises(CaptureError, match=f"test_user_code.*the forward enters {said}"):
            capture(Written(between).double(), X, precision="fp64")
    as_eager(on_host)


def test_what_inference_mode_makes_has_no_gradient() -> None:
    def scaled(x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = x.exp()
            with torch.inference_mode(False):
                grown = x.cos()
        return x * scale.clone() + grown

    as_eager(scaled)


def test_a_gradient_that_is_written_to_a_detached_tensor_is_kept() -> None:
    def detached(x: Tensor) -> Tensor:
        y = torch.ones_like(x).mul(2).detach()
        y[:, 1] = x[:, 0]
        return y * x

    def under_no_grad(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        part = y[:, :4]
        part[:, 1] = x[:, 0]
        return y * x

    def of_a_gradient(x: Tensor) -> Tensor:
        y = (x * 2).detach()
        y[:, 1] = x[:, 0]
        with torch.no_grad():
            z = x.sin().detach()
            z.mul_(2)
        return y * z + x

    def read_else(x: Tensor) -> Tensor:
        y = torch.ones_like(x).mul(2)
        z = y.detach()
        z[:, 1] = x[:, 0]
        return x * y + z

    def written_before(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, :4] = x[:, :4]
        with torch.no_grad():
            y.mul_(0.5)
        return y

    as_eager(detached)
    as_eager(under_no_grad)
    as_eager(of_a_gradient)
    with pytest.raises(CaptureError, match=r"test_user_code.*detached tensor, whose memory is also read"):
        capture(Written(read_else).double(), X, precision="fp64")
    with pytest.raises(CaptureError, match=r"test_user_code.*writes in place, where autograd does not see it"):
        capture(Written(written_before).double(), X, precision="fp64")


@pytest.mark.parametrize("equation", ["ij->ji", " a b -> b a ", "ij->ij"])
def test_an_einsum_that_turns_dims_is_a_view(equation: str) -> None:
    def between(x: Tensor) -> Tensor:
        y = x * 2.0
        torch.einsum(equation, y)[1:].mul_(3.0)
        return y + torch.einsum(equation, [y]).T.T.sum() + torch.einsum("ij->j", y) + torch.einsum("ii->i", y)

    as_eager(between)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_a_dropout_of_nothing_gives_back_its_argument(p: float, training: bool) -> None:
    def dropped(x: Tensor) -> Tensor:
        y = x * 2
        z = nn.functional.dropout(y, p, training)
        z += 1
        return y * (2.0 if z is y else 1.0)

    as_eager(dropped)


def test_what_nobody_reads_before_a_region() -> None:
    def unread(x: Tensor) -> Tensor:
        y = x.sin()
        y * 1.5
        with torch.no_grad():
            scale = y.abs().amax()
        return y / scale

    as_eager(unread)


def test_a_write_that_torch_refuses_is_none() -> None:
    def halved(x: Tensor) -> Tensor:
        y = x + 1
        for part in (y[:, :4], y.chunk(2, 1)[0], y[:, 4:]):
            try:
                part.mul_(0.5)  # a view of several is not to be written
            except RuntimeError:
                y = y * 3
        return y

    as_eager(halved)


def test_gradients_nobody_would_see_are_refused() -> None:
    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: 2 * grad)
        return x

    with pytest.raises(CaptureError, match=r"test_user_code.*register_hook.*autograd\.Function"):
        capture(Written(hooked).double(), X, precision="fp64")
    with pytest.raises(CaptureError, match=r"test_user_code.*random numbers inside"):
        capture(Written(Noisy.apply).double(), X, precision="fp64")
    model = Written(torch.sin).double()
    model.first.weight.register_hook(lambda grad: 2 * grad)
    with pytest.raises(CaptureError, match=r"first\.weight.*hook"):
        capture(model, X, precision="fp64")
    model = Written(torch.sin).double()
    model.first.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(CaptureError, match=r"first\.weight.*register_post_accumulate_grad_hook"):
        capture(model, X, precision="fp64")
    model = Written(torch.sin).double()
    model.second.register_full_backward_hook(lambda module, into, out: None)
    with pytest.raises(CaptureError, match="module 'second' has a backward hook"):
        capture(model, X, precision="fp64")


def test_writes_assertions_and_outputs_without_gradient() -> None:
    def written(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        y[:, :4], y[:, 4:] = x[:, 4:], 2.0 * x[:, :4]
        y[0] = 1.5
        return y

    as_eager(written)
    as_eager(lambda x: x @ torch.linalg.cholesky(x.T @ x + torch.eye(8, dtype=x.dtype)))
    as_eager(lambda x: x * (x > 0).to(x.dtype) * (x > x.mean()).to(x.dtype))
    as_eager(lambda x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(x.sin()), n=8))


def draws(x: Tensor) -> Tensor:
    """Every way to draw that is followed."""
    noise = torch.randn_like(x) + torch.normal(0.0, torch.full_like(x, 0.5)) + torch.randn(8, dtype=x.dtype)
    kept = torch.rand(8, 1, dtype=x.dtype).add(0.8).floor()
    gumbel = -torch.empty_like(x).exponential_().log()
    some = torch.bernoulli(torch.sigmoid(x.detach())) + torch.empty_like(x).uniform_(-1, 1)
    number = torch.randint(2, 5, (8, 8)).to(x.dtype)
    x = nn.functional.dropout1d((x + 0.1 * noise).unsqueeze(-1), 0.2).squeeze(-1)
    return x / 0.8 * kept + gumbel.softmax(-1) + 0.1 * some * number


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_random_numbers_are_the_same_on_any_mesh(seed: int) -> None:
    model = Written(draws).double()
    program = capture(model, X, precision="fp64")
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss, grads, _ = run_step(program, params, {}, X, 0)
    job = Job(program, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="draws"), {})
    plan = random_plan(job, seed, max_microbatches=4)
    programs = verify_plan(plan)
    trainer = InProcessTrainer(plan, programs, [build_modules(p) for p in programs], model)
    assert float(abs(trainer.step(X) - loss) / abs(loss)) <= 1e-9
    assert relative_error(trainer.grads(), grads) <= 1e-9
    trainer.apply_optimizer(torch.optim.AdamW, lr=1e-3)
    predicted = [entry.key for entry in entries(programs[0])]
    assert [entry.key for entry in trainer.entries(0)] == predicted


@pytest.mark.parametrize(
    ("draw", "mean", "within"),
    [
        (lambda: torch.randint(2**30, 2**30 + 10, (64, 64)) - 2**30, 4.5, 0.3),
        (lambda: torch.randint(-(2**30), 10 - 2**30, (64, 64)) + 2**30, 4.5, 0.3),
        (lambda: torch.randint(2**24, 2**24 + 4, (64, 64)) % 2, 0.5, 0.05),
        (lambda: torch.randint(-10, 110, (64, 64), dtype=torch.int8), 49.5, 3.0),
        (lambda: torch.empty(64, 64, dtype=torch.bool).bernoulli_(0.3), 0.3, 0.05),
        (lambda: torch.empty(64, 64, dtype=torch.int64).bernoulli_(0.3), 0.3, 0.05),
    ],
    ids=["high", "low", "beyond floats", "int8", "bool", "int64"],
)
def test_whole_numbers_are_drawn_as_they_are(draw: Callable[[], Tensor], mean: float, within: float) -> None:
    model = Written(lambda x: (0 * x + draw().float().mean()).sqrt())
    model.second = nn.Identity()
    batch = {"x": X["x"].float()}
    params = {name: p.detach() for name, p in model.named_parameters()}
    loss, _, _ = run_step(capture(model, batch), params, {}, batch, 0)
    assert float(loss) == pytest.approx(mean, abs=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.07, 0.29, 0.5, 0.8, 0.99])
def test_what_is_drawn_of_one_is_one(p: float, dtype: torch.dtype) -> None:
    def draws(x: Tensor) -> Tensor:
        drawn = torch.empty(64, 64, dtype=dtype).bernoulli_(p)
        return 0 * x.sum() + (drawn == 1).float().mean() + 100 * ((drawn != 1) & (drawn != 0)).float().sum()

    model, batch = Written(lambda x: draws(x).sqrt()), {"x": X["x"].float()}
    model.second = nn.Identity()
    params = {name: param.detach() for name, param in model.named_parameters()}
    loss, _, _ = run_step(capture(model, batch), params, {}, batch, 0)
    assert float(loss) == pytest.approx(p, abs=0.05)


def test_uniform_numbers() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.empty(1000, 1000, dtype=dtype)
        found = reference_kernels.uniform(x, torch.tensor(7), 1, [1000, 1000], [0, 0])
        assert 0 < found.min() and found.max() < 1 and found.dtype == dtype
        assert float(found.mean()) == pytest.approx(0.5, abs=2e-3)
        assert float(found.var()) == pytest.approx(1 / 12, abs=1e-3)
        assert abs(float(torch.corrcoef(torch.stack([found[:-1].flatten(), found[1:].flatten()]))[0, 1])) < 5e-3
        part = reference_kernels.uniform(x[200:300, 10:30], torch.tensor(7), 1, [1000, 1000], [200, 10])
        assert torch.equal(part, found[200:300, 10:30])


def test_stochastic_depth_is_the_identity_in_an_evaluation() -> None:
    model = Written(lambda x: x / 0.8 * torch.floor(0.8 + torch.rand(8, 1, dtype=x.dtype))).double()
    program = capture(model, X, precision="fp64")
    targets = {op.target for kind in program.kinds for op in kind.graph.ops}
    assert "paraplan.dropout" in targets and "paraplan.uniform" not in targets


def test_nested_inputs_are_refused_by_name() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
            return self.layer(x + more["y"]).sum()

    with pytest.raises(CaptureError, match="input 'more' of Nested is a dict that holds tensors"):
        capture(Nested(), {"x": X["x"], "more": {"y": X["x"]}})


def test_numbers_from_elsewhere_are_refused() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * random.random()

    with pytest.raises(CaptureError, match="draws from random, whose numbers would be constants"):
        capture(Written(scaled), X)


def test_the_largest_of_a_bag() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.EmbeddingBag(10, 8, mode="max")

        def forward(self, ids: Tensor) -> Tensor:
            return self.rows(ids).pow(2).mean()

    torch.manual_seed(0)
    model, ids = Bag().double(), {"ids": torch.randint(0, 10, (8, 5))}
    program = capture(model, ids, precision="fp64")
    assert all(op.rule is None for kind in program.kinds for op in kind.graph.ops)
    assert worst_error(run(program, model, ids)[1], eager(model, ids, "fp64", None)[1]) <= 1e-12


def _gated(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@pytest.mark.parametrize("make", [torch.jit.script, lambda f: torch.jit.trace(f, torch.randn(8, 8))])
def test_a_function_of_torch_jit_has_its_gradient_before_and_after_torch_compiles_it(make: Callable[..., Any]) -> None:
    made = make(_gated)
    for _ in range(3):
        as_eager(lambda x: made(x))


def test_a_module_of_torch_jit_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(CaptureError, match=r"module '1' is a RecursiveScriptModule of torch.jit"):
        capture(model, {"input": X["x"]}, loss_fn=lambda out, given: out.pow(2).mean())
