"""Queue consumers on a real broker: what is acknowledged stays so, everything else comes again."""

import asyncio
import gc
import random
import warnings
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import cast
from urllib.parse import urlparse

import pytest

import magnetar
from magnetar import DeadLetterPolicy, InitialPosition, Message, NackDelay, QueueConsumer
from magnetar.compression import CompressionType
from magnetar.errors import (
    AlreadyClosed,
    ConnectionLost,
    InvalidArgument,
    NotAllowed,
    TransactionConflict,
    TransactionFailed,
)
from magnetar.opening import Opening
from magnetar.protocol import pulsar_pb2 as pb
from tests.client.conftest import MakeTopic, Service
from tests.support.broker_process import BrokerProcess, running
from tests.support.raw_client import RawClient
from tests.support.waiting import until

WAIT_S = 30
QUIET_S = 0.2
"""After that nothing more is expected; what should not come would come at once."""
SOON = NackDelay(min_ms=20, max_ms=100)


def queue(
    client: magnetar.Client,
    topic: str,
    *,
    nack_delay: NackDelay = SOON,
    dead_letters: DeadLetterPolicy | None = None,
    receiver_queue_size: int = 1000,
) -> Opening[QueueConsumer[str]]:
    return client.queue_consumer(
        topic,
        "s",
        schema=str,
        initial_position=InitialPosition.EARLIEST,
        nack_delay=nack_delay,
        dead_letters=dead_letters,
        receiver_queue_size=receiver_queue_size,
    )


async def send(
    client: magnetar.Client, topic: str, values: Iterable[str], *, keyed: bool = True
) -> None:
    async with client.producer(topic, schema=str) as producer:
        await asyncio.gather(*(producer.send(each, key=each if keyed else None) for each in values))


async def take(consumer: QueueConsumer[str], count: int) -> list[Message[str]]:
    return [await consumer.receive(WAIT_S) for _ in range(count)]


async def rest_of(consumer: QueueConsumer[str]) -> list[str]:
    """What else comes."""
    found: list[str] = []
    while messages := await consumer.receive_batch(1000, QUIET_S):
        found += [each.value for each in messages]
    return found


def values(messages: Iterable[Message[str]]) -> list[str]:
    return sorted(each.value for each in messages)


def numbers(count: int) -> list[str]:
    return sorted(f"m{number}" for number in range(count))


async def test_everything_comes_once_and_is_acknowledged(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(3)
    async with queue(client, made.name) as consumer:
        await send(client, made.name, numbers(100))
        messages = await take(consumer, 100)
        assert values(messages) == numbers(100)
        assert {each.segment_id for each in messages} == {0, 1, 2}
        await consumer.ack(messages)
    async with queue(client, made.name) as consumer:
        assert await rest_of(consumer) == []


async def test_a_message_says_what_its_producer_said(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with (
        client.producer(made.name, schema=str, name="p") as producer,
        queue(client, made.name) as consumer,
    ):
        where = await producer.send(
            "text", key="k", ordering_key=b"o", properties={"a": "b"}, event_time_ms=77
        )
        await producer.send("other")
        message, other = await take(consumer, 2)
    assert message.id == where
    assert message.topic == made.name
    assert (message.key, message.key_bytes, message.ordering_key) == ("k", b"k", b"o")
    assert message.properties == {"a": "b"}
    assert (message.event_time_ms, message.redelivery_count) == (77, 0)
    assert message.producer_name.startswith("p")
    assert message.schema_version is not None
    assert (message.size_bytes, message.replicated_from) == (4, None)
    assert message.publish_time_ms > 0
    assert (other.key, other.key_bytes, other.ordering_key) == (None, None, None)
    assert (dict(other.properties), other.event_time_ms) == ({}, None)
    assert other.sequence_id == message.sequence_id + 1


@pytest.mark.parametrize("batching", [True, False])
async def test_a_key_of_bytes_comes_as_bytes(
    client: magnetar.Client, topic: MakeTopic, batching: bool
) -> None:
    made = await topic(segments=2)
    key = bytes(range(256))
    async with (
        client.producer(made.name, batching=batching) as producer,
        queue(client, made.name) as consumer,
    ):
        producer.send_nowait(b"a", key=key)
        producer.send_nowait(b"b", key=key)
        await producer.flush()
        for message in await take(consumer, 2):
            assert (message.has_bytes_key, message.key_bytes) == (True, key)
            assert message.key == b64encode(key).decode()


@pytest.mark.parametrize("kind", list(CompressionType))
async def test_compressed_batches_come_whole(
    client: magnetar.Client, topic: MakeTopic, kind: CompressionType
) -> None:
    made = await topic()
    async with (
        queue(client, made.name) as consumer,
        client.producer(made.name, schema=str, compression=kind) as producer,
    ):
        await asyncio.gather(*(producer.send(each * 20) for each in numbers(50)))
        assert values(await take(consumer, 50)) == sorted(each * 20 for each in numbers(50))


async def test_a_message_in_chunks_comes_whole_and_is_acknowledged_whole(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    data = bytes(range(256)) * 24 * 1024
    async with client.queue_consumer(made.name, "s") as consumer:
        async with client.producer(made.name, chunking=True, batching=False) as producer:
            where = await producer.send(data)
        message = await consumer.receive(WAIT_S)
        assert message.data == data
        assert message.id == where
        assert message.id.entry.first_chunk is not None
        await consumer.ack(message)
    async with client.queue_consumer(made.name, "s") as again:
        assert await again.receive_batch(1, QUIET_S) == []


async def test_messages_in_chunks_come_whole_with_several_consumers(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    """Only a consumer that gets all chunks of a message can put it together."""
    made = await topic()
    data = bytes(range(256)) * 48 * 1024
    got: list[bytes] = []

    async def read(consumer: QueueConsumer[bytes]) -> None:
        async for message in consumer:
            got.append(message.data)
            await consumer.ack(message)

    consumers = [await client.queue_consumer(made.name, "s") for _ in range(2)]
    reading = [asyncio.create_task(read(each)) for each in consumers]
    async with client.producer(made.name, chunking=True, batching=False) as producer:
        for _ in range(3):
            await producer.send(data)
    await until(lambda: len(got) == 3)
    assert all(each == data for each in got)
    for each in consumers:
        await each.close()
    await asyncio.gather(*reading)


async def test_messages_of_a_batch_are_acknowledged_one_by_one(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, numbers(10), keyed=False)
        messages = await take(consumer, 10)
        assert max(each.id.entry.batch_size for each in messages) > 1
        done = messages[1::2]
        await consumer.ack(done)
    async with queue(client, made.name) as consumer:
        left = await take(consumer, 5)
        assert values(left) == values(messages[0::2])
        await consumer.ack(left)
    async with queue(client, made.name) as consumer:
        assert await rest_of(consumer) == []


async def test_nacked_message_is_redelivered_with_a_count(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, ["m"])
        for count in range(3):
            message = await consumer.receive(WAIT_S)
            assert message.redelivery_count == count
            consumer.nack(message)
        await consumer.ack(await consumer.receive(WAIT_S))
        assert await rest_of(consumer) == []


async def test_a_nack_of_one_message_of_a_batch_spares_the_acknowledged_ones(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, numbers(6), keyed=False)
        messages = await take(consumer, 6)
        for each in messages[:-1]:
            await consumer.ack(each)
        consumer.nack(messages[-1])
        again = await consumer.receive(WAIT_S)
        while again.id != messages[-1].id:
            again = await consumer.receive(WAIT_S)
        assert again.redelivery_count == 1
        await consumer.ack(again)


async def test_message_redelivered_too_often_is_a_dead_letter(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    await topic(name=f"{made.local_name}-DLQ")
    policy = DeadLetterPolicy(max_redelivery_count=1)
    async with (
        queue(client, f"{made.name}-DLQ") as dead,
        queue(client, made.name, dead_letters=policy) as consumer,
        client.producer(made.name, schema=str) as producer,
    ):
        where = await producer.send("bad", key="k", properties={"a": "b"}, event_time_ms=5)
        for _ in range(2):
            consumer.nack(await consumer.receive(WAIT_S))
        letter = await dead.receive(WAIT_S)
        assert (letter.value, letter.key, letter.event_time_ms) == ("bad", "k", 5)
        assert letter.properties == {
            "a": "b",
            "REAL_TOPIC": made.name,
            "REAL_SUBSCRIPTION": "s",
            "ORIGIN_MESSAGE_ID": str(where.entry),
        }
        assert await rest_of(consumer) == []
    async with queue(client, made.name) as consumer:
        assert await rest_of(consumer) == []


async def test_two_consumers_share_the_messages(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(2)
    async with (
        queue(client, made.name, receiver_queue_size=10) as one,
        queue(client, made.name, receiver_queue_size=10) as two,
        client.producer(made.name, schema=str, batching=False) as producer,
    ):
        await asyncio.gather(*(producer.send(each, key=each) for each in numbers(200)))
        got: list[Message[str]] = []

        async def work(consumer: QueueConsumer[str]) -> int:
            mine = 0
            while len(got) < 200:
                batch = await consumer.receive_batch(10, QUIET_S)
                got.extend(batch)
                mine += len(batch)
                await consumer.ack(batch)
                await asyncio.sleep(0)
            return mine

        shares = await asyncio.gather(work(one), work(two))
    assert values(got) == numbers(200)
    assert min(shares) > 0


async def test_splits_and_merges_while_it_consumes(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    got: Counter[str] = Counter()
    async with (
        queue(client, made.name) as consumer,
        client.producer(made.name, schema=str) as producer,
    ):
        sent = 0

        async def send_some() -> None:
            nonlocal sent
            names = [f"{number}" for number in range(sent, sent + 100)]
            sent += 100
            await asyncio.gather(*(producer.send(each, key=each) for each in names))

        async def consume() -> None:
            async for message in consumer:
                got[message.value] += 1
                await consumer.ack(message)

        consuming = asyncio.create_task(consume())
        await send_some()
        await asyncio.gather(made.split(0), send_some())
        await send_some()
        one, two = await made.active()
        await asyncio.gather(made.merge(one, two), send_some())
        await send_some()
        await until(lambda: len(got) >= sent)
        await consumer.close()
        await consuming
    assert got == Counter(f"{number}" for number in range(sent))


async def test_transactional_acknowledgements_count_when_it_commits(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, ["kept"])
        message = await consumer.receive(WAIT_S)
        async with client.transaction() as transaction:
            await consumer.ack(message, transaction=transaction)
    async with queue(client, made.name) as consumer:
        assert await rest_of(consumer) == []


async def test_transactional_acknowledgements_are_undone_when_it_aborts(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, ["undone"])
        message = await consumer.receive(WAIT_S)
        transaction = await client.transaction()
        await consumer.ack(message, transaction=transaction)
        await transaction.abort()
        again = await consumer.receive(WAIT_S)
        assert again.id == message.id
        await consumer.ack(again)


async def test_a_transaction_does_not_commit_without_an_acknowledgement(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    async with queue(client, made.name) as consumer, client.producer(made.name, schema=str) as to:
        await to.send("a")
        message = await consumer.receive(WAIT_S)
        consumer._segments[0].again(NotAllowed("Refused for a while."))
        await until(lambda: not consumer._segments, poll_s=0)
        transaction = await client.transaction()
        with pytest.raises(AlreadyClosed):
            await consumer.ack(message, transaction=transaction)
        with pytest.raises(TransactionFailed):
            await transaction.commit()
        again = await consumer.receive(WAIT_S)
        assert again.value == "a"
        async with client.transaction() as transaction:
            await consumer.ack(again, transaction=transaction)


async def test_two_transactions_cannot_acknowledge_one_message(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        await send(client, made.name, ["m"])
        message = await consumer.receive(WAIT_S)
        first, second = await client.transaction(), await client.transaction()
        await consumer.ack(message, transaction=first)
        with pytest.raises(TransactionConflict):
            await consumer.ack(message, transaction=second)
        await second.abort()
        await first.commit()


class Workers:
    """Several that share a consumer: each has a transaction of its own, and some abort."""

    def __init__(self, client: magnetar.Client, consumer: QueueConsumer[str], count: int) -> None:
        self.committed: Counter[str] = Counter()
        self.conflicts: list[str] = []
        self._client = client
        self._consumer = consumer
        self._count = count
        self._rng = random.Random(7)

    async def run(self) -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(self._work())

    async def until(self, count: int) -> None:
        await until(lambda: len(self.committed) >= count, 60)

    async def _work(self) -> None:
        while len(self.committed) < self._count:
            messages = await self._consumer.receive_batch(self._rng.randint(1, 5), 0.05)
            if not messages:
                continue
            transaction = await self._client.transaction()
            try:
                await asyncio.sleep(self._rng.uniform(0, 0.01))
                await self._consumer.ack(messages, transaction=transaction)
                await asyncio.sleep(self._rng.uniform(0, 0.01))
                if self._rng.random() < 0.3:
                    await transaction.abort()
                else:
                    await transaction.commit()
                    self.committed.update(each.value for each in messages)
            except (ConnectionLost, TransactionConflict) as error:
                if isinstance(error, TransactionConflict):
                    self.conflicts.append(str(error))
                for each in messages:
                    self._consumer.nack(each)  # those that are acknowledged come by the abort
                await transaction.abort()


@pytest.mark.magnetar_only("it gives back whole batches")
@pytest.mark.parametrize("what", ["aborts", "reconnect", "split", "merge"])
async def test_transactions_of_one_client_are_not_in_each_others_way(
    client: magnetar.Client, topic: MakeTopic, what: str
) -> None:
    made = await topic(2)
    count = 400
    async with queue(client, made.name) as consumer:
        await send(client, made.name, numbers(count))
        workers = Workers(client, consumer, count)
        working = asyncio.create_task(workers.run())
        for at in (50, 150, 250):
            await workers.until(at)
            if what == "reconnect":
                for segment in consumer._segments.values():
                    if segment.connection is not None:
                        segment.connection.abort(ConnectionLost("The test has cut it."))
            elif what == "split":
                await made.split((await made.active())[0])
            elif what == "merge" and len(active := await made.active_by_range()) > 1:
                await made.merge(active[0], active[1])
        await working
        assert workers.conflicts == []
        assert workers.committed == Counter(numbers(count))
        assert await rest_of(consumer) == []


async def test_close_gives_back_what_was_not_acknowledged(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    first = await queue(client, made.name)
    async with queue(client, made.name) as other:
        async with client.producer(made.name, schema=str, batching=False) as producer:
            await asyncio.gather(*(producer.send(each) for each in numbers(20)))
        mine = await first.receive_batch(20, WAIT_S)
        acked = mine[: len(mine) // 2]
        await first.ack(acked)
        await first.close()
        with pytest.raises(AlreadyClosed):
            first.ack(mine)
        rest = await rest_of(other)
    assert sorted(rest + [each.value for each in acked]) == numbers(20)


async def test_close_ends_what_waits(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    consumer = await queue(client, made.name)
    waiting = asyncio.create_task(consumer.receive())
    await asyncio.sleep(0)
    await consumer.close()
    with pytest.raises(AlreadyClosed):
        await waiting
    assert [message async for message in consumer] == []


async def test_a_confirmed_acknowledgement_is_known_to_the_broker(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(2)
    async with client.queue_consumer(
        made.name, "s", initial_position=InitialPosition.EARLIEST, ack_grouping_ms=60_000
    ) as consumer:
        await send(client, made.name, numbers(20))
        messages = [await consumer.receive(WAIT_S) for _ in range(20)]
        await consumer.ack(messages, wait=True)
        async with queue(client, made.name) as other:
            assert await rest_of(other) == []


async def test_a_receive_that_is_cancelled_loses_nothing(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        sending = asyncio.create_task(send(client, made.name, numbers(50)))
        got: list[str] = []
        async with asyncio.timeout(WAIT_S):
            while len(got) < 50:
                receiving = asyncio.create_task(consumer.receive())
                await asyncio.sleep(0)
                receiving.cancel()
                try:
                    got.append((await receiving).value)
                except asyncio.CancelledError:
                    await asyncio.sleep(0)
        await sending
    assert sorted(got) == numbers(50)


@pytest.mark.magnetar_only("not tried there: what it tells sessions of a deleted topic")
@pytest.mark.parametrize("segments", [1, 2])
async def test_topic_that_is_created_again_is_read(
    client: magnetar.Client, topic: MakeTopic, segments: int
) -> None:
    """Its first segment has the id, and maybe the name, of one that was read to its end."""
    made = await topic(segments)
    async with queue(client, made.name) as consumer:
        await send(client, made.name, numbers(10))
        await made.split(0)
        await consumer.ack(await take(consumer, 10), wait=True)
        await until(lambda: consumer._ended)
        await made.delete()
        await topic(1, name=made.local_name)
        await send(client, made.name, ["new"])
        assert (await consumer.receive(WAIT_S)).value == "new"


async def test_unsubscribe_ends_the_subscription_everywhere(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    consumer = await queue(client, made.name)
    await send(client, made.name, numbers(10))
    await made.split(0)
    await take(consumer, 10)
    with pytest.raises(InvalidArgument, match="force is 'no'; give it True or False"):
        await consumer.unsubscribe(force=cast("bool", "no"))
    await consumer.unsubscribe()
    async with client.queue_consumer(made.name, "s", schema=str) as again:
        assert await rest_of(again) == []
        await send(client, made.name, ["new"])
        assert (await again.receive(WAIT_S)).value == "new"


async def test_undecodable_message_is_skipped_for_good(
    client: magnetar.Client, service: Service, topic: MakeTopic
) -> None:
    made = await topic()
    async with queue(client, made.name) as consumer:
        address = urlparse(service.url)
        raw = await RawClient.open(address.hostname or "", address.port or 0)
        producer = await raw.create_producer(
            f"segment://{made.name.removeprefix('topic://')}/0000-ffff-0"
        )
        damaged = pb.MessageMetadata(num_messages_in_batch=3)
        await producer.send(b"no batch", metadata=damaged, send=pb.CommandSend(num_messages=3))
        await producer.send(b"good")
        message = await consumer.receive(WAIT_S)
        assert message.value == "good"
        await consumer.ack(message, wait=True)
        await raw.close()
    async with queue(client, made.name) as consumer:
        assert await rest_of(consumer) == []


@pytest.fixture
async def own_broker(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    async with running(tmp_path) as process:
        yield process


@pytest.mark.magnetar_only("its broker is started and killed here, and is Magnetar")
async def test_queue_consumer_survives_the_death_of_its_broker(own_broker: BrokerProcess) -> None:
    name = "topic://public/default/orders"
    await own_broker.create_scalable("orders", 2)
    async with (
        magnetar.connect(f"pulsar://127.0.0.1:{own_broker.port}") as client,
        queue(client, name) as consumer,
    ):
        await send(client, name, numbers(40))
        messages = await take(consumer, 20)
        acked = messages[:10]
        await consumer.ack(acked, wait=True)
        own_broker.kill()
        await consumer.ack(messages[10])
        await own_broker.start()
        rest = [await consumer.receive(WAIT_S) for _ in range(20)]
        assert values(rest) == sorted(set(numbers(40)) - {each.value for each in messages})
        await consumer.ack([*messages[11:], *rest], wait=True)
        assert await rest_of(consumer) == []
        assert own_broker.faults() == []


async def test_confirmed_ack_is_sent_and_warns_of_no_unawaited_coroutine(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    await send(client, made.name, ["a", "b"])
    async with client.queue_consumer(
        made.name, "s", schema=str, initial_position="earliest", ack_grouping_ms=60_000
    ) as consumer:
        first, second = await take(consumer, 2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            consumer.ack(first, wait=True)
            gc.collect()
        assert [each for each in told if "never awaited" in str(each.message)] == []
        twice = consumer.ack(second, wait=True)
        await twice
        await twice
