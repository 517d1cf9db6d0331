"""Requests whose connection ends while they are served: they are done or not done, never half."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from google.protobuf.message import Message

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.waiting import end

Kind = pb.BaseCommand
CUTS: Final = by_effort(quick=30, whole=40, nightly=600)
LONGEST_S: Final = 0.012
"""Longer than any of these requests takes when nothing else happens."""
TOPIC: Final = "persistent://public/default/cut"
EARLIEST: Final = pb.CommandSubscribe.Earliest


def subscribe(name: str) -> pb.CommandSubscribe:
    """A new durable subscription."""
    return pb.CommandSubscribe(
        topic=TOPIC,
        subscription=name,
        sub_type=pb.CommandSubscribe.Shared,
        consumer_id=1,
        request_id=1,
        initial_position=EARLIEST,
    )


REQUESTS: Final[dict[str, Callable[[str], tuple[pb.BaseCommand.Type, Message]]]] = {
    "SUBSCRIBE": lambda name: (Kind.SUBSCRIBE, subscribe(name + " new")),
    "UNSUBSCRIBE": lambda name: (
        Kind.UNSUBSCRIBE,
        pb.CommandUnsubscribe(consumer_id=1, request_id=2),
    ),
    "SEEK": lambda name: (
        Kind.SEEK,
        pb.CommandSeek(consumer_id=1, request_id=2, message_publish_time=0),
    ),
    "PRODUCER": lambda name: (
        Kind.PRODUCER,
        pb.CommandProducer(topic=f"{TOPIC}-{name}", producer_id=1, request_id=2),
    ),
    "SCALABLE_TOPIC_LOOKUP": lambda name: (
        Kind.SCALABLE_TOPIC_LOOKUP,
        pb.CommandScalableTopicLookup(session_id=1, topic=f"topic://public/default/cut-{name}"),
    ),
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.timeout(120 + CUTS)
async def test_a_request_cut_off_harms_nothing(tmp_path: Path, kind: str) -> None:
    """Cut at some moment, the same request works afterwards; others on the topic notice nothing."""
    rng = random.Random(draw_seed())
    async with running(tmp_path) as broker:
        client = await broker.connect()
        producer = await client.create_producer(TOPIC)
        for number in range(CUTS):
            name = f"s{number}"
            await producer.send(name.encode())
            await cut(broker, name, REQUESTS[kind](name), rng.uniform(0, LONGEST_S))
            await works(broker, name, kind)
        await producer.send(b"last")
        assert producer.events.empty(), "the topic was closed under its producer"
        assert not broker.faults()
        await client.close()


async def cut(
    broker: BrokerProcess, name: str, request: tuple[pb.BaseCommand.Type, Message], after_s: float
) -> None:
    """Subscribe, send a request, and be gone a moment later."""
    client = await broker.connect()
    await client.subscribe(TOPIC, name, subscribe(name))
    number, body = request
    client.send(number, body)
    closing = asyncio.create_task(client.wait_closed())
    await asyncio.wait({closing}, timeout=after_s)
    await end(closing)
    await client.close()


async def works(broker: BrokerProcess, name: str, kind: str) -> None:
    """What the request would have done or undone can be used."""
    client = await broker.connect()
    for subscription in (name, name + " new"):
        options = subscribe(subscription)
        options.consumer_id = client.next_id()
        consumer = await client.subscribe(TOPIC, subscription, options, permits=10)
        delivery = await consumer.receive()
        answer = await consumer.ack_answered(delivery.message_id)
        assert not answer.HasField("error"), answer
        await consumer.unsubscribe()
    if kind == "PRODUCER":
        producer = await client.create_producer(f"{TOPIC}-{name}")
        await producer.send(b"first")
    if kind == "SCALABLE_TOPIC_LOOKUP":
        _, update = await client.watch_dag(f"topic://public/default/cut-{name}")
        assert len(update.dag.segments) == 1
    await client.close()
