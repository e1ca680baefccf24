"""When transfers are issued and waited for.

Each use (gradients that are reduced, parameters of the next segment, states of the next update) has a `TransferQueue`:

    issue             now; the oldest is waited for where more are under way than allowed
    prefetch, reach   so many consumers before the one that needs it, and waited for there
    passed            waited for once the segment after that which issued it has been passed
    wait_all          waited for now

A transfer over two axes is two collectives, the second of which reads what the first made. Prefetched, the first is
issued one consumer earlier than what goes one way, and the second once the consumer before is reached; of those issued
now, the second some segments later (`issue_due`). So neither is waited for at once, and at the end all second ones are
under way together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from paraplan.lowering.steps.step_writer import PendingTransfer, StepWriter, Transfer

LATER = 16
"""Segments passed until the second collective of what was issued follows: it waits for the first, which may stand
behind others on its link."""


@dataclass(frozen=True)
class Consumer:
    """What is about to be run, and the transfers that it needs the results of."""

    at: Hashable
    transfers: tuple[Transfer, ...]


@dataclass(eq=False)
class _Ahead:
    """A consumer ahead: its transfers yet to be issued, and those that were."""

    at: Hashable
    waiting: list[Transfer]
    pending: list[PendingTransfer] = field(default_factory=list)


@dataclass
class TransferQueue:
    """The transfers of one use.

    Attributes:
        writer: of the rank.
        depth: consumers ahead of which transfers are prefetched; and of those issued that hold bytes, how many may be
            under way.
        most_held_bytes: what these may hold, where that allows more.
    """

    writer: StepWriter
    depth: int = 1
    most_held_bytes: int = 0
    _line: list[Consumer] = field(default_factory=list)
    _ahead: list[_Ahead] = field(default_factory=list)
    _issued: list[PendingTransfer] = field(default_factory=list)

    def prefetch(self, consumers: Iterable[Consumer]) -> None:
        """These come next, in this order."""
        self._line = list(consumers)
        self.advance()

    def begin(self) -> None:
        """The first consumer is next: the second collectives of what it needs are issued."""
        for ahead in self._ahead[:1]:
            for each in ahead.pending:
                each.issue_rest()

    def issue_rest(self) -> None:
        """The second collectives of all that was prefetched are issued."""
        for ahead in self._ahead:
            for each in ahead.pending:
                each.issue_rest()

    def reach(self, at: Hashable) -> None:
        """A consumer is next: what it needs is waited for, and what the next ones need is issued."""
        if self._ahead and self._ahead[0].at == at:
            self.wait()
            self.advance()

    def wait(self) -> None:
        """Wait for what the next consumer needs."""
        for each in self._ahead.pop(0).pending:
            each.wait()

    def advance(self) -> None:
        """Issue what consumers ahead need, and of the one after them what has two ways to go."""
        while self._line and len(self._ahead) <= self.depth:
            consumer = self._line.pop(0)
            self._ahead.append(_Ahead(consumer.at, list(consumer.transfers)))
        self.begin()
        for index, ahead in enumerate(self._ahead):
            if not ahead.waiting:
                continue
            early = [each for each in ahead.waiting if index < self.depth or len(each.blocks) > 2]
            ahead.pending += [self.writer.issue(each) for each in early]
            ahead.waiting = [each for each in ahead.waiting if each not in early]

    def issue(self, transfer: Transfer) -> None:
        """Issue a transfer now."""
        self._issued.append(self.writer.issue(transfer))
        while len(holding := [each for each in self._issued if each.transfer.held_bytes]) > self.depth:
            if sum(each.transfer.held_bytes for each in holding) <= self.most_held_bytes:
                break
            self._wait(holding[0])

    def issue_due(self) -> None:
        """A segment was passed: the second collectives of what was issued so many before it are issued."""
        for each in self._issued:
            each.num_passed += 1
            if each.num_passed > LATER:
                each.issue_rest()

    def passed(self) -> None:
        """A segment was passed: what was issued before it is waited for."""
        for each in tuple(self._issued):
            if each.num_passed:
                self._wait(each)
            each.num_passed += 1

    def wait_all(self) -> None:
        """Wait for all that were issued."""
        for each in self._issued:
            each.issue_rest()
        while self._issued:
            self._wait(self._issued[0])

    def _wait(self, each: PendingTransfer) -> None:
        self._issued.remove(each)
        each.wait()


def consumers(at: Sequence[Hashable], transfers: Sequence[Transfer | None]) -> list[Consumer]:
    """Consumers that need a transfer each, or nothing."""
    return [Consumer(each, () if needed is None else (needed,)) for each, needed in zip(at, transfers, strict=True)]
