"""The figures of the house count what they say they count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.house import FIGURES, Source

BREACHES = {
    "functions of more than 8 parameters": "class A:\n    def f(self, a, b, c, d, e, f, g, *h, **i): pass",
    "functions of more than 60 lines": "def f():\n" + "    x = 1\n" * 60,
    "functions of complexity over 15": "def f(x):\n" + "    if x: pass\n" * 15,
    "lines left out of formatting": "x = 1  # fmt: skip",
    "places that read the text of a name": "step.block.split('.')",
    "caches and registries of modules": "_KEPT = {}",
    "public functions of 3 parameters or more without a word on each": "def f(a, b, c):\n    '''F.'''",
}


@pytest.mark.parametrize("what", FIGURES)
def test_a_figure_counts_one_breach_and_none_where_there_is_none(what: str) -> None:
    for source, count in ((BREACHES[what], 1), ("def f(a):\n    '''F.'''\n    return a.name", 0)):
        read = Source(Path("paraplan/report/x.py"), source, ast.parse(source))
        assert len(list(FIGURES[what](read))) == count, source
