"""Schedules as text and CSV come back equal, and torch reads the CSV as it reads its own."""

from __future__ import annotations

import csv

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from paraplan.ir.errors import InvalidPlanError
from paraplan.ir.execution.schedule import spread
from paraplan.planner.schedules.complete import orders_of
from paraplan.planner.schedules.exchange_formats import from_csv, from_text, to_csv, to_text
from paraplan.planner.schedules.named import NAMED, named_schedule
from paraplan.planner.schedules.schedule_problem import stages_of


@pytest.mark.parametrize("name", sorted(NAMED))
def test_round_trips(name: str) -> None:
    made = named_schedule(name, 4, 8)
    assert from_text(to_text(made)) == made
    wide = spread(made, (0, 0, 1, 1, 2, 2, 3, 3))
    assert from_text(to_text(wide)) == wide
    if made.num_replicas == 1:
        assert from_csv(to_csv(made), name) == made
    else:
        with pytest.raises(InvalidPlanError, match="2 replicas of each stage"):
            to_csv(made)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zb-v", "hanayo"])
def test_torch_reads_it(name: str) -> None:
    """Torch's own parser and validator; where a stage lies is found from the actions."""
    made = named_schedule(name, 4, 8)
    rows = list(csv.reader(to_csv(made).splitlines()))
    read = {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    assert [[str(action) for action in read[rank]] for rank in read] == rows
    num_stages = 1 + max(action.stage_index for row in read.values() for action in row)
    lies = torch_schedules._validate_schedule(read, 4, num_stages, 8)
    assert {stage: rank for rank, held in enumerate(stages_of(orders_of(made))) for stage in held} == lies


def test_written_out() -> None:
    made = named_schedule("gpipe", 2, 1)
    assert to_csv(made) == "0F0,0B0\n1F0,1B0\n"
    assert to_text(made) == (
        "schedule gpipe\nreplicas 1\nranks 0 1\n"
        "class 0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0UPDATE\n"
        "class 1: 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD 1UPDATE\n"
    )
    assert from_csv(",,0F0,,,0B0\n,1F0,1B0,\n", "gpipe") == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", r"row 1, cell 2: no such action: '0X0'"),
        ("0F0,0B0\n1F0,1SEND_B0,1B0\n", r"row 2, cell 2: 1SEND_B0; only F, B, I and W"),
        ("\n", "no computation"),
        ("0B0,0F0\n", r"position 0, computation 0 \(0B0\) never gets what it needs: 0F0"),
    ],
)
def test_bad_csv(text: str, message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        from_csv(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f1b", "line 1: it should start with 'schedule'"),
        ("schedule x\nranks 0", "line 2: it should start with 'replicas'"),
        ("schedule x\nreplicas 1\nranks 0\nclass 1: 0F0", "line 4: it should start with 'class 0:'"),
        ("schedule x\nreplicas 1\nranks 1\nclass 0: 0F0", "line 3: class 1 of 1"),
        ("schedule x\nreplicas -1\nranks 0\nclass 0: 0F0", "whole numbers"),
        ("schedule x\nreplicas 1\nranks 0\nclass 0: 0G0", "no such action"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        from_text(text)
