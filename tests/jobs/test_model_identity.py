"""A plan, its file and its model belong together: another model or loss function, an edited program are refused."""

from __future__ import annotations

import decimal
import importlib.util
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paraplan
from paraplan.capture import capture
from paraplan.ir.errors import InvalidPlanError, PlanMismatchError
from paraplan.ir.model.digests import model_fingerprint, refuse_other_model
from paraplan.ir.plan import Plan
from paraplan.jobs.files import EDITED, encode_plan
from paraplan.jobs.model_identity import check_model
from paraplan.runtime.state.progress import check_header, header

SOURCE = '''
"""A model of one attention layer."""
import torch
from torch import nn
from torch.nn import functional as F

SCALE = 1.0


def activate(x):
    """What follows the projection."""
    return F.relu(x)


class Net(nn.Module):
    drop = 0.0

    def __init__(self, heads=2, eps=1e-5):
        super().__init__()
        self.heads, self.eps, self.offset = heads, eps, torch.tensor([0.1, 0.2])
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        """A loss."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        hidden = activate(self.out(mixed)) * SCALE + self.offset.sum()
        hidden = self.norm(hidden.flatten(0, 1))
        return (hidden / (hidden.pow(2).mean() + self.eps)).mean() * 0.3
'''
GIVEN = {"x": torch.randn(4, 3, 8)}


def _load(folder: Path, source: str = SOURCE, name: str = "made") -> Any:
    """A module of some source, as another process would have it."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of the source as it is."""
    model = _load(tmp_path_factory.mktemp("made")).Net()
    return paraplan.compile(model, "local:1", example_inputs=GIVEN).data


def _replaced(old: str, new: str) -> str:
    assert old in SOURCE
    return SOURCE.replace(old, new)


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (SOURCE, {"heads": 4}, r"heads of Net 4 where the plan has 2"),
        (SOURCE, {"eps": 1e-3}, r"eps of Net 0.001 where the plan has 1e-05"),
        (_replaced("F.relu", "F.gelu"), {}, r"other code of activate"),
        (_replaced("* 0.3", "* 0.4"), {}, r"other code of Net.forward"),
        (_replaced("[0.1, 0.2]", "[0.1, 0.3]"), {}, r"offset of Net tensor float32\[2\]"),
        (_replaced("nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)"), {}, "no parameter out.bias"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    plan: Plan, tmp_path: Path, source: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanMismatchError, match=words):
        check_model(plan, _load(tmp_path, source).Net(**options))


@pytest.mark.parametrize(
    "source",
    [
        SOURCE,
        _replaced("mixed", "attended"),
        _replaced('"""A loss."""', '"""The loss of a batch."""  # said better'),
        _replaced("    drop = 0.0\n", "    drop = 0.0\n\n    def generate(self, x):\n        return self(x) + 1\n"),
        _replaced("    return F.relu(x)", "    y = F.relu(x)\n    return y"),
    ],
)
def test_the_same_model_written_elsewhere_or_otherwise_is_taken(plan: Plan, tmp_path: Path, source: str) -> None:
    check_model(plan, _load(tmp_path, source, "elsewhere").Net())


def test_values_dtypes_and_devices_are_no_other_model(plan: Plan, tmp_path: Path) -> None:
    module = _load(tmp_path)
    trained = module.Net()
    trained(**GIVEN).backward()
    torch.optim.SGD(trained.parameters(), lr=0.1).step()
    loaded = module.Net()
    loaded.load_state_dict(trained.state_dict())
    with torch.device("meta"):
        empty = module.Net()
    for model in (trained, loaded, module.Net().double(), module.Net().bfloat16(), empty):
        check_model(plan, model)
    with pytest.raises(PlanMismatchError, match="mode"):
        check_model(plan, module.Net().eval())


def _made_loss(factor: float) -> Callable[..., Any]:
    return lambda out, batch: out.mean() * factor


class Listed(nn.Module):
    """Its description names the dtypes and devices of its parameters."""

    def __init__(self, inner: int = 3) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(4, inner)), nn.Parameter(torch.ones(inner, 4))])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.ones(4))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.listed
        return (x @ first @ second + self.named["bias"]).square().mean()


def test_dtypes_and_devices_of_listed_parameters_are_no_other_model() -> None:
    plan = paraplan.compile(Listed(), "local:2", example_inputs={"x": torch.ones(4, 4)}, precision="fp64").data
    with torch.device("meta"):
        check_model(plan, Listed())
    check_model(plan, Listed().double())
    with pytest.raises(PlanMismatchError, match=r"shape \(4, 2\) where the plan has \(4, 3\)"):
        check_model(plan, Listed(2))


def test_another_loss_function_is_refused() -> None:
    model, given = nn.Linear(4, 4), {"input": torch.randn(8, 4)}
    plan = paraplan.compile(model, "local:1", example_inputs=given, loss_fn=_made_loss(1.0))
    trainer_of = plan.executable
    trainer_of(model)
    trainer_of(model, loss_fn=_made_loss(1.0))
    for other, words in (
        (lambda out, batch: out.sum(), "loss function"),
        (nn.MSELoss(), r"loss function MSELoss\(\)"),
    ):
        with pytest.raises(PlanMismatchError, match=words):
            trainer_of(model, loss_fn=other)


class Held(nn.Module):
    """A layer, and what a function makes of something held."""

    def __init__(self, held: Any, read: Callable[[Any], Any], hooks: int = 0) -> None:
        super().__init__()
        self.layer, self.held, self.read = nn.Linear(4, 4), held, read
        for _ in range(hooks):
            self.layer.register_forward_hook(lambda module, args, out: out * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        return self.layer(x).mean() * self.read(self.held)


def _scaling(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


class Scaled:
    """A loss function with an attribute."""

    def __init__(self, factor: float) -> None:
        self.factor, self.seen = factor, [factor]

    def __call__(self, out: torch.Tensor, batch: Any) -> torch.Tensor:
        """Its loss."""
        return out * self.factor


class Robust(nn.Module):
    """One whose part has an option that it does not print."""

    def __init__(self, delta: float) -> None:
        super().__init__()
        self.loss = nn.HuberLoss(delta=delta)

    def forward(self, out: torch.Tensor, batch: Any) -> torch.Tensor:
        """Its loss."""
        return self.loss(out, out * 3)


MADE: dict[str, Callable[[int], tuple[nn.Module, Any]]] = {
    "hooks": lambda k: (Held(1.0, float, hooks=k), None),
    "closure": lambda k: (Held(_scaling(k), lambda held: held(1.0)), None),
    "namespace": lambda k: (Held(types.SimpleNamespace(k=k), lambda held: held.k), None),
    "slice": lambda k: (Held(slice(k), lambda held: torch.ones(4)[held].sum()), None),
    "range": lambda k: (Held(range(k), len), None),
    "Decimal": lambda k: (Held(decimal.Decimal(k), float), None),
    "loss closure": lambda k: (Held(1.0, float), _made_loss(k)),
    "loss object": lambda k: (Held(1.0, float), Scaled(k)),
    "loss module": lambda k: (Held(1.0, float), Robust(k / 1000)),
}


@pytest.mark.parametrize("what", MADE)
def test_what_functions_and_objects_hold_is_compared(what: str) -> None:
    model, loss_fn = MADE[what](1)
    plan = paraplan.compile(model, "local:1", example_inputs={"x": torch.randn(8, 4)}, loss_fn=loss_fn)
    check_model(plan.data, *MADE[what](1))
    with pytest.raises(PlanMismatchError, match="another model"):
        check_model(plan.data, *MADE[what](2))


def test_what_a_loss_holds_and_does_not_read_is_no_other_loss() -> None:
    loss_fn, other = Scaled(1.0), Scaled(1.0)
    other.seen.append(2.0)
    model = Held(1.0, float)
    plan = paraplan.compile(model, "local:1", example_inputs={"x": torch.randn(8, 4)}, loss_fn=loss_fn)
    check_model(plan.data, model, other)


def test_an_edited_program_is_refused(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(plan))
    assert paraplan.Plan.load(path).data == plan
    text = path.read_text()
    edited = text.replace(",0.3]", ",0.4]")
    assert edited != text
    path.write_text(edited)
    with pytest.raises(InvalidPlanError, match=r"plan.json: its program is not the one that was saved"):
        paraplan.Plan.load(path)
    found = json.loads(text)
    for change, error, words in (
        ({"version": 1}, PlanMismatchError, "plan version 1, .* Plan again"),
        ({"program_digest": "0"}, InvalidPlanError, "program_digest differs"),
    ):
        path.write_text(json.dumps({**found, **change}))
        with pytest.raises(error, match=words):
            paraplan.Plan.load(path)
    del found["program_digest"]
    path.write_text(json.dumps(found))
    with pytest.raises(InvalidPlanError, match="program_digest"):
        paraplan.Plan.load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"reduce_dtype": "fp32"},
        {"bundle_bytes": 0},
        {"plan_digest": None},
        {"made_with": {}},
        {"prediction": "faster"},
        {"certificate": "tighter"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_plan_that_was_edited_is_priced_anew(change: dict[str, Any], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    x = torch.randn(8, 8)
    made = paraplan.compile(
        model,
        "2xH100",
        example_inputs=(x,),
        loss_fn=lambda out, batch: out.square().mean(),
        precision="bf16",
        reduce_dtype="bf16",
        dp=2,
        zero=0,
    )
    path = tmp_path / "plan.json"
    made.save(path)
    assert paraplan.Plan.load(path).data == made.data
    found = json.loads(path.read_text())
    for key, value in change.items():
        if value is None:
            del found[key]
        elif key == "prediction":
            found[key]["step_s"] /= 2
        elif key == "certificate":
            found[key]["bound_s"] *= 2
        else:
            found[key] = value
    path.write_text(json.dumps(found))
    loaded = paraplan.Plan.load(path)
    assert loaded.certificate is None and loaded.data.notes[-1] == EDITED
    assert loaded.prediction.step_s == loaded.simulate().step_s
    assert (loaded.prediction == made.prediction) == (change.keys().isdisjoint({"reduce_dtype", "bundle_bytes"}))
    loaded.save(path)
    again = paraplan.Plan.load(path).data
    assert again == loaded.data and again.notes.count(EDITED) == 1


def test_the_fingerprint_of_a_checkpoint(plan: Plan, tmp_path: Path) -> None:
    saved = json.loads(json.dumps(model_fingerprint(plan.program)))
    module = _load(tmp_path)
    for model, precision, rows in ((module.Net(), "fp64", 8), (module.Net().bfloat16(), "bf16", 4)):
        refuse_other_model(saved, capture(model, {"x": torch.randn(rows, 3, 8)}, precision=precision))
    for other, words in (
        (module.Net(heads=4), r"differ in :heads \(2 there, 4 here\)"),
        (_load(tmp_path, _replaced("nn.Linear(8, 24)", "nn.Linear(8, 24, bias=False)"), "o").Net(), "parameters and"),
    ):
        with pytest.raises(PlanMismatchError, match=words):
            refuse_other_model(saved, capture(other, GIVEN))
    retold = _load(tmp_path, _replaced("F.relu", "F.gelu"), "other").Net()
    assert refuse_other_model(saved, capture(retold, GIVEN)) == ["activate"], (
        "code may have been tidied: told, not refused"
    )


def test_a_training_state_of_another_model_is_refused(plan: Plan, tmp_path: Path) -> None:
    saved, module = header(plan.program), _load(tmp_path)
    check_header(capture(module.Net().bfloat16(), {"x": torch.randn(4, 3, 8)}, precision="bf16"), saved)
    with pytest.raises(PlanMismatchError, match=r"another model.*heads \(2 there, 4 here\)"):
        check_header(capture(module.Net(heads=4), GIVEN, precision="fp32"), saved)
    retold = capture(_load(tmp_path, _replaced("F.relu", "F.gelu"), "other").Net(), GIVEN, precision="fp32")
    with pytest.warns(UserWarning, match="code of activate is not what it was"):
        check_header(retold, saved)
