"""What an op does to memory, found by running it: how its results lie, what they share, what it makes inside.

The meter sees what the runtime's tracker sees: results of every op that passes torch's dispatcher, those inside a
custom op's Python kernel included; what a C++ kernel makes and drops by itself is not counted, here or there.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paraplan.capture.discovery.discover_dims import ShardableDim
from paraplan.capture.discovery.discover_draws import Outputs, draw
from paraplan.capture.discovery.discover_run import MAX_ELEMENTS, Bench
from paraplan.capture.torch_private import storage_key
from paraplan.ir.model.graph import Arg
from paraplan.ir.model.op_rule import ALIAS, ELEMENTWISE, PART, ROWS, Amount, WorkTerm, fit_amount
from paraplan.ir.model.strides import elementwise_strides
from paraplan.kernels.torch_private import COMPILED, TorchDispatchMode, call_within, fake_mode, tree_leaves
from paraplan.rules.carried_rules import divide_args

MAX_DIMS = 5
Lies = tuple[tuple[str, ...], tuple[int, ...]]


def how_results_lie(bench: Bench) -> Lies | str:
    """Per output how it lies and which tensor argument it shares its storage with; or why that cannot be said."""
    given = bench.draws[-1].tensors
    outs = bench.probe.call(given, bench.sizing.args, bench.sizing.kwargs)
    storages = {x.untyped_storage().data_ptr(): value for value, x in enumerate(given) if x.numel()}
    lies, alias = [], []
    for out in outs:
        shared = storages.get(out.untyped_storage().data_ptr(), -1) if out is not None and out.numel() else -1
        alias.append(-1 if shared < 0 else bench.probe.occurrences.index(shared))
        if shared >= 0:
            lies.append(ALIAS)
            continue
        if out is not None and out.untyped_storage().nbytes() != out.numel() * out.element_size():
            lies.append(PART)
            continue
        lies.append(ROWS if out is None else _order(out))
    made = [out.untyped_storage().data_ptr() for out, a in zip(outs, alias, strict=True) if out is not None and a < 0]
    if len(set(made)) != len(made) and all(out is None or out.numel() for out in outs):
        return "two results share one storage"
    if all(lie == ROWS for lie in lies) and _is_elementwise(bench):
        return (ELEMENTWISE,) * len(lies), tuple(alias)
    return tuple(lies), tuple(alias)


def _order(out: Tensor) -> str:
    if out.is_contiguous():
        return ROWS
    return ",".join(map(str, sorted(range(out.dim()), key=lambda dim: -out.stride(dim))))


def _is_elementwise(bench: Bench) -> bool:
    """Whether, for inputs in other orders, results lie as those of torch's elementwise ops do."""
    draws = random.Random(0)
    ranks = [x.dim() for x in bench.draws[-1].tensors]
    if max(ranks, default=0) < 2:
        return False
    for _ in range(6):
        tensors = [_reordered(x, draws.sample(range(x.dim()), x.dim())) for x in bench.draws[-1].tensors]
        outs = bench.run(tensors, bench.sizing.args, bench.sizing.kwargs)
        if outs is None:
            return False
        lie = [(tuple(tensors[v].shape), tensors[v].stride()) for v in bench.probe.occurrences]
        for out in outs:
            shape = () if out is None else tuple(out.shape)
            if any(len(s) > len(shape) for s, _ in lie) or not _broadcasts(shape, [s for s, _ in lie]):
                return False
            if out is not None and out.stride() != elementwise_strides(shape, lie):
                return False
    return True


def _broadcasts(shape: tuple[int, ...], inputs: Sequence[tuple[int, ...]]) -> bool:
    return all(a in (1, b) for s in inputs for a, b in zip(s, shape[len(shape) - len(s) :], strict=True))


def _reordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """The same values with dims lying in another order, outermost first."""
    inverse = sorted(range(x.dim()), key=lambda dim: order[dim])
    return x.permute(*order).contiguous().permute(*inverse) if x.dim() else x


class _Meter(TorchDispatchMode):
    """Bytes alive after everything an op makes or drops."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.live = 0
        self.moments: list[int] = []
        self._known: dict[int, Any] = {storage_key(x): None for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call_within(self, func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._register(leaf)
        return result

    def _register(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._known:
            nbytes = storage.nbytes()
            self._known[key] = weakref.ref(storage, partial(self._died, key, nbytes))
            self.live += nbytes
            self.moments.append(self.live)

    def _died(self, key: int, nbytes: int, _: object) -> None:
        self._known.pop(key, None)
        self.live -= nbytes


def workspace(bench: Bench, dims: Sequence[tuple[str, ShardableDim]]) -> tuple[Amount, ...]:
    """Bytes made and dropped inside at every moment that may be the worst, over the dims' shares.

    Measured at the real shapes: on real tensors where they are small, else on tensors without data. Empty where
    nothing is made inside, or the kernel cannot be followed.
    """
    if bench.probe.op.target.split(".")[0] in COMPILED:
        return ()  # nothing inside is seen
    named = _halvable(bench, dims)
    runs: dict[frozenset[str], tuple[list[int], int]] = {}
    for count in range(len(named) + 1):
        for group in itertools.combinations(named, count):
            measured = _measure(bench, [dim for _, dim in group])
            if measured is None:
                return ()
            runs[frozenset(name for name, _ in group)] = measured
    lengths = {len(moments) for moments, _ in runs.values()}
    if len(lengths) != 1:
        worst = max(max(moments, default=0) - made for moments, made in runs.values())
        return ((WorkTerm(amount=float(worst)),),) if worst > 0 else ()
    found = []
    for index in range(lengths.pop()):
        values = {key: float(moments[index] - made) for key, (moments, made) in runs.items()}
        if any(value > 0 for value in values.values()):
            found.append((values, fit_amount(values)))
    return tuple(
        amount
        for position, (values, amount) in enumerate(found)
        if not any(
            all(other[key] >= value for key, value in values.items()) and (other != values or index < position)
            for index, (other, _) in enumerate(found)
            if index != position
        )
    )


def storages(bench: Bench, dims: Sequence[tuple[str, ShardableDim]], lies: Sequence[str]) -> tuple[Amount, ...]:
    """Per result, the bytes of the larger storage it is part of, over the dims' shares; empty where none is.

    Measured at the real shapes where these are small; else the storage is taken to be as many times the result there.

    Args:
        bench: the op, with its shapes and arguments.
        dims: (name, dim) of those that may be sharded.
        lies: per result, as in `OpRule.lies`.
    """
    if PART not in lies:
        return ()
    even = _halvable(bench, dims)
    small = sum(spec.numel for spec in bench.probe.specs) <= MAX_ELEMENTS
    runs: dict[frozenset[str], Outputs] = {}
    for count in range(len(even) + 1) if small else ():
        for group in itertools.combinations(even, count):
            outs = _outputs(bench, [dim for _, dim in group])
            if outs is not None:
                runs[frozenset(name for name, _ in group)] = outs
    found = []
    for index, (lie, out, spec) in enumerate(zip(lies, bench.draws[-1].whole, bench.probe.outs, strict=True)):
        if lie != PART or out is None or spec is None:
            found.append(())
        elif len(runs) == 2 ** len(even):
            found.append(fit_amount({key: _storage_bytes(outs[index]) for key, outs in runs.items()}))
        else:
            times = _storage_bytes(
                bench.probe.call(bench.draws[-1].tensors, bench.sizing.args, bench.sizing.kwargs)[index]
            )
            names = tuple(name for name, dim in dims if isinstance(dim.ways[index], int))
            found.append((WorkTerm(amount=times / max(out.nbytes, 1) * spec.nbytes, dims=names),))
    return tuple(found)


def _halvable(bench: Bench, dims: Sequence[tuple[str, ShardableDim]]) -> list[tuple[str, ShardableDim]]:
    """The first few dims of an even size in every value at the op's real shapes."""
    real = [spec.shape for spec in bench.probe.specs]
    even = [pair for pair in dims if all(real[value][position] % 2 == 0 for value, position in pair[1].members)]
    return even[:MAX_DIMS]


def _storage_bytes(x: Tensor | None) -> float:
    return 0.0 if x is None else float(x.untyped_storage().nbytes())


def _outputs(bench: Bench, halved: Sequence[ShardableDim]) -> Outputs | None:
    """What the op gives at its real shapes with some dims halved; None where it cannot be run so."""
    shapes, args, kwargs = _halved(bench, halved)
    generator = torch.Generator().manual_seed(0)
    pairs = zip(bench.probe.specs, shapes, strict=True)
    try:
        given = [draw(spec, tuple(shape), bench.style, 2, generator).to(bench.device) for spec, shape in pairs]
        return bench.probe.call(given, args, kwargs)
    except Exception:  # noqa: BLE001 - any op, any error
        return None


def _halved(bench: Bench, halved: Sequence[ShardableDim]) -> tuple[list[list[int]], tuple[Arg, ...], dict[str, Arg]]:
    """The op's real shapes and arguments with some dims halved."""
    probe = bench.probe
    shapes = [list(spec.shape) for spec in probe.specs]
    args, kwargs = probe.op.args, probe.op.kwargs
    for dim in halved:
        for value, position in dim.members:
            shapes[value][position] //= 2
        args, kwargs = divide_args(args, kwargs, dim.args, 2)
    return shapes, args, kwargs


def _measure(bench: Bench, halved: Sequence[ShardableDim]) -> tuple[list[int], int] | None:
    """Bytes alive at every moment inside, and after; None where it cannot be run so."""
    probe = bench.probe
    shapes, args, kwargs = _halved(bench, halved)
    small = sum(spec.numel for spec in probe.specs) <= MAX_ELEMENTS
    mode = nullcontext() if small else fake_mode()
    generator = torch.Generator().manual_seed(0)
    with mode, torch.no_grad():
        tensors = [
            draw(spec, tuple(shape), bench.style, 2, generator).to(bench.device)
            if small
            else torch.empty(shape, dtype=getattr(torch, spec.dtype), device=bench.device)
            for spec, shape in zip(probe.specs, shapes, strict=True)
        ]
        meter = _Meter(tensors)
        try:
            with meter:
                outs: Outputs = probe.call(tensors, args, kwargs)
        except Exception:  # noqa: BLE001 - any op, any error
            return None
        made = meter.live
        del outs
    return meter.moments, made
