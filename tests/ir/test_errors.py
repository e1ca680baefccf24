"""An error whose message takes work does that work once, and only if somebody reads it."""

from __future__ import annotations

import pickle

import pytest

from paraplan.ir.errors import InfeasibleError, NoPlanError, SolverLimitError


@pytest.mark.parametrize("kind", [InfeasibleError, SolverLimitError])
def test_a_message_is_made_when_it_is_read(kind: type[NoPlanError]) -> None:
    made: list[str] = []

    def message() -> str:
        made.append("3 GiB are missing")
        return made[-1]

    fault = kind(message)
    with pytest.raises(NoPlanError) as caught:
        raise fault
    assert not made
    outer = kind(lambda: f"{fault}; use less")
    assert not made
    assert str(outer) == "3 GiB are missing; use less" and str(caught.value) == str(fault) == "3 GiB are missing"
    assert len(made) == 1
    sent = pickle.loads(pickle.dumps(outer))
    assert type(sent) is kind and str(sent) == str(outer) and str(kind("plain")) == "plain"
