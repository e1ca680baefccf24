"""Ordering a block: collectives and copies as early as their input exists, waits as late as their result is needed.

Compute keeps its order. What is laid out for a gradient to be reduced is laid out as it is made, and where that is
reduced over two axes, one after the other, what comes between follows the next product: the first collective has that
long, and compute need not stand still for it. Every value is then freed at its last use. A block may be split before
its first wait, so that other work comes between.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.model.graph import refs

_PRODUCTS = frozenset(
    f"paraplan.{name}"
    for name in (
        *("linear", "linear_grad_input", "linear_grad_weight", "float8_linear_grad_input", "float8_linear_grad_weight"),
        *("attention", "attention_grad", "experts_grad", "conv_grad_input", "conv_grad_weight"),
    )
) | {"aten.bmm.default", "aten.mm.default"}
"""What takes long enough for a collective to go on beside it."""
MOST_EARLY = 32 << 20
"""Bytes of a gradient that is laid out as it is made: what is larger finds less beside it later."""
_MOVES = frozenset({InstrKind.COLLECTIVE, InstrKind.WAIT})


def finish_block(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str | None, ...],
    saved: tuple[str, ...],
    values: dict[str, LocalValue],
    instrs: list[Instr],
    role: BlockRole,
    kind: str = "",
) -> Block:
    """The block of these instructions, ordered and with frees.

    Args:
        name: of the block.
        inputs, outputs, saved: local names; None for an absent output.
        values: by local name.
        instrs: in the order they were written.
        role, kind: what the block is (`Block`).
    """
    small = {each for each, value in values.items() if value.nbytes <= MOST_EARLY}
    ordered = _overlap(inputs, outputs, saved, instrs, small)
    kept = {out for out in outputs if out is not None} | set(saved)
    return Block(
        name=name,
        role=role,
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        saved=saved,
        values=values,
        instrs=with_frees(kept, ordered),
    )


def split_block(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str | None, ...],
    values: dict[str, LocalValue],
    instrs: list[Instr],
    role: BlockRole,
) -> tuple[Block | None, ...]:
    """The instructions as blocks between which other work can come: split before the first wait, and, where a
    collective has to wait for another, after the last of those (a move over two axes: issue, issue again, wait).

    Each takes what those before issued, and inputs and values of theirs that it reads; the first is None where nothing
    waits.

    Args:
        name: of the last block.
        inputs, outputs: local names; None for an absent output.
        values: by local name.
        instrs: in order.
        role: of all of them.
    """
    waits = [index for index, instr in enumerate(instrs) if instr.kind is InstrKind.WAIT]
    if not waits:
        return None, finish_block(name, inputs, outputs, (), values, instrs, role)
    issued = [index for index, instr in enumerate(instrs) if instr.kind is InstrKind.COLLECTIVE]
    last = issued[-1] if issued else -1
    cuts = [waits[0], *(index for index in waits if waits[0] < last < index)][:2]
    legs = [instrs[at:end] for at, end in zip((0, *cuts), (*cuts, len(instrs)), strict=True)]
    names = [f"{name}.issue", *[f"{name}.on"] * (len(legs) - 2), name]
    there, found = set[str | None](inputs), list[Block]()
    for at, leg in enumerate(legs):
        later = (each for rest in legs[at + 1 :] for instr in rest for each in _reads(instr))
        made = {out for instr in leg for out in instr.outs}
        read = dict.fromkeys(source for instr in leg for source in _reads(instr))
        taken = [source for source in (inputs if at == 0 else read) if source in read and source in there]
        given: tuple[str | None, ...] = outputs
        if at < len(legs) - 1:
            given = tuple(each for each in dict.fromkeys((*later, *outputs)) if each in made)
        else:
            taken += [out for out in dict.fromkeys(outputs) if out is not None and out in there and out not in taken]
        found.append(finish_block(names[at], tuple(taken), given, (), _of(values, leg), leg, role))
        there |= made
    return tuple(found)


def _of(values: dict[str, LocalValue], instrs: list[Instr]) -> dict[str, LocalValue]:
    """The values instructions name."""
    names = dict.fromkeys(name for instr in instrs for name in (*_reads(instr), *instr.outs) if name is not None)
    return {name: values[name] for name in names}


def _reads(instr: Instr) -> list[str]:
    return list(refs((instr.args, tuple(instr.kwargs.values()))))


def _overlap(
    inputs: tuple[str, ...],
    outputs: tuple[str | None, ...],
    saved: tuple[str, ...],
    instrs: list[Instr],
    small: set[str],
) -> list[Instr]:
    first, between = _unread_moves(instrs)
    first = {index for index in first if instrs[index].outs[0] in small}
    order = _EarlyIssues(inputs, instrs, first, between)
    for index, instr in enumerate(instrs):
        if index in between:
            continue
        if instr.kind is InstrKind.OP and index not in order.eager:
            due = order.postponed if instr.target in _PRODUCTS else ()
            order.emit(instr)
            order.go_on(due)
        elif index in order.lacks and not order.is_postponed(_reads(instr)):
            order.wait_for(_reads(instr))
    while order.postponed:
        order.go_on(order.postponed)
    order.wait_for(out for out in (*outputs, *saved) if out is not None)
    return order.ordered


def _unread_moves(instrs: list[Instr]) -> tuple[set[int], set[int]]:
    """Of moves whose results no op reads here, as gradients': the places of ops that lay out what the first collective
    sends, and of what follows a collective's wait for the next one to be issued, that itself included."""
    readers: dict[str, list[int]] = {}
    for index, instr in enumerate(instrs):
        for name in _reads(instr):
            readers.setdefault(name, []).append(index)
    moved = {instr.outs[0] for instr in instrs if instr.kind is InstrKind.WAIT and instr.axis >= 0}

    def after(index: int) -> list[int]:
        return [each for out in instrs[index].outs if out is not None for each in readers.get(out, ())]

    first, between = set[int](), set[int]()
    read = set[int]()  # what is, or leads to, an op that changes no layout
    for index in range(len(instrs) - 1, -1, -1):
        instr, read_by = instrs[index], after(index)
        is_op = instr.kind is InstrKind.OP
        if (is_op and not instr.layout_change) or not read.isdisjoint(read_by):
            read.add(index)
            continue
        lays_out = is_op and bool(read_by) and all(instrs[each].kind in _MOVES for each in read_by)
        if lays_out or (instr.kind is InstrKind.COLLECTIVE and instr.axis >= 0):
            if moved.intersection(_reads(instr)):
                between.add(index)
            elif lays_out:
                first.add(index)
    return first, between


class _EarlyIssues:
    """Instructions in an order where collectives and copies are issued as soon as what they send is there.

    Attributes:
        ordered: the instructions so far.
        eager: the places, as written, of those issued early: collectives, copies, and what is cut or laid out for them.
        lacks: place -> what it waits for, of those of `eager` that are still to come.
        postponed: what follows collectives that were issued, to come after the next product.
    """

    def __init__(self, inputs: tuple[str, ...], instrs: list[Instr], first: set[int], between: set[int]) -> None:
        self._instrs = instrs
        self._made_by_wait = {instr.outs[0]: instr for instr in instrs if instr.kind is InstrKind.WAIT}
        sent = {source for instr in instrs if instr.kind is InstrKind.COLLECTIVE for source in _reads(instr)}
        # Pieces of what is there are cut at once: their collectives are written before those of the whole.
        self.eager = first | {index for index, instr in enumerate(instrs) if instr.issues or _is_piece(instr, sent)}
        self.lacks = {index: set(_reads(instrs[index])) for index in sorted(self.eager)}
        self._readers: dict[str, list[int]] = {}
        for index, sources in self.lacks.items():
            for source in sources:
                self._readers.setdefault(source, []).append(index)
        self._ready = set(inputs)
        self.postponed: tuple[Instr, ...] = ()
        self._follows: dict[str, list[int]] = {}
        self._unissued: dict[int, set[str]] = {}
        for index in sorted(between):
            waits = [self._made_by_wait[name] for name in _reads(instrs[index]) if name in self._made_by_wait]
            self._unissued[index] = {_reads(wait)[0] for wait in waits}
            for issued in self._unissued[index]:
                self._follows.setdefault(issued, []).append(index)
        self.ordered: list[Instr] = []
        self._postpone_after(inputs)
        self._issue(inputs)

    def emit(self, instr: Instr) -> None:
        """An instruction behind the waits for what it reads, and before what it is the last to make ready."""
        self.wait_for(_reads(instr))
        if not instr.outs or instr.outs[0] not in self._ready:  # what was postponed may have waited for it
            self._issue(self._append(instr))

    def go_on(self, due: Iterable[Instr]) -> None:
        """What was postponed, of some."""
        for instr in due:
            left = tuple(each for each in self.postponed if each is not instr)
            if len(left) < len(self.postponed):
                self.postponed = left
                if instr.issues:  # which it is as soon as what it sends is there
                    self.wait_for(_reads(instr))
                else:
                    self.emit(instr)

    def is_postponed(self, names: Iterable[str]) -> bool:
        """Whether one of these is made by what was postponed."""
        return not {out for instr in self.postponed for out in instr.outs}.isdisjoint(names)

    def wait_for(self, names: Iterable[str]) -> None:
        """The waits of names that are not there yet, and what was postponed for those."""
        for name in names:
            if name not in self._ready and name in self._made_by_wait:
                self.emit(self._made_by_wait[name])
            while name not in self._ready and self.postponed:
                self.go_on(self.postponed)

    def _postpone_after(self, made: Iterable[str]) -> None:
        """What follows collectives that were all issued, which these are of."""
        for name in made:
            for index in self._follows.pop(name, ()):
                self._unissued[index].discard(name)
                self.postponed += () if self._unissued[index] else (self._instrs[index],)

    def _append(self, instr: Instr) -> list[str]:
        self.ordered.append(instr)
        made = [out for out in instr.outs if out is not None]
        self._ready.update(made)
        self._postpone_after(made)
        return made

    def _issue(self, made: Iterable[str]) -> None:
        """The collectives and copies that lacked nothing but these, in the order they were written."""
        due: set[int] = set()
        for source in made:
            for index in self._readers.pop(source, ()):
                self.lacks[index].discard(source)
                due.update(() if self.lacks[index] else (index,))
        for index in sorted(due):
            del self.lacks[index]
            self._issue(self._append(self._instrs[index]))


def _is_piece(instr: Instr, sent: set[str]) -> bool:
    """Whether an instruction only cuts from a value what a collective sends."""
    return instr.target == "aten.slice.Tensor" and instr.outs[0] in sent


def with_frees(kept: set[str], instrs: list[Instr]) -> tuple[Instr, ...]:
    """The instructions, each freeing the names it is the last to touch, but for those kept."""
    last: dict[str, int] = {}
    for index, instr in enumerate(instrs):
        for name in (*(out for out in instr.outs if out is not None), *_reads(instr)):
            last[name] = index
    dying: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            dying.setdefault(index, []).append(name)
    return tuple(_freed(instr, tuple(dying.get(index, ()))) for index, instr in enumerate(instrs))


def _freed(instr: Instr, frees: tuple[str, ...]) -> Instr:
    return msgspec.structs.replace(instr, frees=frees)
