"""Rules and costs users register: the line is read strictly, fitted to the op, and can be held against a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import paraplan as pp
from paraplan.capture.apply_registered import apply_annotation, work_terms
from paraplan.ir.errors import ConstraintError
from paraplan.ir.model.graph import Op
from paraplan.ir.model.op_rule import WorkTerm, amount_of, fit_amount
from paraplan.ir.model.tensor import TensorSpec
from paraplan.rules import registered_rules
from paraplan.rules.registered_rules import cost_for, forget, parse, rule_for

NAME = "paraplan_rules_test::mlp"
TARGET = "paraplan_rules_test.mlp.default"


@torch.library.custom_op(NAME, mutates_args=())
def mlp(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, width: int) -> Tensor:
    hidden = F.gelu(x @ w1)
    if hidden.shape[-1] != width:
        raise ValueError(f"{hidden.shape[-1]} columns, not {width}")
    return hidden @ w2 if bias is None else hidden @ w2 + bias


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget(TARGET)


def example(bias: bool = True) -> tuple[object, ...]:
    torch.manual_seed(0)
    return (torch.randn(4, 3, 8), torch.randn(8, 12), torch.randn(12, 6), torch.randn(6) if bias else None, 12)


RIGHT = {"contracted": {"f": "sum"}, "addends": (3,), "size_args": {"f": "width"}, "linear": ((2, 3),)}


@pytest.mark.parametrize("bias", [True, False])
def test_a_right_rule_passes_its_check(bias: bool) -> None:
    rule = "b s _, _ f, f n, n -> b s n"
    pp.register_rule(NAME, rule, check=example(bias), **RIGHT)
    found = rule_for(TARGET)
    assert found is not None and found.text == rule


@pytest.mark.parametrize(
    ("rule", "settings", "said"),
    [
        ("b s h, h f, f n, n -> b s n", {**RIGHT, "contracted": {"f": "sum", "h": "sum"}}, "sharding h"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "addends": ()}, "sharding f"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "size_args": {}}, "sharding f"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "contracted": {"f": "max"}}, "sharding f"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "linear": (0,)}, "not linear in tensors 0"),
        ("b s _, _ f, f n, n -> s b n", RIGHT, "s is 3 in one place and 4 in result 0"),
        ("b s, _ f, f n, n -> b s n", RIGHT, "has 3 dims"),
        ("b s _, _ f, f n -> b s n", {**RIGHT, "addends": (), "linear": ()}, "names 3 tensors, the op takes 4"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "size_args": {"f": "depth"}}, "'depth'"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_check(rule: str, settings: dict, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        pp.register_rule(NAME, rule, check=example(), **settings)
    assert rule_for(TARGET) is None


@pytest.mark.parametrize(
    ("rule", "settings", "said"),
    [
        ("a b", {}, "inputs -> outputs"),
        ("a b ->", {}, "inputs -> outputs"),
        ("a b, -> a b", {}, "a term is empty"),
        ("a b -> a c", {}, "'c' stands in no input"),
        ("a b -> a", {}, "'b' is missing in an output"),
        ("a a -> a", {}, "stands twice"),
        ("a b| -> a", {}, "'b|' is no name"),
        ("a ... -> a", {}, "must lead"),
        ("a b -> a", {"contracted": {"b": "mean"}}, "contracted by 'mean'"),
        ("a b -> a b", {"contracted": {"k": "sum"}}, "names 'k'"),
        ("a b -> a b", {"linear": (1,)}, "no input 1"),
        ("a b -> a b", {"addends": (-1,)}, "no input -1"),
    ],
)
def test_a_malformed_rule_is_refused(rule: str, settings: dict, said: str) -> None:
    with pytest.raises(ConstraintError) as fault:
        pp.register_rule(NAME, rule, **settings)
    assert said in str(fault.value) and NAME in str(fault.value)


def test_a_name_that_names_no_op_is_refused() -> None:
    with pytest.raises(ConstraintError, match="namespace::name"):
        pp.register_rule("mlp", "a -> a")
    with pytest.raises(ConstraintError, match="has a rule of its own"):
        pp.register_rule("aten::mm", "m _, _ n -> m n")
    with pytest.raises(ConstraintError, match="is registered with torch; import the module"):
        pp.register_rule("paraplan_rules_test::absent", "a -> a", check=(torch.ones(2),))


def op_and_values(lead: tuple[int, ...]) -> tuple[Op, dict[str, TensorSpec]]:
    op = Op(target=TARGET, args=("%x", "%w1", "%w2", None, 12), outs=("y",))
    shapes = {"x": (*lead, 8), "w1": (8, 12), "w2": (12, 6), "y": (*lead, 6)}
    return op, {name: TensorSpec("float32", shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("op", "rule", "said"),
    [
        (NAME, "b s _, _ _ -> b s _", "names 2 tensors, the op takes 4"),
        (NAME, "b s _, _ _, _ _, _, _ -> b s _", "names 5 tensors, the op takes 4"),
        (NAME, "b s _, _ _, _ _, _ -> b s _, b s _", "names 2 results, the op gives 1"),
        (f"{NAME}_of_nobody", "b s -> b s", "no op .* is registered with torch"),
    ],
)
def test_a_rule_that_does_not_fit_the_schema_is_refused_at_once(op: str, rule: str, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        pp.register_rule(op, rule, whole=[])
    assert rule_for(registered_rules.target_of(op)) is None


@pytest.mark.parametrize(
    ("rule", "settings", "said"),
    [
        ("b s h, h f, f n, n -> b s n", {**RIGHT, "contracted": {"f": "sum", "h": "sum"}}, "results added up are not"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "contracted": {"f": "max"}}, "results joined by maximum are not"),
        ("b s _, _ f, f n, n -> b s n", {**RIGHT, "linear": (0,)}, "not linear in input 0"),
    ],
)
def test_a_wrong_rule_is_refused_at_capture_without_examples(rule: str, settings: dict, said: str) -> None:
    pp.register_rule(NAME, rule, **settings)
    found = rule_for(registered_rules.target_of(NAME))
    assert found is not None and not found.checked
    op, values = op_and_values((4, 6))
    try:
        with pytest.raises(ConstraintError, match=said + r".*check=\.\.\."):
            apply_annotation(found, op, values, "here")
        apply_annotation(replace(found, checked=True), op, values, "here")  # examples have the last word
    finally:
        forget(found.target)


def test_leading_dims_of_any_number() -> None:
    annotation = parse(NAME, "... _, _ f, f n, n -> ... n", {"f": "sum"}, ((0,), (2, 3)), (3,), (), {"f": "width"})
    annotation = replace(annotation, checked=True)  # it is not linear in the first, which running it would show
    for lead in ((4,), (4, 2), (4, 2, 6)):
        op, values = op_and_values(lead)
        rule = apply_annotation(annotation, op, values, "here")
        dims = tuple(f"lead{index}" for index in range(len(lead)))
        assert rule.inputs == ((*dims, "_"), ("_", "f"), ("f", "n")) and rule.outputs == ((*dims, "n"),)
        assert rule.linear == ((0,), (2,)) and rule.addends == ()  # the absent bias leaves its sets
        assert rule.size_args == {"f": ((4,),)}


def test_costs_become_numbers_over_shares() -> None:
    op, values = op_and_values((4, 2))
    pp.register_rule(NAME, "b s _, _ f, f n, n -> b s n", **RIGHT)
    annotation = rule_for(TARGET)
    assert annotation is not None
    rule = apply_annotation(annotation, op, values, "here")

    def flops(x: tuple[float, ...], w1: tuple[float, ...], w2: tuple[float, ...]) -> float:
        return 2 * x[0] * x[1] * w1[1] * (x[2] + w2[1])

    def moved(x: tuple[float, ...], w1: tuple[float, ...], w2: tuple[float, ...]) -> float:
        return 4 * (x[0] * x[1] * (x[2] + w2[1]) + w1[0] * w1[1] + w2[0] * w2[1])

    pp.register_cost(NAME, flops=flops, bytes=moved)
    terms = work_terms(op, rule)
    for b, f, n in ((1, 1, 1), (4, 1, 1), (2, 3, 2), (1, 4, 3)):
        local = ((4 / b, 2, 8), (8, 12 / f), (12 / f, 6 / n))
        shares = {"b": 1 / b, "f": 1 / f, "n": 1 / n}
        assert amount_of(terms["flops"], shares) == pytest.approx(flops(*local))
        assert amount_of(terms["traffic_bytes"], shares) == pytest.approx(moved(*local))
    for wrong, said in ((lambda *shapes: shapes[9], "failed"), (lambda *shapes: -1, "gave -1")):
        pp.register_cost(NAME, flops=wrong)
        with pytest.raises(ConstraintError, match=said):
            work_terms(op, rule)
    with pytest.raises(ConstraintError, match="give flops="):
        pp.register_cost(NAME)
    assert cost_for(TARGET) is not None and registered_rules.target_of("a::b.out") == "a.b.out"


def test_amounts_are_fitted_exactly() -> None:
    values = {frozenset(): 15.0, frozenset("a"): 11.0, frozenset("b"): 13.5, frozenset("ab"): 10.25}
    assert fit_amount(values) == (
        WorkTerm(amount=7.0),
        WorkTerm(amount=5.0, dims=("a",)),
        WorkTerm(amount=3.0, dims=("a", "b")),
    )
