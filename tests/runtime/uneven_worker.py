"""What each rank of the two-process test of uneven shards runs (through `spawn_local`): `uneven_worker.py <folder>`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parents[2]))

import paraplan as pp
from paraplan.cost_models.simulator.live_bytes import entries
from paraplan.jobs.checking.check import max_error
from paraplan.jobs.run import full_grads
from paraplan.runtime.state.params import pad
from paraplan.runtime.trainer import Trainer
from paraplan.runtime.transport.launch import init_distributed, leave_job

WORDS, WIDTH, INNER, LENGTH = 21, 9, 11, 13


class Reader(nn.Module):
    """Every size of its parameters is odd."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Next words, and the loss."""
        logits = self.head(torch.tanh(self.inner(self.norm(self.table(ids)))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, WORDS, (4, LENGTH), generator=draw) for _ in range(2))
    ids[0, 0] = labels[0, 1] = WORDS - 1
    labels[1, :5] = -100
    return {"ids": ids, "labels": labels}


def planned(**pins: object) -> pp.Plan:
    return pp.compile(Reader(), "local:2", example_inputs=batch(), precision="fp64", **pins)  # type: ignore[arg-type]


TABLE, ROWS, COLUMNS = "S0/S0/S0", "S0/P/S0", "R/P/S1"
PINS = {"table.weight": COLUMNS, "head.weight": TABLE, "head.bias": "R/P/S0", "inner.weight": COLUMNS}


def equal_to_one_device(trainer: Trainer) -> torch.optim.Optimizer:
    """Two clipped steps, gradients, an evaluation, and what is inside the padding."""
    model = Reader().double()
    mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        wanted = model(**batch())["loss"]
        wanted.backward()
        assert torch.allclose(trainer.step(batch()), wanted.detach(), rtol=1e-10)
        named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert max_error(full_grads(trainer), named)[0] < 1e-9
        norm = trainer.clip_grad_norm_(0.05)
        assert torch.allclose(norm, nn.utils.clip_grad_norm_(model.parameters(), 0.05), rtol=1e-9)
        for each in (optimizer, mine):
            each.step()
            each.zero_grad()
    assert max_error(trainer.full_state_dict(), dict(model.named_parameters()))[0] < 1e-9
    found = trainer.eval_step(batch(), outputs="global", names=["logits"])
    assert torch.allclose(found.outputs["logits"], model(**batch())["logits"], rtol=1e-9)
    local = trainer.eval_step(batch(), outputs="local", names=["logits"])
    assert local.outputs["logits"].shape[-1] <= WORDS
    for name in trainer.state.stage.params:
        held, part = trainer.state.held(name)[0], trainer.state.held_part(name)[0]
        assert torch.equal(held, pad(part, tuple(held.shape))), f"{name}: padding is not zero"
    return optimizer


def dtensors(trainer: Trainer, name: str, dim: int, sizes: tuple[int, int]) -> None:
    """A parameter is the DTensor that torch itself would make of it."""
    x = trainer.state_dict()[name]
    assert isinstance(x, DTensor) and x.placements == (Shard(dim),)
    assert x.to_local().shape[dim] == sizes[trainer.rank]
    full = trainer.full_state_dict()[name]
    assert torch.equal(x.full_tensor(), full)
    torch_made = torch.distributed.tensor.distribute_tensor(full, x.device_mesh, x.placements)
    assert torch.equal(torch_made.to_local(), x.to_local())


def carried_over(trainer: Trainer, optimizer: torch.optim.Optimizer, other: Trainer, folder: Path) -> None:
    """Another plan, whose shards are uneven elsewhere, goes on from the checkpoint."""
    saved = {"model": trainer.state_dict(), "optimizer": trainer.optimizer_state_dict(optimizer)}
    dcp.save(saved, checkpoint_id=folder / "c")
    mine = other.optimizer(torch.optim.AdamW, lr=1e-2)
    state = {"model": other.state_dict(), "optimizer": other.optimizer_state_dict(mine, create=True)}
    dcp.load(state, checkpoint_id=folder / "c")
    other.load_state_dict(state["model"])
    other.load_optimizer_state_dict(mine, state["optimizer"])
    same = other.full_state_dict()
    assert all(torch.equal(value, same[name]) for name, value in trainer.full_state_dict().items())
    for each, tool in ((trainer, optimizer), (other, mine)):
        each.step(batch())
        tool.step()
        tool.zero_grad()
    assert max_error(other.full_state_dict(), trainer.full_state_dict())[0] < 1e-9


def recorded(plan: pp.Plan) -> None:
    """Every rank does what is predicted."""
    trainer = plan.executable(Reader(), record=True)
    optimizer = trainer.optimizer(torch.optim.AdamW, lr=1e-2)
    for _ in range(2):
        trainer.step(batch())
        optimizer.step()
        optimizer.zero_grad()
    assert [entry.key for entry in trainer.entries] == [entry.key for entry in entries(plan.programs[0])]
    prediction = plan.data.prediction
    assert prediction is not None
    assert trainer.peak_bytes <= prediction.peak_bytes[0]
    assert trainer.rank or trainer.peak_bytes == prediction.peak_bytes[0]


def main() -> None:
    folder = Path(sys.argv[1])
    rank, _ = init_distributed("gloo", timeout_s=60)
    torch.set_num_threads(1)
    sharded = planned(dp=2, zero=3, params={"table.weight": TABLE, "head.weight": TABLE, "inner.weight": TABLE})
    split = planned(tp=2, params=PINS)
    trainer, other = sharded.executable(Reader()), split.executable(Reader())
    optimizer = equal_to_one_device(trainer)
    dtensors(trainer, "table.weight", 0, (11, 10))
    equal_to_one_device(other)
    dtensors(other, "table.weight", 1, (5, 4))
    dtensors(other, "inner.weight", 1, (5, 4))
    carried_over(trainer, optimizer, split.executable(Reader()), folder)
    for plan in (sharded, split):
        recorded(plan)
    (folder / f"done{rank}").touch()
    leave_job()


if __name__ == "__main__":
    main()
