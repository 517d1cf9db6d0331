"""An ordinary topic becomes scalable while this project's clients are attached to it.

Asynchronous senders at full rate, a queue and a checkpoint consumer are attached by its
`persistent://` name.  No message is lost or duplicated, and messages of one key stay in order.
"""

import asyncio
import uuid
from collections import Counter

import pytest

import magnetar
from magnetar.consume.assignments import AssignedSegment
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.protocol import pulsar_pb2 as pb
from tests.client.conftest import NAMESPACE, Service, rest
from tests.client.test_reshape import (
    RECEIVE_S,
    Reader,
    Senders,
    read_in_order,
    read_shared,
)
from tests.conftest import Report
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import until, until_awaited


async def make_ordinary(service: Service, partitions: int) -> str:
    """Make an ordinary topic with the subscription `ordered`; return its local name."""
    local_name = f"migration-{uuid.uuid4().hex[:8]}"
    path = f"/persistent/{NAMESPACE}/{local_name}"
    made = (f"{path}/partitions", partitions) if partitions else (path, {})
    for target, body in (
        made,
        (f"{path}/subscription/ordered", {"ledgerId": -1, "entryId": -1}),
    ):
        status, answer = await rest(service, "PUT", target, body=body)
        assert status == 204, answer
    return local_name


async def migrate(service: Service, local_name: str, *, force: bool = False) -> int:
    path = f"/scalable/{NAMESPACE}/{local_name}/migrate"
    status, _ = await rest(service, "POST", path, force=str(force).lower())
    return status


async def read_checkpointed(consumer: magnetar.CheckpointConsumer[str], seen: Counter[str]) -> None:
    while True:
        for message in await consumer.receive_batch(max_messages=1000, timeout_s=RECEIVE_S):
            seen[message.value] += 1


@pytest.mark.magnetar_only("its own checkpoint consumers prevent a migration there")
@pytest.mark.parametrize("partitions", [0, 3])
async def test_clients_go_on_when_their_topic_becomes_scalable(
    client: magnetar.Client, service: Service, report: Report, partitions: int
) -> None:
    local_name = await make_ordinary(service, partitions)
    ordinary, scalable = (
        f"persistent://{NAMESPACE}/{local_name}",
        f"topic://{NAMESPACE}/{local_name}",
    )
    async with (
        client.queue_consumer(
            ordinary, "shared", schema=str, initial_position="earliest"
        ) as shared,
        client.checkpoint_consumer(ordinary, schema=str) as checkpoint,
        client.producer(ordinary, schema=str) as producer,
        asyncio.TaskGroup() as tasks,
    ):
        senders, reader = Senders(producer), Reader()
        queued, checkpointed = Counter[str](), Counter[str]()
        reading = [
            tasks.create_task(read_shared(shared, queued)),
            tasks.create_task(read_checkpointed(checkpoint, checkpointed)),
        ]
        sending = tasks.create_task(senders.run())
        await until(lambda: len(queued) > 1000)
        assert await migrate(service, local_name) == 204
        before = senders.sent.total()
        await until(lambda: senders.sent.total() > before + 1000)
        async with client.stream_consumer(scalable, "ordered", schema=str) as stream:
            reading.append(tasks.create_task(read_in_order(stream, reader)))
            senders.stop()
            await sending
            total = senders.sent.total()
            await until(
                lambda: (
                    reader.read.total() >= total
                    and len(queued) >= total
                    and len(checkpointed) >= total
                )
            )
            for task in reading:
                task.cancel()
    assert not reader.wrong, reader.wrong[:10]
    assert reader.read == senders.sent
    everything = {f"{key}:{n}" for key, count in senders.sent.items() for n in range(count)}
    for seen in (queued, checkpointed):
        assert set(seen) == everything
        assert max(seen.values()) == 1
    report(
        f"migration of {partitions or 1} topic(s) under this project's client: {total} messages, "
        f"longest pause between two sends {senders.longest_gap_s * 1000:.0f} ms"
    )


async def ledgers_of(service: Service, partition: str) -> list[object]:
    """The ledgers of a partition that were not trimmed."""
    status, stats = await rest(service, "GET", f"/{partition.replace('://', '/')}/internalStats")
    assert status == 200, stats
    assert isinstance(stats, dict)
    return [each for each in stats["ledgers"] if each["entries"]]


@pytest.mark.magnetar_only("its own checkpoint consumers prevent a migration there")
async def test_checkpoint_consumer_reads_partitions_that_others_drain_when_they_become_segments(
    client: magnetar.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_name = await make_ordinary(service, 3)
    ordinary = f"persistent://{NAMESPACE}/{local_name}"
    opened = Counter[str]()
    make = magnetar.CheckpointConsumer.segment_consumer

    async def make_late(
        consumer: magnetar.CheckpointConsumer[str], segment: AssignedSegment
    ) -> SegmentConsumer:
        """Open a partition again only when its messages are trimmed: nobody else needs them."""
        opened[segment.topic] += 1
        if opened[segment.topic] > 1:

            async def is_trimmed() -> bool:
                return not await ledgers_of(service, segment.topic)

            await until_awaited(is_trimmed)
        return await make(consumer, segment)

    monkeypatch.setattr(magnetar.CheckpointConsumer, "segment_consumer", make_late)
    values = {str(number) for number in range(30)}
    async with (
        client.queue_consumer(ordinary, "ordered", schema=str) as drain,
        client.checkpoint_consumer(ordinary, schema=str, receiver_queue_size=1) as checkpoint,
        client.producer(ordinary, schema=str) as producer,
    ):
        for value in values:
            await producer.send(value, key=value)
        assert await migrate(service, local_name) == 204
        for _ in values:
            await drain.ack(await drain.receive(timeout_s=RECEIVE_S))
        await until(lambda: len(checkpoint.segment_ids) == 6)
        assert {(await checkpoint.receive(timeout_s=RECEIVE_S)).value for _ in values} == values
    assert max(opened.values()) == 1, "a reader that is away holds no messages"


@pytest.mark.magnetar_only("its v5 transactions never end on an ordinary topic")
@pytest.mark.parametrize("commit", [True, False])
async def test_transaction_ends_whole_on_old_and_new_segments(
    client: magnetar.Client, service: Service, commit: bool
) -> None:
    local_name = await make_ordinary(service, 2)
    ordinary = f"persistent://{NAMESPACE}/{local_name}"
    async with (
        client.producer(ordinary, schema=str) as producer,
        client.queue_consumer(
            ordinary, "shared", schema=str, initial_position="earliest"
        ) as shared,
    ):
        await producer.send("input", key="k")
        (message,) = await shared.receive_batch(max_messages=1, timeout_s=RECEIVE_S)
        transaction = await client.transaction()
        for number in range(10):
            await producer.send(f"old-{number}", key=f"k{number}", transaction=transaction)
        await shared.ack(message, transaction=transaction)
        assert await migrate(service, local_name) == 204
        for number in range(10):
            await producer.send(f"new-{number}", key=f"k{number}", transaction=transaction)
        await (transaction.commit() if commit else transaction.abort())
        await producer.send("last", key="k")
        written = {f"{kind}-{number}" for kind in ("old", "new") for number in range(10)}
        expected = {"last", *(written if commit else {"input"})}
        seen = Counter[str]()
        while set(seen) != expected:
            for each in await shared.receive_batch(max_messages=100, timeout_s=RECEIVE_S):
                seen[each.value] += 1
                await shared.ack(each)
            assert set(seen) <= expected
    assert max(seen.values()) == 1


@pytest.mark.magnetar_only("REST refuses it there in another way")
async def test_migration_is_refused_while_v4_clients_are_attached(
    client: magnetar.Client, service: Service
) -> None:
    local_name = await make_ordinary(service, 0)
    ordinary = f"persistent://{NAMESPACE}/{local_name}"
    host, _, port = service.url.removeprefix("pulsar://").rpartition(":")
    old = await RawClient.open(host, int(port))
    await old.create_producer(ordinary)
    async with client.producer(ordinary, schema=str) as producer:
        await producer.send("before")
        assert await migrate(service, local_name) == 409
        await producer.send("still ordinary")
        assert await migrate(service, local_name, force=True) == 204
        await producer.send("after")
    with pytest.raises(BrokerError) as refused:
        await old.create_producer(ordinary)
    assert refused.value.code == pb.TopicTerminatedError
    await old.close()
