"""Torch's fused kernels for the user's optimizer, where the plan counts on them and they are right
(`ir.model.fused_updates`).

An optimizer that says nothing of how it is executed (`fused=`, `foreach=`, `capturable=`, `differentiable=`) gets
`fused=True` in the groups whose parameters have no gaps; where they have, one parameter is updated after another, which
is what the plan counts there. The kernels take gradients and states for flat arrays, on a CPU unasked; so before a step
what the user, or a checkpoint, has laid out otherwise is copied row by row. How a run's groups are executed is its own:
what is loaded into an optimizer does not change it, and what is taken out of one has the groups as the user made them.

Limits: classes of torch's own, as a class derived from one may update otherwise. A hook that the user registers may put
gradients that lie otherwise in place after they were looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.machine.rank_groups import holdings
from paraplan.ir.model.fused_updates import fusible_places
from paraplan.runtime.rank import Rank

KERNELS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""Classes with fused kernels on every device that torch 2.11 to 2.13 trains on."""

_HOW = ("fused", "foreach", "capturable", "differentiable")


class FusedUpdates:
    """A rank's optimizer of one of `KERNELS`, told which of its groups fused kernels update.

    Args:
        rank: whose parameters they are.
        optimizer: over them.
        chosen: whether the user's function made the groups: then all are fused or none, as such a group may have
            parameters of several places, and on each rank of others.
    """

    def __init__(self, rank: Rank, optimizer: torch.optim.Optimizer, chosen: bool) -> None:
        self.optimizer, self._places = optimizer, {param: rank.tiers[name] for name, param in rank.params.items()}
        held = holdings(rank.plan)
        fusible = fusible_places(rank.plan.program, held)
        mixed = chosen and fusible != {each.params[name].update_tier for each in held for name in each.trained}
        self._fusible = frozenset[str]() if mixed else fusible
        self._counts_on = fusible if rank.plan.optimizer.fused else frozenset[str]()
        self._fused: set[nn.Parameter] = set()
        self._unsaid: set[nn.Parameter] = set()
        for group in optimizer.param_groups:
            self._choose(group, rank.plan.optimizer.fused)
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_load_state_dict_pre_hook(self._keep)
        optimizer.register_state_dict_post_hook(self._leave_out)

    def _choose(self, group: dict[str, Any], wanted: bool) -> None:
        fits = all(self._places[param] in self._fusible for param in group["params"])
        if wanted and not any(map(group.get, _HOW)) and group["fused"] is None and group["foreach"] is None:
            group.update(fused=True) if fits else group.update(fused=False, foreach=False)
            self._unsaid.update(group["params"])
        elif group["fused"] and not fits:  # it would update other elements
            group["fused"] = self.optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        if group["fused"]:
            self._fused.update(group["params"])

    def exceeds(self, group: Mapping[str, Any]) -> bool:
        """Whether a group's update allocates what the plan, counting on fused kernels, leaves out."""
        return not group["fused"] and any(self._places[param] in self._counts_on for param in group["params"])

    def _begin(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """A step begins: what it reads lies as its kernels take it; with a closure, once that was called."""
        self._lay_out()
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def laid_out() -> Any:
            loss = closure()
            self._lay_out()
            return loss

        return args[:1], {"closure": laid_out}

    @torch.no_grad()
    def _lay_out(self) -> None:
        state = self.optimizer.state
        for group in self.optimizer.param_groups:
            due = [param for param in group["params"] if param in self._fused and param.grad is not None]
            for param in due:
                if param.is_contiguous():  # else its values are elsewhere, and come to their update
                    if not param.grad.is_contiguous():
                        param.grad = param.grad.contiguous()
                    held = state.get(param, {})
                    held.update({key: _as_read(key, x, param) for key, x in held.items()})
            if due and group.get("momentum"):  # torch's kernel begins with all of a group's momenta or with none
                begun = [state.get(param, {}).get("momentum_buffer") is not None for param in due]
                group["fused"] = all(begun) or not any(begun)

    def _keep(self, _: object, given: dict[str, Any]) -> dict[str, Any]:
        """What is loaded, with this run's way of executing its groups."""
        pairs = zip(given.get("param_groups", ()), self.optimizer.param_groups, strict=False)
        kept = [{**saved, "fused": mine["fused"], "foreach": mine["foreach"]} for saved, mine in pairs]
        return {**given, "param_groups": kept + list(given.get("param_groups", ()))[len(kept) :]}

    def _leave_out(self, _: object, given: dict[str, Any]) -> dict[str, Any]:
        """What is given out, as the user made its groups: elsewhere kernels may be wrong that are right here."""
        pairs = zip(given["param_groups"], self.optimizer.param_groups, strict=True)
        chosen = [(saved, bool(mine["params"]) and self._unsaid.issuperset(mine["params"])) for saved, mine in pairs]
        groups = [{**saved, "fused": None, "foreach": None} if mine else saved for saved, mine in chosen]
        return {**given, "param_groups": groups}


def _as_read(key: str, value: Any, param: Tensor) -> Any:
    """A state as fused kernels take it: row by row, a count of steps in float32 beside the parameter."""
    if not isinstance(value, Tensor):
        return value
    return value.to(param.device, torch.float32) if key == "step" else value.contiguous()
