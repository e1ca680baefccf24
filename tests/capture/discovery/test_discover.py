"""Rules found by running ops, held against the written ones and against sharded runs; what must be refused is."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
import torch._dynamo  # what a dispatch mode loads on first use: once here, not in every process
from torch import Tensor

from paraplan.capture.discovery.discover import discover, discovered, ended
from paraplan.capture.discovery.discover_apart import run_apart
from paraplan.capture.discovery.discover_cache import cache_path
from paraplan.capture.discovery.discover_draws import Draw, told_by_nothing
from paraplan.ir.model.graph import Graph, Op
from paraplan.ir.model.op_rule import ALIAS, UNKNOWN, OpRule
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules.dims import OpDims
from paraplan.rules.strategies import dims_of
from tests.rules.cases import all_cases, pointwise_cases
from tests.rules.examples import Example, whole_first

torch.set_num_threads(1)
SPACE = "paraplan_discover_test"
CASES = all_cases()
FAMILIES = {
    "pointwise": ("aten.add.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.exp.default", "aten.where.self"),
    "matmul": ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "paraplan.linear"),
    "softmax": ("aten._softmax.default", "aten._softmax_backward_data.default"),
    "layer_norm": ("paraplan.layer_norm", "paraplan.layer_norm_grad"),
    "cumsum": ("aten.cumsum.default",),
    "sum": ("aten.sum.dim_IntList", "aten.sum.default"),
    "amax": ("aten.amax.default",),
}


@cache
def examples(target: str) -> tuple[tuple[Example, OpRule], ...]:
    """A target's cases with what running them shows; two of the family's pointwise ops, one of the others and of
    attention (slow to search)."""
    few = "attention" in target or (target in pointwise_cases() and target not in FAMILIES["pointwise"])
    most = 1 if few else 2 if target in FAMILIES["pointwise"] else len(CASES[target])
    cases = CASES[target][:most]
    made = [Example(target, case) for case in cases]
    rules = run_apart([(each.op, each.graph.values) for each in made], discover, ended)
    return tuple(zip(made, rules, strict=True))


@pytest.mark.parametrize("target", CASES)
def test_every_dim_found_is_legal(target: str) -> None:
    """The op with the rule found instead of the written one, sharded over 2 and 4, gives the whole op's results."""
    for example, rule in examples(target):
        ruled = msgspec.structs.replace(example.op, rule=rule)
        found = object.__new__(Example)
        found.__dict__.update(example.__dict__)
        found.op, found.graph = ruled, msgspec.structs.replace(example.graph, ops=(ruled,))
        for mesh in ((2,), (4,)):
            for strategy in found.strategies(mesh):
                # how a shared result lies is not foretold, it is copied at once
                found.check(whole_first(strategy), mesh, strict=ALIAS not in rule.lies)


def ways(dims: OpDims | OpRule, shapes: tuple[tuple[int, ...], ...]) -> set[tuple[object, ...]]:
    """Dims without their names: where each stands, and how it is reduced in the outputs without it."""
    found = set()
    for dim, size in dims.sizes.items():
        inside = tuple(names.index(dim) if dim in names else None for names in dims.inputs)
        outside = tuple(
            None if names is None else names.index(dim) if dim in names else dims.contracted[dim]
            for names in dims.outputs
        )
        if size > 1 and not any(at is not None and shape[at] == 1 for at, shape in zip(inside, shapes, strict=True)):
            found.add((inside, outside, size))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_it_finds_what_the_written_rules_say(family: str) -> None:
    for target in FAMILIES[family]:
        for example, rule in examples(target):
            written = dims_of(example.op, example.graph.values)
            assert ways(written, rule.shapes) <= ways(rule, rule.shapes), f"{target}: {rule.text()}"
            if all(spec.is_float for spec in example.graph.values.values()):
                assert set(written.linear) <= set(rule.linear), f"{target}: {rule.text()}"
            assert written.addends == rule.addends


def op_rule(target: str, *shapes: tuple[int, ...], rest: tuple[object, ...] = (), out: tuple[int, ...]) -> OpRule:
    """What is found of an op on float32 inputs of these shapes."""
    values = {f"v{index}": TensorSpec("float32", shape) for index, shape in enumerate(shapes)}
    op = Op(target=target, args=(*(f"%{name}" for name in values), *rest), outs=("out",))
    return run_apart([(op, {**values, "out": TensorSpec("float32", out)})], discover, ended)[0]


def test_large_shapes_are_tried_small() -> None:
    rule = op_rule("aten.mm.default", (1 << 20, 4096), (4096, 14336), out=(1 << 20, 14336))
    assert rule.text() == "a b, b c -> a c (b summed; linear in 0; linear in 1)"
    assert rule.sizes == {"a": 1 << 20, "b": 4096, "c": 14336}


def test_size_arguments_are_found_though_numbers_coincide() -> None:
    """`dim` and a size are both 2 here; only the sizes follow."""
    rule = op_rule("aten.native_group_norm.default", (2, 8, 4), rest=(None, None, 2, 8, 4, 2, 1e-5), out=(2, 8, 4))
    assert rule.inputs[0][0] != "_" and rule.size_args[rule.inputs[0][0]] == ((3,),)
    assert rule.sizes[rule.inputs[0][0]] == 2
    if rule.inputs[0][1] != "_":  # channels may be cut by whole groups, of which there are 2
        assert rule.sizes[rule.inputs[0][1]] == 2


@torch.library.custom_op(f"{SPACE}::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op(f"{SPACE}::deadly", mutates_args=())
def deadly(x: Tensor) -> Tensor:
    ctypes.string_at(0)
    return x.clone()


@torch.library.custom_op(f"{SPACE}::delicate", mutates_args=())
def delicate(x: Tensor) -> Tensor:
    """Ends the process on shapes that no model has; its result lies transposed."""
    if x.shape != (6, 7):
        ctypes.string_at(0)
    return (x * 2).t().contiguous().t()


@torch.library.custom_op(f"{SPACE}::writes", mutates_args=("x",))
def writes(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


@torch.library.custom_op(f"{SPACE}::lies", mutates_args=())
def lies(x: Tensor) -> Tensor:
    """Says that it writes nothing."""
    return x.mul_(2).clone()


@torch.library.custom_op(f"{SPACE}::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if x.shape != (6, 7):
        raise ValueError("only 6 by 7")
    return x.exp()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("noisy", "other results when run again"),
        ("deadly", "ended its process (SIGSEGV)"),
        ("writes", "writes its inputs"),
        ("lies", "writes its inputs"),
        ("picky", "found no dim"),
        ("absent", "no such op"),
    ],
)
def test_what_cannot_be_known_is_replicated_with_its_reason(name: str, why: str) -> None:
    rule = op_rule(f"{SPACE}.{name}.default", (6, 7), out=(6, 7))
    assert rule.source == UNKNOWN and rule.is_whole and why in rule.reason


def test_how_results_lie_is_known_of_an_op_whose_search_ended_its_process() -> None:
    rule = op_rule(f"{SPACE}.delicate.default", (6, 7), out=(6, 7))
    assert rule.source == UNKNOWN and rule.is_whole and "SIGSEGV" in rule.reason and rule.lies == ("1,0",)
    assert op_rule(f"{SPACE}.deadly.default", (6, 7), out=(6, 7)).lies == ("rows",)


def graph_of(target: str, size: int) -> Graph:
    values = {"x": TensorSpec("float32", (size, 4)), "y": TensorSpec("float32", (size, 4))}
    return Graph(inputs=("x",), outputs=("y",), values=values, ops=(Op(target=target, args=("%x",), outs=("y",)),))


def test_rules_are_kept_and_never_trusted_blindly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = discovered([graph_of("aten.lgamma.default", 8), graph_of(f"{SPACE}.noisy.default", 8)])
    text = cache_path().read_text()
    assert cache_path().is_relative_to(tmp_path) and SPACE not in text
    monkeypatch.setattr("paraplan.capture.discovery.discover.run_apart", lambda jobs, *rest: [None for _ in jobs])
    assert discovered([graph_of("aten.lgamma.default", 8)]) == {key: first[key] for key in first if SPACE not in key}
    assert list(discovered([graph_of("aten.lgamma.default", 12)]).values()) == [None], "other shapes are found anew"
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wrong = (
        ("{", "is not used"),
        (text.replace('"version":6', '"version":1'), "is version 1"),
        (text.replace('"sizes":{"a":8', '"sizes":{"a":5'), "do not divide"),
        (text.replace('"source"', '"code":"import os","source"'), "unknown field"),
    )
    for broken, said in wrong:
        cache_path().write_text(broken)
        with pytest.warns(UserWarning) as told:
            again = discovered([graph_of("aten.lgamma.default", 8)])
        assert any(said in str(each.message) for each in told), [str(each.message) for each in told]
        assert again == {key: first[key] for key in again} and len(again) == 1


@torch.library.custom_op(f"{SPACE}::seldom", mutates_args=())
def seldom(x: Tensor) -> Tensor:
    """Zero on everything that random numbers give: the running sum of what is above a thousand."""
    return torch.where(x > 1000, x, torch.zeros_like(x)).cumsum(0)


@torch.library.custom_op(f"{SPACE}::capped", mutates_args=())
def capped(x: Tensor) -> Tensor:
    """Elementwise until an element is large; then rows see each other."""
    return x * 2 if float(x.abs().max()) < 12 else x.flip(0) * 2


@torch.library.custom_op(f"{SPACE}::shifted", mutates_args=())
def shifted(x: Tensor, by: Tensor) -> Tensor:
    """Reads its integers where they are above a hundred alone."""
    return x + by.gt(100).cumsum(0).to(x.dtype)


@torch.library.custom_op(f"{SPACE}::like", mutates_args=())
def like(grad: Tensor, x: Tensor) -> Tensor:
    """Reads the shape of x and nothing else."""
    return grad.sin().expand_as(x).contiguous()


@pytest.mark.parametrize(
    ("name", "why"), [("seldom", "the same on all values tried"), ("capped", "what running it showed is not so")]
)
def test_what_random_numbers_do_not_show_is_not_believed(name: str, why: str) -> None:
    rule = op_rule(f"{SPACE}.{name}.default", (6, 7), out=(6, 7))
    assert rule.is_whole and rule.source == UNKNOWN and why in rule.reason, rule.text()


def test_an_op_with_an_input_that_changes_nothing_is_replicated_unless_nothing_reads_it() -> None:
    values = {
        "x": TensorSpec("float32", (8, 6)),
        "by": TensorSpec("int64", (8, 6)),
        "out": TensorSpec("float32", (8, 6)),
    }
    op = Op(target=f"{SPACE}.shifted.default", args=("%x", "%by"), outs=("out",))
    (rule,) = run_apart([(op, values)], discover, ended)
    assert rule.is_whole and "input 1 changes no result" in rule.reason
    rule = op_rule(f"{SPACE}.like.default", (8, 6), (8, 6), out=(8, 6))
    assert rule.text() == "a b, a b -> a b"


def test_a_result_nobody_reads_is_no_evidence_and_needs_none() -> None:
    """The second result says whether there is an inverse: it need not be seen to change."""
    values = {
        "x": TensorSpec("float64", (8, 4, 4)),
        "y": TensorSpec("float64", (8, 4, 4)),
        "code": TensorSpec("int32", (8,)),
    }
    op = Op(target="aten.linalg_inv_ex.default", args=("%x",), outs=("y", "code"))
    unread = discover(op, values, frozenset({1}))
    assert unread.inputs == (("a", "_", "_"),) and unread.outputs == (("a", "_", "_"), ("a",))
    assert told_by_nothing([Draw((), (torch.ones(2), torch.zeros(2)))] * 2, frozenset({0})).startswith("result 1")


def test_the_gradient_of_a_segment_reduction_is_not_sharded_over_lengths() -> None:
    shapes = ((4, 8), (4, 8), (16, 8))
    values = {f"v{index}": TensorSpec("float64", shape) for index, shape in enumerate(shapes)}
    values |= {"n": TensorSpec("int64", (4,)), "out": TensorSpec("float64", (16, 8))}
    for how in ("sum", "mean", "max"):
        op = Op(
            target="aten._segment_reduce_backward.default",
            args=("%v0", "%v1", "%v2", ":" + how),
            kwargs={"lengths": "%n", "axis": 0},
            outs=("out",),
        )
        (rule,) = run_apart([(op, values)], discover, ended)
        assert rule.inputs[3] == ("_",) and not rule.linear


def test_a_result_within_a_larger_storage_is_copied_and_counted() -> None:
    rule = op_rule("aten.col2im.default", (4, 18, 64), rest=((8, 8), (3, 3), (1, 1), (1, 1), (1, 1)), out=(4, 2, 8, 8))
    assert rule.lies == ("part",) and rule.sizes["a"] == 4
    assert [(term.amount, term.dims) for term in rule.storages[0]] == [(4 * 18 * 64 * 4, ("a", "b"))]


def test_shards_that_are_the_whole_each_show_no_maximum() -> None:
    values = {
        "w": TensorSpec("float64", (4, 4)),
        "ids": TensorSpec("int64", (2, 2)),
        "out": TensorSpec("float64", (4, 4)),
    }
    op = Op(target="aten.embedding_renorm.default", args=("%w", "%ids", 1.0, 2.0), outs=("out",))
    assert discover(op, values).is_whole


@pytest.mark.parametrize(
    ("name", "before", "after"), [("shuffle", (8, 4, 4, 4), (8, 1, 8, 8)), ("unshuffle", (8, 1, 8, 8), (8, 4, 4, 4))]
)
def test_a_block_that_is_all_of_a_dim_somewhere_hides_no_other_dim(
    name: str, before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    values = {"x": TensorSpec("float64", before), "y": TensorSpec("float64", after)}
    rule = discover(Op(target=f"aten.pixel_{name}.default", args=("%x", 2), outs=("y",)), values)
    assert rule.inputs == (("a", "_", "b", "c"),) == rule.outputs and rule.linear == ((0,),)
