"""Ordered consumers on a real broker: hand-overs, live splits and merges.

Apache Pulsar 5.0.0-M1 cannot be told that a consumer leaves and grants what another one still has;
so there a second consumer comes under the name of the first.  The end of a transaction takes effect
there some time after it was answered.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress

import pytest

import magnetar
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition, StreamSettings
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.errors import (
    AlreadyClosed,
    OperationTimedOut,
    ServiceNotReady,
    TransactionConflict,
    TransactionTimedOut,
)
from magnetar.message_id import MessageId
from magnetar.opening import Opening
from magnetar.schema.plain import STRING
from tests.client.conftest import MakeTopic
from tests.client.streams import KEYS, WAIT_S, send, stream
from tests.support.waiting import until


class Reading:
    """What several consumers got, in the order in which they got it."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.of: dict[str, list[str]] = defaultdict(list)
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    def begin(self, consumer: StreamConsumer[str], *, ack: bool = True) -> None:
        self._tasks.append(asyncio.create_task(self._read(consumer, ack=ack)))

    async def _read(self, consumer: StreamConsumer[str], *, ack: bool) -> None:
        async for message in consumer:
            self.got.append(message.value)
            self.of[consumer.name].append(message.value)
            if ack:
                await consumer.ack(message)
            self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_all(self, sent: list[str]) -> None:
        await self.until(lambda: set(sent) <= set(self.got))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def check_order(self) -> None:
        """The first time that each was read, those of a key came in the order of their sending."""
        last: dict[str, int] = {}
        for value in dict.fromkeys(self.got):
            key, number = value.split(":")
            assert int(number) == last.get(key, -1) + 1, f"{value} came after {last.get(key)}"
            last[key] = int(number)


@pytest.fixture
async def reading() -> AsyncIterator[Reading]:
    reading = Reading()
    yield reading
    await reading.end()


async def test_everything_is_read_in_order_of_each_key(
    client: magnetar.Client, topic: MakeTopic, reading: Reading
) -> None:
    made = await topic(3)
    sent = await send(client, made.name, 0, 5)
    async with stream(client, made.name) as consumer:
        reading.begin(consumer)
        await reading.until_all(sent)
    assert sorted(reading.got) == sorted(sent)
    reading.check_order()


async def test_acknowledging_a_message_acknowledges_all_handed_out_before_it(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(3)
    sent = await send(client, made.name, 0, 3)
    async with stream(client, made.name, "one") as consumer:
        messages = [await consumer.receive(WAIT_S) for _ in sent]
        assert len({message.segment_id for message in messages}) == 3
        middle = messages[len(sent) // 2]
        again = MessageId.from_bytes(middle.id.to_bytes())
        assert again.positions == middle.id.positions
        await consumer.ack_positions(again.positions, wait=True)
    rest = {message.value for message in messages[len(sent) // 2 + 1 :]}
    async with stream(client, made.name, "one") as consumer:
        assert {(await consumer.receive(WAIT_S)).value for _ in rest} == rest


async def test_keys_stay_in_order_over_splits_and_merges(
    client: magnetar.Client, topic: MakeTopic, reading: Reading
) -> None:
    made = await topic(1)
    async with stream(client, made.name) as consumer:
        reading.begin(consumer)
        sent = await send(client, made.name, 0, 3)
        await made.split(0)
        sent += await send(client, made.name, 3, 3)
        await made.merge(1, 2)
        sent += await send(client, made.name, 6, 3)
        await reading.until_all(sent)
    assert sorted(reading.got) == sorted(sent)
    reading.check_order()


async def joins_at_once(joining: "asyncio.Task[StreamConsumer[str]]", on_peer: bool) -> bool:
    """Whether who joins is there before the other one lets go.

    The peer gives it its share at once, and refuses it the segments until the other one has gone.
    """
    await asyncio.wait((joining,), timeout=0.5 if on_peer else WAIT_S)
    assert joining.done() is not on_peer
    return not on_peer


async def test_a_newcomer_gets_its_share_once_it_is_acknowledged(
    client: magnetar.Client, topic: MakeTopic, reading: Reading, on_peer: bool
) -> None:
    made = await topic(4)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one") as first, AsyncExitStack() as stack:
        held = [await first.receive(WAIT_S) for _ in sent]
        joining = asyncio.create_task(stack.enter_async_context(stream(client, made.name, "two")))
        if await joins_at_once(joining, on_peer):
            with pytest.raises(OperationTimedOut):
                await joining.result().receive(0.2)
            assert not joining.result().segment_ids
        await first.ack(held[-1])
        second = await joining
        reading.begin(first)
        reading.begin(second)
        later = await send(client, made.name, 1, 2)
        await reading.until_all(later)
        assert len(first.segment_ids) == len(second.segment_ids) == 2
        assert sorted(reading.got) == sorted(later)
        assert set(reading.of) == {"one", "two"}


@pytest.mark.magnetar_only("who leaves stays registered while its connection lives")
async def test_remaining_consumer_gets_the_segments_of_the_one_that_left(
    client: magnetar.Client, topic: MakeTopic, reading: Reading
) -> None:
    made = await topic(4)
    async with stream(client, made.name, "one") as first:
        async with stream(client, made.name, "two") as second:
            reading.begin(first)
            reading.begin(second)
            sent = await send(client, made.name, 0, 2)
            await reading.until_all(sent)
        sent += await send(client, made.name, 2, 2)
        await reading.until_all(sent)
        assert len(first.segment_ids) == 4
    reading.check_order()


async def test_a_bounded_hand_over_delivers_again_to_the_other(
    client: magnetar.Client, topic: MakeTopic, reading: Reading
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    settings = StreamSettings(
        initial_position=InitialPosition.EARLIEST, consumer_name="slow", hand_over_timeout_s=0.1
    )
    async with Opening(
        lambda: StreamConsumer(client.context, made.name, "s", STRING, settings)
    ) as slow:
        held = [await slow.receive(WAIT_S) for _ in sent]
        async with stream(client, made.name, "other") as other:
            reading.begin(other)
            await reading.until(lambda: bool(reading.got))
            (lost,) = other.segment_ids
            again = [message.value for message in held if message.segment_id == lost]
            await reading.until_all(again)
            assert reading.got == again
            await slow.ack(held[-1], wait=True)
            assert slow.segment_ids.isdisjoint(other.segment_ids)


@pytest.mark.magnetar_only("who leaves stays registered while its connection lives")
async def test_members_come_and_go_and_nothing_is_lost(
    client: magnetar.Client, topic: MakeTopic, reading: Reading
) -> None:
    luck = random.Random(6)
    made = await topic(2)
    async with stream(client, made.name, "stays") as stays:
        reading.begin(stays)
        sent: list[str] = []
        for turn in range(4):
            async with stream(client, made.name, f"guest-{turn}") as guest:
                reading.begin(guest)
                sent += await send(client, made.name, 2 * turn, 1)
                if luck.random() < 0.6:
                    await made.split(luck.choice(await made.active()))
                sent += await send(client, made.name, 2 * turn + 1, 1)
                if turn % 2:
                    await reading.until_all(sent)
        await reading.until_all(sent)
    reading.check_order()


async def receive(consumer: StreamConsumer[str], count: int) -> list[Message[str]]:
    return [await consumer.receive(WAIT_S) for _ in range(count)]


def values(messages: list[Message[str]]) -> list[str]:
    return [message.value for message in messages]


async def send_one_by_one(client: magnetar.Client, topic: str, count: int) -> list[str]:
    """All in one order, each in an entry."""
    sent = [f"m{number}" for number in range(count)]
    async with client.producer(topic, schema=STRING, batching=False) as producer:
        for each in sent:
            await producer.send(each)
    return sent


@pytest.mark.magnetar_only(
    "a transaction's end is answered before its segments know it: the next one is refused there"
)
async def test_an_acknowledgement_in_a_transaction_is_part_of_it(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one") as consumer:
        messages = await receive(consumer, len(sent))
        for last in (4, 9):
            committed = await client.transaction()
            await consumer.ack(messages[last], transaction=committed)
            await committed.commit()
    rest = set(values(messages[10:]))
    async with stream(client, made.name, "one") as consumer:
        assert set(values(await receive(consumer, len(rest)))) == rest


async def test_messages_of_an_aborted_transaction_come_again_in_order(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send_one_by_one(client, made.name, 10)
    async with stream(client, made.name, "one") as consumer:
        first = await receive(consumer, 2)
        await consumer.ack(first[0])
        before = await receive(consumer, 3)
        aborted = await client.transaction()
        await consumer.ack(before[1], transaction=aborted)
        await aborted.abort()
        with pytest.raises(TransactionConflict):
            await consumer.ack(before[2])
        again = await receive(consumer, 9)
        assert values(again) == sent[1:]
        assert dict(again[0].id.positions) == {0: again[0].id.entry}
        async with client.transaction() as transaction:
            await consumer.ack(again[-1], transaction=transaction)
        with pytest.raises(OperationTimedOut):
            await consumer.receive(0.2)


@pytest.mark.magnetar_only(
    "a transaction's end is answered before its segments know it: the next one is refused there"
)
async def test_each_message_takes_effect_once_though_one_fails_first(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send_one_by_one(client, made.name, 5)
    done: list[str] = []
    async with stream(client, made.name, "one") as consumer:
        failed = False
        while len(done) < len(sent):
            message = await consumer.receive(WAIT_S)
            with suppress(ValueError):
                async with client.transaction() as transaction:
                    await consumer.ack(message, transaction=transaction)
                    if message.value == "m1" and not failed:
                        failed = True
                        raise ValueError
                done.append(message.value)
    assert done == sent


@pytest.mark.magnetar_only("deadlines are looked at every 60 s")
async def test_messages_of_a_timed_out_transaction_come_again(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send_one_by_one(client, made.name, 4)
    async with stream(client, made.name, "one") as consumer:
        before = await receive(consumer, 2)
        late = await client.transaction(timeout_s=0.3)
        await consumer.ack(before[1], transaction=late)
        again = [await consumer.receive(WAIT_S) for _ in sent[2:]]
        assert values(again) == sent[2:]
        assert values(await receive(consumer, 4)) == sent
        with pytest.raises(TransactionTimedOut):
            await late.commit()


async def test_transaction_with_a_refused_ack_cannot_commit(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    await send_one_by_one(client, made.name, 2)
    async with stream(client, made.name, "one") as consumer:
        before = await receive(consumer, 2)
        holding, other = await client.transaction(), await client.transaction()
        await consumer.ack(before[0], transaction=holding)
        with pytest.raises(TransactionConflict):
            await consumer.ack(before[1], transaction=other)
        with pytest.raises(TransactionConflict):
            await other.commit()
        await holding.abort()


async def test_a_reconnect_gives_nothing_twice_to_transactions(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send_one_by_one(client, made.name, 5)
    async with stream(client, made.name, "one") as consumer:
        messages = await receive(consumer, 3)
        segment = consumer._held.consumers[0]
        segment.again(ServiceNotReady("A test."))
        await until(lambda: len(consumer._inbox))
        async with client.transaction() as transaction:
            await consumer.ack(messages[-1], transaction=transaction)
        assert values(await receive(consumer, 2)) == sent[3:]


async def test_a_segment_goes_when_its_transaction_has_committed(
    client: magnetar.Client, topic: MakeTopic, reading: Reading, on_peer: bool
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one") as first, AsyncExitStack() as stack:
        held = await receive(first, len(sent))
        joining = asyncio.create_task(stack.enter_async_context(stream(client, made.name, "two")))
        joined = await joins_at_once(joining, on_peer)
        transaction = await client.transaction()
        await first.ack(held[-1], transaction=transaction)
        await asyncio.sleep(0.05)
        assert not (joined and joining.result().segment_ids)
        await transaction.commit()
        second = await joining
        await until(lambda: bool(second.segment_ids) and len(first.segment_ids) < 2, WAIT_S)
        # What was left in order needs nothing more, whoever acknowledges it again.
        async with client.transaction() as other:
            await first.ack(held[-2], transaction=other)
        reading.begin(second)
        reading.begin(first)
        await reading.until_all(await send(client, made.name, 1, 1))
        assert len(reading.got) == len(KEYS)


async def test_segment_moved_to_another_consumer_is_not_committed_here(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(2)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.name, "one") as first:
        held = await receive(first, len(sent))
        for segment in first._held.consumers:
            segment.again(ServiceNotReady("A test."))
        async with stream(client, made.name, "two") as second:
            async with asyncio.timeout(WAIT_S):
                while not second.segment_ids or len(first.segment_ids) == 2:
                    await asyncio.sleep(0.01)
                lost = next(iter(second.segment_ids))
                while first._held.consumer_of(lost) is not None:
                    await asyncio.sleep(0.01)
            with pytest.raises((AlreadyClosed, TransactionConflict)):
                async with client.transaction() as transaction:
                    await first.ack(held[-1], transaction=transaction)


async def test_stream_consumer_accepts_a_short_topic_name(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    sent = await send(client, made.name, 0, 1)
    async with stream(client, made.local_name) as consumer:
        assert consumer.topic == made.name
        assert (await consumer.receive(WAIT_S)).value in sent


async def test_closed_stream_consumer_hands_out_nothing(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    await send(client, made.name, 0, 1)
    async with stream(client, made.name) as consumer:
        message: Message[str] = await consumer.receive(WAIT_S)
    with pytest.raises(AlreadyClosed):
        await consumer.receive(WAIT_S)
    with pytest.raises(AlreadyClosed):
        await consumer.ack(message)
    assert [message async for message in consumer] == []


async def test_a_cancelled_receive_has_taken_nothing(
    client: magnetar.Client, topic: MakeTopic, reading: Reading
) -> None:
    made = await topic(1)
    async with stream(client, made.name) as consumer:
        for _ in range(3):
            waiting = asyncio.create_task(consumer.receive())
            await asyncio.sleep(0)
            waiting.cancel()
        reading.begin(consumer)
        await reading.until_all(await send(client, made.name, 0, 2))
    reading.check_order()
