"""Stream consumers that share a segment by entry buckets, as a script assigns it to them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

import magnetar
from magnetar.consume import stream_consumer
from magnetar.consume.assignments import AssignedSegment, Assignment
from magnetar.consume.message import Message
from magnetar.consume.ordered_segments import ControllerSession
from magnetar.consume.stream_consumer import StreamConsumer
from magnetar.context import ClientContext
from magnetar.protocol import pulsar_pb2 as pb
from tests.client.conftest import MakeTopic, Service
from tests.client.streams import Readers, send, stream
from tests.support.losing_relay import losing

pytestmark = pytest.mark.magnetar_only("5.0.0-M1 knows no entry buckets")
QUARTERS = ((0, 16383), (16384, 32767), (32768, 49151), (49152, 65535))


class Script:
    """Says what is assigned to each consumer, whatever the controller does."""

    def __init__(self) -> None:
        self.assigned: dict[str, tuple[AssignedSegment, ...]] = defaultdict(tuple)
        self.listeners: dict[str, Callable[[Assignment], None]] = {}

    def assign(self, name: str, *segments: AssignedSegment) -> None:
        """Assign the segments to a consumer, which may be open or opened later."""
        self.assigned[name] = segments
        if name in self.listeners:
            self.listeners[name](Assignment(1, segments))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()

    class ScriptedSession(ControllerSession):
        def __init__(
            self,
            context: ClientContext,
            topic: str,
            subscription: str,
            consumer_name: str,
            *,
            create_if_missing: bool = True,
        ) -> None:
            super().__init__(context, topic, subscription, consumer_name)
            self.name = consumer_name

        def on_assignment(self, listener: Callable[[Assignment], None]) -> None:
            script.listeners[self.name] = listener
            super().on_assignment(lambda _: listener(Assignment(1, script.assigned[self.name])))

    monkeypatch.setattr(stream_consumer, "ControllerSession", ScriptedSession)
    return script


async def both_uses(client: magnetar.Client, topic: str) -> tuple[AssignedSegment, AssignedSegment]:
    """The only segment of a topic, alone and shared."""
    (found,) = (await client.layout(topic)).active
    alone = AssignedSegment(found.segment_id, found.topic)
    return alone, replace(alone, bucket_ranges=QUARTERS)


async def test_consumers_share_a_segment_over_joins_and_leaves(
    client: magnetar.Client, script: Script, topic: MakeTopic
) -> None:
    name = str(await topic())
    _, shared = await both_uses(client, name)
    for each in "abcd":
        script.assign(each, shared)
    async with Readers(client, name) as readers:
        await readers.add("a")
        sent: list[str] = []
        for step, joining in enumerate("bcd"):
            sending = asyncio.create_task(send(client, name, step * 10, 10))
            await readers.add(joining)
            sent += await sending
        await readers.until_all(sent)
        sent += await send(client, name, 30, 10)
        await readers.until_all(sent)
        assert readers.busy == {"a", "b", "c", "d"}
        for step, leaving in enumerate("ac"):
            sending = asyncio.create_task(send(client, name, 40 + step * 10, 10))
            await readers.remove(leaving)
            sent += await sending
        await readers.until_all(sent)
        readers.check_order(exactly_once=False)


async def test_keys_keep_their_order_when_connections_are_lost(
    client: magnetar.Client, script: Script, topic: MakeTopic, service: Service
) -> None:
    name = str(await topic())
    _, shared = await both_uses(client, name)
    for each in "abc":
        script.assign(each, shared)
    async with (
        losing(service.url) as relay,
        magnetar.connect(relay.url) as cut_off,
        Readers(client, name) as readers,
    ):
        await readers.add("a")
        await readers.add("b", cut_off)
        await readers.add("c")
        sent: list[str] = []
        for step in range(20):
            if step >= 4 and len(relay.lost) > 1:
                break  # while "b" is away the others get its part
            relay.lose(lambda command: command.type == pb.BaseCommand.ACK, times=step + 1)
            sent += await send(client, name, step * 20, 20)
            await readers.until_all(sent)
        assert len(relay.lost) > 1
        readers.check_order(exactly_once=False)


async def test_use_of_a_segment_changes_in_order(
    client: magnetar.Client, script: Script, topic: MakeTopic
) -> None:
    name = str(await topic())
    alone, shared = await both_uses(client, name)
    script.assign("a", alone)
    async with Readers(client, name) as readers:
        await readers.add("a")
        await readers.add("b")
        sent = await send(client, name, 0, 5)
        for step, use in enumerate([shared, alone, shared, alone]):
            sending = asyncio.create_task(send(client, name, 5 + step * 10, 10))
            script.assign("a", use)
            script.assign("b", *([shared] if use is shared else []))
            sent += await sending
            await readers.until_all(sent)
        readers.check_order(exactly_once=True)
        assert readers.busy == {"a", "b"}


async def received(consumer: StreamConsumer[str]) -> list[Message[str]]:
    """All that comes until nothing comes for a while."""
    found: list[Message[str]] = []
    while True:
        try:
            found.append(await consumer.receive(0.5))
        except magnetar.errors.OperationTimedOut:
            return found


def values(messages: Sequence[Message[str]]) -> list[str]:
    return [each.value for each in messages]


async def test_transactions_acknowledge_in_shared_segments(
    client: magnetar.Client, script: Script, topic: MakeTopic
) -> None:
    name = str(await topic())
    _, shared = await both_uses(client, name)
    script.assign("a", shared)
    script.assign("b", shared)
    async with stream(client, name, "a") as one, stream(client, name, "b") as two:
        sent = await send(client, name, 0, 5)
        first, second = await received(one), await received(two)
        assert sorted(values([*first, *second])) == sorted(sent)
        async with client.transaction() as transaction:
            await one.ack(first[-1], transaction=transaction)
        assert one.is_all_acknowledged
        async with client.transaction() as transaction:
            await two.ack(second[-1], transaction=transaction)
            await transaction.abort()
        again = await received(two)
        assert values(again) == values(second)
        await two.ack(again[-1], wait=True)
        assert two.is_all_acknowledged
        assert await received(one) == []
    script.assign("c", shared)
    async with stream(client, name, "c") as other:
        assert await received(other) == []
