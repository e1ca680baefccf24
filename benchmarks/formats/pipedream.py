"""Reader of PipeDream's profiles (github.com/msr-fiddle/pipedream), one `*.txt` a model.

    nodeX -- description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes,
                            parameter_size=bytes
    <tab>nodeA -- nodeB

Sizes of several results, `[bytes; bytes]`, are summed; what follows a node's fields is not read.
States are the antichains of the graph, each meaning all ops up to it: from the first source on, an op that reads from
the state is added with all it needs. As in PipeDream's optimizer, inputs are left out, so are unread `__getitem__`s,
and a state sends the results of its antichain and of every op before one of its ops that something else reads too.

    time of a stage = max((compute + 4 (m − 1) / m · parameters / bandwidth) / m, 2 · received / (bandwidth · m),
                          2 · sent / (bandwidth · m))
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paraplan.planner.partition.replicated_stages import States

BYTES_PER_S = 1e9
MOST_STATES = 60_000
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_FIELD = re.compile(rf"({'|'.join(_FIELDS)})=(\[[^\]]*\]|[^,\s]+)")


@dataclass(frozen=True)
class Op:
    """A line of a profile."""

    description: str
    compute_s: float
    activation_bytes: float
    param_bytes: float


@dataclass(frozen=True)
class Profile:
    """A graph: its ops by name, and what each one's result is read by."""

    name: str
    ops: dict[str, Op]
    readers: dict[str, tuple[str, ...]]

    def inputs(self) -> dict[str, set[str]]:
        """Per op, whose results it reads."""
        found: dict[str, set[str]] = {name: set() for name in self.ops}
        for name, readers in self.readers.items():
            for reader in readers:
                found[reader].add(name)
        return found


def read_folder(folder: Path) -> list[Profile]:
    """Every profile of a folder, by name.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file is no such profile.
    """
    paths = sorted(folder.glob("*.graph.txt")) if folder.is_dir() else []
    if not paths:
        raise FileNotFoundError(f"{folder} holds no *.graph.txt profiles of PipeDream's")
    return [read(path) for path in paths]


def read(path: Path) -> Profile:
    """One profile, inputs and unread `__getitem__`s left out.

    Raises:
        ValueError: the file is no such profile, or its graph has a cycle.
    """
    ops: dict[str, Op] = {}
    edges: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = line.strip().split(" -- ")
        try:
            if line.startswith("\t"):
                source, target = parts
                edges.append((source, target))
            elif line.strip():
                name, description, fields = parts[:3]
                ops[name] = _op(description, fields)
        except (ValueError, KeyError) as fault:
            raise ValueError(f"{path}:{number} is no line of a PipeDream profile: {fault}") from fault
    for source, target in edges:
        for name in (source, target):
            if name not in ops:
                raise ValueError(f"{path}: an edge names {name}, which is no node")
    profile = _without_inputs(Profile(path.name.removesuffix(".graph.txt"), ops, _readers(ops, edges)))
    if not profile.ops:
        raise ValueError(f"{path} has no op but inputs")
    _ancestors(profile)
    return profile


def _op(description: str, fields: str) -> Op:
    values = {name: sum(float(part) for part in value.strip("[]").split(";")) for name, value in _FIELD.findall(fields)}
    forward, backward, activation, params = (values[name] for name in _FIELDS)
    return Op(description, (forward + backward) / 1000, activation, params)


def _readers(ops: dict[str, Op], edges: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {name: [] for name in ops}
    for source, target in dict.fromkeys(edges):
        found[source].append(target)
    return {name: tuple(readers) for name, readers in found.items()}


def _without_inputs(profile: Profile) -> Profile:
    reads = profile.inputs()
    inputs = {name for name, op in profile.ops.items() if op.description.startswith("Input") and not reads[name]}
    unread = {
        name
        for name, op in profile.ops.items()
        if op.description.startswith("__getitem__") and not profile.readers[name]
    }
    ops = {name: op for name, op in profile.ops.items() if name not in inputs | unread}
    readers = {name: tuple(reader for reader in profile.readers[name] if reader in ops) for name in ops}
    return replace(profile, ops=ops, readers=readers)


def _ancestors(profile: Profile) -> dict[str, frozenset[str]]:
    """Per op, all that it needs.

    Raises:
        ValueError: there is a cycle.
    """
    reads = profile.inputs()
    waiting = {name: len(inputs) for name, inputs in reads.items()}
    ready = deque(name for name, count in waiting.items() if not count)
    found: dict[str, frozenset[str]] = {}
    while ready:
        name = ready.popleft()
        found[name] = frozenset(reads[name]).union(*(found[source] for source in reads[name]))
        for reader in profile.readers[name]:
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    if len(found) < len(profile.ops):
        raise ValueError(f"{profile.name}: a cycle among {len(profile.ops) - len(found)} nodes")
    return found


def state_sets(profile: Profile, limit: int = MOST_STATES) -> tuple[list[frozenset[str]], bool]:
    """The ops of every state, smaller ones first, and whether these are all: of more than a limit, a few chains."""
    ancestors, reads = _ancestors(profile), profile.inputs()
    source = frozenset([next(name for name in profile.ops if not reads[name])])

    def next_states(state: frozenset[str]) -> Iterable[frozenset[str]]:
        for reader in dict.fromkeys(reader for name in sorted(state) for reader in profile.readers[name]):
            if reader not in state:
                yield state | ancestors[reader] | {reader}

    found = {source: None}
    queue = deque(found)
    while queue and len(found) <= limit:
        for larger in next_states(queue.popleft()):
            if larger not in found:
                found[larger] = None
                queue.append(larger)
    complete = not queue
    if not complete:
        found = {source: None}
        for least, place in ((True, 0), (True, -1), (False, 0), (False, -1)):
            state = source
            while larger_ones := sorted(next_states(state), key=len):
                size = len(larger_ones[0 if least else -1])
                state = [larger for larger in larger_ones if len(larger) == size][place]
                found[state] = None
    return sorted(found, key=len), complete


def output_bytes(profile: Profile, state: frozenset[str], sent_with: dict[str, set[str]] | None = None) -> float:
    """What a state sends: see the module's head."""
    sent_with = _sent_with(profile) if sent_with is None else sent_with
    antichain = [name for name in state if not any(reader in state for reader in profile.readers[name])]
    return sum(profile.ops[name].activation_bytes for name in set(antichain).union(*(sent_with[n] for n in antichain)))


def _sent_with(profile: Profile) -> dict[str, set[str]]:
    """Per op, what of the ops before it something else reads than it and the ops before it."""
    ancestors = _ancestors(profile)
    return {
        name: {
            before
            for before in ancestors[name]
            if any(reader != name and reader not in ancestors[name] for reader in profile.readers[before])
        }
        for name in profile.ops
    }


def states_of(profile: Profile, sets: Sequence[frozenset[str]]) -> States:
    """The problem for the partition into stages."""
    sent_with, number = _sent_with(profile), {name: place for place, name in enumerate(profile.ops)}
    member = np.zeros((len(sets), -(-len(number) // 64) * 64), bool)
    for row, state in zip(member, sets, strict=True):
        row[[number[name] for name in state]] = True
    ops = list(profile.ops.values())
    compute = member[:, : len(ops)] @ np.array([op.compute_s for op in ops])
    params = member[:, : len(ops)] @ np.array([op.param_bytes for op in ops])
    sent = np.array([output_bytes(profile, state, sent_with) for state in sets])
    return States(compute, params, sent, np.packbits(member, axis=1, bitorder="little").view(np.uint64))


def rescored(profile: Profile, stages: Sequence[tuple[frozenset[str], int]], machines: int) -> float:
    """The time of the slowest stage, by the formula of the format alone.

    Args:
        stages: the ops of each and its machines, in order.
        machines: how many there are.
    Raises:
        ValueError: the stages are no partition into states, or take not just the machines there are.
    """
    if sum(count for _, count in stages) != machines or any(count < 1 for _, count in stages):
        raise ValueError(f"stages take {[count for _, count in stages]} machines, not {machines}")
    reads, done, slowest = profile.inputs(), frozenset[str](), 0.0
    sizes = []
    for ops, _ in stages:
        if not ops or ops & done or any(not reads[name] <= done | ops for name in ops):
            raise ValueError(f"a stage of {len(ops)} ops has ops of another, or reads what comes later")
        done |= ops
        sizes.append(output_bytes(profile, done))
    if len(done) < len(profile.ops):
        raise ValueError(f"{len(profile.ops) - len(done)} ops are in no stage")
    for index, (ops, count) in enumerate(stages):
        params = sum(profile.ops[name].param_bytes for name in ops)
        compute = sum(profile.ops[name].compute_s for name in ops)
        slowest = max(slowest, (compute + 4 * (count - 1) / count * params / BYTES_PER_S) / count)
        if index:
            slowest = max(slowest, 2 * sizes[index - 1] / (BYTES_PER_S * count))
        if index and index < len(stages) - 1:
            slowest = max(slowest, 2 * sizes[index] / (BYTES_PER_S * count))
    return slowest
