"""A8: a transaction's end was answered to its client, and the owner of the topic hears of it later.

Between the two nothing may be lost, sent out of order or refused because of that transaction.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import pytest

from broker.topics.dispatch.errors import SubscriptionUnavailable
from broker.topics.dispatch.start_position import position_of
from config.bounds import TXN_SLICE_POSITIONS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import MetadataError
from tests.support.raw_client import Delivery, RawConsumer
from tests.support.waiting import until
from tests.unit.broker.topics.test_end_to_end import EXCLUSIVE, FAILOVER, SHARED
from tests.unit.broker.topics.test_held_back import subscribe
from tests.unit.broker.topics.test_transactional_acks import (
    COMMITTED,
    TOPIC,
    Stage,
    got,
    nothing_comes,
    payloads,
    stage,
)
from txn.decisions import Decisions
from txn.pending_acks import PendingAcks
from txn.records import TxnState
from txn.store import StoredHeader, TransactionStore

__all__ = ["stage"]

ALL = ["0", "1", "2", "3", "4"]
in_order = pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER], ids=["exclusive", "failover"])


class Late:
    """Ends that were stored, and told to nobody yet."""

    def __init__(self, decisions: Decisions, monkeypatch: pytest.MonkeyPatch) -> None:
        self._call_followers_of = decisions._call_followers_of
        self._waiting: list[tuple[TxnId, TxnState | None]] = []
        monkeypatch.setattr(
            decisions, "_call_followers_of", lambda txn, state: self._waiting.append((txn, state))
        )

    def tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for txn, state in waiting:
            self._call_followers_of(txn, state)


@pytest.fixture
async def late(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Late]:
    late = Late(stage.broker.transactions.decisions, monkeypatch)
    yield late
    late.tell()


async def all_acknowledged(stage: Stage) -> None:
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 0)


@in_order
@pytest.mark.parametrize("cumulative", [True, False], ids=["cumulative", "individual"])
async def test_aborted_messages_are_redelivered_before_later_ones(
    stage: Stage, late: Late, kind: pb.CommandSubscribe.SubType, cumulative: bool
) -> None:
    """Else a cumulative acknowledgement of what follows would count for it: it would be lost."""
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    aborted = await stage.begin()
    await stage.ack(consumer, aborted, messages[0], cumulative=cumulative)
    await stage.abort(aborted)
    consumer.redeliver()
    again = await got(consumer, 5)
    assert payloads(again) == ALL
    following = await stage.begin()
    await stage.ack(consumer, following, again[3], cumulative=True)
    late.tell()
    await stage.commit(following)
    late.tell()
    await nothing_comes(consumer)
    consumer.redeliver()
    assert payloads(await got(consumer, 1)) == ["4"]


@in_order
async def test_an_ended_transaction_refuses_nothing(
    stage: Stage, late: Late, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    for message in messages:
        txn = await stage.begin()
        await stage.ack(consumer, txn, message, cumulative=True)
        await stage.commit(txn)
    late.tell()
    await all_acknowledged(stage)


async def test_an_aborted_transaction_refuses_nothing_of_others(stage: Stage, late: Late) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    aborted, following = await stage.begin(), await stage.begin()
    await stage.ack(consumer, aborted, *messages)
    await stage.abort(aborted)
    await stage.ack(consumer, following, *messages)
    await stage.commit(following)
    late.tell()
    await all_acknowledged(stage)


async def test_acknowledgements_that_wait_for_an_end_keep_their_order(
    stage: Stage, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(EXCLUSIVE)
    messages = await got(consumer, 5)
    following = await begin_beside_a_commit(stage, consumer, messages[0])
    go_on = hold_fresh_reads(monkeypatch)
    acks = [
        asyncio.create_task(stage.ack(consumer, following, each, cumulative=True))
        for each in messages[1:4]
    ]
    await nothing_comes(consumer)
    assert not any(ack.done() for ack in acks)
    go_on.set()
    await asyncio.gather(*acks)
    await stage.commit(following)
    late.tell()
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 1)


async def test_an_acknowledgement_whose_consumer_left_while_it_waited_is_refused(
    stage: Stage, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next consumer has the messages by then."""
    consumer = await stage.subscribe(EXCLUSIVE)
    messages = await got(consumer, 5)
    following = await begin_beside_a_commit(stage, consumer, messages[0])
    subscription = await stage.subscription()
    assert subscription.transactional is not None
    pending = subscription.transactional.pending
    go_on = hold_fresh_reads(monkeypatch)
    (held,) = [
        subscription.acknowledge_in(
            each, following, [(position_of(messages[1].message_id), (), 0)], cumulative=True
        )
        for each in subscription.consumers
    ]
    await consumer.close()
    go_on.set()
    with pytest.raises(SubscriptionUnavailable, match="subscribe again"):
        await held
    assert not pending.core.has(following)


async def test_a_seek_is_not_undone_by_a_commit_that_was_answered_before(
    stage: Stage, late: Late
) -> None:
    consumer = await stage.subscribe(EXCLUSIVE)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[2], cumulative=True)
    await stage.commit(txn)
    subscription = await stage.subscription()
    await subscription.seek(EARLIEST)
    late.tell()
    await nothing_comes(consumer)
    assert subscription.backlog == 5
    again = await stage.subscribe(EXCLUSIVE)
    assert payloads(await got(again, 5)) == ALL


async def test_an_open_transaction_is_passed_over_and_its_header_read_once_for_each_rewind(
    stage: Stage, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(EXCLUSIVE)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[2], cumulative=True)
    reads = count_fresh_reads(monkeypatch)
    for rewind in range(1, 4):
        consumer.redeliver()
        assert payloads(await got(consumer, 2)) == ["3", "4"]
        assert reads == [txn] * rewind
    await stage.end(txn, COMMITTED)


async def test_while_headers_cannot_be_read_nothing_is_passed_over(
    stage: Stage, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(EXCLUSIVE)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0], cumulative=True)
    await stage.abort(txn)
    failures = [MetadataError("not now: try again.")] * 2

    async def fail(txn: TxnId) -> None:
        if failures:
            raise failures.pop()

    before_fresh_reads(monkeypatch, fail)
    consumer.redeliver()
    assert payloads(await got(consumer, 5)) == ALL
    assert not failures


async def test_forward_delivery_reads_no_header(
    stage: Stage, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(EXCLUSIVE)
    reads = count_fresh_reads(monkeypatch)
    await acknowledge_each_in_its_transaction(stage, late, consumer)
    assert reads == []


async def acknowledge_each_in_its_transaction(
    stage: Stage, late: Late, consumer: RawConsumer
) -> None:
    for message in await got(consumer, 5):
        txn = await stage.begin()
        await stage.ack(consumer, txn, message, cumulative=True)
        await stage.commit(txn)
        late.tell()
    await all_acknowledged(stage)


async def begin_beside_a_commit(stage: Stage, consumer: RawConsumer, message: Delivery) -> TxnId:
    """Another transaction acknowledged the message and was committed after this one began."""
    before, following = await stage.begin(), await stage.begin()
    await stage.ack(consumer, before, message, cumulative=True)
    await stage.commit(before)
    return following


def before_fresh_reads(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[TxnId], Awaitable[None]]
) -> None:
    """Each header that is read fresh is read after the step."""
    read = TransactionStore.read_header

    async def stepped(
        store: TransactionStore, txn: TxnId, *, fresh: bool = False
    ) -> StoredHeader | None:
        if fresh:
            await step(txn)
        return await read(store, txn, fresh=fresh)

    monkeypatch.setattr(TransactionStore, "read_header", stepped)


def hold_fresh_reads(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Headers that are read fresh are not answered before the event is set."""
    go_on = asyncio.Event()

    async def wait(txn: TxnId) -> None:
        await go_on.wait()

    before_fresh_reads(monkeypatch, wait)
    return go_on


def count_fresh_reads(monkeypatch: pytest.MonkeyPatch) -> list[TxnId]:
    reads = list[TxnId]()

    async def count(txn: TxnId) -> None:
        reads.append(txn)

    before_fresh_reads(monkeypatch, count)
    return reads


@pytest.mark.parametrize("first", ["abort", "commit"])
async def test_messages_of_large_aborts_are_redelivered_whatever_ends_last(
    stage: Stage, late: Late, first: str
) -> None:
    """Ends of more than a slice, told in one turn; a commit may be the last to be carried out."""
    count = TXN_SLICE_POSITIONS + 50
    producer = await stage.client.create_producer(TOPIC)
    await producer.send_many([b"x"] * (2 * count - 5))
    consumer = await stage.subscribe(SHARED, permits=4 * count)
    messages = await got(consumer, 2 * count)
    aborted, committed = await stage.begin(), await stage.begin()
    await stage.ack(consumer, aborted, *messages[:count])
    await stage.ack(consumer, committed, *messages[count:])
    ends = [stage.abort(aborted), stage.commit(committed)]
    for end in ends if first == "abort" else reversed(ends):
        await end
    late.tell()
    again = await got(consumer, count)
    assert [each.message_id for each in again] == [each.message_id for each in messages[:count]]


async def test_the_headers_of_all_own_transactions_are_read_at_once(
    stage: Stage, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(EXCLUSIVE)
    messages = await got(consumer, 5)
    txns = [await stage.begin() for _ in range(3)]
    for txn, message in zip(txns, messages[::2], strict=True):
        await stage.ack(consumer, txn, message)
    reads, learn, calls = count_fresh_reads(monkeypatch), PendingAcks.learn_ends, 0

    async def counted(pending: PendingAcks, txns: Collection[TxnId]) -> set[TxnId]:
        nonlocal calls
        calls += 1
        return await learn(pending, txns)

    monkeypatch.setattr(PendingAcks, "learn_ends", counted)
    consumer.redeliver()
    assert payloads(await got(consumer, 2)) == ["1", "3"]
    assert (sorted(reads), calls) == (txns, 1)
    for txn in txns:
        await stage.commit(txn)


async def test_the_end_of_another_ones_transaction_sends_nothing_twice(stage: Stage) -> None:
    """Nothing was passed over, so what the consumer has in hand is not sent again."""
    gone = await subscribe(stage, "gone", FAILOVER)
    messages = await got(gone, 5)
    txn = await stage.begin()
    await stage.ack(gone, txn, messages[2])
    await gone.close()
    consumer = await subscribe(stage, "there", FAILOVER)
    assert payloads(await got(consumer, 2)) == ["0", "1"]
    await nothing_comes(consumer)
    await stage.abort(txn)
    assert payloads(await got(consumer, 3)) == ["2", "3", "4"]
    await nothing_comes(consumer)
