"""A structural copy of a model whose parameters and buffers have shapes and no data.

The caller's model is never touched and no weight is copied: `deepcopy` runs with a memo that maps every parameter
and buffer, by identity, to its fake stand-in, so ties stay ties.
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paraplan.ir.errors import CaptureError
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.kernels.dtypes import dtype_name
from paraplan.kernels.torch_private import FakeTensorMode, tree_leaves

PRECISIONS = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


DOUBLE = "double"
"""How a model in float64 is traced for fp64: as it is."""


def traced_dtype(precision: str) -> torch.dtype:
    """What floats are while exporting: fp64 of a narrower model is exported in float32 and lifted afterwards
    (`precision`)."""
    if precision == DOUBLE:
        return torch.float64
    if precision not in PRECISIONS:
        raise CaptureError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
    return torch.float32 if precision == "fp64" else PRECISIONS[precision]


def traced_precision(model: nn.Module, precision: str) -> str:
    """The precision a model is traced in: `DOUBLE` for fp64 where all of its floats are float64 already, so that what
    forward asks of dtypes is what it asks in eager."""
    floats = {x.dtype for x in (*model.parameters(), *model.buffers()) if x.is_floating_point() or x.is_complex()}
    return DOUBLE if precision == "fp64" and floats and floats <= {torch.float64, torch.complex128} else precision


def _buffer_dtype(model: nn.Module, module: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Hugging Face keeps its computed (non-persistent) float buffers, such as rotary frequencies, in float32."""
    buffer = module._buffers[name]
    assert buffer is not None
    if not buffer.is_floating_point():
        return buffer.dtype
    if dtype == torch.float64:
        return dtype
    return torch.float32 if hasattr(model, "config") and name in module._non_persistent_buffers_set else dtype


def not_dense(name: str, x: Tensor) -> str:
    """What a tensor is that is no dense one, and what to give; "" of a dense one."""
    if is_lazy(x):
        return "not initialized (of a lazy module); call the model once before"
    if x.is_nested:
        return "a nested tensor; pad it to one shape and pass a mask"
    if x.is_quantized:
        return f"a quantized tensor; give {name}.dequantize()"
    return "" if x.layout == torch.strided else f"a tensor of layout {x.layout}; give {name}.to_dense()"


def refuse_kinds(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse what no plan counts: tensors that are not dense, and dtypes without a size here.

    Args:
        what: they are, for messages.
        tensors: by name.
    Raises:
        CaptureError: names the tensor and what to give.
    """
    for name, x in tensors.items():
        if said := not_dense(name, x):
            raise CaptureError(f"{what} {name!r} is {said}")
        if dtype_name(x.dtype) not in DTYPE_BYTES:
            wide = torch.float32 if x.is_floating_point() else torch.int64
            raise CaptureError(f"{what} {name!r} is {x.dtype}, which no plan has; give {name}.to({wide})")


def refuse_kinds_held(model: nn.Module) -> None:
    """`refuse_kinds` of a model's parameters and buffers."""
    refuse_kinds("parameter", dict(model.named_parameters()))
    refuse_kinds("buffer", dict(model.named_buffers()))


def fake_copy(model: nn.Module, precision: str, mode: FakeTensorMode, memo: dict[int, Any] | None = None) -> nn.Module:
    """The model with fake CPU parameters and buffers in the precision's traced dtype.

    Args:
        model: is not modified.
        precision: what it will compute in.
        mode: of the fake tensors.
        memo: takes what `copy.deepcopy` notes: the copy of every object by the object's id.
    Raises:
        CaptureError: the module cannot be copied, or holds a tensor that no plan counts.
    """
    refuse_kinds_held(model)
    dtype = traced_dtype(precision)
    memo = {} if memo is None else memo
    with mode:
        for module in model.modules():
            for param in module._parameters.values():
                if param is not None and id(param) not in memo:
                    kind = dtype if param.is_floating_point() else param.dtype
                    memo[id(param)] = nn.Parameter(
                        torch.empty(param.shape, dtype=kind, device="cpu"), param.requires_grad
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in memo:
                    memo[id(buffer)] = torch.empty(
                        buffer.shape, dtype=_buffer_dtype(model, module, name, dtype), device="cpu"
                    )
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as fault:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied for tracing ({type(fault).__name__}: {fault}); keep tensors that "
            "are results of computations out of module attributes (register_buffer, or make them in forward)"
        ) from fault
    for module in copied.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # a cache only matters when generating
    return copied


def fake_batch(batch: dict[str, Tensor], precision: str, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Distinct fake tensors of the batch's shapes; float inputs in float32 where fp64 lifts them later.

    Args:
        batch: by name.
        precision: of the program.
        mode: under which tensors have no data.
    """
    lift = precision == "fp64"
    with mode:
        return {
            name: torch.empty(x.shape, dtype=torch.float32 if lift and x.is_floating_point() else x.dtype, device="cpu")
            for name, x in batch.items()
        }


def as_computed(tensors: dict[str, Tensor], precision: str) -> dict[str, Tensor]:
    """Inputs as a forward takes them: floats in the half precision it computes in (as FSDP's `cast_forward_inputs`)."""
    dtype = traced_dtype(precision)
    if dtype == torch.float32:
        return tensors
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}


def parameter_names(model: nn.Module, count: int) -> list[str]:
    """Names of so many positional arguments of a model's forward: its own, then "input2" and so on."""
    names = [
        p.name
        for p in inspect.signature(model.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return names + [f"input{index}" for index in range(len(names), count)]


def required(model: nn.Module) -> list[str]:
    """Names of a model's forward that have no default."""
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def taken(model: nn.Module, named: dict[str, object]) -> dict[str, object]:
    """Those of some arguments, by name, that a model's forward takes."""
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


def arguments(
    model: nn.Module, tensors: dict[str, Tensor], others: dict[str, object], positional: bool, for_loss: bool = False
) -> tuple[tuple[object, ...], dict[str, object]]:
    """What a model is called with, of inputs as `name_inputs` named them: args and kwargs.

    Args:
        model: whose forward says which names it takes.
        tensors, others: the inputs by name; those that are no tensors are `others`.
        positional: whether they are given in order.
        for_loss: whether what forward does not take is left out, being the loss function's (labels).
    Raises:
        CaptureError: an input that forward does not take.
    """
    if not positional:
        given = {**tensors, **others}
        known = taken(model, given)
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None and not for_loss:
            names = list(inspect.signature(model.forward).parameters)
            near = difflib.get_close_matches(unknown, names, 1, 0.5) or [
                n for n in names if n.lower() == unknown.lower()
            ]
            raise CaptureError(
                f"{type(model).__name__} takes no input {unknown!r}; "
                f"{f'did you mean {near[0]!r}? ' if near else ''}Its forward takes {', '.join(names) or 'nothing'}"
            )
        return (), known
    named = {**tensors, **others}
    order = [name for name in parameter_names(model, len(named)) if name in named]
    return tuple(named[name] for name in order), {}


def of_microbatch(
    tensors: dict[str, Tensor], rows: int, dims: Mapping[str, int | None], count: int
) -> tuple[int, dict[str, Tensor]]:
    """Rows and tensors of the first of so many microbatches.

    Args:
        tensors: the batch, by name.
        rows: of the batch.
        dims: per tensor, the one that samples lie along; None where none does.
        count: microbatches.
    Raises:
        CaptureError: the batch does not divide.
    """
    if count < 1 or rows % count:
        raise CaptureError(f"a batch of {rows} does not divide into {count} microbatches; use a divisor of it")
    size = rows // count
    return size, {name: x if dims[name] is None else x.narrow(dims[name] or 0, 0, size) for name, x in tensors.items()}


_AS_TORCH = (getattr(Tensor.__torch_function__, "__func__", None), nn.Parameter.__torch_function__)


def overrides_functions(x: Tensor) -> bool:
    """Whether a tensor's class has functions of torch of its own (`__torch_function__`), which no graph has."""
    if type(x) is Tensor:
        return False
    own = type(x).__torch_function__
    return getattr(own, "__func__", own) not in _AS_TORCH


def own_functions(x: Tensor) -> str:
    """What to say of an input that does."""
    return (
        f"is a {type(x).__qualname__}, whose __torch_function__ would be left out of the captured step; give "
        "x.as_subclass(torch.Tensor), and write what it does as functions that forward calls"
    )


def name_inputs(
    model: nn.Module, example_inputs: dict[str, object] | tuple[object, ...]
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors of the batch by the names of forward's parameters, and the other arguments.

    Raises:
        CaptureError: an input that forward does not take or no plan counts, or no tensor at all.
    """
    if isinstance(example_inputs, dict):
        named: dict[str, object] = dict(example_inputs)
    else:
        values = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        named = dict(zip(parameter_names(model, len(values)), values, strict=False))
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in named.items() if not isinstance(value, Tensor)}
    nested = [name for name, value in others.items() if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))]
    if nested:
        raise CaptureError(
            f"input {nested[0]!r} of {type(model).__name__} is a {type(others[nested[0]]).__name__} that holds "
            "tensors; a batch is tensors by name: give a module whose forward takes them one by one and joins them"
        )
    if not tensors:
        raise CaptureError(f"example_inputs of {type(model).__name__} hold no tensor; give one global batch")
    missing = [name for name in required(model) if name not in named]
    if missing:
        raise CaptureError(
            f"forward of {type(model).__name__} takes {', '.join(map(repr, missing))}, which example_inputs do not "
            f"give: they are {', '.join(map(repr, named))}"
        )
    refuse_kinds("input", tensors)
    for name, value in tensors.items():
        if overrides_functions(value):
            raise CaptureError(f"input {name!r} {own_functions(value)}")
        if value.is_complex():
            raise CaptureError(
                f"input {name!r} is complex; pass view_as_real(x) and build the complex value from real parts"
            )
    return tensors, others
