"""The user's optimizer where the host's updates are one step late (`lowering.steps.delayed_update`).

`optimizer.step()` updates what is updated in its own step. Of the others it takes the gradients, as they are then
(clipped, unscaled), with what their groups say then (learning rate, decay). The next step begins their update: the same
optimizer's `step`, of a copy of it that has these groups and gradients alone and parameters that share the values, in a
thread beside the program. What the user does to the optimizer, its schedule or `zero_grad` in the meantime therefore
changes nothing of an update that is due. While an account is kept it is done at once instead.

Limits: what an optimizer keeps on itself, outside of `state` and its groups, is copied and not brought back.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError
from paraplan.runtime.executing.tracker import Tracker
from paraplan.runtime.optimizers.streamed import Staging
from paraplan.runtime.rank import Rank
from paraplan.runtime.transport.current_device import on_this_device


@dataclass
class Due:
    """An update that is due: an optimizer over `twins`, which have gradients and share the values of parameters."""

    optimizer: torch.optim.Optimizer
    twins: dict[nn.Parameter, nn.Parameter]


class LateUpdates:
    """A rank's optimizer, where the host updates one step late.

    Args:
        rank: whose `executor` calls `begin` and `end`.
        optimizer: over its parameters.
        tracker: of the transport, to book what an update makes while an account is kept.
        beside: whether updates are done beside the program; else at once, for runs that are to be the same every time.
        staging: of the optimizer, where some states are staged: its own steps are none of the user's.
    """

    def __init__(
        self, rank: Rank, optimizer: torch.optim.Optimizer, tracker: Tracker, beside: bool, staging: Staging | None
    ) -> None:
        self.rank, self.optimizer, self.tracker, self._staging = rank, optimizer, tracker, staging
        self._names = {param: name for name, param in rank.params.items() if name in rank.late}
        self._thread = (
            ThreadPoolExecutor(1, f"update:rank{rank.executor.rank}", on_this_device(rank.device)) if beside else None
        )
        self._due: Due | None = None
        self._begun: tuple[Due, Future[None] | None] | None = None
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._hold(*args[1:], **kwargs))
        rank.update_late_with(self)

    @property
    def is_due(self) -> bool:
        """Whether gradients are held whose update has not begun."""
        return self._due is not None

    @property
    def is_begun(self) -> bool:
        """Whether an update was begun and not waited for."""
        return self._begun is not None

    def _hold(self, closure: object = None) -> None:
        """A step of the user's begins: what is updated late is not in it."""
        if not self.rank.delays or (self._staging is not None and self._staging.inside):
            return
        if closure is not None:
            raise PlanMismatchError(
                "optimizer.step(closure) computes a loss and its gradients again, and under delayed_update they wait "
                "for the next step; call step() without a closure, or plan without delayed_update"
            )
        found = self._taken()
        if found is None:
            return
        if self._due is not None:
            raise PlanMismatchError(
                "optimizer.step() was called twice with gradients and no trainer.step() between, while the first ones "
                "wait to be applied beside that (delayed_update); call trainer.flush() between"
            )
        self._due = found

    def _taken(self) -> Due | None:
        """What is updated late of the gradients there are, which their parameters give up."""
        skipped = getattr(self.optimizer, "found_inf", None)  # a fused optimizer's, from the gradient scaler
        skips = skipped is not None and bool(skipped)
        groups: list[dict[str, Any]] = []
        twins: dict[nn.Parameter, nn.Parameter] = {}
        for group in self.optimizer.param_groups:
            mine = []
            for param in group["params"]:
                if param not in self._names or param.grad is None:
                    continue
                twin = nn.Parameter(param.data, requires_grad=param.requires_grad)
                twin.grad, param.grad = param.grad, None
                twins[param] = twin
                mine.append(twin)
            if mine:
                groups.append({**{key: _as_it_is(value) for key, value in group.items()}, "params": mine})
        if not groups or skips:
            return None
        return Due(_alike(self.optimizer, groups), twins)

    def begin(self) -> None:
        """Begin the update that is due, if one is."""
        if self._due is None:
            return
        self.end()
        due, self._due = self._due, None
        state = self.optimizer.state
        due.optimizer.state = defaultdict(dict, {twin: state[x] for x, twin in due.twins.items() if x in state})
        if self._thread is None or self.tracker.is_entered:
            self._begun = due, None
            self._step_booked(due)
            return
        ready = self.rank.executor.copier.mark()

        def work() -> None:
            ready()
            with torch.no_grad():
                due.optimizer.step()

        self._begun = due, self._thread.submit(work)

    def _step_booked(self, due: Due) -> None:
        """The update, done now; what it makes is booked where the parameters are."""
        self.rank.executor.copier.mark()()
        tracker, ledger = self.tracker, self.rank.executor.account.ledger
        first = any(twin not in due.optimizer.state for twin in due.twins.values())  # states are booked from then on
        if not tracker.is_entered or first:
            with tracker.booking(None), torch.no_grad():
                due.optimizer.step()
            return
        tiers = [(self.rank.tiers[self._names[param]], twin) for param, twin in due.twins.items()]
        homes: list[tuple[str, Tensor]] = [*tiers, *((tier, x.grad) for tier, x in tiers if x.grad is not None)]
        with tracker.homing(ledger, homes), torch.no_grad():
            due.optimizer.step()

    def end(self) -> None:
        """Wait for the update that was begun, if one was; gradients are let go.

        Raises:
            Exception: as the optimizer raised it.
        """
        if self._begun is None:
            return
        (due, done), self._begun = self._begun, None
        if done is not None:
            done.result()
        for param, twin in due.twins.items():
            if twin in due.optimizer.state:
                self.optimizer.state[param] = due.optimizer.state[twin]

    def forget(self) -> None:
        """Let go of what is due, having waited for what was begun: other parameters were loaded."""
        self.end()
        self._due = None


def _as_it_is(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _alike(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings with groups of its own, and none of the hooks or wrappers.

    A schedule wraps `step` on the object it was given; that wrapper stays there.
    """
    made = copy.copy(optimizer)
    rest: Mapping[str, Any] = {key: value for key, value in vars(optimizer).items() if key not in vars(made)}
    vars(made).update({key: value for key, value in rest.items() if key not in ("step", "grad_scale", "found_inf")})
    made.param_groups = groups
    return made
