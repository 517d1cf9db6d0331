"""Segments over their backlog quota: producers wait or fail there, and go on elsewhere."""

import asyncio

import pytest

import magnetar
from magnetar.errors import BacklogExceeded
from tests.client.conftest import MakeTopic, Service, Topic, rest

pytestmark = pytest.mark.magnetar_only("policies of its scalable topics are none of its segments'")
LIMIT_BYTES = 5_000
TEXT = b"x" * 1000


async def limit(service: Service, topic: Topic, policy: str) -> None:
    body = {"limitSize": LIMIT_BYTES, "limitTime": -1, "policy": policy}
    path = f"/persistent/public/default/{topic.local_name}/backlogQuota"
    assert (await rest(service, "POST", path, body=body))[0] == 204


async def check(service: Service) -> None:
    assert (await rest(service, "GET", "/brokers/backlog-quota-check"))[0] == 204


async def receive(consumer: magnetar.QueueConsumer[bytes], count: int) -> list[str | None]:
    messages = [await consumer.receive() for _ in range(count)]
    for message in messages:
        await consumer.ack(message)
    return [message.key for message in messages]


async def drained(service: Service, topic: Topic) -> None:
    """Returns when the broker has all acknowledgements."""
    while True:
        _, stats = await rest(service, "GET", f"/scalable/public/default/{topic.local_name}/stats")
        assert isinstance(stats, dict)
        if not stats["subscriptions"]["s"]["msgBacklog"]:
            return


async def test_messages_wait_in_the_client_until_the_backlog_is_below_the_quota(
    client: magnetar.Client, service: Service, topic: MakeTopic
) -> None:
    made = await topic()
    async with (
        client.queue_consumer(made.name, "s", initial_position="earliest") as consumer,
        client.producer(made.name) as producer,
    ):
        await limit(service, made, "producer_request_hold")
        for number in range(10):
            await producer.send(TEXT, key=f"{number}")
        await check(service)
        waiting = [asyncio.create_task(producer.send(TEXT, key=f"later {n}")) for n in range(3)]
        done, _ = await asyncio.wait(waiting, timeout=1)
        assert not done
        assert await receive(consumer, 10) == [f"{n}" for n in range(10)]
        await asyncio.gather(*waiting)
        assert await receive(consumer, 3) == [f"later {n}" for n in range(3)]


async def test_messages_fail_while_the_backlog_is_over_the_quota(
    client: magnetar.Client, service: Service, topic: MakeTopic
) -> None:
    made = await topic()
    async with (
        client.queue_consumer(made.name, "s", initial_position="earliest") as consumer,
        client.producer(made.name) as producer,
    ):
        await limit(service, made, "producer_exception")
        for _ in range(10):
            await producer.send(TEXT)
        await check(service)
        for _ in range(2):
            with pytest.raises(BacklogExceeded, match="has reached its quota of 5000 bytes"):
                await producer.send(TEXT)
        await receive(consumer, 10)
        await drained(service, made)
        await producer.send(TEXT)
        await receive(consumer, 1)


async def test_a_segment_over_its_quota_leaves_the_others_alone(
    client: magnetar.Client, service: Service, topic: MakeTopic
) -> None:
    made = await topic(2)
    async with (
        client.queue_consumer(made.name, "s", initial_position="earliest") as consumer,
        client.producer(made.name) as producer,
    ):
        await limit(service, made, "producer_exception")
        sent = [await producer.send(TEXT, key="one") for _ in range(10)]
        full = sent[0].segment_id
        other = 0
        while (await producer.send(b"", key=f"{other}")).segment_id == full:
            other += 1
        await check(service)
        with pytest.raises(BacklogExceeded):
            await producer.send(TEXT, key="one")
        await producer.send(TEXT, key=f"{other}")
        assert len(await receive(consumer, 12 + other)) == 12 + other
