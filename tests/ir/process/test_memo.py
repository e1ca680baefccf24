"""What plans share is lowered once, and is what each of them would have had alone."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.ir.machine.mesh import S, parse_placement
from paraplan.ir.process.memo import SESSION, Lately, Same, Session, release_caches
from paraplan.lowering import stage_blocks
from paraplan.lowering.rank_classes import lower_anew
from paraplan.planner.sampling import random_plan


def test_the_least_recently_used_goes_when_all_weigh_too_much() -> None:
    made: list[str] = []
    memo = Lately[str](6, len)

    def get(text: str) -> str:
        return memo.get(text, lambda: made.append(text) or text)  # type: ignore[func-returns-value]

    for text in ("aa", "bb", "aa", "cc", "ddd", "aa", "bb"):
        assert get(text) == text
    assert made == ["aa", "bb", "cc", "ddd", "aa", "bb"], "bb and aa made room for ddd, cc and ddd for those"
    assert get("longer than all") == "longer than all" and len(memo) == 2


def test_a_key_is_an_object_and_not_what_it_holds() -> None:
    one, other = [1], [1]
    assert Same(one) == Same(one) and hash(Same(one)) == hash(Same(one)) and Same(one) != Same(other)


def test_blocks_are_shared_and_as_if_made_alone(tiny_gpt2, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    plan = random_plan(tiny_gpt2.job(2), 4, 4)
    other = msgspec.structs.replace(plan, bundle_bytes=0)
    (first, *_), (second, *_) = lower_anew(plan), lower_anew(other)
    forward = [name for name in first.blocks if name.endswith((".F", ".B"))]
    assert forward and all(second.blocks[name] is first.blocks[name] for name in forward)
    for memo in ("_FORWARDS", "_BACKWARDS"):
        monkeypatch.setattr(stage_blocks, memo, Lately(0, lambda made: 1))
    alone = lower_anew(other)[0]
    assert alone == second and all(alone.blocks[name] is not first.blocks[name] for name in forward)


def test_a_session_empties_what_it_owns() -> None:
    session, calls = Session(), []

    @session.cached(2)
    def twice(number: int) -> int:
        calls.append(number)
        return 2 * number

    lately: Lately[int] = session.lately("here", 10)
    table: dict[str, int] = session.owned("table", {})
    assert [twice(1), twice(1), lately.get("a", lambda: 3)] == [2, 2, 3]
    table["b"] = 4
    assert sorted(session.sizes().values()) == [1, 1, 1]
    session.release()
    assert not any(session.sizes().values())
    assert (twice(1), calls) == (2, [1, 1])


def test_the_package_s_caches_are_released() -> None:
    parse_placement("S7")
    assert SESSION.sizes()["paraplan.ir.machine.mesh.parse_placement"]
    release_caches()
    assert not any(SESSION.sizes().values())
    assert parse_placement("S7") == S(7)
