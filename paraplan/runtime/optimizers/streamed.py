"""The user's optimizer over parameters whose states are brought to it a run at a time
(`lowering.transfers.streamed_update`).

`optimizer.step()` updates what is where it is updated. The steps that follow it bring the others, and call the same
`step` once per run, with nothing but the run's parameters in its groups; so any torch optimizer works, and a hook or a
counter of the whole optimizer sees every run. Between their updates parameters and states are views of where they live:
`optimizer.state_dict()` reads them there, and what is loaded into the optimizer is taken in at the next update.

States of a parameter's own shape and dtype travel; all else (step counters) stays in memory. They are told apart by
the order in which the optimizer made them, which the first update shows.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import Step
from paraplan.runtime.executing.tracker import Tracker
from paraplan.runtime.rank import Rank
from paraplan.runtime.state.params import travels
from paraplan.runtime.transport.tier_copies import tensor_of


class Staging:
    """A rank's optimizer, where some states live elsewhere than they are updated.

    Args:
        rank: whose `executor` calls `update`.
        optimizer: over its parameters.
        tracker: of the transport, to book what an update makes while an account is kept.
    """

    def __init__(self, rank: Rank, optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
        self.rank, self.optimizer, self.tracker = rank, optimizer, tracker
        self.inside = False
        self._groups: list[dict[str, Any]] = []
        self._params: list[list[nn.Parameter]] = []
        self._outer: Mapping[Name, Any] = {}
        optimizer.register_step_pre_hook(lambda _, args, kwargs: self._leave_out(args, kwargs))
        self._ended = optimizer.register_step_post_hook(lambda *_: self._end())
        self._depth = 0
        self._count_from_here()
        rank.executor.update_with(self.update)

    def _count_from_here(self) -> None:
        """A class whose step calls its base's runs hooks for both; what the user calls is the outermost."""
        step = type(self.optimizer).step

        @functools.wraps(step)
        def outermost(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._depth = 0 if not self.inside else self._depth
            return step(optimizer, *args, **kwargs)

        self.optimizer.step = types.MethodType(outermost, self.optimizer)  # type: ignore[method-assign]

    @property
    def is_stepping(self) -> bool:
        """Whether a step of the optimizer is under way: one of the user's, or of a run that was brought."""
        return self.inside or self._depth > 0

    def _end(self) -> None:
        """A step has ended; the user's, unless it is a base class's in that."""
        if not self.inside:
            self._depth -= 1
            if not self._depth:
                self._take_back()

    def _leave_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """A step of the user's begins: what is staged is not in it, but for a closure, which has all of it.

        Returns:
            What the step is called with instead, if anything.
        """
        if self.inside:
            return None
        self._depth += 1
        if self._depth > 1:
            return None
        self._take_back()
        self.rank.waiting.check()
        self._ended.remove()  # hooks of the user's come before it: each parameter is in their groups once, when updated
        self._ended = self.optimizer.register_step_post_hook(lambda *_: self._end())
        self._leave_out_staged()
        given = inspect.signature(type(self.optimizer).step).bind_partial(*args, **kwargs)
        closure = given.arguments.get("closure")
        if closure is None:
            return None
        given.arguments["closure"] = self._once(closure)
        return given.args, given.kwargs

    def _leave_out_staged(self) -> None:
        self._narrow(param for name, param in self.rank.params.items() if name not in self.rank.staged)

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that has all groups as the user knows them; what is staged is updated after it, so that it is to be
        called once, before any update."""
        before = self._versions()

        def call() -> Any:
            nonlocal before
            if before is None or before != self._versions():
                raise PlanMismatchError(
                    f"{type(self.optimizer).__name__} calls the closure of its step again, or after it changed "
                    "parameters, and under this plan parameters are updated a few at a time after the step; use an "
                    "optimizer that calls it once and first, or plan with place_states='device'"
                )
            before, depth = None, self._depth
            self._take_back()
            try:
                return closure()
            finally:
                self._depth = depth
                self.rank.waiting.check()
                self._leave_out_staged()

        return call

    def _versions(self) -> list[int] | None:
        return [param._version for param in self.rank.params.values()]

    def _narrow(self, kept: Iterable[nn.Parameter]) -> None:
        """Leave only these in the optimizer's groups."""
        self._groups = list(self.optimizer.param_groups)
        self._params = [group["params"] for group in self._groups]
        left = {id(param) for param in kept}
        for group in self._groups:
            group["params"] = [param for param in group["params"] if id(param) in left]
        self.optimizer.param_groups[:] = [group for group in self._groups if group["params"]] or self._groups

    def _take_back(self) -> None:
        """All groups as they were, unless inside, where that is up to `update`."""
        if self.inside or not self._groups:
            return
        for group, params in zip(self._groups, self._params, strict=True):
            group["params"] = params
        self.optimizer.param_groups[:] = self._groups
        self._groups = []

    def update(self, step: Step, outer: Mapping[Name, Any]) -> None:
        """An UPDATE of a run that was brought, among an executor's outer values.

        Raises:
            PlanMismatchError: the optimizer keeps more per parameter than the plan has room for.
        """
        assert step.staged is not None
        self._outer = outer
        names = [arg.source for arg in step.args]
        params = {name: self.rank.params[name] for name in names}
        with self.tracker.booking(None):  # all it makes are views
            homes = {name: (param.data, param.grad) for name, param in params.items()}
            grads = {name: self._recalled(name) for name in names}
            for name, param in params.items():
                param.grad = None
                self._bring(name, param)
                param.grad = grads.pop(name)
        there = [(step.staged.tier, x) for name in names for x in self._tensors(name)] if step.staged.tier else []
        try:
            self._step(params.values(), there)
        finally:
            with self.tracker.booking(None):
                for name, param in params.items():
                    param.grad = None
                    param.data, grad = homes.pop(name)
                    param.grad = None if self.tracker.is_entered else grad
        with self.tracker.booking(None):
            for name, param in params.items():
                self._keep(name, param)
        self._outer = {}

    def _step(self, params: Collection[nn.Parameter], there: list[tuple[str, Tensor]]) -> None:
        """The optimizer's step of some parameters; `there` is what of theirs is on a tier."""
        booked = self.tracker.is_entered
        stateful = self.rank.plan.optimizer.state_slots > 0
        first = stateful and any(param not in self.optimizer.state for param in params)  # states are made: not booked
        self._narrow(params)
        self.inside = True
        try:
            if booked and not first:
                with self.tracker.homing(self.rank.executor.account.ledger, there):
                    self.optimizer.step()
            else:
                with self.tracker.booking(None):
                    self.optimizer.step()
        finally:
            self.inside = False
            self._take_back()

    def _recalled(self, name: str) -> Tensor | None:
        """The gradient an update takes, where it is: as it came from where it waits, or as it is."""
        came = self._outer.get(outer_names.waiting(name).up)
        if came is None:
            return self.rank.params[name].grad
        grad = self.rank.without_padding(name, tensor_of(came), self.rank.layouts[name])
        copy = tensor_of(self._outer[outer_names.state(name).up])
        return self.rank.waiting.recalled(name, grad, copy.device)

    def _up(self, name: str) -> tuple[Tensor, Tensor | None]:
        """What was brought of a parameter, without padding: its copy and its other states, stacked."""
        outer, layout = self._outer, self.rank.layouts[name]
        copy = self.rank.without_padding(name, tensor_of(outer[outer_names.state(name).up]), layout)
        slots = outer.get(outer_names.slots(name).up)
        return copy, None if slots is None else tensor_of(slots)

    def _slot(self, name: str, slots: Tensor | None, index: int) -> Tensor:
        if slots is None or index >= len(slots):
            room, optimizer = 0 if slots is None else len(slots), self.rank.plan.optimizer.name
            raise PlanMismatchError(
                f"{type(self.optimizer).__name__} keeps more than {room} tensors for {name}, and the plan, made for "
                f"{optimizer!r}, has room for {room} where its states live; plan with the optimizer that is used or, "
                "where plans know none like it (amsgrad), with states that are updated where they live "
                "(place_states='host', update_on='host')"
            )
        return self.rank.without_padding(name, slots[index], self.rank.layouts[name])

    def _travelling(self, param: nn.Parameter) -> list[str]:
        """The states of a parameter that travel."""
        held = self.optimizer.state.get(param, {})
        return [key for key, value in held.items() if travels(key, value, param)]

    def _bring(self, name: str, param: nn.Parameter) -> None:
        """Let the optimizer see what was brought; what was loaded into it in the meantime counts instead."""
        copy, slots = self._up(name)
        for index, key in enumerate(self._travelling(param)):
            held, here = self.optimizer.state[param][key], self._slot(name, slots, index)
            if held.data_ptr() != self._home(name, index).data_ptr():
                here.copy_(held)
            self.optimizer.state[param][key] = here
        param.data = copy

    def _keep(self, name: str, param: nn.Parameter) -> None:
        """The updated states, the first ones too, lie where they are stored from; the optimizer sees their homes."""
        _, slots = self._up(name)
        for index, key in enumerate(self._travelling(param)):
            held, here = self.optimizer.state[param][key], self._slot(name, slots, index)
            if held.data_ptr() != here.data_ptr():
                here.copy_(held)
            self.optimizer.state[param][key] = self._home(name, index)

    def _home(self, name: str, index: int) -> Tensor:
        return self._slot(name, self.rank.tensors.get(outer_names.slots(name)), index)

    def _tensors(self, name: str) -> list[Tensor]:
        copy, slots = self._up(name)
        grad = self.rank.params[name].grad
        return [x for x in (copy, slots, grad) if x is not None]
