"""Smaller last batches, and batches of several shapes: equal to one device, or refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paraplan as pp
from paraplan.api import Buckets
from paraplan.capture import capture
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.execution.name import Role
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.ragged import RowPadding
from tests.runtime.dropout_net import Net, batch, program, steady, trainer_of
from tests.runtime.dropout_net import net as nested
from tests.runtime.reader import ids, reader


def few(rows: int) -> dict[str, Tensor]:
    return {name: value[:rows] for name, value in batch().items()}


def plan_of(captured: Program, seed: int) -> Plan:
    job = Job(captured, ClusterSpec.local(2), OPTIMIZERS["adamw"], ModelRef(display="net"), {})
    return random_plan(job, seed, max_microbatches=4)


@pytest.mark.parametrize("seed", range(3))
def test_missing_rows_count_for_nothing(seed: int) -> None:
    captured = capture(steady().float(), batch(), precision="fp64")
    plan, model = plan_of(captured, seed), steady()
    trainer = trainer_of(plan, model)
    for rows in (5, 8, 1):
        given = few(rows) if rows > 1 else {name: value[2:3] for name, value in batch().items()}
        wanted = model(**given)
        model.zero_grad()
        wanted["loss"].backward()
        torch.testing.assert_close(trainer.step(given), wanted["loss"].detach(), rtol=1e-12, atol=0)
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, found in trainer.grads().items():
            torch.testing.assert_close(found, grads[name], rtol=1e-10, atol=1e-13)
        outputs = trainer.eval_step(given, outputs="global", names=["logits", "best"]).outputs
        torch.testing.assert_close(outputs["logits"], wanted["logits"].detach(), rtol=1e-12, atol=1e-13)
        assert torch.equal(outputs["best"], wanted["best"])


def test_a_loss_that_padding_would_change_is_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(self.head(x), y)

    captured = capture(Mean(), {"x": torch.zeros(8, 8), "y": torch.zeros(8, 4)})
    with pytest.raises(PlanMismatchError, match=r"has 3 rows, the plan was made for 8, .* divided by no count"):
        RowPadding(plan_of(captured, 0)).pad({"x": torch.zeros(3, 8), "y": torch.zeros(3, 4)})

    class Mixing(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x - x.cumsum(0), y)["loss"]  # type: ignore[return-value]

    captured = capture(Mixing(), {"x": torch.zeros(8, 8), "y": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(PlanMismatchError, match=r"cannot be padded: .* mixes samples"):
        RowPadding(plan_of(captured, 0)).pad(few(3))
    plan = plan_of(program(), 0)
    with pytest.raises(PlanMismatchError, match=r"\(9, 8\), the plan was made for the global batch \(8, 8\)"):
        trainer_of(plan, nested()).step({name: torch.cat([x, x[:1]]) for name, x in batch().items()})


def test_buckets_share_parameters_and_states() -> None:
    """Steps of alternating lengths, one optimizer: as the model itself trains."""
    shapes = [{"example_inputs": ids(4, length)} for length in (6, 10)]
    buckets = Buckets.compile(reader(), "local:1", shapes, precision="fp64")
    trainer, model = buckets.executable(reader()), reader()
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for length in (6, 10, 10, 6):
        wanted = model(**ids(4, length))
        wanted.backward()
        torch.testing.assert_close(trainer.step(ids(4, length)), wanted.detach(), rtol=1e-12, atol=0)
        for each in (optimizer, mine):
            each.step()
            each.zero_grad()
    full = trainer.checkpoint.full_state_dict()
    for name, value in model.named_parameters():
        torch.testing.assert_close(full[name], value.detach(), rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(trainer.eval_step(ids(4, 10)).loss, model(**ids(4, 10)), rtol=1e-10, atol=0)
    first, second = (each.state.tensors for each in trainer.trainers)
    assert all(first[name] is second[name] for name in first if name.role in (Role.PARAMETER, Role.STATE))


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    buckets = Buckets.compile(reader(), "local:1", [{"example_inputs": ids(4, n)} for n in (6, 10)], precision="fp64")
    trainer = buckets.executable(reader())
    with pytest.raises(
        PlanMismatchError, match=r"no plan is for a batch of .*\(4, 7\).*plans for .*\(4, 6\).*\(4, 10\)"
    ):
        trainer.step(ids(4, 7))
    other = pp.compile(reader(), "local:1", example_inputs=ids(4, 6), precision="fp64")
    with pytest.raises(PlanMismatchError, match="for one shape of the batch"):
        Buckets((buckets.plans[0], other)).executable(reader())


def test_buckets_keep_parameters_where_the_first_plan_does() -> None:
    shapes = [{"example_inputs": ids(4, length)} for length in (6, 10)]
    buckets = Buckets.compile(reader(), "local:2", shapes, dp=2, zero=3)
    first, second = (plan.stages[0] for plan in buckets.plans)
    assert first.params == second.params
    assert first.mesh == second.mesh


class Terms(nn.Module):
    """Two losses and a value that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.box = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = torch.tanh(self.body(x))
        boxes = self.box(x)
        return {"kind": F.cross_entropy(self.kind(x), y), "box": (boxes - 1).pow(2).mean(), "boxes": boxes}


def terms() -> Terms:
    torch.manual_seed(1)
    return Terms().double().train()


@pytest.mark.parametrize("choice", ["sum", ["kind", "box"], {"kind": 1.0, "box": 0.25}, "kind"])
def test_several_losses(choice: object) -> None:
    """Their weighted sum is trained on, and each is reported without its weight."""
    captured = capture(terms().float(), batch(), precision="fp64", loss=choice)  # type: ignore[arg-type]
    weights = choice if isinstance(choice, dict) else {"kind": 1.0, **({} if choice == "kind" else {"box": 1.0})}
    for seed in range(2):
        model, trainer = terms(), trainer_of(plan_of(captured, seed), terms())
        returned = model(**batch())
        wanted = sum(weight * returned[name] for name, weight in weights.items())
        wanted.backward()  # type: ignore[union-attr]
        torch.testing.assert_close(trainer.step(batch()), wanted.detach(), rtol=1e-12, atol=0)  # type: ignore[union-attr]
        assert set(trainer.metrics) == (set() if choice == "kind" else {"kind", "box"})
        for name, value in trainer.metrics.items():
            torch.testing.assert_close(value, returned[name].detach(), rtol=1e-12, atol=0)
        named = dict(model.named_parameters())
        for name, found in trainer.grads().items():
            torch.testing.assert_close(found, named[name].grad, rtol=1e-10, atol=1e-13)
        if choice == "kind":  # what makes boxes does not train then, so no plan says where it is
            assert "boxes" not in captured.outputs
            continue
        evaluated = trainer.eval_step(batch(), outputs="global", names=["boxes"])
        torch.testing.assert_close(evaluated.outputs["boxes"], returned["boxes"].detach(), rtol=1e-12, atol=0)
        assert set(evaluated.metrics) == set(trainer.metrics)


def test_a_choice_of_loss_that_is_not_there() -> None:
    model = copy.deepcopy(terms()).float()
    for choice, words in (("boxx", "returns no boxx; its scalars are kind, box"), (None, "choose with loss=")):
        with pytest.raises(pp.ParaplanError, match=words):
            capture(model, batch(), loss=choice)
    with pytest.raises(pp.ParaplanError, match="a loss of weight 0 does not train"):
        capture(model, batch(), loss={"kind": 0.0, "box": 1.0})
    with pytest.raises(pp.ParaplanError, match=r"not a scalar float"):
        capture(model, batch(), loss="boxes")


class Lossy(nn.Module):
    """A loss of one's own over logits, labels and weights of samples."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 8), nn.Linear(8, 6), loss

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        return self.loss(self, self.head(torch.tanh(self.body(x))), y, m)


def squares(z: Tensor) -> Tensor:
    return (z.sum(-1) - 1).square()


def thirds(z: Tensor) -> Tensor:
    """[sample, 3, 1, 2]."""
    return z.unflatten(-1, (3, 2)).unsqueeze(2)


PADDED: dict[str, tuple[Callable[..., Tensor], dict[str, float]]] = {
    "shifted": (lambda s, z, y, m: F.cross_entropy(z, y + 1), {"y": -101}),
    "from one": (lambda s, z, y, m: F.cross_entropy(z, y - 1, ignore_index=-1), {"y": 0}),
    "chosen": (lambda s, z, y, m: F.cross_entropy(z, torch.where(y == 4, -100, y)), {"y": -100}),
    "smoothed, weighted": (
        lambda s, z, y, m: F.cross_entropy(z, y, weight=torch.arange(1, 7).to(z), label_smoothing=0.1),
        {"y": -100},
    ),
    "weights of samples": (lambda s, z, y, m: (squares(z) * m).sum() / m.sum(), {"m": 0}),
    "one minus a mask": (lambda s, z, y, m: (squares(z) * (1 - m)).sum() / (1 - m).sum(), {"m": 1}),
    "a choice": (
        lambda s, z, y, m: torch.where(y >= 2, squares(z), 0.0).sum() / (y >= 2).sum().to(z.dtype),
        {"y": 0},
    ),
    "two inputs": (lambda s, z, y, m: (squares(z) * m).sum() / (y >= 0).sum().to(z.dtype), {"m": 0, "y": -1}),
    "products per pair of dims": (
        lambda s, z, y, m: (thirds(z * m[:, None]) @ thirds(z).mT).sum() / m.sum(),
        {"m": 0},
    ),
    "with decay": (lambda s, z, y, m: F.cross_entropy(z, y) + 0.1 * s.body.weight.square().sum(), {"y": -100}),
}
REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "clamped": (lambda s, z, y, m: F.cross_entropy(z, y.clamp(min=0)), "sums what rows would count in"),
    "two terms": (lambda s, z, y, m: F.cross_entropy(z, y) + F.mse_loss(z.sum(-1), m), "divided by no count"),
    "times rows": (lambda s, z, y, m: z.shape[0] * F.cross_entropy(z, y), "8.0, which may be how many rows"),
    "labels of two": (
        lambda s, z, y, m: F.cross_entropy(z, y) + F.cross_entropy(2 * z, y.clamp(min=0)),
        "sums what rows would count in",
    ),
    "divided by nothing": (
        lambda s, z, y, m: (squares(z) / m * (m != 0)).sum() / (m != 0).sum(),
        "cannot have|rows would count",
    ),
}


def lossy(loss: Callable[..., Tensor]) -> tuple[Plan, Lossy, dict[str, Tensor]]:
    torch.manual_seed(1)
    model = Lossy(loss)
    m = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.25, 1.0, 0.0, 3.0])
    given = {"x": torch.randn(8, 8), "y": torch.tensor([1, 2, 4, 3, 2, 1, 2, 4]), "m": m}
    plan = plan_of(capture(model, given, precision="fp64"), 0)
    return plan, model.double(), {name: x.double() if x.is_floating_point() else x for name, x in given.items()}


@pytest.mark.parametrize("name", PADDED)
def test_padding_follows_what_becomes_of_labels_and_weights(name: str) -> None:
    loss, fills = PADDED[name]
    plan, model, whole = lossy(loss)
    padded = RowPadding(plan).pad({key: x[:5] for key, x in whole.items()})
    assert {key: float(padded[key][-1]) for key in fills} == fills
    trainer = trainer_of(plan, model)
    for rows in (5, 2):
        given = {key: x[:rows] for key, x in whole.items()}
        model.zero_grad()
        wanted = model(**given)
        wanted.backward()
        torch.testing.assert_close(trainer.step(given), wanted.detach(), rtol=1e-12, atol=0)
        named = dict(model.named_parameters())
        for key, found in trainer.grads().items():
            torch.testing.assert_close(found, named[key].grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", REFUSED)
def test_padding_that_would_count_is_refused(name: str) -> None:
    loss, words = REFUSED[name]
    plan, _, whole = lossy(loss)
    with pytest.raises(PlanMismatchError, match=words):
        RowPadding(plan).pad({key: x[:5] for key, x in whole.items()})
