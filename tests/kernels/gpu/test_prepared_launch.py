"""Launches ask Triton once for each kind of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paraplan.ir.process.memo import release_caches
from paraplan.kernels.gpu.triton_launch import Prepared, launch


class _Compiled:
    """What Triton compiled: keeps what it is launched with."""

    def __init__(self) -> None:
        self.launched: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (2, 3, 1)
        return lambda *args: self.launched.append(args)


class _Kernel:
    """Stands in for a jitted kernel: keeps what it is asked to compile and launch."""

    def __init__(self) -> None:
        self.fn = lambda: None
        self.fn.__name__ = "kernel"
        self.asked: list[tuple[tuple[object, ...], dict[str, Any]]] = []
        self.made: list[_Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _Compiled]:
        assert grid == (2, 3)

        def run(*args: object, **options: Any) -> _Compiled:
            self.asked.append((args, options))
            self.made.append(_Compiled())
            return self.made[-1]

        return run


def test_triton_is_asked_once_for_each_kind_of_tensors() -> None:
    kernel = _Kernel()
    prepared = Prepared(kernel, (2, 3), ((4, 5), 6), 1, 8, 3)
    x, out, half = torch.zeros(64), torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    prepared(x, out)
    assert kernel.asked == [((x, out, (4, 5), 6), {"num_warps": 8, "num_stages": 3})]
    prepared(out, x)
    prepared(x, out)
    assert len(kernel.asked) == 1
    assert kernel.made[0].launched == [
        (out.data_ptr(), x.data_ptr(), (4, 5), 6),
        (x.data_ptr(), out.data_ptr(), (4, 5), 6),
    ]
    prepared(x[1:], out)
    prepared(half, out)
    assert len(kernel.asked) == 3
    prepared(half, out)
    prepared(x[1:], out)
    assert len(kernel.asked) == 3
    assert len(kernel.made[1].launched) == len(kernel.made[2].launched) == 1


def test_nothing_is_launched_over_an_empty_grid() -> None:
    kernel = _Kernel()
    Prepared(kernel, (0, 3), (), 1)(torch.zeros(4))
    assert not kernel.asked


def test_numbers_that_are_equal_are_not_of_one_kind() -> None:
    """Triton compiles for 1, 1.0 and True apart."""
    release_caches()
    kernel = _Kernel()
    x, out = torch.zeros(64), torch.zeros(64)
    for number in (1, 1.0, True, 1, 1.0, True):
        launch(kernel, (2, 3), (x, number, out), (x,), (out,))
    assert [type(args[1]) for args, _ in kernel.asked] == [int, float, bool]
    assert [each.launched for each in kernel.made] == [[(x.data_ptr(), number, out.data_ptr())] for number in (1, 1, 1)]
    release_caches()
    launch(kernel, (2, 3), (x, 1, out), (x,), (out,))
    assert len(kernel.asked) == 4
