"""The file of the tensors that live on disk from step to step: optimizer states, and parameters stored there.

A rank has one file, of a size known before it starts. It is mapped into memory, and every tensor is a part of it:
whoever reads one (a checkpoint, a look at a parameter) does so as any other tensor's, through the system's page cache.
Training itself reads and writes explicitly (`copies.Copier`). The room is reserved when the file is made, so a disk
that fills later, with activations or with something else, takes no state away; and the file has lost its name by then,
so that it goes with its process, however that ends.

Limits: file systems that copy on write reserve nothing. A write that fails there fails the step: parameters are then as
before it or as after it, each with its states, but for one whose own states were being written, which has old ones.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.sizes import say_size

_ALIGN = 4096
"""Bytes at whose multiples tensors begin."""


@dataclass(frozen=True)
class Region:
    """A tensor's part of a file, to be read and written at once."""

    file: int
    start: int
    nbytes: int

    def read(self, into: memoryview) -> None:
        """All of it.

        Raises:
            OSError: it cannot be read.
        """
        done = 0
        while done < len(into):
            got = os.preadv(self.file, [into[done:]], self.start + done)
            if not got:
                raise OSError(f"{done} bytes of {len(into)} are there")
            done += got

    def write(self, content: memoryview) -> None:
        """All of it.

        Raises:
            OSError: it cannot be written.
        """
        done = 0
        while done < len(content):
            done += os.pwrite(self.file, content[done:], self.start + done)


@dataclass
class _File:
    """A file without a name, and how much of it is taken."""

    file: int
    mapped: Tensor
    taken: int = 0


class Homes:
    """What one rank has on disk.

    Args:
        parent: the folder; the system's for temporary files where left out.
        rank: for messages and names.
    """

    def __init__(self, parent: str | Path | None, rank: int) -> None:
        self.rank, self._parent = rank, parent
        self._files: list[_File] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for tensors of these bytes.

        Raises:
            RuntimeFailure: the disk has not as much; says what is missing.
        """
        nbytes = sum(map(_aligned, sizes))
        if not nbytes:
            return
        folder = Path(tempfile.gettempdir() if self._parent is None else self._parent)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if nbytes > free:
                raise RuntimeFailure(self._no_room(nbytes, folder, f"{say_size(nbytes - free)} are missing"))
            file, name = tempfile.mkstemp(prefix=f"paraplan-rank{self.rank}-", dir=folder)
        except OSError as fault:
            raise RuntimeFailure(
                f"rank {self.rank}: no file for optimizer states can be made in {folder}: {fault.strerror}; name "
                "another folder (offload_folder)"
            ) from None
        weakref.finalize(self, os.close, file)
        try:
            os.posix_fallocate(file, 0, nbytes)
            mapped = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as fault:
            raise RuntimeFailure(self._no_room(nbytes, folder, str(fault))) from None
        finally:
            os.unlink(name)
        self._files.append(_File(file, mapped))

    def _no_room(self, nbytes: int, folder: Path, why: str) -> str:
        free = say_size(shutil.disk_usage(folder).free)
        return (
            f"rank {self.rank}: {say_size(nbytes)} of optimizer states and parameters are to live on disk, and "
            f"{folder} has {free} free: {why}; free space, name another folder (offload_folder), or plan with fewer of "
            "them there (place_states, place_params, place_grads)"
        )

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, in the room that was reserved last."""
        file, nbytes = self._files[-1], math.prod(shape) * dtype.itemsize
        start, file.taken = file.taken, file.taken + _aligned(nbytes)
        return file.mapped[start : start + nbytes].view(dtype).view(tuple(shape))

    def region_of(self, x: Tensor) -> Region:
        """Where a tensor made here lies."""
        nbytes = x.numel() * x.element_size()
        for file in self._files:
            start = x.data_ptr() - file.mapped.data_ptr()
            if 0 <= start and start + nbytes <= len(file.mapped):
                return Region(file.file, start, nbytes)
        raise RuntimeFailure(f"rank {self.rank}: a tensor of {nbytes} bytes that is to be on disk is not")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
