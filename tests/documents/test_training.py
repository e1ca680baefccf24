"""docs/training.md: its script is examples/train.py, and that trains as the same loop without paraplan does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

import paraplan
from examples import train
from paraplan.runtime.transport.launch import spawn_local

from .fences import ROOT, fences

EPOCHS = 4


def eager() -> dict[str, torch.Tensor]:
    """The loop on one device."""
    model, _ = train.factory()
    plain = [x for name, x in model.named_parameters() if name.endswith("bias") or name.startswith("norm")]
    decayed = [x for x in model.parameters() if all(x is not other for other in plain)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
    schedule = LambdaLR(optimizer, train.warm_up_then_cosine)
    data = train.spirals(500, seed=1)
    for epoch in range(EPOCHS):
        for batch in train.batches(data, epoch):
            model(**batch)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.state_dict()


def test_the_page_has_the_script() -> None:
    assert (ROOT / "examples" / "train.py").read_text() in [
        fence.text for fence in fences(ROOT / "docs" / "training.md")
    ]


def test_the_script_trains_and_resumes_under_another_plan(tmp_path: Path) -> None:
    for name, pins in {"zero3": {"dp": 2, "zero": 3}, "tensor": {"tp": 2}}.items():
        model, batch = train.factory()
        paraplan.compile(model, "local:2", example_inputs=batch, **pins).save(tmp_path / f"{name}.json")
    checkpoint, exported = str(tmp_path / "checkpoint"), tmp_path / "model.pt"
    for arguments in (
        [str(tmp_path / "zero3.json"), "--epochs", "2", "--save", checkpoint],
        [str(tmp_path / "tensor.json"), "--epochs", "2", "--resume", checkpoint, "--export", str(exported)],
    ):
        assert spawn_local(2, "examples.train", arguments) == 0
    found, wanted = torch.load(exported), eager()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-3)
