"""Transactions of stream consumers that lose segments, or their connections, on a real broker."""

import asyncio
from contextlib import suppress
from functools import partial

import pytest

import magnetar
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.errors import (
    AlreadyClosed,
    MagnetarError,
    OperationTimedOut,
    ServiceNotReady,
    TransactionConflict,
    TransactionFailed,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.plain import STRING
from tests.client.conftest import MakeTopic, Service
from tests.client.streams import WAIT_S, receive, stream
from tests.client.streams import send as sent_to
from tests.client.test_transactions import raw_segment
from tests.support.waiting import until

QUIET_S = 0.5
send = partial(sent_to, batching=False)
"""Each message in an entry of its own."""


async def lost_to(other: StreamConsumer[str], first: StreamConsumer[str]) -> int:
    """The segment that the other one has, once the first one has closed it."""

    def is_lost() -> bool:
        theirs = other.segment_ids
        return bool(theirs) and first._held.consumer_of(min(theirs)) is None

    await until(is_lost, WAIT_S)
    return min(other.segment_ids)


class Work:
    """Each message is put out once, in the transaction that acknowledges it."""

    def __init__(self, client: magnetar.Client, where: str) -> None:
        self.client = client
        self.where = where

    async def put_out(
        self, consumer: StreamConsumer[str], transaction: magnetar.Transaction, values: list[str]
    ) -> None:
        async with self.client.producer(self.where, schema=STRING) as producer:
            for value in values:
                producer.send_nowait(f"{consumer.name} {value}", transaction=transaction)
            await producer.flush()

    async def until_quiet(self, consumer: StreamConsumer[str], begun: int = 3) -> None:
        """Several in each transaction, until nothing has come for a while."""
        while batch := await consumer.receive_batch(begun, QUIET_S):
            with suppress(MagnetarError):
                async with self.client.transaction() as transaction:
                    await self.put_out(consumer, transaction, [each.value for each in batch])
                    await consumer.ack(batch[-1], transaction=transaction)

    async def out(self) -> list[str]:
        """What was put out, without who did it."""
        found: list[str] = []
        async with self.client.checkpoint_consumer(
            self.where, schema=STRING, start=magnetar.Checkpoint.EARLIEST
        ) as reader:
            with suppress(OperationTimedOut):
                while True:
                    found.append((await reader.receive(QUIET_S)).value.split()[1])
        return found


@pytest.fixture
async def work(client: magnetar.Client, topic: MakeTopic) -> Work:
    return Work(client, (await topic(1)).name)


async def test_segment_lost_during_a_transaction_is_not_committed_here(
    client: magnetar.Client, topic: MakeTopic, work: Work
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one", hand_over_timeout_s=0.1) as first:
        transaction = await client.transaction()
        held = await receive(first, len(sent))
        await work.put_out(first, transaction, [each.value for each in held])
        async with stream(client, made.name, "two") as second:
            lost = await lost_to(second, first)
            sent += await send(client, made.name, 1, 1)
            last = await first.receive(WAIT_S)
            assert last.segment_id != lost
            with pytest.raises(AlreadyClosed):
                await first.ack(last, transaction=transaction)
            with pytest.raises(TransactionFailed):
                await transaction.commit()
            await asyncio.gather(work.until_quiet(first), work.until_quiet(second))
            assert lost not in first.positions
    assert sorted(await work.out()) == sorted(sent)


@pytest.mark.magnetar_only("who leaves stays registered while its connection lives")
async def test_segment_lost_and_regained_is_not_committed_with_earlier_acks(
    client: magnetar.Client, topic: MakeTopic, work: Work
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one", hand_over_timeout_s=0.1) as first:
        transaction = await client.transaction()
        held = await receive(first, len(sent))
        await work.put_out(first, transaction, [each.value for each in held])
        async with stream(client, made.name, "two") as second:
            lost = await lost_to(second, first)
            await work.until_quiet(second)
        sent += await send(client, made.name, 1, 1)
        while (last := await first.receive(WAIT_S)).segment_id != lost:
            pass
        with pytest.raises(TransactionConflict):
            await first.ack(last, transaction=transaction)
        with pytest.raises(TransactionConflict):
            await transaction.commit()
        await work.until_quiet(first)
    assert sorted(await work.out()) == sorted(sent)


async def test_a_plain_acknowledgement_of_what_was_lost_is_no_hindrance(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one", hand_over_timeout_s=0.1) as first:
        held = await receive(first, len(sent))
        async with stream(client, made.name, "two") as second:
            lost = await lost_to(second, first)
            again = {each.value for each in held if each.segment_id == lost}
            assert {each.value for each in await receive(second, len(again))} == again
            await send(client, made.name, 1, 1)
            last = await first.receive(WAIT_S)
            assert lost in last.id.positions
            await first.ack(last, wait=True)
            assert lost not in (await first.receive(WAIT_S)).id.positions


async def test_message_received_twice_over_a_reconnect_is_committed_once(
    client: magnetar.Client, topic: MakeTopic, work: Work
) -> None:
    made = await topic(1)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one") as consumer:
        transaction = await client.transaction()
        held = await receive(consumer, 5)
        consumer._held.consumers[0].again(ServiceNotReady("A test."))
        held += await receive(consumer, 2)
        await work.put_out(consumer, transaction, [each.value for each in held])
        with pytest.raises(TransactionConflict):
            await consumer.ack(held[-1], transaction=transaction)
        with pytest.raises(TransactionConflict):
            await transaction.commit()
        await work.until_quiet(consumer)
    assert sorted(await work.out()) == sorted(sent)


async def test_buffered_messages_are_not_handed_out_during_a_commit(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one") as consumer:
        held = await receive(consumer, 5)
        consumer._held.consumers[0].again(ServiceNotReady("A test."))
        await until(lambda: len(consumer._inbox) > 0, WAIT_S)
        async with client.transaction() as transaction:
            await consumer.ack(held[-1], transaction=transaction)
            rest = await receive(consumer, len(sent) - len(held))
            assert {each.value for each in held + rest} == set(sent)


async def test_a_message_in_pieces_outlives_the_transactions_inside_it(
    service: Service, client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    whole = b"XXYY"
    async with (
        raw_segment(service.url, client, made.name) as raw,
        client.producer(made.name, schema=STRING, batching=False) as producer,
    ):

        async def send_piece(number: int) -> None:
            metadata = pb.MessageMetadata(
                uuid="whole", chunk_id=number, num_chunks_from_msg=2, total_chunk_msg_size=4
            )
            await raw.producer.send(whole[2 * number : 2 * number + 2], metadata=metadata)

        await producer.send("before")
        await send_piece(0)
        await producer.send("inside")
        async with stream(client, made.name, "one") as consumer:
            inside = (await receive(consumer, 2))[-1]
            async with client.transaction() as transaction:
                await consumer.ack(inside, transaction=transaction)
        async with stream(client, made.name, "one") as consumer:
            await send_piece(1)
            message = await consumer.receive(WAIT_S)
            assert message.value == whole.decode()
            async with client.transaction() as transaction:
                await consumer.ack(message, transaction=transaction)
        await producer.send("after")
        async with stream(client, made.name, "one") as consumer:
            assert (await consumer.receive(WAIT_S)).value == "after"


@pytest.mark.magnetar_only(
    "a transaction's end is answered before its segments know it: the next one is refused there"
)
async def test_message_acked_during_an_abort_comes_again(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    """The broker may hold it still when the end is answered, as the two cross."""
    name = str(await topic(1))
    values = [str(number) for number in range(30)]
    async with client.producer(name, schema=STRING) as producer:
        await asyncio.gather(*(producer.send(each) for each in values))
    async with stream(client, name, "one") as consumer:
        for value in values:
            aborted = await consumer.receive(WAIT_S)
            transaction = await client.transaction()
            consumer.ack(aborted, transaction=transaction)
            await transaction.abort()
            again = await consumer.receive(WAIT_S)
            assert (aborted.value, again.value) == (value, value)
            async with client.transaction() as transaction:
                consumer.ack(again, transaction=transaction)
