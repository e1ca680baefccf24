"""Cluster texts: what each of the three forms gives, and what each mistake is told."""

import pytest

from paraplan.cost_models.catalog import catalog_device, catalog_entry, parse_cluster
from paraplan.cost_models.devices import CATALOG
from paraplan.ir.cluster import ClusterSpec, check_cluster
from paraplan.ir.errors import ClusterError
from paraplan.ir.struct import to_json


def test_catalog_name_is_nodes_of_devices() -> None:
    cluster = parse_cluster("8xH100:4")
    assert cluster.num_devices == 32
    assert cluster.node_of(7) == 0 and cluster.node_of(8) == 1
    assert cluster.name == "8xH100:4"
    assert cluster.groups[0].device.flops_per_s["bfloat16"] == pytest.approx(989.4e12)
    assert cluster.between_nodes is not None and cluster.between_nodes.bytes_per_s == 50e9


def test_one_node_has_no_network_and_case_does_not_matter() -> None:
    cluster = parse_cluster("8xh100")
    assert cluster.num_devices == 8 and cluster.between_nodes is None
    assert cluster == parse_cluster(" 8xH100 ") == parse_cluster("8xH100:1")


def test_local() -> None:
    assert parse_cluster("local:3") == ClusterSpec.local(3)


def test_file_round_trips(tmp_path) -> None:
    cluster = parse_cluster("4xA100-80:2")
    path = tmp_path / "machine.json"
    path.write_bytes(to_json(cluster))
    assert parse_cluster(str(path)) == cluster


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_entry_describes_a_machine(name: str) -> None:
    cluster = check_cluster(parse_cluster(f"8x{name}:2"))
    device = cluster.groups[0].device
    assert device.source and device.kind == name
    rates = device.flops_per_s
    assert rates["float64"] <= rates["float32"] <= rates["float16"]
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    assert cluster.between_nodes.bytes_per_s <= cluster.groups[0].in_node.bytes_per_s
    assert cluster.groups[0].host.bytes_per_s < device.memory_bytes_per_s


def test_v100_has_no_bfloat16() -> None:
    assert "bfloat16" not in catalog_device("V100-32").flops_per_s


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH1000", "no device 'H1000' in the catalog"),
        ("cluster.yaml", "no cluster file 'cluster.yaml'"),
        ("some/dir/cluster.json", "no cluster file"),
        ("some/dir/cluster", "looks like a file"),
        ("0xH100", "devices_per_node must be a positive number"),
        ("8xH100:0", "nodes must be a positive number"),
        ("local:0", "must be a positive number"),
        ("H100", 'write "8xH100"'),
        ("", "cannot read cluster"),
        ("eight", "cannot read cluster"),
    ],
)
def test_mistakes_are_named(text: str, said: str) -> None:
    with pytest.raises(ClusterError) as fault:
        parse_cluster(text)
    assert said in str(fault.value)


def test_unknown_device_lists_what_exists_and_the_three_forms() -> None:
    with pytest.raises(ClusterError) as fault:
        catalog_entry("H1000")
    for wanted in (*CATALOG, ".yaml", "local:4", "8xH100:4"):
        assert wanted in str(fault.value)
