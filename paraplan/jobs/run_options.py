"""How a plan is executed: the options of `Plan.executable` and of `paraplan run`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypedDict

from paraplan.ir.options import Option, Options, at_least, documented


@documented
class ExecutionOptions(Options, frozen=True, kw_only=True):
    """How a plan is executed on this machine."""

    weights: Annotated[
        str | Path | None,
        Option(
            "",
            "safetensors to read this rank's parts from: a file, an index, or a directory with either. Without them a "
            "model on meta is initialised, alike for every plan and number of ranks (see `runtime.state.weights`).",
        ),
    ] = None
    seed: Annotated[int, Option("", "base of the random seeds (dropout, initialisation); the same on every rank.")] = 0
    record: Annotated[bool, Option("", "note every instruction and the memory it takes (slow).")] = False
    compile: Annotated[
        bool | str | Callable[..., Any],
        Option(
            "",
            "run forward and backward blocks through torch.compile, each checked against eager on its first "
            "run; one that "
            "differs or does not compile on any rank stays eager on all, and a warning says why. Other than "
            "True, it is "
            "torch.compile's backend.",
        ),
    ] = False
    compile_strict: Annotated[bool, Option("", "such a block is a CodegenError instead.")] = False
    timeout_s: Annotated[
        float | None,
        Option("", "how long a collective waits for its peers; left out, 300, or what a job joined before has."),
    ] = None
    offload_folder: Annotated[
        str | Path | None,
        Option("", "of the files of tensors that wait on disk, removed as they go; left out, the system's."),
    ] = None
    paced: Annotated[
        bool, Option("", "CPU processes only: copies to and from host and disk take the time the plan's cluster says.")
    ] = False
    loss_fn: Annotated[
        Callable[..., Any] | None,
        Option("", "compared with the one the plan was made with, if given; what runs is the plan's."),
    ] = None
    cuda_graphs: Annotated[
        bool,
        Option(
            "",
            "after two steps that are not recorded, what is before the optimizer and what is after it are "
            "replayed as CUDA "
            "graphs. The batch then stays in memory; a gradient that is held is not overwritten, a view of one is.",
        ),
    ] = False


class ExecutionKeywords(TypedDict, total=False):
    """The keywords of `ExecutionOptions`, for checkers of calls."""

    weights: str | Path | None
    seed: int
    record: bool
    compile: bool | str | Callable[..., Any]
    compile_strict: bool
    timeout_s: float | None
    offload_folder: str | Path | None
    paced: bool
    loss_fn: Callable[..., Any] | None
    cuda_graphs: bool


@documented
class RunOptions(Options, frozen=True, kw_only=True):
    """What `paraplan run` does with a plan."""

    steps: Annotated[int, Option("Training steps.", check=at_least(1))] = 5
    data: Annotated[
        str | None,
        Option(
            "Text, read byte by byte; random tokens without it.",
            "file or directory of text; None for random tokens.",
            metavar="FILE|DIR",
        ),
    ] = None
    lr: Annotated[float, Option("Learning rate.")] = 3e-4
    seed: Annotated[int, Option("Of weights, data and dropout.")] = 0
    check: Annotated[bool, Option("Also run on one device and compare.")] = False
    model: Annotated[
        str | None,
        Option(
            "module:factory or file.py:factory, where the plan cannot rebuild its model.",
            "a factory's name, where the plan cannot rebuild its model.",
        ),
    ] = None
    clip: Annotated[float | None, Option("Largest gradient norm.", "the largest norm; None: no clipping.")] = None
    weights: Annotated[
        str | None,
        Option(
            "safetensors to start from; initialised from --seed without.",
            "safetensors files to start from; None for initialisation from the seed.",
            metavar="FILE|DIR",
        ),
    ] = None
    save: Annotated[
        str | None,
        Option(
            "Write a checkpoint of the run's end: all it goes on from.",
            "folder for a checkpoint of the run's end.",
            metavar="DIR",
        ),
    ] = None
    resume: Annotated[
        str | None,
        Option(
            "Go on from a checkpoint, of this or another plan of the model.",
            "folder of a checkpoint to go on from, of any plan of the model.",
            metavar="DIR",
        ),
    ] = None
    record: Annotated[
        str | None,
        Option(
            "Times of its ops, for paraplan learn.",
            "file that the times of its ops go to, from `jobs.run.STEPS_RECORDED` steps more.",
            metavar="FILE",
        ),
    ] = None
    compile: Annotated[
        bool,
        Option(
            "Through torch.compile, each block checked against eager first.",
            "run forward and backward blocks through torch.compile.",
        ),
    ] = False
    cuda_graphs: Annotated[bool, Option("Replay what is before and after the optimizer as CUDA graphs.")] = False
    timeout: Annotated[
        float | None,
        Option(
            "For a rank's peers; default 300.",
            "seconds that a collective of any group waits for its peers; None for the default.",
            metavar="SECONDS",
        ),
    ] = None
