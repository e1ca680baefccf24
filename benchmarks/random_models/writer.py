"""The source of a random model while its pieces write it.

A piece is text (`pieces/*.txt`): a heading, lines of `__init__`, `--`, lines of `forward`, and perhaps `++` with what
the model needs beside its class. In forward, `h` is the activation, of one of the `FORMS`; a piece leaves it in the
same form or in the one its heading names behind `->`. In the text

    #            the number of the piece, which makes names its own
    [[a||b]]     one of these, drawn
    @lin         a new linear layer on the last dim of h (a 1x1 convolution of images)
    @layer       one that an earlier piece has called (or a new one)
    @weight      the [D, D] weight of any linear layer of the model, earlier or later
    @saved       an activation of this form that an earlier piece kept (`@keep` keeps h), or h
    @act         an activation function
    @name        an input of `INPUTS`
    @loss x      adds the scalar x to the loss
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FORMS = {"seq": "[B, T, D]", "image": "[B, D, S, S]", "vector": "[B, D]"}
"""What `h` is between two pieces."""

INPUTS = {
    "mask": "torch.rand(B, T, generator=generator) < 0.7",
    "ids": "torch.randint(0, V, (B, T), generator=generator)",
    "cats": "torch.randint(0, V, (B,), generator=generator)",
    "extra": "torch.randn(B, D, generator=generator)",
    "noise": "torch.randn(B, T, D, generator=generator)",
    "bags": "torch.randint(0, V, (B, 3), generator=generator)",
    "picture": "torch.randn(B, D, S, S, generator=generator)",
    "labels": "torch.randint(0, V, (B, T), generator=generator)",
    "sparse": "torch.where(torch.rand(B, T, generator=generator) < 0.3, -100, "
    "torch.randint(0, V, (B, T), generator=generator))",
    "pixels": "torch.randint(0, V, (B, S, S), generator=generator)",
    "classes": "torch.randint(0, V, (B,), generator=generator)",
    "wanted": "torch.randn(B, D, generator=generator)",
    "shares": "torch.rand(B, V, generator=generator)",
    "sample_weight": "torch.rand(B, generator=generator) + 0.5",
}
"""Inputs of forward, and what draws them."""

ACTIVATIONS = (
    *("F.relu", "F.gelu", "torch.tanh", "F.silu", "torch.sigmoid", "F.elu", "F.softplus", "F.leaky_relu", "F.mish"),
    *("F.hardswish", "F.selu", "torch.sin", "F.hardtanh", "F.logsigmoid", "torch.erf", "torch.atan"),
)


@dataclass(frozen=True)
class Piece:
    """A part of a model as its file has it.

    Attributes:
        name: what it is.
        forms: of `h` it takes.
        after: the form it leaves; "" for the one it took.
        is_random: whether it draws random numbers.
        init, body, helper: its lines.
    """

    name: str
    forms: tuple[str, ...]
    after: str
    is_random: bool
    init: tuple[str, ...]
    body: tuple[str, ...]
    helper: str


@dataclass
class Writer:
    """A model's source so far; what its pieces offer one another."""

    form: str
    rng: random.Random = field(default_factory=random.Random)
    count: int = 0
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    saved: dict[str, list[str]] = field(default_factory=lambda: {form: [] for form in FORMS})
    layers: dict[bool, list[str]] = field(default_factory=lambda: {True: [], False: []})
    losses: list[str] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)
    is_random: bool = False

    def write(self, piece: Piece, seed: int) -> None:
        """Append a piece, with draws of its own."""
        self.rng = random.Random(seed)
        self.count += 1
        self.init += [self._spelled(line) for line in piece.init]
        for line in piece.body:
            self._line(self._spelled(line))
        if piece.helper:
            self.helpers.setdefault(piece.helper)
        self.is_random |= piece.is_random
        self.form = piece.after or self.form

    def _line(self, line: str) -> None:
        if "@keep" in line:
            name = f"kept{self.count}"
            self.saved[self.form].append(name)
            line = line.replace("@keep", f"{name} = h")
        if line.lstrip().startswith("@loss "):
            name = f"loss{self.count}_{len(self.losses)}"
            self.losses.append(name)
            line = line.replace("@loss ", f"{name} = ")
        self.body.append(line)

    def _spelled(self, line: str) -> str:
        """A line with its placeholders filled in; `@weight` waits until all layers are known."""
        line = re.sub(r"\[\[(.*?)\]\](?!\])", lambda found: self.rng.choice(found[1].split("||")), line)
        line = re.sub(r"@lin\b", lambda _: self._linear(), line)
        line = re.sub(r"@layer\b", lambda _: self.rng.choice(self._callable or [self._linear()]), line)
        line = re.sub(r"@act\b", lambda _: self.rng.choice(ACTIVATIONS), line)
        line = re.sub(r"@saved\b", lambda _: self.rng.choice(["h", *self.saved[self.form][-3:]]), line)
        line = re.sub(r"@weight\b", lambda _: f"@weight:{self.rng.randrange(1 << 16)}", line)
        for name in re.findall(r"@(\w+)", line):
            if name in INPUTS:
                self.inputs.setdefault(name, INPUTS[name])
                line = re.sub(rf"@{name}\b", name, line)
        return line.replace("#", str(self.count))

    @property
    def _callable(self) -> list[str]:
        return self.layers[self.form == "image"]

    def _linear(self) -> str:
        name = f"self.lin{self.count}_{len(self._callable)}"
        kind = "nn.Conv2d(D, D, 1" if self.form == "image" else "nn.Linear(D, D"
        self.init.append(f"{name} = {kind}{self.rng.choice(('', '', ', bias=False'))})")
        self._callable.append(name)
        return name

    def finished(self) -> tuple[list[str], list[str]]:
        """Lines of `__init__` and of forward."""
        self.form = "vector"
        if any("@weight" in line for line in self.body + self.init) and not self._callable:
            self._linear()

        def chosen(found: re.Match[str]) -> str:
            return f"{self._callable[int(found[1]) % len(self._callable)]}.weight"

        return tuple([re.sub(r"@weight:(\d+)", chosen, x) for x in part] for part in (self.init, self.body))  # type: ignore[return-value]


def read_pieces(name: str) -> dict[str, Piece]:
    """The pieces of one file, by name."""
    text = (Path(__file__).parent / "pieces" / f"{name}.txt").read_text()
    return {piece.name: piece for piece in map(_parsed, re.split(r"^== ", text, flags=re.M)[1:])}


def _parsed(text: str) -> Piece:
    heading, _, rest = text.partition("\n")
    name, forms, *flags = heading.split("|")
    before, _, after = forms.partition("->")
    body, _, helper = rest.partition("\n++\n")
    init, _, forward = ("\n" + body).rpartition("\n--\n")
    return Piece(
        name.strip(),
        tuple(before.split()),
        after.strip(),
        "random" in " ".join(flags),
        tuple(_lines(init)),
        tuple(_lines(forward)),
        helper.strip("\n"),
    )


def _lines(text: str) -> Iterator[str]:
    return (line.rstrip() for line in text.splitlines() if line.strip())
