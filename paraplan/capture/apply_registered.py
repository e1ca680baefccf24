"""What users say of their own ops (`register`), applied to an op as it is captured: a rule, and what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from paraplan.capture.convert import spec_of
from paraplan.capture.discovery.discover_confirm import contradicted
from paraplan.capture.discovery.discover_dims import ShardableDim, try_dim
from paraplan.capture.discovery.discover_draws import Draw
from paraplan.capture.discovery.discover_linear import is_linear
from paraplan.capture.discovery.discover_memory import how_results_lie, storages, workspace
from paraplan.capture.discovery.discover_run import (
    Bench,
    NoBench,
    Probe,
    Sizing,
    as_it_runs,
    make_bench,
    probe_of,
    real_bench,
)
from paraplan.capture.register_schema import overload_of
from paraplan.ir.errors import ConstraintError
from paraplan.ir.model.graph import Arg, Op, refs
from paraplan.ir.model.op_rule import REGISTERED, ROWS, Amount, ArgPath, OpRule, fit_amount
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import WHOLE
from paraplan.rules.registered_rules import (
    MANY,
    Annotation,
    Names,
    Work,
    cost_for,
)

MAX_COST_DIMS = 8
Values = dict[str, TensorSpec]


def work_terms(op: Op, rule: OpRule) -> dict[str, Amount]:
    """The registered work of an op as amounts over its dims.

    Args:
        op: whose work.
        rule: the op's; its dims are those the amounts are over.
    Raises:
        ConstraintError: the user's function fails, or does not return a number from 0 up.
    """
    cost = cost_for(op.target)
    if cost is None:
        return {"flops": (), "traffic_bytes": ()}
    return {
        "flops": _fitted(cost.flops, op, rule, "flops"),
        "traffic_bytes": _fitted(cost.traffic_bytes, op, rule, "bytes"),
    }


def _fitted(work: Work | None, op: Op, rule: OpRule, what: str) -> Amount:
    if work is None:
        return ()
    dims = list(rule.sizes)[:MAX_COST_DIMS]
    found = {}
    for count in range(len(dims) + 1):
        for group in itertools.combinations(dims, count):
            shapes = [
                tuple(_half(size) if name in group else size for name, size in zip(names, shape, strict=True))
                for names, shape in zip(rule.inputs, rule.shapes, strict=True)
            ]
            found[frozenset(group)] = _evaluated(work, op, shapes, what)
    return fit_amount(found)


def _half(size: int) -> float:
    return size // 2 if size % 2 == 0 else size / 2


def _evaluated(work: Work, op: Op, shapes: list[tuple[float, ...]], what: str) -> float:
    try:
        value = float(work(*shapes))
    except Exception as fault:
        raise ConstraintError(f"cost of {op.target}: {what}= failed on shapes {shapes}: {fault!r}") from fault
    if not 0 <= value < float("inf"):
        raise ConstraintError(f"cost of {op.target}: {what}= gave {value} on shapes {shapes}")
    return value


def apply_annotation(annotation: Annotation, op: Op, values: Values, place: str) -> OpRule:
    """A registered rule for one op of a program.

    Args:
        annotation: the rule as it was registered.
        op, values: the op and the specs of its graph.
        place: the op's line in the model, for messages.
    Raises:
        ConstraintError: it does not fit the op's arguments or shapes; names the line.
    """

    def fail(why: str) -> ConstraintError:
        return ConstraintError(f"rule of {annotation.target}, {annotation.text!r}, at {place}: {why}")

    terms = _given_terms(annotation, op, fail)
    position = {index: place for place, index in enumerate(terms)}
    shapes = [values[name].shape for name in op.tensors]
    given = [annotation.inputs[index] for index in terms]
    many = next((len(shape) - len(names) + 1 for names, shape in zip(given, shapes, strict=True) if MANY in names), 0)
    leads = tuple(f"lead{index}" for index in range(many))
    inputs = [_expanded(names, leads) for names in given]
    sizes: dict[str, int] = {}
    for number, (names, shape) in enumerate(zip(inputs, shapes, strict=True)):
        _measure(names, shape, f"tensor {number}", sizes, fail)
    if len(annotation.outputs) != len(op.outs):
        raise fail(f"it names {len(annotation.outputs)} results, the op has {len(op.outs)}")
    outputs: list[Names | None] = []
    for number, (names, out) in enumerate(zip(annotation.outputs, op.outs, strict=True)):
        expanded = _expanded(names, leads)
        if out is not None:
            _measure(expanded, values[out].shape, f"result {number}", sizes, fail)
        outputs.append(None if out is None else expanded)
    free = {name: size for name, size in sizes.items() if name not in annotation.whole and size > 1}
    if MANY in annotation.whole:
        free = {name: size for name, size in free.items() if name not in leads}
    rule = OpRule(
        source=REGISTERED,
        shapes=tuple(shapes),
        inputs=tuple(_only(names, free) for names in inputs),
        outputs=tuple(None if names is None else _only(names, free) for names in outputs),
        sizes=free,
        contracted={
            name: how
            for dim, how in annotation.contracted.items()
            for name in (leads if dim == MANY else (dim,))
            if name in free
        },
        linear=tuple(
            group for group in (tuple(position[i] for i in g if i in position) for g in annotation.linear) if group
        ),
        addends=tuple(position[index] for index in annotation.addends if index in position),
        size_args={dim: _paths(op, names, fail) for dim, names in annotation.size_args.items() if dim in free},
    )
    return _with_memory(rule, probe_of(op, values), None if annotation.checked else fail)


def _given_terms(annotation: Annotation, op: Op, fail: Callable[[str], ConstraintError]) -> list[int]:
    """Which of the rule's terms each tensor of the op stands for; optional tensors that are absent take one too."""
    schema = overload_of(op.target)._schema
    found: list[int] = []
    term = 0
    for index, argument in enumerate(schema.arguments):
        arg = op.args[index] if index < len(op.args) else op.kwargs.get(argument.name)
        count = len(list(refs(arg)))
        if "Tensor" in str(argument.type) and not count:
            term += 1
        found += range(term, term + count)
        term += count
    if term != len(annotation.inputs):
        raise fail(f"it names {len(annotation.inputs)} tensors, the op takes {term}: {schema}")
    return found


def _expanded(names: Names, leads: Names) -> Names:
    return (*leads, *names[1:]) if names[:1] == (MANY,) else names


def _only(names: Names, dims: Mapping[str, int]) -> Names:
    return tuple(name if name in dims else WHOLE for name in names)


def _measure(
    names: Names, shape: tuple[int, ...], what: str, sizes: dict[str, int], fail: Callable[[str], ConstraintError]
) -> None:
    if len(names) != len(shape):
        raise fail(
            f"{what} has {len(shape)} dims {list(shape)}, the rule names {len(names)}: {' '.join(names) or '()'}"
        )
    for name, size in zip(names, shape, strict=True):
        if name != WHOLE and sizes.setdefault(name, size) != size:
            raise fail(f"{name} is {sizes[name]} in one place and {size} in {what} {list(shape)}")


def _paths(op: Op, names: Sequence[str], fail: Callable[[str], ConstraintError]) -> tuple[ArgPath, ...]:
    arguments = [argument.name for argument in overload_of(op.target)._schema.arguments]
    found: list[ArgPath] = []
    for name in names:
        if name not in arguments:
            raise fail(f"size_args names {name!r}; the op's arguments are {', '.join(arguments)}")
        index = arguments.index(name)
        value = op.args[index] if index < len(op.args) else op.kwargs.get(name)
        if not isinstance(value, int):
            raise fail(f"size_args names {name!r}, which is {value!r} here and no integer")
        found.append((index,) if index < len(op.args) else (name,))
    return tuple(found)


def _dims_of(rule: OpRule, probe: Probe) -> list[tuple[str, ShardableDim]]:
    """The rule's dims as discovery speaks of them."""
    found = []
    for name in rule.sizes:
        members: dict[tuple[int, int], None] = {}
        for value, names in zip(probe.occurrences, rule.inputs, strict=True):
            if name in names:
                members[value, names.index(name)] = None
        inside = {value for value, _ in members}
        addends = {probe.occurrences[index] for index in rule.addends} - inside if name in rule.contracted else set()
        ways = tuple(
            None if names is None else names.index(name) if name in names else rule.contracted[name]
            for names in rule.outputs
        )
        found.append((name, ShardableDim(tuple(members), rule.size_args.get(name, ()), ways, tuple(sorted(addends)))))
    return found


def _linear_of(rule: OpRule, probe: Probe) -> list[tuple[int, ...]]:
    return [tuple({probe.occurrences[index] for index in group}) for group in rule.linear]


def _with_memory(rule: OpRule, probe: Probe, fail: Callable[[str], ConstraintError] | None) -> OpRule:
    """The rule with what running the op shows of its memory; row-major results of its own where it cannot be run.

    Raises:
        ConstraintError: by `fail`, where running the op in shards shows that the rule does not hold.
    """
    plain = msgspec.structs.replace(rule, lies=(ROWS,) * len(probe.outs), alias_of=(-1,) * len(probe.outs))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        bench: Bench | None
        try:
            bench, wrong = make_bench(probe), ""
            wrong = contradicted(bench, [dim for _, dim in _dims_of(rule, probe)], _linear_of(rule, probe))
        except NoBench:
            bench, wrong = as_it_runs(probe), ""
        if bench is None:
            return plain
        if wrong and fail is not None:
            raise fail(
                f"it does not hold on random values: {wrong}. Where the op takes only values of its own kind, give "
                "register_rule(check=...) example arguments, which the rule is then held against instead"
            )
        facts = how_results_lie(bench)
        if isinstance(facts, str):
            return plain
        lies, alias = facts
        return msgspec.structs.replace(
            plain,
            lies=lies,
            alias_of=alias,
            storages=storages(bench, _dims_of(rule, probe), lies),
            workspace=workspace(bench, _dims_of(rule, probe)),
        )


def check_annotation(annotation: Annotation, example: tuple[object, ...]) -> None:
    """Runs the op on example arguments, whole and in shards.

    Raises:
        ConstraintError: a dim or a linear set of the rule does not hold; says which.
    """
    op, values, tensors = _example_op(annotation, example)
    rule = apply_annotation(replace(annotation, checked=True), op, values, "the example")
    probe = probe_of(op, values)

    def fail(why: str) -> ConstraintError:
        return ConstraintError(f"rule of {annotation.target}, {annotation.text!r}, does not hold: {why}")

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        sizing = Sizing(tuple(spec.shape for spec in probe.specs), probe.op.args, probe.op.kwargs)
        bench = Bench(probe, sizing, (), device=tensors[0].device.type if tensors else "cpu")
        draws = [Draw(tensors, probe.run(tensors, sizing.args, sizing.kwargs))]
        with suppress(NoBench):  # where random values are not valid ones, the example alone must do
            draws += real_bench(bench).draws
        bench = replace(bench, draws=tuple(draws))
        for name, dim in _dims_of(rule, probe):
            found = try_dim(bench, dim)
            if found is None:
                raise fail(f"sharding {name} ({rule.sizes[name]}) does not give the whole results back")
            if found.ways != dim.ways:
                raise fail(f"sharding {name}, results are joined as {_words(found)}, not as {_words(dim)}")
        for group, values_of in zip(rule.linear, _linear_of(rule, probe), strict=True):
            if not is_linear(bench, values_of):
                raise fail(f"it is not linear in tensors {', '.join(map(str, group))}")


def _words(dim: ShardableDim) -> str:
    return ", ".join(f"dim {way}" if isinstance(way, int) else str(way) for way in dim.ways)


def _example_op(annotation: Annotation, example: tuple[object, ...]) -> tuple[Op, Values, tuple[Tensor, ...]]:
    tensors: dict[int, Tensor] = {}

    def written(value: object) -> Arg:
        if isinstance(value, Tensor):
            tensors[id(value)] = value.detach()
            return f"%v{list(tensors).index(id(value))}"
        if isinstance(value, (list, tuple)):
            return tuple(written(item) for item in value)
        return ":" + value if isinstance(value, str) else value

    args = tuple(written(value) for value in example)
    with torch.no_grad():
        result = overload_of(annotation.target)(*example)
    results = result if isinstance(result, (tuple, list)) else (result,)
    values = {f"v{index}": spec_of(tensor) for index, tensor in enumerate(tensors.values())}
    values |= {f"o{index}": spec_of(out) for index, out in enumerate(results)}
    op = Op(target=annotation.target, args=args, outs=tuple(f"o{index}" for index in range(len(results))))
    return op, values, tuple(tensors.values())
