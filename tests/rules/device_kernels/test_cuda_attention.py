"""Torch's attention kernels for CUDA: what is said of each against dry runs, and what is made of their results against
the reference, with stand-ins that ask for all that torch's ask for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from paraplan.capture import capture
from paraplan.cost_models.machine.catalog import parse_cluster
from paraplan.cost_models.predict import with_used_profile
from paraplan.ir.execution.rank_program import LocalValue
from paraplan.ir.machine.kernel_choice import Kernel, OpCall, fitting
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import Plan
from paraplan.ir.profile import OpTime, Profile
from paraplan.jobs.checking.without_device import dispatched_methods
from paraplan.jobs.measuring.local_ops import LocalOp, block_ops, whole_plan
from paraplan.kernels import attention_kernels, gpu, reference_kernels
from paraplan.kernels.gpu.attention import cudnn, efficient
from paraplan.kernels.torch_private import fake_mode
from paraplan.lowering import lower
from paraplan.rules.device_kernels import cuda  # noqa: F401  (records its kernels)
from paraplan.runtime.executing.launch_counts import LaunchCounter
from paraplan.runtime.executing.tracker import Ledger, Tracker

B, H, D = 2, 4, 16
LAYOUTS = ("heads last", "heads first", "parts of one")
MASKS: dict[str, tuple[tuple[int, int], bool]] = {
    "none": ((0, 0), False),
    "bool": ((2, 1), True),
    "bias": ((1, 4), False),
    "scores": ((2, 4), False),
}


def _rows(layout: str, s: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values."""
    if layout == "parts of one":
        parts = torch.randn(B, s, 3 * H * D).to(dtype).chunk(3, -1)
        return [x.unflatten(-1, (H, D)).transpose(1, 2) for x in parts]
    made = [torch.randn(B, s, H, D).to(dtype).transpose(1, 2) for _ in range(3)]
    return made if layout == "heads last" else [x.contiguous() for x in made]


def _mask(name: str, s: int, dtype: torch.dtype) -> Tensor | None:
    shape, is_bool = MASKS[name]
    if name == "none":
        return None
    drawn = torch.randn(*shape, s, s)
    if not is_bool:
        return drawn.to(dtype)
    drawn[0, 0, 3] = -1.0  # attends to nothing
    return drawn > -0.5


def _value(x: Tensor) -> LocalValue:
    name, nbytes = str(x.dtype).removeprefix("torch."), x.untyped_storage().nbytes()
    return LocalValue(dtype=name, shape=tuple(x.shape), strides=x.stride(), base="x", storage_bytes=nbytes)


def _call(tensors: list[Tensor], args: tuple[Any, ...]) -> OpCall:
    refs = iter(range(len(tensors)))
    named = tuple(f"%{next(refs)}" if isinstance(arg, Tensor) else arg for arg in args)
    return OpCall([_value(x) for x in tensors], [], named)


def _cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Of both ops, arguments with tensors in them."""
    shapes = itertools.product((torch.float32, torch.bfloat16), (32, 48, 41, 128), LAYOUTS, MASKS, (False, True))
    for dtype, s, layout, name, causal in shapes:
        if s == 128 and name != "none":  # cuDNN takes whole 128 and no masks
            continue
        q, k, v = _rows(layout, s, dtype)
        mask, whole, starts = _mask(name, s, dtype), (B, H, s, s), (0, 0, 0, 0)
        yield "paraplan.attention", (q, k, v, mask, None, 0.0, 0, causal, 0.25, whole, starts)
        out, lse = q.new_empty(B, s, H, D).transpose(1, 2), torch.zeros(B, H, s)
        for grad, asks in ((out, False), (out.contiguous(), name in ("bias", "scores"))):
            rest = 0.0, 0, causal, 0.25, whole, starts, asks
            yield "paraplan.attention_grad", (grad, q, k, v, mask, None, out, lse, *rest)


def _fake(x: Any) -> Any:
    """On CUDA, without data; a part stays a part."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def test_what_is_said_of_each_kernel_is_what_it_does() -> None:
    """Launches, bytes and strides; of the bytes torch's kernels allocate inside a dry run sees none."""
    seen: dict[str, int] = {}
    for target, args in _cases():
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        call = _call(tensors, args)
        for kernel in fitting("cuda", target, call):
            if kernel.name != "triton":
                seen[kernel.name] = seen.get(kernel.name, 0) + 1
                _assert_said(target, kernel, call, args)
    assert set(seen) == {"flash", "efficient", "cudnn"} and min(seen.values()) >= 18


def _assert_said(target: str, kernel: Kernel, call: OpCall, args: tuple[Any, ...]) -> None:
    where = (target, kernel.name, [(x.dtype, x.shape, x.strides) for x in call.inputs if x is not None], args[-7:])
    with fake_mode(), torch.no_grad(), dispatched_methods():
        given = [_fake(arg) for arg in args]
        counter, ledger, tracker = LaunchCounter(), Ledger(), Tracker()
        for x in given:
            if isinstance(x, Tensor):
                ledger.register(x)
        before = ledger.open_window()
        with counter, tracker, tracker.booking(ledger):
            made = gpu.kernel(target, kernel.name)(*given)
        inside = max(0, ledger.window_bytes - max(ledger.live_bytes, before))
        outs = [x for x in made if x is not None]
        assert all(x.device.type == "cuda" for x in outs), where
        assert len(counter.launches) == kernel.launches(call), (where, counter.launches)
        assert inside <= kernel.workspace(call), (where, inside, kernel.workspace(call))
        if target == "paraplan.attention":
            assert kernel.workspace(call) <= inside + 24, (where, inside, kernel.workspace(call))
        for x in outs[: 1 if target == "paraplan.attention" else 3]:
            assert x.transpose(1, 2).is_contiguous(), where
        assert all(x.is_contiguous() for x in outs[1 if target == "paraplan.attention" else 3 :]), where


class _Torchs:
    """Stands for `torch.ops.aten` on a CPU: attention by the reference kernels, with torch's conditions on CUDA."""

    nan_to_num = torch.ops.aten.nan_to_num
    stats_dims = 4

    def _added(self, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        if mask is not None:
            assert mask.shape == (*q.shape[:3], k.shape[2]) and mask.dtype == q.dtype
            assert mask.stride(3) == 1 and all(stride % 16 == 0 for stride in mask.stride()[:3])
        return mask

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, logs: bool, p: float, causal: bool, *, scale: float
    ) -> tuple[Tensor, ...]:
        assert q.shape[1] == k.shape[1] and logs and p == 0.0
        whole = (*q.shape[:3], k.shape[2])
        call = attention_kernels._make_call(
            q, k, self._added(mask, q, k), None, 0.0, 0, causal, scale, whole, (0, 0, 0, 0)
        )
        out, lse = attention_kernels._attention_math(q, k, v, call)
        padded = lse.new_full((*lse.shape[:2], -(-q.shape[2] // 32) * 32), float("inf"))
        padded[:, :, : q.shape[2]] = torch.where(lse == float("-inf"), 0.0, lse)  # as torch's kernel gives it
        return out, padded, torch.empty(()), torch.empty(())

    def _scaled_dot_product_efficient_attention_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, seed: Tensor,
        offset: Tensor, p: float, asks: tuple[bool, ...], causal: bool, *, scale: float,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        s, whole = q.shape[2], (*q.shape[:3], k.shape[2])
        assert lse.shape[2] == -(-s // 32) * 32 and lse.stride(2) == 1
        assert not (lse == float("-inf")).any(), "exp(-inf + inf) is no probability"
        assert bool((lse[:, :, s:] == float("inf")).all())
        assert g.transpose(1, 2).is_contiguous() and out.transpose(1, 2).is_contiguous()
        lse = torch.where(lse == float("inf"), float("-inf"), lse)[:, :, :s]
        call = attention_kernels._make_call(
            q, k, self._added(mask, q, k), None, 0.0, 0, causal, scale, whole, (0, 0, 0, 0)
        )
        dmask = torch.zeros_like(mask) if asks[3] and mask is not None else None
        return attention_kernels._attention_grad_math(g, q, k, v, out, lse, call, dmask)

    def _scaled_dot_product_cudnn_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: None,
        logs: bool,
        p: float,
        causal: bool,
        debug: bool,
        *,
        scale: float,
    ) -> tuple[Tensor, ...]:
        assert mask is None and logs and p == 0.0 and not debug
        whole = (*q.shape[:3], k.shape[2])
        out, lse = reference_kernels.attention(q, k, v, None, None, 0.0, 0, causal, scale, whole, (0, 0, 0, 0))
        return torch.empty_like(q).copy_(out), lse.unsqueeze(-1) if self.stats_dims == 4 else lse

    def _scaled_dot_product_cudnn_attention_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seed: Tensor, offset: Tensor,
        mask: None, starts_q: None, starts_k: None, s: int, t: int, p: float, causal: bool, *, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert (
            lse.dim() == self.stats_dims
            and seed.dtype == offset.dtype == torch.int64
            and (s, t) == (q.shape[2], k.shape[2])
        )
        rest = 0.0, 0, causal, scale, (*q.shape[:3], t), (0, 0, 0, 0), False
        found = reference_kernels.attention_grad(g, q, k, v, None, None, out, lse.view(q.shape[:3]), *rest)[:3]
        return tuple(torch.empty_like(x).copy_(grad) for x, grad in zip((q, k, v), found, strict=True))


def _assert_reference(module: Any, target: str, args: tuple[Any, ...]) -> None:
    name = target.removeprefix("paraplan.")
    if name == "attention_grad":
        forward = module.attention(*args[1:6], *args[8:14])
        args = (*args[:6], *forward, *args[8:])
        args[0].normal_()
    reference = getattr(reference_kernels, name)
    for mine, other in zip(getattr(module, name)(*args), reference(*args), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("module", "kernel", "stats_dims"), [(efficient, "efficient", 4), (cudnn, "cudnn", 4), (cudnn, "cudnn", 3)]
)
def test_what_is_asked_of_torchs_kernels_and_made_of_it(
    monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str, stats_dims: int
) -> None:
    """Rows that attend to nothing, masks of odd rows, log-sums without padding, and either shape of cuDNN's."""
    torchs = _Torchs()
    torchs.stats_dims = stats_dims
    monkeypatch.setattr(module, "aten", torchs)
    monkeypatch.setattr(cudnn.Stats, "dims", 4)
    ran = 0
    for target, args in _cases():
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        half = kernel == "cudnn"
        call = _call([x.bfloat16() if half and x.is_floating_point() else x for x in tensors], args)
        if tensors[0].dtype == torch.float32 and kernel in [each.name for each in fitting("cuda", target, call)]:
            _assert_reference(module, target, args)
            ran += 1
    assert ran >= (18 if half else 60)


@pytest.mark.parametrize(("module", "dtype"), [(efficient, "float32"), (cudnn, "float32")])
def test_blocks_of_a_causal_ring(monkeypatch: pytest.MonkeyPatch, module: Any, dtype: str) -> None:
    """In the past whole, on the diagonal causal, in the future nothing; joined, they are the whole."""
    monkeypatch.setattr(module, "aten", _Torchs())
    q, k, v = _rows("heads last", 12, getattr(torch, dtype))
    whole = (B, H, 12, 12)
    for first in (0, 4, 8):
        joined: tuple[Tensor, Tensor] | None = None
        for key in (0, 4, 8):
            given = (q.narrow(2, first, 4), k.narrow(2, key, 4), v.narrow(2, key, 4))
            block = module.attention(*given, None, None, 0.0, 0, True, 0.3, whole, (0, 0, first, key))
            joined = block if joined is None else reference_kernels.attention_merge(*joined, *block, q.dtype)
        wanted = reference_kernels.attention(q, k, v, None, None, 0.0, 0, True, 0.3, whole, (0, 0, 0, 0))
        for mine, other in zip(joined or (), wanted, strict=True):
            torch.testing.assert_close(mine, other.narrow(2, first, 4), rtol=1e-5, atol=1e-6)


def test_which_masks_the_efficient_kernel_takes() -> None:
    """No dropout, no groups, no gradient of a mask that is broadcast, no mask over other keys or in another dtype."""
    q, k, v = _rows("heads last", 32, torch.float32)

    def taken(k: Tensor = k, mask: Tensor | None = None, p: float = 0.0, q: Tensor = q) -> bool:
        args = (q, k, v, mask, None, p, 0, False, 0.25, (B, H, 32, 32), (0, 0, 0, 0))
        call = _call([x for x in args if isinstance(x, Tensor)], args)
        return "efficient" in [each.name for each in fitting("cuda", "paraplan.attention", call)]

    assert taken() and taken(mask=torch.zeros(B, 1, 1, 32, dtype=torch.bool))
    assert not taken(p=0.1) and not taken(k=k[:, :2]) and not taken(mask=torch.zeros(B, 1, 32, 64))
    assert not taken(mask=torch.zeros(B, 1, 32, 32, dtype=torch.bfloat16)) and not taken(q=q[..., :14])
    for shape, fits in (((B, H, 32, 32), True), ((1, H, 32, 32), False)):
        out = torch.zeros(B, 32, H, D).transpose(1, 2)
        rest = 0.0, 0, False, 0.25, (B, H, 32, 32), (0, 0, 0, 0), True
        args = (out, q, k, v, torch.zeros(shape), None, out, torch.zeros(B, H, 32), *rest)
        call = _call([x for x in args if isinstance(x, Tensor)], args)
        assert ("efficient" in [each.name for each in fitting("cuda", "paraplan.attention_grad", call)]) == fits


@pytest.mark.parametrize(
    ("dtype", "s", "d", "inside"),
    [
        (torch.bfloat16, 128, 64, 8 * (512 + 2 * (16384 + 16))),  # δ, and two tiles of dQ with their locks, a head
        (torch.bfloat16, 128, 128, 8 * (512 + 65536 + 16)),
        (
            torch.bfloat16,
            128,
            192,
            8 * (512 + 3 * (32768 + 16) + 2 * 2 * 64 * 256 * 4),
        ),  # dK and dV, two splits of keys
        (torch.float32, 128, 64, 8 * 512 * 66),  # δ by three ops of torch's
    ],
)
def test_what_the_efficient_backward_allocates_inside(dtype: torch.dtype, s: int, d: int, inside: int) -> None:
    """By hand, as `workspace_size` of torch's `kernel_backward.h` has it."""
    q, k, v, out = (torch.zeros(B, s, H, d, dtype=dtype).transpose(1, 2) for _ in range(4))
    rest = 0.0, 0, False, 0.25, (B, H, s, s), (0, 0, 0, 0), False
    args = (out, q, k, v, None, None, out, torch.zeros(B, H, s), *rest)
    call = _call([x for x in args if isinstance(x, Tensor)], args)
    (kernel,) = [x for x in fitting("cuda", "paraplan.attention_grad", call) if x.name == "efficient"]
    assert kernel.workspace(call) == 24 + inside


class Attending(nn.Module):
    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 16)).transpose(1, 2) for each in self.project(x).chunk(3, -1))
        mask = (x.amax(-1) > 0)[:, None, None] if self.masked else None
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, attn_mask=mask, is_causal=not self.masked).square().mean()


def _plan() -> Plan:
    return _plan_for("1xH100")


def _plan_for(cluster: str, positions: int = 128, masked: bool = False) -> Plan:
    program = capture(Attending(masked), {"x": torch.zeros(1, positions, 32)}, precision="bf16")
    return whole_plan(program, parse_cluster(cluster), OPTIMIZERS["adamw"])


def _attentions(plan: Plan) -> dict[str, str]:
    (rank,) = lower(plan)
    return {i.target: i.kernel for block in rank.blocks.values() for i in block.instrs if "attention" in i.target}


def _ways(plan: Plan, capability: int) -> list[LocalOp]:
    ops = [op for block in lower(plan)[0].blocks.values() for op in block_ops(block) if "attention" in op.target]
    return [way for op in ops for way in op.ways("cuda", capability)]


def _profiled(plan: Plan, device: str, seconds: dict[str, float]) -> Plan:
    times = tuple(
        OpTime(
            target=op.target,
            flag=op.flag,
            inputs=op.inputs,
            outputs=op.outputs,
            detail=op.detail,
            seconds=seconds[op.name],
        )
        for op in _ways(plan, 9)
        if op.name in seconds
    )
    return msgspec.structs.replace(plan, profile=Profile(device=device, name="x", torch="2", ops=times))


@pytest.mark.parametrize(
    ("cluster", "positions", "masked", "kernel"),
    [
        ("1xH100", 128, False, "cudnn"),
        ("1xH200", 384, False, "cudnn"),
        ("1xB200", 128, False, "cudnn"),
        ("1xH100", 192, False, "flash"),  # half of a tile of cuDNN's
        ("1xA100-80", 128, False, "flash"),
        ("1xMI300X", 128, False, "flash"),  # no compute capability
        ("1xA100-80+1xH100", 128, False, "flash"),  # one program for both
        ("1xV100-32", 128, False, "triton"),
        ("1xH100", 128, True, "triton"),
        ("1xA100-80", 128, True, "triton"),
    ],
)
def test_which_kernel_runs_without_a_profile(cluster: str, positions: int, masked: bool, kernel: str) -> None:
    """By the least compute capability of the plan's devices."""
    assert set(_attentions(_plan_for(cluster, positions, masked)).values()) == {kernel}


def test_in_float32_masks_are_the_efficient_kernels() -> None:
    args = (*_rows("heads last", 32, torch.float32), torch.ones(B, 1, 32, 32, dtype=torch.bool), None)
    args = (*args, 0.0, 0, False, 0.25, (B, H, 32, 32), (0, 0, 0, 0))
    names = [each.name for each in fitting("cuda", "paraplan.attention", _call([*args[:4]], args))]
    halves = [x.bfloat16() for x in args[:3]]
    others = [each.name for each in fitting("cuda", "paraplan.attention", _call([*halves, args[3]], args))]
    assert (names, others) == (["efficient", "triton"], ["triton", "efficient"])


def test_where_torch_does_not_choose_cudnn_flash_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device than the plan's, an older cuDNN, or deterministic algorithms."""
    ran = []
    monkeypatch.setattr(cudnn.flash, "attention", lambda *args: ran.append(args))
    monkeypatch.setattr(cudnn.flash, "attention_grad", lambda *args: ran.append(args))
    monkeypatch.setattr(cudnn, "is_fake", lambda x: False)
    q = type("OnCuda", (), {"is_cuda": True, "device": torch.device("cuda", 0)})()
    rest = (0.0, 0, True, 0.25, (B, H, 128, 128), (0, 0, 0, 0))
    devices = (8, 91900, False), (12, 91900, False), (9, 91500, False), (9, 91900, True)
    for capability, version, deterministic in devices:
        cudnn._is_trusted.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of, found=capability: (found, 0))
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda found=version: found)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda found=deterministic: found)
        assert not cudnn._runs(q)
        cudnn.attention(q, q, q, None, None, *rest)
        cudnn.attention_grad(q, q, q, q, None, None, q, q, *rest, False)
    assert len(ran) == 8
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert cudnn._runs(q)
    cudnn._is_trusted.cache_clear()


def test_a_profile_says_which_kernel_runs() -> None:
    """The quickest measured, each op apart; without times of the plan's device the first; a saved plan agrees."""
    plan = _plan()
    forward, backward = "paraplan.attention", "paraplan.attention_grad"
    assert _attentions(plan) == {forward: "cudnn", backward: "cudnn"}
    seconds = {f"{of} as {name}": 1.0 for of in (forward, backward) for name in ("flash", "efficient", "triton")}
    seconds |= {f"{forward} as cudnn": 0.5, f"{backward} as cudnn": 2.0, f"{backward} as triton": 0.9}
    assert sorted({op.name for op in _ways(plan, 9)}) == sorted(seconds)
    assert not any("cudnn" in op.name for op in _ways(plan, 8))
    chosen = {forward: "cudnn", backward: "triton"}
    timed = _profiled(plan, "H100", seconds)
    assert _attentions(timed) == chosen
    assert _attentions(_profiled(plan, "A100", seconds)) == {forward: "cudnn", backward: "cudnn"}
    saved = with_used_profile(timed, lower(timed))
    assert saved.profile is not None
    kept = {op.detail.rpartition(" as ")[2]: op.seconds for op in saved.profile.ops if "attention" in op.target}
    assert kept == {"cudnn": 0.5, "triton": 0.9}, "priced as what runs"
    assert _attentions(saved) == chosen
