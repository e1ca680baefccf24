"""Meshes, layouts and what a rank holds."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.machine.mesh import (
    Layout,
    Mesh,
    P,
    Partial,
    R,
    S,
    Shard,
    cuts_further,
    is_shardable,
    layout_text,
    local_shape,
    make_mesh,
    parse_layout,
    parse_placement,
)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 3), (2, 3, 4)])
def test_coordinates_and_groups_are_row_major(shape: tuple[int, ...]) -> None:
    mesh = make_mesh(shape, tuple("abc"[: len(shape)]), first_device=5)
    grid = np.arange(5, 5 + mesh.size).reshape(shape)
    assert mesh.size == grid.size
    for coords in np.ndindex(*shape):
        device = int(grid[coords])
        assert mesh.coordinates(device) == coords
        for axis in range(len(shape)):
            line = grid[(*coords[:axis], slice(None), *coords[axis + 1 :])]
            assert mesh.group(device, axis) == tuple(line.tolist())


def test_text_round_trips() -> None:
    for layout in itertools.product((R, P, S(0), S(12), Partial(op="max")), repeat=2):
        assert parse_layout(layout_text(layout)) == layout
    assert parse_layout("") == () and layout_text(()) == ""
    assert layout_text((S(1), P, Partial(op="max"), R)) == "S1,P,Pmax,R"
    for text in ("", "r", "S", "S-1", "S0 ", "Pmin", "Q"):
        with pytest.raises(InvalidPlanError, match="no such placement"):
            parse_placement(text)


def test_local_shapes() -> None:
    assert local_shape((8, 6), (S(0), S(0)), (2, 4)) == (1, 6)
    assert local_shape((8, 6), (S(1), P), (2, 4)) == (8, 3)
    for shape, layout in (((8, 6), (S(0), S(1))), ((4,), (S(1), R)), ((4,), (S(0), S(0)))):
        assert not is_shardable(shape, layout, (2, 4))
        with pytest.raises(InvalidPlanError, match="cannot lie as"):
            local_shape(shape, layout, (2, 4))


def block(layout: Layout, coords: tuple[int, ...], mesh: tuple[int, ...], shape: tuple[int, ...]) -> frozenset[int]:
    """Elements a rank holds."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for placement, coord, n in zip(layout, coords, mesh, strict=True):
        if isinstance(placement, Shard):
            x = np.split(x, n, placement.dim)[coord]
    return frozenset(x.ravel().tolist())


def test_cutting_further_is_holding_a_part_on_every_rank() -> None:
    mesh, shape = (2, 2), (4, 4)
    for outer, inner in itertools.product(itertools.product((R, S(0), S(1)), repeat=2), repeat=2):
        parts = all(block(inner, c, mesh, shape) <= block(outer, c, mesh, shape) for c in np.ndindex(*mesh))
        assert cuts_further(outer, inner) == parts, (layout_text(outer), layout_text(inner))


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((0, 1), "0-1"),
        ((4, 5, 6, 0, 2), "4-6,0,2"),
        (tuple(range(2048)), "0-2047"),
        ((1, 0), "1,0"),
        ((-2, -1), "-2--1"),
    ],
)
def test_files_have_devices_as_ranges_or_listed(devices: tuple[int, ...], text: str) -> None:
    mesh = Mesh(axes=("x",), shape=(len(devices),), ranges=devices)
    written = msgspec.json.encode(mesh)
    assert msgspec.json.decode(written)["devices"] == text
    for held in (text, list(devices)):
        read = msgspec.json.decode(msgspec.json.encode({**msgspec.json.decode(written), "devices": held}), type=Mesh)
        assert read == mesh
        assert read.devices == devices


@pytest.mark.parametrize("text", ["0-", "3-1", "0-99999999999", "a", "0-3,", "0--1", "0-1048576", "0-1048575,7"])
def test_damaged_ranges_are_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"no such range of devices|over 1,048,576"):
        msgspec.json.decode(msgspec.json.encode({"axes": ["x"], "shape": [1], "devices": text}), type=Mesh)
