"""A model whose training step runs as a plan of one device says, behind the face of the model itself.

`forward` takes the program's steps up to the loss, the loss' backward the others up to the update; between them an
executor holds what the plan keeps. Parameters and buffers are the model's own tensors: the module shares the model's
registries, so names, `state_dict`, optimizers and moves between modes are the model's. Gradients are returned to
autograd, multiplied by what the loss was multiplied by (a scaler, 1/accumulation).

Where no gradients are wanted (`eval()`, `no_grad`), the model itself runs. Limits: the batch must have the shapes that
were captured (fewer rows are padded where that changes nothing, `ragged`) and is made contiguous; only the loss carries
a gradient; one backward per forward.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from paraplan.capture.exporting.fake import parameter_names, taken
from paraplan.capture.python_state.autocast import ambient_autocast
from paraplan.capture.python_state.dynamic import with_attributes
from paraplan.capture.python_state.reading import Reads
from paraplan.capture.python_state.returned import Returned
from paraplan.ir.errors import PlanMismatchError
from paraplan.runtime.executing.torch_private import function_modes, in_transform
from paraplan.runtime.fitted_step import FittedStep
from paraplan.runtime.state.captured_settings import Settings
from paraplan.runtime.state.checkpoint import is_like
from paraplan.runtime.state.progress import Optimizers, groups_of, optimizers_in, pack, unpack
from paraplan.runtime.state.training_state import ABOUT, about_run, give_numbers, read_numbers
from paraplan.runtime.state.unread import buffer_names


class FittedModule(nn.Module):
    """The model, trained within a budget.

    Args:
        model: with values, on one device; its tensors are shared, not copied.
        plan: what people see of the plan.
        step: the plan's step over the model.
        fixed: arguments that are no tensors, as captured.
        returns: from the loss to what the model returns.
        casts: what autocast cast to when the model was captured; None: it was off.
        remake: makes this module again, of a copy of the model: (model, fixed, returns, casts, plan as JSON, seed,
            steps done); so it is copied and pickled.
        reads: what forward read while it was captured, where that was in this process.

    Attributes:
        plan: what runs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Any,
        step: FittedStep,
        fixed: Mapping[str, Any],
        returns: Returned,
        casts: torch.dtype | None,
        remake: Callable[..., FittedModule],
        reads: Reads | None = None,
    ) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training = model.training
        self.plan, self._fit_model = plan, (model,)
        self._fit_step, self._fit_settings = step, Settings(model, step.plan.program, reads)
        self._fit_fixed, self._fit_returns, self._fit_casts, self._fit_remake = dict(fixed), returns, casts, remake
        self._fit_modes = function_modes()
        self._fit_first: Callable[[FittedStep, Mapping[str, Tensor]], None] | None = None

    @property
    def unfitted(self) -> nn.Module:
        """The model that fit was given."""
        return self._fit_model[0]

    def check_first(self, check: Callable[[FittedStep, Mapping[str, Tensor]], None]) -> None:
        """Have every step checked, with its batch, before it is taken; a copy of this module does not."""
        self._fit_first = check

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; its loss carries the gradients of the planned step."""
        model = self._fit_model[0]
        if not (self.training and torch.is_grad_enabled()):
            return model(*args, **(taken(model, kwargs) if self._fit_returns.for_loss else kwargs))
        if in_transform():
            raise PlanMismatchError(
                "a planned step runs under no transform of torch.func (grad, vmap, jvp ...); call the model that fit "
                "was given"
            )
        self._fit_settings.check()
        casts = ambient_autocast(self._fit_step.device)
        if casts != self._fit_casts:
            raise PlanMismatchError(
                f"autocast is {casts or 'off'} here and was {self._fit_casts or 'off'} when fit was called; call fit "
                "under the same torch.autocast"
            )
        if (modes := function_modes()) != self._fit_modes:
            raise PlanMismatchError(
                f"function modes are {modes} here and were {self._fit_modes} when fit was called; call fit under the "
                "modes that the steps are taken under"
            )
        batch = with_attributes(self._fit_step.plan.program, model, self._batch(args, kwargs))
        if self._fit_first is not None:
            self._fit_first(self._fit_step, batch)
        return self._fit_returns(self._fit_step.loss(batch))

    def _batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The arguments by name, as captured."""
        model = self._fit_model[0]
        given = {**dict(zip(parameter_names(model, len(args)), args, strict=False)), **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        spelled = inspect.signature(model.forward).parameters.items()
        defaults = {name: it.default for name, it in spelled if it.default is not inspect.Parameter.empty}
        fixed, now = {**defaults, **self._fit_fixed}, {**defaults, **others}
        for name in (each for each in {**self._fit_fixed, **others} if each not in tensors):
            if _same(fixed.get(name), now.get(name)):
                continue
            raise PlanMismatchError(
                f"{name}={now.get(name)!r}: the step was captured with {name}={fixed.get(name)!r}; call fit again with "
                "example_inputs as you call the model"
            )
        return tensors

    def train(self, mode: bool = True) -> FittedModule:
        """As the model's own."""
        self._fit_model[0].train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, under the model's own names."""
        return self._fit_model[0].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        return self._fit_model[0].load_state_dict(*args, **kwargs)

    def training_state(self, optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None) -> dict[str, Any]:
        """Everything the run goes on from, whole, here or under any plan; as `Trainer.full_training_state`.

        Args:
            optimizer: over `parameters()`, or several.
            scheduler: torch's, or several.
            scaler: torch's.
        """
        model, program = self._fit_model[0], self._fit_step.plan.program
        params = dict(model.named_parameters())
        own = {**dict(model.named_parameters(remove_duplicate=False)), **self._state_buffers()}
        kept = {name: x.detach().cpu().clone() for name, x in own.items()}
        optimizers = optimizers_in(optimizer)
        slots = {
            name: {key: x.detach().cpu() if isinstance(x, Tensor) else x for key, x in each.state[param].items()}
            for each in optimizers
            for name, param in params.items()
            if param in each.state
        }
        about = about_run(
            program, optimizers, params, scheduler, scaler, self._fit_step.steps_done, self._fit_step.seed
        )
        about = unpack(pack(about))
        optimized = {"state": copy.deepcopy(slots), "param_groups": about.pop("groups")}
        return {"model": kept, "optimizer": optimized, ABOUT: about}

    def load_training_state(
        self, full: Mapping[str, Any], optimizer: Optimizers = None, scheduler: Any = None, scaler: Any = None
    ) -> None:
        """Take in what `training_state`, or a trainer's `full_training_state`, gave.

        Args:
            full: the state.
            optimizer, scheduler, scaler: that train the model, those the state was taken with.
        Raises:
            PlanMismatchError: it is of another model, or its groups, schedules or scaler are not those given.
        """
        model, optimizers, program = self._fit_model[0], optimizers_in(optimizer), self._fit_step.plan.program
        params = dict(model.named_parameters())
        numbers = read_numbers(program, full, optimizers, groups_of(optimizers, params), scheduler, scaler)
        own = {**params, **self._state_buffers()}
        with torch.no_grad():
            for name, tensor in own.items():
                if name in full["model"]:
                    tensor.copy_(full["model"][name])
        for each in optimizers:
            for param in (param for group in each.param_groups for param in group["params"]):
                each.state.pop(param, None)
            for name, slots in full["optimizer"]["state"].items():
                if any(params[name] is param for group in each.param_groups for param in group["params"]):
                    place, shape = params[name].device, params[name].shape
                    each.state[params[name]] = {
                        key: x.to(place if is_like(x, shape) else x.device, copy=True) if isinstance(x, Tensor) else x
                        for key, x in slots.items()
                    }
        give_numbers(numbers, optimizers, scheduler, scaler)
        self._fit_step.go_on_from(numbers["steps_done"], numbers["seed"])

    def _state_buffers(self) -> dict[str, Tensor]:
        """The buffers of a state dict, and those that training writes, under each of their names."""
        model, written = self._fit_model[0], self._fit_step.plan.program.buffer_updates
        names = {each for every in buffer_names(model).values() for each in every}
        buffers = model.named_buffers(remove_duplicate=False)
        return {name: x for name, x in buffers if name in names or name in written}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Made again of the model and its plan: what runs them holds functions and handles."""
        step = self._fit_step
        told = (self._fit_model[0], self._fit_fixed, self._fit_returns, self._fit_casts, msgspec.json.encode(step.plan))
        hooks = {key: value for key, value in self.__dict__.items() if key.endswith("_hooks")}
        return self._fit_remake, (*told, step.seed, step.steps_done), hooks

    def __getattr__(self, name: str) -> Any:
        """What this has not, the model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_fit_model"][0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """On the model, which is what is captured and compared; methods and hooks of this module's on itself."""
        if _is_own(name):
            super().__setattr__(name, value)
        if not _is_own(name) or (name == "training" and "_fit_model" in self.__dict__):
            setattr(self._fit_model[0], name, value)

    def __delattr__(self, name: str) -> None:
        """Likewise."""
        if _is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._fit_model[0], name)


_MODULE = frozenset(vars(nn.Module()))
_OWN = {"plan"}.union(
    f"_fit_{of}" for of in ("model", "step", "settings", "fixed", "returns", "casts", "remake", "modes", "first")
)
"""What a fitted module has beside what every module has, and its methods."""


def _is_own(name: str) -> bool:
    """Whether an attribute is the fitted module's own and not the model's."""
    return name in _OWN or name in _MODULE or hasattr(FittedModule, name)


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are of one type and equal, NaN to NaN and zeros of one sign alone; what cannot say so is
    equal to itself alone. A shape is a tuple."""
    kind, its = (tuple if isinstance(each, torch.Size) else type(each) for each in (one, other))
    if one is other or kind is not its:
        return one is other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(other)
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
