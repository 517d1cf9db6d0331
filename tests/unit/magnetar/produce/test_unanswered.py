"""Outcomes of messages: receipts, failures, time that is up; and who waits for all of them."""

import asyncio
import gc

import pytest

from magnetar.bounds import ANSWERED_KEPT
from magnetar.errors import MagnetarError, NotAllowed, OperationTimedOut, ServiceNotReady
from magnetar.message_id import MessageId
from magnetar.produce.capacity import Capacity
from magnetar.produce.outgoing import OutgoingMessage, SentEntry
from magnetar.produce.unanswered import UnansweredMessages
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import TxnId


class Sending:
    """What a test sends, and what was told of time that is up."""

    def __init__(self, timeout_s: float = 1000.0) -> None:
        self.capacity = Capacity(100, 100_000)
        self.expired = 0
        self.trouble: MagnetarError | None = None
        self.unanswered = UnansweredMessages(
            self.capacity, timeout_s, self._expired, lambda: self.trouble
        )

    def _expired(self) -> None:
        self.expired += 1

    def send(self) -> tuple[OutgoingMessage, "asyncio.Future[MessageId]"]:
        future: asyncio.Future[MessageId] = asyncio.get_running_loop().create_future()
        message = OutgoingMessage(future, b"payload")
        self.unanswered.add(message)
        return message, future

    def stored(
        self, entry_id: int, *messages: OutgoingMessage, index: int = 0, chunks: int = 1
    ) -> None:
        sent = SentEntry(1, 5, messages, (b"", b""), 0, index=index, chunks=chunks)
        where = pb.MessageIdData(ledger_id=3, entry_id=entry_id)
        self.unanswered.stored(8, sent, where)


async def test_receipts_resolve_message_ids_and_free_the_queue() -> None:
    sending = Sending()
    (one, first), (two, second), (three, third) = (sending.send() for _ in range(3))
    sending.stored(10, one)
    sending.stored(11, two, three)
    assert [str(each.result()) for each in (first, second, third)] == [
        "8:3:10:-1",
        "8:3:11:-1:0",
        "8:3:11:-1:1",
    ]
    assert first.result().entry.batch_size == 0
    assert third.result().entry.batch_size == 2
    assert sending.capacity.messages == 0
    assert sending.unanswered.last_sequence_id == 5


async def test_a_message_of_chunks_is_stored_with_the_last() -> None:
    sending = Sending()
    message, future = sending.send()
    for index in range(3):
        assert not future.done()
        sending.stored(20 + index, message, index=index, chunks=3)
    entry = future.result().entry
    assert (entry.first_chunk, entry.entry_id) == ((3, 20), 22)
    assert sending.capacity.messages == 0


async def test_cancelled_send_keeps_its_place_until_the_receipt() -> None:
    sending = Sending()
    message, future = sending.send()
    future.cancel()
    assert sending.capacity.messages == 1
    sending.stored(1, message)
    assert sending.capacity.messages == 0


async def test_flush_waits_for_what_was_before_it_alone() -> None:
    sending = Sending()
    early, late = sending.send()[0], sending.send()[0]
    flush = asyncio.create_task(sending.unanswered.flush())
    await asyncio.sleep(0)
    sending.send()
    sending.stored(1, late)
    await asyncio.sleep(0)
    assert not flush.done()
    sending.stored(2, early)
    await flush
    assert sending.capacity.messages == 1


async def test_first_unread_failure_is_reported_once() -> None:
    sending = Sending()
    (seen, seen_future), (one, _), (two, _) = (sending.send() for _ in range(3))
    for message, text in ((seen, "a"), (one, "b"), (two, "c")):
        sending.unanswered.fail((message,), NotAllowed(text))
    assert seen_future.exception() is not None
    assert str(sending.unanswered.unread_failure()) == "b"
    assert sending.unanswered.unread_failure() is None
    assert sending.capacity.messages == 0


async def test_a_flush_tells_no_failure_of_a_message_in_a_transaction() -> None:
    """Its transaction does; a flush may run before the transaction has heard of it."""
    sending = Sending()
    message, future = sending.send()
    message.txn = TxnId(2, 18)
    sending.unanswered.fail((message,), NotAllowed("The transaction has ended: begin another."))
    assert sending.unanswered.unread_failure() is None
    assert isinstance(future.exception(), NotAllowed)


async def test_each_message_fails_with_an_error_of_its_own() -> None:
    sending = Sending()
    futures = [sending.send()[1] for _ in range(2)]
    cause = NotAllowed("It is over.")
    sending.unanswered.fail_all(cause)
    errors = [future.exception() for future in futures]
    assert errors[0] is not errors[1]
    assert all(isinstance(error, NotAllowed) and error.args == cause.args for error in errors)


async def test_timed_out_send_names_the_reason() -> None:
    sending = Sending(timeout_s=0.01)
    sending.trouble = ServiceNotReady("The broker sleeps.")
    futures = [sending.send()[1] for _ in range(3)]
    for future in futures:
        with pytest.raises(OperationTimedOut, match="sleeps") as raised:
            await future
        assert raised.value.__cause__ is sending.trouble
    assert sending.expired == 1
    assert sending.capacity.messages == 0
    sending.unanswered.close()


async def test_answered_sends_are_forgotten_while_an_older_one_waits() -> None:
    sending = Sending()
    sending.send()
    flush = asyncio.create_task(sending.unanswered.flush())
    await asyncio.sleep(0)
    for _ in range(5 * ANSWERED_KEPT):
        sending.stored(1, sending.send()[0])
    assert len(sending.unanswered._messages) <= ANSWERED_KEPT + 3
    assert not flush.done()
    flush.cancel()
    sending.unanswered.close()


async def test_failures_at_close_are_not_logged_as_unhandled() -> None:
    sending = Sending()
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context["message"]))
    sending.send()
    sending.unanswered.fail_all(NotAllowed("closed"), retrieved=True)
    gc.collect()
    assert told == []
    sending.send()
    sending.unanswered.fail_all(NotAllowed("fenced"))
    sending.unanswered._failures.clear()
    gc.collect()
    assert len(told) == 1
    sending.unanswered.close()
