"""Collectives against hand numbers, bounds and each other."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paraplan.cost_models.communication.collectives import (
    TIMES_S,
    AxisLink,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    axis_link,
    collective_time_s,
    hierarchical_all_reduce_s,
    p2p_s,
    permute_s,
    reduce_scatter_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)
from paraplan.cost_models.constants import GPU
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import CostModelError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.collectives import COLLECTIVES
from paraplan.ir.machine.device import Link
from paraplan.ir.machine.mesh import make_mesh

FLAT = AxisLink(size=8, latency_s=1e-6, bytes_per_s=1e9)
TWO = AxisLink(
    size=16,
    latency_s=5e-6,
    bytes_per_s=5e7,
    level="between_nodes",
    local_size=8,
    local_latency_s=1e-6,
    local_bytes_per_s=1e9,
)


def test_flat_axis_by_hand() -> None:
    assert all_gather_s(1000, FLAT) == pytest.approx(7 * (1e-6 + 1000 / 1e9))
    assert reduce_scatter_s(8000, FLAT) == pytest.approx(7 * (1e-6 + 1000 / 1e9))
    assert ring_all_reduce_s(8000, FLAT) == pytest.approx(14 * (1e-6 + 1000 / 1e9))
    assert tree_all_reduce_s(8000, FLAT) == pytest.approx(2 * 3e-6 + 2 * 8000 / 1e9)
    assert all_to_all_s(8000, FLAT) == pytest.approx(7 * (1e-6 + 1000 / 1e9))
    assert permute_s(8000, FLAT) == pytest.approx(1e-6 + 8000 / 1e9)


@pytest.mark.parametrize("target", sorted(TIMES_S))
def test_a_record_and_its_time_agree_on_what_is_sent(target: str) -> None:
    for n in (2, 3, 8):
        axis = AxisLink(size=n, latency_s=0.0, bytes_per_s=1e9)
        assert collective_time_s(target, 24 << 20, axis) * 1e9 / (24 << 20) == pytest.approx(
            COLLECTIVES[target].sent_share(n)
        )


def test_two_levels_by_hand() -> None:
    ports = 8 * 5e7
    crossing, local = 1 * 5e-6, 14 * 1e-6
    size = 1 << 20
    assert ring_all_reduce_s(size, TWO) == pytest.approx(2 * (crossing + local) + 2 * 15 / 16 * size / ports)
    assert tree_all_reduce_s(size, TWO) == pytest.approx(2 * (7e-6 + 5e-6) + 2 * size / ports)
    assert all_gather_s(1000, TWO) == pytest.approx(crossing + local + 15 * 1000 / ports)
    # Scatter 7/8 in the node, exchange an eighth between two nodes (the ring beats the tree), gather it back.
    across = 2 * 5e-6 + size / 8 / 5e7
    assert hierarchical_all_reduce_s(size, TWO) == pytest.approx(2 * 7 * (1e-6 + size / 8 / 1e9) + across)
    assert permute_s(1000, TWO) == pytest.approx(5e-6 + 1000 / 5e7)
    assert all_to_all_s(16 * 1000, TWO) == pytest.approx(8 * (5e-6 + 1000 / 5e7))


def test_all_reduce_takes_tree_for_latency_and_ring_for_bandwidth() -> None:
    wide = AxisLink(size=64, latency_s=1e-5, bytes_per_s=1e9)
    assert all_reduce_s(64, wide) == tree_all_reduce_s(64, wide) < ring_all_reduce_s(64, wide)
    large = 1 << 32
    assert all_reduce_s(large, wide) == ring_all_reduce_s(large, wide) < tree_all_reduce_s(large, wide)


def test_hierarchy_never_loses_to_a_network_ring_of_single_members() -> None:
    """With 8 ports a node, 16 ranks reduce faster than over one port each in a line."""
    line = AxisLink(size=16, latency_s=5e-6, bytes_per_s=5e7, level="between_nodes")
    assert all_reduce_s(1 << 28, TWO) < all_reduce_s(1 << 28, line)


links = st.builds(
    lambda nodes, local, up, down: AxisLink(
        size=nodes * local,
        latency_s=4e-6,
        bytes_per_s=down,
        level="in_node" if nodes == 1 else "between_nodes",
        local_size=local,
        local_latency_s=1e-6,
        local_bytes_per_s=up if nodes > 1 else down,
        start_s=6e-6,
    ),
    st.integers(1, 12),
    st.integers(1, 8),
    st.floats(1e9, 1e12),
    st.floats(1e8, 1e11),
)


@given(st.sampled_from(sorted(TIMES_S)), links, st.integers(0, 1 << 34), st.integers(0, 1 << 34))
def test_times_are_monotone_in_bytes_and_zero_alone(target: str, axis: AxisLink, one: int, two: int) -> None:
    low, high = sorted((one, two))
    assert 0.0 <= collective_time_s(target, low, axis) <= collective_time_s(target, high, axis)
    if axis.size == 1:
        assert collective_time_s(target, high, axis) == 0.0
    else:
        assert collective_time_s(target, low, axis) >= axis.start_s


@given(links, st.integers(1, 1 << 32))
def test_all_reduce_is_not_slower_than_scatter_then_gather(axis: AxisLink, part: int) -> None:
    size = part * axis.size
    halves = reduce_scatter_s(size, axis) + all_gather_s(part, axis)
    assert all_reduce_s(size, axis) <= halves * (1 + 1e-9)


@given(links, st.integers(1, 1 << 32))
def test_no_all_gather_beats_the_wire(axis: AxisLink, part: int) -> None:
    """Each node takes in what it lacks through its m ports."""
    if axis.is_two_level:
        missing = (axis.size - axis.local_size) * part
        assert all_gather_s(part, axis) >= missing / (axis.local_size * axis.bytes_per_s) * (1 - 1e-9)


@pytest.mark.parametrize("target", sorted(TIMES_S))
def test_negative_bytes_are_refused(target: str) -> None:
    with pytest.raises(CostModelError, match="negative"):
        collective_time_s(target, -1, FLAT)
    with pytest.raises(CostModelError, match="negative"):
        p2p_s(-1, Link(bytes_per_s=1.0, latency_s=0.0))


def test_unknown_collective_and_axis_are_refused() -> None:
    with pytest.raises(CostModelError, match="gossip"):
        collective_time_s("gossip", 8, FLAT)
    costs = Costs(ClusterSpec.local(2), make_mesh((2,), ("dp",)))
    with pytest.raises(CostModelError, match="axis 1"):
        costs.moves.collective_s("all_reduce", 1, 8)


def test_axis_levels_follow_the_nodes() -> None:
    cluster = parse_cluster("8xH100:4")
    mesh = make_mesh((8, 4), ("dp", "tp"))
    tp, dp = axis_link(cluster, mesh, 1), axis_link(cluster, mesh, 0)
    assert (tp.level, tp.size, tp.nodes) == ("in_node", 4, 1)
    assert tp.bytes_per_s == pytest.approx(450e9 * GPU.in_node)
    assert (dp.level, dp.size, dp.nodes, dp.local_size) == ("between_nodes", 8, 4, 2)
    assert dp.bytes_per_s == pytest.approx(50e9 * GPU.between_nodes)
    assert dp.ring_bytes_per_s == pytest.approx(2 * 50e9 * GPU.between_nodes)
    assert Costs(cluster, mesh).moves.comm_streams == ("comm:between_nodes", "comm:in_node")


def test_axis_across_nodes_with_one_member_each() -> None:
    cluster = parse_cluster("8xH100:4")
    across = axis_link(cluster, make_mesh((4, 8), ("dp", "tp")), 0)
    assert (across.nodes, across.local_size, across.is_two_level) == (4, 1, False)
    assert all_reduce_s(1 << 30, across) == pytest.approx(
        GPU.collective_start_s + 2 * 3 * 4e-6 + 1.5 * (1 << 30) / (50e9 * GPU.between_nodes)
    )


def test_a_mesh_inside_one_node_of_many_needs_no_network() -> None:
    cluster = parse_cluster("8xH100:2")
    mesh = make_mesh((8,), ("tp",), 8)
    assert axis_link(cluster, mesh, 0).level == "in_node"
    shifted = make_mesh((8,), ("tp",), 4)
    assert axis_link(cluster, shifted, 0).level == "between_nodes"


def test_a_big_mesh_is_quick_to_read() -> None:
    cluster = parse_cluster("8xH100:2048")
    mesh = make_mesh((128, 16, 8), ("dp", "pp", "tp"))
    assert [axis_link(cluster, mesh, axis).nodes for axis in range(3)] == [128, 16, 1]
    assert math.isfinite(all_reduce_s(1 << 30, axis_link(cluster, mesh, 0)))


MIXED = parse_cluster("8xA100-80:2+8xH100:2")


def test_an_axis_across_groups_runs_at_the_slowest_link() -> None:
    mesh = make_mesh((4, 8), ("dp", "tp"))
    across, inside = axis_link(MIXED, mesh, 0), axis_link(MIXED, mesh, 1)
    assert across.bytes_per_s == pytest.approx(25e9 * GPU.between_nodes)
    assert inside.bytes_per_s == pytest.approx(300e9 * GPU.in_node)  # half of its groups are A100 nodes
    only_h100 = make_mesh((2, 8), ("dp", "tp"), 16)
    assert axis_link(MIXED, only_h100, 0).bytes_per_s == pytest.approx(50e9 * GPU.between_nodes)
    assert axis_link(MIXED, only_h100, 1).bytes_per_s == pytest.approx(450e9 * GPU.in_node)


@pytest.mark.parametrize("target", sorted(TIMES_S))
def test_a_mixed_collective_is_never_faster_than_on_either_kind_alone(target: str) -> None:
    mesh = make_mesh((4, 8), ("dp", "tp"))
    for axis in (0, 1):
        mixed = collective_time_s(target, 1 << 28, axis_link(MIXED, mesh, axis))
        alone = [
            collective_time_s(target, 1 << 28, axis_link(parse_cluster(f"8x{kind}:4"), mesh, axis))
            for kind in ("A100-80", "H100")
        ]
        assert mixed == pytest.approx(max(alone))


def test_a_slow_link_between_groups_counts_only_where_an_axis_crosses_it() -> None:
    wan = Link(bytes_per_s=1e9, latency_s=1e-3)
    cluster = msgspec.structs.replace(MIXED, between_nodes=wan)
    mesh = make_mesh((2, 2, 8), ("site", "dp", "tp"))
    site, dp, _ = (axis_link(cluster, mesh, axis) for axis in range(3))
    assert (site.bytes_per_s, site.latency_s) == (pytest.approx(1e9 * GPU.between_nodes), 1e-3)
    assert (dp.bytes_per_s, dp.latency_s) == (pytest.approx(25e9 * GPU.between_nodes), 4e-6)


def test_unequal_nodes_are_limited_by_the_one_with_fewest_members() -> None:
    """Twelve devices, eight in one node and four in the other: the ring enters the second through four ports."""
    cluster = parse_cluster("8xH100+4xH100")
    link = axis_link(cluster, make_mesh((12,), ("dp",)), 0)
    assert (link.local_size, link.ring_bytes_per_s) == (4, pytest.approx(4 * 50e9 * GPU.between_nodes))
    even = axis_link(parse_cluster("4xH100:3"), make_mesh((12,), ("dp",)), 0)
    assert all_reduce_s(1 << 28, link) == all_reduce_s(1 << 28, even)
