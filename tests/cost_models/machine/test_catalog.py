"""Cluster texts: what each of the three forms gives, and what each mistake is told."""

import math

import pytest

from paraplan.cost_models.machine import catalog as catalog_module
from paraplan.cost_models.machine.catalog import catalog_device, catalog_entry, parse_cluster
from paraplan.cost_models.machine.device_catalog import ALIASES, CATALOG
from paraplan.cost_models.machine.link_catalog import pcie_bytes_per_s
from paraplan.ir.errors import ClusterError
from paraplan.ir.machine.cluster import ClusterSpec, check_cluster
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


def test_local_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "num_cores", lambda: 2)
    assert parse_cluster("local:2") == ClusterSpec.local(2)
    four, alone = parse_cluster("local:4"), ClusterSpec.local(4)
    assert four == ClusterSpec.local(4, cores=2) and "2 cores shared by 4 processes" in four.groups[0].device.source
    rates, whole = four.groups[0].device.flops_per_s, alone.groups[0].device.flops_per_s
    assert rates == {dtype: rate / 2 for dtype, rate in whole.items()}
    seconds = [
        (
            each.device.launch_s,
            1 / each.device.memory_bytes_per_s,
            1 / each.in_node.bytes_per_s,
            each.in_node.latency_s,
            1 / each.host.bytes_per_s,
            each.host.latency_s,
            1 / each.host_memory_bytes_per_s,
        )
        for each in (*four.groups, *alone.groups)
    ]
    assert seconds[0] == pytest.approx([2 * each for each in seconds[1]])
    assert four.plan_bytes() == alone.plan_bytes()


def test_file_round_trips(tmp_path) -> None:
    cluster = parse_cluster("4xA100-80:2")
    path = tmp_path / "machine.json"
    path.write_bytes(to_json(cluster))
    assert parse_cluster(str(path)) == cluster


GPUS = [name for name in CATALOG if name != "cpu"]


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_entry_describes_a_machine(name: str) -> None:
    cluster = check_cluster(parse_cluster(f"8x{name}:2"))
    group, device = cluster.groups[0], cluster.groups[0].device
    assert device.source and device.kind == name
    assert cluster.between_nodes.bytes_per_s <= group.in_node.bytes_per_s
    assert group.host.bytes_per_s < device.memory_bytes_per_s


@pytest.mark.parametrize("name", list(CATALOG))
def test_every_number_has_a_source(name: str) -> None:
    entry = CATALOG[name]
    assert set(entry.device.sources) == {*entry.device.flops_per_s, "memory_bytes", "memory_bytes_per_s"}
    assert all(entry.device.sources.values())
    assert all(link.source for link in (entry.in_node, entry.between_nodes, entry.host, entry.disk))


@pytest.mark.parametrize("name", GPUS)
def test_rates_grow_as_formats_shrink(name: str) -> None:
    rates = CATALOG[name].device.flops_per_s
    order = [rates[dtype] for dtype in ("float64", "float32", "tf32", "float16", "float8_e4m3fn") if dtype in rates]
    assert order == sorted(order)
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    assert rates.get("float8_e5m2") == rates.get("float8_e4m3fn")
    assert rates.get("int8", math.inf) >= rates["float16"]


@pytest.mark.parametrize("name", GPUS)
def test_units_are_those_of_devices(name: str) -> None:
    """A slip of a thousand, or bits for bytes, leaves these ranges."""
    entry = CATALOG[name]
    device = entry.device
    assert 16 << 30 <= device.memory_bytes <= 288 << 30
    assert 0.5e12 <= device.memory_bytes_per_s <= 20e12
    assert 1e12 <= device.flops_per_s["float64"] and max(device.flops_per_s.values()) <= 20e15
    assert 0.1 <= device.flops_per_s["float16"] / device.memory_bytes_per_s / 1000 <= 1.0
    assert 12e9 <= entry.host.bytes_per_s <= 130e9 and entry.host.bytes_per_s / 2 <= entry.in_node.bytes_per_s <= 1e12


def test_devices_of_one_chip_agree() -> None:
    device = {name: entry.device for name, entry in CATALOG.items()}
    for same in (("H100", "H200", "H100-HBM2e-96"), ("A100-40", "A100-80", "A100-40-PCIe", "A100-80-PCIe")):
        assert len({tuple(device[name].flops_per_s.items()) for name in same}) == 1
    for less, more in (("A100-40", "A100-80"), ("A100-80-PCIe", "A100-80"), ("H100-PCIe", "H100"), ("H100", "H200")):
        assert device[less].memory_bytes_per_s < device[more].memory_bytes_per_s
        assert device[less].memory_bytes <= device[more].memory_bytes
    assert all(rate < device["H100"].flops_per_s[dtype] for dtype, rate in device["H100-PCIe"].flops_per_s.items())


def test_numbers_of_the_data_sheets() -> None:
    """A few, written out, so that a changed formula is seen."""
    assert CATALOG["A100-80"].in_node.bytes_per_s == 600e9 / 2
    assert CATALOG["H100"].in_node.bytes_per_s == 900e9 / 2
    assert CATALOG["B200"].in_node.bytes_per_s == 1.8e12 / 2
    assert CATALOG["MI300X"].in_node.bytes_per_s == 896e9 / 2
    assert CATALOG["V100-32"].between_nodes.bytes_per_s == 4 * 100e9 / 8 / 8
    assert pcie_bytes_per_s(3) == pytest.approx(15.75e9, rel=1e-3)
    assert pcie_bytes_per_s(4) == pytest.approx(31.5e9, rel=1e-3)
    assert pcie_bytes_per_s(5) == pytest.approx(63.0e9, rel=1e-3)
    assert catalog_device("H100").flops_per_s["tf32"] == pytest.approx(989.4e12 / 2)
    assert catalog_device("B200").flops_per_s["bfloat16"] == 2.25e15


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("8xA100-80:2", "8xA100-80:2"),
        ("8xV100-32:4", "8xV100-32:4"),
        ("1x4090", "1xRTX4090"),
        ("4xrtx-4090", "4xRTX4090"),
        ("8xH100-96:8", "8xH100-HBM2e-96:8"),
        ("8xmi300x", "8xMI300X"),
        ("2xcpu:2", "2xcpu:2"),
        ("8xH100-SXM", "8xH100"),
    ],
)
def test_names_and_aliases(text: str, name: str) -> None:
    assert parse_cluster(text).name == name


def test_aliases_name_devices_of_the_catalog_and_hide_none() -> None:
    assert set(ALIASES.values()) <= set(CATALOG)
    assert not {alias.lower() for alias in ALIASES} & {name.lower() for name in CATALOG}


def test_groups_joined_by_plus() -> None:
    cluster = parse_cluster("8xA100-80:2 + 8xH100:2")
    assert cluster.name == "8xA100-80:2+8xH100:2" and cluster.num_devices == 32
    assert [group.device.kind for group in cluster.groups] == ["A100-80", "H100"]
    assert cluster.device_kinds() == (0,) * 16 + (1,) * 16
    assert cluster.network((0, 8)).bytes_per_s == 25e9 and cluster.network((16, 24)).bytes_per_s == 50e9
    assert cluster.network((0, 16)).bytes_per_s == 25e9
    assert parse_cluster("1xH100+1xH100").device_kinds() == (0, 0)


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
        ("8xH100+", "cannot read cluster '' of '8xH100+'"),
        ("8xH100+H200", "cluster 'H200' of '8xH100+H200' does not say how many"),
        ("8xH100+local:2", "'local:2' stands alone"),
        ("8xH100+8xMI300X", "no collective library joins NVIDIA and AMD"),
        ("8xH100+0xH200", "groups[1].devices_per_node must be a positive number"),
        ("8xA100", "did you mean A100-40 or A100-80"),
        ("8xH20", "did you mean H200"),
        ("8xRTX4080", "did you mean RTX4090"),
        ("-8xH100", "cannot read cluster '-8xH100'"),
        ("8xH100:-1", "cannot read cluster '8xH100:-1'"),
        ("8.5xH100", "cannot read cluster '8.5xH100'"),
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
