"""Readers of other systems' partition problems: what they read, how they rescore, and what they refuse."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import instances, partition_rows
from benchmarks.formats import dnn_partitioning, galvatron, pipedream, piper
from paraplan.planner.partition.free_devices import place_freely
from paraplan.planner.partition.hybrid_problem import HybridStage
from paraplan.planner.partition.hybrid_stages import partition_hybrid
from paraplan.planner.partition.layer_strategies import choose_strategies
from paraplan.planner.partition.ordered_devices import place_in_order
from paraplan.planner.partition.replicated_stages import partition_states

LAYERS: dict[str, Any] = {
    "name": "two layers",
    "max_mem_units": 10,
    "mem_per_layer_strategy": [[5, 2], [5, 2]],
    "intra_cost": [[1.0, 3.0], [1.0, None]],
    "inter_cost_prev_to_cur": [[[0, 0], [0, 0]], [[0.0, 0.5], [0.25, 0.0]]],
    "other_mem": {"1": 2, "2": 6},
    "other_time": {"1": 0.5, "2": 0.25},
    "optimal_total_cost": {"1": 4.75, "2": None},
}

PROFILE = """node1 -- Input0 -- forward_compute_time=0, backward_compute_time=0, activation_size=0.0, parameter_size=0.0
node2 -- Linear -- forward_compute_time=10.0, backward_compute_time=20.0, activation_size=1000000.0, parameter_size=8e6
node3 -- LSTM -- forward_compute_time=20.0, backward_compute_time=40.0, activation_size=[1e6; 2e6], parameter_size=0.0
node4 -- Add -- forward_compute_time=1, backward_compute_time=2, activation_size=5e6, parameter_size=0.0 -- stage_id=1
node5 -- __getitem__(0) -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=1.0, parameter_size=0.0
\tnode1 -- node2
\tnode2 -- node3
\tnode2 -- node4
\tnode3 -- node4
\tnode3 -- node5
"""


def variant(time: float, a: float, b: float, fw: dict[str, float], bw: dict[str, float]) -> dict[str, Any]:
    return {
        "id": "vanilla",
        "timePerSample": time,
        "parameterSize": 6.0,
        "memoryUsageA": a,
        "memoryUsageB": b,
        "syncTimeFw": fw,
        "syncTimeBw": bw,
    }


PIPER: dict[str, Any] = {
    "maxDevices": 3,
    "maxMemoryPerDevice": 12.0,
    "bandwidth": 8.0,
    "mbsInBatch": 4,
    "nodes": [
        {"id": 7, "TMPCs": {"1": [variant(4.0, 4, 2, {}, {"3": 1.0}), variant(6.0, 1, 3, {}, {"3": 2.0})]}},
        {"id": 3, "TMPCs": {"1": [variant(5.0, 3, 3, {"7": 1.0}, {})], "2": [variant(3.0, 2, 1, {"7": 3.0}, {})]}},
    ],
    "edges": [{"sourceId": 7, "destId": 3, "communicationCost": 2.0}],
}


def node(number: int, time: float, colour: int | None, backward: bool = False) -> dict[str, Any]:
    each = {
        "id": number,
        "supportedOnFpga": 1,
        "cpuLatency": 10 * time,
        "fpgaLatency": time,
        "size": 1.0,
        "isBackwardNode": backward,
    }
    return each if colour is None else {**each, "colorClass": colour}


DEVICES: dict[str, Any] = {
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "maxSizePerFPGA": 4.0,
    "nodes": [
        node(10, 3.0, 1),
        node(20, 2.0, 2),
        node(30, 4.0, None),
        node(11, 3.0, 1, True),
        node(21, 1.0, 2, True),
        node(50, 1.0, 9, True),
    ],
    "edges": [
        {"sourceId": a, "destId": b, "cost": 0.5}
        for a, b in ((10, 20), (20, 30), (10, 30), (30, 21), (21, 11), (50, 21))
    ],
}


def written(folder: Path, name: str, content: dict[str, Any] | str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_layers_are_read_and_rescored(tmp_path: Path) -> None:
    problem = galvatron.read(written(tmp_path, "a.json", LAYERS))
    first, second = problem.vocabularies
    assert (first.known, second.known) == (4.75, math.inf) and problem.limit(first) == 7
    best = {}
    for each in problem.vocabularies:
        costs = {}
        for choice in itertools.product(range(2), repeat=2):
            held = each.memory + sum(problem.memory[i, s] for i, s in enumerate(choice))
            if held <= 9:
                costs[choice] = galvatron.rescored(problem, each, choice)
            else:
                with pytest.raises(ValueError, match="units of memory"):
                    galvatron.rescored(problem, each, choice)
        best[each.degree] = min(costs.values(), default=math.inf)
    assert best == {"1": 4.75, "2": math.inf}
    found = choose_strategies(problem.memory, problem.intra, problem.inter, [7, 3])
    assert found[0] is not None and found[0].strategies == (1, 0) and found[1] is None


def test_profiles_are_read_and_rescored(tmp_path: Path) -> None:
    profile = pipedream.read(written(tmp_path, "net.graph.txt", PROFILE))
    assert profile.name == "net" and list(profile.ops) == ["node2", "node3", "node4"]
    assert profile.ops["node3"].activation_bytes == 3e6
    sets, complete = pipedream.state_sets(profile)
    assert complete and [sorted(state) for state in sets] == [
        ["node2"],
        ["node2", "node3"],
        ["node2", "node3", "node4"],
    ]
    assert [pipedream.output_bytes(profile, state) for state in sets] == [1e6, 4e6, 8e6 - 2e6 + 3e6 - 4e6]
    one, two, three = (frozenset([name]) for name in profile.ops)
    assert pipedream.rescored(profile, [(one | two | three, 1)], 1) == pytest.approx(0.093)
    parted = pipedream.rescored(profile, [(one, 1), (two | three, 2)], 3)
    assert parted == pytest.approx(max(0.030, 0.063 / 2, 2e6 / 1e9 / 2))
    best = min(
        pipedream.rescored(profile, stages, 2)
        for stages in ([(one, 1), (two | three, 1)], [(one | two, 1), (three, 1)], [(one | two | three, 2)])
    )
    assert partition_states(pipedream.states_of(profile, sets), 2, 1e9).time_s == pytest.approx(best)
    assert len(pipedream.state_sets(profile, limit=1)[0]) == 3 and not pipedream.state_sets(profile, limit=1)[1]
    for stages, machines, fault in (
        ([(one, 1)], 1, "in no stage"),
        ([(two, 1), (one | three, 1)], 2, "comes later"),
        ([(one | two | three, 1)], 2, "machines"),
    ):
        with pytest.raises(ValueError, match=fault):
            pipedream.rescored(profile, stages, machines)


def test_piper_is_read_and_rescored(tmp_path: Path) -> None:
    instance = piper.read(written(tmp_path, "net.json", PIPER))
    legal = []
    for split, d, t, chosen in itertools.product((True, False), (1, 2, 4), (1, 2), (0, 1)):
        stages = [HybridStage((0, 1), d, 1, (chosen, 0))]
        if split:
            stages = [HybridStage((0,), d, 1, (chosen,)), HybridStage((1,), 1, t, (0,))]
        try:
            legal.append(piper.rescored(instance, stages))
        except ValueError as fault:
            assert any(word in str(fault) for word in ("devices", "holds", "sum up", "divide"))
    found = partition_hybrid(piper.problem_of(instance))
    assert found.stages is not None and found.proved
    assert piper.rescored(instance, found.stages) == pytest.approx(found.time_s) == pytest.approx(min(legal), rel=1e-8)
    one = [HybridStage((0,), 1, 1, (1,)), HybridStage((1,), 1, 2, (0,))]
    assert piper.rescored(instance, one) == pytest.approx(max(6 + 2 * (2 + 2) / 8, 3 + 2 * (2 + 3) / 8))
    with pytest.raises(ValueError, match="earlier"):
        piper.rescored(instance, [HybridStage((1,), 1, 1, (0,)), HybridStage((0,), 1, 1, (0,))])
    with pytest.raises(ValueError, match="no partition"):
        piper.rescored(instance, [HybridStage((1,), 1, 1, (0,))])
    assert partition_hybrid(piper.problem_of(instance.limited(3, 1.0, 8.0))).bound_s == math.inf


def test_devices_are_read_and_rescored(tmp_path: Path) -> None:
    instance = dnn_partitioning.read(written(tmp_path, "net.json", DEVICES))
    problem = dnn_partitioning.problem_of(instance)
    groups = {name: each.group for name, each in instance.nodes.items()}
    assert groups[10] == groups[11] and groups[20] == groups[21] and problem.num_groups == 4
    assert (groups[20], groups[50]) in problem.edges  # against the edge of the class without a forward node
    best = {True: math.inf, False: math.inf}
    for placed in itertools.product(range(3), repeat=4):
        for contiguous in best:
            try:
                load = dnn_partitioning.rescored(instance, {n: placed[g] for n, g in groups.items()}, contiguous)
            except ValueError as fault:
                assert "bytes" in str(fault) or "order" in str(fault)
                continue
            best[contiguous] = min(best[contiguous], load)
    assert place_in_order(problem).load == pytest.approx(best[True])
    assert place_freely(problem).load == pytest.approx(best[False])
    apart = dict.fromkeys(groups, 0) | {11: 1}
    with pytest.raises(ValueError, match="colour class"):
        dnn_partitioning.rescored(instance, apart, False)
    with pytest.raises(ValueError, match="no device"):
        dnn_partitioning.rescored(instance, {10: 0}, False)
    device_of = {name: int(group in (groups[30], groups[50])) for name, group in groups.items()}
    assert dnn_partitioning.rescored(instance, device_of, False) == pytest.approx(3 + 2 + 3 + 1 + 4 * 0.5)


@pytest.mark.parametrize(
    ("reader", "name", "content", "missing"),
    [
        (galvatron, "a.json", LAYERS, "intra_cost"),
        (piper, "a.json", PIPER, "bandwidth"),
        (dnn_partitioning, "a.json", DEVICES, "maxFPGAs"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, reader: Any, name: str, content: dict[str, Any], missing: str
) -> None:
    with pytest.raises(FileNotFoundError, match="holds no"):
        reader.read_folder(tmp_path / "nowhere")
    path = written(tmp_path, name, {key: value for key, value in content.items() if key != missing})
    with pytest.raises(ValueError, match=rf"a\.json.*{missing}"):
        reader.read_folder(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"a\.json"):
        reader.read_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("node1 -- Linear -- forward_compute_time=1.0", "backward_compute_time"),
        (PROFILE + "\tnode9 -- node2\n", "node9"),
        (PROFILE + "\tnode4 -- node2\n", "cycle"),
        (PROFILE.splitlines()[0], "no op"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        pipedream.read(written(tmp_path, "net.graph.txt", text))


def test_bad_graphs_are_refused(tmp_path: Path) -> None:
    looped = {**PIPER, "edges": [*PIPER["edges"], {"sourceId": 3, "destId": 7, "communicationCost": 1.0}]}
    with pytest.raises(ValueError, match="cycle"):
        piper.read(written(tmp_path, "a.json", looped))
    unknown = {**DEVICES, "edges": [{"sourceId": 10, "destId": 99, "cost": 1.0}]}
    with pytest.raises(ValueError, match="99"):
        dnn_partitioning.read(written(tmp_path, "b.json", unknown))
    twice = {**DEVICES, "nodes": DEVICES["nodes"] * 2}
    with pytest.raises(ValueError, match="one id"):
        dnn_partitioning.read(written(tmp_path, "c.json", twice))


@pytest.mark.parametrize("family", partition_rows.FAMILIES)
def test_the_command_shows_every_family(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"galvatron": LAYERS, "pipedream": PROFILE, "piper": PIPER, "dnn": DEVICES}[family]
    name = "net.graph.txt" if family == "pipedream" else "net.json"
    written(tmp_path / "in", name, content)
    assert instances.run([family, str(tmp_path / "in"), "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert rows and all(row["rescored"] is not None or row["ours"] == "infeasible" for row in rows)
    if family == "galvatron":
        assert [row["against"] for row in rows] == ["equal", "equal"]
    assert instances.run([family, str(tmp_path / "none")]) == 2
    assert "holds no" in capsys.readouterr().err


def test_answers_are_held_against_the_digits_that_are_known() -> None:
    assert partition_rows.against("88.462", 88.46224, 85.0) == "equal"
    assert partition_rows.against("88.462", 88.4, 85.0) == "better"
    assert partition_rows.against("88.462", 88.463, 85.0) == "worse"
    assert partition_rows.against("infeasible", math.inf, math.inf) == "equal"
    assert partition_rows.against("1.0", math.inf, 0.5) == "worse"
    assert partition_rows.row("", 1.0, 1.0, 0.0, 1.1)["failures"]
