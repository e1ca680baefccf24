"""Starting ranks: from torchrun's environment, or several on this machine.

`spawn_local` starts ranks under torch's elastic agent, so that a rank that dies ends the job within seconds and its
traceback is printed: the agent's for an exception, Python's fault handler's, of whichever rank, where a signal killed
it.
"""

from __future__ import annotations

import ast
import faulthandler
import inspect
import json
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paraplan.ir import errors
from paraplan.ir.errors import ParaplanError, RuntimeFailure
from paraplan.ir.process.cores import num_cores
from paraplan.runtime.executing.torch_private import default_store
from paraplan.runtime.transport.current_device import choose_gpu, local_gpu
from paraplan.runtime.transport.folders import sweep
from paraplan.runtime.transport.process_groups import TIMEOUT_S, check_timeout, limit_job

OWN = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, ParaplanError)}
"""Names of the package's own errors."""
FAULTS = "PARAPLAN_FAULTS"
"""Environment variable: the folder where ranks leave the traceback of a signal that kills them."""

PRELOADED = (
    "paraplan.api",
    "paraplan.terminal.model_settings",
    "paraplan.jobs.run",
    "paraplan.terminal.run_output",
    "torch._dynamo",
    "transformers.modeling_utils",
)
"""What the server of forked ranks imports, as far as it is there."""

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals the agent takes over while a job runs, where it runs in the main thread."""

_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


def init_distributed(backend: str | None = None, timeout_s: float | None = None) -> tuple[int, int]:
    """Join the job torchrun started; where it is joined already, only set its time limit.

    Args:
        backend: "gloo" or "nccl"; NCCL where there is a GPU per process, else Gloo.
        timeout_s: how long a collective of any group waits for its peers; left out, `TIMEOUT_S`, or what the job has.
    Returns:
        (rank, world size).
    Raises:
        ConstraintError: timeout_s is no time to wait.
        RuntimeFailure: torchrun's environment is missing, or there is no GPU for this rank.
    """
    if timeout_s is not None:
        check_timeout(timeout_s)
    if not dist.is_initialized():
        _join(backend, TIMEOUT_S if timeout_s is None else timeout_s)
    else:
        if dist.get_backend() == "nccl":
            choose_gpu()
        if timeout_s is not None:
            limit_job(timeout_s)
    return dist.get_rank(), dist.get_world_size()


def _join(backend: str | None, timeout_s: float) -> None:
    """With NCCL, communicators are made at once (`device_id`): a rank that cannot be reached is found before the first
    step, and groups are split from the job's."""
    if "RANK" not in os.environ:
        raise RuntimeFailure(
            "RANK is not set: start this with torchrun, or with paraplan.runtime.transport.launch.spawn_local"
        )
    limit = timedelta(seconds=timeout_s)
    if backend is None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() > local else "gloo"
    if backend != "nccl":
        dist.init_process_group(backend, timeout=limit)
        return
    device = torch.device("cuda", local_gpu())
    torch.cuda.set_device(device)
    torch.set_num_threads(host_threads(os.environ, num_cores()))
    dist.init_process_group(backend, timeout=limit, device_id=device)


def host_threads(env: Mapping[str, str], cores: int) -> int:
    """Threads of a rank whose work is on a GPU, for updates on the host: its share of the node's cores, unless
    OMP_NUM_THREADS says more than the 1 that torchrun sets by itself."""
    given = env.get("OMP_NUM_THREADS", "1")
    return int(given) if given != "1" and given.isdigit() else max(1, cores // int(env.get("LOCAL_WORLD_SIZE", "1")))


def leave_job() -> None:
    """End this rank, well, once every rank has got here: the last thing it does.

    A process torchrun started is ended by `_exit`: on torch 2.13 one that has made a DeviceMesh over Gloo aborts now
    and then while the interpreter shuts down ("terminate called without an active exception"), destroyed groups or
    not. Those of `spawn_local` end like that by themselves, having told the agent.
    """
    if dist.is_initialized():
        dist.barrier()
        _wait_for_all(default_store(), dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    if FAULTS not in os.environ:
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


def check_guard() -> None:
    """Python runs the main script again in every process started here, so what starts them stands behind a guard.

    Raises:
        RuntimeFailure: this is called while a started process runs its main script, or from the top level of a main
            script that never looks at `__name__`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        name, path = frame.f_globals.get("__name__"), frame.f_code.co_filename
        top = frame.f_code.co_name == "<module>" and name in ("__main__", "__mp_main__")
        if top and (name == "__mp_main__" or _unguarded(path, frame.f_globals.get("__spec__"))):
            raise RuntimeFailure(
                f"{path}:{frame.f_lineno}: processes are started from the top level of the script, which each of them "
                "would run again; put what the script does in a function, say main(), and end it with\n"
                '    if __name__ == "__main__":\n        main()'
            )
        frame = frame.f_back


def _unguarded(path: str, spec: Any) -> bool:
    """Whether a main script is run again in processes it starts, and looks nowhere whether it is the main one."""
    if (spec is not None and spec.name.endswith("__main__")) or not os.path.isfile(path):
        return False
    tree = ast.parse(Path(path).read_bytes())
    compared = [each for each in ast.walk(tree) if isinstance(each, ast.Compare)]
    named = {each.id for whole in compared for each in ast.walk(whole) if isinstance(each, ast.Name)}
    return "__name__" not in named and "parent_process" not in Path(path).read_text(errors="replace")


def prepare_ranks() -> str:
    """Start the server that ranks are forked from, unless it is there; it imports beside what the caller does.

    Returns:
        How ranks are started: "forkserver", or with CUDA, which does not survive a fork, "spawn".
    Raises:
        RuntimeFailure: see `check_guard`.
    """
    check_guard()
    if torch.cuda.is_available():
        return "spawn"
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    given = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _without_interrupts():
        multiprocessing.forkserver.ensure_running()
    if given is None:
        del os.environ["OMP_NUM_THREADS"]
    return "forkserver"


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which a terminal sends to all of its processes: who started them ends
    them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def spawn_local(num_ranks: int, module: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> int:
    """Run a module (or a .py file) on several ranks of this machine, under torch's elastic agent as torchrun does.

    Without CUDA, ranks are forked from a server that has imported what they need, once for as long as this process
    lives: importing torch and transformers anew takes each rank seven seconds of a core. Rank 0's output is shown as it
    comes. A rank that dies ends the job, and why it did is printed.

    Args:
        num_ranks: processes.
        module: "package.module", or a path ending in .py.
        args: for the module.
        env: added to the environment; one thread per rank unless OMP_NUM_THREADS says otherwise.
    Returns:
        The job's exit code.
    Raises:
        RuntimeFailure: see `check_guard`; a signal ended the job; what ranks are forked from has ended.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **(env or {})}
    method = prepare_ranks()
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they say of a rank that died is printed below
    handled = _HANDLED if threading.current_thread() is threading.main_thread() else ()
    code, handlers = 0, {each: signal.getsignal(each) for each in handled}
    with tempfile.TemporaryDirectory(prefix="paraplan-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            start_method=method,
            logs_specs=DefaultLogsSpecs(os.path.join(folder, "logs"), local_ranks_filter={0}),
        )
        try:
            elastic_launch(config, run_rank)(module, tuple(args), {**environment, FAULTS: folder})
        except SignalException as stopped:
            if stopped.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RuntimeFailure(f"stopped by {stopped.sigval.name}; its {num_ranks} ranks were ended") from None
        except EOFError:
            raise RuntimeFailure(
                "the process that ranks are forked from has ended: something killed it, such as a machine out of memory"
            ) from None
        except ChildFailedError as failed:
            code = failed.get_first_failure()[1].exitcode
            sys.stderr.write(_reasons(Path(folder)) or f"{failed}\n")
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
            sweep()
    return code


def _reasons(folder: Path) -> str:
    """Why ranks died: tracebacks of signals, else of the first exception, but for the package's own, which say it by
    themselves, and a line of those it may have caused."""
    found = [(file.name, file.read_text(errors="replace")) for file in sorted(folder.glob("rank *"))]
    told = [f"{name}: {fault}\n" for name, fault in found if fault]
    left = sorted(folder.glob("logs/*/attempt_0/*/error.json"), key=lambda file: file.stat().st_mtime_ns)
    for file in left:
        try:
            reason = json.loads(file.read_text())["message"]
        except json.JSONDecodeError:  # the rank was ended while it wrote
            continue
        is_said = bool(told) or reason["message"].partition(":")[0] in OWN  # where it was raised says no more
        told.append(
            f"rank {file.parent.name}: {reason['message'] if is_said else reason['extraInfo']['py_callstack']}\n"
        )
    return "".join(told)


def run_rank(module: str, args: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a module or file as the main program of a rank that the agent has started.

    Args:
        module: its name, or a file.
        args: of its command line.
        environment: of the rank.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the server ignores
    os.environ.update(environment)  # a server's environment is that of the first job
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    # nobody's stderr but rank 0's is shown
    faulthandler.enable((Path(environment[FAULTS]) / f"rank {os.environ['RANK']}").open("w"))
    sys.argv = [module, *args]
    if module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        # what launches has imported it too, which is as it should be
        warnings.filterwarnings("ignore", r".*found in sys\.modules after import of package", RuntimeWarning)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
