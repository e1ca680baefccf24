"""`paraplan.fit`: training as before, within the budget, on the user's own tensors."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan
from paraplan.ir.errors import ConstraintError, InfeasibleError, PlanMismatchError, RuntimeFailure
from paraplan.runtime.executing.tracker import Ledger, Tracker
from paraplan.runtime.fitted import FittedModule
from tests.numerics import relative_error

torch.set_num_threads(1)
WIDTH, DEPTH = 16, 4


class Layers(nn.Module):
    """Residual layers with dropout, a batch norm's running statistics, a tied head."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), self.drop, self.training)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        logits = scale * F.linear(x, self.embed.weight)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(step: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, 11, (8, 24), generator=draw) for name in ("tokens", "labels")}


def made(drop: float = 0.0) -> Layers:
    torch.manual_seed(0)
    return Layers(drop).double().train()


@functools.cache
def peak() -> int:
    """Of the step with nothing executed again."""
    return paraplan.fit(made(0.1), batch(), memory="1GiB", time_limit_s=2).plan.prediction.peak_bytes[0]


def fitted(model: nn.Module, share: float = 0.7, **options: object) -> FittedModule:
    return paraplan.fit(model, batch(), memory=int(share * peak()), time_limit_s=2, **options)  # type: ignore[arg-type]


def account(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Tensor]) -> tuple[Tracker, Ledger]:
    tracker, ledger = Tracker(), Ledger()
    states = [x for slots in optimizer.state.values() for x in slots.values() if isinstance(x, Tensor)]
    for tensor in (*model.parameters(), *model.buffers(), *given.values(), *states):
        ledger.register(tensor)
    ledger.reset_peak()
    return tracker, ledger


def test_it_trains_as_the_model_does_within_the_budget() -> None:
    model, twin = made(), made()
    trained = fitted(model)
    assert "executions again" in str(trained.plan) and trained.plan._repr_html_() and trained.plan.trace()
    assert trained.plan.simulate().traces[0].compute_s > 0
    ours = torch.optim.AdamW(trained.parameters(), lr=1e-2, foreach=False)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=False)
    for step in range(4):
        given = batch(step)
        tracker, ledger = account(model, ours, given)
        with tracker, tracker.booking(ledger):
            out = trained(**given)
            out["loss"].backward()
            grads = {name: param.grad for name, param in trained.named_parameters()}
            kept = None if step < 3 else {name: grad.clone() for name, grad in grads.items() if grad is not None}
            del grads
            ours.step()
            ours.zero_grad()
        expected = twin(**given)["loss"]
        expected.backward()
        if kept is not None:
            assert relative_error(kept, {name: param.grad for name, param in twin.named_parameters()}) <= 1e-9
        elif step:  # states are there, and nothing of ours is held beside
            assert ledger.peak_bytes <= 0.7 * peak()
            assert ledger.peak_bytes == trained.plan.prediction.peak_bytes[0] + 8  # autograd's gradient of the loss
        theirs.step()
        theirs.zero_grad()
        assert abs(float((out["loss"] - expected).detach())) <= 1e-9 and out["logits"] is None
    assert relative_error(dict(model.named_parameters()), dict(twin.named_parameters())) <= 1e-9
    for name, buffer in twin.named_buffers():
        assert torch.allclose(dict(model.named_buffers())[name], buffer, rtol=0, atol=1e-9), name


def test_tensors_and_names_are_the_model_s() -> None:
    model = made()
    names = list(model.state_dict())
    trained = fitted(model, 1.0)
    assert list(trained.state_dict()) == names
    assert [(name, id(p)) for name, p in trained.named_parameters()] == [
        (n, id(p)) for n, p in model.named_parameters()
    ]
    trained.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
    assert not model.layers[0].weight.any() and trained.drop == 0.0


def test_dropout_is_the_same_whatever_is_executed_again() -> None:
    def grads(share: float) -> dict[str, Tensor]:
        model = made(0.2)
        trained = fitted(model, share, seed=7)
        for step in range(2):  # the second step draws other masks
            trained(**batch(step))["loss"].backward()
        return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    kept = grads(2.0)
    assert relative_error(grads(0.7), kept) <= 1e-12
    torch.manual_seed(1)
    one, two = fitted(made(0.2), 2.0), fitted(made(0.2), 2.0)
    losses = []
    for trained in (one, two, two):
        if trained is not two or len(losses) == 1:
            torch.manual_seed(5)
        losses.append(float(trained(**batch())["loss"].detach()))
    assert losses[0] == losses[1] != losses[2]  # torch's generator decides


def test_gradients_accumulate_and_losses_are_scaled() -> None:
    model, twin = made(), made()
    trained = fitted(model, 1.0)
    summed = fitted(made(), 1.0, accumulate=True).plan
    grads_bytes = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert summed.prediction.peak_bytes[0] <= peak() < summed.programs[0].optimizer_bytes + peak()
    assert summed.programs[0].optimizer_bytes - trained.plan.programs[0].optimizer_bytes == grads_bytes
    for step in range(3):
        (trained(**batch(step))["loss"] / 3).backward()
        (twin(**batch(step))["loss"] / 3).backward()
    assert (
        relative_error(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            {n: p.grad for n, p in twin.named_parameters()},
        )
        <= 1e-9
    )


def test_microbatches_keep_the_numbers() -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 5)).double().train()
    twin, x, y = copy.deepcopy(model), torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 5, (8,))
    trained = paraplan.fit(_Loss(model).train(), (x, y), memory="1GiB", microbatches=4)
    trained(x, y).backward()
    F.cross_entropy(twin(x), y).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=0, atol=1e-12)  # type: ignore[arg-type]


class _Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)


def test_without_gradients_the_model_itself_runs() -> None:
    model = made()
    trained = fitted(model, 1.0)
    with torch.no_grad():
        assert trained(**batch())["logits"] is not None
    trained.eval()
    assert not model.training and not model.norm.training
    assert trained(tokens=batch()["tokens"])["logits"].shape == (8, 24, 11)
    trained.train()
    assert model.norm.training


def test_a_loss_of_one_s_own() -> None:
    model, twin = made(), made()

    def loss_fn(out: dict[str, Tensor], given: dict[str, Tensor]) -> Tensor:
        return out["logits"].square().mean()

    given = {"tokens": batch()["tokens"]}
    trained = paraplan.fit(model, given, memory="1GiB", loss_fn=loss_fn)
    trained(**given).backward()
    loss_fn(twin(**given), given).backward()
    assert (
        relative_error(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            {n: p.grad for n, p in twin.named_parameters()},
        )
        <= 1e-9
    )


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_element_keeps_its_shape(shape: tuple[int, ...], named: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor | dict[str, Tensor]:
            loss = self.lin(x).square().mean().reshape(shape)
            return {"loss": loss} if named else loss

    model = Net().double()
    twin, x = copy.deepcopy(model), torch.randn(8, 4).double()
    ours, theirs = (
        out["loss"] if named else out for out in (paraplan.fit(model, {"x": x}, memory="1GiB")(x=x), twin(x))
    )
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(model.lin.weight.grad, twin.lin.weight.grad)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_loss_of_an_object_of_the_model_s_own_is_a_tensor(shape: tuple[int, ...]) -> None:
    class Output:
        def __init__(self, loss: Tensor, logits: Tensor) -> None:
            self.loss, self.logits, self.temperature = loss, logits, 0.5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Output:
            logits = self.lin(x)
            return Output(logits.square().mean().reshape(shape), logits)

    model = Net().double()
    twin, x = copy.deepcopy(model), torch.randn(8, 4).double()
    ours, theirs = paraplan.fit(model, {"x": x}, memory="1GiB")(x=x), twin(x)
    assert isinstance(ours, Output) and ours.temperature == 0.5 and ours.logits is None
    torch.testing.assert_close(ours.loss, theirs.loss)
    ours.loss.backward()
    theirs.loss.backward()
    torch.testing.assert_close(model.lin.weight.grad, twin.lin.weight.grad)


def test_without_gradients_a_plain_model_gives_its_own_output() -> None:
    """Of a model that returns no loss: training returns the loss, all else what the model returns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(6, 8)
    trained = paraplan.fit(model, x, memory="1GiB", loss_fn=lambda out, given: out.square().mean())
    assert torch.allclose(trained(x).detach(), model(x).square().mean())
    with torch.no_grad():
        assert torch.equal(trained(x), model(x)) and not trained(x).requires_grad
    trained.eval()
    assert torch.equal(trained(x), model(x)) and trained(x).requires_grad
    assert trained(torch.randn(3, 8)).shape == (3, 4), "of any shape"
    trained.train()
    assert trained(x).shape == ()


def test_torch_compile_leaves_it_alone() -> None:
    model = made()
    trained = torch.compile(fitted(model, 1.0), backend="eager")
    trained(**batch())["loss"].backward()
    assert model.layers[0].weight.grad is not None


def test_a_budget_too_small_says_what_would_do() -> None:
    with pytest.raises(InfeasibleError) as said:
        fitted(made(0.1), 0.2)
    for words in ("no schedule fits in", "least budget found", "there all the time", "smaller batch", "sgd"):
        assert words in str(said.value), said.value
    least = re.search(r"found to do is [^(]*\((\d+) bytes\)", str(said.value))
    assert least is not None
    trained = paraplan.fit(made(0.1), batch(), memory=int(least[1]), time_limit_s=2)
    assert 0.2 * peak() < trained.plan.prediction.peak_bytes[0] <= int(least[1])


def test_the_op_that_needs_most_is_named_with_its_line() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.up(x).repeat(1, 512)
            return wide.sin().mean()

    model = Wide().double().train()
    with pytest.raises(InfeasibleError, match=r"test_fit.py:\d+"):
        paraplan.fit(model, torch.randn(64, 4, dtype=torch.float64), memory="300KiB", optimizer="sgd", time_limit_s=2)


def test_faults_are_told() -> None:
    with pytest.raises(ConstraintError, match="no size in bytes"):
        paraplan.fit(made(), batch(), memory="lots")
    with pytest.raises(ConstraintError, match="evaluation mode"):
        paraplan.fit(made().eval(), batch(), memory="1GiB")
    with pytest.raises(ConstraintError, match=r"all float32 \(complex64\), or all float64"):
        paraplan.fit(made().bfloat16(), batch(), memory="1GiB")
    with pytest.raises(ConstraintError, match="2 devices"):
        paraplan.fit(made(), batch(), memory="1GiB", cluster="local:2")
    trained = fitted(made(), 1.0)
    with pytest.raises(PlanMismatchError, match="captured with"):
        trained(**{name: x[:, :5] for name, x in batch().items()})
    with pytest.raises(PlanMismatchError, match=r"scale=2\.0"):
        trained(**batch(), scale=2.0)
    loss = trained(**batch())["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeFailure, match="second backward"):
        loss.backward()


def test_autocast_is_captured_and_asked_for() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.down(torch.softmax(self.norm(F.gelu(self.up(x))), -1)), y)

    torch.manual_seed(0)
    model = Net().train()
    twin, x, y = copy.deepcopy(model), torch.randn(6, 8), torch.randint(0, 4, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trained = paraplan.fit(model, (x, y), memory="1GiB")
        loss, expected = trained(x, y), twin(x, y)
    assert type(model) is Net
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32 and float((loss - expected).detach()) == 0.0
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    with pytest.raises(PlanMismatchError, match="autocast is off here"):
        trained(x, y)
    plan = trained.plan.data
    assert plan.program.precision == "fp32" and plan.prediction is not None
    rates = plan.cluster.groups[0].device.flops_per_s
    at_peak_s = 3 * 2 * 6 * (8 * 32 + 32 * 4) / rates["bfloat16"]
    assert rates["float32"] != rates["bfloat16"]
    assert plan.prediction.mfu == pytest.approx(at_peak_s / plan.prediction.step_s)


def test_offloading_keeps_the_numbers() -> None:
    model, kept = made(0.2), made(0.2)
    trained, roomy = fitted(model, 0.6, offload=True, seed=3), fitted(kept, 2.0, seed=3)
    actions = trained.plan.data.memory_actions or ""
    assert "O" in actions and "B" in actions and trained.plan.prediction.tier_peak_bytes["host"] > 0
    for step in range(2):
        for module in (trained, roomy):
            module(**batch(step))["loss"].backward()
    assert (
        relative_error(
            {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            {n: p.grad for n, p in kept.named_parameters()},
        )
        <= 1e-12
    )
