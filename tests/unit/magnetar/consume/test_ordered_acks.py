"""What an ordered consumer has said, need not say again, and may not say."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from magnetar.bounds import LEFT_SEGMENTS
from magnetar.consume.ordered_acks import OrderedAcks
from magnetar.message_id import EntryId
from magnetar.transactions.states import TransactionState as S

A, B = 1, 2
FIRST, SECOND, THIRD = (EntryId(7, number) for number in range(3))


@dataclass
class FakeTransaction:
    id: tuple[int, int]
    state: S = S.OPEN

    def acknowledging_on(self, topic: str, subscription: str) -> None:
        raise AssertionError

    def track(self, outcome: "asyncio.Future[object]") -> None:
        raise AssertionError

    def when_over(self, listener: Callable[[bool], None]) -> None:
        raise AssertionError


ONE, TWO = (1, 1), (1, 2)


def joined(acks: OrderedAcks) -> FakeTransaction:
    transaction = FakeTransaction(ONE)
    assert acks.join_transaction(transaction)
    assert not acks.join_transaction(transaction)
    return transaction


def test_cumulative_ack_covers_earlier_messages() -> None:
    acks = OrderedAcks()
    assert not acks.is_acknowledged(A, SECOND, None)
    acks.record_ack(A, SECOND, None)
    acks.record_ack(A, FIRST, None)
    assert acks.is_acknowledged(A, FIRST, None)
    assert acks.is_acknowledged(A, SECOND, None)
    assert not acks.is_acknowledged(A, THIRD, None)
    assert not acks.is_acknowledged(B, FIRST, None)


def test_acks_distinguish_messages_of_one_batch() -> None:
    acks = OrderedAcks()
    acks.record_ack(A, EntryId(7, 0, 1, 3), None)
    assert acks.is_acknowledged(A, EntryId(7, 0, 0, 3), None)
    assert not acks.is_acknowledged(A, EntryId(7, 0, 2, 3), None)


def test_transactional_ack_counts_elsewhere_once_committed() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.record_ack(A, SECOND, ONE)
    assert acks.is_acknowledged(A, SECOND, ONE)
    assert not acks.is_acknowledged(A, SECOND, TWO)
    assert not acks.is_acknowledged(A, SECOND, None)
    assert acks.end_transaction(ONE, committed=True) == {A: SECOND}
    assert acks.is_acknowledged(A, SECOND, TWO)
    assert acks.is_acknowledged(A, SECOND, None)
    assert acks.is_settled(A, SECOND)


def test_one_transaction_at_a_time_acknowledges_on_a_segment() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.record_ack(A, FIRST, ONE)
    assert acks.holder(A, TWO) == ONE
    assert acks.holder(A, ONE) is None
    assert acks.holder(B, TWO) is None
    acks.end_transaction(ONE, committed=False)
    assert acks.holder(A, TWO) is None


def test_acks_are_in_doubt_until_an_aborting_transaction_is_over() -> None:
    acks = OrderedAcks()
    transaction = joined(acks)
    for state in S:
        transaction.state = state
        assert acks.in_doubt == (state in (S.ABORTING, S.ABORTED, S.TIMED_OUT, S.FAILED))
    acks.end_transaction(ONE, committed=False)
    assert not acks.in_doubt


def test_earlier_delivery_is_acknowledged_only_after_its_redelivery() -> None:
    acks = OrderedAcks()
    acks.record_ack(A, FIRST, None)
    acks.record_delivery(A, SECOND)
    acks.record_delivery(A, THIRD)
    assert not acks.awaits_redelivery(A, THIRD)
    acks.expect_redelivery()
    assert acks.awaits_redelivery(A, SECOND)
    assert acks.is_acknowledged(A, FIRST, None)
    acks.record_delivery(A, SECOND)
    assert not acks.awaits_redelivery(A, SECOND)
    assert acks.awaits_redelivery(A, THIRD)
    acks.expect_redelivery()
    assert acks.awaits_redelivery(A, SECOND)


def test_a_reconnect_forbids_nothing() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, FIRST)
    acks.expect_redelivery()
    acks.record_delivery(A, THIRD)
    acks.start_attachment(A)
    acks.record_delivery(A, FIRST)
    assert not acks.awaits_redelivery(A, THIRD)


def test_what_comes_once_more_on_a_later_attachment_is_acknowledged_once_more() -> None:
    acks = OrderedAcks()
    acks.record_ack(A, SECOND, None)
    acks.start_attachment(A)
    assert not acks.is_settled(A, SECOND)
    acks.record_delivery(A, THIRD)
    assert acks.is_acknowledged(A, SECOND, None)
    acks.record_delivery(A, FIRST)
    assert not acks.is_acknowledged(A, FIRST, None)


def test_ack_committed_after_a_reconnect_is_settled() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.record_ack(A, SECOND, ONE)
    acks.start_attachment(A)
    acks.end_transaction(ONE, committed=True)
    assert acks.is_settled(A, SECOND)
    assert not acks.is_settled(A, THIRD)


def test_leaving_a_segment_acknowledges_nothing() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, SECOND)
    acks.forget_left_segments(held=())
    assert not acks.is_acknowledged(A, SECOND, None)


def test_of_segments_left_the_last_ones_are_remembered() -> None:
    acks = OrderedAcks()
    acks.record_ack(A, FIRST, None)
    for segment_id in range(10, 10 + LEFT_SEGMENTS + 1):
        acks.record_ack(segment_id, FIRST, None)
        acks.forget_left_segments(held={A})
    assert acks.is_acknowledged(A, FIRST, None)
    assert not acks.is_acknowledged(10, FIRST, None)
    assert acks.is_acknowledged(11, FIRST, None)


def test_message_acked_in_an_open_transaction_is_not_handed_out() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.record_ack(A, SECOND, ONE)
    acks.start_attachment(A)
    assert acks.is_settled(A, SECOND)
    assert not acks.is_settled(A, THIRD)
    acks.end_transaction(ONE, committed=False)
    assert not acks.is_settled(A, SECOND)


def test_unrequested_redelivery_may_be_duplicated() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, SECOND)
    acks.start_attachment(A)
    acks.record_delivery(A, FIRST)
    assert acks.may_be_duplicated(A)
    assert not acks.may_be_duplicated(B)
    acks.expect_redelivery()
    assert not acks.may_be_duplicated(A)
    acks.record_delivery(A, FIRST)
    assert not acks.may_be_duplicated(A)


def test_no_transaction_has_what_another_consumer_may_have_done_since_the_attachment_was_lost() -> (
    None
):
    acks = OrderedAcks()
    acks.record_delivery(A, FIRST)
    acks.record_delivery(A, SECOND)
    acks.start_attachment(A)
    assert acks.may_be_duplicated(A), "another one may have had it, and be done"
    acks.record_first_arrival(A, SECOND)
    assert acks.may_be_duplicated(A), "another one did the first"
    acks.expect_redelivery()
    assert not acks.may_be_duplicated(A)


def test_a_transaction_has_what_comes_again_first_after_the_attachment_was_lost() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, FIRST)
    acks.record_ack(A, FIRST, None)
    acks.record_delivery(A, SECOND)
    acks.record_delivery(A, THIRD)
    acks.start_attachment(A)
    acks.record_first_arrival(A, SECOND)
    assert not acks.may_be_duplicated(A)
    acks.start_attachment(A)
    assert acks.may_be_duplicated(A), "it was lost again"


def test_what_was_acknowledged_in_part_is_in_no_transaction_after_a_loss() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, FIRST)
    acks.record_delivery(A, SECOND)
    acks.record_ack(A, FIRST, None)
    acks.start_attachment(A)
    acks.record_first_arrival(A, SECOND)
    assert acks.may_be_duplicated(A), "whether that is the next one is not known"


def test_what_another_one_did_meanwhile_is_in_no_transaction_either() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, SECOND)
    acks.start_attachment(A)
    acks.record_delivery(A, THIRD)
    assert acks.may_be_duplicated(A)
    acks.record_ack(A, SECOND, None)
    assert not acks.may_be_duplicated(A)


def test_what_is_acknowledged_when_it_begins_anew_came_once() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.record_delivery(A, FIRST)
    acks.record_delivery(B, FIRST)
    acks.record_ack(A, FIRST, None)
    acks.start_attachment(A)
    acks.start_attachment(B)
    acks.record_ack(B, FIRST, ONE)
    for segment_id in (A, B):
        acks.record_delivery(segment_id, SECOND)
        assert not acks.may_be_duplicated(segment_id)


def test_what_was_set_back_came_once() -> None:
    acks = OrderedAcks()
    acks.record_delivery(A, THIRD)
    acks.record_ack(A, THIRD, None)
    acks.start_attachment(A)
    acks.record_delivery(A, FIRST)
    acks.record_ack(A, FIRST, None)
    acks.start_attachment(A)
    acks.record_delivery(A, SECOND)
    assert not acks.may_be_duplicated(A)


def test_lost_segment_may_be_duplicated_until_everything_is_redelivered() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.record_delivery(A, FIRST)
    assert acks.lose_segment(A)
    assert acks.may_be_duplicated(A)
    acks.expect_redelivery()
    assert not acks.may_be_duplicated(A)
    assert not acks.lose_segment(A)
    acks.record_delivery(B, FIRST)
    acks.record_ack(B, FIRST, ONE)
    assert acks.lose_segment(B)
    assert not acks.may_be_duplicated(B)
    acks.end_transaction(ONE, committed=True)
    assert not acks.lose_segment(B)
