"""Messages that are sent together."""

import asyncio

import pytest

import magnetar
import magnetar.sync
from magnetar.errors import AlreadyClosed, InvalidArgument, MagnetarError, MessageTooLarge
from tests.client.conftest import MakeTopic, Service

EARLIEST = magnetar.InitialPosition.EARLIEST


async def all_of(client: magnetar.Client, name: str, count: int) -> list[magnetar.Message[str]]:
    async with client.stream_consumer(name, "s", schema=str, initial_position=EARLIEST) as consumer:
        messages = []
        for _ in range(count):
            messages.append(await consumer.receive(timeout_s=20))
            await consumer.ack(messages[-1])
        return messages


async def test_everything_arrives_as_it_was_given(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    name = str(await topic(segments=3))
    values = [f"v{n}" for n in range(2000)]
    keys = [b"\xff%d" % (n % 11) if n % 3 else f"k{n % 11}" for n in range(2000)]
    properties = [{"n": str(n)} if n % 2 else None for n in range(2000)]
    times = [n or None for n in range(2000)]
    async with client.producer(name, schema=str, max_pending_messages=300) as producer:
        receipts = await producer.send_many(
            values, keys=keys, properties=properties, event_times_ms=times
        )
        await receipts.stored()
    ids = receipts.ids()
    assert len(set(ids)) == 2000
    assert receipts.segment_ids == [each.segment_id for each in ids]
    assert len(set(receipts.segment_ids)) == 3
    came = {each.value: each for each in await all_of(client, name, 2000)}
    for n, value in enumerate(values):
        message = came[value]
        key = keys[n]
        assert message.id == ids[n]
        assert message.key_bytes == (key if isinstance(key, bytes) else key.encode())
        assert message.properties == (properties[n] or {})
        assert message.event_time_ms == times[n]


async def test_keys_keep_their_order_over_a_split(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name, schema=str, max_pending_messages=200) as producer:
        keys = [f"k{n % 20}" for n in range(3000)]
        sending = asyncio.ensure_future(
            producer.send_many([str(n) for n in range(3000)], keys=keys)
        )
        await made.split(0)
        receipts = await sending
        more = await producer.send_many([str(n) for n in range(3000, 4000)], keys=keys[:1000])
        await receipts.stored()
        await more.stored()
    assert set(more.segment_ids) == {1, 2}
    by_key: dict[str | None, list[int]] = {}
    for message in await all_of(client, made.name, 4000):
        by_key.setdefault(message.key, []).append(int(message.value))
    assert len(by_key) == 20
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


async def test_nothing_is_sent_for_nothing(client: magnetar.Client, topic: MakeTopic) -> None:
    async with client.producer(str(await topic())) as producer:
        receipts = await producer.send_many([])
        await receipts.stored()
        assert receipts.ids() == []


async def test_send_many_raises_a_storage_error_once(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        receipts = await producer.send_many([b"small", bytes(6 * 1024 * 1024), b"last"])
        with pytest.raises(MessageTooLarge):
            await receipts.stored()
        with pytest.raises(MessageTooLarge):
            receipts.ids()
        await producer.flush()  # somebody has looked at it
        unseen = await producer.send_many([bytes(6 * 1024 * 1024)])
        with pytest.raises(MessageTooLarge):
            await producer.flush()
        assert unseen.segment_ids == [-1]


async def test_send_many_refuses_invalid_values_at_once(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    producer = await client.producer(str(await topic()), schema=str)
    with pytest.raises(InvalidArgument):
        await producer.send_many(["a", "b"], keys=["k"])
    transaction = await client.transaction()
    with pytest.raises(InvalidArgument):
        await producer.send_many(["a", "b"], event_times_ms=[1, -1], transaction=transaction)
    with pytest.raises(MagnetarError):
        await transaction.commit()
    await producer.close()
    with pytest.raises(AlreadyClosed):
        await producer.send_many(["a"])


async def test_a_transaction_waits_for_all_of_them(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    name = str(await topic(segments=2))
    async with client.producer(name, schema=str) as producer:
        async with client.transaction() as transaction:
            receipts = await producer.send_many(
                [str(n) for n in range(100)],
                keys=[str(n) for n in range(100)],
                transaction=transaction,
            )
        assert -1 not in receipts.segment_ids
    assert len(await all_of(client, name, 100)) == 100


async def test_a_sending_that_is_cancelled_spoils_its_transaction(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    name = str(await topic())
    async with client.producer(name, schema=str, max_pending_messages=5) as producer:
        transaction = await client.transaction()
        sending = asyncio.ensure_future(
            producer.send_many(["v"] * 100_000, transaction=transaction)
        )
        while not sending.done() and len(sending.get_stack()) and producer.last_sequence_id < 5:
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(MagnetarError):
            await transaction.commit()
        await producer.send("after")
    assert [each.value for each in await all_of(client, name, 1)] == ["after"]


async def test_threads_send_together(service: Service, topic: MakeTopic) -> None:
    name = str(await topic())
    with magnetar.sync.connect(service.url) as client:
        with client.producer(name, schema=str) as producer:
            first = producer.send_nowait("0")
            receipts = producer.send_many([str(n) for n in range(1, 50)])
            receipts.stored()
            ids = [first.result(20), *receipts.ids()]
            assert set(receipts.segment_ids) == {ids[0].segment_id}
        with client.checkpoint_consumer(name, schema=str) as consumer:
            came = [consumer.receive(20) for _ in range(50)]
        assert [each.value for each in came] == [str(n) for n in range(50)]
        assert [each.id for each in came] == ids
