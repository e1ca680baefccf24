"""The loop that computes a loop's gradient: what the forward keeps for it, and what it runs backward in time.

Of a step's joint graph (forward and gradient of one step) the part that depends on gradients is the backward's body.
What it reads of the forward is a per-step input or a constant, which it is given too; a carried value, of which the
forward keeps a history; a value that the forward stacks for it; or is computed again from such, where what is computed
from takes fewer bytes than the value.

Gradients of constants are sums over steps. A product with a per-step operand (the weight of a recurrence) is made once,
after the loop, over all steps at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.scan import Scan
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value

WEIGHT_GRAD, SUM = "paraplan.linear_grad_weight", "aten.sum.dim_IntList"
VIEWS = frozenset(
    {
        *("aten.view.default", "aten.permute.default", "aten.select.int", "aten.slice.Tensor", "aten.expand.default"),
        *("aten.transpose.int", "paraplan.mergeable"),
    }
)
PRODUCTS = frozenset(
    {
        *(f"paraplan.{name}" for name in ("linear", "linear_grad_input", "linear_grad_weight", "batched_product")),
        *(f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm")),
    }
)
"""Ops that are never computed again inside of a step."""


class LoopStep(Value, frozen=True, kw_only=True):
    """One step of a loop with its gradient.

    Attributes:
        steps, inputs, carries, constants, results, reverse: as in `Scan`.
        joint: inputs: per-step inputs, carries, constants, then gradients of the next carries and of the results;
            outputs: next carries, results, then gradients of the inputs, carries, constants, None where there is none.
        tangents: per next carry and result, whether it has a gradient.
    """

    steps: int
    inputs: int
    carries: int
    constants: int
    results: int
    reverse: bool
    joint: Graph
    tangents: tuple[bool, ...]

    @property
    def outside(self) -> tuple[str, ...]:
        """Names of per-step inputs, carries and constants."""
        return self.joint.inputs[: self.inputs + self.carries + self.constants]

    @property
    def grads(self) -> tuple[str | None, ...]:
        """Names of their gradients."""
        return self.joint.outputs[self.carries + self.results :]

    @property
    def tangent_names(self) -> tuple[str | None, ...]:
        """Per next carry and result, the name of its gradient."""
        names = iter(self.joint.inputs[len(self.outside) :])
        return tuple(next(names) if there else None for there in self.tangents)


class InputSource(NamedTuple):
    """Where a per-step input of the backward comes from.

    Attributes:
        kind: "input" (of the forward), "result" (stacked by it), "before" or "after" (a history without its last or
            its first step, in the order of time), "tangent" (gradient of a result).
        number: of the input, result, history or tangent.
    """

    kind: str
    number: int


class LateGradient(NamedTuple):
    """The gradient of a constant made after the loop, over all steps.

    Attributes:
        constant: which one.
        result: of the backward, the first operand of a product, or what is summed.
        source: the second operand; None for a sum.
        transposed: the product's argument.
        dims: of one step, what is summed over besides steps.
    """

    constant: int
    result: int
    source: InputSource | None
    transposed: bool = False
    dims: tuple[int, ...] = ()


class Gradient(NamedTuple):
    """A loop and its gradient.

    Attributes:
        forward: with what it keeps; a result that is the next of a carry with a history is not stacked besides.
        outputs: where the step's results are among what the forward makes.
        backward: its carries are gradients of carries, its results gradients of inputs and operands of products.
        sources: of the backward's per-step inputs.
        inputs: per input of the forward, the result of the backward that is its gradient; -1 where it has none.
        given: the constants that the backward reads, too.
        constants: of each sum of the backward, the constant it is the gradient of.
        late: gradients made after the loop.
    """

    forward: Scan
    outputs: tuple[InputSource, ...]
    backward: Scan
    sources: tuple[InputSource, ...]
    inputs: tuple[int, ...]
    given: tuple[int, ...]
    constants: tuple[int, ...]
    late: tuple[LateGradient, ...]


@SESSION.cached(256)
def parse_step(text: str) -> LoopStep:
    """A step from its text, which `msgspec.json` writes."""
    return msgspec.json.decode(text, type=LoopStep)


@SESSION.cached(256)
def forward_alone(text: str) -> Scan:
    """The loop of a step without anything kept."""
    step = parse_step(text)
    made = step.joint.outputs[: step.carries + step.results]
    return _scan(step, step.outside, made, step.results)


@SESSION.cached(256)
def gradient_of(text: str, wanted: tuple[bool, ...]) -> Gradient:
    """The loop of a step with what it keeps, and its gradient.

    Args:
        text: one step and its gradient.
        wanted: per input, carry and constant, whether its gradient is asked for.
    """
    return _Split(parse_step(text), wanted).found()


def _scan(
    step: LoopStep,
    inputs: Sequence[str],
    outputs: Sequence[str | None],
    results: int,
    histories: tuple[int, ...] = (),
) -> Scan:
    return Scan(
        steps=step.steps,
        inputs=step.inputs,
        carries=step.carries,
        constants=step.constants,
        results=results,
        histories=histories,
        reverse=step.reverse,
        body=_body(step.joint, inputs, outputs),
    )


def _body(joint: Graph, inputs: Sequence[str], outputs: Sequence[str | None]) -> Graph:
    """The ops that outputs need, given the inputs."""
    needed, kept = {*filter(None, outputs)}, []
    given = {*inputs}
    for op in reversed(joint.ops):
        if any(out in needed for out in op.outs if out not in given):
            needed.update(op.tensors)
            kept.append(op)
    kept.reverse()
    made = [name for op in kept for name in op.outs if name is not None]
    plain = tuple(Op(target=op.target, args=op.args, kwargs=op.kwargs, outs=op.outs, rule=op.rule) for op in kept)
    values = {name: joint.values[name] for name in (*inputs, *made)}
    return Graph(inputs=tuple(inputs), outputs=tuple(outputs), values=values, ops=plain)


class _LateGrad(NamedTuple):
    """A constant and the op that makes its gradient, which runs after the loop."""

    constant: int
    op: Op

    @property
    def kept(self) -> tuple[str, ...]:
        """What it reads besides its first operand."""
        return self.op.tensors[1:]

    def made(self, results: Sequence[str], sources: Mapping[str, InputSource]) -> LateGradient:
        """It, by where its operands are."""
        result = results.index(self.op.tensors[0])
        if self.op.target == SUM:
            return LateGradient(self.constant, result, None, dims=tuple(self.op.args[1]))
        return LateGradient(self.constant, result, sources[self.op.tensors[1]], bool(self.op.args[2]))


class _Split:
    """Splits one step."""

    def __init__(self, step: LoopStep, wanted: tuple[bool, ...]) -> None:
        self.step, self.joint = step, step.joint
        first, last = step.inputs, step.inputs + step.carries
        self.xs, self.given, self.consts = step.outside[:first], step.outside[first:last], step.outside[last:]
        self.nexts = step.joint.outputs[: step.carries]
        self.results = step.joint.outputs[step.carries : step.carries + step.results]
        kept = [name if want else None for name, want in zip(step.grads, wanted, strict=True)]
        self.x_grads, self.k_grads = kept[:first], kept[last:]
        self.made = {out: op for op in self.joint.ops for out in op.outs if out is not None}
        self.late: list[_LateGrad] = []
        self._delay()
        self.hanging = self._after_tangents()

    def _delay(self) -> None:
        """Gradients of constants that are made after the loop: products, and sums of what is stacked anyhow."""
        stacked = {*self.x_grads}
        for target in (WEIGHT_GRAD, SUM):
            for index, name in enumerate(self.k_grads):
                op = self.made.get(name) if name is not None else None
                if op is None or op.target != target or not {*op.tensors[1:]}.isdisjoint(self.consts):
                    continue
                if target == SUM and (op.tensors[0] not in stacked or op.args[2] is not False or op.kwargs):
                    continue
                stacked.add(op.tensors[0])
                self.late.append(_LateGrad(index, op))
                self.k_grads[index] = None

    def _after_tangents(self) -> set[str]:
        """The values that depend on gradients."""
        found = {*self.joint.inputs[len(self.step.outside) :]}
        for op in self.joint.ops:
            if not found.isdisjoint(op.tensors):
                found.update(out for out in op.outs if out is not None)
        return found

    def found(self) -> Gradient:
        """The gradient."""
        step = self.step
        results = [*dict.fromkeys((*filter(None, self.x_grads), *(each.op.tensors[0] for each in self.late)))]
        begins = [name for name in step.tangent_names[: step.carries] if name is not None]
        ends = [grad for grad, there in zip(self._carry_grads(), step.tangents, strict=False) if there]
        roots = (*ends, *results, *filter(None, self.k_grads))
        saved = self._saved(self._read((*filter(None, roots), *(source for each in self.late for source in each.kept))))
        histories = self._histories(saved)
        covered = {name for name, carry in zip(self.nexts, self.given, strict=True) if carry in histories}
        kept = dict.fromkeys((*map(str, self.results), *saved))
        stacked = [name for name in kept if name not in (*covered, *self.given)]
        sources = {name: self._source(name, histories, stacked) for name in (*saved, *self.xs)}
        tangents = [name for name in step.tangent_names[step.carries :] if name is not None]
        places = [index for index, there in enumerate(step.tangents[step.carries :]) if there]
        sources |= {name: InputSource("tangent", index) for name, index in zip(tangents, places, strict=True)}
        body = _body(self.joint, (*sources, *begins, *self.consts), roots)
        read = {*roots, *(name for op in body.ops for name in op.tensors)}
        inputs = [name for name in sources if name in read]
        constants = [name for name in self.consts if name in read]
        backward = Scan(
            steps=step.steps,
            inputs=len(inputs),
            carries=len(begins),
            constants=len(constants),
            results=len(results),
            reverse=not step.reverse,
            body=_body(self.joint, (*inputs, *begins, *constants), roots),
        )
        places_of = tuple(self.given.index(name) for name in histories)
        return Gradient(
            forward=_scan(step, step.outside, (*self.nexts, *stacked), len(stacked), places_of),
            outputs=tuple(self._source(str(name), histories, stacked) for name in self.results),
            backward=backward,
            sources=tuple(sources[name] for name in inputs),
            inputs=tuple(-1 if name is None else results.index(name) for name in self.x_grads),
            given=tuple(map(self.consts.index, constants)),
            constants=tuple(index for index, name in enumerate(self.k_grads) if name is not None),
            late=tuple(each.made(results, sources) for each in self.late),
        )

    def _carry_grads(self) -> tuple[str | None, ...]:
        return self.step.grads[self.step.inputs : self.step.inputs + self.step.carries]

    def _read(self, roots: Iterable[str]) -> list[str]:
        """What the backward reads of the forward's values, constants and inputs aside."""
        needed = set(roots)
        found = dict.fromkeys(name for name in needed if name not in self.hanging)
        for op in reversed(self.joint.ops):
            if any(out in needed and out in self.hanging for out in op.outs):
                needed.update(op.tensors)
                found |= dict.fromkeys(name for name in op.tensors if name not in self.hanging)
        return [name for name in self.joint.values if name in found and name not in (*self.xs, *self.consts)]

    def _saved(self, read: Sequence[str]) -> list[str]:
        """What of it is kept, all else being computed again."""
        saved, late = {*read}, {source for each in self.late for source in each.kept}
        for name in reversed(self.joint.values):
            op = self.made.get(name)
            if name not in saved or op is None or name in late or op.target in PRODUCTS or name in self.results:
                continue
            there = self._there(saved - {name})
            more = [each for each in dict.fromkeys(op.tensors) if each not in there]
            most = self._bytes([name]) + (op.target in VIEWS)
            if self._bytes(more) < most:
                saved = (saved - {name}) | {each for each in op.tensors if each not in (*self.xs, *self.consts)}
        return [name for name in self.joint.values if name in saved]

    def _there(self, saved: set[str]) -> set[str]:
        """What takes no more bytes once this is kept."""
        nexts = (after for carry, after in zip(self.given, self.nexts, strict=True) if carry in saved and after)
        return {*self.xs, *self.consts, *saved, *nexts, *map(str, self.results)}

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self.joint.values[name].nbytes for name in names)

    def _histories(self, saved: Sequence[str]) -> list[str]:
        """The carries, by the names a step is given them, all of whose values are kept."""
        return [
            carry
            for carry, after in zip(self.given, self.nexts, strict=True)
            if carry in (*saved, *self.results)
            or (after in saved and after not in (*self.results, *self.xs, *self.consts))
        ]

    def _source(self, name: str, histories: Sequence[str], stacked: Sequence[str]) -> InputSource:
        if name in histories:
            return InputSource("before", histories.index(name))
        if name in stacked:
            return InputSource("result", stacked.index(name))
        if name in self.xs:
            return InputSource("input", self.xs.index(name))
        carry = next(c for c, n in zip(self.given, self.nexts, strict=True) if n == name and c in histories)
        return InputSource("after", histories.index(carry))
