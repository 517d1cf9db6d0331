"""Entry buckets of which transactions hold messages: only the transaction's consumer reads on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.incarnation import INCARNATION
from tests.support.embedded_broker import running
from tests.support.raw_client import Delivery, RawConsumer
from tests.unit.broker.topics.test_end_to_end import EARLIEST, KEY_SHARED, client_of, options
from tests.unit.broker.topics.test_transactional_acks import (
    TOPIC,
    Stage,
    got,
    nothing_comes,
    payloads,
)

LOW, HIGH = 5, 60000


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with running(tmp_path) as broker:
        client = await client_of(broker)
        yield Stage(broker, client)
        await client.close()


async def send(stage: Stage, *messages: tuple[str, int]) -> None:
    producer = await stage.client.create_producer(TOPIC)
    for text, entry_hash in messages:
        stamps = pb.MessageMetadata(entry_hash_min=entry_hash, entry_hash_max=entry_hash)
        await producer.send(text.encode(), metadata=stamps)
    await producer.close()


async def share(stage: Stage, name: str) -> RawConsumer:
    wanted = options(KEY_SHARED, initial_position=EARLIEST, consumer_name=name)
    wanted.metadata.add(key=INCARNATION, value=f"run of {name}")
    wanted.key_shared_meta.key_shared_mode = pb.STICKY
    wanted.key_shared_meta.entryBucketDispatch = True
    wanted.key_shared_meta.hash_ranges.add(start=0, end=32767)
    wanted.key_shared_meta.hash_ranges.add(start=32768, end=65535)
    return await stage.client.subscribe(TOPIC, "s", wanted, permits=100)


async def first_of(consumer: RawConsumer) -> Delivery:
    return (await got(consumer, 1))[0]


async def test_a_bucket_moves_when_the_transaction_of_its_former_owner_has_committed(
    stage: Stage,
) -> None:
    old = await share(stage, "a")
    await send(stage, ("0", HIGH), ("1", LOW))
    messages = await got(old, 2)
    txn = await stage.begin()
    await stage.ack(old, txn, messages[0])
    new = await share(stage, "b")
    await send(stage, ("2", HIGH), ("3", LOW))
    assert payloads(await got(old, 1)) == ["3"]
    await nothing_comes(new)
    await stage.commit(txn)
    assert payloads(await got(new, 1)) == ["2"]


async def test_after_an_abort_the_new_owner_gets_the_bucket_in_order(stage: Stage) -> None:
    old = await share(stage, "a")
    await send(stage, ("0", HIGH), ("1", HIGH))
    messages = await got(old, 2)
    txn = await stage.begin()
    await stage.ack(old, txn, *messages)
    new = await share(stage, "b")
    await send(stage, ("2", HIGH))
    await nothing_comes(new)
    await stage.abort(txn)
    assert payloads(await got(new, 3)) == ["0", "1", "2"]
    await nothing_comes(old)


async def test_a_consumer_reads_on_behind_its_own_transaction(stage: Stage) -> None:
    consumer = await share(stage, "a")
    await send(stage, ("0", LOW), ("1", LOW))
    txn = await stage.begin()
    await stage.ack(consumer, txn, await first_of(consumer))
    await send(stage, ("2", LOW))
    assert payloads(await got(consumer, 2)) == ["1", "2"]
    await consumer.close()
    again = await share(stage, "a")
    assert payloads(await got(again, 2)) == ["1", "2"]
    await nothing_comes(again)


@pytest.mark.parametrize("reloaded", [False, True], ids=["left", "reloaded"])
async def test_a_transaction_of_a_consumer_that_left_blocks_its_buckets(
    stage: Stage, reloaded: bool
) -> None:
    old = await share(stage, "a")
    await send(stage, ("0", LOW), ("1", HIGH))
    messages = await got(old, 2)
    txn = await stage.begin()
    await stage.ack(old, txn, messages[0])
    if reloaded:
        await stage.reload()
        await old.events.get()
    else:
        await old.close()
    new = await share(stage, "b")
    await send(stage, ("2", LOW), ("3", HIGH))
    assert payloads(await got(new, 2)) == ["1", "3"]
    await nothing_comes(new)
    back = await share(stage, "a")
    # Sorted by name the consumer of the transaction owns the lower bucket again.
    assert payloads(await got(back, 1)) == ["2"]
    await stage.abort(txn)
    assert payloads(await got(back, 1)) == ["0"]
    await nothing_comes(new)
