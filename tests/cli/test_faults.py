"""Bad input: one message that says what and what to do, exit code 2, no traceback."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
import yaml

import paraplan
import paraplan.__main__ as command_module
from paraplan.ir.errors import InfeasibleError
from paraplan.ir.machine.cluster import ClusterSpec

from . import zoo


def refuse(outcome: Any, *words: str) -> None:
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    for word in words:
        assert word in outcome.err, outcome.err


NET = ("plan", "zoo:net", "local:2")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("plan", "nowhere:net", "local:2", "-o", "no/x.json"), ("cannot write plan file 'no/x.json'", "give a file")),
        (("plan", "nowhere:net", "local:2"), ("cannot import 'nowhere'", "No module named")),
        (("plan", "zoo:nett", "local:2"), ("no attribute 'nett'", "did you mean net")),
        (("plan", "zoo:constant", "local:2"), ("no function", "constant")),
        (("plan", "zoo:number", "local:2"), ("returned (int)", "(model, example_inputs, loss_fn)")),
        (("plan", "zoo:fails", "local:2"), ("ValueError: no luck",)),
        (("plan", "zoo:bare", "local:2"), ("example_inputs",)),
        (("plan", "gpt2", "local:2"), ("hf:gpt2", "package.module:factory")),
        ((*NET, "--set", "n_layer=2"), ("--set belongs to hf:",)),
        ((*NET, "--batch", "4"), ("--batch", "zoo:net")),
        (("plan", "zoo:net", "local:3", "--dp", "3"), ("batch of 8", "3")),
        ((*NET, "--microbatches", "3"), ("--microbatches 3 does not divide a batch of 8", "give 2 or 4")),
        ((*NET, "--mesh", "a,b"), ("--mesh a,b", "--mesh 2,4")),
        ((*NET, "--mesh", "3"), ("3 places for 2 devices",)),
        ((*NET, "--optimizer", "lion"), ("--optimizer lion", "adamw")),
        ((*NET, "--precision", "fp4"), ("'fp4'", "fp64", "fp8")),
        ((*NET, "--reserve", "lots"), ("--reserve lots", "2GiB")),
        ((*NET, "--zero", "4"), ("--zero 4",)),
        ((*NET, "--dp", "two"), ("--dp two: give a whole number",)),
        ((*NET, "--memory", "1.5"), ("--memory 1.5: give bytes",)),
        ((*NET, "--mesh", "1,1,2,1,1"), ("--mesh 1,1,2,1,1: a mesh has 1 to 3 axes",)),
        ((*NET, "--delayed-update", "40"), ("--delayed-update 40", "give --states host and --update host")),
        ((*NET, "--states", "device", "--params", "host"), ("give --states host, or --params device",)),
        ((*NET, "--nonsense"), ("--nonsense",)),
        (("plan", "zoo:net", "local:0"), ("devices_per_node", "0")),
        (("plan", "zoo:net", "8xNOPE"), ("no device 'NOPE'", "H100")),
        (("plan", "zoo:net", "8xH10"), ("no device 'H10'", "did you mean H100")),
        (("plan", "zoo:net", "1xH100+1xMI300X"), ("NVIDIA and AMD",)),
        (("plan", "zoo:net", "1xH100+local:1"), ("'local:1' stands alone",)),
        (("plan", "zoo:net", "nowhere.yaml"), ("no cluster file 'nowhere.yaml'",)),
        (("show", "nowhere.json"), ("cannot read plan file 'nowhere.json'",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_plan_refuses(here: Path, command: Any, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    refuse(command(*args), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c | {"colour": "red"}, ("unknown field `colour`",)),
        (lambda c: _in_group(c, in_node={"bytes_per_s": -1.0, "latency_s": 0.0}), ("in_node.bytes_per_s", "-1.0")),
        (
            lambda c: _in_group(c, devices_per_node=0),
            ("groups[0].devices_per_node", "not 0", "paraplan cluster schema"),
        ),
        (lambda c: _in_group(c, in_node={"bytes_per_s": 1.0, "latency_s": -1.0}), ("in_node.latency_s", "-1.0")),
        (
            lambda c: _in_group(c, in_node={"bytes_per_s": float("nan"), "latency_s": 0.0}),
            ("in_node.bytes_per_s", "nan"),
        ),
        (lambda c: _in_device(c, boost_share=1e12), ("groups[0].device.boost_share is 1e+12", "at most 4")),
        (lambda c: _in_group(c, node=2), ("unknown field `node`", "did you mean nodes", "$.groups[0]")),
        (lambda c: _in_group(c, nodes=2), ("several nodes (groups[0])", "between_nodes", "bytes_per_s")),
        (lambda c: {"name": "x"}, ("missing required field `groups`",)),
    ],
)
def test_cluster_files(here: Path, command: Any, change: Any, words: tuple[str, ...]) -> None:
    (here / "cluster.yaml").write_text(yaml.safe_dump(change(msgspec.to_builtins(ClusterSpec.local(2)))))
    refuse(command("plan", "zoo:net", "cluster.yaml"), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("groups:\n  - {nodes: 2\n", ("cluster.yaml: line 3, column 1: expected ',' or '}'", "line 2)")),
        ("name: x\n\tgroups: 3\n", ("cluster.yaml: line 2, column 1", "cannot start any token")),
        ("name: \x00", ("cluster.yaml: unacceptable character", "position 6")),
    ],
)
def test_cluster_files_that_are_none(here: Path, command: Any, text: str, words: tuple[str, ...]) -> None:
    (here / "cluster.yaml").write_text(text)
    outcome = command("plan", "zoo:net", "cluster.yaml")
    refuse(outcome, *words)
    assert len(outcome.err.splitlines()) == 2, outcome.err


def _in_group(cluster: Any, **fields: Any) -> Any:
    return cluster | {"groups": [cluster["groups"][0] | fields]}


def _in_device(cluster: Any, **fields: Any) -> Any:
    return _in_group(cluster, device=cluster["groups"][0]["device"] | fields)


def test_a_model_that_fits_nowhere(here: Path, command: Any) -> None:
    cluster = msgspec.to_builtins(ClusterSpec.local(2, memory_bytes=512))
    (here / "cluster.json").write_text(json.dumps(cluster))
    refuse(command("plan", "zoo:net", "cluster.json"), "missing", "largest tensor")


def test_what_fits_nowhere_is_proved_whatever_is_pinned() -> None:
    model, batch, loss = zoo.net()  # type: ignore[no-untyped-call]
    for pins in ({}, {"dp": 2}):
        with pytest.raises(InfeasibleError, match="no sharding fits"):
            paraplan.compile(model, "local:2", example_inputs=batch, loss_fn=loss, memory="1KiB", **pins)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], ("truncated",)),
        (lambda text: "nonsense", ("no JSON",)),
        (lambda text: "[1, 2]", ("no plan file",)),
        (lambda text: json.dumps(json.loads(text) | {"version": 99, "novelty": 1}), ("newer paraplan", "version 99")),
        (lambda text: json.dumps(json.loads(text) | {"novelty": 1}), ("unknown field `novelty`",)),
        (lambda text: json.dumps(json.loads(text) | {"num_microbatches": 3}), ("does not divide into 3",)),
    ],
)
def test_plan_files(plan_file: Path, command: Any, change: Any, words: tuple[str, ...]) -> None:
    plan_file.write_text(change(plan_file.read_text()))
    for name in ("show", "simulate", "run"):
        refuse(command(name, "plan.json"), *words)


def test_run_refuses_what_does_not_belong(plan_file: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(command("run", "plan.json"), "--model package.module:factory")
    refuse(command("run", "plan.json", "--model", "zoo:wider"), "another model", "up.weight", "(32, 8)", "(16, 8)")
    refuse(command("run", "plan.json", "--model", "zoo:net", "--steps", "0"), "--steps 0")
    refuse(command("run", "plan.json", "--model", "zoo:net", "--data", "."), "--data", "input_ids")
    refuse(command("simulate", "plan.json", "--cluster", "local:4"), "2 devices", "local:4 has 4")
    monkeypatch.setenv("RANK", "0")  # as if torchrun had started one process
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    try:
        refuse(command("run", "plan.json", "--model", "zoo:net"), "2 devices", "1 process")
    finally:
        if dist.is_initialized():  # the job of one, which others are not to find joined
            dist.destroy_process_group()


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_an_interrupt_before_a_plan_says_so(here: Path, seconds: float) -> None:
    args = [sys.executable, "-m", "paraplan", "plan", "zoo:net", "local:2", "-o", "x.json"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(here), str(Path(paraplan.__file__).parents[1])))}
    with subprocess.Popen(args, stderr=subprocess.PIPE, text=True, env=env) as planning:
        assert planning.stderr is not None and "loading" in planning.stderr.readline()
        time.sleep(seconds)
        planning.send_signal(signal.SIGINT)
        said = planning.stderr.read()
    assert planning.returncode == 130 and "interrupted before a plan was found" in said
    assert "Traceback" not in said and not Path("x.json").exists()


@pytest.mark.parametrize("came", [True, False])
def test_an_error_that_an_interrupt_made_of_an_import_is_the_interrupt(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], came: bool
) -> None:
    """Ctrl-C inside an import may come out as the library's own error, which is then no fault of the command."""

    def broken() -> None:
        with suppress(KeyboardInterrupt):
            if came:
                signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot import name 'half' from partially initialized module")

    monkeypatch.setattr(atexit, "register", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["paraplan", "plan"])
    monkeypatch.setattr(command_module, "run_command", broken)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit if came else ImportError) as ended:
            command_module.main()
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().err
    assert ("interrupted before a plan was found; nothing is written" in said) == came
    assert not came or (isinstance(ended.value, SystemExit) and ended.value.code == 130)


@pytest.mark.parametrize("presses", [1, 2])
def test_an_interrupt_waits_for_an_import_and_a_second_one_does_not(
    here: Path, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    """In the midst of a library's C++ it would be an abort."""
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setattr(sys, "argv", ["paraplan", "run"])
    press = "import signal\nfor _ in range({}):\n    signal.raise_signal(signal.SIGINT)\nended = True\n"
    (here / f"pressed{presses}.py").write_text(press.format(presses))
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, command_module._Interrupts())
    try:
        with pytest.raises(KeyboardInterrupt):
            found = importlib.import_module(f"pressed{presses}")
            assert found.ended and presses == 1
            time.sleep(10.0)
        time.sleep(2 * command_module.AGAIN_S)  # nor does it come again
    finally:
        signal.signal(signal.SIGINT, before)


def test_debug_shows_the_traceback(here: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="nowhere"):
        command("show", "nowhere.json", "--debug")


def test_hugging_face_names(here: Path, command: Any) -> None:
    pytest.importorskip("transformers")
    refuse(command("plan", "hf:gpt22", "local:2"), "no model type 'gpt22'", "gpt2")
    refuse(
        command("plan", "hf:gpt2", "local:2", "--set", "n_layers=2"), "no setting 'n_layers'", "did you mean n_layer"
    )
    refuse(command("plan", "hf:gpt2", "local:2", "--set", "foo=2"), "no setting 'foo'; it has", "n_embd, n_head")
    refuse(command("plan", "hf:gpt2", "local:2", "--set", "n_layer"), "key=value")
    refuse(command("plan", "hf:gpt2", "local:2", "--set", "n_head=7", "--set", "n_layer=1"), "gpt2", "num_heads")
    refuse(command("plan", "hf:gpt2", "local:2", "--set", "n_layer=1", "--seq", "4096"), "4096", "1024 positions")
