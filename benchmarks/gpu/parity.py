"""Kernels against their references, instruction by instruction as plans run them; and plans of several ranks on one
device against the same on a CPU in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.gpu import attentions
from benchmarks.gpu.place import Place
from benchmarks.table import Case, Row
from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.ir.execution.rank_program import Instr, InstrKind, LocalValue, RankProgram
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef, Plan
from paraplan.jobs.checking.check import max_error
from paraplan.jobs.measuring.local_ops import whole_plan
from paraplan.kernels.torch_private import tree_leaves, tree_map_only
from paraplan.lowering import lower
from paraplan.planner.assemble import Job
from paraplan.planner.sampling import random_plan
from paraplan.runtime.executing.instructions import INSTR
from paraplan.runtime.executing.targets import resolve
from paraplan.runtime.in_process import InProcessTrainer

MODELS = ("gpt2", "llama", "t5", "vit", "unet", "resnet", "dlrm", "mixtral")
CLOSE = {"float32": 2e-4, "bfloat16": 2e-2, "float16": 4e-3, "float64": 1e-9}
"""Largest error beside the largest value, by the least exact dtype among what an op reads and makes."""

ADAMW = OPTIMIZERS["adamw"]


class Compared:
    """An instruction's kernel, each call of which is held against the reference kernel in float64 on the CPU."""

    def __init__(self, instr: Instr, values: Mapping[str, LocalValue], call: Callable[..., Any], kept: Errors) -> None:
        self.instr, self.call, self.kept = instr, call, kept
        self.outs = [None if name is None else values[name] for name in instr.outs]
        self.__name__ = "compared"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = tree_map_only(Tensor, _copied if self.instr.target in DRAWN else _exact, (args, kwargs))
        made, inside = called(self.call, args, kwargs)
        again, named = given
        with torch.device("cpu"):
            wanted = resolve(self.instr.target)(*again, **{**named, **_on_cpu(named)})
        pairs = zip(_tensors(made), _tensors(wanted), self.outs, strict=False)
        for found, exact, said in pairs:
            if said is not None and not (self.instr.target in TIED and not found.is_floating_point()):
                coarsest = _coarsest((args, kwargs, found))
                self.kept.compare(self.instr, found, exact, said, coarsest, _terms(self.instr.target, again, exact))
        self.kept.inside(self.instr, inside)
        return made


class Errors:
    """What was found."""

    def __init__(self) -> None:
        self.calls = 0
        self.worst = 0.0
        self.where = ""
        self.failures: list[str] = []

    def compare(
        self, instr: Instr, found: Tensor, exact: Tensor, said: LocalValue, dtype: str, terms: float = 0.0
    ) -> None:
        """One result; `terms`: the size of what it is a sum of, where that may cancel."""
        self.calls += 1
        name = f"{instr.target} as {instr.kernel or 'reference'}"
        real = tuple(stride for stride, size in zip(found.stride(), found.shape, strict=True) if size > 1)
        told = tuple(stride for stride, size in zip(said.strides, said.shape, strict=True) if size > 1)
        if real != told and found.numel():
            self.failures.append(f"{name}: strides {real}, the program says {told}")
        close = CLOSE.get(dtype, 0.0)
        error = _error(found.detach().cpu(), exact, terms)
        if error > close:
            self.failures.append(f"{name} in {dtype}: error {error:.1e}, at most {close:.0e}")
        if close and error / close > self.worst:
            self.worst, self.where = error / close, name

    def inside(self, instr: Instr, nbytes: int) -> None:
        """What an instruction allocated and dropped."""
        slack = 512 * 8  # blocks are rounded up to 512 bytes
        if instr.kernel == "grouped":
            slack += 1 << 18  # torch's product describes its groups to the device, per multiprocessor
        if nbytes > instr.workspace_bytes + slack:
            self.failures.append(f"{instr.target}: {nbytes} B inside, the program says {instr.workspace_bytes}")


DRAWN = frozenset({"paraplan.dropout", "paraplan.uniform"})
"""Whose bits are those of the dtype they are drawn in: the reference draws in the same."""


def _copied(x: Tensor) -> Tensor:
    return x.detach().cpu().clone()


def _exact(x: Tensor) -> Tensor:
    copy = _copied(x)
    return copy.double() if copy.is_floating_point() and copy.dtype.itemsize > 1 else copy


def _on_cpu(named: Mapping[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("cpu")} if named.get("device") is not None else {}


def _tensors(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _coarsest(tree: Any) -> str:
    """The least exact floating dtype of the tensors of a call."""
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    names = {"float64", *(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)}
    return max(names, key=lambda name: CLOSE.get(name, 1.0))


TIED = ("aten.topk.default",)
"""Whose places are free where values are equal, as those of half precision are; the values are compared."""
SUMS = ("aten.sum.dim_IntList", "aten._softmax_backward_data.default")
"""What may come to next to nothing: the gradient of a bias of keys is zero in exact numbers."""


def _terms(target: str, given: Sequence[Any], exact: Tensor) -> float:
    """Of a sum, the largest that its terms come to without their signs; 0.0 of all else."""
    if target not in SUMS:
        return 0.0
    first = next(x for x in tree_leaves(given) if isinstance(x, Tensor))
    if not first.is_floating_point():
        return 0.0
    return float(first.abs().double().sum()) / max(exact.numel(), 1)


def _error(found: Tensor, exact: Tensor, terms: float = 0.0) -> float:
    """The largest difference beside the largest value, or `terms` where those are larger.

    Infinite where integers, NaN or infinities differ.
    """
    if not found.is_floating_point() and not found.is_complex():
        return 0.0 if torch.equal(found, exact.to(found.dtype)) else float("inf")
    found, exact = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (found, exact))
    found, exact = found.double(), exact.double()
    finite = exact.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(float(exact[finite].abs().max()), terms)
    return float((found - exact)[finite].abs().max()) / max(scale, 1e-30)


def called(call: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, int]:
    """What a call gives, and the bytes it allocated and dropped."""
    before = _allocated()
    made = call(*args, **kwargs)
    peak = _peak()
    return made, peak - max(before, _allocated())


def _allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


Watch = Callable[[Instr, Mapping[str, LocalValue], Callable[..., Any]], Callable[..., Any]]


def watched(program: RankProgram, device: str, watch: Watch) -> dict[str, fx.GraphModule]:
    """A program's blocks, every op of which is watched.

    Args:
        program: of a rank.
        device: where it runs.
        watch: what runs in an instruction's place, of its values and its kernel.
    """
    modules = build_modules(program, device=device)
    for name, module in modules.items():
        block = program.blocks[name]
        seen = set()
        for node in module.graph.nodes:
            index = node.meta.get(INSTR)
            if node.op != "call_function" or index is None or index in seen:
                continue
            seen.add(index)
            instr = block.instrs[index]
            if instr.kind is InstrKind.OP:
                node.target = watch(instr, block.values, node.target)
        module.recompile()
    return modules


def _captured(name: str, precision: str, dropout: float = 0.1) -> tuple[Program, Any]:
    torch.manual_seed(0)
    small = build(name, dropout)
    wide = torch.float64 if precision == "fp64" else torch.float32
    model = small.model.to(wide)
    batch = {key: x.to(wide) if x.is_floating_point() else x for key, x in small.batch.items()}
    program = capture(model, batch, loss_fn=small.loss_fn, precision=precision, batch_dims=small.batch_dims)
    return program, (model, batch)


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolutions in float32 as exact as products are; torch's default rounds what they multiply to TF32."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@exact_convolutions()
def kernels(place: Place, name: str, precision: str) -> Row:
    """Every kernel of a model's step."""
    program, (model, batch) = _captured(name, precision)
    plan, kept = whole_plan(program, place.cluster(), ADAMW), Errors()
    programs = lower(plan)
    modules = [watched(each, place.device, partial(Compared, kept=kept)) for each in programs]
    trainer = InProcessTrainer(plan, programs, modules, model, device=place.device)
    trainer.record = False
    trainer.step(batch)
    ran = {instr.target for each in programs for block in each.blocks.values() for instr in block.instrs}
    note = f"{kept.calls} results of {len(ran)} ops; nearest to its limit: {kept.where}"
    return {"error": kept.worst, "note": note, "failures": sorted(set(kept.failures))[:8]}


STEPS = 2


def _trained(plan: Plan, model: Any, batch: Mapping[str, Tensor], device: str) -> tuple[list[float], dict[str, Tensor]]:
    programs = lower(plan)
    modules = [build_modules(each, device=device) for each in programs]
    trainer = InProcessTrainer(plan, programs, modules, model, device=device)
    trainer.record = False
    losses = []
    for _ in range(STEPS):
        losses.append(float(trainer.step(batch)))
        grads = {name: grad.cpu().double() for name, grad in trainer.grads().items()}
        trainer.apply_optimizer(torch.optim.SGD, lr=0.05)
    return losses, grads


@exact_convolutions()
def ranks(place: Place, name: str, seeds: Sequence[int]) -> Row:
    """Random plans of four devices, in float32 on this one, against one device in float64 on the CPU; with dropout."""
    program, (model, batch) = _captured(name, "fp32")
    exact, (wide, given) = _captured(name, "fp64")
    alone = whole_plan(exact, Place("cpu", True).cluster(), ADAMW)
    wanted, grads = _trained(alone, wide, given, "cpu")
    worst, failures = 0.0, []
    for seed in seeds:
        plan = random_plan(Job(program, place.cluster(4), ADAMW, ModelRef(display=name), {}), seed)
        losses, found = _trained(plan, model, batch, place.device)
        error = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(losses, wanted, strict=True))
        error = max(error, max_error(found, grads)[0])
        worst = max(worst, error)
        if error > FAR:
            failures.append(f"plan {seed}: error {error:.1e}")
    return {"error": worst, "note": f"{len(seeds)} plans of 4 ranks, {STEPS} steps", "failures": failures}


FAR = 2e-3


def cases(place: Place) -> dict[str, dict[str, Case]]:
    """By part."""
    models = ("gpt2", "dlrm") if place.small else MODELS
    seeds = range(1) if place.small else range(4)
    return {
        "kernels": {
            f"{name} {precision}": lambda a=(name, precision): kernels(place, *a)
            for name in models
            for precision in (("fp32",) if place.small else ("fp32", "bf16"))  # torch sums in bf16 on a CPU
        }
        | attentions.parities(place),
        "ranks": {name: lambda a=name: ranks(place, a, seeds) for name in models},
    }
