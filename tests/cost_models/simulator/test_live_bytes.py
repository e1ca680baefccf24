"""The fast memory replay against a naive one, and the order of entries."""

from hypothesis import given, settings

from paraplan.cost_models.simulator.live_bytes import MemoryWalk, entries, live_bytes
from paraplan.cost_models.simulator.simulate import simulate_rank
from paraplan.ir.execution.rank_program import RankProgram, Step, StepKind
from tests.cost_models.rank_programs import (
    ADD,
    NaiveReplay,
    block,
    call,
    copy,
    issue,
    op,
    own,
    program,
    random_programs,
    summary,
    toy_costs,
    view,
    wait,
)
from tests.named import all_named


@settings(max_examples=400, deadline=None)
@given(random_programs())
def test_replay_equals_the_naive_one(made: RankProgram) -> None:
    naive = NaiveReplay(made).run()
    assert [summary(entry) for entry in entries(made)] == naive.entries
    assert list(live_bytes(made)) == naive.live
    trace = simulate_rank(made, toy_costs())
    assert trace.peak_bytes == naive.peak
    assert trace.tier_peak_bytes == {tier: peak for tier, peak in naive.tier_peaks.items() if peak}
    assert trace.memory[-1].live_bytes == naive.alive() if trace.memory else True


def test_entries_in_order_with_shapes_bytes_and_collectives() -> None:
    code = block(
        "F",
        "x unread",
        "w",
        {"x": own("x", 4), "unread": own("unread", 3), "y": own("y", 4), "i": own("i", 4), "w": view("i", 4)},
        op("y", "x", "x"),
        issue("i", "y"),
        wait("w", "i", "i y"),
    )
    steps = [
        call("F", "x0 u0", "g0", "x0 u0", action="0B1", microbatch=1),
        Step(kind=StepKind.ACCUMULATE, action="0B1", args=all_named("acc g0"), microbatch=1),
        Step(kind=StepKind.UPDATE, action="0UPDATE", args=all_named("p0")),
        Step(kind=StepKind.DROP, action="0UPDATE", drops=all_named("acc")),
        Step(kind=StepKind.DROP, action="0UPDATE", drops=()),
    ]
    found = list(entries(program([code], {"x0": 4, "u0": 3, "p0": 2}, steps)))
    assert [entry.key for entry in found] == [
        ("0B1", 0, 1, "drop", (), 0, 3, "", ()),
        ("0B1", 0, 1, ADD, ((4,),), 4, 4, "", ()),
        ("0B1", 0, 1, "all_reduce", ((4,),), 4, 0, "all_reduce@0", ()),
        ("0B1", 0, 1, "wait", ((4, 1),), 0, 4, "", ()),
        ("0B1", -1, 1, "accumulate", ((4, 1),), 0, 0, "", ()),
        ("0UPDATE", -1, -1, "update", (), 0, 0, "", ()),
        ("0UPDATE", -1, -1, "drop", (), 0, 4, "", ()),
    ]
    assert found[1].note == "F[0]"


def test_an_alias_keeps_a_storage_until_its_last_name_goes() -> None:
    values = {"a": own("a", 8), "b": own("b", 8), "y": own("y", 1), "y2": own("y2", 1)}
    code = block("F", "a b", "y", values, op("y", "a", "a"), op("y2", "b", "b y2"))
    made = program([code], {"x0": 8}, [call("F", "x0 x0", "y0", "x0")])
    assert [summary(entry) for entry in entries(made)] == [(ADD, 1, 0, ()), (ADD, 1, 9, ())]


def test_one_profile_per_situation() -> None:
    code = block("F", "x", "y", {"x": own("x", 3), "y": own("y", 3)}, op("y", "x", "x"))
    steps = [call("F", f"x{k}", f"x{k + 1}", f"x{k}") for k in range(50)] + [call("F", "x50", "z")]
    walk = MemoryWalk(program([code], {"x0": 3}, steps))
    for step in steps:
        walk.advance(step)
    assert len(walk.blocks["F"]._profiles) == 2
    assert walk.live == 6


def test_tiers_are_accounts_of_their_own() -> None:
    code = block(
        "F",
        "x",
        "y h'",
        {"x": own("x", 4), "h": own("h", 4, "host"), "h'": view("h", 4, "host"), "y": own("y", 3)},
        copy("h", "x"),
        op("y", "x"),
        wait("h'", "h", "x h"),
    )
    back = block(
        "B",
        "h",
        "x'",
        {"h": own("h", 4, "host"), "x": own("x", 4), "x'": view("x", 4)},
        copy("x", "h", "prefetch"),
        wait("x'", "x", "h x"),
    )
    steps = [call("F", "x0", "y0 h0", "x0"), call("B", "h0", "x1", "h0")]
    made = program([code, back], {"x0": 4}, steps)
    assert [(entry.key[3], *entry.key[5:]) for entry in entries(made)] == [
        ("offload", 0, 0, "", (("host", 4, 0),)),
        (ADD, 3, 0, "", ()),
        ("wait", 0, 4, "", ()),
        ("prefetch", 4, 0, "", ()),
        ("wait", 0, 0, "", (("host", 0, 4),)),
    ]
    trace = simulate_rank(made, toy_costs())
    assert (trace.peak_bytes, trace.tier_peak_bytes) == (7, {"host": 4})
