"""The fenced blocks of the documents."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Fence(NamedTuple):
    """A fenced block: its language, its text, and the line of the document it begins on."""

    document: Path
    language: str
    text: str
    line: int


def fences(document: Path) -> list[Fence]:
    """The blocks of a document, in order."""
    text = document.read_text()
    return [
        Fence(document, found[1], found[2], text[: found.start()].count("\n") + 2) for found in _FENCE.finditer(text)
    ]


def commands(fence: Fence) -> Iterator[list[str]]:
    """The words of every command of a block."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words
