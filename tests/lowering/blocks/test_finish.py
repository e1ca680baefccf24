"""Where the parts of a gradient's reduction over two axes come among what a block computes."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from paraplan.ir.execution.rank_program import BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.model.graph import refs
from paraplan.lowering.blocks.finish import finish_block

PRODUCT, SUM = "paraplan.linear_grad_weight", "aten.add.Tensor"
LAYS_OUT = "paraplan.stack"


class Written:
    """Instructions as lowering writes them, of values of a kilobyte."""

    def __init__(self) -> None:
        self.instrs: list[Instr] = []
        self._numbers = count()

    def op(self, target: str, *sources: str, layout_change: bool = False) -> str:
        out = f"{target.rpartition('.')[2]}_{next(self._numbers)}"
        args = tuple("%" + each for each in sources)
        self.instrs.append(Instr(target=target, args=args, outs=(out,), layout_change=layout_change))
        return out

    def moved(self, source: str, axis: int) -> str:
        """A collective and its wait, which is named by the source and the axis."""
        issued, out = f"{source}!{axis}", f"{source}~{axis}"
        told = {"axis": axis, "layout_change": True}
        self.instrs += [
            Instr(
                kind=InstrKind.COLLECTIVE, target="reduce_scatter", args=("%" + source, ":sum"), outs=(issued,), **told
            ),
            Instr(kind=InstrKind.WAIT, target="wait", args=("%" + issued, "%" + source), outs=(out,), **told),
        ]
        return out

    def ordered(self, *outputs: str) -> list[str]:
        """What each instruction makes, in the block's order, which reads nothing before it is made."""
        names = {"x", *(out for instr in self.instrs for out in instr.outs if out)}
        values = {
            each: LocalValue(dtype="float32", shape=(256,), strides=(1,), base=each, storage_bytes=1024)
            for each in names
        }
        block = finish_block("b", ("x",), outputs, (), values, self.instrs, BlockRole.BACKWARD)
        made = {"x"}
        for instr in block.instrs:
            assert made.issuperset(refs(instr.args)) and made.isdisjoint(instr.outs), instr
            made.update(out for out in instr.outs if out)
        return [str(instr.outs[0]) for instr in block.instrs]


@pytest.mark.parametrize("lays_out", [True, False])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_second_collective_follows_the_next_product(lays_out: bool, is_late: bool) -> None:
    """Whether it was written right behind the first, or at the block's end."""
    written = Written()
    grad = written.op(PRODUCT, "x")
    first = written.moved(grad, 1)
    between = "" if is_late else first
    if not is_late:
        between = written.op(LAYS_OUT, first, layout_change=True) if lays_out else first
        second = written.moved(between, 0)
    small = written.op(SUM, "x")
    other = written.op(PRODUCT, "x")
    last = written.op(SUM, other)
    if is_late:
        between = written.op(LAYS_OUT, first, layout_change=True) if lays_out else first
        second = written.moved(between, 0)
    order = written.ordered(second, small, last)
    issued = f"{between}!0"
    assert order.index(f"{grad}!1") == order.index(grad) + 1
    assert order.index(small) < order.index(other) < order.index(first) < order.index(issued) < order.index(last)
    assert order[-1] == second, "waited for when nothing else is left"


def test_without_another_product_all_first_collectives_are_waited_for_before_a_second_is() -> None:
    written = Written()
    grads = [written.op(PRODUCT, "x"), written.op(PRODUCT, "x")]
    seconds = [written.moved(written.op(LAYS_OUT, written.moved(grad, 1), layout_change=True), 0) for grad in grads]
    order = written.ordered(*seconds)
    assert order.index(f"{grads[0]}!1") < order.index(grads[1]) < order.index(f"{grads[0]}~1")
    assert [each for each in order if each in seconds] == order[-2:]


def test_what_is_laid_out_for_a_reduction_is_laid_out_as_it_is_made() -> None:
    """What an op reads afterwards is left where it was written: it would be held for longer."""
    written = Written()
    grad, value = written.op(PRODUCT, "x"), written.op(SUM, "x")
    work = written.op(PRODUCT, "x")
    gathered = written.moved(written.op(LAYS_OUT, value, layout_change=True), 0)
    read = written.op(SUM, gathered, work)
    laid = written.op(LAYS_OUT, grad, layout_change=True)
    reduced = written.moved(laid, 0)
    order = written.ordered(reduced, read)
    assert order.index(laid) == order.index(grad) + 1 and order.index(f"{laid}!0") == order.index(laid) + 1
    assert order.index(work) < order.index(f"{gathered.removesuffix('~0')}")


def test_what_an_op_reads_of_a_move_over_two_axes_comes_where_it_is_read() -> None:
    written = Written()
    value = written.op(SUM, "x")
    moved = written.moved(written.op(LAYS_OUT, written.moved(value, 1), layout_change=True), 0)
    read = written.op(PRODUCT, moved)
    later = written.op(PRODUCT, read)
    order = written.ordered(later)
    assert order[-2:] == [read, later]


def test_a_move_over_three_axes_goes_on_product_by_product() -> None:
    written = Written()
    grad = written.op(PRODUCT, "x")
    reduced = written.moved(written.moved(written.moved(grad, 2), 1), 0)
    products = [written.op(PRODUCT, "x") for _ in range(2)]
    order = written.ordered(reduced, *products)
    waits = [order.index(f"{grad}~2"), order.index(f"{grad}~2~1"), order.index(reduced)]
    assert order.index(products[0]) < waits[0] < order.index(products[1]) < waits[1] < waits[2]


@pytest.mark.parametrize("seed", range(600))
def test_whatever_is_moved_is_made_once_and_after_what_it_reads(seed: int) -> None:
    """Moves over up to three axes, laid out between or not, joined, read, given out half-way or not at all; ops that
    change no layout keep their order."""
    drawn, written = Random(seed), Written()
    values, moved = ["x"], list[str]()
    for _ in range(drawn.randint(3, 14)):
        what = drawn.random()
        if what < 0.4:
            values.append(written.op(drawn.choice([PRODUCT, SUM]), *drawn.sample(values, min(2, len(values)))))
        elif what < 0.8:
            last = drawn.choice(values)
            for axis in drawn.sample(range(3), drawn.randint(1, 3)):
                last = written.op(LAYS_OUT, last, layout_change=True) if drawn.random() < 0.5 else last
                if f"{last}~{axis}" not in {out for instr in written.instrs for out in instr.outs}:
                    last = written.moved(last, axis)
                moved += [last] if drawn.random() < 0.3 else []
            moved.append(last)
        elif moved:
            joined = written.op(LAYS_OUT, *drawn.sample(moved, min(2, len(moved))), layout_change=True)
            (values if drawn.random() < 0.5 else moved).append(joined)
    given = [each for each in dict.fromkeys((*values, *moved)) if each != "x"]
    outputs = drawn.sample(given, drawn.randint(0, len(given)))
    order = written.ordered(*outputs)
    ops = [str(i.outs[0]) for i in written.instrs if i.kind is InstrKind.OP and not i.layout_change]
    assert [each for each in order if each in ops] == ops and set(outputs) <= set(order)
