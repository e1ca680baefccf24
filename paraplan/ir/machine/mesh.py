"""Meshes with named axes, and how a tensor lies on one.

Axis means mesh, dim means tensor, always. A `Layout` is one `Placement` per mesh axis. Where two axes
shard the same dim, the earlier axis is the outer one (blocks of blocks), as in DTensor.

A dim that one axis alone shards need not divide: of n elements on k ranks every rank holds a block of ceil(n / k), and
what lies past the end in the last ranks' blocks is padding, of any value. So all ranks have one shape, and a block
starts at coordinate * ceil(n / k). Padding may be `PADDED_SHARE` of the dim at most; more is not worth its work.

Text forms, used in plan files: `R`, `S0`, `P` (partial sum), `Pmax`; a layout joins them with commas.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value

PADDED_SHARE = 8
"""At most one element of padding for so many of a dim."""

MOST_DEVICES = 1 << 20
"""Devices of the largest cluster: sums over ranks stay exact and lists of ranks small."""

_RANGE = re.compile(r"(-?[0-9]{1,12})(?:-(-?[0-9]{1,12}))?")


class Placement(Value, frozen=True, kw_only=True):
    """How a tensor lies along one mesh axis; one of the three subclasses."""


class Replicate(Placement, frozen=True, kw_only=True):
    """Every rank holds the whole tensor (along this axis)."""

    def __str__(self) -> str:
        return "R"


class Shard(Placement, frozen=True, kw_only=True):
    """Each rank holds one contiguous block of dim `dim`, equal in size, the last ones padded where need be."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


class Partial(Placement, frozen=True, kw_only=True):
    """Each rank holds a full-size addend; the tensor is their reduction by `op` ("sum" or "max")."""

    op: str = "sum"

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P{self.op}"


Layout = tuple[Placement, ...]

R = Replicate()
P = Partial()


@SESSION.cached()
def S(dim: int) -> Shard:
    """Short for `Shard(dim=dim)`."""
    return Shard(dim=dim)


class Mesh(Value, frozen=True, kw_only=True):
    """Devices arranged in a grid with named axes, outermost first.

    Attributes:
        axes: names, e.g. ("dp", "tp").
        shape: sizes, one per axis.
        ranges: global device numbers in row-major order, runs of them by first and last: "0-7,16-23"; in files its key
            is `devices`, and they may be listed there one by one.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranges: str | tuple[int, ...] = msgspec.field(name="devices")

    def __post_init__(self) -> None:
        listed = parse_ranges(self.ranges) if isinstance(self.ranges, str) else self.ranges
        msgspec.structs.force_setattr(self, "ranges", _ranges_text(listed))

    @property
    def devices(self) -> tuple[int, ...]:
        """Global device numbers in row-major order."""
        return parse_ranges(str(self.ranges))

    def over(self, devices: Iterable[int]) -> Mesh:
        """A mesh of the same axes and shape over other devices."""
        return Mesh(axes=self.axes, shape=self.shape, ranges=tuple(devices))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """Position of a device on every axis."""
        index = self.devices.index(device)
        coords = []
        for size in reversed(self.shape):
            index, coord = divmod(index, size)
            coords.append(coord)
        return tuple(reversed(coords))

    def group(self, device: int, axis: int) -> tuple[int, ...]:
        """The devices that differ from `device` along `axis` only, in order of that coordinate."""
        index = self.devices.index(device)
        stride = math.prod(self.shape[axis + 1 :])
        start = index - self.coordinates(device)[axis] * stride
        return tuple(self.devices[start + k * stride] for k in range(self.shape[axis]))


@SESSION.cached(4096)
def parse_ranges(text: str) -> tuple[int, ...]:
    """`"0-3,8"` to 0, 1, 2, 3, 8.

    Raises:
        ValueError: another text, or more than `MOST_DEVICES` of them.
    """
    found: list[int] = []
    for part in text.split(",") if text else ():
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"no such range of devices: {part[:40]!r} (one number, or first and last, as 8-15)")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or len(found) + last - first >= MOST_DEVICES:
            raise ValueError(f"devices {part}: the last is before the first, or they are over {MOST_DEVICES:,}")
        found.extend(range(first, last + 1))
    return tuple(found)


@SESSION.cached(4096)
def _ranges_text(devices: tuple[int, ...]) -> str:
    starts = [at for at, device in enumerate(devices) if not at or device != devices[at - 1] + 1]
    runs = [(devices[at], devices[stop - 1]) for at, stop in pairwise((*starts, len(devices)))]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def make_mesh(shape: tuple[int, ...], axes: tuple[str, ...], first_device: int = 0) -> Mesh:
    """A row-major mesh over consecutive devices.

    Args:
        shape: size of every axis.
        axes: their names.
        first_device: the number of the first device.
    """
    return Mesh(axes=axes, shape=shape, ranges=tuple(range(first_device, first_device + math.prod(shape))))


@SESSION.cached()
def parse_placement(text: str) -> Placement:
    """`R`, `S3`, `P` or `Pmax` to its placement.

    Raises:
        InvalidPlanError: any other text.
    """
    if text == "R":
        return R
    if text.startswith("S") and text[1:].isdigit():
        return S(int(text[1:]))
    if text == "P":
        return P
    if text == "Pmax":
        return Partial(op="max")
    raise InvalidPlanError(f"no such placement: {text!r} (R, S<dim>, P, Pmax)")


@SESSION.cached(4096)
def parse_layout(text: str) -> Layout:
    """`"S0,R"` to a layout; the empty text is the layout on a mesh without axes."""
    return tuple(parse_placement(part) for part in text.split(",")) if text else ()


def layout_text(layout: Layout) -> str:
    """The inverse of `parse_layout`."""
    return ",".join(map(str, layout))


def local_shape(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape one rank holds, padding included.

    Args:
        shape: global shape.
        layout: one placement per axis.
        mesh_shape: axis sizes.
    Raises:
        InvalidPlanError: a dim neither divides by the axes that shard it nor may be padded.
    """
    local = list(shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            divides = placement.dim < len(local) and local[placement.dim] % size == 0
            if not divides and not is_shardable(shape, layout, mesh_shape):
                raise InvalidPlanError(
                    f"shape {shape} cannot lie as {layout_text(layout)} on a mesh of shape {mesh_shape}"
                )
            local[placement.dim] = -(-local[placement.dim] // size)
    return tuple(local)


def is_shardable(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...], frozen: int = 0) -> bool:
    """Whether a tensor may lie so.

    Args:
        shape, layout, mesh_shape: as for `local_shape`.
        frozen: leading axes (microbatches) along which dims must divide.
    """
    factor = [1] * len(shape)
    for placement, size in zip(layout, mesh_shape, strict=True):
        if isinstance(placement, Shard):
            if placement.dim >= len(shape):
                return False
            factor[placement.dim] *= size
    uneven = [dim for dim, (n, k) in enumerate(zip(shape, factor, strict=True)) if n % k]
    return not uneven or all(_paddable(shape[dim], dim, layout, mesh_shape, frozen) for dim in uneven)


def _paddable(n: int, dim: int, layout: Layout, mesh_shape: tuple[int, ...], frozen: int) -> bool:
    axes = [axis for axis, place in enumerate(layout) if place == S(dim) and mesh_shape[axis] > 1]
    return len(axes) == 1 and axes[0] >= frozen and pads_little(n, mesh_shape[axes[0]])


def pads_little(n: int, size: int) -> bool:
    """Whether n elements may be sharded over so many ranks: they divide, or need little padding."""
    return PADDED_SHARE * (-n % size) <= n


def padded_dims(shape: tuple[int, ...], layout: Layout, mesh_shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The (dim, axis) pairs of dims whose shards are padded, in order of axes.

    Args:
        shape: of the tensor, global.
        layout: a placement per mesh axis.
        mesh_shape: size of every axis.
    """
    found = []
    for axis, (placement, size) in enumerate(zip(layout, mesh_shape, strict=True)):
        if isinstance(placement, Shard) and shape[placement.dim] % size:
            found.append((placement.dim, axis))
    return tuple(found)


def cuts_further(outer: Layout, inner: Layout) -> bool:
    """Whether `inner` only cuts `outer` further, so that a rank's inner shard is a slice of its outer one."""
    for axis, (a, b) in enumerate(zip(outer, inner, strict=True)):
        if a == b:
            continue
        if not isinstance(a, Replicate) or not isinstance(b, Shard) or b in outer[axis + 1 :]:
            return False
    return True


def is_view_of(shape: tuple[int, ...], outer: Layout, inner: Layout, mesh_shape: tuple[int, ...]) -> bool:
    """Whether a rank's inner shard is a slice of its outer one, padding included.

    Args:
        shape: of the tensor, global.
        outer, inner: layouts, a placement per mesh axis.
        mesh_shape: size of every axis.
    """
    padded = padded_dims(shape, inner, mesh_shape)
    return cuts_further(outer, inner) and set(padded) <= set(padded_dims(shape, outer, mesh_shape))


def without(layout: Layout, dim: int | None) -> Layout:
    """A layout that does not shard a dim."""
    return tuple(R if isinstance(place, Shard) and place.dim == dim else place for place in layout)


def gathered(layout: Layout) -> Layout:
    """A layout on a mesh and the axis in time before it, once the parts along that axis are gathered.

    A dim that was cut in time is whole on the mesh too: the rows of a rank's shards of all microbatches do not follow
    each other.
    """
    first, *rest = layout
    return (R, *without(tuple(rest), first.dim if isinstance(first, Shard) else None))
