"""Optimizers on shards: equal to one device, or refused by name with the way out."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import paraplan
from paraplan.codegen import build_modules
from paraplan.ir.errors import ConstraintError, PlanMismatchError
from paraplan.ir.plan import Plan
from paraplan.lowering import lower
from paraplan.lowering.transfers.offloaded_grads import CHUNK
from paraplan.runtime.executing.launch_counts import LaunchCounter
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.optimizers.coupling import coupling
from paraplan.runtime.optimizers.grad_norms import chunk_norms, magnitude
from paraplan.runtime.optimizers.optim import norm_of, norm_share
from paraplan.runtime.optimizers.updates import Couplings, make_optimizer
from tests.runtime.plans import batch, net, planned


class Lamb(torch.optim.Optimizer):
    """A step of Adam's kind as long as the parameter (You et al. 2020)."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                kept = self.state[param].setdefault("m", torch.zeros_like(param))
                kept.lerp_(param.grad, 0.1)
                param.add_(kept, alpha=-group["lr"] * float(param.norm() / kept.norm().clamp(min=1e-12)))


class Sm3(Lamb):
    """The smallest of the largest squares of a row and of a column (Anil et al. 2019)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                squares = torch.full_like(param, torch.inf)
                for dim in range(param.dim()):
                    squares = torch.minimum(squares, param.grad.square().amax(dim, keepdim=True).expand_as(squares))
                param.sub_(param.grad / (squares.sqrt() + 1e-8), alpha=group["lr"])


class Clipped(torch.optim.SGD):
    """Clips by the norm of all of its gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        nn.utils.clip_grad_norm_(every, 1e-3)
        super().step(closure)


class Langevin(torch.optim.SGD):
    """Adds noise."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(torch.randn_like(param), alpha=0.01)


class Lookahead(torch.optim.Optimizer):
    """Every second step goes half the way (Zhang et al. 2019), around another optimizer."""

    def __init__(self, params: Any, inner: Any, **options: Any) -> None:
        self.inner = inner(params, **options)
        super().__init__(self.inner.param_groups, {})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        slow = {p: self.state[p].setdefault("slow", p.clone()) for group in self.param_groups for p in group["params"]}
        self.inner.step()
        self.steps += 1
        if self.steps % 2 == 0:
            for param, kept in slow.items():
                param.copy_(kept.lerp_(param, 0.5))


class NoHooks:
    """Not one of torch's."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.param_groups = list(params)


def trainer_of(shard: bool) -> InProcessTrainer:
    """A random plan on two ranks whose states are all whole, or all in shards."""
    plan, _ = planned(0)
    (stage,) = plan.stages
    params = {}
    for name, layouts in stage.params.items():
        state = ",".join("S0" if index == 0 else "R" for index in range(len(stage.mesh.shape)))
        whole = ",".join("R" * len(stage.mesh.shape))
        layouts = msgspec.structs.replace(layouts, stored=whole, grad=whole, state=state if shard else whole)
        params[name] = msgspec.structs.replace(layouts, ahead=False)
    made: Plan = msgspec.structs.replace(plan, stages=(msgspec.structs.replace(stage, params=params),))
    programs = lower(made)
    return InProcessTrainer(made, programs, [build_modules(each) for each in programs], net())


def eager(cls: Any, **options: Any) -> dict[str, Tensor]:
    model = net()
    optimizer = cls([p for p in model.parameters() if p.requires_grad], **options)
    for step in range(4):
        optimizer.zero_grad()
        model(**batch(step)).backward()
        optimizer.step()
    return dict(model.named_parameters())


FINE = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (Lookahead, {"inner": torch.optim.AdamW, "lr": 1e-2}),
]
WITHIN = [(torch.optim.Adafactor, {"lr": 1e-2}), (Lamb, {}), (Sm3, {}), (Lookahead, {"inner": Lamb})]


@pytest.mark.parametrize(("cls", "options"), FINE + WITHIN, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("shard", [False, True])
def test_an_update_is_that_of_one_device_or_refused(cls: Any, options: dict[str, Any], shard: bool) -> None:
    trainer = trainer_of(shard)
    trainer.step(batch(0))
    if shard and (cls, options) in WITHIN:
        with pytest.raises(PlanMismatchError, match=rf"{cls.__name__} updates elements .* in shards \(S0.*zero=0"):
            trainer.apply_optimizer(cls, **options)
        return
    trainer.apply_optimizer(cls, **options)
    for step in range(1, 4):
        trainer.step(batch(step))
        trainer.apply_optimizer(cls, **options)
    wanted = eager(cls, **options)
    for name, found in trainer.params().items():
        torch.testing.assert_close(found, wanted[name].detach(), rtol=1e-9, atol=1e-12)


def test_what_mixes_parameters_or_draws_numbers_is_refused() -> None:
    trainer = trainer_of(True)
    trainer.step(batch())
    for cls, words in (
        (Clipped, "Clipped updates elements of a parameter by others"),
        (Langevin, "Langevin draws random numbers"),
        (torch.optim.LBFGS, "LBFGS updates elements of a parameter by others"),
        (NoHooks, "NoHooks is no torch.optim.Optimizer"),
    ):
        with pytest.raises(PlanMismatchError, match=words):
            trainer.apply_optimizer(cls)
    whole = trainer_of(False)
    whole.step(batch())
    with pytest.raises(PlanMismatchError, match=r"LBFGS computes the loss again in its step: .*closure"):
        whole.apply_optimizer(torch.optim.LBFGS)


def test_what_an_update_depends_on() -> None:
    def of(cls: Any, **options: Any) -> Any:
        made = cls([nn.Parameter(torch.zeros(2, 2))], **options)
        return coupling(lambda groups: cls(groups, **options), made.param_groups, {1, 2}, torch.zeros(1))

    assert not any(vars(of(torch.optim.AdamW, lr=0.0)).values())
    assert of(Lamb, lr=0.0).within  # a warm-up begins at nothing
    assert of(torch.optim.Muon).within
    assert not of(torch.optim.Muon).across
    assert of(Clipped).across
    assert of(torch.optim.LBFGS).closure
    assert of(Langevin).draws


def test_weights_written_after_an_update_are_those_of_the_next_step() -> None:
    """A Wasserstein critic's clamp, where stored copies and the optimizer's are two."""
    trainer, model = trainer_of(True), net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        wanted = model(**batch(step))
        wanted.backward()
        torch.testing.assert_close(trainer.step(batch(step)), wanted.detach(), rtol=1e-12, atol=0)
        optimizer.step()
        trainer.apply_optimizer(torch.optim.AdamW, lr=1e-2)
        with torch.no_grad():
            for param in (*optimizer.param_groups[0]["params"], *(x for r in trainer.ranks for x in r.params.values())):
                param.clamp_(-0.1, 0.1)


def _clip_by_part(params: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.05)


def _set_gradient(params: list[nn.Parameter]) -> None:
    params[0].grad = torch.zeros_like(params[0])


@pytest.mark.parametrize("write", [_clip_by_part, _set_gradient, None])
@pytest.mark.parametrize("shard", [False, True])
def test_gradients_written_where_they_are_parts_are_warned_of_once(shard: bool, write: Any) -> None:
    trainer = trainer_of(shard)
    rank = trainer.ranks[0]
    optimizer = make_optimizer(rank, torch.optim.SGD, None, None, {"lr": 0.1}, Couplings())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(3):
            trainer.step(batch(step))
            rank.take_grads()
            if write is not None:
                write(list(rank.params.values()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            rank.settled()
    said = [str(each.message) for each in found if "gradients were written" in str(each.message)]
    assert len(said) == (shard and write is not None)
    assert all("use trainer.clip_grad_norm_(max_norm)" in each for each in said)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().mean()


def pair_trainer() -> Any:
    return paraplan.compile(Pair(), "local:1", example_inputs={"x": torch.randn(8, 4)}).executable(Pair())


OTHER = Pair()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"params": lambda named: OTHER.parameters()}, r"shape \(8, 4\) that is no parameter of the trainer"),
        ({"params": lambda named: [{"params": iter([*named.values(), OTHER.up.bias])}]}, "no parameter of the trainer"),
        ({"params": lambda named: []}, "chooses no parameter"),
        ({"params": lambda named: [{"params": []}]}, "chooses no parameter"),
        ({"params": ["up.weight"]}, "give a function"),
        ({"params": lambda named: named.values(), "groups": [{"match": "up"}]}, "give one of them"),
    ],
)
def test_groups_that_train_something_else_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanMismatchError, match=says):
        pair_trainer().optimizer(torch.optim.SGD, lr=0.1, **options)


def test_params_chooses_among_the_shards_and_groups_takes_the_rest() -> None:
    for choose in (
        lambda named: [named["up.weight"]],
        lambda named: [("up.weight", named["up.weight"])],
        lambda named: [{"params": named["up.weight"], "lr": 0.2}],
        lambda named: [{"params": (each for name, each in named.items() if name == "up.weight")}],
    ):
        trainer = pair_trainer()
        before = trainer.full_state_dict()
        optimizer = trainer.optimizer(torch.optim.SGD, params=choose, lr=0.1)
        trainer.step({"x": torch.ones(8, 4)})
        optimizer.step()
        after = trainer.full_state_dict()
        assert [name for name, x in after.items() if not torch.equal(x, before[name])] == ["up.weight"]
    groups = pair_trainer().optimizer(torch.optim.SGD, groups=[{"match": "^up", "lr": 0.2}], lr=0.1).param_groups
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 0.2), (2, 0.1)]


def test_norms_that_shards_do_not_tell_are_refused() -> None:
    trainer = pair_trainer()
    trainer.step({"x": torch.ones(8, 4)})
    for kind in (0.0, float("-inf"), float("nan")):
        with pytest.raises(ConstraintError, match="norm_type"):
            trainer.clip_grad_norm_(1.0, kind)
    for kind in (1.0, 3, float("inf"), "inf"):
        grads = [param.grad.clone() for param in trainer.state.params.values()]
        assert float(trainer.clip_grad_norm_(1e9, kind)) == pytest.approx(float(nn.utils.get_total_norm(grads, kind)))


@pytest.mark.parametrize("kind", [2.0, float("inf")])
def test_clipping_launches_as_much_for_few_parameters_as_for_many(kind: float) -> None:
    counts = []
    for layers in (2, 9):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        given = {"input": torch.randn(8, 4), "y": torch.randn(8, 4)}
        plan = paraplan.compile(
            model, "local:1", example_inputs=given, loss_fn=lambda out, batch: (out * batch["y"]).sum()
        )
        trainer = plan.executable(model)
        trainer.step(given)
        with LaunchCounter() as counter:
            trainer.clip_grad_norm_(1e-3, kind)
        counts.append([each.op for each in counter.launches])
        assert float(trainer.clip_grad_norm_(1.0, kind)) == pytest.approx(1e-3, rel=1e-5)
    assert counts[0] == counts[1] and len(counts[0]) <= 16, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, float("inf")])
def test_norms_of_large_gradients_keep_their_digits(kind: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grads = {
        "a": torch.randn(1500, 1000, dtype=dtype),
        "b": torch.randn(700, 30, dtype=dtype)[:, :7],
        "c": torch.empty(0),
    }
    grads |= {"d": torch.randn(40, 600, dtype=dtype).t(), "e": torch.randn((), dtype=torch.float64)}
    wide = torch.cat(
        [grad.to(torch.complex128 if grad.is_complex() else torch.float64).flatten().abs() for grad in grads.values()]
    )
    share = norm_share(grads, dict.fromkeys(grads, ()), (), kind)
    assert share.dtype is torch.float64
    assert float(norm_of(share, kind)) == pytest.approx(float(torch.linalg.vector_norm(wide, kind)), rel=2e-5)
    assert not norm_share({"c": torch.empty(0)}, {"c": ()}, (), kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_chunks_of_a_large_gradient_are_rows_and_nothing_its_size_is_made(dtype: torch.dtype) -> None:
    """Each chunk's norm is its own, whatever lies beside it, and NaN and infinity are seen where they are."""
    torch.manual_seed(0)
    x, small = torch.randn(5 * CHUNK + 7, dtype=dtype), torch.randn(3, dtype=dtype)
    for kind in (1.0, 2.0, 3.0, float("inf")):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            found = chunk_norms([x, small], kind)
        assert max(event.cpu_memory_usage for event in seen.events()) <= 4 * CHUNK
        chunks = (each.float() if dtype is torch.bfloat16 else each for each in (*x.split(CHUNK), small))
        wanted = [torch.linalg.vector_norm(each, kind) for each in chunks]
        if kind == float("inf") and not dtype.is_complex:
            assert float(found.max()) == pytest.approx(float(torch.stack(wanted).max()), rel=1e-6)
        else:
            torch.testing.assert_close(
                found.double().sort()[0], torch.stack(wanted).double().sort()[0], rtol=1e-4, atol=0.0
            )
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoiled = x.clone()
            spoiled[CHUNK + 1] = bad
            assert not chunk_norms([spoiled, small], kind).isfinite().all()
            assert bool(magnitude(spoiled).isfinite().all()) is False
