"""Program + Plan -> the program of one rank for an evaluation: the forward alone, without dropout.

Strategies and layouts are the plan's own. Nothing is saved and every value is given up at its last use; buffers the
model writes keep their values. What the model returns beside its loss is computed after each microbatch's forward,
by graphs that no plan decides about: each of their ops takes the strategy that moves the fewest inputs. What mixes
samples, or reads what the tail makes, is computed once, of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from paraplan.ir.errors import ConstraintError, MixedSamples
from paraplan.ir.execution import names as outer_names
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.names import LOSS
from paraplan.ir.execution.rank_program import Block, BlockRole, OutputPlace, RankProgram, StepKind
from paraplan.ir.execution.schedule import Action, ActionKind
from paraplan.ir.machine.mesh import Layout, P, Partial, R, Shard, layout_text, parse_layout
from paraplan.ir.machine.rank_groups import group_of_class
from paraplan.ir.model.program import Output, Source, source_of
from paraplan.ir.plan import Plan
from paraplan.lowering.blocks.emit import BlockEmitter
from paraplan.lowering.blocks.forward import Given
from paraplan.lowering.blocks.small_blocks import nearest, total_block
from paraplan.lowering.implement import implement_all
from paraplan.lowering.lower_rank import RankSteps
from paraplan.lowering.stage_blocks import PlanBlocks
from paraplan.lowering.steps.stage_messages import in_order
from paraplan.lowering.steps.whole_batch import whole_of
from paraplan.rules.graph_strategies import GraphKey, graph_strategies
from paraplan.rules.time_axis import KindMicro, extend, graph_micro


def lower_evaluation(plan: Plan, outputs: Sequence[str] = ()) -> tuple[RankProgram, ...]:
    """One program per rank class of the plan's schedule.

    Args:
        plan: any.
        outputs: names of `Program.outputs` to compute beside the loss.
    Raises:
        InvalidPlanError: the plan does not fit its program.
        ConstraintError: an output does not exist; or the plan has several stages and outputs are wanted.
    """
    if outputs and len(plan.stages) != 1:
        raise ConstraintError(
            f"a plan of {len(plan.stages)} stages: this version evaluates only its loss; leave out outputs="
        )
    unknown = [name for name in outputs if name not in plan.program.outputs]
    if unknown:
        raise ConstraintError(
            f"the model returns no {', '.join(unknown)} that an evaluation can compute; it returns "
            f"{', '.join(plan.program.outputs) or 'nothing beside its loss'}"
        )
    blocks = PlanBlocks(plan, evaluate=True)
    built = {
        actions: _Evaluation(blocks, group_of_class(plan, blocks.held, actions), actions, outputs).evaluate()
        for actions in dict.fromkeys(plan.schedule.classes)
    }
    return implement_all(in_order(built), plan)


class _Evaluation:
    """Writes the steps of one rank class."""

    def __init__(self, blocks: PlanBlocks, group: int, actions: Sequence[str], outputs: Sequence[str]) -> None:
        self._steps = RankSteps(blocks, group, actions)
        self._rank, self._writer = self._steps.rank, self._steps.writer
        program = self._rank.program
        if outputs and program.apart > 1:
            raise ConstraintError(
                "outputs of an evaluation are those of one batch, and the program was captured for "
                f"{program.apart} microbatches that are batches by themselves (per_microbatch); ask for "
                "the loss alone"
            )
        self._wanted = {name: program.outputs[name] for name in outputs}
        self._places: dict[str, OutputPlace] = {}

    def evaluate(self) -> RankProgram:
        steps, losses = self._steps, self._steps.losses
        self._writer.action = steps.first_action
        layouts = losses.denominators()
        steps.segments.unshard(steps.actions)
        for index, term in losses.terms.items():
            if term.denominator is not None:
                spec = self._rank.lowered.spec_of(term.numerator)
                block = total_block(f"total{index}", spec, layouts[term.denominator], self._rank.extended)
                self._writer.call(block, (outer_names.denominator(term.denominator),), (outer_names.total(index),))
        for text, action in zip(steps.texts, steps.actions, strict=True):
            self._writer.action = text
            if action.kind is ActionKind.F:
                steps.forward(action)
                last = self._is_last(action)
                for name, output in self._wanted.items():
                    if not self._is_whole(name, output):
                        self._output(name, output, action.microbatch)
                    elif last:
                        self._whole_output(name, output)
            elif action.kind in (ActionKind.SEND_F, ActionKind.RECV_F):
                steps.transfer(action)
        losses.begin_loss(())()
        steps.ends.exchange_loss()
        names = [name for place in self._places.values() for name in place.names]
        return steps.ended({LOSS, *losses.metrics.values(), *names}, {}, self._places)

    def _is_last(self, action: Action) -> bool:
        """Whether a forward is the last one."""
        return action == [each for each in self._steps.actions if each.kind is ActionKind.F][-1]

    def _is_whole(self, name: str, output: Output) -> bool:
        """Whether an output is made once, of the whole batch: it mixes samples, or reads what does."""
        if not self._rank.micro.after.isdisjoint(output.inputs):
            return True
        try:
            self._micro(name, output)
        except MixedSamples:
            return True
        return False

    def _whole_output(self, name: str, output: Output) -> None:
        """An output of the whole batch."""
        given = tuple(self._given(source) for source in output.inputs)
        sources = []
        for source, lies in zip(output.inputs, given, strict=True):
            made = source in self._rank.micro.after or source in self._rank.parts(0).wholes
            whole = made or whole_of(lies) == lies
            sources.append(self._at(source, self._rank.m) if whole else self._steps.stages.gather(source))
        micro = graph_micro(output.graph, {}, {}, 1, f"output {name}")
        self._write(name, output, tuple(map(whole_of, given)), sources, micro, self._rank.m)

    def _output(self, name: str, output: Output, m: int) -> None:
        """One microbatch's part of an output."""
        given = tuple(self._given(source) for source in output.inputs)
        self._write(
            name, output, given, [self._at(source, m) for source in output.inputs], self._micro(name, output), m
        )

    def _write(
        self, name: str, output: Output, given: tuple[Given, ...], named: Sequence[Name], micro: KindMicro, m: int
    ) -> None:
        graph = output.graph
        block, result = _output_block(f"output.{name}", output, given, micro, self._rank.extended)
        spec = graph.values[str(graph.outputs[0])]
        sources = dict(zip(graph.inputs, named, strict=True))
        outer, whole = outer_names.output(name, m), outer_names.output(name)
        params = self._rank.holding.params
        away = [n for n in output.inputs if (of := self._param_of(n)) is not None and params[of].stored_tier]
        if away:
            raise ConstraintError(
                f"output {name} reads {away[0]} outside of every segment, and the plan keeps that on the host; leave "
                "the output out, or keep the parameter on the device"
            )
        if block is None:
            outer = sources[graph.inputs[0]]
        else:
            args = tuple(sources[local] for local in block.inputs)
            self._writer.call(block, args, (outer,), m)
        along = result.layout[0]
        if isinstance(along, Partial):
            self._writer.add(StepKind.ACCUMULATE, args=(whole, outer), microbatch=m)
            names: tuple[Name, ...] = (whole,)
        elif isinstance(along, Shard) or m in (0, self._rank.m):
            names = (*(self._places[name].names if 0 < m < self._rank.m else ()), outer)
        else:
            names = self._places[name].names
        self._places[name] = OutputPlace(names=names, spec=spec, layout=layout_text(result.layout))

    def _given(self, source: str) -> Given:
        param = self._param_of(source)
        if param is not None:
            return Given((R, *parse_layout(self._rank.holding.params[param].stored)))
        return self._rank.parts(0).given[source]

    def _param_of(self, value: str) -> str | None:
        """The parameter that a value is, if it is one."""
        source, name = source_of(value)
        return name if source is Source.PARAMETER else None

    def _at(self, value: str, m: int) -> Name:
        param = self._param_of(value)
        return self._rank.at(value, m) if param is None else self._rank.stored(param)

    def _micro(self, name: str, output: Output) -> KindMicro:
        graph = output.graph
        given = {
            local: self._given(source).layout[0] for local, source in zip(graph.inputs, output.inputs, strict=True)
        }
        return graph_micro(graph, given, {}, self._rank.m, f"output {name}")


def _output_block(
    name: str, output: Output, given: tuple[Given, ...], micro: KindMicro, extended: tuple[int, ...]
) -> tuple[Block | None, Given]:
    """What computes an output, summed up over the mesh where it is partial; None where a value is it already."""
    graph = output.graph
    emitter = BlockEmitter(name, extended, BlockRole.OUTPUT)
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
        local = emitter.copy_rows(local, "own")
    return emitter.finish((local,), ()), Given((along, *whole))
