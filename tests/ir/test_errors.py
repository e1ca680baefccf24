"""An error that takes work to explain does that work once, where it is explained, and never to be read."""

from __future__ import annotations

import pickle

import pytest

from paraplan.ir.errors import InfeasibleError, NoPlanError, SolverLimitError


@pytest.mark.parametrize("kind", [InfeasibleError, SolverLimitError])
def test_an_error_is_explained_when_it_is_asked_to_be(kind: type[NoPlanError]) -> None:
    made: list[str] = []

    def explain() -> str:
        made.append("it does not fit: 3 GiB are missing")
        return made[-1]

    fault = kind("it does not fit", explain)
    outer = kind(f"{fault}; use less", lambda: f"{fault.explained()}; use less")
    assert str(fault) == "it does not fit" and str(outer) == "it does not fit; use less" and not made
    told = outer.explained()
    assert str(told) == "it does not fit: 3 GiB are missing; use less" and type(told) is kind
    assert told.explained() is told and len(made) == 1
    sent = pickle.loads(pickle.dumps(outer))
    assert type(sent) is kind and str(sent) == str(outer) and sent.explained() is sent
    assert str(kind("plain").explained()) == "plain"
