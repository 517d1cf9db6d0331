"""Backlog quotas over a whole broker: producers wait or fail, subscriptions lose messages."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.policies.backlog_quotas import BacklogQuota, QuotaType, quota_json
from broker.topics.backlog_gauge import BacklogGauge
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.txn_id import CoordinatorId
from storage.ledger.store import LedgerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry
from tests.support.clocks import FakeClock
from tests.support.embedded_broker import running, running_at
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient, RawProducer
from tests.support.waiting import until
from tests.unit.broker.admin.conftest import Rest, asking_broker
from tests.unit.broker.topics.test_topics import name_of
from txn.records import TxnState

TOPIC = "persistent://public/default/t"
PATH = "/admin/v2/persistent/public/default/t"
NAMESPACE = "/admin/v2/namespaces/public/default"
SIZE, AGE = "destination_storage", "message_age"
HOLD, EXCEPTION, EVICTION = (
    "producer_request_hold",
    "producer_exception",
    "consumer_backlog_eviction",
)
SECOND_MS = 1000
FROM_EARLIEST = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
Connect = Callable[[], Awaitable[RawClient]]


class World:
    """A broker whose clock stands still, its REST port, a client, and a topic with `s`."""

    def __init__(self, broker: Broker, clock: FakeClock, rest: Rest, client: RawClient) -> None:
        self.broker = broker
        self.clock = clock
        self.rest = rest
        self.client = client

    @property
    def topic(self) -> Topic:
        return self.broker.topics.loaded()[TOPIC]

    def backlog(self, subscription: str = "s") -> int:
        return self.topic.subscriptions[subscription].backlog

    async def limit(self, limit: int, policy: str, quota: str = SIZE, path: str = PATH) -> None:
        body = quota_json(limit, -1, policy) if quota == SIZE else quota_json(-1, limit, policy)
        await self.rest.done("POST", f"{path}/backlogQuota?backlogQuotaType={quota}", body)

    async def producer(self, name: str = "", **options: object) -> RawProducer:
        command = pb.CommandProducer(producer_name=name, **options)  # type: ignore[arg-type]
        return await self.client.create_producer(TOPIC, command)

    async def refused(self, code: "pb.ServerError") -> str:
        with pytest.raises(BrokerError) as caught:
            await self.producer()
        assert caught.value.code == code
        return str(caught.value)

    async def send(self, producer: RawProducer, count: int, size: int = 100) -> None:
        metadata = pb.MessageMetadata(publish_time=self.clock.ms)
        for _ in range(count):
            await producer.send(b"x" * size, metadata=metadata)

    async def check(self) -> None:
        await self.rest.done("GET", "/admin/v2/brokers/backlog-quota-check")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def world(tmp_path: Path, clock: FakeClock) -> AsyncIterator[World]:
    async with running_at(clock, None, tmp_path) as broker, asking_broker(broker) as rest:
        topic = await broker.topics.get(name_of(TOPIC), create=True)
        await topic.create_subscription("s", EARLIEST)
        client = await RawClient.open("127.0.0.1", broker.port)
        yield World(broker, clock, rest, client)
        await client.close()


async def closed_by_broker(producer: RawProducer) -> None:
    event = await producer.client.wait(producer.events.get())
    assert event.type == pb.BaseCommand.CLOSE_PRODUCER


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (HOLD, pb.ProducerBlockedQuotaExceededError),
        (EXCEPTION, pb.ProducerBlockedQuotaExceededException),
    ],
)
@pytest.mark.parametrize("quota", [SIZE, AGE])
async def test_producers_are_closed_and_refused_until_the_backlog_is_below_its_quota(
    world: World, policy: str, code: "pb.ServerError", quota: str
) -> None:
    producers = [await world.producer() for _ in range(2)]
    await world.send(producers[0], 3)
    size_bytes = await world.topic.backlog.size_bytes()
    await world.limit(size_bytes if quota == SIZE else 10, policy, quota)
    world.clock.ms += 10 * SECOND_MS
    # Attached ones may send on until the check.
    reason = await world.refused(code)
    assert f"{TOPIC} has reached its quota" in reason
    assert policy in reason
    await world.check()
    for producer in producers:
        await closed_by_broker(producer)
    await world.refused(code)
    # The next PRODUCER after the backlog fell gets in; no check is needed.
    consumer = await world.client.subscribe(TOPIC, "s", permits=10)
    for _ in range(3):
        await consumer.ack_answered((await consumer.receive()).message_id)
    await world.send(await world.producer(), 1)
    await world.check()


async def test_sends_before_the_close_get_their_receipts(world: World) -> None:
    producer = await world.producer()
    receipts: list[object] = []
    await world.limit(1, HOLD)
    await world.send(producer, 1)
    closing = asyncio.create_task(world.broker.backlog_quotas.check())
    for _ in range(10):
        number, frame = producer.frame(b"x")
        producer.send_frame(number, frame, receipts.append)
    await closing
    await closed_by_broker(producer)
    # In order and without a gap: what comes after the close is dropped, and sent anew by clients.
    assert all(isinstance(each, pb.CommandSendReceipt) for each in receipts)
    assert world.backlog() == 1 + len(receipts)


async def test_sends_that_wait_for_a_publish_rate_do_not_delay_the_check(world: World) -> None:
    producer = await world.producer()
    await world.send(producer, 1)
    rate = {"publishThrottlingRateInMsg": 1, "publishThrottlingRateInByte": -1}
    await world.rest.done("POST", f"{PATH}/publishRate", rate)
    receipts: list[object] = []
    for _ in range(1000):
        number, frame = producer.frame(b"x")
        producer.send_frame(number, frame, receipts.append)
    await until(lambda: world.topic.context.throttled_sends.total > 0)
    await world.limit(1, HOLD)
    # All of them together would wait for a quarter of an hour.
    await asyncio.wait_for(world.check(), 30)
    await closed_by_broker(producer)
    assert world.topic.context.throttled_sends.total == 0
    assert not world.topic.producers


async def test_a_producer_that_waits_to_be_exclusive_is_refused_too(world: World) -> None:
    first = await world.producer(producer_access_mode=pb.Exclusive)
    waiting = await world.producer(producer_access_mode=pb.WaitForExclusive)
    assert not waiting.success.producer_ready
    await world.send(first, 1)
    await world.limit(1, HOLD)
    await world.check()
    await closed_by_broker(first)
    await until(lambda: not world.topic.producers)
    await world.refused(pb.ProducerBlockedQuotaExceededError)


async def test_slow_subscriptions_lose_their_oldest_messages_down_to_nine_tenths(
    world: World,
) -> None:
    for name in ("also-slow", COMPACTION_CURSOR):
        await world.topic.create_subscription(name, EARLIEST)
    fast = await world.client.subscribe(TOPIC, "fast", FROM_EARLIEST, permits=1000)
    producer = await world.producer()
    await world.send(producer, 200)
    for _ in range(150):
        fast.ack((await fast.receive()).message_id)
    await until(lambda: world.backlog("fast") == 50)
    await world.limit(world.topic.ledger.total_size_bytes // 2 + 1, EVICTION)
    await world.check()
    assert world.backlog("s") == world.backlog("also-slow") == 90
    assert world.backlog("fast") == 50
    assert world.backlog(COMPACTION_CURSOR) == 200
    assert world.topic.subscriptions["s"].expired_total == 110
    # The producer stays, and a consumer gets what is left.
    await world.send(producer, 1)
    assert producer.events.empty()
    consumer = await world.client.subscribe(TOPIC, "s", permits=1000)
    assert (await consumer.receive()).message_id.entry_id == 110
    await world.check()
    assert world.backlog("s") == 91


async def test_data_that_only_compaction_needs_refuses_no_producers(world: World) -> None:
    await world.topic.unsubscribe("s", force=False)
    await world.topic.create_subscription(COMPACTION_CURSOR, EARLIEST)
    producer = await world.producer()
    await world.send(producer, 3)
    await world.limit(1, HOLD)
    await world.limit(1, EXCEPTION, AGE)
    world.clock.ms += 10 * SECOND_MS
    await world.check()
    await world.producer()
    assert producer.events.empty()


async def test_old_messages_are_evicted_and_younger_ones_stay(world: World) -> None:
    producer = await world.producer()
    for _ in range(3):
        await world.send(producer, 10)
        world.clock.ms += 10 * SECOND_MS
    await world.limit(20, EVICTION, AGE)
    await world.check()
    assert world.backlog() == 10
    await world.check()
    assert world.backlog() == 10
    world.clock.ms += 10 * SECOND_MS - 1
    await world.check()
    assert world.backlog() == 10
    world.clock.ms += 1
    await world.check()
    assert world.backlog() == 0


@pytest.mark.parametrize("policy", [HOLD, EVICTION])
async def test_a_message_that_names_no_publish_time_hides_no_old_ones_behind_it(
    world: World, policy: str
) -> None:
    producer = await world.producer()
    await producer.send(b"x", metadata=pb.MessageMetadata(publish_time=0))
    await world.send(producer, 5)
    world.clock.ms += 10 * SECOND_MS
    await world.limit(10, policy, AGE)
    await world.check()
    if policy == HOLD:
        await closed_by_broker(producer)
        await world.refused(pb.ProducerBlockedQuotaExceededError)
    else:
        assert world.backlog() == 0


async def test_an_oldest_message_that_cannot_be_read_now_refuses_no_producers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await world.producer()
    await world.send(producer, 2)
    await world.limit(10, EXCEPTION, AGE)
    world.clock.ms += 10 * SECOND_MS
    read = ManagedLedger.read

    async def fails(ledger: ManagedLedger, start: Position, **bounds: int) -> list[Entry]:
        if bounds["max_entries"] == 1:
            raise LedgerError("Its bookies are away.")
        return await read(ledger, start, **bounds)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(ManagedLedger, "read", fails)
        await world.producer()
        await world.check()
        assert producer.events.empty()
    await world.refused(pb.ProducerBlockedQuotaExceededException)


async def test_a_topic_that_fails_the_check_keeps_no_other_from_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.send(await world.producer(), 1)
    await world.client.subscribe(f"{TOPIC}2", "s", FROM_EARLIEST)
    second = await world.client.create_producer(f"{TOPIC}2")
    await world.send(second, 1)
    await world.limit(1, EXCEPTION, path=NAMESPACE)
    first = world.topic
    exceeds = BacklogGauge.exceeds

    async def fault(gauge: BacklogGauge, quota: BacklogQuota) -> bool:
        if gauge is first.backlog:
            raise RuntimeError("a fault")
        return await exceeds(gauge, quota)

    monkeypatch.setattr(BacklogGauge, "exceeds", fault)
    await world.check()
    await closed_by_broker(second)


async def test_messages_behind_an_open_transaction_stay(world: World) -> None:
    producer = await world.producer()
    await world.send(producer, 5)
    txn = await world.broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
    send = pb.CommandSend(txnid_most_bits=txn.most, txnid_least_bits=txn.least)
    metadata = pb.MessageMetadata(txnid_most_bits=txn.most, txnid_least_bits=txn.least)
    await producer.send(b"open", metadata=metadata, send=send)
    await world.send(producer, 5)
    await world.limit(0, EVICTION)
    await world.check()
    assert world.backlog() == 6
    await world.broker.transactions.coordinators.end_transaction(txn, TxnState.COMMITTED, None)
    await until(lambda: world.topic.max_read_position() == world.topic.ledger.last_confirmed)
    await world.check()
    assert world.backlog() == 0


@pytest.mark.parametrize("end", [TxnState.COMMITTED, TxnState.ABORTED])
async def test_acknowledgements_in_a_transaction_end_whole_after_an_eviction(
    world: World, end: TxnState
) -> None:
    producer = await world.producer()
    await world.send(producer, 4)
    shared = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await world.client.subscribe(TOPIC, "s", shared, permits=4)
    messages = [await consumer.receive() for _ in range(4)]
    txn = await world.broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
    ack = consumer.ack_command([messages[0].message_id, messages[3].message_id], False, None)
    ack.txnid_most_bits, ack.txnid_least_bits = txn.most, txn.least
    await world.client.request(pb.BaseCommand.ACK, ack)
    # Evicts the first two: one of them is acknowledged in the transaction.
    entry_bytes = world.topic.ledger.total_size_bytes // 4
    await world.limit(3 * entry_bytes, EVICTION)
    await world.check()
    assert world.backlog() == 2
    await world.broker.transactions.coordinators.end_transaction(txn, end, None)
    await consumer.ack_answered(messages[2].message_id)
    if end is TxnState.ABORTED:
        consumer.flow(10)
        again = await consumer.receive()
        assert again.message_id == messages[3].message_id
        await consumer.ack_answered(again.message_id)
    await until(lambda: world.backlog() == 0)
    assert consumer.messages.empty()


async def test_a_policy_that_changes_under_load_disconnects_nobody_below_the_quota(
    world: World,
) -> None:
    producer = await world.producer()
    consumer = await world.client.subscribe(TOPIC, "s", permits=10_000)
    sending = asyncio.create_task(world.send(producer, 300))
    for policy in (HOLD, EXCEPTION, EVICTION):
        for quota in (SIZE, AGE):
            await world.limit(10**6, policy, quota)
            await world.limit(10**6, policy, quota, NAMESPACE)
            await world.check()
    for quota in (SIZE, AGE):
        await world.rest.done("DELETE", f"{PATH}/backlogQuota?backlogQuotaType={quota}")
    await sending
    for _ in range(300):
        await consumer.receive()
    assert producer.events.empty()
    assert consumer.events.empty()


async def test_a_quota_counts_for_each_segment_of_a_scalable_topic(world: World) -> None:
    path = "/admin/v2/persistent/public/default/scalable"
    await world.rest.done("PUT", "/admin/v2/scalable/public/default/scalable?numInitialSegments=2")
    full, other = (
        f"segment://public/default/scalable/{each}" for each in ("0000-7fff-0", "8000-ffff-1")
    )
    producers = [await world.client.create_producer(each) for each in (full, other)]
    for each in (full, other):
        await world.client.subscribe(each, "s", FROM_EARLIEST)
    await world.send(producers[0], 3)
    await world.limit(100, EXCEPTION, path=path)
    await world.check()
    await closed_by_broker(producers[0])
    with pytest.raises(BrokerError, match=f"{full} has reached its quota of 100 bytes") as caught:
        await world.client.create_producer(full)
    assert caught.value.code == pb.ProducerBlockedQuotaExceededException
    await world.client.create_producer(other)
    assert producers[1].events.empty()
    stats = await world.rest.get("/admin/v2/scalable/public/default/scalable/stats")
    assert isinstance(stats, dict)
    assert stats["backlogQuotaLimitSize"] == 100


async def test_non_persistent_topics_have_no_backlog_to_limit(tmp_path: Path) -> None:
    async with running(tmp_path, backlog_quota_default_limit_bytes=0) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        name = "non-persistent://public/default/t"
        producer = await client.create_producer(name)
        await client.subscribe(name, "s")
        await producer.send(b"x")
        await broker.backlog_quotas.check()
        await client.create_producer(name)
        await client.close()


async def test_a_broker_checks_backlogs_periodically(tmp_path: Path) -> None:
    async with running(
        tmp_path,
        backlog_quota_default_limit_bytes=1,
        backlog_quota_default_retention_policy=EVICTION,
        backlog_quota_check_interval_s=1,
    ) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.subscribe(TOPIC, "s")
        await (await client.create_producer(TOPIC)).send(b"x")
        subscription = broker.topics.loaded()[TOPIC].subscriptions["s"]
        await until(lambda: subscription.backlog == 0)
        await client.close()


async def test_statistics_show_the_quotas_and_the_oldest_message(world: World) -> None:
    async def shown() -> tuple[object, ...]:
        stats = await world.rest.get(f"{PATH}/stats")
        assert isinstance(stats, dict)
        return (
            stats["backlogQuotaLimitSize"],
            stats["backlogQuotaLimitTime"],
            stats["oldestBacklogMessageAgeSeconds"],
            stats["oldestBacklogMessageSubscriptionName"],
        )

    assert await shown() == (-1, -1, -1, None)
    await world.limit(10**6, HOLD)
    await world.limit(3600, HOLD, AGE)
    await world.send(await world.producer(), 3)
    world.clock.ms += 7 * SECOND_MS
    assert await shown() == (10**6, 3600, 7, "s")


async def test_statistics_of_a_partitioned_topic_show_its_oldest_message(world: World) -> None:
    path = "/admin/v2/persistent/public/default/p"
    await world.rest.done("PUT", f"{path}/partitions", 3)
    await world.limit(10**6, HOLD, path=path)
    for index, name in enumerate(("none", "old", "young")):
        partition = f"persistent://public/default/p-partition-{index}"
        await world.client.subscribe(partition, name)
        if name != "none":
            await world.send(await world.client.create_producer(partition), 1)
        world.clock.ms += 5 * SECOND_MS
    stats = await world.rest.get(f"{path}/partitioned-stats")
    assert isinstance(stats, dict)
    assert stats["backlogQuotaLimitSize"] == 10**6
    assert stats["oldestBacklogMessageAgeSeconds"] == 10
    assert stats["oldestBacklogMessageSubscriptionName"] == "old"


@pytest.mark.parametrize("topic_level", [True, False])
async def test_metrics_show_limits_and_evictions(
    tmp_path: Path, clock: FakeClock, topic_level: bool
) -> None:
    async with running_at(
        clock,
        None,
        tmp_path,
        topic_level_metrics=topic_level,
        backlog_quota_default_limit_bytes=5,
        backlog_quota_default_limit_s=7,
        backlog_quota_default_retention_policy=EVICTION,
    ) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        for name in (TOPIC, f"{TOPIC}2"):
            await client.subscribe(name, "s")
            await (await client.create_producer(name)).send(b"x" * 100)
        await broker.backlog_quotas.check()
        text = await metrics_text(broker)
        await client.close()
    cluster = broker.settings.cluster_name
    if topic_level:
        labels = f'cluster="{cluster}",namespace="public/default"'
        topic, times = f'{labels},topic="{TOPIC}"', 1
        quota_labels = f'{labels},quota_type="size",topic="{TOPIC}"'
    else:
        topic, times = f'cluster="{cluster}",namespace="public/default"', 2
        quota_labels = f'{topic},quota_type="size"'
    lines = text.splitlines()
    assert f"pulsar_storage_backlog_quota_limit{{{topic}}} 5.0" in lines
    assert f"pulsar_storage_backlog_quota_limit_time{{{topic}}} 7.0" in lines
    evictions = "pulsar_storage_backlog_quota_exceeded_evictions_total"
    assert f"{evictions}{{{quota_labels}}} {times}.0" in lines
    of_broker = "pulsar_broker_storage_backlog_quota_exceeded_evictions_total"
    assert f'{of_broker}{{cluster="{cluster}",quota_type="size"}} 2.0' in lines
    assert f'{of_broker}{{cluster="{cluster}",quota_type="time"}} 0.0' in lines


async def test_a_check_reads_one_entry_at_most_and_only_a_new_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Position] = []
    read = ManagedLedger.read

    async def counted(ledger: ManagedLedger, start: Position, **bounds: int) -> list[Entry]:
        if ledger is world.topic.ledger:
            reads.append(start)
            assert bounds["max_entries"] == 1
        return await read(ledger, start, **bounds)  # type: ignore[arg-type]

    await world.send(await world.producer(), 50)
    await world.limit(10**6, HOLD)
    monkeypatch.setattr(ManagedLedger, "read", counted)
    await world.check()
    assert reads == []
    await world.limit(3600, HOLD, AGE)
    for _ in range(3):
        await world.check()
        await world.producer()
    assert len(reads) == 1
    await world.topic.subscriptions["s"].skip_oldest(1)
    await world.check()
    assert len(reads) == 2


async def test_a_quota_of_size_leaves_that_of_age_in_force(world: World) -> None:
    producer = await world.producer()
    await world.send(producer, 10)
    world.clock.ms += 30 * SECOND_MS
    await world.send(producer, 10)
    entry_bytes = world.topic.ledger.total_size_bytes // 20
    await world.limit(20 * entry_bytes, EVICTION)
    await world.limit(20, HOLD, AGE)
    await world.check()
    # The size is below its limit now, and the oldest message is still too old.
    assert world.backlog() == 18
    await closed_by_broker(producer)
    assert world.topic.backlog.evictions == {QuotaType.SIZE: 1, QuotaType.AGE: 0}
