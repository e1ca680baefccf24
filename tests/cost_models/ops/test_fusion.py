"""What is fused, by hand: chains, reductions along rows, what stays apart, and what a step then takes."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import msgspec
import pytest

from paraplan.cost_models.ops.fusion import Fused, fused_kernels
from paraplan.cost_models.simulator.block_replay import compile_time
from paraplan.ir.execution.rank_program import Block, BlockRole, Instr, InstrKind, LocalValue
from paraplan.ir.model.graph import Arg
from tests.cost_models.rank_programs import toy_costs

WIDE, ROWS = (8, 16), (8, 1)


def value(name: str, shape: tuple[int, ...], base: str = "") -> LocalValue:
    strides = (shape[1], 1) if len(shape) == 2 else (1,)
    return LocalValue(
        dtype="float32", shape=shape, strides=strides, base=base or name, storage_bytes=0 if base else 4 * prod(shape)
    )


def made(
    name: str,
    inputs: dict[str, tuple[int, ...]],
    outputs: str,
    *ops: tuple[str, str, str, tuple[int, ...]],
    role: BlockRole = BlockRole.FORWARD,
) -> Block:
    """A block of ops (target, inputs, output, shape); a reduction is along the last dim."""
    values = {each: value(each, shape) for each, shape in inputs.items()}
    instrs = []
    for target, given, out, shape in ops:
        names: tuple[Arg, ...] = tuple("%" + each for each in given.split())
        values[out] = value(out, shape, given if target == "aten.view.default" else "")
        if target in ("all_reduce", "wait"):
            kind = InstrKind.COLLECTIVE if target == "all_reduce" else InstrKind.WAIT
            values[out] = value(out, shape, given if target == "wait" else "")
            more: tuple[Arg, ...] = ("sum",) if target == "all_reduce" else ()
            instrs.append(Instr(kind=kind, target=target, args=(*names, *more), outs=(out,), axis=0))
            continue
        args = (*names, (-1,), True) if target.startswith("aten.sum") else names
        instrs.append(Instr(target=target, args=args, outs=(out,)))
    return Block(
        name=name,
        role=role,
        inputs=tuple(inputs),
        outputs=tuple(outputs.split()),
        saved=(),
        values=values,
        instrs=tuple(instrs),
    )


MUL, ADD, SUM, VIEW = "aten.mul.Tensor", "aten.add.Tensor", "aten.sum.dim_IntList", "aten.view.default"


def test_a_chain_reads_and_writes_its_ends() -> None:
    block = made(
        "k.0.F",
        {"x": WIDE, "y": WIDE},
        "c",
        (MUL, "x y", "a", WIDE),
        (VIEW, "a", "v", (16, 8)),
        ("aten.silu.default", "v", "b", (16, 8)),
        (ADD, "b x", "c", WIDE),
    )
    assert fused_kernels(block) == (Fused((0, 2, 3), 2 * 512, 512),)


def test_what_others_read_is_written() -> None:
    block = made("k.0.F", {"x": WIDE}, "a b", (MUL, "x x", "a", WIDE), (ADD, "a x", "b", WIDE))
    assert fused_kernels(block) == (Fused((0, 1), 512, 2 * 512),)


def test_a_norm_is_one_kernel() -> None:
    """x * rsqrt(mean(x²)): the ops over rows go with the reduction that leaves rows."""
    block = made(
        "k.0.F",
        {"x": WIDE, "w": (16,)},
        "d",
        (MUL, "x x", "a", WIDE),
        (SUM, "a", "s", ROWS),
        ("aten.rsqrt.default", "s", "r", ROWS),
        (MUL, "x r", "c", WIDE),
        (MUL, "c w", "d", WIDE),
    )
    assert fused_kernels(block) == (Fused((0, 1, 2, 3, 4), 512 + 64, 512),)


def test_nothing_waits_for_itself() -> None:
    """What a product lies between is not one kernel, though both sides read the same."""
    block = made(
        "k.0.F",
        {"x": WIDE, "w": (16, 16)},
        "d",
        (MUL, "x x", "a", WIDE),
        ("aten.mm.default", "a w", "p", WIDE),
        (ADD, "p a", "c", WIDE),
        (ADD, "c x", "d", WIDE),
    )
    assert fused_kernels(block) == (Fused((2, 3), 3 * 512, 512),)


def test_nothing_is_fused_across_a_collective() -> None:
    block = made(
        "k.0.F",
        {"x": WIDE},
        "c w",
        (MUL, "x x", "a", WIDE),
        ("all_reduce", "a", "i", WIDE),
        (ADD, "a x", "c", WIDE),
        ("wait", "i", "w", WIDE),
    )
    assert fused_kernels(block) == ()


def test_reductions_over_other_dims_are_apart() -> None:
    block = made("k.0.B", {"x": WIDE}, "s t", (MUL, "x x", "a", WIDE), (SUM, "a", "s", ROWS))
    columns = msgspec.structs.replace(block.instrs[1], args=("%a", (0,), True), outs=("t",))
    values = {**block.values, "t": value("t", (1, 16))}
    block = msgspec.structs.replace(block, values=values, instrs=(*block.instrs, columns))
    assert fused_kernels(block) == (Fused((0, 1), 512, 512 + 32),)


@pytest.mark.parametrize(
    ("role", "fused"), [(BlockRole.FORWARD, True), (BlockRole.BACKWARD_WEIGHTS, False), (BlockRole.REDUCE, False)]
)
def test_only_compiled_blocks_are_priced_as_fused(role: BlockRole, fused: bool) -> None:
    block = made("b", {"x": WIDE, "y": WIDE}, "c", (MUL, "x y", "a", WIDE), (ADD, "a x", "c", WIDE), role=role)
    apart, costs = compile_time(block, toy_costs()).work["compute"], toy_costs()
    assert apart == 6 * 512
    whole = compile_time(block, replace(costs, compiled=True)).work["compute"]
    assert whole == (3 * 512 if fused else apart)
