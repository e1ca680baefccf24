"""Image models: the captured program means what the eager model does, running statistics included."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.models import resnet, unet, vgg
from paraplan.capture import capture
from paraplan.capture.reference import run_step
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.model.program import Program
from paraplan.ir.struct import from_json, to_json
from paraplan.lowering.verification.verify_program import verify_program
from paraplan.rules.time_axis import program_micro, splittable
from tests.numerics import relative_error

Batch = dict[str, Tensor]


class Shapes(nn.Module):
    """Poolings, resizings and norms that no example model has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding="same", groups=1)
        self.depth = nn.Conv2d(8, 8, 3, 2, 1, groups=8)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8, affine=False), nn.InstanceNorm2d(8, affine=True)])
        self.plain = nn.BatchNorm2d(8, track_running_stats=False)
        self.line = nn.Conv1d(8, 4, 3, padding=1)
        self.lone = nn.BatchNorm1d(4, momentum=0.3)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.norms[1](self.norms[0](F.avg_pool2d(self.conv(pixels), 2, count_include_pad=False)))
        x = self.plain(F.interpolate(self.depth(x), scale_factor=2.0, mode="bicubic"))
        x = F.adaptive_max_pool2d(x, 3) + F.adaptive_avg_pool2d(torch.stack([x, x]).roll(1).sum(0), (3, 3))
        x = self.lone(F.max_pool1d(self.line(x.flatten(2)), 2)).flatten(1)
        return F.cross_entropy(x, labels % x.shape[1])


def shapes() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return Shapes(), resnet.images(4, 8, 8)


def small_resnet() -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return resnet.factory(4, 16, (2, 1), 4, 5)


MODELS = {
    "resnet": small_resnet,
    "vgg": lambda: vgg.factory(4, 8),
    "unet": lambda: unet.factory(4, 8, 8),
    "shapes": shapes,
}


def run(program: Program, model: nn.Module, batch: Batch):
    tensors = dict(model.named_parameters())
    params = {name: tensors[name].detach() for name in program.params}
    return run_step(program, params, {name: x.clone() for name, x in model.named_buffers()}, batch)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", list(MODELS))
def test_equals_eager(name: str, training: bool) -> None:
    model, batch = MODELS[name]()
    model = model.double().train(training)
    batch = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    program = capture(model, batch, precision="fp64")
    verify_program(program)
    step = run(program, model, batch)
    loss = model(**batch)
    loss.backward()
    assert float(step.loss) == pytest.approx(float(loss), rel=1e-11)
    grads = {key: torch.zeros_like(g) if g is None else g for key, g in step.grads.items()}
    wanted = {key: p.grad if p.grad is not None else torch.zeros_like(p) for key, p in model.named_parameters()}
    assert relative_error(grads, wanted) <= 1e-9
    norms = sum(isinstance(m, nn.BatchNorm2d | nn.BatchNorm1d) and m.track_running_stats for m in model.modules())
    assert len(step.buffers) == (3 * norms if training else 0)
    buffers = dict(model.named_buffers())
    assert relative_error(step.buffers, {key: buffers[key] for key in step.buffers}) <= 1e-12


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_narrow_precisions(precision: str) -> None:
    model, batch = small_resnet()
    program = capture(model, batch, precision=precision)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = model.to(dtype)
    given = {key: x.to(getattr(torch, program.batch[key].spec.dtype)) for key, x in batch.items()}
    step = run(program, model, {key: x.to(dtype) if x.is_floating_point() else x for key, x in given.items()})
    loss = model(**{key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()})
    assert float(step.loss) == pytest.approx(float(loss), rel=1e-5 if precision == "fp32" else 5e-2)


def test_equal_blocks_are_one_kind() -> None:
    with torch.device("meta"):
        program = capture(resnet.ResNet((3, 3), 8, 10), resnet.images(2, 32, 10))
    assert [segment.kind for segment in program.segments] == [0, 1, 2, 2, 3, 4, 4, 5]
    with torch.device("meta"):
        program = capture(unet.UNet(8, 2, 3, 4), unet.factory(2, 16)[1])
    kinds = [segment.kind for segment in program.segments]
    assert kinds[1] == kinds[2] == kinds[3] == kinds[-2], "a U-Net's blocks at full resolution, on both sides"
    assert all(len(kind.inputs) <= 4 for kind in program.kinds)


def test_batch_statistics_keep_the_batch_whole() -> None:
    model, batch = small_resnet()
    program = capture(model, batch)
    with pytest.raises(ConstraintError, match=r"bn_squares.*resnet.py.*use 1 microbatch"):
        program_micro(program, 2)
    assert splittable(program, 1) and not splittable(program, 2)
    assert program_micro(program, 2, in_space=True).segments, "data-parallel ranks can complete the sums"
    assert splittable(capture(model.eval(), batch), 2), "frozen statistics do not mix samples"
    assert splittable(capture(*unet.factory(4, 8, 8)), 2), "group norm neither"


def test_updates_are_part_of_the_program() -> None:
    program = capture(*small_resnet())
    assert from_json(to_json(program), Program, "program", InvalidPlanError) == program
    name = "stem.1.running_mean"
    wrong = ({"nothing": program.buffer_updates[name]}, {name: "s9.9"}, {name: program.loss[0].numerator})
    for updates, message in zip(wrong, ("no buffer", "no segment", "its new value"), strict=True):
        with pytest.raises(InvalidPlanError, match=message):
            verify_program(msgspec.structs.replace(program, buffer_updates=updates))


class Counter(nn.Module):
    """Keeps a sum over the batch and a count of steps in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        self.seen += y.detach().sum(0)
        self.steps += 1
        self.last.copy_(self.lin.weight.detach())
        return (y**2).sum()


def test_buffers_of_any_kind() -> None:
    model = Counter().double()
    x = torch.randn(4, 4, dtype=torch.float64)
    program = capture(model, (x,), precision="fp64")
    step = run(program, model, {"x": x})
    model(x)
    assert relative_error(step.buffers, dict(model.named_buffers())) <= 1e-12
    assert set(step.buffers) == {"seen", "steps", "last"} and splittable(program, 2)
