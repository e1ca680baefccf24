"""The user's optimizer over a rank's shards, or its refusal where it updates them otherwise than whole tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.machine.mesh import Shard, parse_layout
from paraplan.ir.machine.rank_groups import Holding, holdings
from paraplan.ir.machine.tiers import TIERS
from paraplan.ir.optimizer import OPTIMIZERS, Optimizer
from paraplan.ir.sizes import say_size
from paraplan.runtime.optimizers.coupling import Coupling, coupling
from paraplan.runtime.optimizers.fused import KERNELS, FusedUpdates
from paraplan.runtime.optimizers.optim import GroupMaker
from paraplan.runtime.rank import Rank

_ALONE = "or use an optimizer that updates every element by itself (SGD, Adam, AdamW, RMSprop, Adagrad ...)"


def make_optimizer(
    rank: Rank,
    cls: Any,
    groups: Sequence[Mapping[str, Any]] | None,
    params: GroupMaker | None,
    options: Mapping[str, Any],
    couplings: Couplings,
) -> torch.optim.Optimizer:
    """An optimizer of a class over a rank's parameters.

    Args:
        rank: whose.
        cls: of the optimizer, or what makes one of param groups and options.
        groups, params: see `optim.param_groups`.
        options: for cls.
        couplings: found before.
    Raises:
        PlanMismatchError: it is no torch optimizer, or on this plan's shards it is another optimizer than on whole
            tensors.
    """
    made = _called(rank, cls, groups, params, options)
    name = type(made).__name__
    held = holdings(rank.plan)
    own = {id(param) for group in made.param_groups for param in group["params"]}
    names = {name for name, param in rank.params.items() if params is None or id(param) in own}
    trained = names if params is not None else {each for holding in held for each in holding.trained}
    if sum(holding.mesh.size for holding in held) > 1 or any(rank.tiers.values()) or rank.staged:
        dims = {len(rank.plan.program.params[each].spec.shape) for each in trained}
        like = next((x.detach() for group in made.param_groups for x in group["params"]), None)
        if like is not None:
            asked = _Asked(cls, options, made.param_groups, dims, torch.empty(0, dtype=like.dtype, device=like.device))
            _refuse_coupled(rank, name, couplings.of(asked), trained)
    if len(held) > 1 or any(_cut(each, rank.stage) for each in rank.params):
        rank.notice_writes(True)
        made.register_step_pre_hook(lambda *_: _warn_of_grads(rank))
    fused = FusedUpdates(rank, made, params is not None) if type(made) in KERNELS else None
    _warn_of_memory(rank.plan.optimizer, made, fused)
    warned: list[bool] = []
    made.register_step_post_hook(lambda *_: None if warned else warned.extend([True] * _warn_of_states(rank, made)))
    rank.train_with(made)
    return made


def _called(
    rank: Rank,
    cls: Any,
    groups: Sequence[Mapping[str, Any]] | None,
    params: GroupMaker | None,
    options: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """The optimizer that a class makes over a rank's parameters, refused where the plan cannot train with it."""
    if rank.optimizers and (rank.staged or rank.late):
        raise PlanMismatchError(
            "the trainer has an optimizer already, and states that are brought to their update, or updated one step "
            "late, follow one; give all parameters to one optimizer (groups=), or plan with states on "
            "the device (place_states='device')"
        )
    if not callable(cls):
        raise PlanMismatchError(
            f"the optimizer is {cls!r:.80}, a {type(cls).__name__}: give a class and its options, e.g. "
            "trainer.optimizer(torch.optim.AdamW, lr=3e-4); the trainer makes it over this rank's shards"
        )
    made = cls(rank.param_groups(groups, params), **options)
    name = type(made).__name__
    if not isinstance(made, torch.optim.Optimizer) or not hasattr(made, "_optimizer_step_post_hooks"):
        raise PlanMismatchError(
            f"{name} is no torch.optim.Optimizer whose __init__ has run (super().__init__(params, defaults)), so "
            "nothing tells the plan that its step has ended and parameters are to be gathered; derive it from torch's"
        )
    if _wants_closure(made):
        if rank.staged:
            raise PlanMismatchError(
                f"{name} takes no step without a closure, and under this plan parameters are updated a few at a time "
                "after the loss was computed; use an optimizer whose step() needs none, or plan with states on "
                "the device (place_states='device')"
            )
        made.register_step_pre_hook(lambda _, args, kwargs: _check_closure(name, args[1:], kwargs))
    return made


def _warn_of_memory(planned: Optimizer, made: torch.optim.Optimizer, fused: FusedUpdates | None) -> None:
    """Warn where an optimizer of torch's keeps or allocates more than the plan's memory counts."""
    asked = [(OPTIMIZERS[name], g) for g in made.param_groups if (name := _name_of(made, g)) in OPTIMIZERS]
    for each, group in asked:
        if fused is not None and fused.exceeds(group) and each.workspace_slots:
            warnings.warn(
                f"the plan counts on torch's fused kernels, whose update allocates nothing; as {each.name!r} is to be "
                f"executed here, it takes {each.workspace_slots} tensors of a parameter's size or more: leave out "
                "fused=, foreach=, capturable= and differentiable=",
                stacklevel=5,
            )
            return
        more = each.workspace_slots > planned.workspace_slots and not group["fused"]
        if each.state_slots > planned.state_slots or more:
            warnings.warn(
                f"the plan counts the memory of optimizer {planned.name!r}; this one is {each.name!r}, whose states or "
                f"update take more: peaks may exceed the predicted ones; plan with optimizer={each.name!r}",
                stacklevel=5,
            )
            return


def _name_of(made: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """What plans call an optimizer of torch's with the options of a group; "" of others."""
    decay = "+decay" if group.get("weight_decay") else ""
    if type(made) is torch.optim.SGD:
        return f"{'nesterov' if group['nesterov'] else 'momentum' if group['momentum'] else 'sgd'}{decay}"
    if type(made) is torch.optim.AdamW:
        return "adamw"
    return f"adam{decay}" if type(made) is torch.optim.Adam else ""


def _warn_of_grads(rank: Rank) -> None:
    """Warn once where gradients that are parts of all were written, since a norm of parts is none of the whole."""
    if rank.clock.notes_grads and rank.are_grads_written():
        rank.notice_writes(False)
        warnings.warn(
            "gradients were written between trainer.step() and optimizer.step(), and under this plan a rank has a part "
            "of them (shards, or a stage's). What acts on each element by itself (a division, clip_grad_value_) is "
            "right; torch.nn.utils.clip_grad_norm_ clips by the norm of that part alone: use "
            "trainer.clip_grad_norm_(max_norm), which takes the norm over all ranks",
            stacklevel=2,
        )


def _warn_of_states(rank: Rank, optimizer: torch.optim.Optimizer) -> bool:
    """Warn where an optimizer keeps more beside parameters than the plan has room for; staged states refuse that.

    Returns:
        Whether it keeps anything yet.
    """
    places = [(param, optimizer.state.get(param)) for name, param in rank.params.items() if name not in rank.staged]
    held = [(param, states) for param, states in places if states]
    kept = sum(x.nbytes for _, states in held for x in states.values() if isinstance(x, Tensor) and x.dim())
    slots = rank.plan.optimizer.state_slots
    counted = sum(slots * param.nbytes for param, _ in held)
    if kept > counted:
        warnings.warn(
            f"{type(optimizer).__name__} keeps {say_size(kept)} of states on rank {rank.executor.rank}, and the plan, "
            f"made for optimizer={rank.plan.optimizer.name!r}, counts {say_size(counted)}: the peak is "
            f"{say_size(kept - counted)} above the predicted one. Plan with an optimizer that keeps as many tensors "
            "per parameter (sgd 0, momentum 1, adam and adamw 2), or leave that much memory free",
            stacklevel=2,
        )
    return bool(held)


class _Asked:
    """What an optimizer is tried with; equal where it says the same."""

    def __init__(
        self, cls: Any, options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], dims: set[int], like: Tensor
    ) -> None:
        self.cls, self.options, self.dims, self.like = cls, options, dims, like
        self.groups = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._key = repr((options, self.groups, sorted(dims), like))

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and self.cls is other.cls and self._key == other._key


class Couplings:
    """What optimizers were found to couple, each tried once."""

    def __init__(self) -> None:
        self._found: dict[_Asked, Coupling] = {}

    def of(self, asked: _Asked) -> Coupling:
        """What one couples."""
        if asked not in self._found:
            self._found[asked] = coupling(
                lambda given: asked.cls(given, **asked.options), asked.groups, asked.dims, asked.like
            )
        return self._found[asked]


def _refuse_coupled(rank: Rank, name: str, found: Coupling, names: set[str]) -> None:
    """Refuse an optimizer whose updates depend on more of the parameters than it is given at once."""
    held = holdings(rank.plan)
    sharded = [(each, holding) for holding in held for each in holding.trained if each in names and _cut(each, holding)]
    several = sum(holding.mesh.size for holding in held) > 1
    if found.draws and several:
        raise PlanMismatchError(
            f"{name} draws random numbers in its update, and ranks that share a parameter or have its shards would "
            "draw others; train on one device, or use an optimizer that draws none"
        )
    if found.within and sharded:
        first, holding = sharded[0]
        whole = "/".join(",".join(each * len(holding.mesh.shape)) for each in "RPR")
        raise PlanMismatchError(
            f"{name} updates elements of a parameter by others of the same parameter ({found.within}), and the plan "
            f"updates {first} in shards ({holding.params[first].state} on a mesh of {holding.mesh.shape}, as "
            f"{len(sharded)} in all): each rank would take its shard for all of it. Plan with whole states: zero=0, no "
            f"tp, or params={{{first!r}: {whole!r}, ...}}; {_ALONE}"
        )
    parts = "the stages of a pipeline" if len(held) > 1 else "shards" if sharded else ""
    parts = parts or (f"places of their own ({', '.join(TIERS)})" if any(rank.tiers.values()) or rank.staged else "")
    if found.across and parts:
        raise PlanMismatchError(
            f"{name} updates parameters by other parameters ({found.across}), and under this plan it has them in "
            f"{parts}, never all of them whole at once. Plan with whole states in one place (zero=0, no tp or pp, "
            f"place_states='device'), {_ALONE}"
        )


def _cut(name: str, holding: Holding) -> bool:
    """Whether a parameter is updated in shards."""
    layout = parse_layout(holding.params[name].state)
    return any(isinstance(at, Shard) and size > 1 for at, size in zip(layout, holding.mesh.shape, strict=True))


def _wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    step = inspect.signature(type(optimizer).step).parameters
    return "closure" in step and step["closure"].default is inspect.Parameter.empty


def _check_closure(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if not args and "closure" not in kwargs:
        raise PlanMismatchError(
            f"{name} computes the loss again in its step: call optimizer.step(closure) with a function that does "
            "optimizer.zero_grad() and returns trainer.step(batch)"
        )
