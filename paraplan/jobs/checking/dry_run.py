"""Every block of a plan run on tensors without data that claim to be on the plan's device: a test of code for a device
that is not there.

Wrong devices, dtypes, shapes and strides, kernels that do not exist and those that take no such arguments are errors
here, as they would be on the device. What every instruction launches, and what it allocates and drops inside, is noted.
Limits: values; collectives and copies give what the plan says they give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from paraplan.codegen.block_graph import emit_block
from paraplan.codegen.passes import EmitContext, place_factories
from paraplan.ir.errors import CodegenError, ParaplanError
from paraplan.ir.execution.offsets import offset_value
from paraplan.ir.execution.rank_program import Block, Instr, InstrKind, LocalValue, RankProgram
from paraplan.jobs.checking.without_device import dispatched_methods
from paraplan.kernels.dtypes import dtype_name
from paraplan.kernels.torch_private import OpOverload, fake_mode, has_kernel
from paraplan.runtime.executing.interpret import Line, make_tape
from paraplan.runtime.executing.launch_counts import KernelCall, LaunchCounter
from paraplan.runtime.executing.tracker import Ledger, Tracker


class InstrRun(NamedTuple):
    """What an instruction did.

    Attributes:
        index: in its block.
        target: the op's.
        launches: kernels, in order; none of a collective or a copy.
        workspace_bytes: the most it allocated and dropped inside.
    """

    index: int
    target: str
    launches: tuple[KernelCall, ...]
    workspace_bytes: int


SHARED = "^shared"
"""In the name of a result that shares an input's storage, as an op whose rule was found by running it may give."""


def dry_run(program: RankProgram, device: str) -> dict[str, tuple[InstrRun, ...]]:
    """Runs every block of a rank's program once, with coordinate 0 on every axis, in microbatch 0.

    Args:
        program: of one rank class.
        device: "cpu" or "cuda".
    Returns:
        By block, what each instruction did.
    Raises:
        CodegenError: a kernel fails, or a result is not what the program says; names block, instruction and op.
    """
    context = EmitContext(mesh_shape=program.mesh_shape, groups=None, device=device)
    found = {}
    with fake_mode(), torch.no_grad(), dispatched_methods():
        for name, block in program.blocks.items():
            module = place_factories(emit_block(block), block, context)
            found[name] = _DryBlock(module, block, program, device).run()
    return found


class _DryBlock:
    """One block under way."""

    def __init__(self, module: fx.GraphModule, block: Block, program: RankProgram, device: str):
        self.tape, self.block, self.device = make_tape(module, block), block, device
        self.coordinates = (0,) * len(program.mesh_shape)
        self.ledger, self.tracker = Ledger(), Tracker()
        self.env: dict[fx.Node, Any] = {}

    def run(self) -> tuple[InstrRun, ...]:
        """Plays the block's instructions in order."""
        numbers = [offset_value(text, self.coordinates, 0) for text in self.tape.offsets]
        inputs = [self._empty(self.block.values[name]) for name in self.block.inputs]
        given = [*inputs, *numbers, *([None] if self.tape.copies else [])]
        self.env = dict(zip(self.tape.inputs, given, strict=True))
        for tensor in inputs:
            self.ledger.register(tensor)
        del inputs, given
        return tuple(self._play(line) for line in self.tape.lines)

    def _empty(self, value: LocalValue) -> Tensor:
        device = "cpu" if value.tier else self.device
        return torch.empty_strided(value.shape, value.strides, dtype=getattr(torch, value.dtype), device=device)

    def _play(self, line: Line) -> InstrRun:
        instr = self.block.instrs[line.index]
        before, counter = self.ledger.open_window(), LaunchCounter()
        if instr.kind is InstrKind.OP:
            try:
                self._call(line, counter)
            except ParaplanError:
                raise
            except Exception as fault:
                raise self._wrong(line, f"{type(fault).__name__}: {str(fault).strip()[:400]}") from fault
            self._compare(line, instr)
        else:
            self._move(line, instr)
        workspace = max(0, self.ledger.window_bytes - max(self.ledger.live_bytes, before))
        for node in line.dead:
            self.env.pop(node, None)
        return InstrRun(line.index, instr.target, tuple(counter.launches), workspace)

    def _call(self, line: Line, counter: LaunchCounter) -> None:
        for node in line.nodes:
            args, kwargs = map_arg(node.args, self.env.__getitem__), map_arg(node.kwargs, self.env.__getitem__)
            if isinstance(node.target, OpOverload) and has_kernel(node.target):  # one, though torch lack the device's
                self.env[node] = node.target(*args, **kwargs)
                counter.note(node.target, args, kwargs, self.env[node])
                self.ledger.register_all(self.env[node])
                continue
            with counter, self.tracker, self.tracker.booking(self.ledger):
                self.env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        if len(line.nodes) > 1:
            self.env[line.nodes[0]] = None

    def _move(self, line: Line, instr: Instr) -> None:
        """A collective, a copy or a wait: its result as foretold; a view of what it overwrites or waits for."""
        node = line.nodes[0]
        name = instr.outs[0] if instr.outs else None
        if name is None:
            self.env[node] = None
            return
        value = self.block.values[name]
        sources = [self.env[each] for each in node.args if isinstance(each, fx.Node)]
        shared = value.storage_bytes == 0 and sources and isinstance(sources[0], Tensor)
        made = sources[0].as_strided(value.shape, value.strides) if shared else self._empty(value)
        if not shared:
            self.ledger.register(made)
        self.env[node] = made

    def _compare(self, line: Line, instr: Instr) -> None:
        """Results against what the program says of them."""
        names: Sequence[str] = [name for name in instr.outs if name is not None]
        for name, node in zip(names, line.outs, strict=True):
            made, value = self.env[node], self.block.values[name]
            said = (value.shape, value.dtype, self.device, _told(value.shape, value.strides))
            real = (tuple(made.shape), dtype_name(made.dtype), made.device.type, _told(made.shape, made.stride()))
            loose = 0 in value.shape or SHARED in name  # a result that shares an input's storage is copied at once
            if real != said and not (loose and real[:3] == said[:3]):
                raise self._wrong(line, f"result {name!r} is {_words(real)}, the program says {_words(said)}")

    def _wrong(self, line: Line, what: str) -> CodegenError:
        return CodegenError(f"{self.block.name}[{line.index}] {self.block.instrs[line.index].target}: {what}")


def _told(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The strides of dims of more than one element."""
    return tuple(stride for stride, size in zip(strides, shape, strict=True) if size != 1)


def _words(told: tuple[Any, ...]) -> str:
    shape, dtype, device, strides = told
    return f"{dtype}{list(shape)} strides {list(strides)} on {device}"
