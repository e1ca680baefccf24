"""The model as data: a list of segments, each an instance of a kind.

A segment kind is one piece of the model between two narrow cuts, with its joint forward and backward
graph. What differs between instances of a kind (parameters, random seed) is an input, so a 126-layer
transformer has about five kinds and everything expensive is done once per kind.
"""

from __future__ import annotations

from enum import StrEnum

from paraplan.ir.model.graph import Graph
from paraplan.ir.model.tensor import TensorSpec
from paraplan.ir.struct import Value


class Source(StrEnum):
    """Where a value of a program comes from: all but those that segments make begin so, as "batch:x"."""

    PARAMETER = "param"
    BATCH = "batch"
    BUFFER = "buffer"
    SEGMENT = ""


_SOURCES = {source.value: source for source in Source if source is not Source.SEGMENT}


def source_of(value: str) -> tuple[Source, str]:
    """Where a value comes from, and the name of the parameter, input or buffer; of a segment's value, its own."""
    head, colon, name = value.partition(":")
    source = _SOURCES.get(head) if colon else None
    return (Source.SEGMENT, value) if source is None else (source, name)


class SegmentKind(Value, frozen=True, kw_only=True):
    """One piece of the model: the joint graph and what its inputs and outputs mean.

    Attributes:
        name: e.g. "k2".
        graph: the joint graph; forward ops first, then backward ops.
        params: graph inputs that are parameters.
        inputs: graph inputs that come from the batch, buffers or other segments.
        seeds: graph inputs holding the instance's random seeds (int64 scalars), if any op is random.
        outputs: forward results other segments, the loss or buffers read.
        tangents: graph inputs holding the gradient of each output; None where an output carries none.
        input_grads: per entry of `inputs`, the value holding its gradient, or None.
        param_grads: per entry of `params`, the value holding its gradient, or None (frozen, unused).
        asides: further forward results that only auxiliary outputs read (never those of a training step).
        own_backward: a function in it has a backward that was written by a user, and may not be linear in the gradient.
    """

    name: str
    graph: Graph
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    seeds: tuple[str, ...] = ()
    outputs: tuple[str, ...]
    tangents: tuple[str | None, ...]
    input_grads: tuple[str | None, ...]
    param_grads: tuple[str | None, ...]
    asides: tuple[str, ...] = ()
    own_backward: bool = False


class Segment(Value, frozen=True, kw_only=True):
    """An instance of a kind.

    Attributes:
        kind: index into `Program.kinds`.
        params: the model's parameter name for each entry of the kind's `params`.
        inputs: the program value for each entry of the kind's `inputs`: "batch:<name>", "buffer:<name>"
            or an output of an earlier segment.
        outputs: program value names of its outputs, e.g. "s3.0".
        asides: likewise of the kind's `asides`, e.g. "s3+0".
        seeds: which of a batch's random seeds each of the kind's `seeds` is.
    """

    kind: int
    params: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    asides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()


class ParamSpec(Value, frozen=True, kw_only=True):
    """A parameter: its spec, whether it trains, and the other names tied to it."""

    spec: TensorSpec
    trainable: bool = True
    aliases: tuple[str, ...] = ()


class BatchInput(Value, frozen=True, kw_only=True):
    """One tensor of the global batch.

    Attributes:
        spec: of the whole.
        batch_dim: None where it is the same on every microbatch.
        attribute: the model's attribute it is read from before every step ("encoder.tau", declared dynamic); "" where
            the caller gives it.
    """

    spec: TensorSpec
    batch_dim: int | None = 0
    attribute: str = ""


class LossTerm(Value, frozen=True, kw_only=True):
    """loss = sum over terms of (sum over microbatches of numerator) / (sum over microbatches of denominator).

    Attributes:
        numerator: program value (a scalar segment output).
        denominator: index into `Program.denominators`, or None where the numerator is already a mean
            over the global batch and microbatches simply add.
        name: which of the model's losses it belongs to; "" where there is but one.
        weight: that loss' weight, already in the numerator.
    """

    numerator: str
    denominator: int | None = None
    name: str = ""
    weight: float = 1.0


class Denominator(Value, frozen=True, kw_only=True):
    """A count that depends on the batch alone (valid labels): known before any backward runs.

    Attributes:
        graph: inputs named in `inputs`, one scalar output.
        inputs: program values ("batch:<name>").
    """

    graph: Graph
    inputs: tuple[str, ...]


class Output(Value, frozen=True, kw_only=True):
    """Something the model returns beside its loss, for evaluations only.

    Attributes:
        graph: inputs named in `inputs`, one output; without ops where a value of a segment is the output.
        inputs: program values ("batch:<name>", "buffer:<name>", "s3.0", "s3+0") and "param:<name>".
    """

    graph: Graph
    inputs: tuple[str, ...]


class Program(Value, frozen=True, kw_only=True):
    """A captured model at its global batch.

    Attributes:
        name: what people call it.
        fingerprint: digest of the model's class, configuration, parameters and buffers; two models with
            equal fingerprints run each other's plans.
        precision: "fp32", "fp64", "bf16", "fp16" or "fp8" (bf16, linear layers in float8): what the captured
            graphs compute in.
        batch_size: size of the batch dims.
        batch: the batch's tensors.
        params: every parameter, in the model's order; tied names appear once, under the first.
        buffers: tensors of the model that are no parameters.
        kinds, segments: the pieces and their instances, in execution order.
        seeds: how many random seeds a batch has: one for every segment of the capture.
        loss: its terms.
        denominators: counts the loss divides by.
        buffer_updates: per buffer the model writes, the program value it becomes after the step.
        outputs: what else the model returns, by name.
        settings: what forward read of Python and the graphs hold as constants, as text: "<module>:<attribute>", where a
            number in a module's name is `*` if all of them have the same, or "global <module>:<name>".
        code: digests of the user's functions that forward and loss function call, by name.
        apart: how many microbatches a step takes, each of which is a batch of the program by itself: ops that mix
            samples see one microbatch alone, buffers are written once a microbatch, and the loss is the mean over
            microbatches. 1: the program's batch is the step's, however many microbatches share it.
    """

    name: str
    fingerprint: str
    precision: str
    batch_size: int
    batch: dict[str, BatchInput]
    params: dict[str, ParamSpec]
    buffers: dict[str, TensorSpec]
    kinds: tuple[SegmentKind, ...]
    segments: tuple[Segment, ...]
    seeds: int = 0
    loss: tuple[LossTerm, ...]
    denominators: tuple[Denominator, ...] = ()
    buffer_updates: dict[str, str] = {}
    outputs: dict[str, Output] = {}
    settings: dict[str, str] = {}
    code: dict[str, str] = {}
    apart: int = 1

    @property
    def rows(self) -> int:
        """Size of the batch dims of a step."""
        return self.batch_size * self.apart

    @property
    def num_seeds(self) -> int:
        """Random seeds of a step: a batch's, of one microbatch after another where they are apart."""
        return self.seeds * self.apart

    @property
    def step_batch(self) -> dict[str, BatchInput]:
        """The tensors of a step's batch."""
        return {name: _times(entry, self.apart) for name, entry in self.batch.items()}

    def shares(self, num_microbatches: int) -> int:
        """Into how many microbatches the program's own batch is cut: the extent of the microbatch axis."""
        return 1 if self.apart > 1 else num_microbatches


HALVES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""Precisions that keep float32 master weights, and the dtype they compute in (fp8: all but linear layers)."""


def master_dtype(precision: str, dtype: str) -> str:
    """Dtype a parameter is updated (and its gradient accumulated) in: float32 master weights under `HALVES`."""
    return "float32" if (precision, dtype) in HALVES.items() else dtype


def given_inputs(program: Program) -> dict[str, BatchInput]:
    """The inputs of a step's batch that the caller gives: those that are no attributes of the model."""
    return {name: entry for name, entry in program.step_batch.items() if not entry.attribute}


def _times(entry: BatchInput, count: int) -> BatchInput:
    shape = tuple(n * count if dim == entry.batch_dim else n for dim, n in enumerate(entry.spec.shape))
    return BatchInput(spec=TensorSpec(entry.spec.dtype, shape), batch_dim=entry.batch_dim, attribute=entry.attribute)


def trained_params(program: Program, first: int = 0, stop: int | None = None) -> tuple[str, ...]:
    """Parameters that receive a gradient in segments [first, stop), in the model's order.

    Args:
        program: whose parameters.
        first, stop: of the segments; left out, all.
    """
    found = {
        name
        for segment in program.segments[first:stop]
        for name, grad in zip(segment.params, program.kinds[segment.kind].param_grads, strict=True)
        if grad is not None
    }
    return tuple(name for name in program.params if name in found)


def producers(program: Program) -> dict[str, str | tuple[int, int]]:
    """Value -> the kind that makes it and which of its outputs it is; of an input handed on, where that comes from."""
    found: dict[str, str | tuple[int, int]] = {}
    for segment in program.segments:
        kind = program.kinds[segment.kind]
        for index, (local, out) in enumerate(zip(kind.outputs, segment.outputs, strict=True)):
            given = segment.inputs[kind.inputs.index(local)] if local in kind.inputs else None
            found[out] = (segment.kind, index) if given is None else found.get(given, given)
    return found
