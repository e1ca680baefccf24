"""The reader of Checkmate's graphs: both spellings, orders, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.formats.checkmate import read_folder, read_graph
from paraplan.planner.memory.problem import MemOp, MemTensor


def written(folder: Path, nodes: list[dict[str, Any]], links: list[dict[str, int]]) -> Path:
    file = folder / "graph.json"
    file.write_text(json.dumps({"nodes": nodes, "links": links}))
    return file


def test_named_links_and_costs(tmp_path: Path) -> None:
    nodes = [
        {"name": "f", "id": 0, "cost_cpu": 3, "cost_ram": 10, "backward": False},
        {"name": "b", "id": 1, "cost_cpu": 4, "cost_ram": 20, "backward": True},
    ]
    problem = read_graph(written(tmp_path, nodes, [{"source": 0, "target": 1}]))
    assert problem.ops == (MemOp("f", 3.0, (), (0,)), MemOp("b", 4.0, (0,), (1,), backward=True))
    assert problem.tensors == (MemTensor(10, 0), MemTensor(20, 1, kept=True))
    assert list(read_folder(tmp_path)) == ["graph"]


def test_numbered_links_in_an_order_that_does_not_run(tmp_path: Path) -> None:
    """The sink is second in the file; it runs last."""
    nodes = [{"name": i, "duration": i, "out_cost": 10 * i} for i in range(3)]
    problem = read_graph(written(tmp_path, nodes, [{"0": 0, "1": 2}, {"0": 2, "1": 1}]))
    assert [op.name for op in problem.ops] == ["0", "2", "1"]
    assert [tensor.nbytes for tensor in problem.tensors] == [0, 20, 10]
    assert [op.reads for op in problem.ops] == [(), (0,), (1,)]


def test_the_order_a_head_names(tmp_path: Path) -> None:
    data = {
        "graph": {"order": [0, 2, 1]},
        "nodes": [{"name": i, "duration": i, "out_cost": 1} for i in range(3)],
        "links": [{"0": 0, "1": 1}, {"0": 0, "1": 2}],
    }
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data))
    assert [op.name for op in read_graph(file).ops] == ["0", "2", "1"]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Checkmate graphs"):
        read_folder(tmp_path)
    nodes = [{"name": i, "duration": i, "out_cost": 1} for i in range(2)]
    with pytest.raises(ValueError, match="a cycle among 2 nodes"):
        read_graph(written(tmp_path, nodes, [{"0": 0, "1": 1}, {"0": 1, "1": 0}]))
    with pytest.raises(ValueError, match="not a Checkmate graph"):
        read_graph(written(tmp_path, [{"name": "x"}], []))
