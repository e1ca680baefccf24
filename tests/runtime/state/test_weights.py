"""Shards without the whole: seeded initialisation module by module, and slices of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo.language import settings
from paraplan.capture import capture
from paraplan.ir.errors import PlanMismatchError
from paraplan.ir.machine.mesh import R, S
from paraplan.jobs.models import hf_batch, make_model
from paraplan.runtime.executing.tracker import Ledger, Tracker
from paraplan.runtime.in_process import InProcessTrainer
from paraplan.runtime.state import weights
from paraplan.runtime.state.weights import (
    FileValues,
    SeededValues,
    fill,
    initialise,
    parameters_on_meta,
    slices,
    values_of,
)
from tests.runtime import plans

safetensors_torch = pytest.importorskip("safetensors.torch")


def meta_net() -> nn.Module:
    with torch.device("meta"):
        return plans.Net().train()


def trainer_of(which: int, model: nn.Module, **options: Any) -> InProcessTrainer:
    plan, programs = plans.planned(which)
    return InProcessTrainer(plan, programs, plans.emitted(programs), model, **options)


def test_initialisation_is_the_same_for_every_plan_and_on_one_device() -> None:
    wanted = dict(initialise(meta_net(), 7).named_parameters())
    assert not torch.equal(wanted["layers.0.weight"], wanted["layers.1.weight"])
    for seed in plans.SEEDS[:2]:
        found = trainer_of(seed, meta_net(), seed=7).params()
        assert all(torch.equal(found[name], value.double()) for name, value in wanted.items())
    other = dict(initialise(meta_net(), 8).named_parameters())
    assert not torch.equal(other["head.weight"], wanted["head.weight"])
    before = torch.random.get_rng_state()
    initialise(meta_net(), 7)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_module_that_does_not_initialise_itself_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.scale = nn.Parameter(torch.ones(2))

    with torch.device("meta"):
        model = Odd()
    with pytest.raises(PlanMismatchError, match=r"scale is on meta and Odd does not initialise it.*parameters_on_meta"):
        initialise(model, 0)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hugging_face_models(name: str) -> None:
    """Ties, buffers that are computed, weights a parent module scales: as transformers initialises them."""
    with parameters_on_meta():
        model = make_model(f"hf:{name}", settings(name, 0.0), meta=False).model
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    program = capture(model, hf_batch(model, 4, 16), precision="fp32")
    made = fill(program, model, SeededValues(program, model, 3))
    with parameters_on_meta():
        again = make_model(f"hf:{name}", settings(name, 0.0), meta=False).model
    wanted = dict(initialise(again, 3).named_parameters(remove_duplicate=False))
    assert all(torch.equal(value, wanted[key]) for key, value in made.named_parameters(remove_duplicate=False))
    torch.manual_seed(0)
    usual = dict(make_model(f"hf:{name}", settings(name, 0.0), meta=False).model.named_parameters())
    for key, value in usual.items():
        assert float(wanted[key].std(correction=0)) == pytest.approx(float(value.std(correction=0)), rel=0.25, abs=1e-6)
        assert float(wanted[key].mean()) == pytest.approx(float(value.mean()), abs=0.02)


class Tall(nn.Module):
    """Many modules of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.pow(2).mean()


def test_no_rank_holds_more_than_its_shards_and_a_module() -> None:
    """Live bytes while the shards of ZeRO-3 over four ranks are made."""
    with torch.device("meta"):
        model = Tall()
    program = capture(model, {"x": torch.zeros(8, 64)})
    source, ledger, tracker = SeededValues(program, model, 0), Ledger(), Tracker()
    whole = sum(spec.spec.nbytes for spec in program.params.values())
    module = (64 * 64 + 64) * 4
    shards = []
    with torch.no_grad(), tracker, tracker.booking(ledger):
        for name, spec in program.params.items():
            part = source.shard(f"param:{name}", (S(0),), (4,), (1,))
            shards.append(torch.empty(part.shape).copy_(part))
            assert part.shape[0] == spec.spec.shape[0] // 4
    assert whole == 16 * module
    assert ledger.peak_bytes <= whole // 4 + 1.05 * module


def test_slices_follow_the_layout() -> None:
    full = torch.arange(8 * 6).reshape(8, 6)
    for layout in ((S(0), R), (S(0), S(0)), (S(1), S(0)), (R, S(1))):
        for at in ((0, 0), (1, 0), (1, 1)):
            wanted = weights.cut(full, layout, (2, 2), at)
            assert torch.equal(full[slices((8, 6), layout, (2, 2), at)], wanted)


def saved(folder: Path, drop: str = "") -> dict[str, Tensor]:
    """The net's weights in two files with an index."""
    state = {name: value.clone() for name, value in plans.net().state_dict().items() if name != drop}
    names = list(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, keys in parts.items():
        safetensors_torch.save_file({key: state[key] for key in keys}, folder / file)
    listed = {key: file for file, keys in parts.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return state


@pytest.mark.parametrize("how", ["directory", "index", "file"])
def test_files_are_read_slice_by_slice(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(tmp_path)
    path = {"directory": tmp_path, "index": tmp_path / "model.safetensors.index.json", "file": tmp_path / "one.st"}[how]
    if how == "file":
        safetensors_torch.save_file(state, path)
    read: list[int] = []
    asked = FileValues.shard

    def counting(self: FileValues, *args: Any) -> Tensor:
        found = asked(self, *args)
        read.append(found.numel() * found.element_size())  # its storage is the mapped file
        return found

    monkeypatch.setattr(FileValues, "shard", counting)
    for seed in plans.SEEDS:
        read.clear()
        trainer = trainer_of(seed, meta_net(), weights=path)
        assert all(torch.equal(value, state[name]) for name, value in trainer.params().items())
        outer = [value for rank in trainer.ranks for value in rank.program.outer.values()]
        held = [value.nbytes for value in outer if value.role in ("param", "state")]
        assert sum(read) == sum(held)
    trainer.step(plans.batch())


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    program = plans.program()
    saved(tmp_path, drop="head.bias")
    with pytest.raises(PlanMismatchError, match=r"lacks head.bias \(1 of 6 parameters\); its names look like"):
        values_of(program, meta_net(), tmp_path)
    with pytest.raises(PlanMismatchError, match="there is no"):
        values_of(program, meta_net(), tmp_path / "nothing")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(PlanMismatchError, match=r"bad.safetensors is no readable safetensors file"):
        values_of(program, meta_net(), tmp_path / "bad.safetensors")
    state = {name: torch.zeros(3, 3) for name in plans.net().state_dict()}
    safetensors_torch.save_file(state, tmp_path / "small.safetensors")
    with pytest.raises(PlanMismatchError, match=r"param layers.0.weight: the plan says \(8, 8\), .* has \(3, 3\)"):
        trainer_of(0, meta_net(), weights=tmp_path / "small.safetensors")
