"""How the house is kept, in numbers: `python -m benchmarks.house [FOLDER]`, of the package or of another checkout's.

A line a figure, and with `--all` what counts towards it. Parameters are counted without `self`
and `cls`; lines of a function with its decorators, parameters and docstring; complexity is McCabe's.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_PARAMETERS, MAX_LINES, MAX_COMPLEXITY, DOCUMENTED = 8, 60, 15, 3
NAMES = ("block", "name", "action", "stream", "channel")
"""Of blocks, values and streams: what these are is in fields, and their text is for people."""
READERS = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit")
ROOMS = ("cost_models", "runtime", "codegen", "report")
Function = ast.FunctionDef | ast.AsyncFunctionDef
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True)
class Source:
    """A file of the package, read."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def functions(self) -> list[Function]:
        """All of them, methods and inner ones too."""
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]


def parameters(function: Function) -> int:
    """How many a function takes."""
    args = function.args
    every = (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))
    return sum(each.arg not in ("self", "cls") for each in every)


def length(function: Function) -> int:
    """Lines of a function."""
    first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
    return (function.end_lineno or function.lineno) - first + 1


def complexity(function: Function) -> int:
    """Ways through a function, as McCabe counts them, inner functions included, comprehensions not."""
    return 1 + sum(isinstance(node, _BRANCHES) for node in ast.walk(function))


def _functions(source: Source, value: Callable[[Function], int], most: int) -> Iterator[str]:
    for each in source.functions:
        if (found := value(each)) > most:
            yield f"{source.path}:{each.lineno} {each.name}() {found}"


def _reads_names(source: Source) -> Iterator[str]:
    """Text methods on what a name is kept in."""
    if source.path.parts[1] not in ROOMS:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS:
            of = node.func.value
            if isinstance(of, ast.Name | ast.Attribute) and (of.id if isinstance(of, ast.Name) else of.attr) in NAMES:
                yield f"{source.path}:{node.lineno} {ast.unparse(node)[:80]}"


def _caches(source: Source) -> Iterator[str]:
    """Functions whose results are kept, and empty containers of a module, beside the session's."""
    for function in source.functions:
        for each in function.decorator_list:
            if ast.unparse(each).split("(")[0].rpartition(".")[2] in ("cache", "lru_cache"):
                yield f"{source.path}:{function.lineno} {function.name}()"
    for node in source.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, ast.Dict | ast.List) and not (value.keys if isinstance(value, ast.Dict) else value.elts):
            yield f"{source.path}:{node.lineno} {ast.unparse(node)[:60]}"


SHARED = (
    *(("op", "inputs", "outputs"), ("inputs", "outputs", "args"), ("op", "context", "axis")),
    ("problem", "budget_bytes", "limits"),
)
"""Signatures that a record describes: an op's rules (`rules.dims.OpDef`), memory strategies."""


REFERRED = re.compile(r"As `kernels\.\w+\.(\w+)`")
"""How the docstring of a device's kernel begins: the reference kernel of its name has the words."""


def _undocumented(source: Source) -> Iterator[str]:
    """Public functions with several parameters and no word on each, but commands, whose options have their own."""
    has_commands = "app.command(" in source.text
    for node in source.tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else [node]
        for each in inside:
            if isinstance(each, Function) and not each.name.startswith("_") and parameters(each) >= DOCUMENTED:
                names = tuple(
                    arg.arg for arg in (*each.args.args, *each.args.kwonlyargs) if arg.arg not in ("self", "cls")
                )
                text = ast.get_docstring(each) or ""
                referred = REFERRED.match(text)
                has_words = "Args:" in text or names in SHARED or (referred is not None and referred[1] == each.name)
                if not has_words and not has_commands:
                    yield f"{source.path}:{each.lineno} {each.name}()"


FIGURES: dict[str, Callable[[Source], Iterator[str]]] = {
    f"functions of more than {MAX_PARAMETERS} parameters": lambda of: _functions(of, parameters, MAX_PARAMETERS),
    f"functions of more than {MAX_LINES} lines": lambda of: _functions(of, length, MAX_LINES),
    f"functions of complexity over {MAX_COMPLEXITY}": lambda of: _functions(of, complexity, MAX_COMPLEXITY),
    "lines left out of formatting": lambda of: (
        f"{of.path}:{number}" for number, line in enumerate(of.text.splitlines(), 1) if "# fmt: " in line
    ),
    "places that read the text of a name": _reads_names,
    "caches and registries of modules": _caches,
    f"public functions of {DOCUMENTED} parameters or more without a word on each": _undocumented,
}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=".", help="a checkout")
    parser.add_argument("--all", action="store_true", help="also what counts")
    given = parser.parse_args()
    root = Path(given.folder)
    texts = {path.relative_to(root): path.read_text() for path in sorted((root / "paraplan").rglob("*.py"))}
    sources = [Source(path, text, ast.parse(text)) for path, text in texts.items()]
    print(f"{sum(len(source.text.splitlines()) for source in sources)} lines in {len(sources)} files")
    for what, find in FIGURES.items():
        found = [line for source in sources for line in find(source)]
        print(f"{len(found)} {what}")
        for line in found if given.all else ():
            print(f"  {line}")


if __name__ == "__main__":
    main()
