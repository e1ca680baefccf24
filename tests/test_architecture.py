"""The house's rules, read from the source: who imports whom, where torch and the solvers are, how long things get.

Every rule is a function from modules to the list of its breaches, so that it can be shown to fail: the last test
feeds each one a module that breaks it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import networkx as nx
import pytest

import paraplan
from paraplan.ir.machine.collectives import COLLECTIVES

ROOT = Path(__file__).parents[1]

READ_BY_THE_RUNTIME = (*("capture.python_state", "capture.exporting.fake", "capture.hooks", "capture.reference"),)
"""What the runtime has of capture: how a model's own Python is read, which a step holds against what was captured."""

BELOW_THE_API = (
    *("ir", "rules", "lowering", "capture", "cost_models", "planner"),
    *("runtime", "codegen", "report", "jobs", "plan_options", "__version__"),
)

FLOORS: dict[str, tuple[str, ...]] = {
    "": (
        "api",
        "explaining",
        "fitting",
        "runtime.trainer",
        "ir",
        "planner.constraints",
        "capture.register",
    ),  # on first use
    "ir": (),
    "rules": ("ir",),
    "kernels": ("ir", "rules.layers.float8"),
    "capture": ("ir", "rules", "kernels"),
    "lowering": ("ir", "rules"),
    "cost_models": ("ir", "rules", "lowering"),
    "planner": ("ir", "rules", "lowering", "cost_models"),
    "baselines": ("ir", "rules", "lowering", "cost_models", "planner"),
    "runtime": ("ir", "rules.time_axis", "kernels", "lowering", *READ_BY_THE_RUNTIME),
    "codegen": (
        *(
            "ir",
            "kernels",
            "runtime.executing.instructions",
            "runtime.executing.targets",
            "runtime.transport.collectives",
        ),
    ),
    "report": ("ir", "rules", "lowering", "cost_models"),
    "jobs": ("ir", "rules", "lowering", "kernels", "capture", "cost_models", "runtime", "codegen"),
    "plan_options": ("ir", "planner.constraints", "planner.options.keywords"),
    "api": (*BELOW_THE_API, "baselines"),
    "fitting": (*BELOW_THE_API, "kernels.dtypes", "api"),
    "explaining": ("ir", "cost_models.realised_plan", "planner", "report", "api"),
    "comparing": ("ir", "rules", "planner", "baselines", "api", "plan_options"),
    "terminal": ("ir", "capture", "report", "jobs", "plan_options", "cost_models"),
    "cli": (
        *("ir", "api", "comparing", "explaining", "baselines", "report", "jobs", "plan_options", "terminal"),
        *("planner.constraints", "__version__"),
    ),
    "__main__": ("cli",),
}
"""What each room may import of ours, beyond itself; a dotted name opens that module or folder only."""

NAMED_ONLY = {
    ("runtime/transport/launch.py", "paraplan.api"),
    ("runtime/transport/launch.py", "paraplan.jobs.run"),
    ("runtime/transport/launch.py", "paraplan.terminal.model_settings"),
    ("runtime/transport/launch.py", "paraplan.terminal.run_output"),  # what a server of forked ranks loads beforehand
    ("terminal/run_output.py", "paraplan.cli"),  # what a rank's process executes
}
"""Modules whose names are given to another process, which is what imports them."""

OPTIONAL = {
    ("jobs/models.py", "transformers"),
    ("runtime/state/weights.py", "safetensors"),
}
"""What is imported inside a function, and where: each is installed with an extra alone."""

ROOMS = "kernels", "capture", "capture/following", "codegen", "runtime/executing"
TORCH_PRIVATE = tuple(f"{room}/torch_private.py" for room in ROOMS)
NO_TORCH_ROOMS = ("ir", "rules", "lowering", "cost_models", "planner", "baselines", "report", "explaining")
TORCH_AND_ALL_ON_IT = ("torch", "torchvision", "transformers", "safetensors")
SOLVERS = ("ortools", "pulp")
NAME_COLLECTIVES = ("rules/", "cost_models/communication/collectives.py", "runtime/transport/collectives.py")
"""Who may import a collective's record by name: what issues it, and what says how it is priced and run."""

OTHER_MEANINGS = {
    "permute": ("capture/", "cost_models/ops/roofline.py", "runtime/padded.py"),  # aten.permute
    "route": ("rules/dims.py",),  # a strategy's key
}
"""Where the name of a collective stands for something else."""

LABELLED = (
    "cost_models/",
    "planner/",
    "runtime/",
    "codegen/",
    "report/",
    "jobs/",
    "lowering/",
    "ir/model/sources",
    *("api", "fitting", "explaining", "comparing", "terminal/", "baselines/", "kernels/", "cli"),
)
DOCUMENTED = (
    *("api", "fitting", "explaining", "comparing", "plan_options", "cli", "ir/", "lowering/", "cost_models/"),
    *(
        "planner/",
        "runtime/",
        "codegen/",
        "report/",
        "jobs/",
        "terminal/",
        "baselines/",
        "rules/",
        "kernels/",
        "capture/",
    ),
)
REFERRED = re.compile(r"As `kernels\.(\w+)\.(\w+)`")
"""How the docstring of a device's kernel begins: the reference kernel it names has the words."""
OWN = ("self", "cls")
COMMANDS = ("app.command", "app.callback")
"""Whose parameters have words of their own, as options have."""
REGISTRIES = (
    *("rules/dims.py", "rules/registered_rules.py", "ir/machine/kernel_choice.py"),
    "runtime/executing/opaque.py",  # torch's, of ops: for good
)
"""Whose containers are filled as modules are imported, and hold no results."""
MODULE_NAME = re.compile(r"paraplan(\.[a-z_0-9]+)+")
MAX_FILES, MAX_LEVELS = 15, 4
MOST_UNFORMATTED = 40
LABELS = (".block", "block.name", ".action", "stream", "channel", "strategy.key")
TYPED = ("target", "dtype", "device", "head", "column")
"""Names of what is asked by `target_parts`, the sets of `ir.model.tensor`, `torch.device` and `report.units.Column`."""
TEXT_METHODS = ("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit")
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
WORDY: frozenset[tuple[str, str]] = frozenset()
"""(file, function) of those that are longer with their docstrings alone."""
MAX_PARAMETERS = 8
SIGNATURES_OF_OPS = {
    **dict.fromkeys(("attention_grad", "experts_grad", "bn_whole"), "kernels/"),
    "tile_grad": "kernels/gpu/attention/tile_parts.py",
    "linear_into_": "runtime/executing/products_into.py",
    **dict.fromkeys(("forward", "attention_dropout", "_attention_grad", "_experts_grad_shape"), "capture/canonical/"),
    "layers": "capture/recurrences/layers.py",
    "_instance_norm": "capture/python_state/model_writes.py",
}
"""Functions with an op's arguments, however many those are: ours, and torch's that are decomposed."""
FAMILIES = {
    ("op", "inputs", "outputs"): "rules/",  # OpDef.dims
    ("inputs", "outputs", "args"): "rules/",  # OpDef.workspace
    ("op", "context", "axis"): "rules/",  # OpDef.expand
    ("problem", "budget_bytes", "limits"): "baselines/",  # common.MemoryStrategy
}
"""Parameters that many functions of a room share, of which its record of such a function has the words."""
PUBLIC = {
    *("__version__", "compile", "explain", "fit", "Plan", "Trainer", "ClusterSpec", "Constraints", "ParaplanError"),
    "InfeasibleError",
    *("register_rule", "register_cost", "release_caches"),
}


@dataclass(frozen=True)
class Module:
    """One source file: its path under `paraplan/` with forward slashes, and its text."""

    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def room(self) -> str:
        first = self.path.split("/")[0].removesuffix(".py")
        return "" if first == "__init__" else first

    @property
    def package(self) -> list[str]:
        return ["paraplan", *self.path.split("/")[:-1]]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of everything imported; `from a import b` counts as `a.b`, and so does its name in a
        string, by which it is imported on first use."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = self.package[: len(self.package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE_NAME.fullmatch(node.value):
                if node.value.split(".")[1] in FLOORS:  # ops have such names too
                    found.append((node.lineno, node.value))
        return found


@cache
def modules_under(folder: str) -> tuple[Module, ...]:
    base = ROOT / folder
    return tuple(Module(p.relative_to(base).as_posix(), p.read_text()) for p in sorted(base.rglob("*.py")))


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def breaks_floors(module: Module) -> Iterator[str]:
    if module.room not in FLOORS:
        yield f"{module.path}: room {module.room!r} has no floor here, and no line in docs/design/house.md"
        return
    allowed = [f"paraplan.{room}" for room in (*FLOORS[module.room], module.room) if room]
    for line, name in module.imports:
        if (module.path, name) in NAMED_ONLY:
            continue
        if within(name, "paraplan") and not any(within(name, prefix) for prefix in allowed):
            yield f"{module.path}:{line} imports {name}; allowed of ours: {', '.join(allowed) or 'nothing'}"


def imports_torch_where_it_may_not(module: Module) -> Iterator[str]:
    for line, name in module.imports:
        if module.room in NO_TORCH_ROOMS and name.split(".")[0] in (
            "torch",
            "torchvision",
            "transformers",
            "safetensors",
        ):
            yield f"{module.path}:{line} imports {name}; torch is for kernels, capture, codegen, runtime and api"


def imports_solver_elsewhere(module: Module) -> Iterator[str]:
    if module.path.startswith("planner/solvers/"):
        return
    for line, name in module.imports:
        if name.split(".")[0] in SOLVERS:
            yield f"{module.path}:{line} imports {name}; solvers are reached through planner/solvers/milp.py"


def names_a_collective(module: Module) -> Iterator[str]:
    remedy = "ask its record for the property that matters"
    for line, name in module.imports:
        record = name.removeprefix("paraplan.ir.machine.collectives.")
        if record != name and record.lower() in COLLECTIVES and not module.path.startswith(NAME_COLLECTIVES):
            yield f"{module.path}:{line} imports {record} by name; {remedy}"
    for node in module.nodes:
        if isinstance(node, ast.Constant) and node.value in COLLECTIVES:
            if not module.path.startswith(("ir/machine/collectives.py", *OTHER_MEANINGS.get(str(node.value), ()))):
                yield f"{module.path}:{node.lineno} says {node.value!r}; {remedy}"


def imports_inside_functions(module: Module) -> Iterator[str]:
    seen = set()
    for function in functions(module):
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "." * node.level]
            else:
                continue
            fresh = [n for n in names if (module.path, n) not in OPTIONAL and (node.lineno, n) not in seen]
            seen.update((node.lineno, n) for n in fresh)
            yield from (f"{module.path}:{node.lineno} imports {n} inside {function.name}()" for n in fresh)


def uses_private_torch(module: Module) -> Iterator[str]:
    if module.path in TORCH_PRIVATE:
        return
    remedy = "give it a name of ours in that room's torch_private.py"
    for line, name in module.imports:
        if within(name, "torch") and is_private(name):
            yield f"{module.path}:{line} imports {name}; {remedy}"
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and (name := dotted(node)):
            # torch.ops.<namespace> is where ops are named, whoever registered them
            if within(name, "torch") and not within(name, "torch.ops"):
                yield f"{module.path}:{node.lineno} uses {name}; {remedy}"


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in module.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_decorated(function: ast.FunctionDef | ast.AsyncFunctionDef, *by: str) -> bool:
    return any(dotted(of.func if isinstance(of, ast.Call) else of) in by for of in function.decorator_list)


def file_is_too_long(module: Module) -> Iterator[str]:
    if (lines := len(module.source.splitlines())) > MAX_FILE_LINES:
        yield f"{module.path} has {lines} lines, over {MAX_FILE_LINES}: it has two jobs, split it"


def function_is_too_long(module: Module) -> Iterator[str]:
    """Neither docstrings nor parameters are counted: nobody should shorten one for this."""
    for function in functions(module):
        first = function.body[ast.get_docstring(function) is not None :][:1] or function.body
        lines = (function.end_lineno or function.lineno) - first[0].lineno + 2
        if lines > MAX_FUNCTION_LINES:
            yield f"{module.path}:{function.lineno} {function.name}() has {lines} lines, over {MAX_FUNCTION_LINES}"


def function_is_too_long_to_read(module: Module) -> Iterator[str]:
    """With parameters and docstring a function is still one screen; one whose docstring says much is named here."""
    for function in functions(module):
        first = min([function.lineno, *(each.lineno for each in function.decorator_list)])
        lines = (function.end_lineno or function.lineno) - first + 1
        if lines > MAX_FUNCTION_LINES and (module.path, function.name) not in WORDY:
            yield f"{module.path}:{function.lineno} {function.name}() takes {lines} lines to read; split it or name it"


def takes_too_many(module: Module) -> Iterator[str]:
    """What travels together is a record; a record's own fields may be many. Triton's kernels take no records."""
    for function in functions(module):
        if module.path.startswith(SIGNATURES_OF_OPS.get(function.name, "-")) or is_decorated(function, "triton.jit"):
            continue
        args = function.args
        every = (*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg)))
        count = sum(each.arg not in ("self", "cls") for each in every)
        if count > MAX_PARAMETERS:
            yield f"{module.path}:{function.lineno} {function.name}() takes {count} parameters, over {MAX_PARAMETERS}"


def says_nothing_of_parameters(module: Module) -> Iterator[str]:
    """A public function of several parameters has a word on each."""
    if not module.path.startswith(DOCUMENTED):
        return
    classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    commands = set(commands_of(module))
    for function in (node for of in (module.tree, *classes) for node in of.body if isinstance(node, ast.FunctionDef)):
        args = function.args
        names = [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs) if each.arg not in OWN]
        if len(names) < 3 or function.name.startswith("_") or function.name in commands:
            continue
        if module.path.startswith(FAMILIES.get(tuple(names), "-")) or refers(module, function):
            continue
        said = (ast.get_docstring(function) or "").partition("Args:")[2]
        if missing := [name for name in names if not re.search(rf"\b{name}\b.*:", said)]:
            yield f"{module.path}:{function.lineno} {function.name}() says nothing of {', '.join(missing)} under Args:"


def refers(module: Module, function: ast.FunctionDef) -> bool:
    """Whether a kernel of a device names the reference kernel of the same name, which takes the same parameters."""
    found = REFERRED.match(ast.get_docstring(function) or "")
    if found is None or found[2] != function.name or not module.path.startswith("kernels/gpu/"):
        return False
    alike = [each for each in reference_kernels(found[1]) if each.name == function.name]
    return bool(alike) and argument_names(alike[0]) == argument_names(function)


def reference_kernels(name: str) -> list[ast.FunctionDef]:
    path = ROOT / "paraplan" / "kernels" / f"{name}.py"
    body = ast.parse(path.read_text()).body if path.exists() else []
    return [each for each in body if isinstance(each, ast.FunctionDef)]


def argument_names(function: ast.FunctionDef) -> list[str]:
    args = function.args
    return [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def commands_of(module: Module) -> Iterator[str]:
    """Functions that are commands: `@app.command()`, or `app.command("name")(function)`."""
    yield from (function.name for function in functions(module) if is_decorated(function, *COMMANDS))
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Call) and dotted(node.func.func) in COMMANDS:
            yield from filter(None, map(dotted, node.args))


def reads_labels(module: Module) -> Iterator[str]:
    """Labels of blocks, actions and streams are for people; what such a thing is, it says in fields.

    So do an instruction's arguments and a strategy's key, an op's target and a dtype, whose text is read in one place.
    """
    if not module.path.startswith(LABELLED):
        return
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TEXT_METHODS:
            read = node.func.value
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant | ast.JoinedStr):
            read = node.comparators[0] if isinstance(node.ops[0], ast.In | ast.NotIn) else node.left
        else:
            continue
        if (name := dotted(read)) and (name.endswith(LABELS) or name.rpartition(".")[2] in TYPED):
            yield f"{module.path}:{node.lineno} reads the text of {name}; ask Block.role, target_parts() ..."
        for given in node.args if isinstance(node, ast.Call) else ():
            if isinstance(given, ast.Constant) and given.value in ("%", "#", "~", ">", "|"):
                yield f"{module.path}:{node.lineno} reads {given.value!r}; ask arg_kind(), arg_text() or axis_parts()"


def caches_beside_the_session(module: Module) -> Iterator[str]:
    """What outlives a call belongs to an object, or to the session, which can give it up."""
    if module.path == "ir/process/memo.py":
        return
    made = [node.value for node in module.tree.body if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    for node in made:
        empty = (isinstance(node, ast.Dict) and not node.keys) or (isinstance(node, ast.List) and not node.elts)
        if (empty or ast.unparse(node) in ("dict()", "list()", "set()")) and module.path not in REGISTRIES:
            yield f"{module.path}:{node.lineno} is filled later; use SESSION of ir/process/memo.py"
    for node in (*(of for function in functions(module) for of in function.decorator_list), *made):
        while isinstance(node, ast.Call | ast.Subscript):
            node = node.func if isinstance(node, ast.Call) else node.value
        name = dotted(node)
        if name and name.rpartition(".")[2] in ("cache", "lru_cache", "Lately", "WeakTensorKeyDictionary"):
            yield f"{module.path}:{node.lineno} keeps results in {name}; use SESSION of ir/process/memo.py"


def imports_a_test(module: Module) -> Iterator[str]:
    """What tests share is in a helper beside them, so that one can be read, run and moved without another."""
    for line, name in module.imports:
        ours = within(name, "tests") or within(name, "paraplan")  # where a relative name is taken to begin
        if ours and any(part.startswith("test_") for part in name.split(".")):
            yield f"{module.path}:{line} imports {name}; move what is shared to a helper beside it"


RULES: dict[Callable[[Module], Iterator[str]], Module] = {
    breaks_floors: Module("planner/x.py", "from ..runtime import trainer"),
    imports_torch_where_it_may_not: Module("ir/x.py", "import torch.nn as nn"),
    imports_solver_elsewhere: Module("baselines/milp_x.py", "from ortools.sat.python import cp_model"),
    names_a_collective: Module("lowering/x.py", 'def f(move):\n    return move.kind == "all_gather"'),
    imports_inside_functions: Module(
        "jobs/models.py", "def f():\n    if 1:\n        import json\n    import transformers"
    ),
    uses_private_torch: Module("runtime/x.py", "import torch\ntorch._dynamo.reset(); torch.ops._c10d_functional.wait"),
    file_is_too_long: Module("ir/x.py", "x = 1\n" * (MAX_FILE_LINES + 1)),
    reads_labels: Module("report/x.py", "step.block.split('.')[0]\nstep.block in program.blocks"),
    caches_beside_the_session: Module("ir/x.py", "@lru_cache(3)\ndef f(): pass"),
    says_nothing_of_parameters: Module(
        "jobs/x.py", 'def f(a, b, c):\n    """F.\n\n    Args:\n        a, b: numbers.\n    """'
    ),
    takes_too_many: Module(
        "ir/x.py", "class A:\n    def f(self, a, b, c, d, e, f, g, *, h, **i): pass\n    def g(self, *i): pass"
    ),
    function_is_too_long_to_read: Module(
        "ir/x.py", "@cache\ndef f(\n" + "    a,\n" * (MAX_FUNCTION_LINES - 2) + "):\n    pass"
    ),
    function_is_too_long: Module("ir/x.py", 'def f():\n    """D."""\n' + "    x = 1\n" * MAX_FUNCTION_LINES),
}
"""Each rule with a module that breaks it exactly once."""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Callable[[Module], Iterator[str]]) -> None:
    breaches = [breach for module in modules_under("paraplan") for breach in rule(module)]
    assert not breaches, "\n".join(["", *breaches])


@pytest.mark.parametrize("rule", [file_is_too_long, function_is_too_long], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_scripts_stay_short(folder: str, rule: Callable[[Module], Iterator[str]]) -> None:
    breaches = [f"{folder}/{breach}" for module in modules_under(folder) for breach in rule(module)]
    assert not breaches, "\n".join(["", *breaches])


def test_a_public_class_has_a_name_of_its_own() -> None:
    """But for a plan, which users have with what it does, and files without."""
    defined = Counter(
        node.name
        for module in modules_under("paraplan")
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in defined.items() if count > 1] == ["Plan"]


def test_no_file_comes_back_to_itself() -> None:
    """By imports of any kind, those for type checkers and those by name on first use as well; the package itself names
    what it gives, of which some ask it for its version."""
    files = {
        ".".join(("paraplan", *Path(each.path).with_suffix("").parts)).removesuffix(".__init__"): each
        for each in modules_under("paraplan")
        if each.room
    }
    imports = nx.DiGraph()
    for name, module in files.items():
        for _, imported in module.imports:
            at = imported
            while at and at not in files:
                at = at.rpartition(".")[0]
            if at and at != name and (module.path, imported) not in NAMED_ONLY:
                imports.add_edge(name, at)
    assert not [sorted(each) for each in nx.strongly_connected_components(imports) if len(each) > 1]


HOUSE = (ROOT / "docs" / "design" / "house.md").read_text()


def test_the_page_on_the_house_has_the_floors() -> None:
    """Its table row by row, and every arrow of its diagram."""
    told = {}
    for line in HOUSE.splitlines():
        if line.startswith("| `"):
            room, *_, floors = (cell.strip() for cell in line.strip("|").split("|"))
            told[room.strip("`").removesuffix("/").removesuffix(".py")] = set(re.findall(r"`([^`]+)`", floors))
    assert told == {room: set(floors) for room, floors in FLOORS.items() if room}
    found = re.findall(r"^ +([\w &]+) --> ([\w &]+)$", HOUSE, re.MULTILINE)
    arrows = [(one, other) for left, right in found for one in left.split(" & ") for other in right.split(" & ")]
    drawn = nx.transitive_closure(nx.DiGraph(arrows))
    allowed = {(room, floor.split(".")[0]) for room, floors in FLOORS.items() for floor in floors}
    assert set(arrows) <= allowed
    assert {(a, b) for a, b in allowed if {a, b} <= set(drawn)} <= set(drawn.edges)


def test_no_test_imports_another() -> None:
    breaches = [f"tests/{breach}" for module in modules_under("tests") for breach in imports_a_test(module)]
    assert not breaches, "\n".join(["", *breaches])


@pytest.mark.parametrize(
    "source",
    [
        "from tests.runtime.test_x import f",
        "from .test_x import f",
        "from . import test_x",
        "from tests.runtime import test_x",
        "import tests.runtime.test_x",
    ],
)
def test_an_import_of_a_test_is_seen(source: str) -> None:
    assert len(list(imports_a_test(Module("runtime/x.py", source)))) == 1
    helper = source.replace("test_x", "helpers")
    assert not list(imports_a_test(Module("runtime/x.py", f"import pytest\n{helper}")))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_can_fail(rule: Callable[[Module], Iterator[str]]) -> None:
    assert len(list(rule(RULES[rule]))) == 1


TEN = ", ".join("abcdefghij")
GATED_GRAD = "def gated_grad(g, gate, up, activation):"
AS_REFERENCE = '"""As `kernels.elementwise_kernels.gated_grad`."""'


@pytest.mark.parametrize(
    ("rule", "path", "source", "legal"),
    [
        (takes_too_many, "kernels/x.py", f"def experts_grad({TEN}): pass", True),
        (takes_too_many, "lowering/x.py", f"def experts_grad({TEN}): pass", False),
        (takes_too_many, "kernels/x.py", f"def helper({TEN}): pass", False),
        (takes_too_many, "kernels/x.py", f"@triton.jit\ndef _kernel({TEN}): pass", True),
        (imports_inside_functions, "jobs/models.py", "def f():\n    import transformers", True),
        (imports_inside_functions, "jobs/run.py", "def f():\n    import transformers", False),
        (says_nothing_of_parameters, "terminal/x.py", "def f(a, b, c): pass", False),
        (says_nothing_of_parameters, "terminal/x.py", "def _f(a, b, c): pass\ndef g(a, b): pass", True),
        (says_nothing_of_parameters, "terminal/x.py", "@app.command()\ndef f(a, b, c): pass", True),
        (says_nothing_of_parameters, "terminal/x.py", "def f(a, b, c): pass\napp.command('f')(f)", True),
        (says_nothing_of_parameters, "planner/x.py", "class A:\n    def f(self, a, b, c): pass", False),
        (says_nothing_of_parameters, "kernels/gpu/x.py", f"{GATED_GRAD}\n    {AS_REFERENCE}", True),
        (says_nothing_of_parameters, "kernels/x.py", f"{GATED_GRAD}\n    {AS_REFERENCE}", False),
        (says_nothing_of_parameters, "kernels/gpu/x.py", f"{GATED_GRAD.replace('up', 'y')}\n    {AS_REFERENCE}", False),
        (
            says_nothing_of_parameters,
            "kernels/gpu/x.py",
            f"{GATED_GRAD.replace('_grad', '')}\n    {AS_REFERENCE}",
            False,
        ),
        (reads_labels, "runtime/x.py", "op.target.startswith('aten')", False),
        (reads_labels, "planner/x.py", "'softmax' in op.target", False),
        (reads_labels, "planner/x.py", "dtype.startswith('float8')", False),
        (reads_labels, "planner/x.py", "strategy.key.split(x)", False),
        (reads_labels, "planner/x.py", "key.split('|')", False),
        (reads_labels, "rules/x.py", "key.split('|')", True),
        (reads_labels, "report/x.py", "path.split('/')", True),
    ],
)
def test_exceptions_are_no_wider_than_they_say(
    rule: Callable[[Module], Iterator[str]], path: str, source: str, legal: bool
) -> None:
    assert (not list(rule(Module(path, source)))) == legal


@pytest.mark.parametrize(
    ("path", "source", "legal"),
    [
        ("codegen/x.py", "from paraplan.runtime.executing import instructions", True),
        ("codegen/x.py", "from paraplan.runtime.executing.instructions import offload", True),
        ("codegen/x.py", "from paraplan.runtime import trainer", False),
        ("codegen/x.py", "import paraplan.runtime", False),
        ("lowering/steps/x.py", "from ...rules.dims import OpDef", True),
        ("ir/x.py", "from paraplan import api", False),
        ("ir/x.py", "if TYPE_CHECKING:\n    from paraplan.planner.search import Plan", False),
        ("cli.py", "from paraplan.planner.search import search", False),
        ("cli.py", "from paraplan.ir.errors import ParaplanError", True),
        ("cli.py", 'PARTS = {"search": "paraplan.planner.search"}', False),
        ("cli.py", 'PARTS = {"search": "paraplan.api"}', True),
        ("__init__.py", "from paraplan.cli import app", False),
        ("newroom/x.py", "", False),
    ],
)
def test_floors_are_read_correctly(path: str, source: str, legal: bool) -> None:
    assert (not list(breaks_floors(Module(path, source)))) == legal


@pytest.mark.parametrize(
    "source",
    [
        "from torch._C import x",
        "from torch import _dynamo",
        "import torch.distributed._functional_collectives as fc",
        "from torch.fx.experimental._config import y",
        "import torch\ntorch.fx._symbolic_trace.f()",
    ],
)
def test_private_torch_is_seen(source: str) -> None:
    assert list(uses_private_torch(Module("runtime/x.py", source)))
    assert not list(uses_private_torch(Module("runtime/executing/torch_private.py", source)))
    assert not list(uses_private_torch(Module("runtime/x.py", "import torch\ntorch.__version__; torch.nn.Linear")))


def test_torch_free_rooms_load_without_torch() -> None:
    """Not only by their own import lines: what they import may not bring torch in either."""
    rooms = ("__init__", *NO_TORCH_ROOMS)
    paths = [m.path for m in modules_under("paraplan") if m.path.split("/")[0].removesuffix(".py") in rooms]
    names = [".".join(["paraplan", *path.removesuffix(".py").split("/")]) for path in paths]
    names = [name.removesuffix(".__init__") for name in names]
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'importing {name} loads torch')\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_collective_s_record_is_not_imported_where_it_does_not_matter() -> None:
    source = "from paraplan.ir.machine.collectives import COLLECTIVES, PERMUTE"
    assert len(list(names_a_collective(Module("lowering/x.py", source)))) == 1
    assert not list(names_a_collective(Module("rules/x.py", source)))


def test_the_house_has_every_room() -> None:
    text = (ROOT / "docs" / "design" / "house.md").read_text()
    missing = [room for room in FLOORS if room and not any(f"`{room}{end}`" in text for end in ("/", ".py"))]
    assert not missing, f"docs/design/house.md does not say what {missing} are for"


def test_folders_are_small_flat_and_say_what_they_are_for() -> None:
    files = Counter(m.path.rpartition("/")[0] for m in modules_under("paraplan"))
    crowded = {folder: count for folder, count in files.items() if count > MAX_FILES}
    assert not crowded, f"over {MAX_FILES} files, so two subjects: {crowded}"
    deep = [folder for folder in files if len(folder.split("/")) >= MAX_LEVELS]
    assert not deep, f"over {MAX_LEVELS} levels: {deep}"
    said = {m.path: ast.get_docstring(m.tree) for m in modules_under("paraplan") if m.path.endswith("__init__.py")}
    silent = [folder for folder in files if folder and not said.get(f"{folder}/__init__.py")]
    assert not silent, f"__init__.py does not say what the folder is for and who may come in: {silent}"


def test_public_names() -> None:
    assert set(paraplan.__all__) == PUBLIC
    missing = [name for name in paraplan.__all__ if not hasattr(paraplan, name)]
    assert not missing, f"paraplan's dispatch table names what is not there: {missing}"
    assert set(dir(paraplan)) == PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = paraplan.nonsense


def test_formatting_is_left_to_the_formatter() -> None:
    folders = ("paraplan", "tests", "benchmarks", "examples")
    lines = [(m.path, line) for folder in folders for m in modules_under(folder) for line in m.source.splitlines()]
    skipped = Counter(path for path, line in lines if line.endswith(("# fmt: skip", "# fmt: off")))
    assert skipped.total() < MOST_UNFORMATTED, skipped


def test_version_is_the_package_metadata_s() -> None:
    assert f'version = "{paraplan.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_a_clone_in_the_current_folder_hides_nothing(tmp_path: Path) -> None:
    """An editable install is a folder on the path: a finder of modules comes after the folder `paraplan` of a clone,
    which has no `__init__.py` and is then taken for a package of that name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}
    (tmp_path / "paraplan" / "paraplan").mkdir(parents=True)
    code = f"import sys; sys.path.append({str(ROOT)!r}); import paraplan; print(paraplan.__version__, paraplan.compile)"
    asked = [sys.executable, "-c", code]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    told = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert told.returncode == 0 and paraplan.__version__ in told.stdout, told.stderr
