"""Writes in place to tensors whose memory is kept outside of the graph: in arrays of numpy, and in caches that outlive
a forward.

No graph shows the first to who reads the array, and a captured step makes the second anew, as it was before the write.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable

import numpy
from torch import Tensor

from paraplan.capture.source_lines import line_of_stack
from paraplan.capture.torch_private import storage_key
from paraplan.ir.errors import CaptureError

_OWN_REFERENCES = 4
"""To an array that nobody else holds: two of this file's records, a variable, and `getrefcount`'s argument."""


class Written:
    """The writes of one forward.

    Args:
        cached: the tensors that caches outside of the model hold now, and were made in this forward.
    """

    def __init__(self, cached: Callable[[], Iterable[Tensor]]) -> None:
        self._cached = cached
        self._arrays: list[tuple[numpy.ndarray, numpy.ndarray]] = []
        self._tensors: list[tuple[numpy.ndarray, Tensor, int]] = []

    def share(self, array: object, x: Tensor | None) -> None:
        """A tensor is made of an array, in whose memory it lies.

        Args:
            array: another value is none.
            x: as traced; None where it has a copy of the memory.
        """
        if isinstance(array, numpy.ndarray):
            self._arrays.append((array, array.copy()))
            if x is not None and str(x.dtype) == f"torch.{array.dtype.name}":
                self._tensors.append((array, x, x._version))

    def check(self, written: object) -> None:
        """To be called after every function of torch.

        Args:
            written: what it wrote in place, if anything.
        Raises:
            CaptureError: it wrote memory that is kept elsewhere.
        """
        for array, x, version in self._tensors:
            if x._version != version and (sys.getrefcount(array) > _OWN_REFERENCES or array.base is not None):
                raise CaptureError(
                    f"{_line()}: forward writes a tensor in place that lies in the memory of an array of numpy "
                    "(from_numpy, as_tensor), which no graph shows: make the tensor of a copy (torch.tensor)"
                )
        if isinstance(written, Tensor):
            key = storage_key(written)
            if any(storage_key(x) == key for x in self._cached()):
                raise CaptureError(
                    f"{_line()}: forward writes a tensor in place that a cache keeps from step to step "
                    "(functools.lru_cache, a class, a global): write to a copy (x.clone()), or keep it in a buffer "
                    "(register_buffer)"
                )

    def check_arrays(self) -> None:
        """To be called at the end of a forward.

        Raises:
            CaptureError: an array was changed after a tensor was made of it.
        """
        if any(not numpy.array_equal(now, then, equal_nan=now.dtype.kind in "fc") for now, then in self._arrays):
            raise CaptureError(
                "forward changes an array of numpy after it has made a tensor of its memory (from_numpy, as_tensor), "
                "which no graph shows: make the tensor of a copy (torch.tensor)"
            )


def _line() -> str:
    return line_of_stack("".join(traceback.format_stack())) or "unknown line"
