"""The command's options are a promise: changing one is changing this list."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from typer.main import get_command

from paraplan import __version__, cli

OPTIONS = {
    "": ["--debug", "--version"],
    "plan": [
        "MODEL", "CLUSTER", "--output -o", "--set",
        "--mesh", "--dp", "--tp", "--sp", "--cp", "--cp-mode", "--ep", "--zero", "--pp", "--schedule", "--stages",
        "--microbatches", "--memory", "--reserve", "--recompute", "--offload", "--states", "--params", "--grads",
        "--update", "--offload-states", "--delayed-update", "--overlap", "--compile", "--reduce-dtype", "--optimizer",
        "--accumulate", "--dynamic", "--batch", "--seq", "--precision",
        "--per-microbatch", "--time-limit", "--strategy", "--profile", "--profile-any", "--json",
    ],
    "profile": [
        "MODEL", "--output -o", "--device", "--devices", "--set", "--batch", "--seq", "--optimizer", "--precision",
        "--threads", "--processes", "--again", "--json",
    ],
    "profile-links": ["--output -o", "--processes", "--profile", "--largest", "--json"],
    "learn": ["RUN", "--profile", "--json"],
    "compare": [
        "MODEL", "CLUSTER", "--memory", "--strategies", "--set", "--batch", "--seq", "--optimizer", "--precision",
        "--time-limit", "--json",
    ],
    "show": ["PLAN", "--memory", "--json"],
    "explain": ["PLAN", "--why-not", "--time-limit", "--json"],
    "simulate": ["PLAN", "--cluster", "--trace", "--json"],
    "cluster list": ["--json"],
    "cluster show": ["CLUSTER", "--json"],
    "cluster schema": [],
    "cluster detect": ["--output -o", "--processes", "--json"],
    "run": [
        *("PLAN", "--steps", "--data", "--lr", "--seed", "--check", "--model", "--clip", "--weights"),
        *("--save", "--resume", "--record", "--compile", "--cuda-graphs", "--timeout", "--json"),
    ],
}  # fmt: skip


def names(command: Any) -> list[str]:
    found = [" ".join(param.opts) if param.opts[0].startswith("-") else param.metavar for param in command.params]
    return [name for name in found if name != "--help"]


def commands(group: Any, above: str = "") -> dict[str, list[str]]:
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= commands(command, f"{above}{name} ") if inner is not None else {above + name: names(command)}
    return found


def test_options_are_frozen() -> None:
    root = get_command(cli.app)
    assert {"": names(root)} | commands(root) == OPTIONS


def test_the_command_starts_fast_and_light() -> None:
    """By what it loads, since a clock on a busy machine says little."""
    heavy = ("torch", "transformers", "ortools", "numpy", "networkx", "yaml")
    program = f"import sys, paraplan.cli; sys.exit(', '.join(name for name in {heavy!r} if name in sys.modules) or 0)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"importing paraplan.cli loads {run.stderr}"


def test_showing_a_plan_needs_no_torch() -> None:
    program = "import sys, paraplan.api, paraplan.terminal.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_version(command: Any) -> None:
    outcome = command("--version")
    assert (outcome.code, outcome.out.strip()) == (0, f"paraplan {__version__}")
