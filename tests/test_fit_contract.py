"""What a fitted model does where a model is used as people use one: the same numbers, or an error that says why not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import paraplan
from paraplan.ir.errors import CaptureError, ConstraintError, InfeasibleError, PlanMismatchError, RuntimeFailure
from paraplan.runtime.batch import check_values
from paraplan.runtime.fitted import FittedModule

DOUBLE = torch.float64


class Net(nn.Module):
    """Batch norm, a buffer assigned anew, a buffer the loss reads, a frozen layer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(6, 8).requires_grad_(False), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.0), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor

    def forward(self, x: Tensor, scale: float = 1.0, y: Tensor | None = None) -> Any:
        """A loss, or logits."""
        z = torch.tanh(self.norm(self.frozen(x))) * torch.exp(self.mean)
        self.mean = 0.9 * self.mean + 0.1 * z.detach().mean(0)
        logits = self.head(self.drop(z - self.mean)) * scale
        return logits if y is None else (logits, F.cross_entropy(logits, y))


def batch(seed: int = 0) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, dtype=DOUBLE, generator=drawn)
    return {"x": x, "scale": 0.5, "y": torch.randint(0, 3, (8,), generator=drawn)}


def made() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture(scope="module")
def planned() -> FittedModule:
    return paraplan.fit(made(), tuple(batch().values()), memory="1GiB", loss="1", time_limit_s=1.0)


@pytest.fixture
def fitted(planned: FittedModule) -> FittedModule:
    """A copy: parameters, buffers and steps of its own."""
    return copy.deepcopy(planned)


def same(fitted: nn.Module, twin: nn.Module) -> None:
    for one, other in zip(fitted.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(fitted.named_buffers())[name], buffer, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(fitted: FittedModule, order: tuple[int, int]) -> None:
    """Buffers are written in the forward; a backward that reads them sees what its own forward saw."""
    twin = made()
    for model in (fitted, twin):
        losses = [model(**batch(seed))[1] for seed in (0, 1)]
        for index in order:
            losses[index].backward()
    same(fitted, twin)
    fitted(**batch(2)), twin(**batch(2))  # a forward that nothing follows
    same(fitted, twin)


def test_positional_named_and_spelled_arguments(fitted: FittedModule) -> None:
    given = batch()
    logits, loss = fitted(given["x"], 0.5, given["y"])
    assert logits is None and float(loss.detach()) == pytest.approx(float(made()(**given)[1].detach()), rel=1e-12)
    with pytest.raises(PlanMismatchError, match=r"scale=1\.0: the step was captured with scale=0\.5"):
        fitted(x=given["x"], y=given["y"])
    with pytest.raises(PlanMismatchError, match=r"y is torch\.float64"):
        fitted(**{**given, "y": given["y"].double()})


def eval_norm(model: Any) -> None:
    model.norm.eval()


def drop_more(model: Any) -> None:
    model.drop.p = 0.5


def hook(model: Any) -> None:
    model.head.register_forward_hook(lambda *_: None)


def unfreeze(model: Any) -> None:
    model.frozen.requires_grad_(True)


def halve(model: Any) -> None:
    model.half()


def widen(model: Any) -> None:
    model.head = nn.Linear(8, 4).double()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (eval_norm, "'norm' was captured with training=True and has training=False"),
        (drop_more, "'drop' was captured with p=0.0 and has p=0.5"),
        (hook, "'head' has other hooks"),
        (unfreeze, "'frozen.weight' requires a gradient now"),
        (halve, "'frozen.weight' is float16.* planned for float64.*call fit again"),
        (widen, r"has another module 'head' than .* or call fit again"),
    ],
)
def test_a_model_that_changed_is_refused(fitted: FittedModule, change: Callable[[Any], None], said: str) -> None:
    change(fitted)
    with pytest.raises(PlanMismatchError, match=said):
        fitted(**batch())


def test_gradients_that_are_not_made_are_refused(fitted: FittedModule) -> None:
    given = batch()
    with pytest.raises(PlanMismatchError, match="input 'x' requires a gradient"):
        fitted(**{**given, "x": given["x"].clone().requires_grad_()})
    weight = fitted.head.weight
    (grad,) = torch.autograd.grad(fitted(**given)[1], [weight], create_graph=True)
    with pytest.raises(RuntimeFailure, match="a gradient of a gradient"):
        grad.pow(2).sum().backward()
    with pytest.raises(PlanMismatchError, match=r"torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(fitted, {"head.weight": w}, (), given)[1])(weight.detach())


class Doubling(TorchFunctionMode):
    """Another tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


class Plain(Tensor):
    """A subclass that changes nothing."""


class Doubled(Tensor):
    """One that does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.tanh else result


def test_functions_of_torch_that_were_not_captured_are_refused(fitted: FittedModule) -> None:
    given = batch()
    with Doubling(), pytest.raises(PlanMismatchError, match=r"function modes are \['Doubling'\] here and were \[\]"):
        fitted(**given)
    with torch.device("cpu"):
        fitted(**given)
    x = given["x"]
    fitted(**{**given, "x": x.as_subclass(Plain)})
    with pytest.raises(PlanMismatchError, match="'x' is a Doubled, whose __torch_function__"):
        fitted(**{**given, "x": x.as_subclass(Doubled)})
    with pytest.raises(CaptureError, match="'x' is a Doubled, whose __torch_function__"):
        paraplan.fit(made(), {**given, "x": x.as_subclass(Doubled)}, memory="1GiB", loss="1")
    plan = paraplan.compile(made(), "local:1", example_inputs=given, loss="1", precision="fp64")
    with pytest.raises(PlanMismatchError, match="x is a Doubled, whose __torch_function__"):
        check_values(plan.data, {"x": x.as_subclass(Doubled), "y": given["y"]})


@pytest.mark.parametrize("what", ["head.weight", "x"])
def test_what_a_backward_reads_may_not_change_before_it(fitted: FittedModule, what: str) -> None:
    given = batch()
    loss = fitted(**given)[1]
    with torch.no_grad():
        (given["x"] if what == "x" else fitted.head.weight).add_(1.0)
    if what == "x":  # the frozen layer keeps its input out of the backward
        loss.backward()
        return
    with pytest.raises(RuntimeFailure, match=r"'head\.weight' was changed in place"):
        loss.backward()


def test_pickled_and_fitted_again(fitted: FittedModule) -> None:
    file = io.BytesIO()
    torch.save(fitted, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=False), paraplan.fit(fitted, batch(), "1GiB", loss="1")):
        twin = made()
        for each in (again, twin):
            each(**batch())[1].backward()
        same(again, twin)


def test_parts_in_another_mode_are_captured_so() -> None:
    model = made()
    model.norm.eval()
    twin = copy.deepcopy(model)
    trained = paraplan.fit(model, batch(), "1GiB", loss="1", time_limit_s=1.0)
    for each in (trained, twin):
        each(**batch())[1].backward()
    same(trained, twin)


def test_labels_that_only_the_loss_function_takes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3)).double()
    given = {"input": batch()["x"], "y": batch()["y"]}
    trained = paraplan.fit(model, given, "1GiB", loss_fn=lambda out, all_: F.cross_entropy(out, all_["y"]))
    expected = F.cross_entropy(model(given["input"]), given["y"])
    assert float(trained(**given).detach()) == pytest.approx(float(expected), rel=1e-12)
    with torch.no_grad():
        assert torch.equal(trained(**given), model(given["input"]))


class Counts(nn.Module):
    """Multiplies by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        self.calls += 1
        return self.layer(x).sum() * self.calls


class Branches(Counts):
    def forward(self, x: Tensor) -> Tensor:
        """A loss, by a branch that only values decide."""
        y = self.layer(x).sum()
        return y if y > 0 else -y


def test_what_cannot_be_captured_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        CaptureError, match=r"self\.calls: forward changes calls of Counts \(0 to 1\) and computes with"
    ):
        paraplan.fit(Counts(), torch.randn(2, 4), "1GiB")
    with pytest.raises(CaptureError, match=r"in forward: return y if y > 0.*depends on tensor data"):
        paraplan.fit(Branches(), torch.randn(2, 4), "1GiB")
    assert not capsys.readouterr().err  # nor does torch print its graph


class Masked(nn.Module):
    """torch's own encoder, given a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layers(x, mask).pow(2).mean()  # type: ignore[no-any-return]


def test_the_causal_mask_of_torchs_transformer() -> None:
    torch.manual_seed(0)
    model, given = Masked().double(), (torch.randn(2, 4, 8, dtype=DOUBLE),)
    twin = copy.deepcopy(model)
    trained = paraplan.fit(model, given, "1GiB")
    for each in (trained, twin):
        each(*given).backward()
    same(trained, twin)


def test_what_fit_refuses_at_once() -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    for model, options, said in (
        (images, {}, "0.weight is not contiguous"),
        (made(), {"optimizer": torch.optim.AdamW}, "whose states count"),
        (len, {}, "takes an nn.Module"),
        (torch.jit.script(nn.Linear(2, 2)), {}, "was scripted"),
    ):
        with pytest.raises(ConstraintError, match=said):
            paraplan.fit(model, batch(), "1GiB", **options)
    with pytest.raises(InfeasibleError, match="no schedule fits in 1024 bytes"):
        paraplan.fit(made(), batch(), 1024, loss="1", accumulate=True, time_limit_s=1.0)
    with pytest.raises(InfeasibleError, match=r"with a smaller batch, or with microbatches=2 or more$"):
        paraplan.fit(made(), batch(), 1024, loss="1", optimizer="sgd", offload=True, time_limit_s=1.0)


def test_what_is_set_on_it_is_set_on_the_model() -> None:
    class Scaled(nn.Module):
        tau: float = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.tau, self._step = nn.Linear(4, 4), 1.0, 0

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).pow(2).mean() * self.tau

    model, given = Scaled().double(), {"x": torch.randn(8, 4, dtype=DOUBLE)}
    twin = copy.deepcopy(model)
    trained = paraplan.fit(model, given, "1GiB", dynamic=["tau"])
    trained.tau = twin.tau = 3.0
    trained._step += 1
    assert model.tau == trained.tau == 3.0 and model._step == 1
    assert float(trained(**given)) == pytest.approx(float(twin(**given)), rel=1e-12)
    trained = paraplan.fit(copy.deepcopy(model), given, "1GiB")
    trained.tau = 1.0
    with pytest.raises(PlanMismatchError, match=r"tau of Scaled|tau=3.0 and has tau=1.0 now"):
        trained(**given)
    trained.tau = 3.0
    trained(**given)
    del trained.tau
    assert trained.tau == 1.0 and "tau" not in vars(trained.unfitted)
    trained.tau, trained.layer = 3.0, nn.Linear(4, 4).double()
    with pytest.raises(PlanMismatchError, match="another module 'layer'"):
        trained(**given)
    trained.training = False
    assert not trained.unfitted.training
    with pytest.raises(AttributeError, match="nothing"):
        del trained.nothing


def test_an_input_of_another_kind_of_numbers_is_refused() -> None:
    model, given = nn.Sequential(nn.Linear(4, 4)).double(), torch.randn(8, 4, dtype=DOUBLE)
    trained = paraplan.fit(model, (given,), "1GiB", loss_fn=lambda out, _: out.mean())
    with pytest.raises(PlanMismatchError, match=r"is torch.int64, the step was captured with torch.float64"):
        trained(given.long())


class Normal(nn.Module):
    """The likelihood of the first two columns under a distribution that validates its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mean = nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return -torch.distributions.Normal(self.mean(self.norm(x)), 1.0).log_prob(x[:, :2]).mean()


def test_fit_takes_what_compile_takes_of_batch_norms_and_distributions() -> None:
    torch.manual_seed(0)
    model, x = Normal().double(), torch.randn(8, 4, dtype=DOUBLE)
    free = copy.deepcopy(model)
    fitted = paraplan.fit(model, {"x": x}, memory="1GiB", time_limit_s=1.0)
    for each in (fitted, free):
        each(x=x).backward()
    torch.testing.assert_close(model.mean.weight.grad, free.mean.weight.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.norm.running_var, free.norm.running_var, rtol=1e-12, atol=0)


class Options(nn.Module):
    """A layer whose loss may depend on the type of an argument and on the sign of a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, option: Any) -> Tensor:
        return self.layer(x).square().mean() * (2.0 if isinstance(option, float) else 1.0)


@pytest.mark.parametrize(
    ("captured", "same", "other"),
    [
        (1, 1, 1.0),
        (1, 1, True),
        (0.0, 0.0, -0.0),
        (float("nan"), float("nan"), 1.0),
        ((4,), torch.Size([4]), [4]),
        ({"a": [1, 2.0]}, {"a": [1, 2.0]}, {"a": [1, 2]}),
        (1j, 1j, 1.0),
        ("a", "a", "b"),
        (None, None, 0),
    ],
)
def test_arguments_are_compared_by_type_and_value(captured: Any, same: Any, other: Any) -> None:
    x = torch.randn(8, 4)
    fitted = paraplan.fit(Options(), {"x": x, "option": captured}, memory="1GiB", time_limit_s=1.0)
    fitted(x=x, option=same)
    with pytest.raises(PlanMismatchError, match="option="):
        fitted(x=x, option=other)
