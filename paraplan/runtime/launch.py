"""Starting ranks: from torchrun's environment, or several on this machine.

`python -m paraplan.runtime.launch MODULE ARGS...` runs a module with its errors recorded for torchrun; `spawn_local`
starts ranks that way, so that a rank that dies ends the job within seconds and its traceback is printed: torchrun's for
an exception, Python's fault handler's, of whichever rank, where a signal killed it.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from paraplan.ir.errors import RuntimeFailure
from paraplan.runtime.torch_private import default_store

FAULTS = "PARAPLAN_FAULTS"
"""Environment variable: the folder where ranks leave the traceback of a signal that kills them."""


def init_distributed(backend: str | None = None, timeout_s: float = 300.0) -> tuple[int, int]:
    """Join the job torchrun started.

    Args:
        backend: "gloo" or "nccl"; NCCL where there is a GPU per process, else Gloo.
        timeout_s: how long a collective waits for a peer.
    Returns:
        (rank, world size).
    Raises:
        RuntimeFailure: torchrun's environment is missing.
    """
    if "RANK" not in os.environ:
        raise RuntimeFailure("RANK is not set: start this with torchrun, or with paraplan.runtime.launch.spawn_local")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() > local else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank(), dist.get_world_size()


def leave_job() -> None:
    """End this rank's process, well, once every rank has got here.

    Ended by `_exit`: on torch 2.13 a Gloo process that has made a DeviceMesh aborts now and then while the
    interpreter shuts down ("terminate called without an active exception"), destroyed groups or not.
    """
    if dist.is_initialized():
        dist.barrier()
        _wait_for_all(default_store(), dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait_for_all(store: dist.Store, rank: int, world: int, limit_s: float = 60.0) -> None:
    """Come back once every rank is through its last barrier; the first rank, who may serve the store, last.

    A barrier lets a rank go while others are still in it, and a rank that closes its connections then fails theirs.
    """
    stop = time.monotonic() + limit_s
    for key in ("paraplan/leaving", "paraplan/gone")[: 2 if rank == 0 else 1]:
        store.add(key, 1)
        while store.add(key, 0) < world and time.monotonic() < stop:
            time.sleep(0.01)
    if rank:
        store.add("paraplan/gone", 1)


def spawn_local(num_ranks: int, module: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> int:
    """Run a module (or a .py file) on several ranks of this machine through torchrun.

    Rank 0's output is shown as it comes. A rank that dies ends the job; torchrun then prints its traceback.

    Args:
        num_ranks: processes.
        module: "package.module", or a path ending in .py.
        args: for the module.
        env: added to the environment; one thread per rank unless OMP_NUM_THREADS says otherwise.
    Returns:
        The job's exit code.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
        "--local-ranks-filter=0",
    ]
    command += ["-m", "paraplan.runtime.launch", module, *args]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory(prefix="paraplan-") as folder:
        code = subprocess.run(command, env={**environment, FAULTS: folder}, check=False).returncode
        for file in sorted(Path(folder).iterdir()) if code else ():
            if fault := file.read_text(errors="replace"):
                sys.stderr.write(f"{file.name}: {fault}\n")
    return code


@record
def run_recorded() -> None:
    """Run the module or file named on the command line as the main program, its errors recorded for torchrun."""
    if FAULTS in os.environ:  # torchrun shows nobody's stderr but rank 0's
        faulthandler.enable((Path(os.environ[FAULTS]) / f"rank {os.environ['RANK']}").open("w"))
    name, sys.argv = sys.argv[1], sys.argv[1:]
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_recorded()
