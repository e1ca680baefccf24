"""Running one op of a program on small random tensors, whole and in shards.

A `Probe` is an op with its values numbered; a `Sizing` gives every value a small shape and the arguments that go with
it; a `Bench` holds what the whole op gives on a few draws, so that shards can be held against it.

Safety: nothing is run that writes its inputs or draws random numbers; a first draw keeps integers below 2, valid as
indices into any shard, and only what passes it meets integers up to the smallest dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from paraplan.capture.discovery.discover_draws import STYLES, Draw, Outputs, draw, idle_values, same, told_by_nothing
from paraplan.capture.reference import run_op
from paraplan.ir.model.graph import Arg, Op, map_refs
from paraplan.ir.model.op_rule import ArgPath
from paraplan.ir.model.tensor import TensorSpec

MAX_ELEMENTS = 1_000_000
SMALL_ELEMENTS = 60_000
BUDGET = 20_000  # runs, a run counting one more for every 1000 elements: seconds
OTHER_UNIT = 2
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Probe:
    """An op ready to be run on tensors of any shape.

    Attributes:
        op: its distinct values are called "0", "1", ...; results "o0", "o1", ..., None where nobody reads them.
        specs: of the values, global.
        occurrences: per tensor argument, the value it is.
        outs: specs of the results, None where absent.
        unread: results that nobody reads: what is in them is nothing, how they are shaped is.
    """

    op: Op
    specs: tuple[TensorSpec, ...]
    occurrences: tuple[int, ...]
    outs: tuple[TensorSpec | None, ...]
    unread: frozenset[int] = frozenset()

    def run(self, tensors: Sequence[Tensor], args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> Outputs:
        """The op's results, zeros for those nobody reads, None for absent ones; what the op raises passes through.

        Args:
            tensors: by number.
            args, kwargs: of the op; "%0" is the first tensor.
        """
        outs = self.call(tensors, args, kwargs)
        return tuple(
            torch.zeros_like(out) if out is not None and index in self.unread else out for index, out in enumerate(outs)
        )

    def call(self, tensors: Sequence[Tensor], args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> Outputs:
        """The op's results as they are.

        Args:
            tensors, args, kwargs: as of `run`.
        """
        env = {str(index): tensor for index, tensor in enumerate(tensors)}
        names = tuple(None if spec is None else f"o{index}" for index, spec in enumerate(self.outs))
        run_op(Op(target=self.op.target, args=args, kwargs=kwargs, outs=names), env)
        return tuple(None if name is None else env[name] for name in names)


def probe_of(op: Op, values: dict[str, TensorSpec], unread: frozenset[int] = frozenset()) -> Probe:
    """An op of a graph as a probe.

    Args:
        op: of a graph.
        values: specs of the graph's values.
        unread: results that nobody reads, by number.
    """
    numbers = {name: index for index, name in enumerate(dict.fromkeys(op.tensors))}

    def rename(name: str) -> str:
        return str(numbers[name])

    plain = Op(
        target=op.target,
        args=tuple(map_refs(arg, rename) for arg in op.args),
        kwargs={key: map_refs(arg, rename) for key, arg in op.kwargs.items()},
        outs=(),
    )
    outs = tuple(None if name is None else values[name] for name in op.outs)
    return Probe(
        plain, tuple(values[name] for name in numbers), tuple(numbers[name] for name in op.tensors), outs, unread
    )


@dataclass(frozen=True)
class Sizing:
    """Shapes of a probe's values, and its arguments for these."""

    shapes: Shapes
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]


def int_args(args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> dict[ArgPath, int]:
    """Every integer argument above 1 by where it stands."""
    found: dict[ArgPath, int] = {}

    def walk(arg: Arg, path: ArgPath) -> None:
        if isinstance(arg, tuple):
            for index, item in enumerate(arg):
                walk(item, (*path, index))
        elif isinstance(arg, int) and not isinstance(arg, bool) and arg > 1:
            found[path] = arg

    for index, arg in enumerate(args):
        walk(arg, (index,))
    for key, arg in kwargs.items():
        walk(arg, (key,))
    return found


def _replaced(arg: Arg, path: ArgPath, value: int) -> Arg:
    if not path:
        return value
    index = int(path[0])
    return (*arg[:index], _replaced(arg[index], path[1:], value), *arg[index + 1 :])


def with_ints(args: tuple[Arg, ...], kwargs: dict[str, Arg], new: dict[ArgPath, int]) -> tuple[tuple[Arg, ...], dict]:
    """Arguments with integers replaced.

    Args:
        args, kwargs: of an op.
        new: integers by the path to their argument.
    """
    for (first, *rest), value in new.items():
        if isinstance(first, int):
            args = (*args[:first], _replaced(args[first], tuple(rest), value), *args[first + 1 :])
        else:
            kwargs = {**kwargs, first: _replaced(kwargs[first], tuple(rest), value)}
    return args, kwargs


def sizings(probe: Probe, unit: int = 4) -> Iterator[Sizing]:
    """Small versions of the real shapes to try, then the real shapes where they are small.

    Equal sizes stay equal and different ones different: multiples stay multiples in the first attempt, then every size
    becomes `unit` times a prime of its own, then products of two others stay products. Integer arguments equal to a
    size follow it or not.
    """
    real = tuple(spec.shape for spec in probe.specs)
    sizes = sorted({size for shape in real for size in shape if size > 1})
    numbers = int_args(probe.op.args, probe.op.kwargs)
    seen = set()
    if len(sizes) <= len(PRIMES):
        for small in _small_sizes(sizes, unit):
            shapes = tuple(tuple(small.get(size, size) for size in shape) for shape in real)
            if max(math.prod(shape) for shape in shapes) > SMALL_ELEMENTS:
                continue
            for new in _followers(numbers, small):
                args, kwargs = with_ints(probe.op.args, probe.op.kwargs, new)
                if (key := repr((shapes, args, kwargs))) not in seen:
                    seen.add(key)
                    yield Sizing(shapes, args, kwargs)
    if sum(math.prod(shape) for shape in real) <= MAX_ELEMENTS:
        yield Sizing(real, probe.op.args, probe.op.kwargs)


def _small_sizes(sizes: list[int], unit: int) -> Iterator[dict[int, int]]:
    for keep in (0, 4):
        for relation in ("multiples", "none", "products"):
            small: dict[int, int] = {}
            primes = iter(PRIMES)
            for size in sizes:
                related = _related(size, small, relation)
                small[size] = size if size <= keep else unit * next(primes) if related is None else related
            if len(set(small.values())) == len(small):
                yield small


def _related(size: int, small: dict[int, int], relation: str) -> int | None:
    """The small size that keeps what relates a size to smaller ones; None where nothing does."""
    if relation == "products":
        pair = next(((a, size // a) for a in small if size % a == 0 and size // a in small), None)
        return small[pair[0]] * small[pair[1]] if pair else None
    below = [other for other in small if size % other == 0]
    if relation == "none" or not below:
        return None
    ratio = size // max(below)
    return small[max(below)] * (ratio if ratio <= 4 else 2)


def _followers(numbers: dict[ArgPath, int], small: dict[int, int]) -> Iterator[dict[ArgPath, int]]:
    """Which integer arguments follow the sizes they are equal to: all, none, all but one, one alone."""
    equal = {path: small[value] for path, value in numbers.items() if value in small}
    yield equal
    if equal:
        yield {}
    if len(equal) > 1:
        for path in equal:
            yield {other: value for other, value in equal.items() if other != path}
            yield {path: equal[path]}


@dataclass(frozen=True)
class Bench:
    """A probe at one sizing with its draws: the first with integers below 2, the others with all that are valid."""

    probe: Probe
    sizing: Sizing
    draws: tuple[Draw, ...]
    style: str = "normal"
    device: str = "cpu"
    seeds: Iterator[int] = field(default_factory=lambda: iter(range(1000, 1 << 30)), compare=False)
    spent: list[int] = field(default_factory=lambda: [0], compare=False)

    @property
    def is_spent(self) -> bool:
        """Whether the op was run so often that the search for more dims stops."""
        return self.spent[0] > BUDGET

    def run(self, tensors: Sequence[Tensor], args: tuple[Arg, ...], kwargs: dict[str, Arg]) -> Outputs | None:
        """The op's results; None where it refuses.

        Args:
            tensors, args, kwargs: as of `Probe.run`.
        """
        self.spent[0] += 1 + sum(tensor.numel() for tensor in tensors) // 1000
        try:
            return self.probe.run(tensors, args, kwargs)
        except Exception:  # noqa: BLE001 - whatever an op raises means that it cannot be run so
            return None

    def fresh_draw(self, high: int) -> tuple[Tensor, ...]:
        """New values."""
        generator = torch.Generator().manual_seed(next(self.seeds))
        return tuple(
            draw(spec, shape, self.style, high, generator).to(self.device)
            for spec, shape in zip(self.probe.specs, self.sizing.shapes, strict=True)
        )


class NoBench(Exception):
    """The op cannot be run as discovery needs; the message says why."""


def make_bench(probe: Probe) -> Bench:
    """Small shapes and draws the op takes.

    Raises:
        NoBench: none were found; says what the op answered last.
    """
    reasons: list[str] = []
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    for sizing in sizings(probe):
        for device in devices:
            for style in STYLES:
                try:
                    return _with_draws(Bench(probe, sizing, (), style, device))
                except NoBench as why:
                    reasons.append(str(why))
                except Exception as fault:  # noqa: BLE001 - any op, any error
                    reasons.append(f"running it failed: {type(fault).__name__}: {_first_line(fault)}")
    raise NoBench((reasons or ["its real shapes are too large to try and no small version of them is valid"])[0])


def as_it_runs(probe: Probe) -> Bench | None:
    """The op on the first values it takes, at its real shapes if they are small, whatever it makes of them: of use for
    how results lie in memory alone."""
    real = tuple(spec.shape for spec in probe.specs)
    for sizing in sorted(sizings(probe), key=lambda each: each.shapes != real):
        for style in STYLES:
            bench = Bench(probe, sizing, (), style)
            smallest = min((size for shape in sizing.shapes for size in shape if size > 1), default=2)
            for high in (2, smallest):
                tensors = bench.fresh_draw(high)
                whole = bench.run(tensors, sizing.args, sizing.kwargs)
                if whole is not None and all(
                    out is None or spec is None or len(spec.shape) == out.dim()
                    for out, spec in zip(whole, probe.outs, strict=True)
                ):
                    return replace(bench, draws=(Draw(tensors, whole),))
    return None


def _first_line(fault: Exception) -> str:
    return (str(fault).strip().splitlines() or [""])[0][:120]


def _with_draws(bench: Bench) -> Bench:
    """The bench with its draws.

    Raises:
        NoBench: what the op gives on them is no evidence; says why.
    """
    probe, sizing = bench.probe, bench.sizing
    smallest = min((size for shape in sizing.shapes for size in shape if size > 1), default=2)
    draws = []
    for high in (2, smallest, smallest):
        tensors = bench.fresh_draw(max(high, 1))
        kept = [tensor.clone() for tensor in tensors]
        whole = probe.run(tensors, sizing.args, sizing.kwargs)
        again = probe.run(tensors, sizing.args, sizing.kwargs)
        if not all(same(a, b) for a, b in zip(tensors, kept, strict=True)):
            raise NoBench("it writes its inputs")
        for spec, first, second in zip(probe.outs, whole, again, strict=True):
            if spec is None or first is None or second is None:
                continue
            if first.dim() != len(spec.shape) or str(first.dtype) != f"torch.{spec.dtype}":
                raise ValueError(f"small shapes give {first.dtype} {tuple(first.shape)} for {spec}")
            if not same(first, second):
                raise NoBench("it gives other results when run again on equal inputs")
            odd = float(torch.isinf(first).double().mean()) if first.numel() else 0.0
            if bench.style == "special" and spec.is_float:
                raise NoBench("its results are finite on no finite values tried")
            if bool(torch.isnan(first).any()) or odd > 0.5:
                raise NoBench("its results are not finite on any values tried")
        draws.append(Draw(tensors, whole))
    trivial = told_by_nothing(draws, probe.unread)
    if trivial:
        raise NoBench(trivial)
    fresh = (bench.fresh_draw(max(smallest, 1)) for _ in range(2))
    idle = idle_values(draws, fresh, lambda tensors: bench.run(tensors, sizing.args, sizing.kwargs), probe.unread)
    if idle:
        raise NoBench(f"input {min(idle)} changes no result on the values tried, and may be read all the same")
    return replace(bench, draws=tuple(draws))


def real_bench(bench: Bench) -> Bench:
    """The same op at its real shapes.

    Raises:
        NoBench: it refuses them.
    """
    probe = bench.probe
    sizing = Sizing(tuple(spec.shape for spec in probe.specs), probe.op.args, probe.op.kwargs)
    reason = "no values were tried"
    for style in dict.fromkeys((bench.style, *STYLES)):
        try:
            return _with_draws(replace(bench, sizing=sizing, draws=(), style=style))
        except NoBench as why:
            reason = str(why)
        except Exception as fault:  # noqa: BLE001 - any op, any error
            reason = f"running it at its real shapes failed: {type(fault).__name__}: {_first_line(fault)}"
            break
    raise NoBench(reason)


def other_benches(bench: Bench) -> Iterator[tuple[Bench, str]]:
    """The same op on values and sizes that a bench has not: with what is other about them."""
    wider = next((sizing for sizing in sizings(bench.probe, OTHER_UNIT) if _is_alike(sizing, bench.sizing)), None)
    others = [style for style in STYLES if style != bench.style]
    for sizing, styles in ((bench.sizing, [bench.style]), (wider, [bench.style, *others]), (bench.sizing, others)):
        for style in styles if sizing is not None else ():
            try:
                found = _with_draws(replace(bench, sizing=sizing, draws=(), style=style))
            except Exception:  # noqa: BLE001 - what the op does not take tells nothing
                continue
            words = "others" if sizing is bench.sizing else f"inputs of shapes {list(map(list, sizing.shapes))}"
            yield found, f"{words} (floats: {style})"
            break


def _is_alike(sizing: Sizing, other: Sizing) -> bool:
    """Whether arguments follow the sizes in both or in neither, and sizes are others."""
    return sizing.shapes != other.shapes and _follows(sizing) == _follows(other)


def _follows(sizing: Sizing) -> dict[ArgPath, bool]:
    sizes = {size for shape in sizing.shapes for size in shape}
    return {path: value in sizes for path, value in int_args(sizing.args, sizing.kwargs).items()}
