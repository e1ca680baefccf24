"""Which kernel an op runs as on a kind of device: chosen when a plan is lowered, so that what runs is what is priced.

Every canonical op has a reference kernel, a composition of torch's ops that runs anywhere
(`kernels.reference_kernels`). On a kind of device there may be others, one record each: when it applies, which devices
have it, how many kernels it launches, what it allocates inside. The first that applies is written into the instruction
(`Instr.kernel`), and nothing asks for the device again; where a profile has measured some of those that apply, the
quickest of them. Ops of torch's own launch one kernel, views none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.model.graph import Arg

Values = Sequence[LocalValue | None]
Args = tuple[Arg, ...]


class OpCall(NamedTuple):
    """An op on local values.

    Attributes:
        inputs: its tensors in order of appearance.
        outputs: its results; None for an absent one.
        args: its arguments.
    """

    inputs: Values
    outputs: Values
    args: Args


class Kernel(NamedTuple):
    """One way to run an op on one kind of device.

    Attributes:
        name: as in `Instr.kernel`.
        fits: whether it takes this call.
        launches: kernels it launches.
        workspace: bytes it allocates and drops inside.
        capability: least compute capability (the larger number) of a device that has it; 0: all have it.
        is_slow: whether it takes the call, but any other kernel that does is quicker.
    """

    name: str
    fits: Callable[[OpCall], bool]
    launches: Callable[[OpCall], int]
    workspace: Callable[[OpCall], int]
    capability: int = 0
    is_slow: Callable[[OpCall], bool] = lambda call: False


Seconds = Callable[[str], float | None]
"""By the name of a kernel, its measured time; None where there is none."""

_KERNELS: dict[tuple[str, str], tuple[Kernel, ...]] = {}


def offer(backend: str, target: str, *kernels: Kernel) -> None:
    """Records kernels of an op on a kind of device, the preferred ones first.

    Args:
        backend: of devices, such as "cuda".
        target: the op.
        kernels: of the op, the preferred ones first.
    """
    assert (backend, target) not in _KERNELS, (backend, target)
    _KERNELS[backend, target] = kernels


def offered(backend: str) -> dict[str, tuple[Kernel, ...]]:
    """By op, the kernels of a kind of device."""
    return {target: kernels for (of, target), kernels in _KERNELS.items() if of == backend}


def fitting(backend: str, target: str, call: OpCall) -> tuple[Kernel, ...]:
    """The kernels that take a call, the preferred ones first.

    Args:
        backend: of the device.
        target: the op.
        call: its local shapes, dtypes and arguments.
    """
    found = (kernel for kernel in _KERNELS.get((backend, target), ()) if kernel.fits(call))
    return tuple(sorted(found, key=lambda kernel: kernel.is_slow(call)))


def chosen(backend: str, capability: int, target: str, call: OpCall, seconds: Seconds | None = None) -> Kernel | None:
    """The kernel an op runs as: the quickest of those measured, else the first that the device has; None for the
    reference kernel.

    Args:
        backend, capability: of the device.
        target, call: the op, and on what.
        seconds: times of it as each kernel.
    """
    found = fitting(backend, target, call)
    timed = [(took, place) for place, each in enumerate(found) if seconds and (took := seconds(each.name)) is not None]
    if timed:
        return found[min(timed)[1]]
    return next((kernel for kernel in found if kernel.capability <= capability), None)


def has_choice(target: str) -> bool:
    """Whether any kind of device has several kernels for an op: times of it say of which they are."""
    return any(of == target and len(kernels) > 1 for (_, of), kernels in _KERNELS.items())


Dims = tuple[int, ...]


def merged_dims(shape: Sequence[int], global_shape: Sequence[int], starts: Sequence[int]) -> tuple[Dims, Dims, Dims]:
    """Sizes, global sizes and starts of a block's leading dims, the last one first; a dim that lies wholly in the block
    is one with that before it. At least one of each.

    Args:
        shape: of the block.
        global_shape: of the tensor.
        starts: where the block begins, dim by dim.
    """
    sizes, wholes, begins = [1], [1], [0]
    for size, whole, start in zip(shape[:-1], global_shape[:-1], starts[:-1], strict=True):
        if size == whole and start == 0:
            sizes[-1], wholes[-1], begins[-1] = sizes[-1] * size, wholes[-1] * whole, begins[-1] * size
        else:
            sizes.append(size)
            wholes.append(whole)
            begins.append(start)
    return tuple(reversed(sizes)), tuple(reversed(wholes)), tuple(reversed(begins))


def grouped_rows(chosen: int, held: int, total: int) -> int:
    """Rows of a piece in which a mixture's rows are multiplied: twice those of even routing, or all there may be.

    Args:
        chosen: rows of all experts.
        held: experts here.
        total: experts on all ranks.
    """
    return min(chosen, -(-2 * chosen * held // total))


def norm_splits(samples: int, channels: int) -> int:
    """Parts in which batch norm's sums over samples are taken, so that programs are enough for a device.

    Args:
        samples: of a channel.
        channels: here.
    """
    return max(1, min(-(-samples // 4096), 1024 // max(channels, 1)))


NARROW, CHANNELS = 32, 32
"""Elements of a plane below which a program of batch norm takes several channels at once, and how many."""


def channels_at_once(space: int) -> int:
    """Channels that a program of batch norm takes, whose planes have so many elements."""
    return 1 if space >= NARROW else CHANNELS


def whole_splits(samples: int, channels: int, space: int) -> int:
    """Parts in which one rank's batch norm goes over its samples: one, and so one kernel, where channels alone are
    programs enough for a device.

    Args:
        samples: of a channel.
        channels: here.
        space: elements of a plane.
    """
    groups = -(-channels // channels_at_once(space))
    return 1 if groups >= 128 or samples <= 4096 else norm_splits(samples, groups)
