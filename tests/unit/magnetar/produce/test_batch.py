"""How what a segment was given is cut into batches."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.produce.batch import BatchLimits, Queue
from magnetar.produce.outgoing import OutgoingMessage
from tests.unit.magnetar.produce.fakes import Result, Wait, outgoing

LIMITS = BatchLimits(max_messages=4, max_bytes=1000)


def numbers(batches: list[list[OutgoingMessage]]) -> list[list[int]]:
    return [[message.number for message in batch] for batch in batches]


def cut(queue: Queue, *messages: OutgoingMessage) -> list[list[int]]:
    for message in messages:
        queue.add(message)
    return numbers(queue.take_batches())


def test_messages_given_together_are_one_batch_until_it_is_full() -> None:
    queue = Queue(LIMITS)
    assert cut(queue, *(outgoing() for _ in range(6))) == [[0, 1, 2, 3], [4, 5]]
    assert cut(queue, outgoing()) == [[6]]
    assert len(queue) == queue.size == 0


def test_add_says_when_a_batch_is_full() -> None:
    queue = Queue(LIMITS)
    assert [queue.add(outgoing()) for _ in range(4)] == [False, False, False, True]
    queue = Queue(LIMITS)
    assert [queue.add(outgoing(bytes(400))) for _ in range(3)] == [False, False, True]


def test_bytes_bound_a_batch_and_what_is_larger_is_alone() -> None:
    queue = Queue(LIMITS)
    small, large = partial(outgoing, bytes(300)), outgoing(bytes(1000))
    assert cut(queue, small(), small(), small(), large, small()) == [[0, 1], [2], [3], [4]]


def test_without_batches_everything_is_alone() -> None:
    queue = Queue(BatchLimits(1, 1000))
    assert queue.add(outgoing())
    assert cut(queue, outgoing()) == [[0], [1]]


def test_transactions_are_not_mixed() -> None:
    queue = Queue(LIMITS)
    one, other = (1, 1), (1, 2)
    messages = [outgoing(txn=txn) for txn in (None, one, one, other, None, None)]
    assert cut(queue, *messages) == [[0], [1, 2], [3], [4, 5]]


def test_a_delayed_message_is_alone_and_in_its_place() -> None:
    queue = Queue(LIMITS)
    assert cut(queue, outgoing(), outgoing(deliver_at_ms=5), outgoing()) == [[0], [1], [2]]


def test_a_batch_for_each_bucket_in_the_order_of_last_messages() -> None:
    queue = Queue(LIMITS, (100, 200))
    hashes = [150, 0, 250, 99, 150, 65535]
    batches = cut(queue, *(outgoing(bucket_hash=each) for each in hashes))
    assert batches == [[1, 3], [0, 4], [2, 5]]


def test_a_full_bucket_closes_the_others_so_that_numbers_rise() -> None:
    queue = Queue(BatchLimits(2, 1000), (100,))
    hashes = [150, 0, 0, 0, 150]
    batches = cut(queue, *(outgoing(bucket_hash=each) for each in hashes))
    assert batches == [[0], [1, 2], [3], [4]]


def test_batch_with_user_sequence_ids_ends_where_the_bucket_changes() -> None:
    queue = Queue(LIMITS, (100,))
    given_ids = [(10, 0), (11, 0), (12, 150), (13, 0), (14, 0)]
    messages = [outgoing(sequence_id=n, bucket_hash=h) for n, h in given_ids]
    assert cut(queue, *messages) == [[10, 11], [12], [13, 14]]
    assert cut(queue, outgoing()) == [[15]]


@pytest.mark.parametrize("splits", [(), (100,)])
def test_message_that_may_be_stored_is_sent_alone(splits: tuple[int, ...]) -> None:
    queue = Queue(LIMITS, splits)
    queue.known = 5
    assert cut(queue, *(outgoing(sequence_id=n) for n in (4, 5, 6, 7))) == [[4], [5], [6, 7]]


def test_nothing_overtakes_what_waits_for_its_transaction() -> None:
    queue = Queue(LIMITS)
    waits = outgoing(txn=(1, 1))
    gate = waits.awaits = Wait()
    assert cut(queue, outgoing(), waits, outgoing()) == [[0]]
    assert cut(queue) == []
    gate.over = True
    assert cut(queue) == [[1], [2]]
    assert queue.size == 0


def test_cancelled_sends_are_dropped_from_the_batch_and_reported() -> None:
    dropped: list[OutgoingMessage] = []
    queue = Queue(LIMITS, (), dropped.append)
    first, second, third = outgoing(), outgoing(), outgoing()
    for message in (first, second, third):
        queue.add(message)
    first.outcome.set_exception(TimeoutError())
    queue.prune()
    assert (dropped, len(queue), queue.size) == ([first], 2, second.size + third.size)
    second.outcome.set_exception(TimeoutError())
    assert numbers(queue.take_batches()) == [[0]]
    assert dropped == [first, second]
    queue.add(second)
    queue.add(outgoing())
    assert len(queue.take_all()) == 1
    assert (len(queue), queue.size, dropped[2:]) == (0, 0, [second])


FACTS = st.tuples(
    st.integers(0, 65535), st.sampled_from([None, (1, 1)]), st.integers(0, 600), st.booleans()
)


@given(st.lists(FACTS, max_size=60), st.sampled_from([(), (1000,), (1000, 40000)]))
def test_every_message_is_in_one_batch_and_every_batch_keeps_the_rules(
    facts: list[tuple[int, tuple[int, int] | None, int, bool]], splits: tuple[int, ...]
) -> None:
    queue = Queue(LIMITS, splits)
    messages = [
        outgoing(bytes(size), bucket_hash=bucket, txn=txn, deliver_at_ms=1 if late else None)
        for bucket, txn, size, late in facts
    ]
    for message in messages:
        queue.add(message)
    batches = queue.take_batches()
    flat = [message for batch in batches for message in batch]
    assert sorted(flat, key=lambda message: message.number) == messages
    lasts = [batch[-1].number for batch in batches]
    assert lasts == sorted(lasts)
    of_bucket: dict[int, list[int]] = {}
    for batch in batches:
        buckets = {sum(message.bucket_hash >= start for start in splits) for message in batch}
        (bucket,) = buckets
        assert len({message.txn for message in batch}) == 1
        assert len(batch) <= 4
        assert len(batch) == 1 or sum(message.size for message in batch) <= 1000
        assert len(batch) == 1 or all(message.deliver_at_ms is None for message in batch)
        of_bucket.setdefault(bucket, []).extend(message.number for message in batch)
    assert all(order == sorted(order) for order in of_bucket.values())


def test_a_result_is_given_once() -> None:
    result = Result()
    assert not result.done()


def test_cancelled_send_does_not_hold_up_later_ones() -> None:
    queue = Queue(BatchLimits(10, 10_000))
    without, behind = outgoing(), outgoing()
    without.awaits = Wait()
    queue.add(without)
    queue.add(behind)
    assert queue.take_batches() == []
    without.outcome.set_exception(TimeoutError())
    assert queue.take_batches() == [[behind]]
