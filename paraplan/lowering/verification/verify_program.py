"""Which graphs and programs are legal.

Every fault is an `InvalidPlanError` that names the place.
"""

from __future__ import annotations

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.model.graph import Graph, Op, Phase
from paraplan.ir.model.program import Program, Segment, SegmentKind
from paraplan.ir.model.tensor import DTYPE_BYTES, TensorSpec
from paraplan.rules.carried_rules import rule_fault
from paraplan.rules.strategies import dims_of


def verify_graph(graph: Graph, where: str) -> None:
    """Every value is made once, before it is read; forward ops come before backward ops.

    Raises:
        InvalidPlanError: otherwise.
    """
    known = set(graph.inputs)
    for name, spec in graph.values.items():
        if spec.dtype not in DTYPE_BYTES or any(size < 0 for size in spec.shape):
            raise InvalidPlanError(f"{where}: value {name} has an impossible spec {spec}")
    backward = False
    for index, op in enumerate(graph.ops):
        at = f"{where}, op {index} ({op.target})"
        if op.phase is Phase.STEP:
            raise InvalidPlanError(f"{at}: phase {op.phase.value!r} is none of a program's, which are 'F' and 'B'")
        if op.phase is Phase.FORWARD and backward:
            raise InvalidPlanError(f"{at}: a forward op after a backward one")
        backward = op.phase is Phase.BACKWARD
        if not -1 <= op.source < len(graph.sources):
            raise InvalidPlanError(f"{at}: source {op.source} is none of its {len(graph.sources)} lines")
        for name in op.tensors:
            if name not in known:
                raise InvalidPlanError(f"{at}: reads {name!r} before it is made")
        for out in op.outs:
            if out is not None and (out in known or out not in graph.values):
                raise InvalidPlanError(f"{at}: {out!r} is made twice or has no spec")
        if op.rule is not None and (fault := rule_fault(op, graph.values)):
            raise InvalidPlanError(f"{at}: its own rule is wrong: {fault}")
        named = [out for out in op.outs if out is not None]
        if not named or len({*named}) != len(named):
            raise InvalidPlanError(f"{at}: it makes {list(op.outs)}: give every result one name")
        _verify_shapes(op, graph, at)
        known.update(name for name in op.outs if name is not None)
    missing = [
        name
        for name in (*graph.inputs, *(o for o in graph.outputs if o))
        if name not in known or name not in graph.values
    ]
    if missing:
        raise InvalidPlanError(f"{where}: {missing[0]!r} is an input or output but no value")


def _verify_shapes(op: Op, graph: Graph, at: str) -> None:
    """The op's rule can be read off its values."""
    try:
        found = dims_of(op, graph.values)
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError, AssertionError) as fault:
        raise InvalidPlanError(f"{at}: its arguments and shapes are not such an op's ({fault})") from None
    if (len(op.tensors), len(op.outs)) != (len(found.inputs), len(found.outputs)):
        raise InvalidPlanError(
            f"{at}: it reads {len(op.tensors)} and makes {len(op.outs)} values; its rule is for {len(found.inputs)} "
            f"and {len(found.outputs)}"
        )
    for names, dims in ((op.tensors, found.inputs), (op.outs, found.outputs)):
        for name, dim_names in zip(names, dims, strict=True):
            if name is not None and dim_names is not None and len(dim_names) != len(graph.values[name].shape):
                raise InvalidPlanError(f"{at}: {name} is {graph.values[name]}; its rule says {len(dim_names)} dims")


MOST_SEEDS = 1 << 20
"""Of a batch: beyond any model's segments."""


def verify_program(program: Program) -> None:
    """Kinds are sound and segments read only what exists.

    Raises:
        InvalidPlanError: otherwise.
    """
    if program.apart < 1 or program.batch_size < 1:
        raise InvalidPlanError(
            f"the program's batch_size is {program.batch_size} and apart {program.apart}: both are at least 1"
        )
    if not 0 <= program.seeds <= MOST_SEEDS:
        raise InvalidPlanError(f"the program's batch has {program.seeds} random seeds: 0 to {MOST_SEEDS} can be")
    for kind in program.kinds:
        verify_graph(kind.graph, f"kind {kind.name}")
        _verify_kind(kind)
    _verify_inputs(program)
    known = {f"batch:{name}" for name in program.batch} | {f"buffer:{name}" for name in program.buffers}
    specs = given_specs(program)
    for index, segment in enumerate(program.segments):
        if not 0 <= segment.kind < len(program.kinds):
            raise InvalidPlanError(f"segment {index}: no kind {segment.kind}")
        kind = program.kinds[segment.kind]
        _verify_names(program, segment, kind, known, f"segment {index}")
        _verify_segment(segment, kind, specs, f"segment {index} of kind {kind.name}")
        known.update(segment.outputs)
    _verify_loss(program, known)
    _verify_denominators(program)
    _verify_outputs(program, known)
    _verify_updates(program)


def _verify_names(program: Program, segment: Segment, kind: SegmentKind, known: set[str], where: str) -> None:
    """A segment has as many names of each sort as its kind, and all of them exist (`known`: values made before it)."""
    pairs = (
        ("parameters", segment.params, kind.params),
        ("inputs", segment.inputs, kind.inputs),
        ("outputs", segment.outputs, kind.outputs),
        ("asides", segment.asides, kind.asides),
        ("seeds", segment.seeds, kind.seeds),
    )
    for what, outer, inner in pairs:
        if len(outer) != len(inner):
            raise InvalidPlanError(f"{where}: {len(outer)} {what} for the {len(inner)} of kind {kind.name}")
    for name in segment.params:
        if name not in program.params:
            raise InvalidPlanError(f"{where}: no parameter {name!r}")
    for number in segment.seeds:
        if not 0 <= number < program.seeds:
            raise InvalidPlanError(f"{where}: no seed {number}, a batch has {program.seeds}")
    for name in segment.inputs:
        if name not in known:
            raise InvalidPlanError(f"{where}: reads {name!r} before any segment makes it")


def _verify_loss(program: Program, known: set[str]) -> None:
    """There is a loss, a sum of values that exist over denominators that exist."""
    for term in program.loss:
        if term.numerator not in known or not (
            term.denominator is None or 0 <= term.denominator < len(program.denominators)
        ):
            raise InvalidPlanError(
                f"the loss reads {term.numerator!r} over denominator {term.denominator}, which do not exist"
            )
    if not program.loss:
        raise InvalidPlanError("the program has no loss")


def given_specs(program: Program) -> dict[str, TensorSpec]:
    """What segments may read before any of them ran, and parameters, by the names segments use."""
    found = {f"batch:{name}": entry.spec for name, entry in program.batch.items()}
    found |= {f"buffer:{name}": spec for name, spec in program.buffers.items()}
    return found | {name: entry.spec for name, entry in program.params.items()}


def _verify_inputs(program: Program) -> None:
    """What is given has specs that exist."""
    for name, spec in given_specs(program).items():
        if spec.dtype not in DTYPE_BYTES or any(size < 0 for size in spec.shape):
            raise InvalidPlanError(f"{name} has an impossible spec {spec}")


def _verify_segment(segment: Segment, kind: SegmentKind, specs: dict[str, TensorSpec], where: str) -> None:
    """What a segment is given is what its kind takes; what it makes is added to the specs."""
    values = kind.graph.values
    for outer, inner in zip((*segment.params, *segment.inputs), (*kind.params, *kind.inputs), strict=True):
        if specs[outer] != values[inner]:
            raise InvalidPlanError(f"{where}: {outer} is {specs[outer]}, and its kind takes {values[inner]} there")
    specs.update((outer, values[inner]) for outer, inner in zip(segment.outputs, kind.outputs, strict=True))


def _verify_denominators(program: Program) -> None:
    """Counts are scalars made of the batch and buffers alone."""
    given = {name: spec for name, spec in given_specs(program).items() if name not in program.params}
    for index, entry in enumerate(program.denominators):
        where = f"denominator {index}"
        verify_graph(entry.graph, where)
        if len(entry.inputs) != len(entry.graph.inputs) or len(entry.graph.outputs) != 1:
            raise InvalidPlanError(f"{where}: {len(entry.inputs)} inputs for {len(entry.graph.inputs)}, or no result")
        for outer, inner in zip(entry.inputs, entry.graph.inputs, strict=True):
            if given.get(outer) != entry.graph.values[inner]:
                raise InvalidPlanError(
                    f"{where} reads {outer!r} as {entry.graph.values[inner]}, which batch and buffers lack"
                )


def _verify_outputs(program: Program, known: set[str]) -> None:
    """What the model returns beside its loss is made of values that exist."""
    known = known | {name for segment in program.segments for name in segment.asides}
    known |= {f"param:{name}" for segment in program.segments for name in segment.params}
    for name, output in program.outputs.items():
        verify_graph(output.graph, f"output {name}")
        if len(output.inputs) != len(output.graph.inputs) or len(output.graph.outputs) != 1:
            raise InvalidPlanError(
                f"output {name}: {len(output.inputs)} inputs for {len(output.graph.inputs)}, or no result"
            )
        missing = [source for source in output.inputs if source not in known]
        if missing:
            raise InvalidPlanError(f"output {name} reads {missing[0]!r}, which does not exist")


def _verify_updates(program: Program) -> None:
    """Every buffer that is written is one, and so is its new value, of the same spec."""
    specs: dict[str, TensorSpec] = {}
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        specs.update((outer, kind.graph.values[n]) for outer, n in zip(segment.outputs, kind.outputs, strict=True))
    for name, value in program.buffer_updates.items():
        if name not in program.buffers:
            raise InvalidPlanError(f"buffer_updates: no buffer {name!r}")
        if value not in specs:
            raise InvalidPlanError(f"buffer_updates: buffer {name!r} becomes {value!r}, which no segment makes")
        if specs[value] != program.buffers[name]:
            raise InvalidPlanError(
                f"buffer_updates: buffer {name!r} is {program.buffers[name]}, its new value {value} is {specs[value]}"
            )


def _verify_kind(kind: SegmentKind) -> None:
    lengths = (
        ("tangents", kind.tangents, kind.outputs),
        ("input_grads", kind.input_grads, kind.inputs),
        ("param_grads", kind.param_grads, kind.params),
    )
    for what, left, right in lengths:
        if len(left) != len(right):
            raise InvalidPlanError(f"kind {kind.name}: {len(left)} {what} for {len(right)} values")
    for name in (
        *kind.params,
        *kind.inputs,
        *kind.outputs,
        *kind.asides,
        *kind.seeds,
        *(n for n in (*kind.tangents, *kind.input_grads, *kind.param_grads) if n is not None),
    ):
        if name not in kind.graph.values:
            raise InvalidPlanError(f"kind {kind.name}: {name!r} is no value of its graph")
    forward = {out for op in kind.graph.ops if op.phase is Phase.FORWARD for out in op.outs}
    made = {out for op in kind.graph.ops for out in op.outs}
    given = {*kind.graph.inputs}
    roles = (
        ("input", (*kind.params, *kind.inputs, *kind.seeds, *(n for n in kind.tangents if n)), given),
        ("result of its forward", (*kind.outputs, *kind.asides), given | forward),
        ("gradient", tuple(n for n in (*kind.input_grads, *kind.param_grads) if n is not None), given | made),
    )
    for role, names, there in roles:
        for name in names:
            if name not in there:
                raise InvalidPlanError(f"kind {kind.name}: {name!r} is no {role} of its graph")
