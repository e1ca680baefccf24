"""All ranks in one process: values of every collective, the account of memory, and how failures speak."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paraplan.codegen import build_modules
from paraplan.cost_models.simulator.live_bytes import MemoryWalk, entries
from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.execution.rank_program import Block, BlockRole, RankProgram, Step, StepKind
from paraplan.ir.struct import Value
from paraplan.runtime.executing.executor import Executor
from paraplan.runtime.executing.observers import Observer
from paraplan.runtime.executing.stepping import make_executors, step_together
from tests.named import all_named, named

from .programs import collectives_program, issue, op, own, pair, view, wait


def values_of(rank: int) -> dict[str, torch.Tensor]:
    found = {}
    for m in range(2):
        found[named(f"x@{m}")] = torch.arange(12, dtype=torch.float64).reshape(4, 3).flip(0) * (1 - 2 * rank) + 100 * m
        found[named(f"idle@{m}")] = torch.zeros(5, dtype=torch.float64)
    return found


def run(program: RankProgram) -> list[Executor]:
    modules = build_modules(program)
    transport, executors = make_executors(pair(), [program], (0, 0), [modules])
    for executor in executors:
        executor.bind(values_of(executor.rank))
        for tensor in executor.outer.values():
            executor.account.ledger.register(tensor)
        del tensor
        executor.account.ledger.reset_peak()
    step_together(transport, executors, [program.steps] * 2)
    return executors


def replace(value: Value, **fields: object) -> Value:
    return type(value)(**{name: fields.get(name, getattr(value, name)) for name in value.__struct_fields__})


def test_collectives_equal_numpy() -> None:
    executors = run(collectives_program())
    x = [[values_of(rank)[named(f"x@{m}")].numpy() for rank in range(2)] for m in range(2)]
    total = sum(x[0]) + sum(x[1])
    for rank, executor in enumerate(executors):
        assert np.array_equal(executor.outer[named("total")], total)
        for m in range(2):
            both = sum(x[m])
            assert np.array_equal(executor.outer[named(f"z@{m}")], 2 * both[2 * rank : 2 * rank + 2])
            blocks = np.concatenate([2 * x[m][peer][2 * rank : 2 * rank + 2] for peer in range(2)])
            assert np.array_equal(executor.outer[named(f"t@{m}")], blocks)
            assert np.array_equal(executor.outer[named(f"n@{m}")], executors[rank - 1].outer[named(f"t@{m}")])


def test_gathered_rows_and_maximum() -> None:
    program = collectives_program()
    kept = tuple(step for step in program.steps if step.kind is not StepKind.DROP)
    executors = run(replace(program, steps=kept))
    x = [[values_of(rank)[named(f"x@{m}")].numpy() for rank in range(2)] for m in range(2)]
    for executor in executors:
        for m in range(2):
            assert np.array_equal(executor.outer[named(f"g@{m}")], np.concatenate(x[m]))
            assert np.array_equal(executor.outer[named(f"at@{m}")], np.maximum(*x[m]).argmax(1))


def test_entries_and_peak_are_exact() -> None:
    program = collectives_program()
    first, second = run(program)
    assert [entry.key for entry in first.account.entries] == [entry.key for entry in second.account.entries]
    keys = [
        (e.target, e.shapes, e.allocated_bytes, e.freed_bytes, e.collective)
        for e in first.account.entries
        if e.microbatch == 0
    ]
    assert keys == [
        ("drop", (), 0, 40, ""),  # idle: given up and never read
        ("all_reduce", ((4, 3),), 96, 0, "all_reduce@0"),
        ("all_reduce", ((4, 3),), 96, 0, "all_reduce@0"),
        ("all_gather", ((8, 3),), 192, 0, "all_gather@0"),
        ("reduce_scatter", ((2, 3),), 48, 0, "reduce_scatter@0"),
        ("aten.mul.Tensor", ((4, 3),), 96, 0, ""),
        ("all_to_all", ((4, 3),), 96, 0, "all_to_all@0"),
        ("wait", ((4, 3),), 0, 0, ""),
        ("wait", ((4, 3),), 0, 0, ""),
        ("aten.max.dim", ((4,),), 32, 96, ""),
        ("wait", ((8, 3),), 0, 0, ""),
        ("wait", ((2, 3),), 0, 96, ""),
        ("wait", ((4, 3),), 0, 96, ""),
        ("permute", ((4, 3),), 96, 0, "permute@0"),
        ("wait", ((4, 3),), 0, 0, ""),
        ("paraplan.shard", ((2, 3),), 48, 0, ""),
        ("aten.add.Tensor", ((2, 3),), 48, 96, ""),
        ("accumulate", ((4, 3),), 0, 0, ""),
        ("drop", (), 0, 224, ""),
    ]
    assert [entry.key for entry in first.account.entries] == [entry.key for entry in entries(program)]
    walk = MemoryWalk(program)
    predicted = max(walk.advance(step).peak for step in program.steps)
    assert first.account.ledger.peak_bytes == predicted == second.account.ledger.peak_bytes
    assert first.account.ledger.live_bytes == sum(t.untyped_storage().nbytes() for t in first.outer.values())


def test_the_second_accumulation_frees_its_addend() -> None:
    first, _ = run(collectives_program())
    freed = [entry.freed_bytes for entry in first.account.entries if entry.target == "accumulate"]
    assert freed == [0, 96]


def _one_block(*instrs: object, names: str, inputs: str = "x", outputs: str = "") -> RankProgram:
    program = collectives_program()
    values = {
        name: view(name[:-1], (4, 3)) if name.endswith("'") else own(name, (4, 3))
        for name in (*inputs.split(), *names.split())
    }
    block = Block(
        name="k0.0.F",
        role=BlockRole.FORWARD,
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        saved=(),
        values=values,
        instrs=instrs,
    )
    step = Step(
        kind=StepKind.CALL,
        action="0F0",
        block="k0.0.F",
        args=all_named("x@0"),
        outs=(None,) * len(block.outputs),
        microbatch=0,
        segment=4,
    )
    return replace(program, blocks={"k0.0.F": block}, steps=(step,))


def test_a_failing_op_is_named() -> None:
    bad = _one_block(
        op("aten.mul.Tensor", ("%x", 2.0), ("y",)),
        op("aten.mm.default", ("%x", "%y"), ("z",), frees="y z"),
        names="y z",
    )
    with pytest.raises(
        RuntimeFailure, match=r"rank 0, action 0F0, segment 4, k0.0.F\[1\] aten.mm.default: RuntimeError: mat1 and mat2"
    ):
        run(bad)
    fast = Executor(bad, build_modules(bad), (0,), None, rank=3)  # type: ignore[arg-type]
    fast.bind(values_of(0))
    with pytest.raises(RuntimeFailure, match=r"rank 3, action 0F0, segment 4, k0.0.F\[1\] aten.mm.default"):
        fast.run(bad.steps)


def test_peers_that_disagree_are_told_so() -> None:
    a = _one_block(issue("all_reduce", "x", "i", reduction="sum"), wait("i", "i'", frees="i i'"), names="i i'")
    b = _one_block(issue("all_reduce", "x", "i", reduction="max"), wait("i", "i'", frees="i i'"), names="i i'")
    with pytest.raises(RuntimeFailure, match=r"rank 1 issues .*'max'.* its peer 0 issued .*'sum'"):
        _run_two(a, b)


@pytest.mark.parametrize("noting", (True, False))
def test_ranks_that_wait_forever_are_told_so(noting: bool) -> None:
    a = _one_block(issue("all_reduce", "x", "i", reduction="sum"), wait("i", "i'", frees="i i'"), names="i i'")
    b = _one_block(op("aten.mul.Tensor", ("%x", 2.0), ("y",), frees="y"), names="y")
    with pytest.raises(RuntimeFailure, match="wait for each other: rank 0 after"):
        _run_two(a, b, noting)


def _run_two(a: RankProgram, b: RankProgram, noting: bool = True) -> None:
    transport, executors = make_executors(pair(), [a, b], (0, 1), [build_modules(a), build_modules(b)])
    for executor in executors:
        executor.bind(values_of(executor.rank))
    step_together(transport, executors, [a.steps, b.steps], None if noting else Observer())


def test_shapes_are_checked_when_bound() -> None:
    program = collectives_program()
    executor = Executor(program, build_modules(program), (0,), None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeFailure, match=r"x@0 is float64\(3, 4\), the program expects float64\(4, 3\)"):
        executor.bind({named("x@0"): torch.zeros(3, 4, dtype=torch.float64)})
