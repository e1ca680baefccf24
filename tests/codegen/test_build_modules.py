"""Blocks as fx modules: arguments, frees, the boxed convention, and what verification refuses."""

from __future__ import annotations

import re
import weakref
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paraplan.codegen import EmitContext, build_block, build_modules
from paraplan.ir.errors import CodegenError
from paraplan.ir.execution.rank_program import Block, Instr, RankProgram, Step, StepKind
from tests.named import all_named, named

from .blocks import block, issue, op, wait

MUL, ADD = "aten.mul.Tensor", "aten.add.Tensor"
LOCAL = EmitContext(mesh_shape=(2,))


def chain() -> Block:
    return block(
        "x u",
        "z",
        "y i z",
        op(MUL, ("%x", 2.0), "y", "x"),
        issue("y", "i"),
        op(MUL, ("%u", 3.0), "v", "u"),
        wait("i", "y", "w", "i y"),
        op(ADD, ("%v", "%v"), "z", "v"),
        views={"w": "i", "v": "v"},
    )


def test_generated_code_frees_where_the_instructions_do() -> None:
    made = Block(
        **{f: getattr(chain(), f) for f in ("name", "role", "inputs", "outputs", "saved", "values")},
        instrs=(*chain().instrs[:3], wait("i", "y", "w", "i y w"), chain().instrs[4]),
    )
    lines = [
        line
        for line in build_block(made, LOCAL).code.splitlines()
        if "(" in line and "def " not in line and "return" not in line and "clear" not in line
    ]
    assert len(lines) == len(made.instrs)
    for line, instr in zip(lines, made.instrs, strict=True):
        freed = re.search(r";\s+(.*) = None$", line)
        assert set(freed[1].split(" = ") if freed else ()) == set(instr.frees)


class _Alive(TorchDispatchMode):
    """Whether watched storages are alive when each op starts."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.watched = [weakref.ref(t.untyped_storage()) for t in tensors]
        self.seen: list[tuple[str, list[bool]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), [ref() is not None for ref in self.watched]))
        return func(*args, **(kwargs or {}))


def test_boxed_inputs_die_at_their_last_use_inside() -> None:
    made = block("x idle u", "z", "y z", op(MUL, ("%x", 2.0), "y", "x"), op(ADD, ("%y", "%u"), "z", "y u"))
    module = build_block(made, LOCAL)
    boxed: list[Any] = [torch.ones(4, dtype=torch.float64) for _ in range(3)]
    watch = _Alive(boxed)
    with watch:
        (result,) = module(boxed)
    assert boxed == []
    assert watch.seen == [("aten.mul.Tensor", [True, False, True]), ("aten.add.Tensor", [False, False, True])]
    assert watch.watched[2]() is None
    assert result.tolist() == [3.0] * 4


def test_arguments_speak() -> None:
    made = block(
        "x",
        "a b c",
        "f a b c",
        op("aten.clamp.default", ("%x", "~-inf", 2), "a"),
        op("aten._to_copy.default", ("%x",), "f", dtype=":float32"),
        op("aten._to_copy.default", ("%f",), "b", "f", dtype=":float64"),
        op("paraplan.shard", ("%x", 0, 2, "#0:2,m:4"), "c", "x"),
    )
    module = build_block(made, LOCAL)
    places = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert [node.meta.get("offset") for node in places] == [None, "#0:2,m:4"]
    a, b, c = module([torch.arange(4.0, dtype=torch.float64), 1])
    assert (a.tolist(), b.tolist(), c.tolist()) == ([0, 1, 2, 2], [0, 1, 2, 3], [1, 2])


def test_absent_results_and_tuples() -> None:
    pick = Instr(target="aten.max.dim", args=("%x", 0), outs=(None, "at"), frees=("x",))
    made = block("x", "at", "at", pick)
    assert build_block(made, LOCAL)([torch.tensor([1.0, 5.0, 2.0])])[0].item() == 1


def test_collectives_bind_to_groups() -> None:
    made = block("x", "w", "i", issue("x", "i"), wait("i", "x", "w", "i x"), views={"w": "i"})
    bound = build_block(made, EmitContext(mesh_shape=(2,), groups=("7",)))
    targets = [
        str(getattr(node.target, "__name__", node.target)) for node in bound.graph.nodes if node.op == "call_function"
    ]
    assert targets == ["start_all_gather", "wait_holding"]
    gathered = next(node for node in bound.graph.nodes if node.op == "call_function")
    assert gathered.args[1:] == ("", 2, "7")
    alone = build_block(made, EmitContext(mesh_shape=(1,), groups=("",)))
    x = torch.arange(4.0)
    (out,) = alone([x])
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (block("x", "y", "y i", op(MUL, ("%x", 2.0), "y"), issue("x", "i", "i x")), "read by one wait alone"),
        (
            block("x", "w v", "i", issue("x", "i"), wait("i", "x", "w"),
                  wait("i", "x", "v", "i x"), views={"w": "i", "v": "i"}),
            "read by one wait alone",
        ),
        (
            block("x", "w y", "i y", issue("x", "i"), op(ADD, ("%i", "%i"), "y"),
                  wait("i", "x", "w", "i x"), views={"w": "i"}),
            "read by one wait alone",
        ),
        (block("x", "z", "y z", op(MUL, ("%x", 2.0), "y", "x"), op(ADD, ("%x", "%y"), "z", "y")), "frees x"),
        (block("x", "z", "y z", op(MUL, ("%x", 2.0), "y"), op(ADD, ("%x", "%y"), "z", "x")),
         "neither freed nor returned"),
        (block("x", "y", "y", op(MUL, ("%q", 2.0), "y", "x")), "nothing made"),
        (block("x", "y", "y", op("aten.no_such.default", ("%x",), "y", "x")), "no op is called"),
    ],
)  # fmt: skip
def test_illegal_blocks_are_refused(broken: Block, says: str) -> None:
    with pytest.raises(CodegenError, match=says):
        build_block(broken, LOCAL)


def program_of(*calls: tuple[Block, str, str]) -> RankProgram:
    """Steps that call blocks on outer names, separated by blanks."""
    blocks = [msgspec.structs.replace(each, name=f"b{index}") for index, (each, _, _) in enumerate(calls)]
    steps = tuple(
        Step(kind=StepKind.CALL, action="0F0", block=each.name, args=all_named(args), outs=all_named(outs))
        for each, (_, args, outs) in zip(blocks, calls, strict=True)
    )
    return RankProgram(
        mesh_axes=("d",),
        mesh_shape=(2,),
        num_microbatches=1,
        blocks={each.name: each for each in blocks},
        outer={},
        steps=steps,
        loss=named("loss"),
        grads={},
        optimizer_bytes=0,
        update_workspace_bytes=0,
    )


def test_a_collective_may_be_waited_for_in_a_later_block_and_must_be() -> None:
    begin = block("x", "i", "i", issue("x", "i"))
    end = block("i x", "w", "i", wait("i", "x", "w", "i x"), views={"w": "i"})
    read = block("i", "y", "y", op(MUL, ("%i", 2.0), "y", "i"))
    build_modules(program_of((begin, "x", "p"), (end, "p x", "w")))
    for calls, says in (
        (((begin, "x", "p"),), "nothing waits for"),
        (((begin, "x", "p"), (read, "p", "y"), (end, "p x", "w")), "before waiting"),
    ):
        with pytest.raises(CodegenError, match=says):
            build_modules(program_of(*calls))
