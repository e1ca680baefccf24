"""Runs a `Program` on one device, op by op: the meaning every plan is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paraplan.capture.joint_graph import BY_STRIDES
from paraplan.ir.errors import ConstraintError, UnsupportedOpError
from paraplan.ir.model.graph import Arg, Graph, Op, Phase, decode_number
from paraplan.ir.model.program import Program, Segment, SegmentKind
from paraplan.ir.model.scan import SCAN
from paraplan.ir.model.seeds import segment_seed
from paraplan.kernels import reference_kernels
from paraplan.kernels.scan_kernels import scan

Env = dict[str, Tensor]


def run_op(op: Op, env: Env) -> None:
    """Runs one op, its results into `env`.

    Raises:
        UnsupportedOpError: no such op in this torch.
    """
    args = [decode(arg, env) for arg in op.args]
    kwargs = {key: decode(arg, env) for key, arg in op.kwargs.items()}
    if op.target.rpartition(".")[0] in BY_STRIDES:
        args = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
    result = _function(op.target)(*args, **kwargs)
    results = result if isinstance(result, (tuple, list)) else (result,)
    for name, value in zip(op.outs, results, strict=False):
        if name is not None:
            env[name] = value


def _function(target: str):  # type: ignore[no-untyped-def]
    space, name, *overload = target.split(".")
    if target == SCAN:
        return scan
    if space == "paraplan":
        return getattr(reference_kernels, name)
    if target == "aten.view.default":
        return torch.reshape  # strides may differ from those at capture
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload[0])
    except (AttributeError, IndexError):
        raise UnsupportedOpError(
            f"op {target} does not exist in torch {torch.__version__}; capture again with this version"
        ) from None


def decode(arg: Arg, env: Env) -> object:
    """A program argument as torch takes it."""
    if isinstance(arg, (tuple, list)):
        return [decode(item, env) for item in arg]
    if not isinstance(arg, str):
        return arg
    if arg.startswith("%"):
        return env[arg[1:]]
    if arg.startswith("~"):
        return decode_number(arg)
    named = getattr(torch, arg[1:], None)
    return named if isinstance(named, torch.dtype) else arg[1:]  # ":tanh" is a mode, ":float32" a dtype


def run_graph(graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Runs a whole graph."""
    env: Env = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.ops:
        run_op(op, env)
    return [None if name is None else env[name] for name in graph.outputs]


def _seed_of(seeds: Sequence[Tensor] | int, number: int) -> Tensor:
    return torch.tensor(segment_seed(seeds, 0, number)) if isinstance(seeds, int) else seeds[number]


def _forward(
    kind: SegmentKind, segment: Segment, params: Mapping[str, Tensor], values: Env, seeds: Sequence[Tensor]
) -> Env:
    env: Env = {name: params[param] for name, param in zip(kind.params, segment.params, strict=True)}
    env |= {name: values[value] for name, value in zip(kind.inputs, segment.inputs, strict=True)}
    env |= zip(kind.seeds, seeds, strict=True)
    for op in kind.graph.ops:
        if op.phase is Phase.FORWARD:
            run_op(op, env)
    values.update({value: env[name] for name, value in zip(kind.outputs, segment.outputs, strict=True)})
    return env


def _add(grads: Env, name: str, grad: Tensor) -> None:
    grads[name] = grads[name] + grad if name in grads else grad


def _backward(kind: SegmentKind, segment: Segment, env: Env, grads: Env, param_grads: Env) -> None:
    for tangent, output, value in zip(kind.tangents, kind.outputs, segment.outputs, strict=True):
        if tangent is not None:
            env[tangent] = grads.pop(value) if value in grads else torch.zeros_like(env[output])
    for op in kind.graph.ops:
        if op.phase is Phase.BACKWARD:
            run_op(op, env)
    for grad, value in zip(kind.input_grads, segment.inputs, strict=True):
        if grad is not None:
            _add(grads, value, env[grad])
    for grad, param in zip(kind.param_grads, segment.params, strict=True):
        if grad is not None:
            _add(param_grads, param, env[grad])


class StepResult(NamedTuple):
    """What one step gives.

    Attributes:
        loss: of the batch.
        grads: of every parameter; None where it has none.
        buffers: new values of those the model writes (running statistics).
    """

    loss: Tensor
    grads: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def run_program(
    program: Program,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    seeds: Sequence[Tensor] | int = 0,
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the gradients of `run_step`.

    Args:
        program, params, buffers, batch, seeds: as of `run_step`.
    """
    step = run_step(program, params, buffers, batch, seeds)
    return step.loss, step.grads


def run_step(
    program: Program,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    seeds: Sequence[Tensor] | int = 0,
    scale: float = 1.0,
) -> StepResult:
    """One forward and backward of the whole model on one device.

    Args:
        program: a captured model.
        params: by the program's names, in its dtypes.
        buffers, batch: likewise.
        seeds: the int64 scalars of a step (`Program.num_seeds`), or a base seed.
        scale: of the gradients, as a gradient scaler has it.
    """
    parts = microbatches(program, batch)
    with torch.no_grad():
        given = [{f"batch:{name}": x for name, x in part.items()} for part in parts]
        held = dict(buffers)
        beside = {f"buffer:{name}": x for name, x in held.items()}  # class weights, say
        counts = [
            sum(_present(run_graph(d.graph, [(values | beside)[name] for name in d.inputs])[0]) for values in given)
            for d in program.denominators
        ]
        loss, param_grads = torch.zeros(()), dict[str, Tensor]()
        for m, values in enumerate(given):
            values |= {f"buffer:{name}": x for name, x in held.items()}
            loss = loss + _pass(program, params, values, seeds, m * program.seeds, counts, scale, param_grads)
            held |= {name: values[value] for name, value in program.buffer_updates.items()}
    after = {name: held[name] for name in program.buffer_updates}
    return StepResult(loss, {name: param_grads.get(name) for name in program.params}, after)


def microbatches(program: Program, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The batches that a step's batch is for the program: one, or its microbatches where they are apart."""
    if program.apart == 1:
        return [dict(batch)]
    found: list[dict[str, Tensor]] = [{} for _ in range(program.apart)]
    for name, x in batch.items():
        dim = program.batch[name].batch_dim
        for part, cut in zip(found, [x] * program.apart if dim is None else x.chunk(program.apart, dim), strict=True):
            part[name] = cut
    return found


def loss_shares(program: Program, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Per loss (by its name), what that of each microbatch counts in the step's: by its labels where it is a mean over
    labels, else all alike.

    Args:
        program: a captured model.
        batch, buffers: as of `run_step`.
    Raises:
        ConstraintError: terms of one loss count differently, so that one number does not say it.
    """
    beside = {f"buffer:{name}": x for name, x in buffers.items()}
    parts = [{f"batch:{name}": x for name, x in part.items()} | beside for part in microbatches(program, batch)]
    found: dict[str, list[float]] = {}
    for term in program.loss:
        shares = [1 / len(parts)] * len(parts)
        if term.denominator is not None and len(parts) > 1:
            counted = program.denominators[term.denominator]
            counts = [float(_present(run_graph(counted.graph, [part[n] for n in counted.inputs])[0])) for part in parts]
            shares = [count / sum(counts) for count in counts]
        if found.setdefault(term.name, shares) != shares:
            raise ConstraintError(
                f"microbatches of {program.apart} hold different numbers of labels, and the loss adds terms that count "
                "them differently, so that eager microbatches do not add up to it; return the losses by name"
            )
    return found


def _pass(
    program: Program,
    params: Mapping[str, Tensor],
    values: Env,
    seeds: Sequence[Tensor] | int,
    first: int,
    counts: Sequence[Tensor | int],
    scale: float,
    param_grads: Env,
) -> Tensor:
    """Forward and backward of one batch, what it makes into `values`, gradients added; its share of the loss.

    Args:
        program, params, values, seeds, scale: as of `run_step`; `first` is the place of the batch's first seed.
        counts: the denominators, of the whole step.
        param_grads: added to.
    """
    envs = [
        _forward(program.kinds[s.kind], s, params, values, [_seed_of(seeds, first + number) for number in s.seeds])
        for s in program.segments
    ]
    loss, grads = torch.zeros(()), dict[str, Tensor]()
    for term in program.loss:
        numerator = values[term.numerator]
        count = program.apart if term.denominator is None else counts[term.denominator]
        loss = loss + numerator / count
        _add(grads, term.numerator, torch.full_like(numerator, scale) / count)
    for segment, env in zip(reversed(program.segments), reversed(envs), strict=True):
        _backward(program.kinds[segment.kind], segment, env, grads, param_grads)
        env.clear()
    return loss


def _present(value: Tensor | None) -> Tensor:
    assert value is not None, "a denominator has a result"
    return value
