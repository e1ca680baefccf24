"""Runs that are resumed go on as they would have: under the same plan, others, one device, and `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paraplan as pp
from paraplan.ir.errors import PlanMismatchError
from paraplan.runtime.state.progress import matched, take_groups
from paraplan.runtime.transport.launch import spawn_local

from .resume_worker import GROUPS, KINDS, SCHEDULES, batch, example, go, net

WORKER = str(Path(__file__).with_name("resume_worker.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    assert spawn_local(2, WORKER, [str(made)]) == 0
    assert {path.name for path in made.glob("done*")} == {"done0", "done1"}
    return made


def loaded(folder: Path, kind: str) -> tuple[Any, Any]:
    at = folder / kind.replace(" ", "_")
    return torch.load(f"{at}.pt", weights_only=True), torch.load(f"{at}.wanted.pt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_goes_on_from_two_ranks(folder: Path, kind: str) -> None:
    full, wanted = loaded(folder, kind)
    cls, options = KINDS[kind]
    plan = pp.compile(net().float(), "local:1", example_inputs=example(), precision="fp64")
    trainer = plan.executable(net(), seed=1)
    optimizer = trainer.optimizer(cls, groups=GROUPS, **options)
    schedule = SCHEDULES[kind](optimizer)
    trainer.load_full_training_state(full, optimizer, schedule)
    assert go(trainer, optimizer, schedule, range(3, 6)) == pytest.approx(wanted["losses"], rel=1e-9)
    assert trainer.full_state_dict().keys() == net().state_dict().keys() == wanted["values"].keys()
    for name, value in trainer.full_state_dict().items():
        torch.testing.assert_close(value, wanted["values"][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["cosine", "one cycle"])
def test_fit_goes_on_from_two_ranks_and_is_gone_on_from(folder: Path, kind: str) -> None:
    full, wanted = loaded(folder, kind)
    cls, options = KINDS[kind]

    def fitted() -> tuple[Any, Any, Any]:
        model = pp.fit(net(), batch(0), "1GiB", seed=9)
        named = dict(model.named_parameters())
        biases = [param for name, param in named.items() if name.endswith("bias")]
        rest = [param for name, param in named.items() if not name.endswith("bias")]
        groups = [{"params": biases, **{k: v for k, v in GROUPS[0].items() if k != "match"}}, {"params": rest}]
        optimizer = cls(groups, **options)
        return model, optimizer, SCHEDULES[kind](optimizer)

    def trained(model: Any, optimizer: Any, schedule: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = model(**batch(step))
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return losses

    first, second = fitted(), fitted()
    first[0].load_training_state(full, *first[1:])
    assert trained(*first, range(3, 4)) == pytest.approx(wanted["losses"][:1], rel=1e-9)
    second[0].load_training_state(first[0].training_state(*first[1:]), *second[1:])
    assert trained(*second, range(4, 6)) == pytest.approx(wanted["losses"][1:], rel=1e-9)
    for name, value in second[0].state_dict().items():
        torch.testing.assert_close(value, wanted["values"][name], rtol=1e-9, atol=1e-12)


def test_groups_take_the_options_their_parameters_were_saved_with() -> None:
    saved = [{"params": ["a", "b"], "lr": 0.1, "fused": True}, {"params": ["c"], "lr": 0.2}, {"params": [], "lr": 0.3}]
    ones = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    optimizer = torch.optim.SGD(
        [{"params": ones[2:]}, {"params": ones[:1]}, {"params": ones[1:2]}], lr=torch.tensor(1.0)
    )
    groups = [{"params": ["c"]}, {"params": ["a"]}, {"params": ["b"]}]
    match = matched(groups, saved)
    assert match == [1, 0, 0]
    take_groups([optimizer], saved, match)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.2, 0.1, 0.1])
    assert not any(group["fused"] for group in optimizer.param_groups)
    with pytest.raises(PlanMismatchError, match=r"lr: 0.1 for a, 0.2 for c"):
        matched([{"params": ["a", "c"]}], saved)
    with pytest.raises(PlanMismatchError, match="no options for d"):
        matched([{"params": ["d"]}], saved)


@pytest.mark.parametrize("other", [torch.optim.RMSprop, torch.optim.SGD, torch.optim.Adagrad])
def test_another_class_of_optimizer_is_refused(other: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    model, batch = torch.nn.Linear(4, 4), {"input": torch.ones(4, 4)}
    plan = pp.compile(model, "local:1", example_inputs=batch, loss_fn=lambda y, _: y.square().mean())
    first, then = (plan.executable(torch.nn.Linear(4, 4)) for _ in range(2))
    optimizer = first.optimizer(torch.optim.AdamW, lr=0.1)
    first.step(batch)
    optimizer.step()
    first.save(tmp_path, optimizer)
    with pytest.raises(PlanMismatchError, match=r"another class of optimizer: it has .*betas.*this one"):
        then.resume(tmp_path, then.optimizer(other, lr=0.1))
    then.resume(tmp_path, then.optimizer(torch.optim.Adam, lr=0.1))
