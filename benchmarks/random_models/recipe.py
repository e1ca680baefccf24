"""A random model: which pieces, drawn from a seed, and the runnable source they make."""

from __future__ import annotations

import atexit
import linecache
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from benchmarks.random_models.writer import INPUTS, Piece, Writer, read_pieces

Drawn = tuple[str, int]
"""A piece's name and the seed of its own draws."""

STARTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "seq": (
        ("torch.randint(0, V, (B, T), generator=generator)", "self.embed = nn.Embedding(V, D)", "self.embed(x)"),
        ("torch.randn(B, T, D, generator=generator)", "self.stem = nn.Linear(D, D)", "self.stem(x)"),
    ),
    "image": (
        ("torch.randn(B, 3, S, S, generator=generator)", "self.stem = nn.Conv2d(3, D, 3, padding=1)", "self.stem(x)"),
        ("torch.randn(B, 3, 2 * S, 2 * S, generator=generator)", "self.stem = nn.Conv2d(3, D, 2, 2)", "self.stem(x)"),
    ),
    "vector": (
        ("torch.randn(B, 5, generator=generator)", "self.stem = nn.Linear(5, D)", "self.stem(x)"),
        ("torch.randint(0, V, (B,), generator=generator)", "self.embed = nn.Embedding(V, D)", "self.embed(x)"),
    ),
}
"""By form: what draws `x`, a layer for it, and its call."""

COMBINATIONS = {
    "sum": "{sum}",
    "weighted": "{weighted}",
    "halved": "0.5 * ({sum}) + 0.1",
    "repeated": "{first} + {sum}",
    "stacked": "torch.stack([{list}]).[[mean()||sum()||logsumexp(0)]]",
    "root": "torch.sqrt(1 + ({sum}) ** 2)",
    "squared": "{first} ** 2 + {sum}",
    "greatest": "torch.maximum({first}, {last})",
    "product": "{first} * (1 + torch.sigmoid({last}))",
    "logarithm": "torch.log1p(({sum}).abs())",
    "uncertain": "torch.exp(-self.uncertainty) * ({sum}) + self.uncertainty",
    "ratio": "{first} / (1 + {last}.detach().abs())",
}
"""How losses become one; the plainer ones come more often."""

OUTPUTS = ("scalar", "scalar", "dict", "named", "named_all", "object", "loss_fn")
OUTSIDE = {
    "seq": (
        "F.mse_loss(output, batch['noise'])",
        "F.cross_entropy(output.flatten(0, 1), batch['labels'].flatten() % D)",
    ),
    "image": ("F.mse_loss(output, batch['picture'])", "F.cross_entropy(output, batch['pixels'] % D)"),
    "vector": ("F.l1_loss(output, batch['wanted'])", "F.cross_entropy(output, batch['classes'] % D)"),
}
"""Loss functions beside the model, by the form it ends in."""


@dataclass(frozen=True)
class Recipe:
    """What a model is made of; leaving out pieces, extras or losses leaves a model.

    Attributes:
        seed: what it was drawn from.
        form: what it begins with.
        start: which of that form's `STARTS`.
        pieces, losses, extras: in order.
        combine: of `COMBINATIONS`.
        output: of `OUTPUTS`.
        sizes: B, T, D, S, V.
    """

    seed: int
    form: str
    start: int
    pieces: tuple[Drawn, ...]
    losses: tuple[Drawn, ...]
    extras: tuple[Drawn, ...]
    combine: str
    output: str
    sizes: dict[str, int] = field(hash=False)


@dataclass(frozen=True)
class Built:
    """A model and what is said beside it.

    Attributes:
        source: its text.
        model, batch: in float32, as a user has them.
        loss_fn, choice: for capture.
        total: (output, batch) -> the loss that is trained on, for an eager step.
        is_random: whether forward draws random numbers.
    """

    source: str
    model: nn.Module
    batch: dict[str, Tensor]
    loss_fn: Callable[..., Any] | None
    choice: Any
    total: Callable[[Any, Mapping[str, Tensor]], Tensor]
    is_random: bool


@cache
def folder() -> Path:
    """Where the sources of models are while this process runs."""
    made = Path(tempfile.mkdtemp(prefix="random_models_"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


@cache
def library() -> dict[str, dict[str, Piece]]:
    """Pieces by the form they take; losses and extras apart."""
    found: dict[str, dict[str, Piece]] = {"seq": {}, "image": {}, "vector": {}}
    for name in ("any", "seq", "image", "vector"):
        for each in read_pieces(name).values():
            for form in each.forms:
                found[form][each.name] = each
    losses = read_pieces("losses")
    for form in ("seq", "image", "vector"):
        found[f"{form} loss"] = {name: each for name, each in losses.items() if form in each.forms}
    return found | {"extra": read_pieces("extras")}


def draw(seed: int) -> Recipe:
    """A recipe; equal seeds give equal ones."""
    rng = random.Random(f"model {seed}")
    form = first = rng.choice(("seq", "seq", "seq", "image", "image", "vector"))
    calm = rng.random() < 0.5  # half of the models draw no random numbers at all
    pieces: list[Drawn] = []
    for _ in range(rng.choice((2, 3, 4, 4, 5, 6, 8))):
        some = {name: each for name, each in library()[form].items() if not (each.is_random and calm)}
        if rng.random() < 0.5:  # pieces of the form itself are fewer than those of any form, and as likely
            some = {name: each for name, each in some.items() if len(each.forms) == 1} or some
        name = rng.choice(sorted(some))
        pieces.append((name, rng.randrange(1 << 30)))
        form = some[name].after or form
    losses = [
        (rng.choice(sorted(library()[f"{form} loss"])), rng.randrange(1 << 30)) for _ in range(rng.choice((1, 1, 2)))
    ]
    extras = [(rng.choice(sorted(library()["extra"])), rng.randrange(1 << 30))] if rng.random() < 0.15 else []
    plain = rng.random() < 0.6
    sizes = {
        "B": rng.choice((4, 4, 8)),
        "T": rng.choice((4, 6, 8)),
        "D": rng.choice((4, 8, 8)),
        "S": rng.choice((4, 6)),
        "V": rng.choice((7, 8, 12)),
    }
    combine = rng.choice(("sum", "weighted")) if plain else rng.choice(list(COMBINATIONS))
    return Recipe(
        seed, first, rng.randrange(2), tuple(pieces), tuple(losses), tuple(extras), combine, rng.choice(OUTPUTS), sizes
    )


def source_of(recipe: Recipe) -> tuple[str, bool]:
    """The text of a recipe's model, and whether it draws random numbers."""
    drawn, layer, call = STARTS[recipe.form][recipe.start]
    writer = Writer(recipe.form, inputs={"x": drawn}, init=[layer], body=[f"h = {call}"])
    for name, seed in recipe.pieces:
        if name in library()[writer.form]:  # where an earlier one was left out, the form may be another
            writer.write(library()[writer.form][name], seed)
    rng, form = random.Random(f"end {recipe.seed}"), writer.form
    outside = recipe.output == "loss_fn" and rng.choice(OUTSIDE[form])
    losses = [] if outside else [each for each in recipe.losses if each[0] in library()[f"{form} loss"]]
    if not outside and not losses:
        losses = [(sorted(library()[f"{form} loss"])[0], 0)]
    for name, seed in losses:
        writer.write(library()[f"{form} loss"][name], seed)
    for name, seed in recipe.extras:
        writer.write(library()["extra"][name], seed)
    inputs = ", ".join(writer.inputs)  # what the loss function alone takes is not among forward's
    returned, ending = _ending(recipe, writer, rng, outside)
    return _module_text(recipe, writer, inputs, returned, ending), writer.is_random


def _module_text(recipe: Recipe, writer: Writer, inputs: str, returned: str, ending: str) -> str:
    """The file of a model: what forward takes and returns, its batch, and what its ending defines."""
    init, body = writer.finished()
    helpers = "\n\n\n".join(writer.helpers)
    made = "\n".join(f'        "{name}": {text},' for name, text in writer.inputs.items())
    sizes = ", ".join(recipe.sizes), ", ".join(map(str, recipe.sizes.values()))
    pieces = [name for name, _ in recipe.pieces]
    return f'''"""Model {recipe.seed}: {", ".join((recipe.form, *pieces, recipe.combine, recipe.output))}."""

import math
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

{sizes[0]} = {sizes[1]}


{helpers + chr(10) * 3 if helpers else ""}class Model(nn.Module):
    def __init__(self):
        super().__init__()
{_indented(init)}

    def forward(self, {inputs}):
{_indented(body)}
        return {returned}


def make():
    torch.manual_seed(0)
    return Model().train()


def batch():
    generator = torch.Generator().manual_seed(1)
    return {{
{made}
    }}


{ending}
'''


def _ending(recipe: Recipe, writer: Writer, rng: random.Random, outside: str | bool) -> tuple[str, str]:
    """What forward returns, and the definitions of loss_fn, choice and total."""
    names = writer.losses
    if outside:
        for name, drawn in INPUTS.items():
            if f"'{name}'" in str(outside):
                writer.inputs.setdefault(name, drawn)
        extra = "".join(f" + output[1][{index}]" for index in range(len(names)))
        read = str(outside).replace("output", "output[0]") if names else str(outside)
        returned = f"h, ({', '.join(names)},)" if names else "h"
        ending = f"def loss_fn(output, batch):\n    return {read}{extra}\n\n\nchoice = None\n\n\ntotal = loss_fn"
        return returned, ending
    if recipe.output == "named" and len(names) > 1:
        weights = {name: rng.choice((1.0, 0.5, 2.0)) for name in names}
        total = " + ".join(f"{weight} * output[{name!r}]" for name, weight in weights.items())
        returned = "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"
        return returned, _inside(repr(weights), total)
    if recipe.output == "named_all" and len(names) > 1:
        returned = f"({', '.join(names)},)"
        return returned, _inside("'sum'", "sum(output)")
    if recipe.combine == "uncertain":
        writer.init.append("self.uncertainty = nn.Parameter(torch.tensor(0.3))")
    weighted = " + ".join(f"{rng.choice(('', '0.5 * ', '2.0 * ', '0.1 * '))}{name}" for name in names)
    text = COMBINATIONS[recipe.combine].format(
        sum=" + ".join(names), weighted=weighted, first=names[-1], last=names[0], list=", ".join(names)
    )
    writer.body.append(writer._spelled(f"loss = {text}"))
    if recipe.output == "dict":
        return '{"loss": loss, "hidden": h.detach()}', _inside("None", 'output["loss"]')
    if recipe.output == "object":
        return "SimpleNamespace(loss=loss, hidden=h)", _inside("None", "output.loss")
    return "loss", _inside("None", "output")


def _inside(choice: str, total: str) -> str:
    return f"loss_fn = None\nchoice = {choice}\n\n\ndef total(output, batch):\n    return {total}"


def _indented(lines: list[str]) -> str:
    return "\n".join(f"        {line}" for line in lines)


def build(source: str, name: str, is_random: bool) -> Built:
    """The model a source text defines; the text is a file, as a user's is, so that messages name its lines."""
    path = folder() / f"{name}.py"
    path.write_text(source)
    linecache.checkcache(str(path))
    found: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(source, path, "exec"), found)
    made = SimpleNamespace(**found)
    return Built(source, made.make(), made.batch(), made.loss_fn, made.choice, made.total, is_random)


def built(recipe: Recipe) -> Built:
    """A recipe's model."""
    text, is_random = source_of(recipe)
    return build(text, f"model_{recipe.seed}", is_random)
