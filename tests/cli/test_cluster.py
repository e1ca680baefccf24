"""`paraplan cluster`: the catalog, a cluster, the schema of its files, this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.machine.device_catalog import CATALOG
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.machine.cluster_file import read_cluster
from paraplan.ir.schema import json_schema
from paraplan.ir.struct import from_json
from paraplan.jobs.measuring import detect as detect_module


def last_line(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


def test_list_shows_every_device(command: Any) -> None:
    outcome = command("cluster", "list", "--json")
    assert outcome.code == 0, outcome.err
    assert [row["name"] for row in last_line(outcome.out)["devices"]] == list(CATALOG)
    for name in CATALOG:
        assert name in outcome.out


def test_show_tells_rates_with_sources_links_and_totals(command: Any) -> None:
    outcome = command("cluster", "show", "8xA100-80:2+8xH100:2", "--json")
    assert outcome.code == 0, outcome.err
    for words in (
        "32 devices on 4 nodes",
        "2 nodes of 8 x A100-80",
        "312 TFLOP/s",
        "BFLOAT16 / FP16 Tensor Core",
        "79.1 GiB",
        "NVLink 4",
        "between groups",
        "InfiniBand HDR",
        "NVIDIA A100 data sheet",
        "20.82 PFLOP/s",
        "2.47 TiB",
        "where a device has it",
    ):
        assert words in outcome.out, words
    spec = from_json(json.dumps(last_line(outcome.out)).encode(), ClusterSpec, "output", ValueError)  # type: ignore[arg-type]
    assert spec == parse_cluster("8xA100-80:2+8xH100:2")


def test_show_one_node_names_no_network(command: Any) -> None:
    outcome = command("cluster", "show", "1x4090")
    assert outcome.code == 0 and "1 device on 1 node" in outcome.out and "between nodes" not in outcome.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xH20", ("no device 'H20'", "did you mean H200", "8xH100:4")),
        ("nowhere.yaml", ("no cluster file 'nowhere.yaml'",)),
        ("8xH100:0", ("nodes must be a positive number, not 0", "paraplan cluster schema")),
        ("H100", ('write "8xH100"',)),
    ],
)
def test_show_refuses(here: Path, command: Any, text: str, words: tuple[str, ...]) -> None:
    outcome = command("cluster", "show", text)
    assert outcome.code == 2 and "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


def test_schema_is_the_types(command: Any) -> None:
    outcome = command("cluster", "schema")
    assert outcome.code == 0 and json.loads(outcome.out) == json.loads(json.dumps(json_schema(ClusterSpec)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rates, without measuring."""
    monkeypatch.setattr(detect_module, "matmul_flops_per_s", lambda dtype, device: 5e10)
    monkeypatch.setattr(detect_module, "copy_bytes_per_s", lambda device, nbytes: 1e10)
    monkeypatch.setattr(detect_module.torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", ["here.yaml", "here.json"])
def test_detect_writes_a_file_that_reads_back(here: Path, command: Any, quick: None, name: str) -> None:
    outcome = command("cluster", "detect", "-o", name, "--processes", "3", "--json")
    assert outcome.code == 0, outcome.err
    read = read_cluster(here / name)
    assert read.num_devices == 3 and read.groups[0].device.backend == "cpu"
    assert from_json(json.dumps(last_line(outcome.out)).encode(), ClusterSpec, "output", ValueError) == read  # type: ignore[arg-type]
    shown = command("cluster", "show", name)
    assert shown.code == 0 and "torch.mm, measured" in shown.out


def test_a_detected_cluster_can_be_planned_for(here: Path, command: Any, quick: None) -> None:
    assert command("cluster", "detect", "-o", "here.yaml", "--processes", "2").code == 0
    outcome = command("plan", "zoo:net", "here.yaml", "--dp", "2")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("-o", "here.txt"), ("--output 'here.txt'", ".yaml")),
        (("-o", "no/such/folder/here.yaml"), ("cannot write --output", "No such file")),
        (("--processes", "0"), ("--processes 0",)),
        (("--processes", "-2"), ("--processes -2",)),
    ],
)
def test_detect_refuses(here: Path, command: Any, quick: None, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    outcome = command("cluster", "detect", *args)
    assert outcome.code == 2 and "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err


def test_showing_clusters_needs_no_torch() -> None:
    program = (
        "import sys, paraplan.terminal.cluster_commands, paraplan.report.cluster_rows, paraplan.ir.schema;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
