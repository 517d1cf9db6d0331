"""What answers of the broker mean for what was sent."""

import pytest

from magnetar.produce.entries import EntryEncoder
from magnetar.produce.outgoing import SentEntry
from magnetar.produce.pending import Pending, Verdict
from magnetar.protocol.server_error import ServerError
from tests.unit.magnetar.produce.fakes import outgoing

ENCODER = EntryEncoder(producer_id=1, producer_name="p", max_message_size=1000, chunking=True)


def sent(*numbers: int) -> SentEntry:
    messages = [outgoing() for _ in numbers]
    for message, number in zip(messages, numbers, strict=True):
        message.number = number
    (only,) = ENCODER.encode(messages, 1)
    return only


@pytest.fixture
def pending() -> Pending:
    pending = Pending()
    pending.add([sent(3), sent(4, 5), sent(6)])
    return pending


def test_receipts_take_out_in_order(pending: Pending) -> None:
    first, second, third = pending
    assert pending.receipt(3) == (Verdict.STORED, first)
    assert pending.receipt(4) == (Verdict.STORED, second)
    assert pending.receipt(6) == (Verdict.STORED, third)
    assert pending.receipt(6) == (Verdict.IGNORED, None)


def test_receipts_of_what_is_decided_are_ignored_and_unknown_ones_are_not_believed(
    pending: Pending,
) -> None:
    assert pending.receipt(2) == (Verdict.IGNORED, None)
    assert pending.receipt(9) == (Verdict.REATTACH, None)
    assert len(pending) == 3


def test_receipts_out_of_turn_take_out_what_they_are_for(pending: Pending) -> None:
    first, second, third = pending
    assert pending.receipt(4) == (Verdict.STORED, second)
    assert pending.receipt(4) == (Verdict.IGNORED, None)
    assert list(pending) == [first, third]
    assert len(pending) == 2
    assert pending.receipt(3) == (Verdict.STORED, first)
    assert list(pending) == pending.take_all() == [third]
    assert len(pending) == 0


def test_message_refused_out_of_order_is_removed_alone(pending: Pending) -> None:
    first, second, third = pending
    assert pending.error(6, ServerError.NOT_ALLOWED_ERROR) == (Verdict.REFUSED, third)
    assert pending.receipt(3) == (Verdict.STORED, first)
    assert pending.receipt(4) == (Verdict.STORED, second)
    assert len(pending) == 0


@pytest.mark.parametrize(
    "code", [ServerError.TOPIC_TERMINATED_ERROR, ServerError.PRODUCER_FENCED], ids=str
)
def test_an_end_waits_for_the_receipts_of_what_is_older(
    pending: Pending, code: ServerError
) -> None:
    *_, third = pending
    pending.error(6, code)
    pending.error(4, code)
    assert not pending.is_over
    pending.receipt(3)
    assert pending.is_over
    pending.begin_resend()
    assert not pending.is_over
    pending.receipt(4)
    pending.error(6, code)
    assert pending.is_over
    assert pending.take_all() == [third]


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (ServerError.TOPIC_TERMINATED_ERROR, Verdict.ENDED),
        (ServerError.PRODUCER_FENCED, Verdict.FENCED),
        (ServerError.PERSISTENCE_ERROR, Verdict.REATTACH),
        (ServerError.UNKNOWN_ERROR, Verdict.REATTACH),
    ],
)
def test_errors_that_take_nothing_out(
    pending: Pending, code: ServerError, verdict: Verdict
) -> None:
    assert pending.error(3, code) == (verdict, None)
    assert len(pending) == 3


def test_message_that_is_not_allowed_is_removed_alone(pending: Pending) -> None:
    first, second, _ = pending
    assert pending.error(3, ServerError.NOT_ALLOWED_ERROR) == (Verdict.REFUSED, first)
    assert pending.error(5, ServerError.NOT_ALLOWED_ERROR) == (Verdict.REFUSED, second)
    assert len(pending) == 1
    assert pending.error(3, ServerError.NOT_ALLOWED_ERROR) == (Verdict.IGNORED, None)
    assert pending.error(9, ServerError.NOT_ALLOWED_ERROR) == (Verdict.REATTACH, None)


def test_message_damaged_on_the_wire_stays_pending(pending: Pending) -> None:
    first, second, _ = pending
    assert pending.error(3, ServerError.CHECKSUM_ERROR) == (Verdict.AGAIN, first)
    assert pending.error(5, ServerError.CHECKSUM_ERROR) == (Verdict.AGAIN, second)
    assert len(pending) == 3
    pending.refuse(second)
    assert len(pending) == 2
    assert pending.error(5, ServerError.CHECKSUM_ERROR) == (Verdict.IGNORED, None)


def test_message_damaged_before_sending_is_removed(pending: Pending) -> None:
    first, *_ = pending
    head, checked = first.parts
    first.parts = head, checked[:-1] + bytes([checked[-1] ^ 1])
    assert pending.error(3, ServerError.CHECKSUM_ERROR) == (Verdict.DAMAGED, first)


def test_chunks_have_one_number_and_a_receipt_each() -> None:
    pending = Pending()
    message = outgoing(bytes(2500))
    message.number = 8
    chunks = ENCODER.encode([message], 1)
    assert len(chunks) > 2
    pending.add(chunks)
    assert [pending.receipt(8)[1] for _ in chunks] == chunks


def test_cancelled_messages_at_the_front_are_pruned(pending: Pending) -> None:
    first, second, third = pending
    first.messages[0].outcome.set_exception(TimeoutError())
    second.messages[0].outcome.set_exception(TimeoutError())
    assert pending.prune() == [first]
    assert pending.take_all() == [second, third]
    assert len(pending) == 0
