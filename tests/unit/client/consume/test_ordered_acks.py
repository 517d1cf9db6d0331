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

    def when_over(self, told: Callable[[bool], None]) -> None:
        raise AssertionError


ONE, TWO = (1, 1), (1, 2)


def joined(acks: OrderedAcks) -> FakeTransaction:
    transaction = FakeTransaction(ONE)
    assert acks.joins(transaction)
    assert not acks.joins(transaction)
    return transaction


def test_what_was_said_is_not_said_again() -> None:
    acks = OrderedAcks()
    assert not acks.is_done(A, SECOND, None)
    acks.acknowledged(A, SECOND, None)
    acks.acknowledged(A, FIRST, None)
    assert acks.is_done(A, FIRST, None)
    assert acks.is_done(A, SECOND, None)
    assert not acks.is_done(A, THIRD, None)
    assert not acks.is_done(B, FIRST, None)


def test_messages_of_a_batch_are_told_apart() -> None:
    acks = OrderedAcks()
    acks.acknowledged(A, EntryId(7, 0, 1, 3), None)
    assert acks.is_done(A, EntryId(7, 0, 0, 3), None)
    assert not acks.is_done(A, EntryId(7, 0, 2, 3), None)


def test_what_was_said_in_a_transaction_counts_there_and_elsewhere_once_it_is_committed() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.acknowledged(A, SECOND, ONE)
    assert acks.is_done(A, SECOND, ONE)
    assert not acks.is_done(A, SECOND, TWO)
    assert not acks.is_done(A, SECOND, None)
    assert acks.over(ONE, committed=True) == {A: SECOND}
    assert acks.is_done(A, SECOND, TWO)
    assert acks.is_done(A, SECOND, None)
    assert acks.is_over(A, SECOND)


def test_one_transaction_at_a_time_acknowledges_on_a_segment() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.acknowledged(A, FIRST, ONE)
    assert acks.holder(A, TWO) == ONE
    assert acks.holder(A, ONE) is None
    assert acks.holder(B, TWO) is None
    acks.over(ONE, committed=False)
    assert acks.holder(A, TWO) is None


def test_it_is_in_doubt_until_what_does_not_commit_is_over() -> None:
    acks = OrderedAcks()
    transaction = joined(acks)
    for state in S:
        transaction.state = state
        assert acks.in_doubt == (state in (S.ABORTING, S.ABORTED, S.TIMED_OUT, S.FAILED))
    acks.over(ONE, committed=False)
    assert not acks.in_doubt


def test_what_was_handed_out_before_is_not_acknowledged_until_it_comes_again() -> None:
    acks = OrderedAcks()
    acks.acknowledged(A, FIRST, None)
    acks.handed_out(A, SECOND)
    acks.handed_out(A, THIRD)
    assert not acks.comes_again(A, THIRD)
    acks.went_back()
    assert acks.comes_again(A, SECOND)
    assert acks.is_done(A, FIRST, None)
    acks.handed_out(A, SECOND)
    assert not acks.comes_again(A, SECOND)
    assert acks.comes_again(A, THIRD)
    acks.went_back()
    assert acks.comes_again(A, SECOND)


def test_a_reconnect_forbids_nothing() -> None:
    acks = OrderedAcks()
    acks.handed_out(A, FIRST)
    acks.went_back()
    acks.handed_out(A, THIRD)
    acks.begins_anew(A)
    acks.handed_out(A, FIRST)
    assert not acks.comes_again(A, THIRD)


def test_what_comes_once_more_on_a_later_attachment_is_acknowledged_once_more() -> None:
    acks = OrderedAcks()
    acks.acknowledged(A, SECOND, None)
    acks.begins_anew(A)
    assert not acks.is_over(A, SECOND)
    acks.handed_out(A, THIRD)
    assert acks.is_done(A, SECOND, None)
    acks.handed_out(A, FIRST)
    assert not acks.is_done(A, FIRST, None)


def test_what_is_committed_after_a_reconnect_is_over() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.acknowledged(A, SECOND, ONE)
    acks.begins_anew(A)
    acks.over(ONE, committed=True)
    assert acks.is_over(A, SECOND)
    assert not acks.is_over(A, THIRD)


def test_leaving_a_segment_acknowledges_nothing() -> None:
    acks = OrderedAcks()
    acks.handed_out(A, SECOND)
    acks.left(held=())
    assert not acks.is_done(A, SECOND, None)


def test_of_segments_left_the_last_ones_are_remembered() -> None:
    acks = OrderedAcks()
    acks.acknowledged(A, FIRST, None)
    for segment_id in range(10, 10 + LEFT_SEGMENTS + 1):
        acks.acknowledged(segment_id, FIRST, None)
        acks.left(held={A})
    assert acks.is_done(A, FIRST, None)
    assert not acks.is_done(10, FIRST, None)
    assert acks.is_done(11, FIRST, None)


def test_what_an_open_transaction_acknowledged_is_not_handed_out_beside_it() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.acknowledged(A, SECOND, ONE)
    acks.begins_anew(A)
    assert acks.is_over(A, SECOND)
    assert not acks.is_over(A, THIRD)
    acks.over(ONE, committed=False)
    assert not acks.is_over(A, SECOND)


def test_what_was_handed_out_and_comes_again_unasked_is_in_no_transaction() -> None:
    acks = OrderedAcks()
    acks.handed_out(A, SECOND)
    acks.begins_anew(A)
    assert not acks.came_twice(A)
    acks.handed_out(A, FIRST)
    assert acks.came_twice(A)
    assert not acks.came_twice(B)
    acks.went_back()
    assert not acks.came_twice(A)
    acks.handed_out(A, FIRST)
    assert not acks.came_twice(A)


def test_what_another_one_did_meanwhile_is_in_no_transaction_either() -> None:
    acks = OrderedAcks()
    acks.handed_out(A, SECOND)
    acks.begins_anew(A)
    acks.handed_out(A, THIRD)
    assert acks.came_twice(A)
    acks.acknowledged(A, SECOND, None)
    assert not acks.came_twice(A)


def test_what_is_acknowledged_when_it_begins_anew_came_once() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.handed_out(A, FIRST)
    acks.handed_out(B, FIRST)
    acks.acknowledged(A, FIRST, None)
    acks.begins_anew(A)
    acks.begins_anew(B)
    acks.acknowledged(B, FIRST, ONE)
    for segment_id in (A, B):
        acks.handed_out(segment_id, SECOND)
        assert not acks.came_twice(segment_id)


def test_what_was_set_back_came_once() -> None:
    acks = OrderedAcks()
    acks.handed_out(A, THIRD)
    acks.acknowledged(A, THIRD, None)
    acks.begins_anew(A)
    acks.handed_out(A, FIRST)
    acks.acknowledged(A, FIRST, None)
    acks.begins_anew(A)
    acks.handed_out(A, SECOND)
    assert not acks.came_twice(A)


def test_what_is_lost_is_in_no_transaction_until_everything_comes_again() -> None:
    acks = OrderedAcks()
    joined(acks)
    acks.handed_out(A, FIRST)
    assert acks.lost(A)
    assert acks.came_twice(A)
    acks.went_back()
    assert not acks.came_twice(A)
    assert not acks.lost(A)
    acks.handed_out(B, FIRST)
    acks.acknowledged(B, FIRST, ONE)
    assert acks.lost(B)
    assert not acks.came_twice(B)
    acks.over(ONE, committed=True)
    assert not acks.lost(B)
