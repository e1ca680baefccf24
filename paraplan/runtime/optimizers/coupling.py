"""Whether an optimizer updates every element by itself, found by running it.

A rank's optimizer sees shards. That is the update of the whole parameter where each element's update depends on that
element alone (SGD, Adam and their kin); row or column statistics, norms, orthogonalisation and block-wise states are
those of a shard otherwise. Nothing in a class says which it is, so the class is run with the user's options on small
random tensors: whole, in shards of every dim, several together, and twice with other random numbers, some steps each.

Limits: what an optimizer begins to do later than `STEPS` steps in is not seen, unless it shows in the shape of a state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

STEPS = 6
SHAPES = {1: (12,), 2: (8, 12), 3: (4, 6, 4), 4: (4, 6, 2, 2), 5: (4, 2, 2, 2, 2)}
BLOCKS = (96, 128)
"""Of so many elements that states kept in blocks are."""
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
"""Of the largest update; kernels may round the last bits of an element otherwise in a tensor of another length."""


@dataclass(frozen=True)
class Coupling:
    """What an update of an element depends on besides it.

    Attributes:
        within: how it depends on others of its parameter; "" where it does not.
        across: how on other parameters.
        draws: whether it draws random numbers.
        closure: whether `step` needs a closure.
    """

    within: str = ""
    across: str = ""
    draws: bool = False
    closure: bool = False


@dataclass
class _Trial:
    """Some steps of an optimizer: values before and after, and whether its step had to be given a closure."""

    before: list[Tensor]
    after: list[Tensor]
    states: list[Tensor]
    closure: bool


def coupling(make: Make, groups: Sequence[Mapping[str, Any]], dims: Collection[int], like: Tensor) -> Coupling:
    """What the updates of an optimizer depend on.

    Args:
        make: the optimizer of some groups.
        groups: options of each.
        dims: how many dims parameters have.
        like: dtype and device of parameters.
    """
    found = Coupling()
    seen: list[str] = []
    for group in groups:
        options = {key: _as_tried(key, value) for key, value in group.items() if key != "params"}
        if repr(options) in seen:
            continue
        seen.append(repr(options))
        each = _of_group(make, options, sorted(dims), like)
        found = Coupling(
            found.within or each.within,
            found.across or each.across,
            found.draws or each.draws,
            found.closure or each.closure,
        )
    return found


def _as_tried(key: str, value: Any) -> Any:
    """An option as it is tried: a warm-up that begins at a rate of nothing would show nothing."""
    if isinstance(value, Tensor):
        value = value.detach().clone()
    return (value * 0 + 1e-2 if abs(float(value)) < 1e-6 else value) if key == "lr" else value


def _of_group(make: Make, options: dict[str, Any], dims: Sequence[int], like: Tensor) -> Coupling:
    shapes = [SHAPES.get(each, (2,) * each) for each in dims if each]
    shapes += [BLOCKS] if 2 in dims else []
    faults: list[str] = []
    found = Coupling()
    tried: list[Tensor] = []
    for shape in shapes:
        value, grads = _random(shape, like)
        try:
            whole = _run(make, options, [(value, grads)])
        except Exception as fault:  # noqa: BLE001  (a user's class may raise anything)
            faults.append(f"it could not be tried on shards: {type(fault).__name__}: {fault}")
            continue
        again = _run(make, options, [(value, grads)], seed=1)
        draws = found.draws or not _equal(whole, again.after)
        within = found.within or ("" if draws else _within(make, options, value, grads, whole))
        tried.append(value)
        found = Coupling(within, found.across, draws, whole.closure)
    if not tried:
        fault = faults[0] if faults else ""
        return Coupling(fault, fault)
    if found.draws:
        return found
    pair = [_random(tuple(x.shape), like, seed) for seed, x in enumerate((tried[0], tried[-1]))]
    apart = [x for each in pair for x in _run(make, options, [each]).after]
    together = _run(make, options, pair)
    across = "" if _equal(together, apart) else "parameters are not updated as they are when each is alone"
    return Coupling(found.within, across, found.draws, found.closure)


def _within(make: Make, options: dict[str, Any], value: Tensor, grads: list[Tensor], whole: _Trial) -> str:
    odd = [x for x in whole.states if x.numel() > 1 and x.shape != value.shape]
    if odd:
        return f"of a parameter of shape {tuple(value.shape)} it keeps a state of shape {tuple(odd[0].shape)}"
    for dim in range(value.dim()):
        parts = [x.contiguous() for x in value.chunk(2, dim)]
        shards = [[g.chunk(2, dim)[index].contiguous() for g in grads] for index in range(2)]
        try:
            runs = [_run(make, options, [pair]).after[0] for pair in zip(parts, shards, strict=True)]
        except Exception as fault:  # noqa: BLE001
            return f"its step of a shard raised {type(fault).__name__}: {fault}"
        if not _equal(whole, [torch.cat(runs, dim)]):
            return f"halves of a parameter along dim {dim} are not updated as the whole is"
    return ""


def _random(shape: tuple[int, ...], like: Tensor, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its gradients, of rows, columns and steps of unlike sizes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        for dim, size in enumerate(shape):
            sizes = 2.0 ** torch.linspace(-2, 2, size, dtype=torch.float64)
            x = x * sizes.reshape([-1 if at == dim else 1 for at in range(len(shape))])
        return x.to(like.device, like.dtype)

    return draw(1.0), [draw(10.0 ** (step % 3 - 1)) for step in range(STEPS)]


def _run(make: Make, options: dict[str, Any], tensors: Sequence[tuple[Tensor, list[Tensor]]], seed: int = 0) -> _Trial:
    params = [nn.Parameter(value.clone()) for value, _ in tensors]
    devices = [like.device.index or 0 for like, _ in tensors if like.is_cuda]
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        optimizer = make([{"params": params, **options}])
        closure = False
        for step in range(STEPS):
            grads = [grads[step] for _, grads in tensors]
            closure = _step(optimizer, params, grads, closure)
    states = [x for slots in optimizer.state.values() for x in _tensors(slots)]
    return _Trial([x for x, _ in tensors], [param.detach() for param in params], states, closure)


def _step(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[Tensor], closure: bool) -> bool:
    """One step with these gradients; where it wants a closure, of a bowl that has them where parameters are. Whether it
    did."""
    before = [param.detach().clone() for param in params]

    def bowl() -> float:
        loss = 0.0
        for param, start, grad in zip(params, before, grads, strict=True):
            away = param.detach() - start
            param.grad = grad + away
            loss += float((grad * away + away.square() / 2).sum())
        return loss

    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    if not closure:
        try:
            optimizer.step()
        except (TypeError, AssertionError, RuntimeError, ValueError):
            closure = True
    if closure:
        optimizer.step(bowl)
    return closure


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [x for part in parts for x in _tensors(part)]


def _equal(trial: _Trial, other: Sequence[Tensor]) -> bool:
    """Whether tensors end where those of a trial do, by the measure of how far it moved them."""
    for before, after, found in zip(trial.before, trial.after, other, strict=True):
        moved = (after - before).abs().max().double()
        error = (after - found).abs().max().double()
        if math.isnan(float(moved)) and math.isnan(float(error)):
            continue
        if not error <= TOLERANCE.get(after.dtype, 1e-1) * moved:
            return False
    return True
