"""The public face in Python: compile, save, load, show, execute."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paraplan as pp
from paraplan import api
from paraplan.baselines.planners import choosing
from paraplan.ir.errors import CaptureError, ConstraintError, InvalidPlanError, PlanMismatchError
from paraplan.ir.sizes import parse_bytes
from paraplan.jobs.checking.check import max_error, relative
from paraplan.planner.best_plan import BestPlan


class Net(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return output.pow(2).mean()


def planned(devices: int = 2, **constraints: object) -> pp.Plan:
    inputs = {"x": torch.zeros(8, 4, 8)}
    pins = {"pp": 1, **constraints}
    return pp.compile(Net(), f"local:{devices}", example_inputs=inputs, loss_fn=loss, **pins)  # type: ignore[arg-type]


def test_save_and_load_give_back_the_plan(tmp_path: Path) -> None:
    plan = planned(dp=2, zero=3)
    plan.save(tmp_path / "plan.json")
    loaded = pp.Plan.load(tmp_path / "plan.json")
    assert loaded.data == plan.data
    assert loaded.programs == plan.programs
    assert loaded.simulate() == plan.simulate()
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "plan.json").read_bytes() == (tmp_path / "again.json").read_bytes()


def test_a_damaged_plan_is_refused_by_name(tmp_path: Path) -> None:
    planned().save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    for kind, each in enumerate(json.loads(text)["program"]["kinds"]):
        for index, op in enumerate(each["graph"]["ops"]):
            for outs in ([], [*op["outs"], None], op["outs"] * 2, [None] * len(op["outs"])):
                data = json.loads(text)
                data["program"]["kinds"][kind]["graph"]["ops"][index]["outs"] = outs
                (tmp_path / "plan.json").write_text(json.dumps(data))
                with pytest.raises(InvalidPlanError, match=r"plan\.json: "):
                    pp.Plan.load(tmp_path / "plan.json")


def test_a_plan_tells_itself(tmp_path: Path) -> None:
    plan = planned(dp=2, zero=3)
    assert plan.prediction.step_s == plan.simulate().step_s
    assert plan.certificate is not None
    assert plan.certificate.bound_s <= plan.prediction.step_s
    assert "ZeRO-3 over dp 100.0 %" in str(plan)
    page = plan._repr_html_()
    for words in ("Net on local:2", "up.weight", "ZeRO-3 over dp", "<svg", "peak memory", "all_gather"):
        assert words in page, words


def test_another_cluster(tmp_path: Path) -> None:
    plan = planned()
    assert plan.on("2xH100").prediction.step_s < plan.prediction.step_s
    assert plan.on("2xH100").certificate is None
    with pytest.raises(PlanMismatchError, match="2 devices"):
        plan.simulate("local:3")


def test_moving_to_unequal_devices_splits_the_ranks_and_back_joins_them() -> None:
    plan = planned()
    mixed = plan.on("1xH100+1xA100-80")
    assert mixed.data.schedule.rank_class == (0, 1) and len(mixed.programs) == 2
    assert mixed.prediction.step_s >= plan.on("1xA100-80:2").prediction.step_s > plan.on("1xH100:2").prediction.step_s
    assert "1 x H100 with 79.1 GiB, 1 x A100-80 with 79.1 GiB" in str(mixed)
    back = mixed.on(plan.data.cluster)
    assert back.data.schedule == plan.data.schedule and back.programs == plan.programs


def test_executable_trains_on_one_process() -> None:
    plan, model = planned(devices=1), Net()
    trainer = plan.executable(model)
    optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
    batch = {"x": torch.randn(8, 4, 8)}
    wanted = loss(model(batch["x"]), batch)
    found = trainer.step(batch)
    torch.testing.assert_close(found, wanted.detach())
    optimizer.step()
    wanted.backward()
    full = trainer.full_state_dict()
    torch.testing.assert_close(full["up.weight"], (model.up.weight - 0.1 * model.up.weight.grad).detach())  # type: ignore[operator]


def test_choices_that_contradict_are_refused_before_capture() -> None:
    told: list[str] = []
    with pytest.raises(ConstraintError, match="dp=3 does not divide"):
        planned(dp=3, progress=told.append)
    assert not told


def test_capture_takes_of_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, search, real = api._captured, choosing.search_room, time.perf_counter
    shift, passed = [0.0], list[float]()

    def slow(*given: Any) -> object:
        shift[0] += 100.0
        return captured(*given)

    def searched(*given: Any) -> BestPlan:
        passed.append(given[-1])
        return search(*given)

    monkeypatch.setattr(time, "perf_counter", lambda: real() + shift[0])
    monkeypatch.setattr(api, "_captured", slow)
    monkeypatch.setattr(choosing, "search_room", searched)
    plan = planned(dp=2)
    assert 100.0 < passed[0] < 160.0 and plan.total_s is not None and plan.total_s > 100.0


def test_executable_refuses_what_the_plan_is_not_for() -> None:
    plan = planned(devices=1)
    with pytest.raises(PlanMismatchError, match=r"up.weight of shape \(32, 8\) where the plan has \(16, 8\)"):
        plan.executable(Net(32))
    with pytest.raises(PlanMismatchError, match="evaluation mode"):
        plan.executable(Net().eval())
    with pytest.raises(PlanMismatchError, match=r"2 devices.*1 process"):
        planned(devices=2).executable(Net())


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_of_parameters_are_refused(register: str) -> None:
    plan, model, batch = planned(devices=1), Net(), {"x": torch.randn(8, 4, 8)}
    trainer = plan.executable(model)
    trainer.step(batch)
    getattr(model.up.weight, register)(lambda x: None)
    with pytest.raises(PlanMismatchError, match=rf"up\.weight.*{register}.*remove it"):
        trainer.step(batch)
    for refused in (plan.executable, lambda hooked: plan.check(hooked, [batch], loss_fn=loss)):
        with pytest.raises(CaptureError, match=rf"up\.weight.*{register}"):
            refused(model)


def test_hugging_face_models_bring_their_batch(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    plan = pp.compile(model, "local:2", batch=4, seq=16, dp=2)
    assert plan.data.model.hf_type == "gpt2"
    assert plan.data.model.hf_settings["n_embd"] == 16
    assert {name: entry.spec.shape for name, entry in plan.data.program.batch.items()} == {
        "input_ids": (4, 16),
        "labels": (4, 16),
    }
    frozen = transformers.GPT2LMHeadModel(config)
    frozen.transformer.wpe.weight.requires_grad_(False)
    assert (
        pp.compile(frozen, "local:2", batch=4, seq=16, dp=2).data.model.hf_type is None
    )  # its configuration does not say so


def test_save_says_why_it_cannot(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlanError, match="cannot write"):
        planned(devices=1).save(tmp_path / "nowhere" / "plan.json")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, path = planned(devices=1), tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()
    whole = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        whole(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InvalidPlanError, match=r"cannot write plan file .*No space left"):
        plan.save(path)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("10kB", 10_000), ("7", 7), (7, 7)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 parsecs", "1e3"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ConstraintError, match="no size"):
        parse_bytes(text)


def test_the_measure() -> None:
    """The contract's: relative to the tensor's own largest value, but not below 1e-5 of the largest of all."""
    one = torch.tensor([1.0, -4.0], dtype=torch.float64)
    tiny = torch.tensor([1e-12], dtype=torch.float64)
    assert max_error({"a": one, "b": tiny}, {"a": one, "b": tiny}) == (0.0, "")
    assert max_error({"a": one + 0.4}, {"a": one})[0] == pytest.approx(0.1)
    assert max_error({"a": one, "b": 3 * tiny}, {"a": one, "b": tiny}) == (pytest.approx(2e-12 / 4e-5), "b")
    assert max_error({"a": one * float("nan")}, {"a": one})[0] == float("inf")
    assert relative(float("nan"), 1.0) == float("inf")
