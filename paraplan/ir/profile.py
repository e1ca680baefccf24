"""Measured times of ops and collectives on one device: what a profile file holds, and what a plan keeps of it.

An op's time is found under two names. The *shape key* is what a planner knows before anything is lowered: target, what
changes its work (`flag`), local dtypes and shapes. The *full key* adds what a lowered instruction has besides: strides
that are not row-major, and arguments that change the kernel. Several measurements may share a shape key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paraplan.ir.errors import ProfileError
from paraplan.ir.machine.kernel_choice import has_choice
from paraplan.ir.model.graph import Arg, ArgKind, arg_kind, target_parts
from paraplan.ir.model.strides import contiguous_strides
from paraplan.ir.model.tensor import DTYPE_BYTES
from paraplan.ir.struct import Value

PROFILE_VERSION = 3
VIEW = "view"
"""Target of the time that any op takes which only reinterprets a tensor: the host's, whatever its shape."""
UPDATE = "update."
"""Before an optimizer's name: the update of the tensors that are its inputs."""


class Spec(Protocol):
    """Anything with a dtype and a local shape."""

    @property
    def dtype(self) -> str:
        """Torch's name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""


class Measured(Value, frozen=True, array_like=True):
    """A tensor as it was given to a kernel; `strides` is empty where it was row-major."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class OpTime(Value, frozen=True, kw_only=True):
    """The time of one op on local shapes.

    Attributes:
        target: of the instruction.
        flag: what changes its work beyond shapes (`cost_models.ops.roofline.variant`).
        inputs, outputs: tensors; None for an absent output.
        detail: see `detail_of`.
        seconds: median.
        spread: interquartile range over the median.
        samples: how many; 0 for a time that was interpolated.
        workspace_bytes: the most it was seen to make and drop inside.
    """

    target: str
    flag: int
    inputs: tuple[Measured, ...]
    outputs: tuple[Measured | None, ...]
    detail: str = ""
    seconds: float
    spread: float = 0.0
    samples: int = 1
    workspace_bytes: int = 0

    @property
    def updated_by(self) -> str:
        """The optimizer (`Optimizer.timed_as`) whose update this is the time of; "" of ops."""
        return self.target.removeprefix(UPDATE) if self.target.startswith(UPDATE) else ""

    @property
    def shape_key(self) -> str:
        """See the module's head."""
        return shape_key(self.target, self.flag, self.inputs, self.outputs)

    @property
    def full_key(self) -> str:
        """See the module's head."""
        return full_key(self.shape_key, [spec.strides for spec in self.inputs], self.detail)


class CollectiveTime(Value, frozen=True, kw_only=True):
    """The time of a collective of one size.

    Attributes:
        target: its name (`ir.machine.collectives`).
        size: ranks in the group.
        local_size: how many of them share a node.
        input_bytes: what one rank puts in (`cost_models.communication.collectives`).
        seconds, spread, samples: as of an op, but the mean of its rounds, over ranks that come when they are ready.
        called_s: of these, how long the thread that calls it is at work itself (Gloo copies what a reduce-scatter is
            given before it returns); 0 on GPUs.
    """

    target: str
    size: int
    local_size: int
    input_bytes: int
    seconds: float
    spread: float = 0.0
    samples: int = 1
    called_s: float = 0.0


class Profile(Value, frozen=True, kw_only=True):
    """Times of one device.

    Attributes:
        device: kind, as in a cluster ("H100", "cpu").
        name: of the very machine, as its driver or kernel calls it.
        torch: version the times were taken with.
        threads: of a CPU process.
        processes: how many such processes of the machine worked at once when times were taken; of GPUs always 1.
        compiled: torch.compile's backend; "" for eager.
        source: the file they are from.
        ops, collectives: the times.
    """

    device: str
    name: str
    torch: str
    threads: int = 1
    processes: int = 1
    compiled: str = ""
    source: str = ""
    ops: tuple[OpTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()

    @property
    def machine(self) -> tuple[str, str, str, int, int, str]:
        """What times of are comparable with no other's: every field but the times and their file."""
        return (self.device, self.name, self.torch, self.threads, self.processes, self.compiled)


class RunTimes(Value, frozen=True, kw_only=True):
    """What a run of a plan took: the file that `run --record` writes and `learn` reads.

    Attributes:
        version: of the format.
        predicted_s: the plan's step as it was priced.
        step_s: every step measured.
        seen: times of its ops, each the median over the steps and ranks that ran it.
    """

    version: int = 2
    predicted_s: float
    step_s: tuple[float, ...]
    seen: Profile


def shape_key(target: str, flag: int, inputs: Sequence[Spec], outputs: Sequence[Spec | None]) -> str:
    """What an op's time is looked up by before lowering.

    Args:
        target: the op.
        flag: what of its arguments changes its work (`roofline.variant`).
        inputs, outputs: local specs; None for an absent output.
    """
    return f"{target};{int(flag)};{_specs(inputs)};{_specs(outputs)}"


def _specs(specs: Sequence[Spec | None]) -> str:
    return ",".join(["-" if x is None else f"{x.dtype}[{'x'.join(map(str, x.shape))}]" for x in specs])


def full_key(shape: str, strides: Sequence[tuple[int, ...]], detail: str) -> str:
    """A shape key with strides (empty where row-major) and detail.

    Args:
        shape: of `shape_key`.
        strides: per tensor, empty where row-major.
        detail: of `detail_of`.
    """
    lie = ",".join("x".join(map(str, each)) for each in strides)
    return f"{shape};{lie};{detail}"


def odd_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, or nothing where they are row-major (dims of one element do not count)."""
    usual = contiguous_strides(shape)
    if all(size == 1 or have == want for size, have, want in zip(shape, strides, usual, strict=True)):
        return ()
    return strides


def detail_of(target: str, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], kernel: str = "") -> str:
    """The arguments that may change an op's kernel, as text; and as which it runs, where there are several.

    Of torch's ops all but floats (scales and epsilons); of our own only what chooses a path: truths, probabilities
    being zero or not. Their integers are shapes, offsets and numbers of random ops.

    Args:
        target: the op.
        args, kwargs: its arguments, local.
        kernel: that it runs as.
    """
    ours = target_parts(target).is_canonical
    given = [_plain(arg, ours) for arg in args], {key: _plain(arg, ours) for key, arg in sorted(kwargs.items())}
    return json.dumps(given, separators=(",", ":")) + (f" as {kernel}" if kernel and has_choice(target) else "")


def _plain(arg: Arg, ours: bool) -> Any:
    if isinstance(arg, str):
        kind = arg_kind(arg)
        return kind.value if kind in (ArgKind.VALUE, ArgKind.OFFSET) else arg
    if isinstance(arg, bool) or arg is None:
        return arg
    if isinstance(arg, float):
        return "0" if arg == 0 else "f"
    if isinstance(arg, int):
        return "i" if ours else arg
    return [_plain(item, ours) for item in arg]


def check_profile(profile: Profile, what: str) -> Profile:
    """The profile itself, when every number in it can be one.

    Raises:
        ProfileError: a time that is negative or none, an unknown dtype, or a negative size.
    """
    for op in profile.ops:
        tensors = [*op.inputs, *(out for out in op.outputs if out is not None)]
        if any(x.dtype not in DTYPE_BYTES or min(x.shape, default=0) < 0 for x in tensors):
            raise ProfileError(f"{what}: {op.target} has a tensor of an unknown dtype or a negative size")
        if any(x.strides and len(x.strides) != len(x.shape) for x in tensors):
            raise ProfileError(f"{what}: {op.target} has a tensor with another number of strides than dims")
        _check_time(op.seconds, op.spread, op.samples, f"{what}: {op.target}")
        if op.workspace_bytes < 0:
            raise ProfileError(f"{what}: {op.target} has {op.workspace_bytes} bytes of workspace")
    for each in profile.collectives:
        at = f"{what}: {each.target} over {each.size} ranks"
        if each.size < 1 or not 1 <= each.local_size <= each.size or each.input_bytes < 0:
            raise ProfileError(f"{at}: {each.local_size} of them in a node, {each.input_bytes} bytes")
        _check_time(each.seconds, each.spread, each.samples, at)
        if not 0 <= each.called_s <= each.seconds:
            raise ProfileError(f"{at}: its call takes {each.called_s} s of {each.seconds} s")
    return profile


def _check_time(seconds: float, spread: float, samples: int, at: str) -> None:
    if not (0 <= seconds < math.inf and 0 <= spread < math.inf and samples >= 0):
        raise ProfileError(f"{at}: {seconds} s with spread {spread} from {samples} samples is no measurement")
