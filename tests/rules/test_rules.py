"""Every rule, run whole and run sharded: each legal strategy gives the same values, strides and views.

Exhaustive on one axis (2, 3 and 4 ranks where they divide, with and without a microbatch axis); on two axes a
deterministic sample. Inputs that a strategy takes as partial sums are random addends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from paraplan.capture.reference import run_op
from paraplan.ir.machine import reshard
from paraplan.ir.machine.mesh import P, Partial, padded_dims
from paraplan.rules import known_targets, op_def
from paraplan.rules.strategies import Strategy, axis_choices, dims_of, op_strategies, strategy_named
from paraplan.rules.time_axis import extend
from paraplan.runtime.executing.tracker import Ledger, Tracker
from tests.rules.examples import Example, whole_first
from tests.rules.workspace.measuring import local

from .cases import Case, all_cases
from .cases_float8 import float8_cases
from .cases_indexing import more_cases
from .cases_loops import loop_cases
from .cases_vision import channels_last_cases, vision_cases

CASES = {**all_cases(), **more_cases(), **vision_cases(), **float8_cases(), **loop_cases()}
for images, more in channels_last_cases().items():
    CASES[images] = [*CASES[images], *more]
ALL = [
    pytest.param(target, number, id=f"{target}-{number}")
    for target, cases in CASES.items()
    for number in range(len(cases))
]
MOST = 60
BACKWARDS = {
    "paraplan.layer_norm": ("paraplan.layer_norm_grad",),
    "paraplan.rms_norm": ("paraplan.rms_norm_grad",),
    "aten._softmax.default": ("aten._softmax_backward_data.default",),
    "aten._log_softmax.default": ("aten._log_softmax_backward_data.default",),
    "aten.slice.Tensor": ("aten.slice_backward.default",),
    "aten.select.int": ("aten.select_backward.default",),
    "paraplan.attention": ("paraplan.attention_grad",),
    "paraplan.linear": ("paraplan.linear_grad_input", "paraplan.linear_grad_weight"),
    "paraplan.float8_linear": ("paraplan.float8_linear_grad_input", "paraplan.float8_linear_grad_weight"),
    "paraplan.embedding": ("paraplan.embedding_grad",),
    "paraplan.ce_loss": ("paraplan.ce_grad",),
    "paraplan.conv": ("paraplan.conv_grad_input", "paraplan.conv_grad_weight"),
    "paraplan.max_pool": ("paraplan.max_pool_grad",),
    "paraplan.group_norm": ("paraplan.group_norm_grad",),
    "paraplan.gated": ("paraplan.gated_grad",),
}
torch.set_num_threads(1)


def test_every_rule_has_a_case() -> None:
    assert set(known_targets()) == set(CASES), set(known_targets()) ^ set(CASES)


def test_differentiable_ops_have_rules_for_their_gradients() -> None:
    known = set(known_targets())
    for target, backwards in BACKWARDS.items():
        assert target in known and set(backwards) <= known, target
    for name in ("tanh", "sigmoid", "silu", "gelu", "softplus", "elu", "leaky_relu", "hardtanh", "mish"):
        assert f"aten.{name}_backward.default" in known, name


def _sample(strategies: tuple[Strategy, ...], most: int = MOST) -> list[Strategy]:
    if len(strategies) <= most:
        return list(strategies)
    return random.Random(0).sample(strategies, most)


@pytest.mark.parametrize(("target", "number"), ALL)
def test_sharded_equals_whole(target: str, number: int) -> None:
    example = Example(target, CASES[target][number])
    for mesh in ((2,), (3,), (4,), (2, 2), (3, 2)):
        strategies = example.strategies(mesh)
        assert strategies[0].key == "|".join("-" * len(mesh)), "the replicated strategy comes first"
        assert len({s.key for s in strategies}) == len(strategies)
        chosen = strategies if len(mesh) == 1 else _sample(strategies, MOST if mesh == (2, 2) else 12)
        for strategy in chosen:
            example.check(whole_first(strategy), mesh, strict=True)


@pytest.mark.parametrize(("target", "number"), ALL)
def test_no_more_is_allocated_inside_than_the_rule_says(target: str, number: int) -> None:
    """To the byte, however small the inputs: what a kernel makes and drops is its rule's `workspace`."""
    case, definition = CASES[target][number], op_def(target)
    example = Example(target, case)
    env, tracker, ledger = {name: value.clone() for name, value in case.inputs.items()}, Tracker(), Ledger()
    for value in env.values():
        ledger.register(value)
    given_bytes = ledger.live_bytes
    with tracker, tracker.booking(ledger):
        run_op(example.op, env)
    made = [None if out is None else local(env[out]) for out in example.outs]
    said = 0
    if definition is not None and definition.workspace is not None:
        said = definition.workspace([local(env[name]) for name in example.op.tensors], made, case.args)
    inside = ledger.peak_bytes - max(ledger.live_bytes, given_bytes)
    assert inside <= said, f"{target} makes {inside} bytes inside, and its rule's workspace says {said}"


@pytest.mark.parametrize(("target", "number"), ALL)
def test_microbatches_are_an_axis(target: str, number: int) -> None:
    """What an op does along the microbatch axis combines with what it does on the mesh, divisibility included."""
    example = Example(target, CASES[target][number])
    for micro in axis_choices(dims_of(example.op, example.graph.values))[1:]:
        specs = [example.graph.values[name] for name in example.op.tensors]
        if not all(_divides(spec.shape, place, 2) for spec, place in zip(specs, micro.inputs, strict=True)):
            continue
        places = zip(specs, micro.inputs, strict=True)
        if any(spec.dtype == "bool" and isinstance(place, Partial) for spec, place in places):
            continue  # bools are never partial
        if micro.dim and dims_of(example.op, example.graph.values).sizes[micro.dim] % 2:
            continue
        for strategy in _sample(op_strategies(example.op, example.graph.values, (2,), micro, 2), 20):
            example.check(extend(strategy, micro), (2,), 2, strict=True)


def _divides(shape: tuple[int, ...], place: object, n: int) -> bool:
    dim = getattr(place, "dim", None)
    return dim is None or shape[dim] % n == 0


@pytest.mark.parametrize(("target", "number"), ALL)
def test_strides_in_other_memory_orders(target: str, number: int) -> None:
    """Inputs whose dims lie in other orders (dense): strides and views are still those foretold."""
    case = CASES[target][number]
    example = Example(target, case)
    ranks = {name: value.dim() for name, value in case.inputs.items()}
    draws = random.Random(number)
    strategies = [s for s in example.strategies((2,)) if not _moves(s)]
    trials = []
    if len(ranks) == 1 and max(ranks.values()) <= 3:
        trials = [{name: order} for name, rank in ranks.items() for order in itertools.permutations(range(rank))]
    else:
        trials = [{name: _order(draws, case, name, rank) for name, rank in ranks.items()} for _ in range(6)]
    if set(ranks.values()) == {4}:
        trials.append(dict.fromkeys(ranks, (0, 2, 3, 1)))  # channels last
    for orders in trials:
        for strategy in strategies:
            example.check(whole_first(strategy), (2,), orders=orders)


@pytest.fixture
def any_padding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dims of any size are sharded over any number of ranks, some of which hold nothing but padding."""
    monkeypatch.setattr("paraplan.ir.machine.mesh.PADDED_SHARE", 0)
    reshard._padded_axes.cache_clear()
    yield
    reshard._padded_axes.cache_clear()


@pytest.mark.parametrize(("target", "number"), ALL)
def test_uneven_shards_equal_whole(target: str, number: int, any_padding: None) -> None:
    """Padding (NaN, integers out of range) changes nothing, whatever an op does with the dim it is in."""
    example = Example(target, CASES[target][number])
    dims, shapes = dims_of(example.op, example.graph.values), {n: s.shape for n, s in example.graph.values.items()}
    for mesh in ((2,), (3,), (4,), (5,), (2, 3)):
        padded = [s for s in example.strategies(mesh) if _padding(example, s, shapes, mesh)]
        sharded = {part.split(">")[0] for s in padded for part in s.key.split("|")}
        if len(mesh) == 1:
            assert {a for a in dims.uneven if 1 < dims.sizes[a] and dims.sizes[a] % mesh[0]} <= sharded
        for strategy in _sample(tuple(padded), 40 if len(mesh) == 1 else 12):
            example.check(whole_first(strategy), mesh)


def _padding(example: Example, strategy: Strategy, shapes: dict[str, tuple[int, ...]], mesh: tuple[int, ...]) -> bool:
    names = (*example.op.tensors, *example.op.outs)
    layouts = (*strategy.inputs, *strategy.outputs)
    return any(n and lay and padded_dims(shapes[n], lay, mesh) for n, lay in zip(names, layouts, strict=True))


def test_which_ops_take_padding() -> None:
    """Those whose padded dims are free, or contracted where zero is neutral; never a softmax, a maximum or a scan."""
    taken = {}
    for target, cases in CASES.items():
        example = Example(target, cases[0])
        dims = dims_of(example.op, example.graph.values)
        taken[target] = "-" if not dims.uneven else "all" if dims.uneven >= set(dims.sizes) else "some"
    for target in (
        "aten.mm.default",
        "paraplan.linear_grad_weight",
        "paraplan.embedding",
        "aten.add.Tensor",
        "paraplan.ce_max",
        "paraplan.ce_grad",
        "paraplan.layer_norm",
    ):
        assert taken[target] == "all", target
    for target in ("paraplan.attention_grad", "aten.amax.default"):
        assert taken[target] == "some", target
    for target in ("paraplan.experts", "paraplan.conv", "paraplan.group_norm", "paraplan.index", "aten.gather.default",
                   "paraplan.scan"):  # fmt: skip
        assert taken[target] == "-", target


def _order(draws: random.Random, case: Case, name: str, rank: int) -> tuple[int, ...]:
    if name in case.fixed:
        return tuple(range(rank))
    if name in case.rows:
        return (*draws.sample(range(rank - 1), rank - 1), rank - 1)
    return tuple(draws.sample(range(rank), rank))


def _moves(strategy: Strategy) -> bool:
    return strategy.computed != strategy.outputs


def test_partial_maxima_are_reduced_at_once() -> None:
    for target in ("aten.amax.default", "paraplan.ce_max", "paraplan.float8_scale"):
        example = Example(target, CASES[target][0])
        for strategy in example.strategies((2, 2)):
            for computed, out in zip(strategy.computed, strategy.outputs, strict=True):
                assert computed is not None and out is not None
                assert all(not isinstance(p, Partial) or p == P for p in out)


@pytest.mark.parametrize(
    ("target", "key"),
    [
        (
            "aten.mm.default",
            ["-", "m", "k", "k>R", "k>S0", "k>S1", "n", "+0", "+0>R", "+0>S0", "+0>S1", "+1", "+1>R", "+1>S0", "+1>S1"],
        ),
        ("aten.relu.default", ["-", "a", "b"]),
        ("aten.add.Tensor", ["-", "a", "b", "+0.1", "+0.1>R", "+0.1>S0", "+0.1>S1"]),
        ("paraplan.scan", ["-", "l0", "l1"]),
        ("paraplan.ce_loss", ["-", "a", "a>R", "b", "b>R"]),
        ("aten._softmax.default", ["-", "a", "c"]),
        (
            "paraplan.embedding",
            ["-", "v", "v>R", "v>S0", "v>S1", "v>S2", "h", "a", "b", "+0", "+0>R", "+0>S0", "+0>S1", "+0>S2"],
        ),
    ],
)
def test_the_strategies_of_well_known_ops(target: str, key: list[str]) -> None:
    assert [s.key for s in Example(target, CASES[target][0]).strategies((2,))] == key


def test_a_strategy_is_found_by_its_key_alone() -> None:
    example = Example("paraplan.linear", CASES["paraplan.linear"][0])
    listed = example.strategies((2, 2))
    for strategy in listed:
        assert strategy_named(example.op, example.graph.values, (2, 2), strategy.key) == strategy
    for key in ("nonsense|-", "-", "-|->R", f"{listed[0].key}|-"):
        assert strategy_named(example.op, example.graph.values, (2, 2), key) is None
