"""Options are declared once: struct, keywords, checks, reference and command line agree, by construction or by test."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
import pytest
import torch
import typer
from torch import Tensor, nn
from typer.main import get_command

import paraplan
from paraplan import cli
from paraplan.api import Buckets, Plan
from paraplan.ir.errors import ConstraintError, InvalidPlanError
from paraplan.ir.options import (
    Option,
    Options,
    at_least,
    check_keywords,
    fields_of,
    from_keywords,
    keywords_of,
    takes_options,
)
from paraplan.jobs.run_options import ExecutionKeywords, ExecutionOptions, RunOptions
from paraplan.plan_options import CompileOptions, FitKeywords, FitOptions, JobOptions
from paraplan.planner.alternatives.filed_pins import constraints_from
from paraplan.planner.constraints import Constraints
from paraplan.planner.options.keywords import ConstraintKeywords
from paraplan.planner.options.values import OFFLOAD, parse_mesh
from paraplan.terminal.command_options import with_options

ROOT = Path(__file__).parents[1]
PYTHON_ALONE = {"params", "example_inputs", "loss_fn", "loss", "batch_dims", "progress"}
KEYWORDS: list[tuple[Any, tuple[type[Options], ...], Callable[..., Any]]] = [
    (CompileOptions, (JobOptions, Constraints), paraplan.compile),
    (FitKeywords, (FitOptions,), paraplan.fit),
    (ExecutionKeywords, (ExecutionOptions,), Plan.executable),
]


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        return self.down(self.up(x)).square().mean()


@pytest.mark.parametrize(("keywords", "kinds", "function"), KEYWORDS)
def test_every_option_is_a_keyword_with_type_default_and_reference(
    keywords: Any, kinds: tuple[type[Options], ...], function: Callable[..., Any]
) -> None:
    fields = {word: field for kind in kinds for word, field in fields_of(kind).items()}
    given, shown = get_type_hints(keywords), inspect.signature(function).parameters
    assert set(given) == set(fields)
    for word, field in fields.items():
        assert field.option.reference, word
        assert shown[word].default == field.default and shown[word].annotation == given[word]
        assert f"    {word}: " in (function.__doc__ or "")
        taken = field.type
        if field.option.convert is not None:
            (first, *_) = inspect.signature(field.option.convert, eval_str=True).parameters.values()
            taken = first.annotation
        assert set(get_args(given[word] | None)) == set(get_args(taken | None)), word
        assert field.default is not None or given[word] == given[word] | None, f"{word} may be left out as None"


def test_pins_are_the_keywords_of_constraints() -> None:
    assert set(get_type_hints(ConstraintKeywords)) == set(fields_of(Constraints))


def test_every_option_is_on_the_command_line() -> None:
    commands: Any = get_command(cli.app)
    plan = {param.name: param for param in commands.commands["plan"].params}
    for word, field in {**fields_of(Constraints), **fields_of(JobOptions)}.items():
        assert bool(field.option.help) == (word not in PYTHON_ALONE), word
        if field.option.help:
            assert plan[word].help == field.option.help and plan[word].rich_help_panel == field.option.group != ""
            assert plan[word].default == (field.default or plan[word].default)
    run = {param.name for param in commands.commands["run"].params}
    assert set(fields_of(RunOptions)) <= run


def stages(text: str) -> int:
    return int(text.removesuffix("stages"))


class More(Constraints, frozen=True, kw_only=True):
    """With another option."""

    max_stages: Annotated[
        int | None, Option("Stages at most.", "how many stages.", metavar="N", parse=stages, check=at_least(1))
    ] = None


class Keywords(ConstraintKeywords, total=False):
    """With its keyword."""

    max_stages: int | None


def test_one_field_more_is_an_option_everywhere() -> None:
    @takes_options(Keywords, More)
    def planned(**options: Any) -> More:
        """Plan.

        Raises:
            TypeError: no such option.
        """
        check_keywords("planned", options, More)
        return from_keywords(More, options)

    app = typer.Typer()
    seen: dict[str, Any] = {}

    @app.command()
    @with_options(More)
    def command(name: str, *, last: bool = False, **options: Any) -> None:
        seen.update(options, name=name, last=last)

    assert inspect.signature(planned).parameters["max_stages"].annotation == int | None
    assert "    max_stages: how many stages.\nRaises:" in (planned.__doc__ or "")
    assert planned(max_stages=3).max_stages == 3
    get_command(app)(["x", "--max-stages", "4stages", "--dp", "2", "--last"], standalone_mode=False)
    assert (seen["max_stages"], seen["dp"], seen["name"], seen["last"]) == (4, 2, "x", True)
    assert seen["overlap"] is None and seen["reduce_dtype"] is None
    with pytest.raises(ConstraintError, match="max_stages=0: must be at least 1"):
        planned(max_stages=0)
    with pytest.raises(TypeError, match=r"planned\(\) has no option 'max_stage'; did you mean max_stages"):
        planned(max_stage=3)


def test_values_are_converted_and_checked_by_their_fields() -> None:
    given = from_keywords(Constraints, {"mesh": [2, 4], "memory": "1GiB", "delayed_update": True, "offload": None})
    assert given == Constraints(mesh=(2, 4), memory_bytes=1 << 30, delayed_update=40)
    assert keywords_of(given) == {"mesh": (2, 4), "memory": 1 << 30, "delayed_update": 40}
    assert msgspec.structs.replace(given, stages=[[0, 2], [2, 4]]).stages == ((0, 2), (2, 4))
    for pins, message in (
        ({"tp": "2"}, "tp='2': give a whole number"),
        ({"stages": [(0, 1, 2)]}, "give the segments"),
        ({"pp": 0}, "pp=0: must be at least 1"),
        ({"memory": 0}, "memory=0: must be more than 0 bytes"),
        ({"offload": "tape"}, f"offload='tape': one of {', '.join(OFFLOAD)}"),
    ):
        with pytest.raises(ConstraintError, match=message):
            from_keywords(Constraints, pins)


def test_a_mesh_is_read_as_options_and_as_plans_say_it() -> None:
    assert parse_mesh("2,4") == parse_mesh("2x4") == (2, 4) and parse_mesh("16") == (16,)
    assert parse_mesh("2,x") == "2,x" and parse_mesh("a x b") == "a x b"


KINDS = (Constraints, JobOptions, FitOptions, ExecutionOptions, RunOptions)
VALUES: tuple[Any, ...] = (
    *(object(), b"x", 1j, True, False, -3, 0, 1, 2, 10**30, -0.5, 1.5, float("nan"), float("inf"), "", "x", "2", "nan"),
    *((), [], {}, (2,), (1, 1, 1, 2), (0, -1), (2.0,), ("a",), [[]], ((0, 1),), ((0, "a"),), ((0, 1, 2),), (None,)),
    *({"a": "x"}, {"a": 3}, {3: "R"}, {"a": None}, {None: 1}, {"w": "R/R/R"}, [("w", "R/R/R")], "none", "auto", "host"),
)


@pytest.mark.parametrize(("kind", "word"), [(kind, word) for kind in KINDS for word in fields_of(kind)])
def test_every_value_is_of_its_type_or_refused_by_name(kind: type[Options], word: str) -> None:
    """By keyword and as a struct alike; and the pins of a file are what was pinned."""
    field, refused = fields_of(kind)[word], 0
    for value in VALUES:
        try:
            made = kind(**{field.name: value})
        except ConstraintError as fault:
            assert str(fault).startswith(word) and len(str(fault)) > len(f"{word}={value!r}: "), fault
            with pytest.raises(ConstraintError) as by_keyword:
                from_keywords(kind, {word: value})
            assert str(by_keyword.value) == str(fault)
            refused += 1
            continue
        assert from_keywords(kind, {word: value}) == made
        if isinstance(made, Constraints):
            assert constraints_from(json.loads(json.dumps(made.as_data))) == made
    assert refused > len(VALUES) / 3
    assert getattr(kind(**{field.name: None}), field.name) == field.default


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"compiled": "no"}, "compiled='no': give True or False"),
        ({"tp": 2, "sp": "no"}, "sp='no': give True or False"),
        ({"accumulate": 1}, "accumulate=1: give True or False"),
        ({"delayed_update": 1.5}, "delayed_update=1.5: give a number of steps"),
        ({"memory": 1.5}, "memory=1.5: give bytes"),
        ({"reserve": "x"}, "reserve='x': give bytes"),
        ({"mesh": ()}, r"mesh=\(\): a mesh has 1 to 3 axes, not 0"),
        ({"mesh": (1, 1, 1, 2)}, r"mesh=\(1, 1, 1, 2\): a mesh has 1 to 3 axes, not 4"),
        ({"params": "device"}, r"params='device': .*stored is place_params\), e.g. params=\{"),
        ({"dynamic": "tau"}, "dynamic='tau': give names of attributes"),
        ({"batch": 4}, "batch=4 beside example_inputs"),
        ({"place_params": "host", "place_states": "device"}, "give place_states='host', or place_params='device'"),
    ],
)
def test_calls_are_refused_in_words_that_work(pins: Any, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        paraplan.compile(Net(), "local:2", example_inputs={"x": torch.zeros(8, 8)}, **pins)


@pytest.mark.parametrize(
    "pins", [{"sp": "no"}, {"dp": 0}, {"dp": "2"}, {"mesh": [1, 1, 1, 2]}, {"delayed_update": 1.5}]
)
def test_pins_of_a_file_are_checked_as_calls_are(pins: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlanError, match="the plan's pins are none"):
        constraints_from(pins)


def test_constraints_and_keywords_are_joined_or_refused() -> None:
    batch = {"x": torch.zeros(8, 8)}
    joined = paraplan.compile(Net(), "local:2", example_inputs=batch, constraints=Constraints(dp=2), zero=3, tp=None)
    assert joined.data == paraplan.compile(Net(), "local:2", example_inputs=batch, dp=2, zero=3).data
    with pytest.raises(ConstraintError, match=r"sp=False beside Constraints\(sp=True\): they contradict"):
        paraplan.compile(Net(), "local:2", example_inputs=batch, constraints=Constraints(tp=2, sp=True), sp=False)
    with pytest.raises(ConstraintError, match=r"memory='1GiB' beside Constraints\(memory_bytes=5\)"):
        paraplan.compile(Net(), "local:2", constraints=Constraints(memory_bytes=5), memory="1GiB")
    with pytest.raises(TypeError, match=r"\{'tp': 2\} is a dict; give a Constraints"):
        paraplan.compile(Net(), "local:2", constraints={"tp": 2})  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="optimizer='lion': one of sgd"):
        paraplan.compile(Net(), "local:2", optimizer="lion")
    with pytest.raises(TypeError, match=r"compile\(\) has no option 'memry'; did you mean memory\?"):
        paraplan.compile(Net(), "local:2", memry="1GiB")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"executable\(\) has no option 'sed'; did you mean seed"):
        joined.executable(Net(), sed=1)  # type: ignore[call-arg]
    shapes = [
        {"example_inputs": batch},
        {"example_inputs": {"x": torch.zeros(16, 8)}, "constraints": Constraints(zero=0)},
    ]
    buckets = Buckets.compile(Net(), "local:2", shapes, constraints=Constraints(dp=2))
    assert {plan.stages[0].mesh.axes for plan in buckets.plans} == {("dp",)}


CALLS = """
import paraplan
from torch import nn

net = nn.Linear(2, 2)
plan = paraplan.compile(net, "local:2", tp=2, memory="12GiB", stages=[(0, 4), (4, 8)], mesh=[2], delayed_update=True)
paraplan.compile(model=net, cluster="local:2", constraints=paraplan.Constraints(tp=2), pp="auto", optimizer="sgd")
paraplan.fit(net, {}, "1GiB", seed=None, offload=True)
paraplan.compile(net, "local:2", tp="2")  # refused
paraplan.compile(net, "local:2", memry=3)  # refused
paraplan.compile(net, "local:2", pp="always")  # refused
paraplan.fit(net, {}, "1GiB", offload="host")  # refused
plan.executable(net, sed=3)  # refused
paraplan.Constraints(dp="x")  # refused
"""
SETTINGS = """
[mypy]
[mypy-torch.*,ortools.*,pulp.*,networkx.*,transformers.*,safetensors.*]
follow_imports = skip
[mypy-paraplan.*]
ignore_errors = True
"""


def test_a_type_checker_checks_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    asked = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "calls.py"]
    env = {"MYPYPATH": str(ROOT), "PATH": ""}
    told = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True, check=False).stdout
    found = {int(line.split(":")[1]) for line in told.splitlines() if ": error: " in line}
    wanted = {number for number, line in enumerate(CALLS.splitlines(), 1) if line.endswith("# refused")}
    assert found == wanted, told
    assert (ROOT / "paraplan" / "py.typed").exists()


def test_the_stub_names_what_the_package_does() -> None:
    stub = ast.parse((ROOT / "paraplan" / "__init__.pyi").read_text())
    named = {
        alias.asname: f"{node.module}" for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert named == paraplan._PUBLIC
