"""Forms of user code that capture must follow exactly or refuse by name: hidden writes, `.data`, constants without a
dtype, cumulative batch norm. Against eager in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from paraplan.capture import capture
from paraplan.capture.precision import default_dtype
from paraplan.ir.errors import CaptureError
from paraplan.planner.constraints import Constraints
from paraplan.planner.search import search
from paraplan.rules.time_axis import program_micro
from tests.against_eager import assert_trains_as_eager, eager_error, loss_by, plan_steps, plans_of
from tests.runtime.pipelines import job_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Two layers, with something a test gives between them."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor], **parts: object) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 8), nn.Linear(8, 4), between
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(self.between(self, torch.relu(self.up(x)))), y)


class Normed(nn.Module):
    """Convolutions around an instance norm that tracks statistics."""

    def __init__(self, dims: int, **options: object) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{dims}d")
        self.norm = getattr(nn, f"InstanceNorm{dims}d")(3, track_running_stats=True, **options)
        self.first, self.last = conv(3, 3, 3, padding=1), conv(3, 3, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.relu(self.norm(self.first(x)))), y)


@pytest.mark.parametrize("dims, options", [(1, {}), (2, {"affine": True, "momentum": 0.3}), (3, {})])
def test_instance_norm_writes_its_statistics(dims: int, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    x = {1: IMAGES[..., 0], 2: IMAGES, 3: IMAGES[..., None].expand(-1, -1, -1, -1, 2)}[dims].contiguous()
    program = assert_trains_as_eager(Normed(dims, **options), {"x": x, "y": x.flip(0)})
    assert set(program.buffer_updates) == {"norm.running_mean", "norm.running_var"}


def test_a_native_batch_norm_called_by_hand_writes_its_statistics() -> None:
    torch.manual_seed(0)

    def between(net: Net, h: Tensor) -> Tensor:
        return torch.native_batch_norm(h, None, None, net.mean, net.var, True, 0.1, 1e-5)[0]

    program = assert_trains_as_eager(Net(between, mean=torch.zeros(8), var=torch.ones(8)), {"x": X, "y": Y})
    assert set(program.buffer_updates) == {"mean", "var"}


def test_an_op_that_hides_a_write_is_found() -> None:
    library = torch.library.Library("hiding", "DEF")
    library.define("counted(Tensor x, Tensor count) -> Tensor")

    def kernel(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return x * 2

    library.impl("counted", kernel, "CPU")
    torch.library.register_fake("hiding::counted", lambda x, count: torch.empty_like(x), lib=library)
    net = Net(lambda net, h: h + torch.ops.hiding.counted(h.detach(), net.count), count=torch.zeros(1))
    with pytest.raises(CaptureError, match=r"hiding.counted.default writes 'count', which it does not say"):
        capture(net, {"x": X, "y": Y})


def _moved(net: Net, h: Tensor) -> Tensor:
    net.mean.data.mul_(0.9).add_(0.1 * net.up.weight.data.mean(0))
    return h * net.mean


def _assigned(net: Net, h: Tensor) -> Tensor:
    net.mean.data = net.mean.data * 0.9 + 0.1
    return h + net.mean


def _masked(net: Net, h: Tensor) -> Tensor:
    h = h * 1
    h[h > 0.5] = 0.0
    h[h.detach()[:, 0] > 0.1] = net.up.bias.mean()
    return h


def _counted(net: Net, h: Tensor) -> Tensor:
    """Rows by the feature that is largest, and what they weigh; a bin more than features."""
    chosen = h.detach().topk(2).indices.reshape(-1)
    weights = h.detach().repeat_interleave(2, 0)[:, 0] + 1
    counts = torch.bincount(chosen, minlength=9) + chosen.int().bincount(weights, 9)
    return h * counts[:-1].to(h.dtype) + chosen[:0].bincount(minlength=8)


def _certain(net: Net, h: Tensor) -> Tensor:
    """Layers dropped with a chance of nothing, and others with certainty."""
    for _ in range(2):
        if torch.rand([]) < 0.0 or not torch.rand(1) <= 1.0:
            h = net.up(h)
        if 1.0 > torch.rand_like(h[0, 0]):
            h = h * 2
    return h


FOLLOWED = {
    "counts in bins": (_counted, {}),
    "chances of nothing": (_certain, {}),
    "writes where a mask says": (_masked, {}),
    "data of a buffer": (_moved, {"mean": torch.ones(8)}),
    "data of a buffer assigned": (_assigned, {"mean": torch.ones(8)}),
    "data of a parameter": (lambda net, h: h * net.up.weight.data.abs().mean(), {}),
    "a number": (lambda net, h: h * torch.tensor(1 / 3) + torch.tensor([0.1] * 8), {}),
    "ranges": (lambda net, h: h * (torch.arange(8) * 0.1) + torch.linspace(0, 1, 8) + torch.logspace(0, 1, 8), {}),
    "a factory in a product": (lambda net, h: h @ torch.eye(8) + torch.zeros(8), {}),
    "a factory that is scattered into": (
        lambda net, h: torch.zeros(4, 8).to(h).scatter_add(1, torch.arange(8).expand(4, 8), h),
        {},
    ),
    "counts divided": (lambda net, h: h * (torch.ones(8, dtype=torch.long).cumsum(0) / 3), {}),
    "a permutation in order": (lambda net, h: h * torch.randperm(8).sort().values, {}),
    "rrelu of one slope": (lambda net, h: F.rrelu(h - 0.5, 0.3, 0.3, True), {}),
    "a reentrant checkpoint": (lambda net, h: checkpoint(net.up, h, use_reentrant=True), {}),
    "a bool buffer": (
        lambda net, h: h.masked_fill(net.seen.logical_or_((h > 1).any(0)), 0.5),
        {"seen": torch.arange(8) % 3 == 0},
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_forms_train_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    between, parts = FOLLOWED[name]
    assert_trains_as_eager(Net(between, **parts), {"x": X, "y": Y})


def test_data_beyond_the_bins_are_refused_by_the_step() -> None:
    """Eager has a bin more then, and a captured step none: no step may leave the datum out."""
    net = Net(lambda net, h: h * torch.bincount((h[:, :3] > 0).sum(-1), minlength=3).sum())
    within, beyond = (torch.full((4, 8), value) for value in (-1.0, 1.0))
    with torch.no_grad():
        net.up.weight.copy_(torch.eye(8))
        net.up.bias.zero_()
    batch = {"x": within, "y": Y}
    program = capture(net, batch, precision="fp64")
    for plan in plans_of(program):
        assert eager_error(plan, net, batch, loss_by(None), 1) < 1e-9
        with pytest.raises(Exception, match="out of bounds"):
            list(plan_steps(plan, net, {"x": beyond.double(), "y": Y.double()}, 1))


def test_batch_norm_averages_cumulatively() -> None:
    torch.manual_seed(0)
    net = Net(lambda net, h: net.norm(h), norm=nn.BatchNorm1d(8, momentum=None))
    assert_trains_as_eager(net, {"x": X, "y": Y})


def _clipped(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.up.weight.clamp_(-0.1, 0.1)
    return h


def _averaged(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.other.mul_(0.9).add_(0.1 * net.up.weight)
    return F.linear(h, net.other)


def _scaled(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.mul_(2)
    return h


def _data_scaled(net: Net, h: Tensor) -> Tensor:
    h.data[:, 0].mul_(2)
    return h


REFUSED = {
    "a trained parameter": (_clipped, "writes the trained parameter 'up.weight' in place.*optimizer's step"),
    "its data": (lambda net, h: h @ net.up.weight.data.mul_(0.9), "writes the trained parameter 'up.weight'"),
    "a frozen parameter": (_averaged, r"writes 'other', a parameter that does not train.*register_buffer\('other'"),
    "an activation": (_scaled, "writes in place, where autograd does not see it"),
    "its data in part": (_data_scaled, "writes in place, where autograd does not see it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_no_program_can_hold_are_refused(name: str) -> None:
    between, told = REFUSED[name]
    net = Net(between, other=nn.Parameter(torch.randn(8, 8), requires_grad=False))
    with pytest.raises(CaptureError, match=told):
        capture(net, {"x": X, "y": Y})


DRAWN = {
    "mixup": lambda net, h: 0.7 * h + 0.3 * h[torch.randperm(4)],
    "rrelu": lambda net, h: F.rrelu(h - 0.5, training=True),
    "drawn in place": lambda net, h: h * torch.empty_like(h).bernoulli_(0.5) + torch.empty_like(h).exponential_(),
}


@pytest.mark.parametrize("name", DRAWN)
def test_random_forms_draw_alike_under_every_plan(name: str) -> None:
    torch.manual_seed(0)
    net = Net(DRAWN[name])
    plans = list(plans_of(capture(net, {"x": X, "y": Y}, precision="fp64")))
    first, *others = [list(plan_steps(plan, net, {"x": X, "y": Y}, 2)) for plan in plans]
    assert float(first[0]["loss"]) != float(first[1]["loss"])
    for found in others:
        for mine, wanted in zip(found, first, strict=True):
            assert float((mine["loss"] - wanted["loss"]).abs()) < 1e-9
            assert float((mine["grad up.weight"] - wanted["grad up.weight"]).abs().max()) < 1e-9


def _derived(net: Net, h: Tensor) -> Tensor:
    return torch.autograd.grad(net.up(h).sum(), h, create_graph=True)[0]


def _packed(net: Net, h: Tensor) -> Tensor:
    lengths = (h[:, 0] > 0).long() + 1
    found, _ = net.cell(pack_padded_sequence(h.view(4, 2, 4), lengths, batch_first=True, enforce_sorted=False))
    return pad_packed_sequence(found, batch_first=True)[0].flatten(1)


TOLD = {
    "a gradient": (_derived, "torch.autograd.grad is called in forward"),
    "a packed sequence": (_packed, "pad to a fixed length and mask"),
    "a branch": (lambda net, h: torch.cond(h.sum() > 0, lambda v: v * 2, lambda v: v + 1, (h,)), "torch.where"),
    "a number": (lambda net, h: h * h.detach().sum().item(), "keep values as tensors instead of .item()"),
    "a chance": (lambda net, h: h * 2 if torch.rand([]) < 0.5 else h, "use torch.where instead of `if`"),
    "a draw written to": (lambda net, h: h * 2 if torch.rand([]).mul_(2) < 1.0 else h, "use torch.where instead"),
    "bins by data": (lambda net, h: h * torch.bincount(h.argmax(-1))[0], "bincount with a minlength"),
    "an if": (lambda net, h: h * 2 if h.sum() > 0 else h, "use torch.where instead of `if`"),
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_what_cannot_be_captured_is_refused_with_its_remedy(name: str, precision: str) -> None:
    between, told = TOLD[name]
    with pytest.raises(CaptureError, match=told) as fault:
        capture(Net(between, cell=nn.GRU(4, 4, batch_first=True)), {"x": X, "y": Y}, precision=precision)
    assert "test_forms.py:" in str(fault.value)


def test_capture_repeats_nothing_that_torch_says_of_itself() -> None:
    def warned(net: Net, h: Tensor) -> Tensor:
        warnings.warn("from the user's code", FutureWarning, stacklevel=1)
        return net.cell(h[:, None])[0][:, 0]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        capture(Net(warned, cell=nn.LSTM(8, 8, batch_first=True)), {"x": X, "y": Y})
    assert {str(each.message) for each in told} == {"from the user's code"}


def test_products_of_two_dtypes_are_refused_by_line() -> None:
    model = Net(lambda net, h: h * torch.rand(8, dtype=torch.float32))
    with pytest.raises(CaptureError, match=r"test_forms.py:\d+, in forward: .* multiplies bfloat16 by float32"):
        capture(model, {"x": X, "y": Y}, precision="bf16")


@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_sizes_that_data_decide_are_refused_by_line(precision: str) -> None:
    with pytest.raises(CaptureError, match=r"test_forms.py:\d+, in forward: .*masks instead of boolean indexing"):
        capture(Net(lambda net, h: h[h > 0.5].mean() + h), {"x": X, "y": Y}, precision=precision)


def test_masked_writes_run_in_microbatches() -> None:
    program = capture(Net(_masked), {"x": X, "y": Y}, precision="fp64")
    assert program_micro(program, 2).tail == len(program.segments)


class Padded(nn.Module):
    """Bags of one length, of which some ids count for nothing."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.out = nn.EmbeddingBag(5, 8, mode=mode, padding_idx=1), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.out(x + self.bag(ids)).pow(2).mean()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_padding_counts_for_nothing_in_bags(mode: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 5, (8, 3), generator=generator)
    ids[2] = 1
    batch = {"x": torch.randn(8, 8, generator=generator), "ids": ids}
    model = Padded(mode)
    program = assert_trains_as_eager(model, batch)
    plan = search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False).plan
    assert eager_error(plan, model, batch, loss_by(None)) <= 1e-9
    model.bag.weight.data[1] = float("nan")  # which nothing reads
    assert torch.isfinite(next(plan_steps(plan, model.double(), {**batch, "x": batch["x"].double()}, 1))["loss"])
    assert not any("bag" in op.target for kind in program.kinds for op in kind.graph.ops)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_id_are_embeddings(mode: str) -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(8, 8, generator=generator), "ids": torch.randint(0, 5, (8, 1), generator=generator)}
    model = Padded(mode)
    program = assert_trains_as_eager(model, batch)
    assert not any("bag" in op.target for kind in program.kinds for op in kind.graph.ops)
    plan = search(job_of(program, 1, "momentum"), Constraints(microbatches=2), certify=False).plan
    assert eager_error(plan, model, batch, loss_by(None)) <= 1e-9


class Discounted(nn.Module):
    """Numbers written out, in the input's dtype, in none and in powers of a count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(8, 8)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        share = 1 - torch.pow(torch.tensor(0.9, dtype=x.dtype), self.step)
        return (self.out(x) @ torch.eye(8) * share + torch.tensor(0.7) * 0.1**self.step).pow(2).mean()


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_written_numbers_are_exact_whatever_the_default_dtype(default: torch.dtype) -> None:
    with default_dtype(default):
        assert_trains_as_eager(Discounted(), {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(3))})


class _Average(nn.Module):
    """A running average, assigned anew where no gradient is recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.no_grad():
            self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        return (h - self.average).square().mean()


def test_a_buffer_assigned_anew_from_detached_values() -> None:
    program = assert_trains_as_eager(_Average(), {"x": torch.randn(8, 6)})
    assert list(program.buffer_updates) == ["average"]
