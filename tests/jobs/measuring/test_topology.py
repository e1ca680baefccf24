"""What machines say of their links, in the forms they say it, and nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.jobs.measuring.topology import (
    JobTopology,
    in_node_link,
    parse_pcie,
    parse_port_rate,
    parse_topology,
    read_launch,
)

from . import topologies

NAMED = {name: text for name, text in vars(topologies).items() if name.isupper()}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("DGX_H100", 4),
        ("DGX1_V100", 8),
        ("FOUR_A100_BOARD", 4),
        ("BRIDGED_PAIRS", 4),
        ("ONE_SWITCH", 2),
        ("NIC_FIRST", 2),
        ("ONE_GPU", 1),
    ],
)
def test_every_pair_of_gpus_is_read_and_nothing_else(name: str, count: int) -> None:
    matrix = parse_topology(NAMED[name])
    assert set(matrix) == {(a, b) for a in range(count) for b in range(count) if a != b}
    assert all(matrix[b, a] == cell for (a, b), cell in matrix.items())


def test_cells_are_those_of_their_column() -> None:
    matrix = parse_topology(topologies.DGX1_V100)
    assert [matrix[0, other] for other in range(1, 8)] == ["NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"]
    assert parse_topology(topologies.NIC_FIRST) == {(0, 1): "NV2", (1, 0): "NV2"}


@pytest.mark.parametrize(
    ("name", "generation", "gb_per_s"),
    [
        ("DGX_H100", 4, 450),  # through a switch: all 18 links towards any peer
        ("DGX1_V100", 2, 150),  # a mesh: six links over four peers
        ("FOUR_A100_BOARD", 3, 300),  # four links to each of three peers
        ("BRIDGED_PAIRS", 3, 31.5),  # bridges do not join all four: PCIe
        ("ONE_SWITCH", 0, 31.5),
    ],
)
def test_links_of_whole_nodes(name: str, generation: int, gb_per_s: float) -> None:
    matrix = parse_topology(NAMED[name])
    gpus = tuple(sorted({gpu for gpu, _ in matrix}))
    link = in_node_link(matrix, gpus, generation, (4, 16))
    assert link is not None and link.bytes_per_s == pytest.approx(gb_per_s * 1e9, rel=1e-3)
    assert "nvidia-smi topo" in link.source


def test_links_of_some_of_a_nodes_gpus() -> None:
    bridged = parse_topology(topologies.BRIDGED_PAIRS)
    pair = in_node_link(bridged, (2, 3), 3, (4, 16))
    assert pair is not None and pair.bytes_per_s == 300e9
    cube = parse_topology(topologies.DGX1_V100)
    two = in_node_link(cube, (0, 1), 2, (3, 16))
    assert two is not None and two.bytes_per_s == 25e9
    far = in_node_link(cube, (0, 5), 2, (3, 16))
    near = in_node_link(parse_topology(topologies.ONE_SWITCH), (0, 1), 0, (3, 16))
    assert far is not None and near is not None
    assert far.bytes_per_s == near.bytes_per_s < 16e9 and far.latency_s == 2 * near.latency_s
    assert "copied through host" in far.source and "peer to peer" in near.source


@pytest.mark.parametrize("gpus", [(0,), (0, 9)])
def test_no_link_is_made_up(gpus: tuple[int, ...]) -> None:
    assert in_node_link(parse_topology(topologies.DGX_H100), gpus, 4, (5, 16)) is None
    assert in_node_link({}, gpus, 4, (5, 16)) is None
    assert in_node_link(parse_topology(topologies.ONE_SWITCH), (0, 1), 0, None) is None


@pytest.mark.parametrize("text", ["", "\n\n", "No devices were found", "NVIDIA-SMI has failed because ...", "GPU0 X"])
def test_nonsense_gives_nothing(text: str) -> None:
    assert parse_topology(text) == {}
    assert parse_pcie(text) is None and parse_port_rate(text) == 0.0


@given(st.text(alphabet="GPU01NVXSY \t\n4", max_size=200))
def test_no_text_breaks_the_parser(text: str) -> None:
    matrix = parse_topology(text)
    assert all(a != b for a, b in matrix)
    in_node_link(matrix, (0, 1), 4, (4, 16))


def test_pcie() -> None:
    assert parse_pcie("4, 16\n4, 16\n") == (4, 16)
    assert parse_pcie("5, 16\n4, 16\n5, 8\n") in ((4, 16), (5, 8))
    assert parse_pcie("5, 16\n3, 8\n") == (3, 8)
    assert parse_pcie("[N/A], [N/A]\n") is None
    assert parse_pcie("4, 16\n[N/A], 16\n") is None
    assert parse_pcie("9, 99\n") is None


def test_ports() -> None:
    assert parse_port_rate("200 Gb/sec (4X HDR)\n") == 25e9
    assert parse_port_rate("2.5 Gb/sec (1X SDR)") == pytest.approx(2.5e9 / 8)


@pytest.mark.parametrize(
    ("env", "nodes", "processes"),
    [
        ({}, 1, None),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "3"}, 2, 8),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, 1, 4),
        ({"WORLD_SIZE": "16"}, 1, None),
        ({"WORLD_SIZE": "10", "LOCAL_WORLD_SIZE": "4"}, 1, None),  # unequal nodes: nothing can be said
        ({"WORLD_SIZE": "many", "LOCAL_WORLD_SIZE": "-1"}, 1, None),
        ({"SLURM_NNODES": "4", "SLURM_GPUS_ON_NODE": "8"}, 4, 8),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "6(x2)"}, 2, 6),
        ({"SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "6,4"}, 2, None),
        ({"SLURM_NNODES": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 2, 4),
    ],
)
def test_launchers(env: dict[str, str], nodes: int, processes: int | None) -> None:
    found = read_launch(env)
    assert (found.nodes, found.processes_per_node) == (nodes, processes)
    assert bool(found.source) == (found != JobTopology())
