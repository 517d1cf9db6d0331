"""An ACK of many messages is served in slices, and before the next command of its connection."""

from collections.abc import Iterable

import pytest

from broker.app.service import Broker
from broker.topics.consumer import Ack, Consumer
from broker.topics.subscription import Subscription
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.raw_client import RawClient
from tests.support.raw_handles import RawConsumer
from tests.support.waiting import count_turns
from tests.unit.broker.wire.test_late_acknowledgements import (
    KEY_SHARED,
    SHARED,
    TOPIC,
    client,
    options,
    publish,
    received,
    refused,
)

__all__ = ["client"]


class Served:
    """What subscriptions are asked to acknowledge: who, how many, and in which turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.consumers: list[Consumer | None] = []
        self.counts: list[int] = []
        self.turns: list[int] = []
        turn, original = count_turns(), Subscription.acknowledge

        def acknowledge(
            subscription: Subscription, consumer: Consumer | None, acks: Iterable[Ack]
        ) -> None:
            given = list(acks)
            self.consumers.append(consumer)
            self.counts.append(len(given))
            self.turns.append(turn())
            original(subscription, consumer, given)

        monkeypatch.setattr(Subscription, "acknowledge", acknowledge)


async def seven_messages(
    client: RawClient, kind: int = SHARED
) -> tuple[RawConsumer, list[pb.MessageIdData]]:
    consumer = await client.subscribe(TOPIC, "s", options(kind), permits=100)
    await publish(client, 7)
    return consumer, [each.message_id for each in await received(consumer, 7)]


async def subscription_of(broker: Broker) -> Subscription:
    topic = await broker.topics.get(parse_topic_name(TOPIC), create=False)
    return topic.subscriptions["s"]


@pytest.mark.parametrize("kind", [SHARED, KEY_SHARED])
async def test_ack_of_many_messages_is_served_in_slices_before_the_close_of_its_consumer(
    broker: Broker, client: RawClient, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ACKED_AT_ONCE", 2)
    consumer, ids = await seven_messages(client, kind)
    served = Served(monkeypatch)
    consumer.ack(*ids)
    await consumer.close()
    assert served.counts == [2, 2, 2, 1]
    assert len(set(served.turns)) == 4
    assert None not in served.consumers
    assert (await subscription_of(broker)).backlog == 0


async def test_ack_of_many_messages_is_answered_once_when_all_are_durable(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ACKED_AT_ONCE", 2)
    consumer, ids = await seven_messages(client)
    answer = await consumer.ack_answered(*ids)
    assert not answer.HasField("error")
    cursor = (await subscription_of(broker)).cursor
    assert (cursor.backlog, cursor.dirty) == (0, False)


async def test_rest_of_an_ack_is_refused_when_its_consumer_was_disconnected_meanwhile(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ACKED_AT_ONCE", 2)
    consumer, ids = await seven_messages(client)
    subscription, original = await subscription_of(broker), Subscription.acknowledge

    def then_disconnect(each: Subscription, owner: Consumer | None, acks: Iterable[Ack]) -> None:
        original(each, owner, acks)
        each.disconnect_consumers()

    monkeypatch.setattr(Subscription, "acknowledge", then_disconnect)
    await refused(consumer.ack_answered(*ids), pb.ConsumerNotFound)
    assert subscription.backlog == 5


async def test_late_ack_of_many_messages_is_served_in_slices(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ACKED_AT_ONCE", 2)
    consumer, ids = await seven_messages(client)
    await consumer.close()
    served = Served(monkeypatch)
    assert not (await consumer.ack_answered(*ids)).HasField("error")
    assert (served.counts, served.consumers) == ([2, 2, 2, 1], [None] * 4)
    assert (await subscription_of(broker)).backlog == 0


async def test_ack_of_few_messages_is_served_at_once(
    broker: Broker, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, ids = await seven_messages(client)
    served = Served(monkeypatch)
    await consumer.ack_answered(*ids)
    assert served.counts == [7]
