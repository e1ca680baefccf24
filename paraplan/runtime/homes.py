"""Files of the tensors that live on disk from step to step: optimizer states, and parameters stored there.

A tensor is one file, mapped into memory: whoever reads it (a checkpoint, a look at a parameter) does so as any other
tensor's, through the system's page cache. Training itself copies explicitly (`copies.Copier`). The room is reserved
when a file is made, so a disk that fills later, with activations or with something else, takes no state away.

Limits: file systems that copy on write reserve nothing; a write that fails there is a failed step like any other. A
process that is killed leaves its folder behind.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.sizes import say_size
from paraplan.runtime.torch_private import storage_key, storage_of


class Homes:
    """The files of one rank, removed with it.

    Args:
        parent: in which they have a folder of their own; the system's for temporary files where left out.
        rank: for messages and names.
    """

    def __init__(self, parent: str | Path | None, rank: int) -> None:
        self.rank, self._parent = rank, parent
        self._folder: Path | None = None
        self._numbers = count()
        self._paths: dict[int, Path] = {}

    def expect(self, nbytes: int) -> None:
        """Refuse to begin what has no room.

        Raises:
            RuntimeFailure: the folder's disk has fewer bytes free.
        """
        free = shutil.disk_usage(self._made()).free if nbytes else 0
        if nbytes > free:
            raise RuntimeFailure(
                f"rank {self.rank}: {say_size(nbytes)} of optimizer states and parameters are to live on disk, and "
                f"{self._made().parent} has {say_size(free)} free: {say_size(nbytes - free)} are missing; free space, "
                "name another folder (offload_folder), or keep fewer of them on disk (offload_states)"
            )

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in a file of its own.

        Raises:
            RuntimeFailure: the disk is full.
        """
        path = self._made() / f"{next(self._numbers)}.bin"
        nbytes = max(1, math.prod(shape)) * dtype.itemsize
        try:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as fault:
            path.unlink(missing_ok=True)
            raise RuntimeFailure(
                f"rank {self.rank}: a file of {say_size(nbytes)} for optimizer states cannot be made in "
                f"{path.parent}: {fault.strerror}; free space, or name another folder (offload_folder)"
            ) from None
        mapped = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).view(tuple(shape))
        self._paths[storage_key(storage_of(mapped))] = path
        return mapped

    def path_of(self, tensor: Tensor) -> Path:
        """The file of a tensor made here."""
        return self._paths[storage_key(storage_of(tensor))]

    @property
    def files(self) -> list[Path]:
        """All of them."""
        return sorted(self._paths.values())

    def _made(self) -> Path:
        if self._folder is None:
            self._folder = own_folder(self._parent, f"paraplan-rank{self.rank}-states-", self.rank)
            weakref.finalize(self, shutil.rmtree, self._folder, True)
        return self._folder


def own_folder(parent: str | Path | None, prefix: str, rank: int) -> Path:
    """A new folder.

    Raises:
        RuntimeFailure: it cannot be made there.
    """
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError as fault:
        raise RuntimeFailure(
            f"rank {rank}: no folder for tensors on disk can be made in {parent}: {fault.strerror}; name another"
        ) from None
