"""Producing on a real broker: forms of messages, access, time-outs, reshaping, brokers that die."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import magnetar
from magnetar.compression import CompressionType
from magnetar.consume.message import Message
from magnetar.consume.queue_consumer import QueueConsumer
from magnetar.consume.settings import InitialPosition
from magnetar.errors import (
    AlreadyClosed,
    InvalidArgument,
    MessageTooLarge,
    OperationTimedOut,
    ProducerBusy,
    ProducerFenced,
    ProducerQueueFull,
)
from magnetar.message_id import MessageId
from magnetar.produce.producer_settings import AccessMode
from magnetar.schema.plain import STRING
from tests.client.conftest import MakeTopic, Service, rest
from tests.conftest import Report
from tests.support.broker_process import running

WAIT_S = 30


@asynccontextmanager
async def reading(client: magnetar.Client, topic: str) -> AsyncIterator[QueueConsumer[bytes]]:
    async with client.queue_consumer(
        topic, "reader", initial_position=InitialPosition.EARLIEST
    ) as consumer:
        yield consumer


async def take(consumer: QueueConsumer[bytes], count: int) -> list[Message[bytes]]:
    messages = []
    for _ in range(count):
        message = await consumer.receive(timeout_s=WAIT_S)
        await consumer.ack(message)
        messages.append(message)
    return messages


async def nothing_more(consumer: QueueConsumer[bytes]) -> bool:
    try:
        await consumer.receive(timeout_s=0.2)
    except OperationTimedOut:
        return True
    return False


async def stored(client: magnetar.Client, topic: str, count: int) -> list[Message[bytes]]:
    """Everything in the topic, which is so much."""
    async with reading(client, topic) as consumer:
        messages = await take(consumer, count)
        assert await nothing_more(consumer)
        return messages


def values(messages: Sequence[Message[bytes]]) -> list[bytes]:
    return [message.data for message in messages]


async def test_sent_message_is_read_with_all_its_fields(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name, schema=STRING, properties={"who": "me"}) as producer:
        assert producer.topic == made.name
        first = await producer.send(
            "one",
            key="k",
            ordering_key=b"o",
            properties={"a": "1"},
            event_time_ms=1234,
            sequence_id=7,
        )
        rest = [producer.send_nowait(text) for text in ("two", "three", "")]
        ids = [first, *(await asyncio.gather(*rest))]
        assert producer.last_sequence_id == 10
    got = await stored(client, made.name, 4)
    assert [message.data.decode() for message in got] == ["one", "two", "three", ""]
    assert [message.id for message in got] == ids
    assert ids == sorted(ids, key=lambda each: each.entry)
    assert [each.entry.batch_index for each in ids] == [-1, 0, 1, 2]
    message = got[0]
    assert (message.key, message.ordering_key, message.event_time_ms) == ("k", b"o", 1234)
    assert dict(message.properties) == {"a": "1"}
    assert message.sequence_id == 7


@pytest.mark.parametrize("kind", CompressionType)
async def test_compression(
    client: magnetar.Client, topic: MakeTopic, kind: CompressionType
) -> None:
    made = await topic()
    sent = [b"text that repeats itself " * n for n in range(20)]
    async with client.producer(made.name, compression=kind) as producer:
        await producer.send(sent[0])
        for payload in sent[1:]:
            producer.send_nowait(payload)
    assert values(await stored(client, made.name, 20)) == sent


async def test_without_batches_every_message_is_an_entry(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name, batching=False) as producer:
        ids = await asyncio.gather(*(producer.send(b"%d" % n) for n in range(50)))
    assert len({each.entry.entry_id for each in ids}) == 50
    assert values(await stored(client, made.name, 50)) == [b"%d" % n for n in range(50)]


async def test_large_messages_go_in_chunks_or_are_refused(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    large = random.Random(1).randbytes(11 * 1024 * 1024)
    async with client.producer(made.name) as producer:
        with pytest.raises(MessageTooLarge, match="chunking"):
            await producer.send(large)
        await producer.send(b"before")
    async with client.producer(made.name, chunking=True) as producer:
        where = await producer.send(large)
        await producer.send(b"after")
    assert where.entry.first_chunk is not None
    assert where.entry.first_chunk < (where.entry.ledger_id, where.entry.entry_id)
    got = await stored(client, made.name, 3)
    assert values(got) == [b"before", large, b"after"]


async def test_a_delayed_message_is_alone(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    async with reading(client, made.name) as consumer:
        async with client.producer(made.name) as producer:
            delays = (None, None, 2.0, None, None)
            sending = [
                producer.send_nowait(b"%d" % n, deliver_after_s=s) for n, s in enumerate(delays)
            ]
            ids = await asyncio.gather(*sending)
        assert [each.entry.batch_index for each in ids] == [0, 1, -1, 0, 1]
        assert values(await take(consumer, 5)) == [b"0", b"1", b"3", b"4", b"2"]


async def test_values_that_are_none_and_arguments_that_cannot_be(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name, schema=STRING) as producer:
        for wrong in (
            {"sequence_id": -1},
            {"event_time_ms": 2**63},
            {"properties": {"a": 1}},
            {"properties": {"a": "\ud800"}},
            {"key": "\ud800"},
            {"ordering_key": "text"},
            {"deliver_after_s": 1.0, "deliver_at_ms": 1},
        ):
            with pytest.raises(InvalidArgument):
                producer.send_nowait("x", **wrong)
        await producer.send(None, key="gone")  # type: ignore[arg-type]
    (message,) = await stored(client, made.name, 1)
    assert message.is_null
    for settings in ({"name": ""}, {"max_pending_messages": 0}, {"batch_max_delay_ms": -1}):
        with pytest.raises(InvalidArgument):
            client.producer(made.name, **settings)


async def test_back_pressure(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic()
    async with client.producer(made.name, max_pending_messages=10) as producer:
        for n in range(10):
            producer.send_nowait(b"%d" % n)
        with pytest.raises(ProducerQueueFull, match="room"):
            producer.send_nowait(b"too many")
        await producer.room()
        waiting = [asyncio.create_task(producer.send(b"%d" % n)) for n in range(10, 40)]
        cancelled = waiting.pop(25)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*waiting)
        assert cancelled.cancelled()
    expected = [b"%d" % n for n in range(40) if n != 35]
    assert values(await stored(client, made.name, 39)) == expected


async def test_a_cancelled_message_is_stored_once_or_not(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name) as producer:
        await producer.send(b"first")
        tasks = [asyncio.create_task(producer.send(b"%d" % n)) for n in range(30)]
        tasks[3].cancel()
        await asyncio.sleep(0)
        tasks[5].cancel()
        await asyncio.sleep(0.0005)
        tasks[7].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        last = await producer.send(b"last")
    assert isinstance(last, MessageId)
    surely = {b"%d" % n for n in range(30) if n not in (3, 5, 7)} | {b"first", b"last"}
    async with reading(client, made.name) as consumer:
        got: list[bytes] = []
        while not got or got[-1] != b"last":
            got += values(await take(consumer, 1))
        assert await nothing_more(consumer)
    assert len(got) == len(set(got))
    assert surely <= set(got)
    assert b"3" not in got


async def test_flush_raises_errors_that_were_not_read(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name) as producer:
        seen = producer.send_nowait(bytes(6_000_000))
        with pytest.raises(MessageTooLarge):
            await seen
        await producer.flush()
        producer.send_nowait(bytes(6_000_001))
        producer.send_nowait(b"fine")
        with pytest.raises(MessageTooLarge):
            await producer.flush()
        await producer.flush()
    with pytest.raises(AlreadyClosed):
        producer.send_nowait(b"x")
    await producer.close()


async def test_names_and_sequence_ids_deduplicate(
    client: magnetar.Client, topic: MakeTopic, service: Service
) -> None:
    path = "/namespaces/public/default/deduplication"
    status, answer = await rest(service, "POST", path, body=True)
    assert status == 204, answer
    try:
        made = await topic()
        async with client.producer(made.name, name="robot") as producer:
            for n in range(10):
                producer.send_nowait(b"%d" % n, sequence_id=n)
        async with client.producer(made.name, name="robot") as producer:
            assert producer.last_sequence_id == 9, "what an earlier one of that name has stored"
            for n in range(5, 15):
                producer.send_nowait(b"%d" % n, sequence_id=n)
            await producer.flush()
            assert producer.last_sequence_id == 14
            await producer.send(b"15")
            assert producer.last_sequence_id == 15
        assert values(await stored(client, made.name, 16)) == [b"%d" % n for n in range(16)]
    finally:
        await rest(service, "POST", path, body=False)


async def test_exclusive_producers(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(2)
    first = await client.producer(made.name, access_mode=AccessMode.EXCLUSIVE)
    await first.send(b"a", key="x")
    for mode in (AccessMode.SHARED, AccessMode.EXCLUSIVE):
        with pytest.raises((ProducerBusy, ProducerFenced)):
            async with client.producer(made.name, access_mode=mode) as other:
                await other.send(b"not")
    waiting = asyncio.ensure_future(
        client.producer(made.name, access_mode=AccessMode.WAIT_FOR_EXCLUSIVE).__aenter__()
    )
    await asyncio.wait((waiting,), timeout=0.1)
    assert not waiting.done()
    await first.close()
    async with asyncio.timeout(WAIT_S):
        second = await waiting
    await second.send(b"b", key="x")
    third = await client.producer(made.name, access_mode=AccessMode.EXCLUSIVE_WITH_FENCING)
    await third.send(b"c", key="x")
    with pytest.raises(ProducerFenced):
        await second.send(b"not")
    with pytest.raises(ProducerFenced):
        second.send_nowait(b"not")
    await second.close()
    await third.close()
    assert sorted(values(await stored(client, made.name, 3))) == [b"a", b"b", b"c"]


async def test_a_regular_topic(client: magnetar.Client) -> None:
    name = f"persistent://public/default/regular-{random.randrange(2**40):x}"
    async with client.producer(name) as producer:
        await asyncio.gather(*(producer.send(b"%d" % n, key="k") for n in range(20)))
    assert values(await stored(client, name, 20)) == [b"%d" % n for n in range(20)]


async def full_load(
    client: magnetar.Client, topic: str, stop: asyncio.Event, **settings: object
) -> list[tuple[str, int]]:
    """Send without waiting, as fast as receipts come, until told to stop."""
    sent: list[tuple[str, int]] = []
    numbers: dict[str, int] = defaultdict(int)
    rng = random.Random(3)
    async with client.producer(topic, max_pending_messages=300, **settings) as producer:  # type: ignore[call-overload]
        while not stop.is_set():
            key = f"k{rng.randrange(30)}"
            await producer.room()
            producer.send_nowait(b"%s:%d" % (key.encode(), numbers[key]), key=key)
            sent.append((key, numbers[key]))
            numbers[key] += 1
            if len(sent) % 20 == 0:
                await asyncio.sleep(0.001)
    return sent


async def check_stored(
    client: magnetar.Client, topic: str, sent: list[tuple[str, int]], *, once: bool = True
) -> int:
    """Nothing is missing, each key in order; `once`: nothing there twice.  Second copies."""
    by_segment: dict[int, list[str]] = defaultdict(list)
    found: set[bytes] = set()
    async with reading(client, topic) as consumer:
        while messages := await consumer.receive_batch(
            1000, 0.2 if len(found) == len(sent) else WAIT_S
        ):
            await consumer.ack(messages)
            for message in messages:
                found.add(message.data)
                by_segment[message.segment_id].append(message.data.decode())
    assert len(found) == len(sent)
    order: dict[str, list[int]] = defaultdict(list)
    for segment_id in sorted(by_segment):
        for text in by_segment[segment_id]:
            key, number = text.split(":")
            order[key].append(int(number))
    second_copies = sum(map(len, order.values())) - len(sent)
    assert not (once and second_copies)
    for key, numbers in order.items():
        assert list(dict.fromkeys(numbers)) == list(range(max(numbers) + 1)), key
    return second_copies


@pytest.mark.parametrize("batching", [True, False], ids=["batches", "single"])
async def test_splits_and_merges_under_full_load(
    client: magnetar.Client, topic: MakeTopic, report: Report, on_peer: bool, batching: bool
) -> None:
    """On the peer what it had stored of what it did not answer is there twice: counted."""
    made = await topic()
    stop = asyncio.Event()
    load = asyncio.create_task(full_load(client, made.name, stop, batching=batching))
    for step in range(4):
        await asyncio.sleep(0.05)
        active = await made.active()
        if step % 2 == 0:
            await made.split(active[0])
        else:
            await made.merge(active[-2], active[-1])
    await asyncio.sleep(0.05)
    stop.set()
    try:
        async with asyncio.timeout(5 * WAIT_S if on_peer else WAIT_S):
            sent = await load
    except (TimeoutError, OperationTimedOut):
        if on_peer:
            pytest.xfail("the peer never answered some sends at the seal: docs/differences.md")
        raise
    assert len(sent) > 300
    second_copies = await check_stored(client, made.name, sent, once=not on_peer)
    if on_peer:
        report(f"4 layout changes under load: {len(sent)} messages, {second_copies} stored twice")


@pytest.mark.magnetar_only("its broker is started and killed here, and is Magnetar")
async def test_a_broker_that_is_killed_comes_back_and_is_gone(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as broker,
        magnetar.connect(f"pulsar://127.0.0.1:{broker.port}", close_timeout_s=0.5) as client,
    ):
        await broker.create_scalable("t", 2)
        name = "topic://public/default/t"
        stop = asyncio.Event()
        load = asyncio.create_task(full_load(client, name, stop))
        await asyncio.sleep(0.3)
        broker.kill()
        await broker.start()
        await asyncio.sleep(0.3)
        stop.set()
        async with asyncio.timeout(WAIT_S):
            sent = await load
        await check_stored(client, name, sent)

        producer = await client.producer(name, send_timeout_s=0.3)
        await producer.send(b"first")
        broker.kill()
        late = [producer.send_nowait(b"%d" % n) for n in range(5)]
        with pytest.raises(OperationTimedOut, match="send_timeout_s"):
            await late[0]
        await asyncio.wait(late)
        assert all(isinstance(each.exception(), OperationTimedOut) for each in late)
        await producer.flush()
        producer.send_nowait(b"never")
        await producer.close()
