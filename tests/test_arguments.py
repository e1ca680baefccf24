"""Wrong arguments are refused by name, with what was given and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paraplan
from paraplan.api import Plan
from paraplan.ir.errors import (
    CaptureError,
    ClusterError,
    ConstraintError,
    InvalidPlanError,
    ParaplanError,
    PlanMismatchError,
    RuntimeFailure,
)
from paraplan.jobs.files import read_plan


class Net(nn.Module):
    """A layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A loss."""
        return F.mse_loss(self.layer(x), y)


BATCH = {"x": torch.ones(4, 4), "y": torch.ones(4, 2)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return paraplan.compile(Net(), "local:1", example_inputs=BATCH, optimizer="sgd")


def test_batches(plan: Plan) -> None:
    for batches, said in ((BATCH, "one batch"), ([], "empty"), (["x"], "list of str"), (3, "int")):
        with pytest.raises(ConstraintError, match=rf"batches is .*{said}: give a list"):
            plan.check(Net(), batches)  # type: ignore[arg-type]


def test_a_batchs_values(plan: Plan) -> None:
    trainer, x = plan.executable(Net()), BATCH["x"]
    for value, said in (
        (x.tolist(), r"builtins.list, .* give torch.as_tensor"),
        (x.numpy(), r"numpy.ndarray, .* give torch.as_tensor"),
        (x.to_sparse(), r"sparse_coo; give x.to_dense\(\)"),
        (x.to("meta"), "on meta"),
        (x.long(), r"torch.int64, the plan was made for torch.float32; give x.to\(torch.float32\)"),
        (x.double(), r"torch.float64, the plan was made for torch.float32; give x.to\(torch.float32\)"),
        (x.half(), "torch.float16"),
        (x.bool(), "torch.bool"),
        (x.to(torch.complex64), "torch.complex64"),
    ):
        for take in (trainer.step, trainer.eval_step):
            with pytest.raises(PlanMismatchError, match=rf"batch input x is .*{said}"):
                take({**BATCH, "x": value})
    with pytest.raises(RuntimeError, match="dtype"):
        Net()(**{**BATCH, "x": x.double()})
    with pytest.raises(PlanMismatchError, match=r"torch.float64, the plan was made for torch.float32"):
        plan.check(Net(), [{**BATCH, "x": x.double()}])


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_a_batch_as_it_was_captured_is_taken_under_every_precision(precision: str) -> None:
    made = paraplan.compile(Net(), "local:1", example_inputs=BATCH, precision=precision)
    assert torch.isfinite(made.executable(Net()).step(BATCH))


def test_arguments(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"xx")
    (tmp_path / "file").write_text("x")
    trainer, sgd = plan.executable(Net()), torch.optim.SGD

    def compiled(**options: Any) -> Callable[[], object]:
        return lambda: paraplan.compile(Net(), "local:1", example_inputs=BATCH, **options)

    cases: list[tuple[Callable[[], object], type[ParaplanError], str]] = [
        (lambda: trainer.resume(tmp_path), PlanMismatchError, "no checkpoint that can be read"),
        (lambda: trainer.save(tmp_path / "file"), RuntimeFailure, "cannot be written to .*File"),
        (lambda: plan.executable(3), PlanMismatchError, "model is 3, a int"),  # type: ignore[arg-type]
        (lambda: trainer.optimizer("adam"), PlanMismatchError, "the optimizer is 'adam', a str"),  # type: ignore[arg-type]
        (
            lambda: trainer.optimizer(sgd, groups=[{"match": "z("}], lr=0.1),
            PlanMismatchError,
            r"group .*z\(.*\(missing",
        ),
        (lambda: trainer.optimizer(sgd, groups=[{}], lr=0.1), PlanMismatchError, "give {'match': regex"),
        (lambda: paraplan.register_rule(3, 4), ConstraintError, "given: 3, 4"),  # type: ignore[arg-type]
        (compiled(microbatches="2"), ConstraintError, "microbatches='2'"),
        (compiled(mesh="2"), ConstraintError, "mesh=.*'2'"),
        (compiled(params={"nope": "R/R/R"}), ConstraintError, "'nope', which the model does not have.*layer.weight"),
        (compiled(params={"layer.weight": "shard"}), ConstraintError, "'shard': give stored/grad/state"),
        (compiled(batch_dims={"x": 7}), CaptureError, r"batch_dims=.*'x': 7"),
        (lambda: paraplan.fit(Net(), BATCH, "1MiB", check="yes"), ConstraintError, "check='yes'"),  # type: ignore[arg-type]
        (lambda: paraplan.fit(Net, BATCH, "1MiB"), ConstraintError, "not the class Net"),  # type: ignore[arg-type]
    ]
    for call, error, said in cases:
        with pytest.raises(error, match=said):
            call()


def test_an_optimizer_over_other_tensors_is_told(plan: Plan) -> None:
    model = Net()
    trainer = plan.executable(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer.step(BATCH)
    optimizer.step()
    with pytest.warns(UserWarning, match="no optimizer was made with trainer.optimizer"):
        trainer.step(BATCH)


KINDS = {
    "layout torch.sparse_coo; give .*to_dense": lambda: torch.eye(4).to_sparse(),
    "layout torch.sparse_csr; give .*to_dense": lambda: torch.eye(4).to_sparse_csr(),
    "nested tensor; pad it": lambda: torch.nested.nested_tensor([torch.ones(4)] * 4),
    "quantized tensor; give .*dequantize": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.quint8),
    "torch.uint16.*int64": lambda: torch.ones(4, 4, dtype=torch.uint16),
    "torch.float8_e8m0fnu.*float32": lambda: torch.ones(4, 4).to(torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("said", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:The PyTorch API of nested:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_tensors_of_kinds_no_plan_has_are_refused_by_name(said: str, plan: Plan) -> None:
    given = {**BATCH, "x": KINDS[said]()}
    holder = Net()
    holder.register_buffer("held", given["x"])

    def compiled(model: nn.Module, batch: dict[str, Tensor]) -> object:
        return paraplan.compile(model, "local:1", example_inputs=batch, optimizer="sgd")

    for call in (lambda: compiled(Net(), given), lambda: paraplan.fit(Net(), given, "1MiB")):
        with pytest.raises(CaptureError, match=f"input 'x' is .*{said}"):
            call()
    for call in (lambda: compiled(holder, BATCH), lambda: paraplan.fit(holder, BATCH, "1MiB")):
        with pytest.raises(CaptureError, match=f"buffer 'held' is .*{said}"):
            call()
    fitted, trainer = paraplan.fit(Net(), BATCH, "1MiB"), plan.executable(Net())
    for call in (lambda: fitted(**given), lambda: trainer.step(given)):
        with pytest.raises(PlanMismatchError, match="batch input x is .*" + said.split(".*")[0]):
            call()


def test_lazy_modules_are_refused_before_they_are_called() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(CaptureError, match=r"parameter '0.weight' is not initialized"):
        paraplan.compile(model, "local:1", example_inputs={"input": torch.ones(4, 4)}, optimizer="sgd")


def test_a_step_under_another_default_device_draws_its_seed_all_the_same() -> None:
    fitted = paraplan.fit(Net(), BATCH, "1MiB")
    wanted = fitted(**BATCH)
    with torch.device("meta"):
        found = fitted(**BATCH)
        found.backward()
    assert torch.equal(found, wanted)


def test_a_plan_file_of_deep_nesting_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text('{"a":' * 50_000)
    with pytest.raises(InvalidPlanError, match=r"deep.json is truncated or no JSON"):
        read_plan(tmp_path / "deep.json")


@pytest.mark.parametrize(
    ("changed", "fault", "said"),
    [
        ({"cluster": None}, ClusterError, "cluster is a NoneType: give a ClusterSpec"),
        ({"model": len}, CaptureError, "model is a builtin_function_or_method: give an nn.Module"),
        ({"model": Net}, CaptureError, "model is the class Net: give an nn.Module"),
        ({"example_inputs": {"x": BATCH["x"]}}, CaptureError, r"forward of Net takes 'y'.*they are 'x'"),
        ({"example_inputs": BATCH["x"]}, CaptureError, r"forward of Net takes 'y'.*they are 'x'"),
        (
            {"example_inputs": {name: x[:0] for name, x in BATCH.items()}},
            CaptureError,
            r"input 'x' has no rows: its shape is \(0, 4\)",
        ),
        ({"dp": True}, ConstraintError, "dp=True: give a whole number"),
    ],
)
def test_what_is_planned_is_checked_first(changed: dict[str, Any], fault: type[Exception], said: str) -> None:
    given: dict[str, Any] = {"model": Net(), "cluster": "local:1", "example_inputs": BATCH, **changed}
    with pytest.raises(fault, match=said):
        paraplan.compile(given.pop("model"), given.pop("cluster"), **given)
