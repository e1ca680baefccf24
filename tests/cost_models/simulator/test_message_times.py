"""Messages in the simulator: both ends, in order, and deadlocks named."""

from __future__ import annotations

import pytest

from paraplan.cost_models.simulator.message_times import Mailbox
from paraplan.ir.errors import CostModelError


def test_a_message_begins_when_both_ends_are_there_and_the_one_before_is_through() -> None:
    mail = Mailbox()
    mail.post("0>1", ("a", 0), True, 1.0, 2.0)
    assert not mail.times
    mail.post("0>1", ("b", 0), True, 1.5, 1.0)
    mail.post("0>1", ("a", 0), False, 3.0, 0.5)
    assert mail.times == {("a", 0): (3.0, 5.0)}
    mail.post("0>1", ("b", 0), False, 3.0, 1.0)
    assert mail.times["b", 0] == (5.0, 6.0)
    mail.post("1>0", ("c", 0), False, 0.0, 1.0)
    mail.post("1>0", ("c", 0), True, 0.5, 1.0)
    assert mail.times["c", 0] == (0.5, 1.5)


def test_a_message_of_parts_begins_with_the_last_of_them() -> None:
    mail = Mailbox()
    mail.post("0>1", ("a", 0), False, 0.5, 1.0)
    mail.post("0>1", ("a", 0), True, 1.0, 2.0, parts=2)
    assert not mail.times
    mail.post("0>1", ("a", 0), True, 1.25, 2.0, parts=2)
    assert mail.times == {("a", 0): (1.25, 3.25)}


def test_messages_that_cross_are_refused() -> None:
    mail = Mailbox()
    mail.post("0>1", ("a", 0), True, 0.0, 1.0)
    with pytest.raises(CostModelError, match="a of microbatch 0 is sent where b of microbatch 0 is received"):
        mail.post("0>1", ("b", 0), False, 0.0, 1.0)
