"""A prepared launch asks Triton once for each dtype and alignment of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paraplan.kernels.gpu.triton_launch import Prepared


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
    launch = Prepared(kernel, (2, 3), ((4, 5), 6), 1, 8, 3)
    x, out, half = torch.zeros(64), torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    launch(x, out)
    assert kernel.asked == [((x, out, (4, 5), 6), {"num_warps": 8, "num_stages": 3})]
    launch(out, x)
    launch(x, out)
    assert len(kernel.asked) == 1
    assert kernel.made[0].launched == [
        (out.data_ptr(), x.data_ptr(), (4, 5), 6),
        (x.data_ptr(), out.data_ptr(), (4, 5), 6),
    ]
    launch(x[1:], out)
    launch(half, out)
    assert len(kernel.asked) == 3
    launch(half, out)
    launch(x[1:], out)
    assert len(kernel.asked) == 3
    assert len(kernel.made[1].launched) == len(kernel.made[2].launched) == 1


def test_nothing_is_launched_over_an_empty_grid() -> None:
    kernel = _Kernel()
    Prepared(kernel, (0, 3), (), 1)(torch.zeros(4))
    assert not kernel.asked
