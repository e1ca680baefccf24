"""A step of many rounds of microbatches, simulated from the programs of few: what a full pipeline does repeats.

A round is as many microbatches as there are positions. In the programs of few rounds every rank has steps that are
those of a round before, but for the microbatch; what the program of more rounds has more are further such rounds, one
after another. So the programs are simulated as they are, which says what ranks hold; then the clocks alone are taken
through them once more, with the last full round of every rank as often as there are rounds more. Blocks, costs and what
is added to what are known from the first time, so a step takes a tenth of what lowering and simulating it takes.

Where a rank has no two full rounds, or something is under way between them that is waited for by name, nothing is said.
That ranks fit together is seen as in any simulation: each message has two ends, in one order on both.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from paraplan.cost_models.costs import Costs
from paraplan.cost_models.simulator.message_times import Mailbox
from paraplan.cost_models.simulator.rank_trace import RankTrace, Simulation
from paraplan.cost_models.simulator.simulate import RankEngine, engines_of, run, simulation_of
from paraplan.cost_models.simulator.timeline import TimeWalk
from paraplan.ir.execution.name import Name
from paraplan.ir.execution.rank_program import MESSAGES, RankProgram, Step, StepKind
from paraplan.ir.execution.schedule import Action, parse_action
from paraplan.ir.execution.streams import Stream


class Round(NamedTuple):
    """Steps of a program that can follow themselves, later by a round: the first, and how many; and how many steps
    earlier they may begin as well."""

    first: int
    length: int
    earlier: int = 0


class Rounds(NamedTuple):
    """Simulations.

    Attributes:
        few: of the programs as they are.
        all: with more rounds; without spans and points.
    """

    few: Simulation
    all: Simulation


def simulate_rounds(
    programs: Sequence[RankProgram],
    costs: Sequence[Costs],
    rank_class: tuple[int, ...],
    microbatches: int,
    more: int,
) -> Rounds | None:
    """One step of every rank, with so many rounds more; None where that is not known.

    Args:
        programs, costs, rank_class: as of `simulate`, of few rounds.
        microbatches: of a round.
        more: rounds.
    Raises:
        CostModelError: as `simulate`.
    """
    rounds = {id(program): full_round(program, microbatches) for program in programs}
    if None in rounds.values():
        return None
    engines = engines_of(programs, costs, keeps=True)
    mailbox, again = Mailbox(), dict[int, _Again]()
    for engine in engines:
        repeated = rounds[id(engine.program)]
        assert repeated is not None
        repeated = _apart(engine, repeated)
        if repeated is None:
            return None
        again.setdefault(id(engine), _Again(engine, mailbox, repeated, microbatches, more))
    run(list(again.values()))
    few = {id(engine): engine.trace() for engine in engines}
    every = {key: _trace(each) for key, each in again.items()}
    return Rounds(*(simulation_of([of[id(engine)] for engine in engines], rank_class) for of in (few, every)))


def full_round(program: RankProgram, microbatches: int) -> Round | None:
    """The last steps of a program that are those of a round before, as that round is those of one before it; None where
    it has none.

    Args:
        program: of few rounds.
        microbatches: of a round.
    """
    steps = program.steps
    calls = {
        (step.segment, program.blocks[step.block].role, step.microbatch): at
        for at, step in enumerate(steps)
        if step.kind is StepKind.CALL and step.segment >= 0
    }
    apart = Counter(
        calls[segment, role, m + microbatches] - at
        for (segment, role, m), at in calls.items()
        if (segment, role, m + microbatches) in calls
    )
    if not apart:
        return None
    length = max(apart, key=lambda each: (apart[each], each))
    later = {text: str(_later(parse_action(text), microbatches)) for text in {step.action for step in steps}}
    found = None
    pairs = zip(steps, steps[length:], strict=False)
    alike = (_is_alike(step, then, later, microbatches) for step, then in pairs)
    for is_alike, stretch in itertools.groupby(enumerate(alike), key=lambda each: each[1]):
        places = [at for at, _ in stretch]
        if is_alike and len(places) >= length:
            found = Round(places[-1] + 1, length, len(places) - length)
    return found


def _later(action: Action, microbatches: int) -> Action:
    m = action.microbatch + microbatches if action.microbatch >= 0 else -1
    return msgspec.structs.replace(action, microbatch=m)


def _is_alike(step: Step, then: Step, later: dict[str, str], microbatches: int) -> bool:
    """Whether a step takes as long as another one a round later: all but what is given up with it. What is done once a
    step, like updates of equal segments, is of no round."""
    if later[step.action] == step.action:
        return False
    m = step.microbatch + microbatches if step.microbatch >= 0 else -1
    same = (step.kind, step.block, step.segment, step.transfer) == (then.kind, then.block, then.segment, then.transfer)
    alike = same and then.microbatch == m and then.action == later[step.action]
    return alike and (len(step.args), len(step.outs)) == (len(then.args), len(then.outs))


def _apart(engine: RankEngine, repeated: Round) -> Round | None:
    """The last round of which no step waits for what one before it has issued: names are those of one round. None where
    there is none."""
    steps = engine.program.steps
    issued, crossed = dict[Name, int](), list[tuple[int, int]]()
    start = repeated.first - repeated.earlier
    for at in range(start - repeated.length, repeated.first + repeated.length):
        step = steps[at]
        if step.kind is StepKind.CALL:
            block = engine.block(step.block)
            crossed += [(issued.get(step.args[index], -1), at) for index, _ in block.imported]
            issued.update({name: at for index, _ in block.exported if (name := step.outs[index]) is not None})
    for first in range(repeated.first, start - 1, -1):
        if not any(begun < first <= end < first + repeated.length for begun, end in crossed):
            return Round(first, repeated.length)
    return None


class _Clocks(TimeWalk):
    """Clocks that draw nothing."""

    def _span(self, step: Step, stream: Stream, start: float, end: float, label: str, busy: float) -> None:
        pass


class _Again:
    """A rank on its way through its program once more, with rounds more.

    Args:
        engine: that has taken every step.
        mailbox: of all ranks.
        repeated: the round that is repeated.
        microbatches, more: of a round; how many rounds more.
    """

    def __init__(self, engine: RankEngine, mailbox: Mailbox, repeated: Round, microbatches: int, more: int) -> None:
        self.engine, self.time = engine, _Clocks()
        self._mailbox = mailbox
        self._places = _places(len(engine.program.steps), repeated, microbatches, more)
        self._next = next(self._places, None)

    @property
    def ended(self) -> bool:
        """Whether every step was taken."""
        return self._next is None

    @property
    def waits_for(self) -> str:
        """The message the next step needs and nobody has posted yet; "" where it needs none."""
        if self._next is None:
            return ""
        at, later = self._next
        step = self.engine.program.steps[at]
        if step.kind is not StepKind.AWAIT or (key := self.engine.key(step, later)) in self._mailbox.times:
            return ""
        return f"{step.action} waits for message {key[0]} of microbatch {key[1]}"

    def advance(self) -> None:
        """Take the next step."""
        assert self._next is not None
        at, later = self._next
        step, act = self.engine.program.steps[at], self.engine.acts[at]
        if step.kind in MESSAGES:
            self.engine.message(step, self.time, self._mailbox, later)
        elif act is not None:
            act(self.time)
        self._next = next(self._places, None)


def _places(count: int, repeated: Round, microbatches: int, more: int) -> Iterator[tuple[int, int]]:
    """Places of steps in a program, and by how many microbatches later each is taken."""
    stop = repeated.first + repeated.length
    yield from ((at, 0) for at in range(stop))
    for number in range(1, more + 1):
        yield from ((at, number * microbatches) for at in range(repeated.first, stop))
    yield from ((at, more * microbatches) for at in range(stop, count))


def _trace(again: _Again) -> RankTrace:
    trace = again.engine.traced(again.time)
    return msgspec.structs.replace(trace, memory=(), bubbles=())
