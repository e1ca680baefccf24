"""Program + Plan -> the program of one rank for an evaluation: the forward alone, without dropout.

Strategies and layouts are the plan's own. Nothing is saved and every value is given up at its last use; buffers the
model writes keep their values. What the model returns beside its loss is computed after each microbatch's forward,
by graphs that no plan decides about: each of their ops takes the strategy that moves the fewest inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.lower.emit import BlockEmitter
from paraplan.ir.lower.kind import Given, extend
from paraplan.ir.lower.program import StageSteps
from paraplan.ir.lower.updates import nearest, total_block
from paraplan.ir.mesh import Layout, P, Partial, R, Shard, layout_text, parse_layout
from paraplan.ir.micro import KindMicro, graph_micro
from paraplan.ir.plan import Plan
from paraplan.ir.program import Output
from paraplan.ir.rank_program import Block, OutputPlace, RankProgram, StepKind
from paraplan.ir.rules.strategies import GraphKey, graph_strategies
from paraplan.ir.schedule import ActionKind, parse_action


def lower_evaluation(plan: Plan, outputs: Sequence[str] = ()) -> tuple[RankProgram, ...]:
    """One program per rank class of the plan's schedule.

    Args:
        plan: of one stage.
        outputs: names of `Program.outputs` to compute beside the loss.
    Raises:
        InvalidPlanError: the plan does not fit its program.
        ConstraintError: an output does not exist, or mixes samples that the plan's microbatches keep apart.
    """
    if len(plan.stages) != 1:
        raise InvalidPlanError(f"a plan of {len(plan.stages)} stages: only single-stage plans can be evaluated")
    unknown = [name for name in outputs if name not in plan.program.outputs]
    if unknown:
        raise ConstraintError(
            f"the model returns no {', '.join(unknown)} that an evaluation can compute; it returns "
            f"{', '.join(plan.program.outputs) or 'nothing beside its loss'}"
        )
    built = {actions: _Evaluation(plan, outputs).evaluate(actions) for actions in dict.fromkeys(plan.schedule.classes)}
    return tuple(built[actions] for actions in plan.schedule.classes)


class _Evaluation(StageSteps):
    """Writes the steps of one rank class."""

    def __init__(self, plan: Plan, outputs: Sequence[str]) -> None:
        super().__init__(plan, plan.stages[0], evaluate=True)
        self.wanted = {name: plan.program.outputs[name] for name in outputs}
        self.places: dict[str, OutputPlace] = {}

    def evaluate(self, actions: tuple[str, ...]) -> RankProgram:
        layouts = self._denominators()
        for index, term in enumerate(self.program.loss):
            if term.denominator is not None:
                block = total_block(
                    f"total{index}", self._scalar(term.numerator), layouts[term.denominator], self.extended
                )
                self._add(StepKind.CALL, block, args=(f"den{term.denominator}",), outs=(f"total{index}",))
        for text in actions:
            action = parse_action(text)
            if action.kind is ActionKind.F:
                self.action = text
                self._forward(action.microbatch, [])
                for name, output in self.wanted.items():
                    self._output(name, output, action.microbatch)
        self._loss((), [])()
        names = [name for place in self.places.values() for name in place.names]
        return self._ended({"loss", *self.metrics.values(), *names}, {}, self.places)

    def _output(self, name: str, output: Output, m: int) -> None:
        """One microbatch's part of an output."""
        graph = output.graph
        given = tuple(self._given(source) for source in output.inputs)
        block, result = _output_block(f"output.{name}", output, given, self._micro(name, output), self.extended)
        spec = graph.values[str(graph.outputs[0])]
        sources = {local: self._at(source, m) for local, source in zip(graph.inputs, output.inputs, strict=True)}
        outer = f"output:{name}@{m}"
        if block is None:
            outer = sources[graph.inputs[0]]
        else:
            args = tuple(sources[local] for local in block.inputs)
            self._add(StepKind.CALL, block, args=args, outs=(outer,), microbatch=m)
        along = result.layout[0]
        if isinstance(along, Partial):
            self._add(StepKind.ACCUMULATE, args=(f"output:{name}", outer), microbatch=m)
            names: tuple[str, ...] = (f"output:{name}",)
        elif isinstance(along, Shard) or m == 0:
            names = (*(self.places[name].names if m else ()), outer)
        else:
            names = self.places[name].names
        self.places[name] = OutputPlace(names=names, spec=spec, layout=layout_text(result.layout))

    def _given(self, source: str) -> Given:
        if source.startswith("param:"):
            return Given((R, *parse_layout(self.stage.params[source.removeprefix("param:")].stored)))
        return self.parts.given[source]

    def _at(self, value: str, m: int) -> str:
        return value if value.startswith("param:") else super()._at(value, m)

    def _micro(self, name: str, output: Output) -> KindMicro:
        graph = output.graph
        given = {
            local: self._given(source).layout[0] for local, source in zip(graph.inputs, output.inputs, strict=True)
        }
        return graph_micro(graph, given, {}, self.m, f"output {name}")


def _output_block(
    name: str, output: Output, given: tuple[Given, ...], micro: KindMicro, extended: tuple[int, ...]
) -> tuple[Block | None, Given]:
    """What computes an output, summed up over the mesh where it is partial; None where a value is it already."""
    graph = output.graph
    emitter = BlockEmitter(name, extended)
    for given_name, source in zip(graph.inputs, given, strict=True):
        emitter.give(given_name, graph.values[given_name], source.layout, source.strides)
    legal = graph_strategies(GraphKey(graph, extended[1:], micro.choices, extended[0]))
    for index, (op, options, choice) in enumerate(zip(graph.ops, legal, micro.choices, strict=True)):
        homes = tuple(emitter.home(tensor)[1:] for tensor in op.tensors)
        emitter.op(op, graph, extend(nearest(options, homes), choice), index)
    out = graph.outputs[0]
    assert out is not None
    home = emitter.home(out)
    whole: Layout = tuple(R if isinstance(placement, Partial) else placement for placement in home[1:])
    along = home[0]
    if isinstance(along, Partial) and along.op != "sum":
        raise ConstraintError(
            f"{name}: a {along.op} over samples that microbatches keep apart; plan with microbatches=1"
        )
    if not graph.ops and home[1:] == whole and along != P:
        return None, Given(home)
    local = emitter.get(out, (along, *whole))
    value = emitter.values[local]
    if along == P and value.base in emitter.inputs:  # it is added to in place
        args = ("%" + local, value.shape)
        local = emitter.local("paraplan.reshape_copy", args, "own", value.dtype, value.shape)
    return emitter.finish((local,), ()), Given((along, *whole))
