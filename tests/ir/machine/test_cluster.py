"""Cluster descriptions: devices, nodes, links, and what is wrong with bad ones."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.cluster import ClusterSpec, check_cluster
from paraplan.ir.machine.cluster_file import cluster_yaml, read_cluster
from paraplan.ir.machine.device import Link
from paraplan.ir.struct import to_json


def two_groups() -> ClusterSpec:
    """Two nodes of two devices and one node of three."""
    local = ClusterSpec.local(2)
    first = msgspec.structs.replace(local.groups[0], nodes=2)
    second = msgspec.structs.replace(local.groups[0], devices_per_node=3, disk=None)
    return check_cluster(
        ClusterSpec(name="mixed", groups=(first, second), between_nodes=Link(bytes_per_s=1e9, latency_s=1e-5))
    )


def test_devices_run_through_groups_and_nodes() -> None:
    cluster = two_groups()
    assert cluster.num_devices == 7
    assert [cluster.node_of(device) for device in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    assert [cluster.groups.index(cluster.group_of(device)) for device in range(7)] == [0] * 4 + [1] * 3
    assert (
        cluster.span((0, 1)) == "in_node"
        and cluster.span((1, 2)) == "between_nodes"
        and cluster.span((4, 6)) == "in_node"
    )
    assert cluster.link("in_node", 5) == cluster.groups[1].in_node
    with pytest.raises(ClusterError, match="no disk link"):
        cluster.link("disk", 5)
    with pytest.raises(ClusterError, match="no between_nodes link"):
        ClusterSpec.local(2).link("between_nodes")


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_files_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cluster{suffix}"
    data = msgspec.json.decode(to_json(two_groups()))
    path.write_text(yaml.safe_dump(data) if suffix == ".yaml" else to_json(two_groups()).decode())
    assert read_cluster(path) == two_groups()


def changed(*path: Any, to: Any) -> Any:
    """The mixed cluster as data, with one entry changed."""
    data = at = msgspec.json.decode(to_json(two_groups()))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed("groups", to=[]), "groups is empty"),
        (changed("groups", 0, "nodes", to=0), r"groups\[0\].nodes must be a positive number, not 0"),
        (changed("groups", 1, "devices_per_node", to=-1), r"groups\[1\].devices_per_node must be a positive number"),
        (changed("groups", 0, "device", "memory_bytes", to=0), "memory_bytes must be a positive number"),
        (changed("groups", 0, "device", "memory_bytes_per_s", to=-1.0), "memory_bytes_per_s must be a positive number"),
        (changed("groups", 0, "device", "flops_per_s", to={}), "names no dtype"),
        (changed("groups", 0, "device", "flops_per_s", "float32", to=0.0), "flops_per_s.float32 must be"),
        (
            changed("groups", 0, "device", "launch_s", to=-1.0),
            r"launch_s is negative, too large or no number \(-1.0\)",
        ),
        (changed("groups", 0, "device", "power_share", to=1.5), "power_share is 1.5; a share of the rated power"),
        (changed("groups", 0, "in_node", "bytes_per_s", to=0.0), "in_node.bytes_per_s must be"),
        (changed("groups", 0, "host", "latency_s", to=-1.0), "host.latency_s is negative"),
        (
            changed("groups", 0, "in_node", "latency_s", to=float("inf")),
            "in_node.latency_s is negative|Expected `float`",
        ),
        (changed("groups", 0, "host_memory_bytes", to=-1), r"groups\[0\].host_memory_bytes is negative"),
        (changed("groups", 1, "disk_bytes", to=-1), r"groups\[1\].disk_bytes is negative"),
        (
            changed("groups", 1, "device", "backend", to="xpu"),
            r"groups\[1\].device.backend is 'xpu'; it is one of cuda, cpu",
        ),
        (
            changed("groups", 1, "device", "backend", to="cuda"),
            "groups run on cpu and cuda; one job runs on one backend",
        ),
        (changed("groups", 0, "device", "flops_per_s", to={"flot32": 1e9}), r"'flot32' \(did you mean float32"),
        (
            changed("groups", 0, "between_nodes", to={"bytes_per_s": 0.0, "latency_s": 0.0}),
            r"\[0\].between_nodes.bytes",
        ),
        (changed("between_nodes", to=None), "no between_nodes link"),
        (changed("between_nodes", "bytes_per_s", to=0), "between_nodes.bytes_per_s must be"),
        (changed("groups", 0, "gpus", to=3), "unknown field `gpus`.*paraplan cluster schema"),
        (changed("groups", 0, "devices_pernode", to=3), r"unknown field.*did you mean devices_per_node"),
        (changed("groups", 0, "nodes", to="two"), r"Expected `int`, got `str`.*groups\[0\].nodes"),
        (changed("name", to=None), "Expected `str`"),
        ([1, 2], "Expected `object`"),
        (
            changed("groups", 0, "in_node", "bytes_per_s", to=1e-300),
            "bytes_per_s is 1.00e-300; it may be at least 1",
        ),
        (
            changed("groups", 0, "device", "flops_per_s", "float32", to=1e300),
            "is 1.00e.300; it may be at most 1e.18",
        ),
        (changed("groups", 0, "host", "latency_s", to=1e300), "host.latency_s is negative, too large .*0 to 3600"),
        (changed("groups", 0, "nodes", to=1 << 40), "[0-9]+ devices; there may be 1048576"),
        (changed("groups", 0, "device", "memory_bytes", to=1 << 62), "memory_bytes is 4.61e.18; it may be at most"),
    ],
)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_bad_files_are_refused(tmp_path: Path, data: Any, message: str, suffix: str) -> None:
    path = tmp_path / f"cluster{suffix}"
    path.write_text(yaml.safe_dump(data) if suffix == ".yaml" else msgspec.json.encode(data).decode())
    with pytest.raises(ClusterError, match=message):
        read_cluster(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read cluster file .*nowhere"):
        read_cluster(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ClusterError, match=r"bad\.yaml"):
        read_cluster(tmp_path / "bad.yaml")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 2000)
    with pytest.raises(ClusterError, match=r"deep\.yaml.*recursion"):
        read_cluster(tmp_path / "deep.yaml")
    (tmp_path / "long.yaml").write_text("name: x\ngroups: " + "9" * 5000)
    with pytest.raises(ClusterError, match=r"long\.yaml.*digits"):
        read_cluster(tmp_path / "long.yaml")
    with pytest.raises(ClusterError, match="devices_per_node"):
        ClusterSpec.local(0)


@pytest.mark.parametrize("question", ["group_of", "node_of"])
def test_a_device_beyond_the_last_is_named(question: str) -> None:
    with pytest.raises(ClusterError, match="device 9"):
        getattr(two_groups(), question)(9)


def test_yaml_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    """`bytes_per_s: 25e9` is how people write it; YAML 1.1 calls it a text."""
    text = yaml.safe_dump(changed("between_nodes", "bytes_per_s", to=25e9)).replace("25000000000.0", "25e9")
    assert "25e9" in text
    (tmp_path / "cluster.yaml").write_text(text)
    assert read_cluster(tmp_path / "cluster.yaml").link("between_nodes").bytes_per_s == 25e9


def test_a_written_file_reads_back_equal_and_is_short(tmp_path: Path) -> None:
    cluster = two_groups()
    text = cluster_yaml(cluster, "two lines\nof comment")
    (tmp_path / "cluster.yaml").write_text(text)
    assert read_cluster(tmp_path / "cluster.yaml") == cluster
    assert text.startswith("# two lines\n# of comment\n") and "latency_s: 1.5e-4" in text and "!!" not in text


@given(st.floats(min_value=1.0, max_value=1e18))
def test_every_number_survives_a_file(value: float) -> None:
    first, *rest = two_groups().groups
    cluster = msgspec.structs.replace(
        two_groups(),
        groups=(msgspec.structs.replace(first, in_node=Link(bytes_per_s=value, latency_s=1 / value)), *rest),
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_yaml(cluster))
        assert read_cluster(path) == cluster


def test_a_group_has_its_own_network() -> None:
    fast, slow, wan = (Link(bytes_per_s=rate, latency_s=late) for rate, late in ((9e9, 1e-6), (3e9, 9e-6), (1e9, 1e-3)))
    first, second = two_groups().groups
    cluster = check_cluster(
        ClusterSpec(
            name="three nodes and one",
            groups=(
                msgspec.structs.replace(first, between_nodes=fast),
                msgspec.structs.replace(second, between_nodes=slow),
            ),
            between_nodes=wan,
        )
    )
    assert cluster.link("between_nodes", 0) == fast and cluster.link("between_nodes", 4) == slow
    assert cluster.network((0, 2)) == fast
    assert (cluster.network((0, 4)).bytes_per_s, cluster.network((0, 4)).latency_s) == (1e9, 1e-3)
    # A backbone faster than a group's ports does not make them faster.
    quick = msgspec.structs.replace(cluster, between_nodes=Link(bytes_per_s=1e12, latency_s=0.0))
    assert (quick.network((0, 4)).bytes_per_s, quick.network((0, 4)).latency_s) == (3e9, 9e-6)


def test_one_group_of_nodes_may_name_its_network_alone() -> None:
    group = msgspec.structs.replace(
        ClusterSpec.local(2).groups[0], nodes=2, between_nodes=Link(bytes_per_s=1e9, latency_s=0.0)
    )
    assert check_cluster(ClusterSpec(name="one", groups=(group,))).network((0, 2)).bytes_per_s == 1e9


def test_kinds_of_devices_follow_the_devices_not_the_groups() -> None:
    cluster = two_groups()
    assert cluster.device_kinds() == (0,) * 7  # groups differ in size only
    smaller = msgspec.structs.replace(cluster.groups[1].device, memory_bytes=1 << 20)
    mixed = msgspec.structs.replace(
        cluster, groups=(cluster.groups[0], msgspec.structs.replace(cluster.groups[1], device=smaller))
    )
    assert mixed.device_kinds() == (0, 0, 0, 0, 1, 1, 1)
    assert cluster.plan_bytes() == 4 << 30 and mixed.memory_bytes(tuple(range(7))) == 1 << 20
    assert mixed.memory_bytes((0, 1)) == cluster.groups[0].device.memory_bytes


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", " \n", "it is empty; `paraplan cluster schema`"),
        ("a.json", "", "it is empty"),
        ("a.yaml", "name: a\nname: b\ngroups: []\n", "line 2, column 1: 'name' is given twice .*line 1"),
        (
            "a.json",
            '{"name": "a",\n "groups": [{"nodes": NaN}]}',
            'line 2: .* after .*"nodes": \'; a number is written',
        ),
        ("a.json", '{"name": "a",\n "groups": [}', r"line 2: .* after .*\"groups\": \['$"),
    ],
)
def test_what_is_malformed_is_said_with_its_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ClusterError, match=said):
        read_cluster(path)


def test_too_many_devices_are_said_before_what_they_would_have() -> None:
    group = msgspec.structs.replace(
        ClusterSpec.local(2).groups[0], devices_per_node=99999999, host_memory_bytes=1 << 90
    )
    with pytest.raises(ClusterError, match="99999999 devices; there may be"):
        check_cluster(ClusterSpec(name="many", groups=(group,)))
