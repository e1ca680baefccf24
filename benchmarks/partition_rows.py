"""Rows of `benchmarks.instances` for the partition cores: other systems' problems, and what is known of their answers.

Known values are those published by the systems' own solvers or computed with them, to the digits given: an answer
within half of the last digit is "equal".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.formats import dnn_partitioning, galvatron, pipedream, piper
from benchmarks.table import Row
from paraplan.planner.partition.free_devices import place_freely
from paraplan.planner.partition.hybrid_stages import partition_hybrid
from paraplan.planner.partition.layer_strategies import choose_strategies
from paraplan.planner.partition.ordered_devices import place_in_order
from paraplan.planner.partition.replicated_stages import partition_states

FAMILIES = ("galvatron", "pipedream", "piper", "dnn")
COLUMNS = ("case", "ours", "known", "bound", "gap", "solve_s", "rescored", "against")
INFEASIBLE = "infeasible"
TIME_S = {"piper": 600.0, "contiguous": 300.0, "start": 5.0, "free": 60.0}
MACHINES = (4, 16)
PIPER_BYTES_PER_S = 25 * 2.0**30
PIPER_LIMITS = ((8.0, 8), (8.0, 64))
"""GiB and devices where nothing is known of a model, beside the file's own."""

KNOWN: dict[str, str] = {
    "alexnet N=4": "0.034217141", "alexnet N=16": "0.018874368", "vgg16 N=4": "0.205520896", "vgg16 N=16": "0.0565298",
    "resnet50 N=4": "0.162880924", "resnet50 N=16": "0.0478013", "gnmt N=4": "0.025868", "gnmt N=16": "0.019285",
    "gnmt_large N=4": "0.137129", "gnmt_large N=16": "0.058971",
    "bert32a100 8 GiB k=8": "0.165855750", "bert32a100 8 GiB k=64": "0.020200550",
    "bert32a100 8 GiB k=512": "0.002561128", "bert32a100 8 GiB k=1024": "0.001303180",
    "bert32a100 8 GiB k=2048": "0.000703591", "bert32a100 2 GiB k=1024": "0.001840632",
    "bert32a100 80 GiB k=1024": "0.001158757", "bert32a100 1 GiB k=128": "0.038871750",
    "bert32a100 1 GiB k=8": INFEASIBLE, "bert32a100 1 GiB k=64": INFEASIBLE, "bert32a100 2 GiB k=8": INFEASIBLE,
    "gnmt 2.5 GiB k=2": "263.354", "gnmt 2.5 GiB k=4": "131.677", "gnmt 1.2 GiB k=8": "",
    "LayerGraphs/bert24_inference contiguous": "17.7899", "LayerGraphs/bert24_inference free": "17.715",
    "LayerGraphs/bert24_training contiguous": "41.7458", "LayerGraphs/bert24_training free": "39.790",
    "LayerGraphs/resnet50_inference contiguous": "33.7747", "LayerGraphs/resnet50_inference free": "33.758",
    "LayerGraphs/resnet50_training contiguous": "78.6318", "LayerGraphs/resnet50_training free": "77.150",
    "LayerGraphs/gnmt_inference contiguous": "32.9107", "LayerGraphs/gnmt_inference free": "31.687",
    "LayerGraphs/gnmt_training contiguous": "107.004", "LayerGraphs/gnmt_training free": "88.462",
    "OperatorGraphs/bert_l-3_inference contiguous": "27.9186", "OperatorGraphs/bert_l-3_inference free": "21.908",
    "OperatorGraphs/bert_l-3_training contiguous": "65.3031", "OperatorGraphs/bert_l-3_training free": "54.207",
    "OperatorGraphs/resnet50_inference contiguous": "124.349",
    "OperatorGraphs/resnet50_training contiguous": "255.194",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Piper's limits asked for on the command line; empty for those with known answers."""

    devices: tuple[int, ...] = ()
    memory_gib: tuple[float, ...] = ()


def cases(family: str, folder: Path, limits: Limits) -> dict[str, Callable[[], Row]]:
    """The cases of a family.

    Raises:
        FileNotFoundError: the folder has no instance of it.
        ValueError: a file cannot be read.
    """
    if family == "galvatron":
        return {
            f"{problem.name} vocabulary {each.degree}": (lambda p=problem, v=each: layers(p, v))
            for problem in galvatron.read_folder(folder)
            for each in problem.vocabularies
        }
    if family == "pipedream":
        return {
            f"{profile.name} N={machines}": (lambda p=profile, m=machines: replicated(p, m))
            for profile in pipedream.read_folder(folder)
            for machines in limits.devices or MACHINES
        }
    if family == "piper":
        return {
            f"{instance.name}{name}": (lambda i=instance, n=name, m=machine: hybrid(f"{i.name}{n}", m))
            for instance in piper.read_folder(folder)
            for name, machine in _machines(instance, limits)
        }
    return {
        f"{instance.name} {kind}": (lambda i=instance, k=kind: devices(i, k == "contiguous"))
        for instance in dnn_partitioning.read_folder(folder)
        for kind in ("contiguous", "free")
    }


def _machines(instance: piper.PiperInstance, limits: Limits) -> list[tuple[str, piper.PiperInstance]]:
    """What an instance is solved under, and how that is called."""
    pairs: Sequence[tuple[float, int]] = [(g, k) for g in limits.memory_gib for k in limits.devices]
    if not pairs:
        known = [case.removeprefix(instance.name).split() for case in KNOWN if case.startswith(f"{instance.name} ")]
        pairs = [(float(case[0]), int(case[2][2:])) for case in known if case[1:2] == ["GiB"]] or PIPER_LIMITS
    found = [] if limits.memory_gib else [("", instance)]
    for gib, devices in pairs:
        machine = instance.limited(devices, gib * 2.0**30, PIPER_BYTES_PER_S)
        found.append((f" {gib:g} GiB k={devices}", machine))
    return found


def layers(problem: galvatron.LayerProblem, vocabulary: galvatron.Vocabulary) -> Row:
    """A layer problem of Galvatron's under one vocabulary degree; exact."""
    started = time.perf_counter()
    (found,) = choose_strategies(problem.memory, problem.intra, problem.inter, [problem.limit(vocabulary)])
    seconds = time.perf_counter() - started
    ours = math.inf if found is None else found.time + vocabulary.time_s
    again = None if found is None else galvatron.rescored(problem, vocabulary, found.strategies)
    known = "" if vocabulary.known is None else INFEASIBLE if math.isinf(vocabulary.known) else repr(vocabulary.known)
    return row(known, ours, ours, seconds, again)


def replicated(profile: pipedream.Profile, machines: int) -> Row:
    """A profile of PipeDream's; exact unless it has too many states, then bounded by its compute."""
    started = time.perf_counter()
    sets, complete = pipedream.state_sets(profile)
    found = partition_states(pipedream.states_of(profile, sets), machines, pipedream.BYTES_PER_S)
    seconds = time.perf_counter() - started
    stages = [
        (sets[stage.to] - (frozenset() if stage.after is None else sets[stage.after]), stage.machines)
        for stage in found.stages
    ]
    again = pipedream.rescored(profile, stages, machines)
    bound = found.time_s if complete else sum(op.compute_s for op in profile.ops.values()) / machines
    return row(KNOWN.get(f"{profile.name} N={machines}", ""), found.time_s, bound, seconds, again)


def hybrid(case: str, instance: piper.PiperInstance) -> Row:
    """An instance of Piper's."""
    started = time.perf_counter()
    found = partition_hybrid(piper.problem_of(instance), TIME_S["piper"])
    seconds = time.perf_counter() - started
    again = None if found.stages is None else piper.rescored(instance, found.stages)
    return row(KNOWN.get(case, ""), found.time_s, found.bound_s, seconds, again)


def devices(instance: dnn_partitioning.DeviceInstance, contiguous: bool) -> Row:
    """An instance of dnn-partitioning's."""
    problem = dnn_partitioning.problem_of(instance)
    started = time.perf_counter()
    if contiguous:
        found = place_in_order(problem, time_limit_s=TIME_S["contiguous"])
    else:
        found = place_freely(problem, place_in_order(problem, time_limit_s=TIME_S["start"]), TIME_S["free"])
    seconds = time.perf_counter() - started
    again = None
    if found.devices is not None:
        device_of = {name: found.devices[node.group] for name, node in instance.nodes.items()}
        again = dnn_partitioning.rescored(instance, device_of, contiguous)
    known = KNOWN.get(f"{instance.name} {'contiguous' if contiguous else 'free'}", "")
    return row(known, found.load, found.bound, seconds, again)


def row(known: str, ours: float, bound: float, seconds: float, rescored: float | None) -> Row:
    """What a case shows; an answer that does not cost what it claims to is a failure."""
    failures = [] if rescored is None or math.isclose(rescored, ours, rel_tol=1e-9) else [f"rescored {rescored}"]
    solved = INFEASIBLE if math.isinf(ours) and math.isinf(bound) else ours
    return {
        "ours": "not found" if solved == math.inf else solved,
        "known": known or None,
        "bound": bound,
        "gap": 0.0 if ours == bound else 1.0 if math.isinf(ours) else (ours - bound) / ours,
        "solve_s": seconds,
        "rescored": rescored,
        "against": against(known, ours, bound),
        "failures": failures,
    }


def against(known: str, ours: float, bound: float) -> str | None:
    """How an answer compares with a known one, to the digits of that."""
    if not known:
        return None
    if known == INFEASIBLE:
        return "equal" if math.isinf(ours) and math.isinf(bound) else "worse" if math.isinf(ours) else "better"
    value = float(known)
    tolerance = max(0.5 * 10.0 ** -len(known.partition(".")[2].partition("e")[0]), 1e-9 * value)
    return "equal" if abs(ours - value) <= tolerance * (1 + 1e-6) else "better" if ours < value else "worse"
