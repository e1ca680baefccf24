"""Rules for ops nobody wrote a rule for: registered ones applied, the others found by running the op.

Every op of a program whose target has no entry in `rules` leaves here with a rule of its own (`ir.model.op_rule`): as
the user registered it, as running it shows, or one that says why it can only be replicated. Small random tensors are
enough, and where the real shapes are small too, everything is held against them again. A rule that was found is tried
on other values and sizes before it is used (`discover_confirm`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import torch

from paraplan.capture.apply_registered import apply_annotation, work_terms
from paraplan.capture.discovery.discover_apart import run_apart
from paraplan.capture.discovery.discover_cache import RuleCache
from paraplan.capture.discovery.discover_confirm import contradiction
from paraplan.capture.discovery.discover_dims import OpStructure, ShardableDim, find, real_parts, still_legal
from paraplan.capture.discovery.discover_memory import how_results_lie, storages, workspace
from paraplan.capture.discovery.discover_run import (
    MAX_ELEMENTS,
    Bench,
    NoBench,
    Probe,
    as_it_runs,
    make_bench,
    probe_of,
    real_bench,
)
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.op_rule import DISCOVERED, ROWS, UNKNOWN, OpRule
from paraplan.ir.model.program import Denominator, SegmentKind
from paraplan.ir.model.tensor import TensorSpec
from paraplan.kernels.torch_private import OpOverload
from paraplan.rules import op_def
from paraplan.rules.dims import WHOLE
from paraplan.rules.registered_rules import rule_for

_SHARED = frozenset({"aten", "prims"})  # torch's own ops: what they do depends on torch's version alone
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
Values = dict[str, TensorSpec]


def attach_rules(
    kinds: Sequence[SegmentKind], denominators: Sequence[Denominator]
) -> tuple[tuple[SegmentKind, ...], tuple[Denominator, ...]]:
    """The program's pieces with a rule on every op that has none written for it.

    Raises:
        ConstraintError: a registered rule does not fit its op; says how.
    """
    graphs = [*(kind.graph for kind in kinds), *(each.graph for each in denominators)]
    if all(op_def(op.target) is not None for graph in graphs for op in graph.ops):
        return tuple(kinds), tuple(denominators)
    found = discovered(graphs)

    def ruled(graph: Graph) -> Graph:
        read = _read(graph)
        ops = tuple(_with_rule(op, graph, found, _unread(op, read)) for op in graph.ops)
        return msgspec.structs.replace(graph, ops=ops)

    return (
        tuple(msgspec.structs.replace(kind, graph=ruled(kind.graph)) for kind in kinds),
        tuple(msgspec.structs.replace(each, graph=ruled(each.graph)) for each in denominators),
    )


def discovered(graphs: Sequence[Graph]) -> dict[str, OpRule]:
    """By `rule_key`, the rule of every op with neither a written nor a registered one: kept from before, or found."""
    cache = RuleCache.load()
    found: dict[str, OpRule] = {}
    wanted: dict[str, tuple[Op, Values, frozenset[int]]] = {}
    for graph in graphs:
        read = _read(graph)
        for op in graph.ops:
            if op_def(op.target) is None and rule_for(op.target) is None:
                unread = _unread(op, read)
                key = rule_key(op, graph.values, unread)
                kept = cache.get(key, op, graph.values)
                if kept is not None:
                    found[key] = kept
                else:
                    wanted.setdefault(key, (op, graph.values, unread))
    fresh = run_apart(list(wanted.values()), discover, ended)
    made = dict(zip(wanted, fresh, strict=True))
    cache.save({key: rule for key, rule in made.items() if wanted[key][0].target.split(".")[0] in _SHARED})
    return {**found, **made}


def _read(graph: Graph) -> frozenset[str | None]:
    """The values that some op or whoever runs the graph reads."""
    return frozenset(name for op in graph.ops for name in op.tensors) | frozenset(graph.outputs)


def _unread(op: Op, read: frozenset[str | None]) -> frozenset[int]:
    return frozenset(index for index, name in enumerate(op.outs) if name is not None and name not in read)


def _with_rule(op: Op, graph: Graph, found: dict[str, OpRule], unread: frozenset[int]) -> Op:
    if op_def(op.target) is not None:
        return op
    annotation = rule_for(op.target)
    if annotation is not None:
        rule = apply_annotation(annotation, op, graph.values, graph.source_of(op))
    else:
        rule = found[rule_key(op, graph.values, unread)]
    rule = msgspec.structs.replace(rule, **work_terms(op, rule))
    return msgspec.structs.replace(op, rule=rule)


def rule_key(op: Op, values: Values, unread: frozenset[int] = frozenset()) -> str:
    """A stable text of all that a rule depends on: target, arguments with values numbered, shapes and dtypes, and which
    results nobody reads.

    Args:
        op: of a graph.
        values: specs of the graph's values.
        unread: results that nobody reads, by number.
    """
    probe = probe_of(op, values)
    outs = [None if spec is None else str(spec) for spec in probe.outs]
    specs = [str(spec) for spec in probe.specs]
    said = [op.target, probe.op.args, probe.op.kwargs, specs, outs, sorted(unread)]
    return json.dumps(said, separators=(",", ":"))


def discover(op: Op, values: Values, unread: frozenset[int] = frozenset()) -> OpRule:
    """The rule of an op as running it shows; one that only replicates, with the reason, where that shows nothing.

    Args:
        op, values, unread: as of `rule_key`.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return _discover(probe_of(op, values, unread))


def ended(job: tuple[Op, Values] | tuple[Op, Values, frozenset[int]], why: str) -> OpRule:
    """The rule of an op whose search ended its process: replicated, with how its results lie, found in another one, for
    a kernel that does not survive odd shapes may well run on those it is called with."""

    def memory(op: Op, values: Values, unread: frozenset[int] = frozenset()) -> OpRule:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return _only_memory(probe_of(op, values, unread), why)

    return run_apart([job], memory, lambda job, _: unknown(probe_of(*job), why))[0]


def _discover(probe: Probe) -> OpRule:
    op = probe.op
    refused = _refused(op.target)
    if refused:
        return unknown(probe, refused)
    try:
        small = make_bench(probe)
        real = _real(small)
    except NoBench as why:
        return _only_memory(probe, str(why))
    facts = how_results_lie(real or small)
    if isinstance(facts, str):
        return unknown(probe, facts)
    found = find(small)
    wrong = contradiction(small, found)
    if wrong:
        return _only_memory(probe, f"what running it showed is not so: {wrong}")
    dims = tuple(dim for dim in found.dims if real_parts(small, dim) > 1)
    if real is not None and real is not small:
        dims = tuple(dim for dim in dims if still_legal(real, dim, real_parts(small, dim)))
    named = list(zip(_ALPHABET, dims, strict=False))
    rule = _rule_of(probe, small, named, found)
    reason = "" if not rule.is_whole else "running it in shards found no dim that can be sharded"
    lies, alias = facts
    return msgspec.structs.replace(
        rule,
        lies=lies,
        alias_of=alias,
        storages=storages(real or small, named, lies),
        workspace=workspace(small, named),
        reason=reason,
        source=UNKNOWN if reason else DISCOVERED,
    )


def _only_memory(probe: Probe, reason: str) -> OpRule:
    """The rule of an op that can only be replicated, with how its results lie where it runs on anything."""
    rule, bench = unknown(probe, reason), as_it_runs(probe)
    facts = None if bench is None else how_results_lie(bench)
    if bench is None or facts is None or isinstance(facts, str):
        return rule
    lies, alias = facts
    return msgspec.structs.replace(rule, lies=lies, alias_of=alias, storages=storages(bench, (), lies))


def _refused(target: str) -> str:
    """Why an op must not be run; "" if it may be."""
    space, _, name = target.partition(".")
    found: object = getattr(torch.ops, space, None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        return "" if space == "paraplan" else "this torch has no such op"
    if found._schema.is_mutable:
        return "it writes its inputs"
    return "it draws random numbers" if torch.Tag.nondeterministic_seeded in found.tags else ""


def _real(small: Bench) -> Bench | None:
    """A bench at the real shapes, where these are small."""
    probe = small.probe
    if sum(spec.numel for spec in probe.specs) > MAX_ELEMENTS:
        return None
    shapes = tuple(spec.shape for spec in probe.specs)
    if shapes == small.sizing.shapes and (probe.op.args, probe.op.kwargs) == (small.sizing.args, small.sizing.kwargs):
        return small
    return real_bench(small)


def _rule_of(probe: Probe, bench: Bench, named: Sequence[tuple[str, ShardableDim]], found: OpStructure) -> OpRule:
    inputs = [[WHOLE] * len(spec.shape) for spec in probe.specs]
    outputs = [None if spec is None else [WHOLE] * len(spec.shape) for spec in probe.outs]
    for name, dim in named:
        for value, position in dim.members:
            inputs[value][position] = name
        for output, way in zip(outputs, dim.ways, strict=True):
            if output is not None and isinstance(way, int):
                output[way] = name

    def places(group: Sequence[int]) -> tuple[int, ...]:
        return tuple(index for index, value in enumerate(probe.occurrences) if value in group)

    return OpRule(
        source=DISCOVERED,
        shapes=tuple(probe.specs[value].shape for value in probe.occurrences),
        inputs=tuple(tuple(inputs[value]) for value in probe.occurrences),
        outputs=tuple(None if output is None else tuple(output) for output in outputs),
        sizes={name: real_parts(bench, dim) for name, dim in named},
        contracted={name: dim.contracted for name, dim in named if dim.contracted},
        linear=tuple(places(group) for group in found.linear),
        addends=places(found.addends),
        size_args={name: dim.args for name, dim in named if dim.args},
    )


def unknown(probe: Probe, reason: str) -> OpRule:
    """The rule of an op nothing is known of: replicated, its results taken to be row-major and its own."""
    return OpRule(
        source=UNKNOWN,
        reason=reason,
        shapes=tuple(probe.specs[value].shape for value in probe.occurrences),
        inputs=tuple((WHOLE,) * len(probe.specs[value].shape) for value in probe.occurrences),
        outputs=tuple(None if spec is None else (WHOLE,) * len(spec.shape) for spec in probe.outs),
        lies=(ROWS,) * len(probe.outs),
        alias_of=(-1,) * len(probe.outs),
    )
