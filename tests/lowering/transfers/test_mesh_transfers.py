"""Messages between meshes of any shapes: every receiver ends with its block, by brute force over all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch

from paraplan.ir.machine.mesh import Layout, Mesh, P, R, S, local_shape, make_mesh
from paraplan.ir.model.tensor import TensorSpec
from paraplan.lowering.transfers.mesh_transfers import Message, crossing_layouts, ends_of
from paraplan.runtime.state.params import cut

SPEC = TensorSpec("float64", (8, 12, 4))
MESHES = (
    make_mesh((1,), ("dp",)),
    make_mesh((4,), ("dp",)),
    make_mesh((2, 2), ("dp", "tp")),
    make_mesh((4, 2), ("dp", "tp")),
    make_mesh((2, 4), ("tp", "dp")),
    make_mesh((3,), ("tp",)),
)
PLACES = (R, S(0), S(1), P)


def moved(mesh: Mesh, first: int) -> Mesh:
    return mesh.over(first + device for device in mesh.devices)


def legal(layout: Layout, mesh: Mesh) -> bool:
    try:
        local_shape(SPEC.shape, layout, mesh.shape)
    except Exception:  # noqa: BLE001 - whatever says it may not lie so
        return False
    return True


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("source", MESHES)
@pytest.mark.parametrize("other", MESHES)
def test_every_rank_gets_its_block(source: Mesh, other: Mesh, in_parts: bool) -> None:
    target = moved(other, source.size)
    value = torch.arange(8.0 * 12 * 4, dtype=torch.float64).reshape(SPEC.shape)
    for layout in itertools.product(PLACES, repeat=len(source.shape)):
        if not legal(layout, source):
            continue
        sent, received = crossing_layouts(SPEC, (R, *layout), source, target, 1, in_parts)
        assert source.shape == target.shape or P not in sent
        if P in sent:
            continue
        ends = ends_of(Message("m", 0, 1, SPEC, sent, received, received), source, target, 1)
        letters: dict[tuple[int, int], torch.Tensor] = {}
        for place, rank in enumerate(source.devices):
            block = cut(value, sent[1:], source.shape, source.coordinates(rank))
            for transfer in ends.sends:
                if transfer.peers[place] >= 0:
                    start = transfer.starts[place] if transfer.starts else (0,) * 3
                    key = (rank, transfer.peers[place])
                    assert key not in letters, "a pair of ranks exchanges one part of a message"
                    letters[key] = block[tuple(slice(a, a + n) for a, n in zip(start, transfer.shape, strict=True))]
        for place, rank in enumerate(target.devices):
            parts = [letters.pop((transfer.peers[place], rank)) for transfer in ends.receives]
            for dim in reversed(range(3)):
                n = ends.pieces[dim]
                parts = [torch.cat(parts[at : at + n], dim) for at in range(0, len(parts), n)]
            assert torch.equal(parts[0], cut(value, received[1:], target.shape, target.coordinates(rank)))
        assert not letters, "what is sent is received"
        if in_parts and source.shape == target.shape and R in received:  # nothing is sent twice that could be cut
            sizes = local_shape(SPEC.shape, received[1:], target.shape)
            free = [size for dim, size in enumerate(sizes) if S(dim) not in received]
            left = [n for place, n in zip(received[1:], target.shape, strict=True) if place == R]
            assert all(n == 1 or size % n for n in left for size in free)


def test_shards_are_cut_and_joined_without_being_gathered() -> None:
    two, four = make_mesh((2, 2), ("dp", "tp")), moved(make_mesh((4,), ("dp",)), 4)
    for source, target, parts in ((two, four, 1), (four, two, 2)):
        layout = tuple(S(0) if axis == "dp" else R for axis in source.axes)
        sent, received = crossing_layouts(SPEC, (R, *layout), source, target, 1)
        assert S(0) in sent
        assert S(0) in received
        ends = ends_of(Message("m", 0, 1, SPEC, sent, received, received), source, target, 1)
        assert len(ends.receives) == parts
        assert all(transfer.shape == (2, 12, 4) for transfer in (*ends.sends, *ends.receives))
