"""A block's graph as a compiler sees it: kernels of canonical ops are ops of their own, and nobody looks inside.

Their Python is a reference (loops over chunks, checks that read values, launches of Triton kernels): traced, it would
be compiled into something slower than the kernel, or not at all. Each becomes one call of `paraplan_block::<op>`, whose
fake kernel gives the shapes, dtypes and strides that the program says. The text among its arguments says everything
else (kernel, plain arguments, results), so equal graphs are equal in every process, as a compiler's cache expects.
Ops of torch, users' custom ops, collectives and changes of layout stay as they are, to be traced and fused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from paraplan.ir.execution.offsets import parse_offset
from paraplan.ir.execution.rank_program import PIECES, Block, Instr, InstrKind, LocalValue
from paraplan.ir.model.graph import Arg, ArgKind, arg_kind, arg_text, target_parts
from paraplan.ir.process.memo import SESSION
from paraplan.ir.struct import Value
from paraplan.runtime.executing import instructions, targets
from paraplan.runtime.executing.instructions import INSTR, LOCAL, OFFSET
from paraplan.runtime.executing.torch_private import storage_key, storage_of

NAMESPACE = "paraplan_block"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


class _Call(Value, frozen=True, kw_only=True):
    """A kernel's call but for its tensors and offsets.

    Attributes:
        target, kernel: of the instruction.
        args, kwargs: of it; "%i" is the i-th tensor, "#i" the i-th number.
        outs: its results; None where absent.
        device: of a kernel that is given no tensor; "" where one is.
    """

    target: str
    kernel: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    outs: tuple[LocalValue | None, ...]
    device: str


def compilable(module: fx.GraphModule, block: Block) -> fx.GraphModule:
    """An emitted block with plain arguments instead of a boxed list, and with its kernels opaque.

    Args:
        module: emitted from the block; it is not changed.
        block: says what results kernels have.
    """
    graph, env = fx.Graph(), {}
    named = {node.meta[key]: node for node in module.graph.nodes for key in (LOCAL, OFFSET) if key in node.meta}
    for node in module.graph.nodes:
        instr = block.instrs[node.meta[INSTR]] if INSTR in node.meta else None
        if instr is None or not _is_opaque(instr):
            env[node] = graph.node_copy(node, env.__getitem__)
        elif node.target is not operator.getitem:
            call = _Caller(instr, block, str(node.kwargs.get("device", "")))
            made = graph.call_function(*call.by(lambda name: env[named[name]]))
            present = [name for name in instr.outs if name is not None]
            items = {name: graph.call_function(operator.getitem, (made, k)) for k, name in enumerate(present)}
            env.update({named[name]: item for name, item in items.items()})
            env.setdefault(node, made)
    return fx.GraphModule(module, graph, type(module).__name__)


def _is_opaque(instr: Instr) -> bool:
    if instr.kind is not InstrKind.OP or not target_parts(instr.target).is_canonical:
        return False
    inside = targets.resolve(instr.target, instr.kernel)
    return inside not in instructions.LAYOUT_KERNELS or instr.target in PIECES


class _Caller:
    """Turns an instruction into the call of its opaque op."""

    def __init__(self, instr: Instr, block: Block, device: str) -> None:
        self.tensors: list[str] = []
        self.numbers: list[str] = []
        self.writes = not any(instr.outs)
        args = tuple(self._numbered(arg) for arg in instr.args)
        kwargs = {key: self._numbered(arg) for key, arg in instr.kwargs.items()}
        values = [None if out is None else block.values[out] for out in instr.outs]
        outs = tuple(value and msgspec.structs.replace(value, base="", storage_bytes=0) for value in values)
        self.call = _Call(
            target=instr.target,
            kernel=instr.kernel,
            args=args,
            kwargs=kwargs,
            outs=outs,
            device="" if self.tensors else device,
        )

    def by(self, find: Callable[[str], fx.Node]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The op and its arguments, given the nodes of names and offsets."""
        tensors, numbers = [find(name) for name in self.tensors], [find(text) for text in self.numbers]
        name = target_parts(self.call.target).word
        of = (name, self.call.kernel, "written" if self.writes else "")
        op = _op("_".join(filter(None, of)), self.writes)
        text = msgspec.json.encode(self.call).decode()
        written, tensors = (tensors[:1], tensors[1:]) if self.writes else ([], tensors)
        return op, (*written, tensors, numbers, text)

    def _numbered(self, arg: Arg) -> Arg:
        if isinstance(arg, (tuple, list)):
            return tuple(self._numbered(item) for item in arg)
        if arg_kind(arg) is ArgKind.VALUE:
            return f"%{_index(self.tensors, arg_text(arg))}"
        if arg_kind(arg) is ArgKind.OFFSET:
            return f"#{_index(self.numbers, arg)}" if parse_offset(arg) else 0
        return arg


def _index(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


_OPS: dict[str, Callable[..., Any]] = {}
"""Registered with torch, for good."""


def _op(name: str, writes: bool) -> Callable[..., Any]:
    """The op of a kernel's name, registered when it is first met; one that `writes` does so to its first tensor."""
    if name in _OPS:
        return _OPS[name]
    written, made = ("Tensor(a!) written, ", "()") if writes else ("", "Tensor[]")
    schema = f"{name}({written}Tensor[] tensors, SymInt[] numbers, str call) -> {made}"
    _LIBRARY.define(schema, tags=(torch.Tag.needs_exact_strides,))
    _LIBRARY.impl(name, _write if writes else _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _write_nothing if writes else _promise, lib=_LIBRARY)
    made = _OPS[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return made


@SESSION.cached()
def _read(call: str) -> tuple[_Call, Callable[..., Any]]:
    found = msgspec.json.decode(call, type=_Call)
    return found, targets.resolve(found.target, found.kernel)


def _result(tensors: Sequence[Tensor], numbers: Sequence[int], call: str) -> Any:
    said, kernel = _read(call)

    def given(arg: Arg) -> Any:
        if isinstance(arg, (tuple, list)):
            return tuple(given(item) for item in arg)
        kind = arg_kind(arg)
        if kind in (ArgKind.VALUE, ArgKind.OFFSET):
            return (tensors if kind is ArgKind.VALUE else numbers)[int(arg_text(arg))]
        return targets.decode_literal(arg)

    kwargs = {key: given(arg) for key, arg in said.kwargs.items()}
    if said.device:
        kwargs["device"] = said.device
    return kernel(*map(given, said.args), **kwargs)


def _run(tensors: Sequence[Tensor], numbers: Sequence[int], call: str) -> list[Tensor]:
    """The results that are wanted, each with storage of its own."""
    made, said = _result(tensors, numbers, call), _read(call)[0]
    results = [made] if isinstance(made, Tensor) else list(made)
    taken, found = {storage_key(storage_of(x)) for x in tensors}, []
    for wanted, result in zip(said.outs, results, strict=True):
        if wanted is not None:
            key = storage_key(storage_of(result))
            found.append(result.clone() if key in taken else result)
            taken.add(key)
    return found


def _promise(tensors: Sequence[Tensor], numbers: Sequence[int], call: str) -> list[Tensor]:
    """Results as the program says they are."""
    said = _read(call)[0]
    device = tensors[0].device if tensors else torch.device(said.device or "cpu")
    return [
        torch.empty_strided(out.shape, out.strides, dtype=getattr(torch, out.dtype), device=device)
        for out in said.outs
        if out is not None
    ]


def _write(written: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], call: str) -> None:
    _result([written, *tensors], numbers, call)


def _write_nothing(written: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int], call: str) -> None:
    pass
