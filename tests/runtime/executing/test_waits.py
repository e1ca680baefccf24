"""Steps on CUDA read nothing back on the host, nor copy what it would wait for: run on tensors without data."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import build
from paraplan.capture import capture
from paraplan.codegen import build_modules
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.ir.errors import RuntimeFailure
from paraplan.ir.machine.collectives import ROUTE
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.jobs.checking.without_device import dispatched_methods
from paraplan.jobs.measuring.local_ops import whole_plan
from paraplan.kernels.torch_private import fake_mode
from paraplan.lowering import lower
from paraplan.runtime import batch as batch_module
from paraplan.runtime.executing.torch_private import TorchDispatchMode, tree_leaves
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport import collectives, row_counts
from paraplan.runtime.transport.distributed import DistributedTransport
from tests.captures import program_of

pytest.importorskip("triton")
READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
    "bincount",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Waits(TorchDispatchMode):
    """Notes what the host would wait for: (op, the file and function that called it)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func.overloadpacket.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_cuda = any(x.is_cuda for x in given)
        masks = name in INDEXING and any(x.dtype == torch.bool for x in given[1:] if x.dim())
        if on_cuda and (name in READS or masks):
            self._note(name)
            if name == "_local_scalar_dense":
                return 0.0
        result = func(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            source, target = (given[0], result) if name == "_to_copy" else (given[1], given[0])
            blocks = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            if source.device.type != target.device.type and (blocks or source.is_cuda):
                self._note(f"{name} from {source.device.type}")
        return result

    def _note(self, name: str) -> None:
        ours = [at for at in traceback.extract_stack() if "paraplan/" in at.filename or "/amp/" in at.filename]
        caller = ours[-1] if ours else traceback.extract_stack()[-3]
        self.found.append((name, f"{Path(caller.filename).name}:{caller.name}"))


def _to(x: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """`Tensor.to` as the op it is, which asks for no device."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, later, layout = torch._C._nn._parse_to(*args, **kwargs)
    if not copy and (device is None or device.type == x.device.type) and dtype in (None, x.dtype):
        return x
    return torch.ops.aten._to_copy.default(x, dtype=dtype, device=device, non_blocking=later, memory_format=layout)


@contextmanager
def pretended() -> Iterator[None]:
    """A machine that says it has CUDA, and tensors without data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None)  # no driver to start
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(batch_module, "pinned", lambda shape, dtype: torch.empty(shape, dtype=dtype))
        patch.setattr(Tensor, "to", _to)
        with fake_mode(), dispatched_methods():
            yield


def _trained(name: str, precision: str, steps: int = 2) -> list[tuple[str, str]]:
    """What the host waits for in some steps of training."""
    small = build(name, 0.1)
    batch = {key: x.float() if x.is_floating_point() else x for key, x in small.batch.items()}
    model: nn.Module = small.model.float()
    plan = whole_plan(program_of(name, 0.1, precision), parse_cluster("1xH100"), OPTIMIZERS["adamw"])
    programs = lower(plan)
    waits = Waits()
    with pretended():
        transport = DistributedTransport(plan.stages[0].mesh, device="cuda")
        modules = build_modules(programs[0], transport.groups, "cuda")
        trainer = Trainer(plan, programs, modules, model, transport)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-3)
        scaler = trainer.scaler() if precision == "fp16" else None
        for _ in range(steps):
            with waits:
                loss = trainer.step(batch)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                trainer.clip_grad_norm_(1.0)
                optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None:
                    scaler.update()
                optimizer.zero_grad()
            assert loss.is_cuda
    return waits.found


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt2", "bf16"),
        ("gpt2_lora", "fp8"),
        ("t5", "bf16"),
        ("vit", "bf16"),
        ("unet", "bf16"),
        ("dlrm", "bf16"),
        ("lstm", "fp32"),
        ("gshard", "bf16"),
        ("mixtral", "bf16"),
        ("qwen3_moe", "fp32"),
    ],
)
def test_a_step_waits_for_nothing(name: str, precision: str) -> None:
    assert _trained(name, precision) == []


def test_a_gradient_scaler_waits_once_a_step() -> None:
    """torch's own, which asks whether to skip the update."""
    assert _trained("gpt2", "fp16") == [("_local_scalar_dense", "grad_scaler.py:<genexpr>")] * 2


def test_experts_in_float64_wait_for_their_counts() -> None:
    with pytest.raises(RuntimeFailure, match=r"paraplan\.experts .*bincount"):
        _trained("mixtral", "fp64")


def test_an_exchange_of_rows_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows there, gradients there and results back: the counts of one exchange are copied when the first is sent."""
    waits, read, exchanged = [], Tensor.tolist, []
    monkeypatch.setattr(Tensor, "tolist", lambda x: waits.append(x.shape) or read(x))
    monkeypatch.setattr(
        collectives, "exchange_rows", lambda out, x, receives, sends, group: exchanged.append((sends, receives))
    )
    start = collectives.IMPLEMENTATIONS[ROUTE.name].start
    for _ in range(2):
        sent, received = torch.tensor([1, 2]), torch.tensor([0, 3])
        start(torch.ones(4, 5), "", 2, "axis", sent, received, 6)
        start(torch.ones(4, 2), "", 2, "axis", sent, received, 6)
    assert waits == [(2, 2)] * 2
    assert exchanged == [([1, 2], [0, 3])] * 4
    del sent, received
    assert not row_counts._READ


def test_an_update_is_one_kernel_with_its_counts_on_the_device() -> None:
    """Also where a checkpoint has them on the host, in float64, as unfused optimizers do."""
    small = build("gpt2", 0.0)
    program = capture(small.model.float(), small.batch, precision="bf16")
    plan = whole_plan(program, parse_cluster("1xH100"), OPTIMIZERS["adamw"])
    programs = lower(plan)
    with pretended():
        transport = DistributedTransport(plan.stages[0].mesh, device="cuda")
        modules = build_modules(programs[0], transport.groups, "cuda")
        trainer = Trainer(plan, programs, modules, small.model, transport)
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-3)
        for step in range(3):
            trainer.step(small.batch)
            if step == 2:
                for slots in optimizer.state.values():
                    slots["step"] = torch.ones((), dtype=torch.float64)
            with Ops() as ops:
                optimizer.step()
            optimizer.zero_grad()
            assert ops.found.count("_fused_adamw_") == 1
            assert not {"addcdiv_", "lerp_", "_foreach_lerp_", "_local_scalar_dense"} & set(ops.found)
            counts = [slots["step"] for slots in optimizer.state.values()]
            assert {(x.device.type, x.dtype) for x in counts} == {("cuda", torch.float32)}
            assert len(counts) == len(programs[0].grads)


class Ops(TorchDispatchMode):
    """Names of the ops that ran under it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_waits_are_seen() -> None:
    with pretended(), Waits() as waits:
        x, y = torch.ones(3, device="cuda"), torch.ones(3)
        assert x.sum().item() == x.any().item() == 0.0
        x.to("cpu")
        y.to("cuda")
        y.to("cuda", non_blocking=True)
        x.copy_(y)
        x.copy_(y, True)
        x.masked_fill_(x > 0, 1.0)
        torch.where(x > 0, x, 2.0)
        with pytest.raises(RuntimeError):
            x[x > 0]
    told = [name for name, _ in waits.found]
    assert told == ["_local_scalar_dense"] * 2 + ["_to_copy from cuda", "_to_copy from cpu", "copy_ from cpu", "index"]
