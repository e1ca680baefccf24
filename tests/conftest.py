"""Tiny captured models, once per session, with their reference losses and gradients in float64."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paraplan.capture import capture, run_program
from paraplan.ir.machine.cluster import ClusterSpec
from paraplan.ir.model.program import Program
from paraplan.ir.optimizer import OPTIMIZERS
from paraplan.ir.plan import ModelRef
from paraplan.ir.process.garbage import RARELY
from paraplan.planner.assemble import Job
from tests.captures import FOLDER

torch.set_num_threads(1)
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined: there is no device to compile for


def pytest_configure(config: pytest.Config) -> None:
    """One folder of captured programs for all processes of the session."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="paraplan-captures-")
        os.environ[FOLDER] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


LONG = frozenset({"golden", "whole", "jobs", "benchmarks", "planner", "documents"})
"""Folders whose files take longest: begun first, so that no process ends the session alone with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files keep their tests together and in order; those of the whole package, in no folder, are long too."""
    items.sort(key=lambda item: item.path.parent.name != "tests" and LONG.isdisjoint(item.path.parts))


def pytest_collection_finish() -> None:
    """A million objects of modules and test cases stay: walking them again and again took a tenth of the suite."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


def pytest_sessionfinish() -> None:
    """What is alive stays until the process ends: pytest walks all objects five times then."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True)
class Tiny:
    """A program, values for its inputs, and what one step of it gives on one device."""

    program: Program
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    batch: dict[str, Tensor]
    loss: float
    grads: dict[str, Tensor]

    def job(self, num_devices: int, memory_bytes: int = 4 << 30, optimizer: str = "adamw") -> Job:
        """A planning job on local processes."""
        cluster = ClusterSpec.local(num_devices, memory_bytes)
        return Job(self.program, cluster, OPTIMIZERS[optimizer], ModelRef(display="tiny"), {"paraplan": "test"})

    def worst_error(self, losses: list[float], grads: dict[str, Tensor]) -> float:
        """As docs/design/numerics.md, measures it."""
        assert set(grads) == set(self.grads)
        largest = max(float(grad.abs().max()) for grad in self.grads.values())
        errors = [
            float((grads[name] - grad).abs().max()) / max(float(grad.abs().max()), 1e-6 * largest)
            for name, grad in self.grads.items()
        ]
        return max(*errors, *(abs(loss - self.loss) / abs(self.loss) for loss in losses))


def tiny(program: Program, params: dict[str, Tensor], buffers: dict[str, Tensor], batch: dict[str, Tensor]) -> Tiny:
    """With the reference's results."""
    loss, grads = run_program(program, params, buffers, batch, 0)
    return Tiny(
        program, params, buffers, batch, float(loss), {name: grad for name, grad in grads.items() if grad is not None}
    )


def captured(make: Callable[[], nn.Module], batch: dict[str, Tensor]) -> Tiny:
    """A model captured in float64."""
    torch.manual_seed(0)
    model = make().train()
    program = capture(model, batch, precision="fp64")
    model = model.double()
    named = dict(model.named_parameters())
    buffers = {name: value.double() if value.is_floating_point() else value for name, value in model.named_buffers()}
    given = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    return tiny(program, {name: named[name].detach() for name in program.params}, buffers, given)


class Mlp(nn.Module):
    """Two linear layers and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(torch.relu(self.up(x))), y)


class Stack(nn.Module):
    """Residual layers and a cross-entropy."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.head = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.cross_entropy(self.head(x), y)


def _vectors(classes: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=generator)
    if not classes:
        return {"x": x, "y": torch.randn(8, 4, generator=generator)}
    labels = torch.randint(0, classes, (8,), generator=generator)
    labels[1] = -100
    return {"x": x, "y": labels}


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=48,
        n_positions=16,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


@pytest.fixture(scope="session")
def tiny_mlp() -> Tiny:
    """x [8, 8] -> 16 -> 4, mean squared error."""
    return captured(Mlp, _vectors())


@pytest.fixture(scope="session")
def tiny_stacks() -> tuple[Tiny, Tiny]:
    """The same residual layer two and four times."""
    return captured(lambda: Stack(2), _vectors(6)), captured(lambda: Stack(4), _vectors(6))


@pytest.fixture(scope="session")
def tiny_gpt2() -> Tiny:
    """Two layers with dropout, tied embedding and head, a batch of 8 x 12 with ignored labels."""
    generator = torch.Generator().manual_seed(2)
    ids, labels = (torch.randint(0, 48, (8, 12), generator=generator) for _ in range(2))
    labels[0, :5] = -100
    return captured(_gpt2, {"input_ids": ids, "labels": labels})
