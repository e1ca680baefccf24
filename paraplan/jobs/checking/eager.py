"""The user's own model on one device, by torch's autograd: what a run is held against.

It shares nothing with capture: a copy of the module is called as the user calls it, and what that changes is noted:
gradients, buffers (assigned anew or written), parameters that forward itself writes, attributes of modules.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from paraplan.capture.cutting.outputs import LossChoice, choose_losses
from paraplan.capture.exporting.fake import arguments, as_computed, name_inputs
from paraplan.capture.precision import default_dtype
from paraplan.capture.reference import loss_shares, microbatches
from paraplan.ir.model.program import Program, given_inputs
from paraplan.jobs.checking.random_replay import Replay
from paraplan.jobs.models import Made
from paraplan.kernels.torch_private import tree_leaves, tree_map_only

Tensors = Mapping[str, Tensor]
_HALVES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_NARROW = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}
_OWN = {"_parameters", "_buffers", "_modules"}
_PLAIN = (bool, int, float, complex, str, type(None), Tensor)


class Taken(NamedTuple):
    """What one forward and backward of the eager model gave.

    Attributes:
        loss: of the batch.
        grads: by parameter; None where autograd gives none.
        buffers: as they are after it.
        params: those that forward wrote, likewise.
        changed: attributes that forward changed: before and after.
    """

    loss: float
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    params: dict[str, Tensor]
    changed: dict[str, tuple[object, object]]


@dataclass(frozen=True)
class ModelCall:
    """How the user calls the model.

    Attributes:
        made: the model, its example inputs and loss function.
        choice: which of the losses are trained on.
        casts: what the user's autocast casts to; None: it is off.
    """

    made: Made
    choice: LossChoice = None
    casts: torch.dtype | None = None
    others: dict[str, object] = field(default_factory=dict)
    positional: bool = False

    @classmethod
    def of(cls, made: Made, program: Program, choice: LossChoice = None, casts: torch.dtype | None = None) -> ModelCall:
        """As the example inputs say; several losses as the program weighs them, where nothing else is said.

        Args:
            made: the model, with example inputs where it was captured by any.
            program: captured of it.
            choice: which losses count and how much, as `loss` of `compile`; None: as the program says.
            casts: the dtype of autocast around the call; None without.
        """
        named = {term.name: term.weight for term in program.loss if term.name}
        inputs = made.example_inputs
        others = name_inputs(made.model, inputs)[1] if inputs is not None else {}  # type: ignore[arg-type]
        return cls(made, choice or named or None, casts, others, isinstance(inputs, tuple))


class Eager:
    """A copy of the model that takes steps from given parameters and buffers.

    Args:
        call: how the model is called.
        program: names, and what the batch and parameters are rounded to.
        dtype: what floats of parameters, buffers and the batch are.
        widened: whether narrower floats that forward makes or casts to are of that dtype too.
        casts: what autocast casts to where that is not what the user's does: the model is called under it.
    """

    def __init__(
        self,
        call: ModelCall,
        program: Program,
        dtype: torch.dtype,
        widened: bool = False,
        casts: torch.dtype | None = None,
    ) -> None:
        self.call, self.program, self.dtype, self.widened = call, program, dtype, widened
        self.casts = call.casts if casts is None else casts
        self.model = _copied(call.made.model, program.precision, dtype)
        self._buffers = dict(self.model.named_buffers(remove_duplicate=False))
        self.params = dict(self.model.named_parameters())
        self.trained = tuple(name for name, param in self.params.items() if param.requires_grad)

    def step(self, batch: Tensors, params: Tensors, buffers: Tensors, numbers: Replay | None) -> Taken:
        """One forward and backward.

        Args:
            batch: the global batch.
            params, buffers: what it starts from, by the program's names.
            numbers: what its random ops draw.
        """
        self._start(params, buffers)
        before = _attributes(self.model)
        total = 0.0
        with self._running(numbers):
            for loss in self._losses(batch):
                loss.backward()
                total += float(loss.detach())
            if numbers is not None:
                numbers.finish()
        after = _attributes(self.model)
        changed = {name: (before.get(name), x) for name, x in after.items() if not _same(before.get(name), x)}
        grads = {name: None if p.grad is None else _dense(p.grad) for name, p in self.params.items()}
        held = {name: x.detach().clone() for name, x in self.model.named_buffers(remove_duplicate=False)}
        written = {name: x.detach().clone() for name, x in self.params.items() if self._is_written(name, params)}
        return Taken(total, grads, held, written, changed)

    def loss_again(self, batch: Tensors, params: Tensors, buffers: Tensors, numbers: Replay | None) -> float:
        """The loss from the same start, with attributes as they are by now; leaves them so.

        Args:
            batch: by name.
            params, buffers: what the step starts from, by name.
            numbers: replayed in place of random draws; None where there are none.
        """
        kept = {id(module): dict(vars(module)) for module in self.model.modules()}
        self._start(params, buffers)
        with self._running(numbers), torch.no_grad():
            loss = sum(float(each) for each in self._losses(batch))
        for module in self.model.modules():
            vars(module).update(kept.get(id(module), {}))
        return loss

    @contextmanager
    def _running(self, numbers: Replay | None) -> Iterator[None]:
        device = next(iter(self.params.values())).device.type
        with ExitStack() as stack:
            stack.enter_context(generators_kept())
            stack.enter_context(torch.enable_grad())
            if device == "cuda" and numbers is not None:  # others draw inside of their kernel
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if self.widened:
                stack.enter_context(Widened(self.dtype))
            stack.enter_context(numbers if numbers is not None else nullcontext())
            yield

    def _losses(self, batch: Tensors) -> Iterator[Tensor]:
        """The loss; where microbatches are batches by themselves, each one's share of it."""
        shares = loss_shares(self.program, batch, dict(self.model.named_buffers(remove_duplicate=False)))
        for m, part in enumerate(microbatches(self.program, batch)):
            yield self._loss(part, {name: each[m] for name, each in shares.items()})

    def _loss(self, batch: Tensors, shares: Mapping[str, float]) -> Tensor:
        call, made, program = self.call, self.call.made, self.program
        given = {name: batch[name].detach() for name in given_inputs(program)}
        rounded = as_computed(given, program.precision)
        inputs, labels = ({name: self._cast(x) for name, x in each.items()} for each in (rounded, given))
        args, kwargs = arguments(self.model, inputs, call.others, call.positional, made.loss_fn is not None)
        device = next(iter(self.params.values())).device.type
        casts = self.casts if not self.widened else None
        with torch.autocast(device, dtype=casts, enabled=casts is not None):
            output = self.model(*args, **kwargs)
        losses = output if made.loss_fn is None else made.loss_fn(output, labels)
        chosen = choose_losses(losses, call.choice, made.loss_fn is not None)
        weights = [each.weight * shares.get(each.name, shares[self.program.loss[0].name]) for each in chosen]
        return torch.stack([each.value * weight for each, weight in zip(chosen, weights, strict=True)]).sum()

    def _cast(self, x: Tensor) -> Tensor:
        """An input in this model's dtype, where that is wider than the program's or all of it is lifted."""
        lifted = self.program.precision == "fp64" or self.widened or self.casts != self.call.casts
        return _in(x, self.dtype) if lifted else x

    def _rounded(self, name: str, params: Tensors) -> Tensor:
        """A parameter to start from, rounded to what the program computes with."""
        return params[name].detach().to(getattr(torch, self.program.params[name].spec.dtype))

    def _is_written(self, name: str, params: Tensors) -> bool:
        now = self.params[name].detach()
        return not torch.equal(now, self._rounded(name, params).to(now))

    def _start(self, params: Tensors, buffers: Tensors) -> None:
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self._rounded(name, params))
                param.grad = None
            for name, own in self._buffers.items():
                if name in buffers:
                    own.copy_(buffers[name])
                path, _, key = name.rpartition(".")
                self.model.get_submodule(path)._buffers[key] = own


class Widened(TorchFunctionMode):
    """Under it, floats narrower than some dtype are of that dtype: what functions are told to make, and what they give.

    Args:
        dtype: float32 or float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._widths = dtype, _NARROW if dtype == torch.float64 else _HALVES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch."""
        if func in _CASTS:
            return args[0].to(self._dtype)
        if func in _LITERAL:  # its numbers are rounded as written, then widened
            return self._wide(func(*args, **(kwargs or {})))
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        kept, others = (args[:1], args[1:]) if writes else ((), args)
        others, kwargs = tree_map_only(torch.dtype, self._wider, (others, kwargs or {}))
        others, kwargs = tree_map_only(Tensor, self._wide, (others, kwargs))
        args = (*kept, *others)
        with default_dtype(self._wider(torch.get_default_dtype())):
            return tree_map_only(Tensor, self._wide, func(*args, **kwargs))

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        return self._widths.get(dtype, dtype)

    def _wide(self, x: Tensor) -> Tensor:
        return x.to(self._widths[x.dtype]) if x.dtype in self._widths else x


_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_LITERAL = (torch.tensor, torch.as_tensor, torch.from_numpy, Tensor.new_tensor)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Under it, the random generators of torch and Python may be used; they are put back at the end."""
    state = random.getstate()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)


def _copied(model: nn.Module, precision: str, dtype: torch.dtype) -> nn.Module:
    """A copy whose floats have another dtype; ties stay ties, and results of computations among attributes are copied
    without how they came about."""
    memo: dict[int, object] = {}

    def keep(x: Tensor, made: Tensor) -> None:
        memo.setdefault(id(x), made)

    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                keep(param, nn.Parameter(_in(param, dtype), param.requires_grad))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                keep(buffer, _in(buffer, _buffer_dtype(model, module, name, dtype)))
        others = [value for key, value in vars(module).items() if key not in _OWN]
        for leaf in tree_leaves(others):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                made = _in(leaf, dtype if precision == "fp64" else leaf.dtype)
                keep(leaf, made.requires_grad_(leaf.requires_grad))
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a cache only matters when generating
    return copied


def _in(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy with storage of its own; floats and complex numbers in a dtype or its complex one."""
    if x.is_complex():
        wanted = torch.complex128 if dtype == torch.float64 else x.dtype
    else:
        wanted = dtype if x.is_floating_point() else x.dtype
    return x.detach().to(wanted, copy=True, memory_format=torch.contiguous_format)


def _buffer_dtype(model: nn.Module, module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Half-precision models of Hugging Face keep float buffers they compute (rotary frequencies) in float32."""
    computed = hasattr(model, "config") and name in module._non_persistent_buffers_set
    return torch.float32 if computed and dtype in (torch.float16, torch.bfloat16) else dtype


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _attributes(model: nn.Module) -> dict[str, object]:
    """Numbers, texts and tensors that modules have as attributes, and lists and dicts of them, by path."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            leaves = [] if key in _OWN else tree_leaves(value)
            if leaves and all(isinstance(leaf, _PLAIN) for leaf in leaves):
                kept = tree_map_only(Tensor, lambda x: x.detach().clone(), value)
                found[f"{path}.{key}" if path else key] = copy.copy(kept)
    return found


def _same(one: object, other: object) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    return type(one) is type(other) and (one == other or (one != one and other != other))
