"""One try of one task: its states, what it counts, and how it keeps its group open."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from magnetar.errors import (
    AlreadyClosed,
    InvalidTransactionStatus,
    OperationTimedOut,
    TransactionFailed,
)
from magnetar.protocol.txn_id import TxnId
from magnetar.spark.attempt_writer import AttemptWriter, Task, WriterState
from magnetar.spark.errors import CommitRefused
from magnetar.spark.sink_rows import Rows
from magnetar.spark.task_report import RowCount

TASK = Task("n", 3, "q", 8)
GROUP = TxnId(1, 5)
ATTEMPT = TxnId(1, 1 << 44 | 5)
LONG_S = 1000.0


def rows(count: int) -> Rows:
    return Rows([b"v"] * count, None, None, None, [1] * count)


@dataclass
class Try:
    id: TxnId = ATTEMPT
    group: TxnId = GROUP
    spoilt: Exception | None = None
    is_closed: bool = False

    async def settled(self) -> None:
        if self.spoilt is not None:
            raise self.spoilt

    async def close(self) -> None:
        self.is_closed = True


@dataclass
class Coordinator:
    """`Attempts`, of which each call is noted."""

    done: bool = False
    refuses: Exception | None = None
    begun: list[tuple[Task, float]] = field(default_factory=list)
    extended: list[tuple[TxnId, float]] = field(default_factory=list)
    was_extended: asyncio.Event = field(default_factory=asyncio.Event)
    abandoned: list[TxnId] = field(default_factory=list)

    async def begin(self, task: Task, timeout_s: float) -> Try | None:
        self.begun.append((task, timeout_s))
        return None if self.done else Try()

    async def abandon(self, attempt: TxnId) -> None:
        self.abandoned.append(attempt)

    async def extend(self, group: TxnId, timeout_s: float) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.extended.append((group, timeout_s))
        if len(self.extended) > 1:
            self.was_extended.set()


@dataclass
class Segment:
    """`Sender`."""

    counts: Mapping[str, RowCount] | None = None
    fails: Exception | None = None
    stalls: asyncio.Event | None = None
    attempt: Try | None = None
    sent: int = 0
    closed: bool = False

    async def opened(self, attempt: Try | None) -> "Segment":
        self.attempt = attempt
        return self

    async def send(self, rows: Rows) -> None:
        if self.stalls is not None:
            self.stalls.set()
            await asyncio.Event().wait()
        if self.fails is not None:
            raise self.fails
        self.sent += len(rows)

    async def settle(self) -> Mapping[str, RowCount]:
        return {"t-0": RowCount(self.sent, self.sent)} if self.counts is None else self.counts

    async def close(self) -> None:
        self.closed = True


def writer(
    coordinator: Coordinator | None, segment: Segment, timeout_s: float = LONG_S
) -> AttemptWriter[Try]:
    return AttemptWriter(TASK, coordinator, segment.opened, timeout_s=timeout_s)


async def test_rows_are_written_in_an_attempt_and_reported() -> None:
    coordinator, segment = Coordinator(), Segment()
    one = writer(coordinator, segment)
    await one.write(rows(2))
    await one.write(rows(0))
    await one.write(rows(3))
    report = await one.finish()
    await one.close()
    assert coordinator.begun == [(TASK, LONG_S)]
    assert segment.attempt == Try(is_closed=True)
    assert (report.nonce, report.partition, report.query, report.batch) == ("n", 3, "q", 8)
    assert (report.group, report.attempt) == (Try().group, Try().id)
    assert (report.rows, report.counts, report.done) == (5, {"t-0": RowCount(5, 5)}, False)
    assert segment.closed
    assert one.state is WriterState.SETTLED


async def test_task_without_rows_begins_no_attempt() -> None:
    coordinator = Coordinator()
    one = writer(coordinator, Segment())
    await one.write(rows(0))
    report = await one.finish()
    await one.close()
    assert coordinator.begun == []
    assert (report.attempt, report.rows, report.done) == (None, 0, False)


async def test_task_that_waits_for_rows_keeps_the_group_open() -> None:
    """It may be the only one that is left."""
    coordinator, segment = Coordinator(), Segment()
    one = writer(coordinator, segment, timeout_s=0.01)
    await one.expect_rows()
    await coordinator.was_extended.wait()
    await one.write(rows(2))
    await one.expect_rows()
    assert len(coordinator.begun) == 1
    segment.counts = {"s": RowCount(2, 0)}
    assert (await one.finish()).attempt == ATTEMPT
    await one.close()


async def test_task_that_waited_in_vain_reports_no_attempt() -> None:
    coordinator, segment = Coordinator(), Segment(counts={})
    one = writer(coordinator, segment)
    await one.expect_rows()
    report = await one.finish()
    assert (report.attempt, report.rows, report.counts) == (ATTEMPT, 0, {})
    await one.close()


async def test_failure_to_begin_is_raised_at_each_call() -> None:
    class Refusing(Coordinator):
        async def begin(self, task: Task, timeout_s: float) -> Try | None:
            raise InvalidTransactionStatus("the key is busy.")

    one = writer(Refusing(), Segment())
    for asked in (one.expect_rows, lambda: one.write(rows(1)), one.finish):
        with pytest.raises(InvalidTransactionStatus, match="busy"):
            await asked()
    await one.close()
    assert one.state is WriterState.FAILED


async def test_rows_during_the_beginning_belong_to_one_attempt() -> None:
    coordinator, segment = Coordinator(), Segment(counts={"s": RowCount(2, 0)})
    one = writer(coordinator, segment)
    await asyncio.gather(one.expect_rows(), one.write(rows(2)), one.expect_rows())
    assert len(coordinator.begun) == 1
    await one.finish()
    await one.close()


async def test_rows_of_a_committed_batch_are_dropped() -> None:
    segment = Segment()
    one = writer(Coordinator(done=True), segment)
    await one.write(rows(2))
    await one.write(rows(2))
    report = await one.finish()
    await one.close()
    assert (report.done, report.attempt, report.rows, segment.sent) == (True, None, 0, 0)


async def test_at_least_once_writer_sends_rows_at_once() -> None:
    segment = Segment()
    one = writer(None, segment)
    await one.write(rows(2))
    report = await one.finish()
    await one.close()
    assert (report.attempt, report.rows, segment.attempt) == (None, 2, None)


async def test_row_without_receipt_fails_the_task() -> None:
    one = writer(Coordinator(), Segment(counts={"t-0": RowCount(1, 1)}))
    await one.write(rows(2))
    with pytest.raises(CommitRefused, match="Of 2 rows of partition 3, 1 have a receipt"):
        await one.finish()
    await one.close()
    assert one.state is WriterState.FAILED


async def test_failed_send_is_raised_and_the_attempt_closed() -> None:
    segment = Segment(fails=OperationTimedOut("no receipt"))
    one = writer(Coordinator(), segment)
    with pytest.raises(OperationTimedOut):
        await one.write(rows(1))
    await one.close()
    assert segment.closed
    assert one.state is WriterState.FAILED
    with pytest.raises(AlreadyClosed, match="is failed"):
        await one.write(rows(1))
    with pytest.raises(AlreadyClosed, match="is failed"):
        await one.finish()


async def test_failed_attempt_is_not_reported() -> None:
    segment = Segment()
    one = writer(Coordinator(), segment)
    await one.write(rows(1))
    assert segment.attempt is not None
    segment.attempt.spoilt = TransactionFailed("something in it failed")
    with pytest.raises(TransactionFailed):
        await one.finish()
    await one.close()
    assert segment.attempt.is_closed


async def test_extensions_of_a_group_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    coordinator = Coordinator()
    one = writer(coordinator, Segment(), timeout_s=0.01)
    with caplog.at_level(logging.WARNING):
        await one.write(rows(1))
        await coordinator.was_extended.wait()
    assert (await one.finish()).rows == 1
    await one.close()
    assert coordinator.extended[0] == (Try().group, 0.01)
    assert [record for record in caplog.text.splitlines() if "readers of the topic wait" in record]
    assert caplog.text.count("Partition 3 of batch 8") == 1


async def test_task_stops_when_the_group_cannot_be_extended() -> None:
    coordinator = Coordinator(refuses=InvalidTransactionStatus("it was aborted"))
    segment = Segment(stalls=asyncio.Event())
    one = writer(coordinator, segment, timeout_s=0.01)
    with pytest.raises(InvalidTransactionStatus, match="it was aborted"):
        await one.write(rows(1))
    assert segment.stalls is not None
    assert segment.stalls.is_set()
    await one.close()
    assert one.state is WriterState.FAILED


async def test_close_ends_the_extensions() -> None:
    coordinator = Coordinator()
    one = writer(coordinator, Segment(), timeout_s=0.01)
    await one.write(rows(1))
    await coordinator.was_extended.wait()
    await one.close()
    told = len(coordinator.extended)
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert len(coordinator.extended) == told
