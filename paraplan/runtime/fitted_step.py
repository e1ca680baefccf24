"""One training step of a plan of one device, in two halves: up to the loss, and from there to the gradients.

It runs on the model's own parameters and buffers. Buffers the model writes are written in the first half, as the model
itself would; where the program does so after the backward, which reads what they held before, that reads a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from paraplan.capture.exporting.fake import overrides_functions, own_functions
from paraplan.ir.errors import PlanMismatchError, RuntimeFailure
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name, Role
from paraplan.ir.execution.rank_program import RankProgram, Step, StepKind
from paraplan.ir.execution.schedule import ActionKind
from paraplan.ir.model.program import given_inputs
from paraplan.ir.model.sources import source_lines
from paraplan.ir.plan import Plan
from paraplan.kernels.dtypes import dtype_name
from paraplan.lowering.phases import split_steps
from paraplan.runtime.batch import refuse_dtype, refuse_not_dense
from paraplan.runtime.executing.executor import Executor, Modules, make_tapes
from paraplan.runtime.ragged import RowPadding
from paraplan.runtime.transport.tier_copies import Copier
from paraplan.runtime.transport.transport import InProcessTransport

_SEEDS = (1 << 63) - 1
_READ = frozenset({Role.PARAMETER, Role.BATCH, Role.BUFFER})


class FittedStep:
    """Steps of a plan over a model's own tensors.

    Args:
        model: with values, on one device.
        plan, program, modules: of one device: the plan, what it lowers to, and that emitted.
        seed: base of the random seeds; None draws one from torch's generator at every step.
        steps_done: steps that were taken before.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        program: RankProgram,
        modules: Modules,
        seed: int | None,
        steps_done: int = 0,
    ) -> None:
        self.model, self.plan, self.program, self.modules, self.seed = model, plan, program, modules, seed
        self.tapes, self.locate = make_tapes(program, modules), source_lines(plan.program)
        self.port = InProcessTransport(plan.stages[0].mesh).port(plan.stages[0].mesh.devices[0])
        self.forward, self.writes, self.backward = _halves(program)
        self.read_later = tuple(dict.fromkeys(n for s in self.backward for n in s.args if n.role in _READ))
        written = {name for step in self.writes for name in step.args if name.role is Role.BUFFER}
        self.held = tuple(name for name in self.read_later if name in written)
        self.padding = RowPadding(plan)
        self.names = tuple(program.grads)
        self.device = plan.cluster.backend
        self.steps_done = steps_done

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The loss of a batch, which carries the gradients."""
        params = dict(self.model.named_parameters())
        self._check_trained(params)
        mesh, copier = (0,) * len(self.program.mesh_shape), Copier(self.device, beside=True)
        executor = Executor(self.program, self.modules, mesh, self.port, 0, self.locate, self.tapes, copier)
        with torch.no_grad():
            bound = {**self._state(params), **self._inputs(batch)}
            executor.bind(bound)
            executor.seed(*self.draw())
            self.steps_done += 1
        return _Step.apply(self, executor, bound, *(params[name] for name in self.names))  # type: ignore[no-any-return]

    def take_forward(self, executor: Executor) -> Tensor:
        """The steps up to the loss, and what they write into buffers."""
        self._take(executor, self.forward)
        if self.writes:
            own = {name: executor.outer[name] for name in self.held}
            held = {name: tensor.clone() for name, tensor in own.items()}
            self._take(executor, self.writes)
            executor.outer.update(held)
        return executor.outer[self.program.loss]  # type: ignore[no-any-return]

    def take_backward(self, executor: Executor, versions: Mapping[Name, tuple[Tensor, int]]) -> None:
        """The steps from the loss to the gradients.

        Raises:
            RuntimeFailure: what they read was changed in place since the forward.
        """
        changed = [name for name, (tensor, version) in versions.items() if _version(tensor) != version]
        if changed:
            role, name = changed[0].role, changed[0].source
            raise RuntimeFailure(
                f"{'input' if role is Role.BATCH else role} {name!r} was changed in place between a "
                "forward and its backward, which needs it as it was; call backward before an optimizer's step, and "
                "clone what is written over"
            )
        self._take(executor, self.backward)

    def versions(self, bound: Mapping[Name, Tensor]) -> dict[Name, tuple[Tensor, int]]:
        """What the backward reads of what is not its own, and how often it was written in place until now."""
        names = [name for name in self.read_later if name in bound and name not in self.held]
        return {name: (bound[name], _version(bound[name])) for name in names}

    def _take(self, executor: Executor, steps: tuple[Step, ...]) -> None:
        """Run steps, in the precision they were captured in."""
        with torch.autocast(self.device, enabled=False):
            executor.run(steps)

    def _check_trained(self, params: Mapping[str, Tensor]) -> None:
        for name, spec in self.plan.program.params.items():
            if not spec.trainable and name in params and params[name].requires_grad:
                raise PlanMismatchError(
                    f"parameter {name!r} requires a gradient now and was frozen when fit was called; call fit again"
                )

    def _state(self, params: Mapping[str, Tensor]) -> dict[Name, Tensor]:
        buffers = dict(self.model.named_buffers())
        found = {}
        for name, value in self.program.outer.items():
            source = {Role.PARAMETER: params, Role.BUFFER: buffers}.get(value.role)
            if source is None:
                continue
            what = f"{'parameter' if value.role is Role.PARAMETER else value.role} {value.source!r}"
            if value.source not in source:
                raise PlanMismatchError(f"the model has no {what} any more; call fit again")
            tensor = source[value.source].detach()
            now = dtype_name(tensor.dtype), tuple(tensor.shape), tensor.device.type
            if now != (value.dtype, value.shape, self.device):
                raise PlanMismatchError(
                    f"{what} is {_said(*now)} now, the step was planned for "
                    f"{_said(value.dtype, value.shape, self.device)}; call fit again"
                )
            if not tensor.is_contiguous():
                raise PlanMismatchError(f"{what} is not contiguous any more; the plan was made for it so")
            found[name] = tensor
        return found

    def _inputs(self, batch: Mapping[str, Tensor]) -> dict[Name, Tensor]:
        """The batch by outer name: cut into microbatches where the plan has several, else itself."""
        program, count = self.plan.program, self.plan.num_microbatches
        missing = [name for name in program.batch if name not in batch]
        unknown = [name for name in batch if name not in program.batch]
        if missing or unknown:
            raise PlanMismatchError(
                f"inputs missing: {missing}, unknown: {unknown}; the step was captured with "
                f"{list(given_inputs(program))}"
            )
        refuse_gradients(batch)
        for name, x in batch.items():
            refuse_not_dense(name, x)
            if overrides_functions(x):
                raise PlanMismatchError(f"input {name!r} {own_functions(x)}")
        batch, found = self.padding.pad(batch), {}
        for name, entry in program.step_batch.items():
            given, dtype = batch[name], getattr(torch, entry.spec.dtype)
            given = given.to(self.device) if entry.attribute else given
            if tuple(given.shape) != entry.spec.shape:
                raise PlanMismatchError(
                    f"input {name} has shape {tuple(given.shape)}, the step was captured with "
                    f"{entry.spec.shape}; pad it, or call fit again with such inputs"
                )
            refuse_dtype(name, given.dtype, dtype, "the step was captured with", program.precision)
            if not torch.can_cast(given.dtype, dtype) or given.device.type != self.device:
                raise PlanMismatchError(
                    f"input {name} is {given.dtype} on {given.device.type}, the step was captured with {dtype} on "
                    f"{self.device}"
                )
            x = given.detach().to(dtype)
            cut = count > 1 and entry.batch_dim is not None
            parts = x.chunk(count, entry.batch_dim) if cut else (x,) * count  # type: ignore[arg-type]
            found |= {outer_names.batch(name, m): part.contiguous() for m, part in enumerate(parts)}
        return {name: x for name, x in found.items() if name in self.program.outer}

    def draw(self) -> tuple[int, int]:
        """The base of the next step's random seeds and its number; torch's generator is drawn from where no seed was
        given."""
        return (int(torch.randint(_SEEDS, (), device="cpu")), 0) if self.seed is None else (self.seed, self.steps_done)

    def go_on_from(self, steps_done: int, seed: int | None) -> None:
        """Take the next step as if so many had been taken, from this base of random seeds."""
        self.steps_done, self.seed = steps_done, seed


def refuse_gradients(batch: Mapping[str, object]) -> None:
    """Raises where an input requires a gradient.

    Raises:
        PlanMismatchError: names it.
    """
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise PlanMismatchError(
                f"input {name!r} requires a gradient, and a planned step makes gradients of parameters alone; put what "
                "makes the input and the model into one module and fit that, or pass input.detach()"
            )


def _said(dtype: str, shape: tuple[int, ...], device: str) -> str:
    return f"{dtype}{tuple(shape)} on {device}"


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _halves(program: RankProgram) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Step, ...]]:
    """The steps up to the loss, with the writes into buffers that the program has there; its writes after the backward
    of what the forward made, and the backward, which gives up what both read."""
    before, _ = split_steps(program.steps)
    writes = [_writes(step) and step.phase is ActionKind.F for step in before]
    ends = max(i for i, step in enumerate(before) if program.loss in step.outs or writes[i]) + 1
    forward, rest = before[:ends], before[ends:]
    made = {name for step in forward for name in step.outs} - {name for step in forward for name in step.drops}
    writes, backward = [], []
    for step in rest:
        if not _writes(step) or not made.issuperset(name for name in step.args if name.role is not Role.BUFFER):
            backward.append(step)
            continue
        others = {name for other in rest if other is not step for name in other.args}
        shared = tuple(name for name in step.drops if name in others)
        alone = tuple(name for name in step.drops if name not in others)
        writes.append(msgspec.structs.replace(step, drops=alone))
        backward += [Step(kind=StepKind.DROP, action=step.action, drops=shared)] if shared else []
    return forward, tuple(writes), tuple(backward)


def _writes(step: Step) -> bool:
    """Whether a step overwrites a buffer."""
    return step.kind is StepKind.CALL and not step.outs and any(name.role is Role.BUFFER for name in step.args)


def held_bytes(program: RankProgram) -> int:
    """Bytes of the buffers that a step may need as they were after it has written them: it copies them."""
    written = {name for step in _halves(program)[1] for name in step.args if name.role is Role.BUFFER}
    return sum(program.outer[name].nbytes for name in written)


class _Step(torch.autograd.Function):
    """The planned step, as one differentiable function of the parameters."""

    @staticmethod
    def forward(
        ctx: Any, runs: FittedStep, executor: Executor, bound: Mapping[Name, Tensor], *params: Tensor
    ) -> Tensor:
        ctx.versions = runs.versions(bound)
        loss = runs.take_forward(executor)
        ctx.runs, ctx.executor = runs, executor
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        runs, executor = ctx.runs, ctx.executor
        if executor is None:
            raise RuntimeFailure("a second backward through one step: what the plan kept for it is gone; run it again")
        versions, ctx.executor, ctx.versions = ctx.versions, None, None
        (scale,) = grads
        runs.take_backward(executor, versions)
        found: list[Tensor | None] = []
        for name, wanted in zip(runs.names, ctx.needs_input_grad[3:], strict=True):
            grad = executor.outer.pop(runs.program.grads[name])
            found.append(_once(grad.mul_(scale)) if wanted else None)
            del grad
        executor.outer.clear()
        return None, None, None, *found


def _once(grad: Tensor) -> Tensor:
    """The gradient; where autograd is asked for a graph of it (create_graph), one that says that there is none."""
    if not torch.is_grad_enabled():
        return grad
    return _NoSecond.apply(torch.zeros((), requires_grad=True), grad.detach())  # type: ignore[no-any-return]


class _NoSecond(torch.autograd.Function):
    """A gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, anything: Tensor, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeFailure(
            "a gradient of a gradient was asked for (create_graph=True, a gradient penalty), which a planned step has "
            "not; take that term on the model that fit was given"
        )
