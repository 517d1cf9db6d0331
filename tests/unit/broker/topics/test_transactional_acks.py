"""Acknowledgements in transactions over a whole broker: every type of subscription, every end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ack_set import pending_all, to_words
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_batch
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawConsumer, basecommand
from tests.support.waiting import until
from tests.unit.broker.topics.test_end_to_end import (
    EARLIEST,
    EXCLUSIVE,
    FAILOVER,
    KEY_SHARED,
    SHARED,
    client_of,
    fill,
    options,
)
from txn.records import AckedPosition, TxnState

TOPIC = "persistent://public/default/acks"
KINDS = [EXCLUSIVE, FAILOVER, SHARED, KEY_SHARED]
IDS = ["exclusive", "failover", "shared", "key-shared"]
COMMITTED, ABORTED = TxnState.COMMITTED, TxnState.ABORTED
every_kind = pytest.mark.parametrize("kind", KINDS, ids=IDS)
singly = pytest.mark.parametrize("kind", [SHARED, KEY_SHARED], ids=["shared", "key-shared"])
also_from_disk = pytest.mark.parametrize(
    "stage", [64 * 2**20, 0], ids=["cached", "from-disk"], indirect=True
)


class Stage:
    """A broker, a client of it, and transactions begun and ended beside the wire."""

    def __init__(self, broker: Broker, client: RawClient) -> None:
        self.broker = broker
        self.client = client

    async def begin(self) -> TxnId:
        return await self.broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)

    async def end(self, txn: TxnId, state: TxnState) -> None:
        await self.broker.transactions.coordinators.end_transaction(txn, state, None)

    async def commit(self, txn: TxnId) -> None:
        await self.end(txn, COMMITTED)

    async def abort(self, txn: TxnId) -> None:
        await self.end(txn, ABORTED)

    async def topic(self) -> Topic:
        return await self.broker.topics.get(parse_topic_name(TOPIC), create=True)

    async def subscription(self, name: str = "s") -> Subscription:
        return (await self.topic()).subscriptions[name]

    async def subscribe(
        self,
        kind: pb.CommandSubscribe.SubType,
        *,
        permits: int = 100,
        client: RawClient | None = None,
    ) -> RawConsumer:
        wanted = options(kind, initial_position=EARLIEST)
        return await (client or self.client).subscribe(TOPIC, "s", wanted, permits=permits)

    async def ack(
        self,
        consumer: RawConsumer,
        txn: TxnId,
        *messages: Delivery | pb.MessageIdData,
        cumulative: bool = False,
    ) -> pb.CommandAckResponse:
        kind = pb.CommandAck.Cumulative if cumulative else pb.CommandAck.Individual
        ids = [each.message_id if isinstance(each, Delivery) else each for each in messages]
        ack = pb.CommandAck(
            consumer_id=consumer.consumer_id,
            ack_type=kind,
            message_id=ids,
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
        )
        return (await self.client.request(pb.BaseCommand.ACK, ack)).ack_response

    async def send(self, txn: TxnId, payload: bytes) -> None:
        producer = await self.client.create_producer(TOPIC)
        metadata = pb.MessageMetadata(txnid_most_bits=txn.most, txnid_least_bits=txn.least)
        send = pb.CommandSend(txnid_most_bits=txn.most, txnid_least_bits=txn.least)
        await producer.send(payload, metadata=metadata, send=send)
        await producer.close()

    async def records(self) -> int:
        return len(await self.broker.transactions.store.acks_on_segment(TOPIC))

    async def nothing_left(self) -> None:
        while await self.records():
            await asyncio.sleep(0.001)

    async def reload(self) -> None:
        await self.broker.topics.unload(parse_topic_name(TOPIC))


@pytest.fixture
async def stage(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    cache_bytes = getattr(request, "param", 64 * 2**20)
    async with running(tmp_path, entry_cache_bytes=cache_bytes) as broker:
        client = await client_of(broker)
        await fill(client, 5, topic=TOPIC)
        yield Stage(broker, client)
        await client.close()


async def got(consumer: RawConsumer, count: int) -> list[Delivery]:
    return [await consumer.receive() for _ in range(count)]


def payloads(found: Sequence[Delivery]) -> list[str]:
    return [each.payload.decode() for each in found]


async def nothing_comes(consumer: RawConsumer) -> None:
    """Everything that the broker had to send before this was answered has come."""
    for _ in range(3):
        await consumer.client.ping()
    assert consumer.messages.empty()


@every_kind
async def test_a_commit_acknowledges(stage: Stage, kind: pb.CommandSubscribe.SubType) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    answer = await stage.ack(consumer, txn, messages[0], messages[1])
    await stage.ack(consumer, txn, messages[3])
    assert (answer.consumer_id, answer.txnid_most_bits, answer.txnid_least_bits) == (
        consumer.consumer_id,
        *txn,
    )
    subscription = await stage.subscription()
    assert subscription.backlog == 5
    await stage.commit(txn)
    await until(lambda: subscription.backlog == 2)
    await stage.nothing_left()
    await consumer.close()
    again = await stage.subscribe(kind)
    assert payloads(await got(again, 2)) == ["2", "4"]
    await nothing_comes(again)


def serve_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ACKED_AT_ONCE", 2)
    set_bound(monkeypatch, "TXN_SLICE_POSITIONS", 2)


@singly
async def test_ack_of_many_messages_holds_all_of_them_before_the_next_command(
    stage: Stage, kind: pb.CommandSubscribe.SubType, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    serve_two_at_once(monkeypatch)
    subscription = await stage.subscription()
    assert subscription.transactional is not None
    core, sizes = subscription.transactional.pending.core, list[int]()
    reserve = core.reserve

    def count(txn: TxnId, acks: Sequence[AckedPosition], **named: object) -> object:
        sizes.append(len(acks))
        return reserve(txn, acks, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(core, "reserve", count)
    txn = await stage.begin()
    answered = asyncio.ensure_future(stage.ack(consumer, txn, *messages))
    await asyncio.sleep(0)  # It is sent.
    consumer.redeliver()
    await nothing_comes(consumer)
    assert not (await answered).HasField("error")
    assert sizes == [2, 2, 1]
    await stage.commit(txn)
    await until(lambda: subscription.backlog == 0)
    await stage.nothing_left()


@singly
async def test_ack_of_many_messages_is_refused_whole_for_the_last_of_them(
    stage: Stage, kind: pb.CommandSubscribe.SubType, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    serve_two_at_once(monkeypatch)
    first, second = await stage.begin(), await stage.begin()
    await stage.ack(consumer, first, messages[4])
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, second, *messages)
    assert refused.value.code == pb.TransactionConflict
    held = (await stage.subscription()).messages_held
    assert held is not None
    positions = [Position(each.message_id.ledger_id, each.message_id.entry_id) for each in messages]
    assert [held.holds(each) for each in positions] == [False] * 4 + [True]
    await stage.abort(second)
    await stage.ack(consumer, first, *messages[:4])
    subscription = await stage.subscription()
    await stage.commit(first)
    await until(lambda: subscription.backlog == 0)


@singly
async def test_ack_of_many_messages_is_refused_when_its_consumer_is_gone_meanwhile(
    stage: Stage, kind: pb.CommandSubscribe.SubType, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    serve_two_at_once(monkeypatch)
    txn = await stage.begin()
    subscription = await stage.subscription()
    assert subscription.transactional is not None
    pending = subscription.transactional.pending
    reserve = pending.core.reserve

    def then_disconnect(*given: object, **named: object) -> object:
        taken = reserve(*given, **named)  # type: ignore[arg-type]
        subscription.disconnect_consumers()
        return taken

    monkeypatch.setattr(pending.core, "reserve", then_disconnect)
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, txn, *messages)
    assert refused.value.code == pb.ServiceNotReady
    assert not pending.core.positions
    assert not await stage.records()


@also_from_disk
@every_kind
async def test_an_abort_redelivers_at_once(stage: Stage, kind: pb.CommandSubscribe.SubType) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0], messages[2])
    await nothing_comes(consumer)
    await stage.abort(txn)
    if kind in (SHARED, KEY_SHARED):
        again = await got(consumer, 2)
        assert payloads(again) == ["0", "2"]
        assert [each.command.redelivery_count for each in again] == [1, 1]
    else:
        assert payloads(await got(consumer, 5)) == ["0", "1", "2", "3", "4"]
    await nothing_comes(consumer)
    await stage.nothing_left()


@also_from_disk
@every_kind
async def test_message_with_a_pending_ack_is_not_delivered(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    """Not when its consumer asks, not when it leaves, not after a reload (A4)."""
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0], messages[3])
    consumer.redeliver()
    assert payloads(await got(consumer, 3)) == ["1", "2", "4"]
    await consumer.close()
    # Who gets all in order waits for the end: what comes back must not follow what came after it.
    left = ["1", "2", "4"] if kind in (SHARED, KEY_SHARED) else []
    another = await stage.subscribe(kind)
    assert payloads(await got(another, len(left))) == left
    await nothing_comes(another)
    await stage.reload()
    await another.events.get()
    reloaded = await stage.subscribe(kind)
    assert payloads(await got(reloaded, len(left))) == left
    await nothing_comes(reloaded)
    await stage.abort(txn)
    redelivered = await got(reloaded, 2 if kind in (SHARED, KEY_SHARED) else 5)
    assert {"0", "3"} <= set(payloads(redelivered))
    await stage.nothing_left()


async def test_pending_acks_are_rebuilt_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        await fill(client, 5, topic=TOPIC)
        stage = Stage(broker, client)
        consumer = await stage.subscribe(SHARED)
        messages = await got(consumer, 5)
        committed, still_open = await stage.begin(), await stage.begin()
        await stage.ack(consumer, committed, messages[0])
        await stage.ack(consumer, still_open, messages[1])
        await client.close()
    async with running(tmp_path) as broker:
        await broker.transactions.coordinators.end_transaction(committed, COMMITTED, None)
        client = await client_of(broker)
        stage = Stage(broker, client)
        consumer = await stage.subscribe(SHARED)
        assert payloads(await got(consumer, 3)) == ["2", "3", "4"]
        await stage.commit(still_open)
        subscription = await stage.subscription()
        await until(lambda: subscription.backlog == 3)
        await stage.nothing_left()
        await client.close()


@every_kind
@pytest.mark.parametrize("state", [COMMITTED, ABORTED], ids=["commit", "abort"])
async def test_write_and_ack_on_the_same_topic_with_a_live_consumer(
    stage: Stage, kind: pb.CommandSubscribe.SubType, state: TxnState
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.send(txn, b"written")
    await stage.ack(consumer, txn, *messages)
    await nothing_comes(consumer)
    await stage.end(txn, state)
    if state is COMMITTED:
        assert payloads(await got(consumer, 1)) == ["written"]
    else:
        assert payloads(await got(consumer, 5)) == ["0", "1", "2", "3", "4"]
    await nothing_comes(consumer)
    await stage.nothing_left()
    await fill(stage.client, 1, topic=TOPIC)
    assert payloads(await got(consumer, 1)) == ["0"], "the topic goes on"


async def test_a_conflict_is_refused_and_the_other_transaction_goes_on(stage: Stage) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    first, second = await stage.begin(), await stage.begin()
    await stage.ack(consumer, first, messages[0])
    for txn in (first, second):
        with pytest.raises(BrokerError) as refused:
            await stage.ack(consumer, txn, messages[1], messages[0])
        assert refused.value.code == pb.TransactionConflict
    assert (await consumer.ack_answered(messages[4].message_id)).HasField("error") is False
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, second, messages[4])
    assert refused.value.code == pb.TransactionConflict
    await stage.ack(consumer, second, messages[1])
    await stage.abort(first)
    assert payloads(await got(consumer, 1)) == ["0"]
    await stage.ack(consumer, second, messages[0])
    await stage.commit(second)
    await stage.nothing_left()
    assert (await stage.subscription()).backlog == 2


async def test_two_acks_in_one_write_conflict(stage: Stage) -> None:
    """The first holds its messages before the second is looked at, durable or not."""
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 1)
    first, second = await stage.begin(), await stage.begin()
    outcomes = await asyncio.gather(
        stage.ack(consumer, first, messages[0]),
        stage.ack(consumer, second, messages[0]),
        return_exceptions=True,
    )
    assert not isinstance(outcomes[0], BaseException)
    assert isinstance(outcomes[1], BrokerError)
    assert outcomes[1].code == pb.TransactionConflict


async def test_a_late_ack_is_refused(stage: Stage) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0])
    await stage.commit(txn)
    await stage.nothing_left()
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, txn, messages[1])
    assert refused.value.code == pb.InvalidTxnStatus


@pytest.mark.parametrize("kind", [EXCLUSIVE, FAILOVER], ids=["exclusive", "failover"])
async def test_a_cumulative_ack_in_a_transaction(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    aborted, committed = await stage.begin(), await stage.begin()
    await stage.ack(consumer, aborted, messages[1], cumulative=True)
    await stage.ack(consumer, aborted, messages[3], cumulative=True)
    for txn, last in ((committed, messages[4]), (aborted, messages[2])):
        with pytest.raises(BrokerError) as refused:
            await stage.ack(consumer, txn, last, cumulative=True)
        assert refused.value.code == pb.TransactionConflict
    consumer.redeliver()
    assert payloads(await got(consumer, 1)) == ["4"]
    await stage.abort(aborted)
    assert payloads(await got(consumer, 5)) == ["0", "1", "2", "3", "4"]
    await stage.ack(consumer, committed, messages[3], cumulative=True)
    await stage.commit(committed)
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 1)
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, await stage.begin(), messages[3], cumulative=True)
    assert refused.value.code == pb.TransactionConflict, "it is the mark-delete position"
    await stage.nothing_left()


@singly
async def test_a_cumulative_ack_is_not_for_shared_types(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, await stage.begin(), messages[1], cumulative=True)
    assert refused.value.code == pb.NotAllowedError


def messages_of(delivery: Delivery, *indexes: int, size: int = 4) -> pb.MessageIdData:
    """The id of some messages of a batch, as an acknowledgement names them."""
    left = pending_all(size) & ~sum(1 << index for index in indexes)
    named = pb.MessageIdData(batch_size=size)
    named.ledger_id, named.entry_id = delivery.message_id.ledger_id, delivery.message_id.entry_id
    named.ack_set.extend(to_words(left) or [0])
    return named


@also_from_disk
@every_kind
async def test_messages_of_a_batch(stage: Stage, kind: pb.CommandSubscribe.SubType) -> None:
    producer = await stage.client.create_producer(TOPIC)
    body = build_batch([(pb.SingleMessageMetadata(), str(each).encode()) for each in range(4)])
    await producer.send(body, metadata=pb.MessageMetadata(num_messages_in_batch=4))
    consumer = await stage.subscribe(kind)
    *plain, batch = await got(consumer, 6)
    consumer.ack(*(each.message_id for each in plain))
    first, second = await stage.begin(), await stage.begin()
    await stage.ack(consumer, first, messages_of(batch, 0, 1))
    await stage.ack(consumer, second, messages_of(batch, 2))
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, second, messages_of(batch, 1, 3))
    assert refused.value.code == pb.TransactionConflict
    consumer.redeliver()
    (rest,) = await got(consumer, 1)
    assert list(rest.command.ack_set) == [0b1000]
    await consumer.ack_answered(messages_of(batch, 3))
    consumer.redeliver()
    await nothing_comes(consumer)
    await stage.commit(second)
    await stage.abort(first)
    (again,) = await got(consumer, 1)
    assert list(again.command.ack_set) == [0b0011]
    last = await stage.begin()
    await stage.ack(consumer, last, messages_of(batch, 0, 1))
    await stage.commit(last)
    subscription = await stage.subscription()
    await until(lambda: subscription.backlog == 0)
    assert subscription.unacked == 0
    await stage.nothing_left()


@every_kind
async def test_a_plain_ack_of_a_pending_message_counts_at_once(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0], messages[1])
    await consumer.ack_answered(messages[0].message_id)
    await stage.abort(txn)
    again = await got(consumer, 1 if kind in (SHARED, KEY_SHARED) else 4)
    assert payloads(again)[0] == "1"
    await nothing_comes(consumer)


@every_kind
async def test_a_failed_ack_leaves_the_message_where_it_was(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    transactional = (await stage.subscription()).transactional
    assert transactional is not None
    transactional.pending.core.max_positions = 0
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, txn, messages[0])
    assert refused.value.code == pb.TooManyRequests
    await nothing_comes(consumer)
    consumer.redeliver()
    assert payloads(await got(consumer, 5)) == ["0", "1", "2", "3", "4"]


async def test_unsubscribing_deletes_the_records(stage: Stage) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0])
    await consumer.unsubscribe()
    assert await stage.records() == 0
    again = await stage.subscribe(SHARED)
    assert payloads(await got(again, 5)) == ["0", "1", "2", "3", "4"]
    await stage.commit(txn)
    await nothing_comes(again)
    assert (await stage.subscription()).backlog == 5


async def test_a_new_subscription_does_not_inherit_records(stage: Stage) -> None:
    """They were left by an UNSUBSCRIBE that a crash cut short."""
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0])
    topic = await stage.topic()
    subscription = topic.subscriptions["s"]
    await consumer.close()
    await subscription.close(persist=False)
    await topic.ledger.delete_cursor("s")
    await stage.reload()
    assert await stage.records() == 1
    again = await stage.subscribe(SHARED)
    assert payloads(await got(again, 5)) == ["0", "1", "2", "3", "4"]
    assert await stage.records() == 0


async def test_a_subscription_that_is_not_durable_takes_none(stage: Stage) -> None:
    wanted = options(EXCLUSIVE, initial_position=EARLIEST, durable=False)
    reader = await stage.client.subscribe(TOPIC, "r", wanted, permits=10)
    (message, *_) = await got(reader, 5)
    with pytest.raises(BrokerError) as refused:
        await stage.ack(reader, await stage.begin(), message)
    assert refused.value.code == pb.NotAllowedError


async def test_transactional_ack_of_a_missing_message_is_refused(stage: Stage) -> None:
    """An OK would let the transaction commit without its acknowledgement."""
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    beyond = pb.MessageIdData()
    beyond.CopyFrom(messages[4].message_id)
    beyond.entry_id += 1
    with pytest.raises(BrokerError) as refused:
        await stage.ack(consumer, await stage.begin(), beyond)
    assert refused.value.code == pb.TransactionConflict
    with pytest.raises(BrokerError):
        await stage.ack(consumer, await stage.begin())


async def test_an_ack_without_request_id_is_held_and_not_answered(stage: Stage) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    for _ in range(2):
        ack = pb.CommandAck(
            consumer_id=consumer.consumer_id,
            ack_type=pb.CommandAck.Individual,
            message_id=[messages[0].message_id],
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
        )
        stage.client.send(pb.BaseCommand.ACK, ack)
    while not await stage.records():
        await asyncio.sleep(0.001)
    assert await stage.records() == 1
    assert stage.client.events.empty()
    assert basecommand(pb.BaseCommand.ACK, ack).ack.HasField("txnid_least_bits")


@every_kind
async def test_a_sealed_topic_is_drained_when_no_transaction_holds_anything(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    consumer = await stage.subscribe(kind)
    messages = await got(consumer, 5)
    committed, aborted = await stage.begin(), await stage.begin()
    await stage.ack(consumer, committed, messages[0])
    topic = await stage.topic()
    await topic.seal()
    subscription = topic.subscriptions["s"]
    held = subscription.messages_held
    assert held is not None
    await consumer.ack_answered(*(each.message_id for each in messages[1:4]))
    assert not subscription.drained
    await stage.commit(committed)
    await until(lambda: not held.any)
    assert (subscription.backlog, subscription.drained) == (1, False)
    await stage.ack(consumer, aborted, messages[4])
    await consumer.ack_answered(messages[4].message_id)
    await until(lambda: subscription.backlog == 0)
    assert not subscription.drained, "the other one holds what is acknowledged already"
    await stage.abort(aborted)
    await until(lambda: subscription.drained)
    while (await consumer.events.get()).type != pb.BaseCommand.REACHED_END_OF_TOPIC:
        pass


async def test_a_sealed_topic_is_not_drained_before_its_horizon_is_its_end(stage: Stage) -> None:
    """W14."""
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.send(txn, b"open")
    topic = await stage.topic()
    await topic.seal()
    subscription = topic.subscriptions["s"]
    await consumer.ack_answered(*(each.message_id for each in messages))
    last = await consumer.last_message_id()
    assert last.last_message_id.entry_id == messages[4].message_id.entry_id
    subscription.skip(Position(messages[4].message_id.ledger_id, last.last_message_id.entry_id + 1))
    assert subscription.backlog == 0
    assert not subscription.drained
    await stage.abort(txn)
    await until(lambda: subscription.drained)


async def test_a_topic_with_pending_acks_is_not_idle(stage: Stage) -> None:
    consumer = await stage.subscribe(SHARED)
    messages = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0])
    await consumer.close()
    subscription = await stage.subscription()
    await subscription.cursor.persist()
    assert not subscription.idle
    await stage.abort(txn)
    await until(lambda: subscription.idle)


@singly
async def test_redelivered_message_is_not_sent_while_its_ack_is_pending(
    stage: Stage, kind: pb.CommandSubscribe.SubType
) -> None:
    """It waits to be sent again when a transaction takes it, and again when that aborts."""
    consumer = await stage.subscribe(kind, permits=5)
    messages = await got(consumer, 5)
    consumer.redeliver(messages[0].message_id, messages[1].message_id)
    txn = await stage.begin()
    await stage.ack(consumer, txn, messages[0])
    consumer.flow(10)
    assert payloads(await got(consumer, 1)) == ["1"]
    await nothing_comes(consumer)
    await stage.abort(txn)
    (again,) = await got(consumer, 1)
    assert payloads([again]) == ["0"]
    assert again.command.redelivery_count == 2
    assert (await stage.subscription()).unacked == 5


async def test_transactions_that_are_off_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, transactions_enabled=False) as broker:
        client = await client_of(broker)
        await fill(client, 1, topic=TOPIC)
        stage = Stage(broker, client)
        consumer = await stage.subscribe(SHARED)
        (message,) = await got(consumer, 1)
        with pytest.raises(BrokerError) as refused:
            await stage.ack(consumer, TxnId(0, 0), message)
        assert refused.value.code == pb.NotAllowedError
        await client.close()
