"""Schedules as text and data, and what the verifier lets through and refuses, with its reasons."""

from __future__ import annotations

import msgspec
import pytest

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import (
    PER_STEP,
    Action,
    ActionKind,
    Schedule,
    accumulate,
    parse_action,
    split_classes,
)
from paraplan.lowering.verification.verify_schedule import verify_schedule


def schedule(*ranks: str) -> Schedule:
    """One class per rank, actions separated by blanks."""
    return Schedule(
        name="hand", classes=tuple(tuple(text.split()) for text in ranks), rank_class=tuple(range(len(ranks)))
    )


def check(made: Schedule, stages: tuple[tuple[int, ...], ...], m: int) -> tuple[int, ...]:
    count = 1 + max(stage for held in stages for stage in held)
    return verify_schedule(made, count, m, stages)


TAIL = " {s}REDUCE_GRAD {s}UPDATE"
BOTH = TAIL.format(s=1) + TAIL.format(s=0)
GPIPE = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1" + TAIL.format(s=0),
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1" + TAIL.format(s=1),
)
ONE_F_ONE_B = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0SEND_F2 0RECV_B1 0B1 0RECV_B2 0B2" + TAIL.format(s=0),
    "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1RECV_F2 1SEND_B1 1F2 1B2 1SEND_B2" + TAIL.format(s=1),
)
ZERO_BUBBLE = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1" + TAIL.format(s=0),
    "1RECV_F0 1F0 1I0 1RECV_F1 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1" + TAIL.format(s=1),
)


@pytest.mark.parametrize("kind", list(ActionKind))
def test_actions_round_trip(kind: ActionKind) -> None:
    for micro in (-1,) if kind in PER_STEP else (0, 17):
        action = Action(stage=12, kind=kind, microbatch=micro)
        assert parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "0F", "0UPDATE0", "0X0", "-1F0", "0F-1", "0F0 ", " 0F0", "0f0", "0F0.5"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="action"):
        parse_action(text)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("ranks", [1, 4])
def test_accumulation(m: int, ranks: int) -> None:
    assert check(accumulate(m, ranks), ((0,),) * ranks, m) == (1,) * ranks
    assert accumulate(2, 1).classes == (("0F0", "0B0", "0F1", "0B1", "0REDUCE_GRAD", "0UPDATE"),)


@pytest.mark.parametrize(
    ("ranks", "m", "flights"), [(GPIPE, 2, (2, 2)), (ONE_F_ONE_B, 3, (2, 1)), (ZERO_BUBBLE, 2, (2, 2))]
)
def test_hand_written_pipelines_pass(ranks: tuple[str, ...], m: int, flights: tuple[int, ...]) -> None:
    assert check(schedule(*ranks), ((0,), (1,)), m) == flights


def test_both_ranks_of_a_stage_must_send() -> None:
    wide = schedule(GPIPE[0], GPIPE[0].replace(" 0SEND_F1", ""), GPIPE[1])
    check(schedule(GPIPE[0], GPIPE[0], GPIPE[1]), ((0,), (0,), (1,)), 2)
    with pytest.raises(InvalidPlanError, match="rank 0 waits at 0SEND_F1 for a 0SEND_F1 that never comes on rank 1"):
        check(wide, ((0,), (0,), (1,)), 2)


def test_stages_on_one_rank_hand_over_without_messages() -> None:
    check(schedule("0F0 1F0 1B0 0B0" + BOTH), ((0, 1),), 1)
    for actions, message in (
        ("1F0 0F0 1B0 0B0", r"action 0 \(1F0\): stage 0, on the same rank, has not run microbatch 0"),
        ("0F0 1F0 0B0 1B0", r"action 2 \(0B0\): stage 1, on the same rank, has not run"),
        ("0F0 0SEND_F0 1F0 1B0 0B0", r"\(0SEND_F0\): the rank runs stage 1 itself"),
        ("0F0 1RECV_F0 1F0 1B0 0B0", r"\(1RECV_F0\): the rank runs stage 0 itself"),
    ):
        with pytest.raises(InvalidPlanError, match=message):
            check(schedule(actions + BOTH), ((0, 1),), 1)


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ("0F0 0B0 0F1 0REDUCE_GRAD 0UPDATE", "only 1 of 2 backwards are done"),
        ("0F0 0B0 0F1 0B1 0UPDATE", "update before the gradients are reduced"),
        ("0F0 0B0 0F1 0B1 0REDUCE_GRAD", "misses its REDUCE_GRAD or UPDATE"),
        ("0F0 0B0 0F1 0B1", "misses its REDUCE_GRAD or UPDATE"),
        ("0F0 0B0", "misses the forward or backward of microbatch 1"),
        ("", "misses the forward or backward of microbatch 0"),
        ("0F0 0F0 0B0 0F1 0B1 0REDUCE_GRAD 0UPDATE", r"action 1 \(0F0\): done twice"),
        ("0F0 0B0 0F1 0B1 0REDUCE_GRAD 0UPDATE 0UPDATE", "done twice"),
        ("0B0 0F0 0F1 0B1 0REDUCE_GRAD 0UPDATE", r"rank 0, action 0 \(0B0\): backward before forward"),
        ("0I0 0F0 0W0 0F1 0B1 0REDUCE_GRAD 0UPDATE", "backward before forward"),
        ("0F0 0W0 0I0 0F1 0B1 0REDUCE_GRAD 0UPDATE", "weight gradient before input gradient"),
        ("0F0 0I0 0B0 0F1 0B1 0REDUCE_GRAD 0UPDATE", "B after I"),
        ("0F0 0B0 0I0 0W0 0F1 0B1 0REDUCE_GRAD 0UPDATE", "I after B"),
        ("0F0 0I0 0F1 0B1 0REDUCE_GRAD 0UPDATE", "only 1 of 2"),
        ("0F0 0B0 0F1 0B1 0F2 0REDUCE_GRAD 0UPDATE", "there are 2 microbatches"),
        ("0F0 0B0 1F1 0F1 0B1 0REDUCE_GRAD 0UPDATE", r"the rank holds stages \(0,\)"),
        ("0F0 0B0 0F1 0B1 0RECV_F0 0REDUCE_GRAD 0UPDATE", "there is no stage -1"),
        ("0F0 0B0 0F1 0B1 0SEND_F0 0REDUCE_GRAD 0UPDATE", "there is no stage 1"),
        ("0F0 0B0 0F1 0B1 0JUMP 0REDUCE_GRAD 0UPDATE", "no such action"),
    ],
)
def test_one_stage_faults(actions: str, message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        check(schedule(actions), ((0,),), 2)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "0SEND_F0 ", "", "rank 1 waits at 1RECV_F0 for a 0SEND_F0 that never comes on rank 0"),
        (1, " 1SEND_B1", "", "rank 0 waits at 0RECV_B1 for a 1SEND_B1 that never comes on rank 1"),
        (0, "0RECV_B1 0B1", "0B1", "no RECV_B of microbatch 1"),
        (1, "1F0 1RECV_F1", "1F0 1SEND_F1 1RECV_F1", "there is no stage 2"),
        (1, "1RECV_F0 1F0", "1F0 1RECV_F0", "no RECV_F of microbatch 0 comes before it"),
        (1, "1RECV_F0 ", "", "no RECV_F of microbatch 0"),
        (0, "0RECV_B1 ", "", "no RECV_B of microbatch 1"),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "no F of microbatch 0"),
        (1, "1B0 1SEND_B0", "1SEND_B0 1B0", "no B or I of microbatch 0"),
        (0, "0F0 0SEND_F0", "0RECV_B0 0F0 0SEND_F0", "done twice"),
        (0, "0F0 0SEND_F0 0F1", "0F0 0F1", "never comes on rank 0; add it"),
    ],
)
def test_pipeline_faults(rank: int, old: str, new: str, message: str) -> None:
    ranks = list(GPIPE)
    assert old in ranks[rank]
    ranks[rank] = ranks[rank].replace(old, new)
    with pytest.raises(InvalidPlanError, match=message):
        check(schedule(*ranks), ((0,), (1,)), 2)


def test_waiting_for_each_other_is_a_deadlock() -> None:
    """Both ranks first want what the other sends later."""
    ranks = (
        "0F0 0RECV_B0 0SEND_F0 0B0" + TAIL.format(s=0),
        "1RECV_F0 1F0 1B0 1SEND_B0" + TAIL.format(s=1),
    )
    with pytest.raises(InvalidPlanError, match="rank 0 waits at 0RECV_B0 for 1SEND_B0 of rank 1, rank 1 waits at 1"):
        check(schedule(*ranks), ((0,), (1,)), 1)


def test_a_send_waits_for_its_receive() -> None:
    """Sends that return at once would get through this; ones that wait for the other side do not."""
    ranks = (GPIPE[0], GPIPE[1].replace("1RECV_F1 1F1 1B0 1SEND_B0", "1B0 1SEND_B0 1RECV_F1 1F1"))
    with pytest.raises(
        InvalidPlanError, match="rank 0 waits at 0SEND_F1 for 1RECV_F1 of rank 1, rank 1 waits at 1SEND_B0"
    ):
        check(schedule(*ranks), ((0,), (1,)), 2)


def test_memory_for_microbatches_in_flight() -> None:
    made = schedule(*GPIPE)
    assert verify_schedule(made, 2, 2, ((0,), (1,)), max_in_flight=(2, 2)) == (2, 2)
    with pytest.raises(InvalidPlanError, match=r"rank 1, action 3 \(1F1\): 2 microbatches are in flight and"):
        verify_schedule(made, 2, 2, ((0,), (1,)), max_in_flight=(2, 1))


REPLICAS = (
    "0F0 0SEND_F0 1RECV_F1 1F1 1B1 0RECV_B0 1SEND_B1 0B0" + BOTH,
    "0F1 1RECV_F0 0SEND_F1 1F0 1B0 1SEND_B0 0RECV_B1 0B1" + BOTH,
)


def test_two_replicas_share_the_microbatches() -> None:
    made = msgspec.structs.replace(schedule(*REPLICAS), num_replicas=2)
    assert check(made, ((0, 1), (0, 1)), 2) == (2, 2)
    assert made.runners() == {(0, 0): (0,), (0, 1): (1,), (1, 0): (1,), (1, 1): (0,)}
    with pytest.raises(InvalidPlanError, match="only 1 of 2 backwards are done"):
        check(schedule(*REPLICAS), ((0, 1), (0, 1)), 2)  # nobody said that there are replicas
    with pytest.raises(InvalidPlanError, match="stage 0: no rank runs microbatch 2"):
        check(made, ((0, 1), (0, 1)), 3)
    thrice = msgspec.structs.replace(schedule(GPIPE[0], GPIPE[1], *REPLICAS), num_replicas=2)
    with pytest.raises(InvalidPlanError, match="stage 0: at most 2 groups of ranks should share 2 microbatches out"):
        check(thrice, ((0,), (1,), (0, 1), (0, 1)), 2)


def test_reductions_of_replicas_meet() -> None:
    """Both ranks hold both stages; reducing them in different orders is a deadlock."""
    turned = REPLICAS[1].replace(BOTH, TAIL.format(s=0) + TAIL.format(s=1))
    made = msgspec.structs.replace(schedule(REPLICAS[0], turned), num_replicas=2)
    with pytest.raises(InvalidPlanError, match="rank 0 waits at 1REDUCE_GRAD for 1REDUCE_GRAD of rank 1"):
        check(made, ((0, 1), (0, 1)), 2)


def test_ranks_and_classes_must_fit() -> None:
    with pytest.raises(InvalidPlanError, match="has 1 ranks, the cluster 2"):
        check(accumulate(1, 1), ((0,), (0,)), 1)
    lost = Schedule(name="hand", classes=accumulate(1, 1).classes, rank_class=(1,))
    with pytest.raises(InvalidPlanError, match="rank 0: no schedule class 1"):
        check(lost, ((0,),), 1)
    with pytest.raises(InvalidPlanError, match="no rank runs stage 1 of microbatch 0"):
        check(schedule("0F0 0B0 0REDUCE_GRAD 0UPDATE"), ((0, 1),), 1)


def test_classes_split_by_what_ranks_sit_on() -> None:
    one = accumulate(2, 4)
    split = split_classes(one, ("a", "a", "b", "a"))
    assert split.rank_class == (0, 0, 1, 0) and split.classes == one.classes * 2
    assert [split.actions(rank) for rank in range(4)] == [one.actions(rank) for rank in range(4)]
    assert split_classes(split, (0, 0, 0, 0)) == one  # and join again where the kinds are equal
    assert split_classes(one, (7, 7, 7, 7)) == one
