"""What is alive at an instant: against the naive replay, at every instant; and who made and reads it, by hand."""

from __future__ import annotations

from hypothesis import given, settings

from paraplan.cost_models.simulator.live_storages import BEFORE, STATES, WORKSPACE, alive_at
from paraplan.ir.execution.rank_program import BlockRole, RankProgram, Step, StepKind
from paraplan.ir.machine.tiers import TIERS
from tests.cost_models.rank_programs import (
    NaiveReplay,
    block,
    call,
    copy,
    op,
    own,
    program,
    random_programs,
    view,
    wait,
)
from tests.named import all_named


@settings(max_examples=100, deadline=None)
@given(random_programs())
def test_bytes_of_every_instant_equal_the_naive_ones(made: RankProgram) -> None:
    naive = NaiveReplay(made).run()
    for place, (device, away) in naive.instants.items():
        if place[1] < 0 and made.steps[place[0]].kind is not StepKind.CALL:
            device += made.update_workspace_bytes if made.steps[place[0]].kind is StepKind.UPDATE else 0
        alive = alive_at(made, place)
        assert sum(each.nbytes for each in alive if not each.tier) == device, place
        assert {tier: sum(each.nbytes for each in alive if each.tier == tier) for tier in TIERS} == away, place


def told(made: RankProgram, place: tuple[int, int]) -> dict[str, tuple[object, ...]]:
    return {each.name: (each.nbytes, each.tier, each.maker, each.reader) for each in alive_at(made, place)}


def forward_and_back() -> RankProgram:
    """`x` makes `y`, a view of which is saved; `t` dies inside; a copy of `y` waits on the host."""
    code = block(
        "k0.0.F", "x", "o s h",
        {
            "x": own("x", 4), "t": own("t", 5), "y": own("y", 6), "s": view("y", 6), "o": own("o", 1),
            "h!": own("h!", 6, "host"), "h": view("h!", 6, "host"),
        },
        op("t", "x"), op("y s", "t", workspace_bytes=100), op("o", "y", "t"), copy("h!", "s"), wait("h", "h!", "h! y"),
    )  # fmt: skip
    back = block(
        "k0.0.B",
        "s x",
        "g",
        {"s": own("s", 6), "x": own("x", 4), "g": own("g", 4)},
        op("g", "s x", "s"),
        role=BlockRole.BACKWARD,
    )
    steps = [
        call("k0.0.F", "x0", "o0 s0 h0"),
        call("k0.0.B", "s0 x0", "g0", "s0", action="0B0"),
        Step(kind=StepKind.ACCUMULATE, action="0B0", args=all_named("acc g0")),
        Step(kind=StepKind.UPDATE, action="0UPDATE", args=all_named("x0"), drops=all_named("o0")),
    ]
    return program([code, back], {"x0": 4, "idle": 7}, steps, {"x0": "acc"}, 9, 11)


def test_makers_and_readers() -> None:
    made = forward_and_back()
    idle = {"idle": (7, "", BEFORE, None), STATES: (9, "", BEFORE, None)}
    assert told(made, BEFORE) == {"x0": (4, "", BEFORE, (0, 0)), **idle}
    assert told(made, (0, 1)) == {
        "x0": (4, "", BEFORE, (1, 0)),
        "t": (5, "", (0, 0), (0, 1)),
        "y": (6, "", (0, 1), (0, 2)),
        WORKSPACE: (100, "", (0, 1), None),
        **idle,
    }
    assert told(made, (1, 0)) == {
        "x0": (4, "", BEFORE, (1, 0)),
        "y": (6, "", (0, 1), (1, 0)),
        "o": (1, "", (0, 2), None),
        "h!": (6, "host", (0, 3), None),
        "g": (4, "", (1, 0), (3, -1)),
        **idle,
    }
    assert told(made, (3, -1)) == {
        "x0": (4, "", BEFORE, (3, -1)),
        "o": (1, "", (0, 2), None),
        "h!": (6, "host", (0, 3), None),
        "g": (4, "", (1, 0), (3, -1)),
        WORKSPACE: (11, "", (3, -1), None),
        **idle,
    }


def test_what_a_later_block_of_the_backward_is_given() -> None:
    for place in ((0, 2), (1, -1), (1, 0)):
        assert {each.name: each.backward for each in alive_at(forward_and_back(), place) if each.maker[0] == 0} == {
            "y": True,
            "o": False,
            **({"h!": False} if place[0] else {"t": False}),
        }
