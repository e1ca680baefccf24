"""Compiling blocks with torch.compile, phase by phase, and only where the result is eager's.

1. Before the first step every rank compiles its blocks on empty inputs and runs none of them, so no collective is
   issued while a rank may fail. All ranks then exchange what failed; a block that fails on one stays eager on all.
2. Compilers have miscompiled graphs with collectives without an error (a fused kernel read a buffer before its
   all-reduce), so the first time a compiled block is called it is run before the eager one; where they differ on any
   rank of the mesh, every rank of it uses the eager block from then on. The first's results wait in the host's memory
   meanwhile: the first step takes no more memory of the device than others.
3. Nothing is compiled later: inputs that are not those compiled for run the uncompiled code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.offsets import offset_value
from paraplan.ir.execution.rank_program import Block, InstrKind, StepKind, in_place, is_compiled
from paraplan.ir.model.graph import refs, writes_first
from paraplan.runtime.executing.executor import Executor
from paraplan.runtime.executing.opaque import compilable
from paraplan.runtime.executing.plain import plainly
from paraplan.runtime.executing.torch_private import find_backend
from paraplan.runtime.transport.distributed import DistributedTransport

Boxed = Callable[[list[Any]], Sequence[Tensor | None]]
Backend = str | Callable[..., Any]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
COMPARED = 1 << 22
"""Elements of results that are compared at a time."""
REMEDY = "leave the strictness out to run such blocks uncompiled"


class _NotRun(Exception):
    """Compiled code was reached while blocks are only compiled."""


class CheckedBlock:
    """A block that becomes compiled code if its first run shows no difference.

    Args:
        block: what the module was emitted from.
        eager: the emitted module.
        transport: by which ranks agree on what the first run shows.
        backend: torch.compile's.
        strict: whether a difference is an error.

    Attributes:
        chosen: what runs; None before the first call.
        reason: why that is the eager module, where it is.
        calls: how often compiled code ran.
    """

    def __init__(
        self,
        block: Block,
        eager: fx.GraphModule,
        transport: DistributedTransport,
        backend: Backend = "inductor",
        strict: bool = False,
    ) -> None:
        self.block, self.eager, self.transport, self.backend, self.strict = block, eager, transport, backend, strict
        self.chosen: Boxed | None = None
        self.reason, self.calls = "", 0
        self._is_run = True
        # A function of its own per block: torch limits how often one may be compiled.
        self._compiled = torch.compile(compilable(eager, block).forward, fullgraph=True, backend=self._made_by)
        self._written, self._spent = written_inputs(block), freed_inputs(block)

    def _made_by(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """torch.compile's backend, whose code is not run while blocks are only compiled."""
        made = (find_backend(self.backend) if isinstance(self.backend, str) else self.backend)(graph, inputs)

        def run(*args: Any) -> Any:
            if not self._is_run:
                raise _NotRun
            self.calls += 1
            return made(*args)

        return run

    def compile(self, samples: Iterator[list[Any]]) -> str:
        """Compile for inputs like these, without running it; returns why that failed, "" where it did not."""
        self._is_run = False
        try:
            for given in samples:
                try:
                    self._compiled(*given)
                except _NotRun:
                    continue
                return "there is nothing to compile"
        except Exception as fault:  # noqa: BLE001  (whatever the compiler raises, eager is right)
            return f"{type(fault).__name__}: {str(fault).strip()[:200]}"
        finally:
            self._is_run = True
        return ""

    def stay_eager(self, reason: str) -> None:
        """Use the emitted module from now on."""
        if self.strict:
            raise CodegenError(f"block {self.block.name}: {reason}; {REMEDY}")
        self.chosen, self.reason = self.eager, reason
        warnings.warn(f"block {self.block.name} stays eager: {reason}", stacklevel=2)

    def __call__(self, boxed: list[Any]) -> Sequence[Tensor | None]:
        """Run it, deciding on the first call."""
        if self.chosen is not None:
            return self.chosen(boxed)
        found, reason = self._first_run(boxed)
        into = [boxed[index] for index in sorted(self._written)]
        wanted = self.eager(boxed)
        reason = self._agreed(reason or _difference(found, [*wanted, *into]))
        if reason:
            self.stay_eager(reason)
        else:
            self.chosen = self._run
        return wanted  # type: ignore[no-any-return]

    def _first_run(self, boxed: list[Any]) -> tuple[Sequence[Tensor | None], str]:
        """What compiled code gives for these inputs, and what it writes into some, in the host's memory, or why it
        gives nothing.

        The inputs are as before: those it frees or writes wait in the host's memory too, so that the device holds no
        more than in any other call.
        """
        kept = {index: (boxed[index], _on_host(boxed[index])) for index in self._spent | self._written}
        given, before = list(boxed), self.calls
        for index in self._spent - self._written:
            kept[index] = boxed[index] = (None, kept[index][1])
        try:
            found = [None if x is None else _on_host(x) for x in self._run(given)]
            found += [_on_host(boxed[index]) for index in sorted(self._written)]
        except Exception as fault:
            if any(instr.kind is InstrKind.COLLECTIVE for instr in self.block.instrs):
                raise  # other ranks may wait in its collectives: there is nothing to agree on
            return (), f"{type(fault).__name__}: {str(fault)[:200]}"
        finally:
            for index, (x, held) in kept.items():
                boxed[index] = _like(held, self.transport.device) if x is None else x.copy_(held)
        missed = "its inputs, or torch's settings, are not those it was compiled for"
        return found, missed if self.calls == before else ""

    def _run(self, boxed: list[Any]) -> Any:
        args = tuple(boxed)
        boxed.clear()
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._compiled(*args)

    def _agreed(self, reason: str) -> str:
        """Why this rank, or another one of the mesh, cannot use compiled code; "" where all can."""
        flag = torch.tensor(float(self.transport.rank + 1 if reason else 0), device=self.transport.device)
        for axis in range(len(self.transport.mesh.shape)):
            flag = self.transport.reduce(flag, axis, "max")
        return reason or (f"rank {int(flag) - 1} found a difference" if flag else "")


def written_inputs(block: Block) -> frozenset[int]:
    """Positions of a block's inputs that it writes."""
    written = set()
    for instr in block.instrs:
        if in_place(block, instr) if instr.kind is InstrKind.COLLECTIVE else writes_first(instr.target):
            written.add(_owner(block, next(refs(instr.args))))
    return frozenset(index for index, name in enumerate(block.inputs) if name in written)


def freed_inputs(block: Block) -> frozenset[int]:
    """Positions of a block's inputs that it frees."""
    freed = {name for instr in block.instrs for name in instr.frees}
    return frozenset(index for index, name in enumerate(block.inputs) if name in freed)


def _like(x: Tensor, device: str) -> Tensor:
    """A copy elsewhere, with the same strides."""
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    return torch.empty_strided(once.shape, once.stride(), dtype=x.dtype, device=device).copy_(once).expand(x.shape)


def _on_host(x: Tensor) -> Tensor:
    return _like(x, "cpu")


def _owner(block: Block, name: str) -> str:
    """The value whose storage a value shares."""
    while (base := block.values[name].base) != name:
        name = base
    return name


def _difference(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> str:
    """Where results, in the host's memory, are not eager's; little of them is on the device at a time."""
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a is None or b is None or not b.numel():
            continue
        if a.stride() != b.stride():
            return f"result {index} has strides {a.stride()}, eager's are {b.stride()}"
        parts = list(zip(_parts(a), _parts(b), strict=True))
        if not a.is_floating_point():
            if not all(torch.equal(x.to(y.device), y) for x, y in parts):
                return f"result {index} differs"
            continue
        scale = max(*(float(y.abs().max()) for _, y in parts), 1e-30)
        errors = [float((x.to(y.device) - y).abs().max()) / scale for x, y in parts]
        error = math.nan if any(map(math.isnan, errors)) else max(errors)
        if not error <= TOLERANCE.get(b.dtype, 1e-4):
            return f"result {index} differs by {error:.1e} of its largest element"
    return ""


def _parts(x: Tensor) -> Sequence[Tensor]:
    """A tensor in pieces of some COMPARED elements, row by row where it is not contiguous."""
    if x.is_contiguous():
        return x.view(-1).split(COMPARED)
    return x.split(max(1, COMPARED * x.shape[0] // x.numel()))


@dataclass(frozen=True)
class Compilation:
    """What goes through torch.compile.

    Attributes:
        phases: "F" and/or "B": whose blocks do, each checked against eager once.
        backend: torch.compile's.
        strict: whether a block that cannot be compiled, or differs from eager, is an error, not a warning.
    """

    phases: Sequence[str] = ()
    backend: Backend = "inductor"
    strict: bool = False


class CompiledPhases:
    """The blocks of a rank that go through torch.compile; recordings stay eager.

    Args:
        executor: of the rank; such blocks among its modules are replaced.
        transport: by which ranks agree.
        compilation: which blocks, and how.
    """

    def __init__(self, executor: Executor, transport: DistributedTransport, compilation: Compilation) -> None:
        self.executor, self.transport, self._strict = executor, transport, compilation.strict
        self.blocks: dict[str, CheckedBlock] = {}
        self._is_due = bool(compilation.phases)
        for name, module in executor.modules.items():
            block = executor.program.blocks[name]
            goes = block.role.value in compilation.phases and is_compiled(block)
            if goes and isinstance(module, fx.GraphModule):
                self.blocks[name] = CheckedBlock(block, module, transport, compilation.backend, compilation.strict)

    def prepare(self) -> None:
        """Compile, once, before anything runs; all ranks of the job must call.

        Raises:
            CodegenError: under `strict`, a block failed on some rank: the same error on all.
        """
        if not self._is_due:
            return
        self._is_due = False
        with plainly():
            mine = {name: block.compile(self._samples(block.block)) for name, block in self.blocks.items()}
        failed: dict[str, str] = {}
        for rank, theirs in enumerate(self.transport.everyones({name: why for name, why in mine.items() if why})):
            for name, why in theirs.items():
                failed.setdefault(name, f"rank {rank} could not compile it: {why}")
        for name, why in sorted(failed.items()):
            if self._strict:
                raise CodegenError(f"block {name}: {why}; {REMEDY}")
            if name in self.blocks:
                self.blocks[name].stay_eager(why)
        self.executor.replace_blocks(self.blocks)

    def _samples(self, block: Block) -> Iterator[list[Any]]:
        """Inputs of every call of a block that may be compiled for by itself: they differ in offsets."""
        tape, place = self.executor.tapes[block.name], self.executor.coordinates
        calls = [s for s in self.executor.program.steps if s.kind is StepKind.CALL and s.block == block.name]
        offsets = (tuple(offset_value(text, place, max(s.microbatch, 0)) for text in tape.offsets) for s in calls)
        values = [block.values[name] for name in block.inputs]
        for numbers in dict.fromkeys(offsets):
            empty = [
                torch.empty_strided(v.shape, v.strides, dtype=getattr(torch, v.dtype), device=self.transport.device)
                for v in values
            ]
            yield [*empty, *numbers]

    @property
    def reasons(self) -> dict[str, str | None]:
        """By block, "" where it runs compiled, why it stays eager, None before its first run."""
        return {name: None if block.chosen is None else block.reason for name, block in self.blocks.items()}
