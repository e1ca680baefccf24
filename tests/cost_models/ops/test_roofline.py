"""Op work against hand counts, and the roofline's two sides."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from paraplan.cost_models.constants import GPU
from paraplan.cost_models.machine.catalog import catalog_device
from paraplan.cost_models.ops.roofline import OpWork, is_free, op_cost, op_time_s
from paraplan.ir.errors import CostModelError
from paraplan.ir.model.tensor import TensorSpec
from paraplan.runtime.executing.targets import resolve

B, S, H, F = 4, 128, 256, 1024


def t(*shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape)


MATMULS = [
    ("paraplan.linear", ("%x", "%w", "%b", True), (t(B, S, H), t(F, H), t(F)), (t(B, S, F),), 2 * B * S * H * F),
    ("paraplan.linear", ("%x", "%w", None, False), (t(B, S, H), t(H, F)), (t(B, S, F),), 2 * B * S * H * F),
    ("paraplan.linear_grad_input", ("%g", "%w", True), (t(B, S, F), t(F, H)), (t(B, S, H),), 2 * B * S * H * F),
    ("paraplan.linear_grad_weight", ("%g", "%x", True), (t(B, S, F), t(B, S, H)), (t(F, H),), 2 * B * S * H * F),
    ("aten.mm.default", ("%a", "%b"), (t(S, H), t(H, F)), (t(S, F),), 2 * S * H * F),
    (
        "paraplan.batched_product",
        (None, "%a", "%b", 1.0, 1.0),
        (t(2, B, S, H), t(2, B, H, F)),
        (t(2, B, S, F),),
        4 * B * S * H * F,
    ),
    ("aten.bmm.default", ("%a", "%b"), (t(B, S, H), t(B, H, F)), (t(B, S, F),), 2 * B * S * H * F),
    ("aten.addmm.default", ("%c", "%a", "%b"), (t(F), t(S, H), t(H, F)), (t(S, F),), 2 * S * H * F),
    (
        "aten.convolution.default",
        ("%x", "%w", None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1),
        (t(2, 8, 16, 16), t(32, 8, 3, 3)),
        (t(2, 32, 16, 16),),
        2 * (2 * 32 * 16 * 16) * (8 * 3 * 3),
    ),
    (
        "aten.convolution_backward.default",
        ("%g", "%x", "%w", None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1, (False, True, False)),
        (t(2, 32, 16, 16), t(2, 8, 16, 16), t(32, 8, 3, 3)),
        (None, t(32, 8, 3, 3), None),
        2 * (2 * 32 * 16 * 16) * (8 * 3 * 3),
    ),
]


@pytest.mark.parametrize(("target", "args", "inputs", "outputs", "flops"), MATMULS)
def test_matmul_flops_are_exact(target, args, inputs, outputs, flops) -> None:
    work = op_cost(target, args, {}, inputs, outputs)
    assert (work.kind, work.flops, work.dtype) == ("matmul", flops, "bfloat16")
    assert work.read_bytes == sum(x.nbytes for x in inputs)
    assert work.write_bytes == sum(x.nbytes for x in outputs if x is not None)


def _addmm_flops(c: object, a: tuple[int, ...], b: tuple[int, ...], *_: object, **__: object) -> int:
    return 2 * a[0] * a[1] * b[1]


@pytest.mark.parametrize(("train", "start", "held"), [(True, 0, 4), (False, 0, 4), (True, 2, 2)])
def test_experts_cost_what_their_kernels_compute(train: bool, start: int, held: int) -> None:
    """Every product that runs, the inner one backward again, and no other; on some experts, with even routing."""
    tokens, hidden, width, total = 32, 6, 10, 4
    x, g, weights = torch.randn(tokens, hidden), torch.randn(tokens, 8), torch.rand(tokens, 2)
    ids = torch.stack([torch.arange(tokens), torch.arange(tokens) + 1], 1) % total
    w_in, w_out = torch.randn(held, 2, width, hidden), torch.randn(held, 8, width)

    def spec(value: torch.Tensor | None) -> TensorSpec | None:
        return None if value is None else TensorSpec(str(value.dtype).removeprefix("torch."), tuple(value.shape))

    for target, lead in (("experts", (x,)), ("experts_grad", (g, x))):
        rest = ("silu", total, start, *((train,) if target == "experts_grad" else ()))
        inputs = (*lead, ids, weights, w_in, w_out)
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _addmm_flops}) as counter:
            made = resolve(f"paraplan.{target}")(*inputs, *rest)
        outs = made if isinstance(made, tuple) else (made,)
        names = tuple(f"%{index}" for index in range(len(inputs)))
        work = op_cost(f"paraplan.{target}", (*names, *rest), {}, tuple(map(spec, inputs)), tuple(map(spec, outs)))
        assert work.flops == counter.get_total_flops()
        assert work.dtype == "float32"  # not that of the ids of the experts, which stand second in the forward
        rows, back = tokens * 2 * held // total, len(lead) - 1
        moved = (x[:1], x[:1], *([g[:1], g[:1], w_in[0, :, :, 0], w_in[0, :1, :, 0]] * back))  # gathered
        moved += (w_in[0, :, :, 0], w_in[0, :1, :, 0], x[:1] if back else g[:1])  # activations, and what is added
        assert work.copied_bytes == rows * sum(value.numel() * 4 for value in moved)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_flops_with_grouped_heads_and_two_head_sizes(causal: bool) -> None:
    b, h, g, s, length, d, e = 2, 8, 2, 64, 96, 32, 16
    q, k, v, out, lse = t(b, h, s, d), t(b, g, length, d), t(b, g, length, e), t(b, h, s, e), t(b, h, s)
    args = ("%q", "%k", "%v", None, None, 0.0, 0, causal, 0.1, (b, h, s, length), (0, 0))
    forward = op_cost("paraplan.attention", args, {}, (q, k, v), (out, lse))
    assert forward.kind == "attention"
    scores = 2 * s * length - (s * s if causal else 0)  # the last rows of the sequence, where it is sharded
    assert forward.flops == b * h * scores * (d + e)
    args = ("%g", "%q", "%k", "%v", None, None, "%o", "%l", 0.0, 0, causal, 0.1, (b, h, s, length), (0, 0), False)
    backward = op_cost("paraplan.attention_grad", args, {}, (out, q, k, v, out, lse), (q, k, v, None))
    assert backward.flops == b * h * scores * (3 * d + 2 * e)


def test_a_causal_block_is_half_only_on_the_diagonal() -> None:
    q, lse = t(2, 4, 16, 8), t(2, 4, 16)
    flops = {}
    for keys in ("#0:16", "#0+1%2:16"):
        args = ("%q", "%k", "%v", None, None, 0.0, 0, True, 0.1, (2, 4, 32, 32), (0, 0, "#0:16", keys))
        flops[keys] = op_cost("paraplan.attention", args, {}, (q, q, q), (q, lse)).flops
    assert flops["#0+1%2:16"] == 2 * flops["#0:16"] == 2 * 2 * 4 * 16 * 16 * 16


def test_a_convolution_and_its_gradients_do_equal_work() -> None:
    """2 · batch · plane · channels in and out / groups · window; transposed ones work on the input's plane."""
    for groups, transposed in ((1, False), (4, False), (1, True)):
        into, out = t(2, 16, 8, 8), t(2, 32, *((16, 16) if transposed else (4, 4)))
        weight = t(16, 32, 3, 3) if transposed else t(32, 16 // groups, 3, 3)
        rest = ((2, 2), (1, 1), (1, 1), transposed, (0, 0), groups)
        plane = 64 if transposed else 16
        flops = 2 * 2 * plane * 16 * 32 // groups * 9
        forward = op_cost("paraplan.conv", ("%x", "%w", None, *rest), {}, (into, weight), (out,))
        gx = op_cost("paraplan.conv_grad_input", ("%g", "%w", (8, 8), *rest), {}, (out, weight), (into,))
        gw = op_cost("paraplan.conv_grad_weight", ("%g", "%x", (3, 3), *rest), {}, (out, into), (weight,))
        assert [work.flops for work in (forward, gx, gw)] == [flops] * 3
        assert forward.kind == "matmul" and forward.read_bytes == into.nbytes + weight.nbytes
    pooled = op_cost("paraplan.max_pool", ("%x",), {}, (into,), (out, None))
    assert (pooled.kind, pooled.read_bytes, pooled.write_bytes) == ("memory", into.nbytes, out.nbytes)


def test_memory_bound_ops_count_bytes() -> None:
    x = t(B, S, H)
    add = op_cost("aten.add.Tensor", ("%a", "%b"), {}, (x, x), (x,))
    assert (add.kind, add.flops, add.read_bytes, add.write_bytes) == ("memory", 0, 2 * x.nbytes, x.nbytes)
    unknown = op_cost("mylib.strange.op", ("%a",), {}, (x,), (x, None))
    assert (unknown.kind, unknown.read_bytes, unknown.write_bytes) == ("memory", x.nbytes, x.nbytes)
    factory = op_cost("aten.full.default", ((4,), 0.0), {}, (), (x,))
    assert (factory.read_bytes, factory.write_bytes) == (0, x.nbytes)


def test_embedding_reads_rows_not_the_table() -> None:
    table, ids, out = t(50000, H), t(B, S, dtype="int64"), t(B, S, H)
    work = op_cost("paraplan.embedding", ("%w", "%i", "#"), {}, (table, ids), (out,))
    assert work.read_bytes == ids.nbytes + out.nbytes
    grad = op_cost("paraplan.embedding_grad", ("%g", "%i", 50000, -1, "#"), {}, (out, ids), (table,))
    assert grad.write_bytes == table.nbytes + out.nbytes and grad.read_bytes == 2 * out.nbytes + ids.nbytes


def test_shard_reads_its_slice_only() -> None:
    work = op_cost("paraplan.shard", ("%x", 0, 4, "#0:1"), {}, (t(64, H),), (t(16, H),))
    assert work.read_bytes == work.write_bytes == t(16, H).nbytes


@pytest.mark.parametrize("target", ["aten.view.default", "aten.permute.default", "aten.slice.Tensor", "aten.t.default"])
def test_views_cost_nothing(target: str) -> None:
    work = op_cost(target, ("%x",), {}, (t(B, S, H),), (t(B * S, H),))
    assert is_free(target) and op_time_s(work, catalog_device("H100")) == 0.0


@pytest.mark.parametrize("target", ["aten.add.Tensor", "aten.clone.default", "paraplan.shard", "paraplan.linear"])
def test_kernels_are_not_free(target: str) -> None:
    assert not is_free(target)


def test_roofline_takes_the_larger_side_plus_launch() -> None:
    device = catalog_device("H100")
    large = op_cost("aten.mm.default", (), {}, (t(8192, 8192), t(8192, 8192)), (t(8192, 8192),))
    waves = 16  # of 2,048 tiles of 256 x 128 over 132 multiprocessors
    filled = 2048 / (waves * 132) * 8192 / (8192 + GPU.half_dim)
    rate = 989.4e12 * device.power_share**0.5 * GPU.matmul * filled
    assert op_time_s(large, device) == pytest.approx(3e-6 + 2 * 8192**3 / rate, rel=1e-12)
    vector = op_cost("aten.mm.default", (), {}, (t(1, 8192), t(8192, 8192)), (t(1, 8192),))
    moved = vector.read_bytes + vector.write_bytes
    assert op_time_s(vector, device) == pytest.approx(3e-6 + moved / (3.35e12 * GPU.memory), rel=1e-12)


def test_narrow_products_are_less_efficient() -> None:
    device = catalog_device("A100-80")

    def rate(n: int) -> float:
        work = OpWork(kind="matmul", flops=10**13, read_bytes=0, write_bytes=0, dtype="bfloat16", narrow=n)
        return work.flops / op_time_s(work, device)

    assert rate(32) < rate(128) < rate(1024) < 312e12
    assert rate(GPU.half_dim) == pytest.approx(312e12 * GPU.matmul / 2, rel=1e-3)


def test_a_board_below_its_rated_power_multiplies_slower_and_streams_as_fast() -> None:
    full, capped = catalog_device("H100"), catalog_device("H100-96")
    assert capped.power_share == pytest.approx(500 / 700 * full.power_share) and full.power_share < 1
    large = op_cost("aten.mm.default", (), {}, (t(8192, 8192), t(8192, 8192)), (t(8192, 8192),))
    times = [op_time_s(large, device) - device.launch_s for device in (full, capped)]
    assert times[1] / times[0] == pytest.approx((700 / 500) ** 0.5)
    vector = op_cost("aten.mm.default", (), {}, (t(1, 8192), t(8192, 8192)), (t(1, 8192),))
    moved = vector.read_bytes + vector.write_bytes
    assert op_time_s(vector, capped) == pytest.approx(3e-6 + moved / (2.4e12 * GPU.memory), rel=1e-12)


def test_products_in_pieces_count_the_rows_they_compute() -> None:
    rows, weight, whole = t(512, 2, 64), t(128, 64), t(2048, 2, 128)
    into = op_cost("paraplan.linear_into_", (), {}, (whole, rows, weight), ())
    taken = op_cost("paraplan.linear_rows", (), {}, (t(2048, 2, 64), weight), (t(512, 2, 128),))
    for work in (into, taken):
        assert (work.kind, work.flops, work.narrow) == ("matmul", 2 * 1024 * 64 * 128, 64)
        assert work.read_bytes == 2 * (1024 * 64 + 128 * 64) and work.write_bytes == 2 * 1024 * 128


def test_unsupported_float_is_refused_by_name_and_integers_are_not() -> None:
    device = catalog_device("V100-32")
    x = t(64, 64)
    with pytest.raises(CostModelError, match=r"V100-32 has no rate for bfloat16.*float16"):
        op_time_s(op_cost("aten.mm.default", (), {}, (x, x), (x,)), device)
    assert op_time_s(op_cost("aten.add.Tensor", (), {}, (x, x), (x,)), device) > 0
    i = t(64, 64, dtype="int64")
    assert op_time_s(op_cost("aten.mm.default", (), {}, (i, i), (i,)), device) > 0


def test_zero_size_tensors_do_not_crash() -> None:
    work = op_cost("aten.mm.default", (), {}, (t(0, 64), t(64, 8)), (t(0, 8),))
    assert work.flops == 0 and op_time_s(work, catalog_device("H100")) > 0
