"""The simulator on programs small enough to work out by hand (one byte moved takes one second)."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers, lists

from paraplan.cost_models.bound import rank_bound, stream_bound
from paraplan.cost_models.costs import Costs
from paraplan.cost_models.simulator import simulate as simulate_module
from paraplan.cost_models.simulator.simulate import simulate, simulate_rank
from paraplan.ir.errors import ClusterError, CostModelError
from paraplan.ir.execution.rank_program import RankProgram, Step, StepKind
from paraplan.ir.execution.streams import HOST
from tests.cost_models.rank_programs import (
    block,
    call,
    copy,
    issue,
    op,
    own,
    program,
    random_programs,
    toy_costs,
    view,
    wait,
)
from tests.named import all_named


def overlapped(after: int) -> RankProgram:
    """An all-reduce of 10 bytes (2·(1/2)·10 = 10 s on 2 ranks) beside an op that moves 2·after bytes."""
    code = block(
        "F", "x t", "w",
        {"x": own("x", 10), "t": own("t", after), "y": own("y", 10), "i": own("i", 10), "z": own("z", after),
         "w": view("i", 10)},
        op("y", "x", "x"), issue("i", "y"), op("z", "t", "t z"), wait("w", "i", "i y"),
    )  # fmt: skip
    return program([code], {"x0": 10, "t0": after}, [call("F", "x0 t0", "out", "x0 t0")])


def test_collective_hidden_behind_compute() -> None:
    trace = simulate_rank(overlapped(after=8), toy_costs())
    assert trace.step_s == trace.compute_s == 20 + 16
    assert trace.comm_s == {"comm:in_node": 10}
    assert trace.exposed_comm_s == 0


def test_collective_exposed_by_a_wait() -> None:
    trace = simulate_rank(overlapped(after=2), toy_costs())
    assert trace.compute_s == 20 + 4
    assert trace.exposed_comm_s == 10 - 4
    assert trace.step_s == 30
    assert trace.work == {"compute": 24, "comm:in_node": 10} and trace.bound_s == 24


def test_spans_show_both_streams() -> None:
    trace = simulate_rank(overlapped(after=2), toy_costs())
    spans = {span.stream: span for span in trace.spans}
    assert (spans["compute"].start_s, spans["compute"].end_s, spans["compute"].busy_s) == (0, 30, 24)
    comm = spans["comm:in_node"]
    assert (comm.start_s, comm.end_s, comm.label, comm.phase, comm.segment) == (20, 30, "all_reduce", "F", 0)


def chain(*sizes: int) -> RankProgram:
    """Ops of 2 · size seconds, twice over."""
    names = [f"v{index}" for index in range(len(sizes))]
    values = {name: own(name, size) for name, size in zip(names, sizes, strict=True)}
    values |= {f"{name}y": own(f"{name}y", size) for name, size in zip(names, sizes, strict=True)}
    code = block("F", " ".join(names), f"{names[-1]}y", values, *(op(f"{name}y", name) for name in names))
    outer = {f"{name}0": size for name, size in zip(names, sizes, strict=True)}
    calls = [call("F", " ".join(outer), out, "") for out in ("out", "again")]
    return program([code], outer, calls)


def test_kernels_shorter_than_their_issue_wait_for_the_host() -> None:
    """Ends of the first call: 3 + 2, max(5, 6) + 10, 16 + 2, 18 + 2; by then the host is far ahead."""
    issued = simulate_rank(chain(1, 5, 1, 1), toy_costs(issue_s=3.0))
    free = simulate_rank(chain(1, 5, 1, 1), toy_costs())
    assert free.step_s == free.compute_s == issued.compute_s == 32
    assert issued.step_s == 20 + 16 and issued.stalled_s == {HOST: 4.0}
    assert issued.step_s == issued.compute_s + sum(issued.stalled_s.values())


@given(sizes=lists(integers(1, 9), min_size=1, max_size=8), issue=integers(0, 12))
def test_the_host_issues_in_order_and_ahead(sizes: list[int], issue: int) -> None:
    """Against every op by itself: it begins when the last has run and the host has issued it."""
    ends = [0.0]
    for count, size in enumerate(2 * sizes):
        ends.append(max(ends[-1], (count + 1) * issue) + 2 * size)
    found = simulate_rank(chain(*sizes), toy_costs(issue_s=float(issue)))
    assert found.step_s == ends[-1]


def away(kept_s: int) -> RankProgram:
    """12 bytes to the host and 8 to disk (12 and 2 * 8 s there, and back) beside an op of 2 * kept_s s."""
    values = {"a": own("a", 12), "b": own("b", 8), "t": own("t", kept_s), "z": own("z", kept_s)}
    for name, nbytes, tier in (("a", 12, "host"), ("b", 8, "disk")):
        values |= {f"{name}!": own(f"{name}!", nbytes, tier), f"{name}h": view(f"{name}!", nbytes, tier)}
        values |= {f"{name}?": own(f"{name}?", nbytes), f"{name}d": view(f"{name}?", nbytes)}
    code = block(
        "F",
        "a b t",
        "ad bd",
        values,
        copy("a!", "a"),
        copy("b!", "b", tier="disk"),
        op("z", "t", "t z"),
        wait("ah", "a!", "a a!"),
        copy("a?", "ah", "prefetch"),
        wait("bh", "b!", "b b!"),
        wait("ad", "a?", "ah a?"),
        copy("b?", "bh", "prefetch", "disk"),
        wait("bd", "b?", "bh b?"),
    )
    return program([code], {"a0": 12, "b0": 8, "t0": kept_s}, [call("F", "a0 b0 t0", "x y", "a0 b0 t0")])


def test_copies_have_a_stream_each_way_per_tier() -> None:
    trace = simulate_rank(away(kept_s=5), toy_costs())
    spans = {span.stream: (span.start_s, span.end_s, span.label) for span in trace.spans if "copy" in span.stream}
    assert spans == {
        "copy:host:out": (0, 12, "offload"),
        "copy:disk:out": (0, 16, "offload"),
        "copy:host:in": (12, 24, "prefetch"),
        "copy:disk:in": (24, 40, "prefetch"),
    }
    assert (trace.step_s, trace.compute_s, trace.exposed_copy_s, trace.exposed_comm_s) == (40, 10, 30, 0)
    assert trace.copy_s == {stream: end - start for stream, (start, end, _) in spans.items()}
    assert trace.comm_s == {} and trace.bound_s == 16
    assert trace.tier_peak_bytes == {"host": 12, "disk": 8}


def test_copies_are_hidden_behind_compute() -> None:
    trace = simulate_rank(away(kept_s=40), toy_costs())
    assert (trace.step_s, trace.exposed_copy_s) == (80 + 12 + 16, 12 + 16)


def test_a_cluster_without_a_disk_prices_no_copy_to_it() -> None:
    costs = toy_costs()
    (group,) = costs.cluster.groups
    bare = msgspec.structs.replace(costs.cluster, groups=(msgspec.structs.replace(group, disk=None),))
    with pytest.raises(ClusterError, match="no disk link is described"):
        simulate_rank(away(kept_s=1), Costs(bare, costs.mesh))


def test_collectives_of_one_level_queue() -> None:
    code = block(
        "F",
        "x",
        "a b",
        {"x": own("x", 10), "i": own("i", 10), "j": own("j", 10), "a": view("i", 10), "b": view("j", 10)},
        issue("i", "x"),
        issue("j", "x"),
        wait("a", "i"),
        wait("b", "j", "x"),
    )
    trace = simulate_rank(program([code], {"x0": 10}, [call("F", "x0", "a b", "x0")]), toy_costs())
    assert (trace.step_s, trace.compute_s, trace.exposed_comm_s) == (20, 0, 20)


def test_collective_waited_for_in_a_later_block() -> None:
    first = block("F", "x", "i", {"x": own("x", 10), "i": own("i", 10)}, issue("i", "x"))
    between = block("G", "t", "", {"t": own("t", 3), "z": own("z", 3)}, op("z", "t", "z"))
    last = block("H", "i", "w", {"i": own("i", 10), "w": view("i", 10)}, wait("w", "i", "i"))
    steps = [call("F", "x0", "i0"), call("G", "x0", ""), call("H", "i0", "w0", "i0")]
    trace = simulate_rank(program([first, between, last], {"x0": 10}, steps), toy_costs())
    assert trace.step_s == 10 and trace.compute_s == 6 and trace.exposed_comm_s == 4


def test_a_collective_nobody_waits_for_still_ends() -> None:
    code = block("F", "x", "i", {"x": own("x", 10), "i": own("i", 10)}, issue("i", "x"))
    trace = simulate_rank(program([code], {"x0": 10}, [call("F", "x0", "i0")]), toy_costs())
    assert trace.step_s == trace.exposed_comm_s == 10


def test_accumulate_moves_then_adds_and_update_streams_everything() -> None:
    code = block("B", "p", "g", {"p": own("p", 4), "g": own("g", 4)}, op("g", "p", "p"))
    steps = [
        call("B", "p0", "g0"),
        Step(kind=StepKind.ACCUMULATE, action="0B0", args=all_named("acc g0")),
        call("B", "p0", "g0"),
        Step(kind=StepKind.ACCUMULATE, action="0B1", args=all_named("acc g0")),
        Step(kind=StepKind.UPDATE, action="0UPDATE", args=all_named("p0")),
        Step(kind=StepKind.DROP, action="0UPDATE", drops=all_named("acc")),
    ]
    made = program([code], {"p0": 4}, steps, grads={"p0": "acc"}, optimizer_bytes=8, update_workspace_bytes=3)
    trace = simulate_rank(made, toy_costs())
    ends = [point.end_s for point in trace.memory]
    # call 8, move 0, call 8, add 3·4, update 2·params + grads + 2·states
    assert ends == [8, 8, 16, 28, 28 + 2 * 4 + 4 + 2 * 8, 56]
    assert [point.live_bytes for point in trace.memory] == [16, 16, 20, 16, 16, 12]
    assert trace.start_bytes == 12 and trace.peak_bytes == 20
    assert [span.phase for span in trace.spans][-1] == "UPDATE"


def test_peak_counts_views_saved_values_drops_and_workspace() -> None:
    forward = block(
        "F",
        "x p",
        "y",
        {"x": own("x", 10), "p": own("p", 7), "v": view("x", 10), "h": own("h", 20), "y": own("y", 5)},
        op("v", "x", "x", target="aten.view.default"),
        op("h", "v p", "p", workspace_bytes=6),
        op("y", "h"),
        saved="v h",
    )
    backward = block(
        "B",
        "v h g",
        "d",
        {"v": own("v", 10), "h": own("h", 20), "g": own("g", 5), "k": own("k", 20), "d": own("d", 10)},
        op("k", "h g", "h g"),
        op("d", "k v", "k v"),
    )
    steps = [
        call("F", "x0 p0", "y0 sv sh", drops="x0"),
        call("B", "sv sh y0", "d0", drops="sv sh y0", action="0B0"),
    ]
    trace = simulate_rank(program([forward, backward], {"x0": 10, "p0": 7}, steps), toy_costs())
    # x lives on as the saved view; inside F: 17 + 20 + 6 workspace = 43; after: x p h y = 42.
    # B: 42 + k 20 = 62, h and g die: 37, + d 10 = 47, then k and x die: p d = 17.
    assert [(point.peak_bytes, point.live_bytes) for point in trace.memory] == [(43, 42), (62, 17)]
    assert (trace.peak_bytes, trace.peak_step, trace.peak_instr) == (62, 1, 0)


def test_views_take_no_time_and_view_ops_that_copy_do() -> None:
    free = block("F", "x", "v", {"x": own("x", 10), "v": view("x", 10)}, op("v", "x", "x", target="aten.view.default"))
    copy = block("F", "x", "v", {"x": own("x", 10), "v": own("v", 6)}, op("v", "x", "x", target="aten.slice.Tensor"))
    steps = [call("F", "x0", "v0")]
    assert simulate_rank(program([free], {"x0": 10}, steps), toy_costs()).step_s == 0
    assert simulate_rank(program([copy], {"x0": 10}, steps), toy_costs()).step_s == 12


def test_blocks_are_priced_once_however_often_called(monkeypatch) -> None:
    priced: list[str] = []
    original = Costs.instr_s
    monkeypatch.setattr(Costs, "instr_s", lambda self, b, i: priced.append(i.target) or original(self, b, i))
    walked: list[str] = []
    compile_time = simulate_module.compile_time
    monkeypatch.setattr(simulate_module, "compile_time", lambda b, c: walked.append(b.name) or compile_time(b, c))
    code = block("F", "x", "y", {"x": own("x", 3), "y": own("y", 3)}, op("y", "x", "x"))
    steps = [call("F", f"x{k}", f"x{k + 1}", f"x{k}", microbatch=k) for k in range(500)]
    trace = simulate_rank(program([code], {"x0": 3}, steps), toy_costs())
    assert walked == ["F"] and len(priced) == 1
    assert trace.step_s == 500 * 6 and trace.peak_bytes == 6


def test_several_classes_end_with_the_last() -> None:
    short, long = overlapped(after=2), overlapped(after=8)
    result = simulate((short, long), (toy_costs(), toy_costs()), rank_class=(0, 1))
    assert result.busiest == 1 and result.step_s == 36 and result.compute_s == 36 and result.exposed_comm_s == 0
    assert len(result.peak_bytes) == 2 and result.peak_bytes[1] > result.peak_bytes[0]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([call("F", "gone", "y")], r"step 0 \(0F0, call\): nothing is called 'gone'"),
        ([call("G", "x0", "y")], "nothing is called 'G'"),
        ([call("F", "x0", "y"), call("F", "x0 x0", "y")], r"step 1 \(0F0\): block F takes 1 values and gives 1, but 2"),
        ([Step(kind=StepKind.DROP, action="0F0", drops=all_named("gone"))], "gone"),
    ],
)
def test_programs_that_name_nothing_are_refused_with_their_place(steps: list[Step], said: str) -> None:
    code = block("F", "x", "y", {"x": own("x", 3), "y": own("y", 3)}, op("y", "x", "x"))
    with pytest.raises(CostModelError, match=said):
        simulate_rank(program([code], {"x0": 3}, steps), toy_costs())


def test_wrong_mesh_unissued_wait_and_no_program_are_refused() -> None:
    code = block("F", "x", "w", {"x": own("x", 3), "i": own("i", 3), "w": view("i", 3)}, wait("w", "i"))
    made = program([code], {"x0": 3}, [call("F", "x0", "w0")])
    with pytest.raises(CostModelError, match="which nothing issued"):
        simulate_rank(made, toy_costs())
    with pytest.raises(CostModelError, match="mesh"):
        simulate_rank(made, toy_costs(4))
    with pytest.raises(CostModelError, match="at least one"):
        simulate((), ())


def test_bound_never_sums_streams() -> None:
    work = {"compute": 2.0, "comm:in_node": 2.5}
    assert stream_bound(work) == 2.5 and stream_bound({}) == 0.0
    assert rank_bound([work, {"compute": 3.0}]) == 3.0


@settings(max_examples=120, deadline=None)
@given(random_programs())
def test_simulated_step_is_never_below_the_bound_nor_above_the_sum(made: RankProgram) -> None:
    trace = simulate_rank(made, toy_costs())
    assert trace.step_s >= stream_bound(trace.work) - 1e-9
    assert trace.step_s <= sum(trace.work.values()) + 1e-9
    assert trace.step_s == pytest.approx(trace.compute_s + trace.exposed_comm_s)
