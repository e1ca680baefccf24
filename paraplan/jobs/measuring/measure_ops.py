"""The time of one op on one device, as a step pays for it.

Every call has other inputs than the last (a few sets in rotation), so that what a step would read from memory is not
found in the nearest cache; for the same reason as many outputs are held as there are sets, and each is written where
another lay long before. After a warm-up, samples of enough calls to be timed are taken; median and interquartile range
are kept. One CPU thread is timed by its own processor time, which other processes do not stretch; several threads by
the wall clock; a GPU by its events, held up until the host has issued what is timed: what a short kernel takes is not
what the host takes to issue it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paraplan.ir.model.graph import Arg, ArgKind, arg_kind
from paraplan.ir.model.tensor import FLOATS
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.profile import UPDATE, VIEW, Measured, OpTime
from paraplan.jobs.measuring.local_ops import LocalOp
from paraplan.runtime.executing.targets import decode_literal, is_factory, resolve
from paraplan.runtime.executing.torch_private import hold_up
from paraplan.runtime.executing.tracker import Ledger, Tracker

SAMPLE_S = 2e-4
BUDGET_S = 0.02
LEAST_SAMPLES, FEW_SAMPLES, MOST_SAMPLES = 5, 3, 25
ROTATED_BYTES = 32 << 20
"""Sets of inputs and outputs rotate over so many bytes, a server's shared cache: most of what a step reads was written
long before. Over 10 MiB ResNet-50 is foretold 12 to 16 % too short on a machine with 32 MiB of cache."""
MOST_SETS = 32
UPDATED_TOGETHER, UPDATED_BYTES = 32, 1 << 28
"""Parameters that one update is measured over, and the most bytes of them, their gradients and states: a call has work
of its own, which two parameters of 2 MiB had shared where a model's are dozens."""
_ROWS_OF = {"paraplan.embedding": 0, "paraplan.embedding_grad": -1}


def measure_op(op: LocalOp, device: str) -> OpTime:
    """The time of an op.

    Raises:
        RuntimeError, ...: whatever its kernel raises on random inputs.
    """
    call = caller(op, device)
    with torch.no_grad():
        workspace = _workspace(call)
        samples = sample(call, device)
    return _op_time(op.target, op.flag, op.inputs, op.outputs, op.detail, samples, workspace)


def kind_of(device: str) -> tuple[str, int]:
    """A device's backend and compute capability, the larger number."""
    backend = torch.device(device).type
    return backend, torch.cuda.get_device_capability(device)[0] if backend == "cuda" else 0


def caller(op: LocalOp, device: str) -> Callable[[], object]:
    """Calls the op on the next of its sets of inputs, and holds what it gave until as many calls later."""
    call = resolve(op.target, op.kernel(*kind_of(device)))
    sets = [_inputs(op, device, number) for number in range(_num_sets(op))]
    given = [_arguments(op, tensors, device) for tensors in sets]
    held: deque[object] = deque(maxlen=len(given))
    place = 0

    def once() -> object:
        nonlocal place
        args, kwargs = given[place]
        place = (place + 1) % len(given)
        result = call(*args, **kwargs)
        held.append(result)
        return result

    return once


def measure_view(device: str) -> OpTime:
    """Host time of an op that only reinterprets."""
    x = torch.zeros(8, 8, 8, device=device)
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.ops.aten.view.default(x, (64, 8)),
        lambda: torch.ops.aten.permute.default(x, (0, 2, 1)),
        lambda: torch.ops.aten.slice.Tensor(x, 1, 0, 4),
    ]
    samples = [sum(each) / len(calls) for each in zip(*(sample(call, "cpu") for call in calls), strict=False)]
    return _op_time(VIEW, 0, (), (), "", samples, 0)


def measure_update(
    name: str, cls: type[torch.optim.Optimizer], options: dict[str, Any], shape: tuple[int, ...], device: str
) -> OpTime:
    """The time of an optimizer's update of one float32 parameter by its fused kernel: one of many, which a call updates
    together.

    Args:
        name: of `ir.optimizer.OPTIMIZERS`.
        cls, options: torch's class, and its arguments beside parameters and learning rate.
        shape: of the parameter.
        device: torch's name.
    """
    spec = Measured("float32", shape)
    samples = [seconds / _together(spec) for seconds in sample(updater(cls, options, shape, device), device)]
    return _op_time(UPDATE + OPTIMIZERS[name].timed_as, 0, (spec,), (spec,), "", samples, 0)


def updater(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], shape: tuple[int, ...], device: str
) -> Callable[[], object]:
    """A call that updates parameters, as many as one fused kernel takes together.

    Args:
        cls, options, shape, device: as of `measure_update`.
    """
    params = [
        torch.nn.Parameter(torch.randn(shape, device=device)) for _ in range(_together(Measured("float32", shape)))
    ]
    for param in params:
        param.grad = torch.randn(shape, device=device)
    return cls(params, lr=1e-4, fused=True, **options).step  # type: ignore[call-arg]


def _together(spec: Measured) -> int:
    return max(1, min(UPDATED_TOGETHER, UPDATED_BYTES // max(4 * spec.nbytes, 1)))


def _op_time(
    target: str,
    flag: int,
    inputs: tuple[Measured, ...],
    outputs: tuple[Measured | None, ...],
    detail: str,
    samples: list[float],
    workspace_bytes: int,
) -> OpTime:
    middle = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4)
    return OpTime(
        target=target,
        flag=flag,
        inputs=inputs,
        outputs=outputs,
        detail=detail,
        seconds=middle,
        spread=(high - low) / middle if middle else 0.0,
        samples=len(samples),
        workspace_bytes=workspace_bytes,
    )


def sample(run: Callable[[], object], device: str) -> list[float]:
    """Seconds of a call, several times over."""
    timed = _timed_cuda if torch.device(device).type == "cuda" else _timed_cpu
    timed(run, 1)
    guess = timed(run, 1)
    calls = max(1, math.ceil(SAMPLE_S / max(guess, 1e-7)))
    if calls > 1:
        calls = max(1, math.ceil(SAMPLE_S * calls / max(timed(run, calls) * calls, 1e-7)))
    found = [timed(run, calls) for _ in range(FEW_SAMPLES if guess > BUDGET_S / 2 else LEAST_SAMPLES)]
    while len(found) < MOST_SAMPLES and sum(found) * calls < BUDGET_S:
        found.append(timed(run, calls))
    return found


def _timed_cpu(run: Callable[[], object], calls: int) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(calls):
        run()
    return (clock() - started) / calls


def _timed_cuda(run: Callable[[], object], calls: int) -> float:
    """The device's time of a call; as many at once as it has room to queue."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun = time.perf_counter()
    run()
    issue_s = time.perf_counter() - begun
    calls = max(1, min(calls, QUEUED))
    hold_up(min(calls * issue_s * 1.2, MOST_HELD_S))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / calls


QUEUED = 100
"""Calls in a row; of a few kernels each they stay below the thousand that a stream takes before the host waits."""
MOST_HELD_S = 0.05
"""The longest that a device is held up."""


def _num_sets(op: LocalOp) -> int:
    size = sum(spec.nbytes for spec in (*op.inputs, *op.outputs) if spec is not None)
    return max(1, min(MOST_SETS, math.ceil(ROTATED_BYTES / max(size, 1))))


def _inputs(op: LocalOp, device: str, seed: int) -> list[Tensor]:
    """Random tensors as the op takes them; integers are rows of whatever it looks up."""
    generator = torch.Generator(device).manual_seed(seed)
    return [_tensor(spec, _bound(op), device, generator) for spec in op.inputs]


def _bound(op: LocalOp) -> int:
    """Below what an integer input is an index that exists."""
    floats = [spec for spec in (*op.inputs, *op.outputs) if spec is not None and spec.dtype in FLOATS and spec.shape]
    if op.target in _ROWS_OF and floats:
        return floats[_ROWS_OF[op.target]].shape[0]
    return max(1, min((size for spec in floats for size in spec.shape), default=1))


def _tensor(spec: Measured, bound: int, device: str, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if math.prod(spec.shape) == 0:
        return torch.empty(spec.shape, dtype=dtype, device=device)
    shape = spec.shape
    if spec.strides:
        shape = (1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.strides, strict=True)),)
    if spec.dtype == "bool":
        base = torch.rand(shape, device=device, generator=generator) < 0.5
    elif spec.dtype in FLOATS:
        wide = torch.float64 if spec.dtype == "float64" else torch.float32
        base = torch.rand(shape, device=device, generator=generator, dtype=wide).add_(0.5).to(dtype)
    elif dtype.is_complex:
        base = torch.rand(shape, device=device, generator=generator).to(dtype)
    else:
        base = torch.randint(0, bound, shape, device=device, generator=generator).to(dtype)
    return base.as_strided(spec.shape, spec.strides) if spec.strides else base


def _arguments(op: LocalOp, tensors: list[Tensor], device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    by_number: dict[str, Tensor] = {}
    queue = iter(tensors)

    def decode(arg: Arg) -> Any:
        if isinstance(arg, (tuple, list)):
            return tuple(decode(item) for item in arg)
        if arg_kind(arg) is ArgKind.VALUE:
            tensor = next(queue)
            return by_number.setdefault(arg, tensor)
        if arg_kind(arg) is ArgKind.OFFSET:
            return 0
        return decode_literal(arg)

    args = tuple(decode(arg) for arg in op.args)
    kwargs = {key: decode(arg) for key, arg in op.kwargs.items()}
    if is_factory(op.target):
        kwargs["device"] = device
    return args, kwargs


def _workspace(call: Callable[[], object]) -> int:
    """Bytes made and dropped inside, beside what is returned."""
    ledger, tracker = Ledger(), Tracker()
    with tracker, tracker.booking(ledger):
        result = call()
        kept = ledger.live_bytes
        most = ledger.window_bytes
    del result
    return max(0, most - kept)
