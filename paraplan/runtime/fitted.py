"""A model whose training step runs as a plan of one device says, behind the face of the model itself.

`forward` takes the program's steps up to the loss, the loss' backward the others up to the update; between them an
executor holds what the plan keeps. Parameters and buffers are the model's own tensors: the module shares the model's
registries, so names, `state_dict`, optimizers and moves between modes are the model's. Gradients are returned to
autograd, multiplied by what the loss was multiplied by (a scaler, 1/accumulation).

Where no gradients are wanted (`eval()`, `no_grad`), the model itself runs. Limits: the batch must have the shapes that
were captured (fewer rows are padded where that changes nothing, `ragged`); only the loss carries a gradient; one
backward per forward. Buffers the model writes change in the backward, not the forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paraplan.ir.errors import PlanMismatchError, RuntimeFailure
from paraplan.ir.plan import Plan
from paraplan.ir.rank_program import RankProgram, Step
from paraplan.ir.seeds import segment_seed
from paraplan.ir.sources import source_lines
from paraplan.ir.trace.autocast import ambient_autocast
from paraplan.runtime import ragged
from paraplan.runtime.copies import Copier
from paraplan.runtime.executor import Executor, Modules, make_tapes
from paraplan.runtime.rank import split_steps
from paraplan.runtime.transport import InProcessTransport

_SEEDS = (1 << 63) - 1


class FittedModule(nn.Module):
    """The model, trained within a budget.

    Args:
        model: with values, on one device; its tensors are shared, not copied.
        plan, program, modules: of one device: the plan, what it lowers to, and that emitted.
        fixed: arguments that are no tensors, as captured.
        returns: from the loss to what the model returns.
        casts: what autocast cast to when the model was captured; None: it was off.
        seed: base of the random seeds; None draws one from torch's generator at every step.

    Attributes:
        plan: what runs.
    """

    def __init__(
        self, model: nn.Module, plan: Any, data: Plan, program: RankProgram, modules: Modules, fixed: Mapping[str, Any],
        returns: Callable[[Tensor], Any], casts: torch.dtype | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self.training = model.training
        self.plan, self._model = plan, (model,)
        self._runs = _Runs(model, data, program, modules, seed)
        self._fixed, self._returns, self._casts = dict(fixed), returns, casts

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; its loss carries the gradients of the planned step."""
        model = self._model[0]
        if not (self.training and torch.is_grad_enabled()):
            return model(*args, **kwargs)
        casts = ambient_autocast(self._runs.device)
        if casts != self._casts:
            raise PlanMismatchError(
                f"autocast is {casts or 'off'} here and was {self._casts or 'off'} when fit was called; call fit under "
                "the same torch.autocast"
            )
        return self._returns(self._runs.loss(self._batch(args, kwargs)))

    def _batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The arguments by name, as captured."""
        names = list(inspect.signature(self._model[0].forward).parameters)
        names += [f"input{index}" for index in range(len(names), len(args))]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in given.items() if not isinstance(value, Tensor)}
        changed = [name for name in {**self._fixed, **others} if self._fixed.get(name) != others.get(name)]
        if changed:
            name = changed[0]
            raise PlanMismatchError(
                f"{name}={others.get(name)!r}: the step was captured with {name}={self._fixed.get(name)!r}; call fit "
                "again with example_inputs as you call the model"
            )
        return tensors

    def train(self, mode: bool = True) -> FittedModule:
        """As the model's own."""
        self._model[0].train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, under the model's own names."""
        return self._model[0].state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        return self._model[0].load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What this has not, the model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"][0], name)


class _Runs:
    """Steps of a plan over a model's own tensors."""

    def __init__(self, model: nn.Module, plan: Plan, program: RankProgram, modules: Modules, seed: int | None) -> None:
        self.model, self.plan, self.program, self.modules, self.seed = model, plan, program, modules, seed
        self.tapes, self.locate = make_tapes(program, modules), source_lines(plan.program)
        self.port = InProcessTransport(plan.stages[0].mesh).port(plan.stages[0].mesh.devices[0])
        before, _ = split_steps(program.steps)
        ends = next(index for index, step in enumerate(before) if program.loss in step.outs) + 1
        self.forward, self.backward = before[:ends], before[ends:]
        self.names = tuple(program.grads)
        self.device = plan.cluster.groups[0].device.backend
        self.steps_done = 0

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a batch, which carries the gradients."""
        params = dict(self.model.named_parameters())
        executor = Executor(
            self.program,
            self.modules,
            (0,) * len(self.program.mesh_shape),
            self.port,
            0,
            self.locate,
            self.tapes,
            Copier(self.device, beside=True),
        )
        with torch.no_grad():
            executor.bind({**self._state(params), **self._inputs(batch)})
            self._seed(executor)
        return _Step.apply(self, executor, *(params[name] for name in self.names))  # type: ignore[no-any-return]

    def take(self, executor: Executor, steps: tuple[Step, ...]) -> None:
        """Run steps, in the precision they were captured in."""
        with torch.autocast(self.device, enabled=False):
            executor.run(steps)

    def _state(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        buffers = dict(self.model.named_buffers())
        found = {}
        for name, value in self.program.outer.items():
            source = params if value.role == "param" else buffers if value.role == "buffer" else None
            if source is None:
                continue
            if value.source not in source:
                raise PlanMismatchError(f"the model has no {value.role} {value.source} any more")
            tensor = source[value.source].detach()
            if not tensor.is_contiguous():
                raise PlanMismatchError(f"{value.role} {value.source} is not contiguous; the plan was made for it so")
            found[name] = tensor
        return found

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The batch by outer name: cut into microbatches where the plan has several, else itself."""
        program, count = self.plan.program, self.plan.num_microbatches
        missing = [name for name in program.batch if name not in batch]
        unknown = [name for name in batch if name not in program.batch]
        if missing or unknown:
            raise PlanMismatchError(
                f"inputs missing: {missing}, unknown: {unknown}; the step was captured with {list(program.batch)}"
            )
        batch, found = ragged.pad(self.plan, batch), {}
        for name, entry in program.batch.items():
            if tuple(batch[name].shape) != entry.spec.shape:
                raise PlanMismatchError(
                    f"input {name} has shape {tuple(batch[name].shape)}, the step was captured with "
                    f"{entry.spec.shape}; pad it, or call fit again with such inputs"
                )
            x = batch[name].detach().to(getattr(torch, entry.spec.dtype))
            cut = count > 1 and entry.batch_dim is not None
            parts = x.chunk(count, entry.batch_dim) if cut else (x,) * count  # type: ignore[arg-type]
            found |= {f"batch:{name}@{m}": part.contiguous() for m, part in enumerate(parts)}
        return {name: x for name, x in found.items() if name in self.program.outer}

    def _seed(self, executor: Executor) -> None:
        base = self.seed if self.seed is not None else int(torch.randint(_SEEDS, ()))
        step = self.steps_done if self.seed is not None else 0
        for name, value in self.program.outer.items():
            if value.role == "seed":
                seed = segment_seed(base, step, int(value.source))
                executor.outer[name] = torch.full((), seed, dtype=torch.int64, device=self.device)
        self.steps_done += 1


class _Step(torch.autograd.Function):
    """The planned step, as one differentiable function of the parameters."""

    @staticmethod
    def forward(ctx: Any, runs: _Runs, executor: Executor, *params: Tensor) -> Tensor:
        runs.take(executor, runs.forward)
        ctx.runs, ctx.executor = runs, executor
        return executor.outer[runs.program.loss]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        runs, executor = ctx.runs, ctx.executor
        if executor is None:
            raise RuntimeFailure("a second backward through one step: what the plan kept for it is gone; run it again")
        ctx.executor, (scale,) = None, grads
        runs.take(executor, runs.backward)
        found: list[Tensor | None] = []
        for name, wanted in zip(runs.names, ctx.needs_input_grad[2:], strict=True):
            grad = executor.outer.pop(runs.program.grads[name])
            found.append(grad.mul_(scale) if wanted else None)
            del grad
        executor.outer.clear()
        return None, None, *found
