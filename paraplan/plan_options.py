"""What `compile` and `fit` take beside a model: `planner.constraints.Constraints`, and what is defined here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

from paraplan.ir.errors import ConstraintError
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.option_words import OptionName, OptionValue
from paraplan.ir.options import Option, Options, at_least, documented, one_of
from paraplan.planner.constraints import MODEL
from paraplan.planner.options.keywords import ConstraintKeywords

PLANNING = "Planning"
_TIME_LIMIT = "a number of seconds, or 0 for the first plan that fits"
LossChoice = str | Sequence[str] | Mapping[str, float] | None


def _as_names(dynamic: Sequence[str]) -> tuple[str, ...]:
    if isinstance(dynamic, str):
        raise TypeError
    return tuple(dynamic)


def _as_inputs(example_inputs: Mapping[str, Any] | Sequence[object] | None) -> Any:
    """Inputs by name or in order; a tensor is the only one."""
    alone = hasattr(example_inputs, "shape") and not isinstance(example_inputs, Mapping | Sequence)
    return (example_inputs,) if alone else example_inputs


def _as_dims(batch_dims: Mapping[str, int | None]) -> dict[str, int | None] | None:
    return dict(batch_dims) or None


def _check_time_limit(keyword: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ConstraintError("{}: give {}", OptionValue(keyword, seconds), _TIME_LIMIT)


def _check_above_zero(keyword: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ConstraintError("{}: give a number of seconds above 0", OptionValue(keyword, seconds))


class CaptureOptions(Options, frozen=True, kw_only=True):
    """How a training step is captured, and what its optimizer keeps."""

    loss_fn: Annotated[
        Callable[..., Any] | None,
        Option(
            "",
            "(model output, batch by name) -> scalar loss; left out where the model returns its loss. Inputs "
            "by name that "
            "forward does not take (labels) are given to it alone.",
        ),
    ] = None
    loss: Annotated[
        LossChoice,
        Option(
            "",
            "where the model (or loss_fn) returns several scalars, which to train on: a name, names, weights by name "
            '(their weighted sum), or "sum" for all of them; `Trainer.metrics` then has each.',
            wanted="the name of a scalar, names, weights by name, or 'sum'",
            example="sum",
        ),
    ] = None
    batch_dims: Annotated[
        dict[str, int | None] | None,
        Option(
            "",
            "the batch dim of each input; dim 0 by default.",
            convert=_as_dims,
            wanted="the batch dim of inputs by their names",
            example={"x": 1},
        ),
    ] = None
    optimizer: Annotated[
        str,
        Option(
            "sgd, momentum, nesterov, adam, adamw; sgd+decay ...",
            "what keeps states: sgd, momentum, nesterov, adam, adamw; with weight_decay sgd+decay, adam+decay ...",
            MODEL,
            check=one_of(*OPTIMIZERS),
            wanted="the name of one whose states count (the optimizer itself stays yours)",
            example="adamw",
        ),
    ] = "adamw"
    accumulate: Annotated[
        bool,
        Option(
            "Gradients of several steps are added up for an update.",
            "whether the loop adds up gradients of several steps (backwards) for an update: the sum so far counts too.",
            MODEL,
        ),
    ] = False
    dynamic: Annotated[
        tuple[str, ...],
        Option(
            "Attribute that training changes (tau): an input; repeatable.",
            'attributes that the training loop changes ("tau", "encoder.tau"): inputs; others must not be changed.',
            MODEL,
            metavar="NAME",
            convert=_as_names,
            wanted="names of attributes",
            example=("tau",),
        ),
    ] = ()
    progress: Annotated[Callable[[str], None] | None, Option("", "told what is being done.")] = None


class CaptureKeywords(TypedDict, total=False):
    """The keywords of `CaptureOptions` with the types that callers give, for checkers of calls."""

    loss_fn: Callable[..., Any] | None
    loss: LossChoice
    batch_dims: Mapping[str, int | None] | None
    optimizer: str
    accumulate: bool
    dynamic: Sequence[str]
    progress: Callable[[str], None] | None


@documented
class JobOptions(CaptureOptions, frozen=True, kw_only=True):
    """What is trained, how its step is captured, and how long planning may take."""

    example_inputs: Annotated[
        Mapping[str, Any] | Sequence[object] | None,
        Option(
            "",
            "one global batch, by forward's parameter names or in their order; left out for Hugging Face models, whose "
            "batch is then [batch, seq] tokens.",
            convert=_as_inputs,
            wanted="one batch, by the names of forward's parameters or in their order",
        ),
    ] = None
    batch: Annotated[
        int | None,
        Option(
            "Sequences of the global batch (hf: models; default 8).",
            "rows of the batch made for Hugging Face models; left out, 8.",
            MODEL,
            check=at_least(1),
        ),
    ] = None
    seq: Annotated[
        int | None,
        Option(
            "Tokens of a sequence (hf: models; default 128).",
            "tokens of its sequences; left out, 128, or what the model has positions for.",
            MODEL,
            check=at_least(1),
        ),
    ] = None
    precision: Annotated[
        str,
        Option(
            "fp32, fp64, bf16, fp16 or fp8.",
            '"fp32", "fp64", or "bf16", "fp8" (bf16, linear layers in float8) and "fp16" (float32 master weights; fp16 '
            "trains with `Trainer.scaler`).",
            MODEL,
        ),
    ] = "fp32"
    per_microbatch: Annotated[
        bool,
        Option(
            "Each microbatch is a batch by itself (batch norm, in-batch losses).",
            "each of `microbatches` is a batch by itself, as in eager gradient accumulation: ops that mix "
            "samples (batch "
            "norm, in-batch losses) see one alone, buffers are written once a microbatch, and losses are averaged. It "
            "changes what is computed; where labels are counted, by those of all microbatches.",
            MODEL,
        ),
    ] = False
    time_limit_s: Annotated[
        float,
        Option(
            "For all of it: loading, capture and planning.",
            "seconds for all of it, capture included; a note says if they ran out. Where nothing fits by then, "
            "planning takes up to twice as many. 0: the first plan that fits.",
            PLANNING,
            flag="time-limit",
            metavar="SECONDS",
            check=_check_time_limit,
            wanted=_TIME_LIMIT,
        ),
    ] = 60.0
    strategy: Annotated[
        str,
        Option(
            "Who chooses: paraplan, or as others do: ddp, zero1, zero2, fsdp, gpipe, megatron, megatron-grid, alpa, "
            "piper, ... (`paraplan compare` lists all).",
            'who chooses the plan: "paraplan", or what others would choose (`baselines.planners.PLANNERS`): "ddp", '
            '"zero1", "zero2", "fsdp", "gpipe", "megatron", "megatron-grid", and those that search: "pipedream", '
            '"pipedream-2bw", "dapple", "piper", "alpa", "galvatron", "chimera", "varuna", "flexflow", "aceso", '
            '"mist", "nnscaler", "hetpipe", "pipe-torch"; what they leave open is planned as ever.',
            PLANNING,
            metavar="NAME",
        ),
    ] = "paraplan"
    profile: Annotated[
        str | Path | None,
        Option(
            "Measured times, from paraplan profile.",
            "measured times, a file of `paraplan profile`.",
            PLANNING,
            metavar="FILE",
        ),
    ] = None
    profile_any: Annotated[
        bool,
        Option(
            "Take another device's or torch version's times too.",
            "whether another device's or torch version's times are taken too; the plan then says so.",
            PLANNING,
        ),
    ] = False


def check_batch(asked: JobOptions) -> None:
    """Refuse sizes of a batch that is given.

    Raises:
        ConstraintError: names the size.
    """
    for word, value in (("batch", asked.batch), ("seq", asked.seq)):
        if value is not None and asked.example_inputs is not None:
            raise ConstraintError(
                "{} beside example_inputs, which say the batch: leave it out", OptionValue(word, value)
            )


def batches_apart(asked: JobOptions, microbatches: int | None) -> int:
    """How many batches a step's batch is.

    Raises:
        ConstraintError: every microbatch is one, and nothing says how many there are.
    """
    if not asked.per_microbatch:
        return 1
    if microbatches is None:
        raise ConstraintError(
            "{} makes the number of microbatches part of what is computed, so it is yours to say: give {} or another "
            "divisor of the batch",
            *(OptionName("per_microbatch"), OptionValue("microbatches", 4)),
        )
    return microbatches


class CompileOptions(ConstraintKeywords, CaptureKeywords, total=False):
    """The keywords of `compile`: of `Constraints` and `JobOptions`."""

    example_inputs: Mapping[str, Any] | Sequence[object] | None
    batch: int | None
    seq: int | None
    precision: str
    per_microbatch: bool
    time_limit_s: float
    strategy: str
    profile: str | Path | None
    profile_any: bool


@documented
class FitOptions(CaptureOptions, frozen=True, kw_only=True):
    """How a model is fitted into a memory budget."""

    microbatches: Annotated[
        int, Option("", "how many parts a batch is worked on in, one after another.", check=at_least(1))
    ] = 1
    offload: Annotated[
        bool,
        Option(
            "",
            "whether tensors may wait in the host's memory, where copying them costs less than making them again.",
        ),
    ] = False
    time_limit_s: Annotated[float, Option("", "seconds for planning.", check=_check_above_zero)] = 30.0
    cluster: Annotated[
        ClusterSpec | str | None,
        Option(
            "",
            "one device whose rates decide what is cheap to execute again; the model's own, if left out.",
            wanted="a ClusterSpec, a file's name or a catalog name",
            example="1xH100",
        ),
    ] = None
    seed: Annotated[int | None, Option("", "of dropout; torch's generator decides if left out.")] = None
    check: Annotated[
        bool | int,
        Option(
            "",
            "hold the first step, or so many, against the eager model before taking it: loss, gradients and buffers, "
            "random numbers replayed; a difference raises CheckError. It leaves everything as it was, and "
            "costs per step "
            "one planned step aside and one step of a copy of the model (two below float64, one of them in "
            "float64), whose "
            "memory the budget does not count.",
        ),
    ] = False


class FitKeywords(CaptureKeywords, total=False):
    """The keywords of `fit`."""

    microbatches: int
    offload: bool
    time_limit_s: float
    cluster: ClusterSpec | str | None
    seed: int | None
    check: bool | int
