"""A loop over time as one op, `paraplan.scan`: its record, and how it is written among an op's arguments.

    for t in 0 .. steps-1 (or down):  carries, results[t], addends = body(inputs[t], carries, constants)

The body is a small `Graph` of ordinary ops on one step's values. Tensors of the op, in order: per-step inputs
[steps, ...], carried values as they begin, constants. Its outputs: carried values as they end, results stacked
[steps, ...], histories of carried values [steps + 1, ...], sums of addends over all steps.
"""

from __future__ import annotations

import msgspec

from paraplan.ir.model.graph import Arg, Graph
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value

SCAN = "paraplan.scan"


class Scan(Value, frozen=True, kw_only=True):
    """A loop.

    Attributes:
        steps: how often the body runs.
        inputs, carries, constants: numbers of the body's inputs, which come in this order.
        results: number of its outputs that are stacked; its outputs are carries, results, addends.
        histories: carries all of whose values are kept, the first one given included.
        reverse: whether time runs from the last step to the first. A history then holds what it began with last.
        body: one step.
    """

    steps: int
    inputs: int
    carries: int
    constants: int
    results: int
    histories: tuple[int, ...] = ()
    reverse: bool = False
    body: Graph

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of one step's inputs."""
        return self.body.inputs[: self.inputs]

    @property
    def carry_names(self) -> tuple[str, ...]:
        """Names of the carried values a step is given."""
        return self.body.inputs[self.inputs : self.inputs + self.carries]

    @property
    def constant_names(self) -> tuple[str, ...]:
        """Names of the constants."""
        return self.body.inputs[self.inputs + self.carries :]

    @property
    def outs(self) -> tuple[str, ...]:
        """Names of all the body makes: carries, results, addends."""
        assert all(name is not None for name in self.body.outputs)
        return tuple(str(name) for name in self.body.outputs)

    @property
    def next_names(self) -> tuple[str, ...]:
        """Names of the carried values a step makes."""
        return self.outs[: self.carries]

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names of what is stacked."""
        return self.outs[self.carries : self.carries + self.results]

    @property
    def addend_names(self) -> tuple[str, ...]:
        """Names of what is summed over steps."""
        return self.outs[self.carries + self.results :]

    def out_specs(self) -> tuple[TensorSpec, ...]:
        """Specs of the op's outputs."""
        values = self.body.values

        def stacked(name: str, count: int) -> TensorSpec:
            return TensorSpec(dtype=values[name].dtype, shape=(count, *values[name].shape))

        return (
            *(values[name] for name in self.next_names),
            *(stacked(name, self.steps) for name in self.result_names),
            *(stacked(self.carry_names[index], self.steps + 1) for index in self.histories),
            *(values[name] for name in self.addend_names),
        )


def scan_text(scan: Scan) -> str:
    """A loop as an argument of its op, without the literal's colon."""
    return msgspec.json.encode(scan).decode()


@SESSION.cached(512)
def parse_scan(text: str) -> Scan:
    """The inverse of `scan_text`; a literal's colon may stand before it."""
    return msgspec.json.decode(text.removeprefix(":"), type=Scan)


def scan_of(args: tuple[Arg, ...]) -> Scan:
    """The loop among the arguments of an op."""
    return parse_scan(str(args[3]))
