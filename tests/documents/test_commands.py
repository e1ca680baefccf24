"""What the documents say can be typed: commands are parsed, and modules, files and pages that are named exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import paraplan
from paraplan import cli

from .fences import DOCUMENTS, ROOT, commands, fences

IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
SHELL = ("bash", "")
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SOURCES = ("paraplan", "tests", "benchmarks", "examples")


def prose(document: Path) -> str:
    """The text around the blocks."""
    text = document.read_text()
    for fence in fences(document):
        text = text.replace(f"```{fence.language}\n{fence.text}```", "")
    return text


def parse(words: list[str]) -> None:
    """Parse the arguments of `paraplan`, and run nothing."""
    command: Any = get_command(cli.app)
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, f"paraplan has no command {name!r}"
        command = command.commands[name]
    command.make_context(name, list(words))


def check_module(name: str) -> None:
    assert importlib.util.find_spec(name) is not None, f"there is no module {name}"


def check_command(words: list[str]) -> None:
    """A command that a document has in a block."""
    program, *rest = words
    if program == "paraplan":
        parse(rest)
        for word in rest:
            module, colon, factory = word.partition(":")
            if colon and module.startswith("examples."):
                assert hasattr(importlib.import_module(module), factory), word
    elif program == "make":
        targets = [word for word in rest if "=" not in word]
        makefile = (ROOT / "Makefile").read_text()
        assert targets and all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets), words
    elif program in ("python", "torchrun"):
        module = rest[rest.index("-m") + 1]
        check_module(module)
        if program == "torchrun":
            importlib.import_module(module).parser().parse_args(rest[rest.index("-m") + 2 :])
    else:
        assert words[:2] in (["pip", "install"], ["git", "clone"]) or program == "cd", f"not known here: {words}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_every_command_is_one(document: Path) -> None:
    for fence in fences(document):
        if fence.language in SHELL:
            for words in commands(fence):
                check_command(words)


@pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)
def test_modules_files_and_pages_exist(document: Path) -> None:
    text = prose(document)
    for name in re.findall(r"python -m (benchmarks[\w.]*\w)", text):
        check_module(name)
    for span in SPAN.findall(text):
        if re.fullmatch(r"[\w/]+\.py", span):
            assert any(folder_has(folder, span) for folder in SOURCES), f"there is no file {span}"
    for link in LINK.findall(text):
        page, _, anchor = link.partition("#")
        if "://" not in link:
            target = (document.parent / page).resolve() if page else document
            assert target.exists(), f"{document.name} links to {link}"
            if anchor:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert anchor in {slug(title) for title in titles}, f"{document.name} links to {link}"


def slug(title: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def folder_has(folder: str, name: str) -> bool:
    """Whether a path is one of a folder's, from wherever it begins."""
    full = f"/{name}"
    return any(path.as_posix().endswith(full) for path in (ROOT / folder).rglob(Path(name).name))


def test_the_readme_calls_what_there_is() -> None:
    """Its Python: functions of paraplan with their keywords, methods of a trainer."""
    calls = [
        (ast.unparse(node.func), {str(keyword.arg) for keyword in node.keywords})
        for fence in fences(ROOT / "README.md")
        if fence.language == "python"
        for node in ast.walk(ast.parse(fence.text))
        if isinstance(node, ast.Call)
    ]
    known: dict[str, Any] = {"pp.compile": paraplan.compile, "pp.fit": paraplan.fit, "pp.Plan.load": paraplan.Plan.load}
    known |= {f"trainer.{name}": getattr(paraplan.Trainer, name) for name in dir(paraplan.Trainer)}
    ours = [(name, keywords) for name, keywords in calls if name.startswith(("pp.", "trainer.")) and "(" not in name]
    assert {"pp.compile", "pp.fit", "trainer.step"} <= {name for name, _ in ours}
    for name, keywords in ours:
        parameters = inspect.signature(known[name]).parameters
        taken = any(each.kind is each.VAR_KEYWORD for each in parameters.values()) or keywords <= set(parameters)
        assert taken, f"{name} does not take all of {keywords}"


@pytest.mark.parametrize("name", [name for name in IDS if "benchmarks" not in name])
def test_options_in_the_text_are_options(name: str) -> None:
    def options(command: Any) -> Iterator[str]:
        for param in command.params:
            yield from (*param.opts, *param.secondary_opts)
        for each in getattr(command, "commands", {}).values():
            yield from options(each)

    known = {*options(get_command(cli.app)), "--help", "--nproc-per-node"}
    for span in SPAN.findall(prose(ROOT / name)):
        if span.startswith(("--", "paraplan ")):
            unknown = [word for word in re.findall(r"(?<!\w)--[a-z][a-z-]*", span) if word not in known]
            assert not unknown, f"{name}: `{span}` has {unknown}"
