"""An ordered consumer asks a broker that does not lead its topic: three processes, bare frames."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from tests.cluster.faults import FOUND_TIMEOUT_S, Site
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster


async def register(broker: BrokerProcess, topic: str) -> list[int]:
    """What an ordered consumer gets there, while the topic may be without a leader."""
    client = await broker.connect()
    client.timeout_s = FOUND_TIMEOUT_S
    try:
        _, assignment = await client.subscribe_scalable(topic, "s", "r")
    finally:
        await client.close()
    return [segment.segment_id for segment in assignment.segments]


async def follow_a_split(near: BrokerProcess, leader: BrokerProcess, topic: str) -> None:
    """Registered at one broker, hear of what another one does; be sent away when that dies."""
    client = await near.connect()
    try:
        session, first = await client.subscribe_scalable(topic, "s", "r")
        assert [segment.segment_id for segment in first.segments] == [0]
        local = topic.partition("://")[2]
        status, answer = await leader.rest("POST", f"/scalable/{local}/split/0")
        assert status == 204, answer
        update = (await session.next()).scalable_topic_assignment_update
        assert [segment.segment_id for segment in update.assignment.segments] == [1, 2]
        leader.kill()
        await client.wait_closed(FOUND_TIMEOUT_S)
    finally:
        await client.close()


def test_any_broker_is_asked(ground: Ground, brokers: BrokerCluster) -> None:
    name = f"relay-{uuid.uuid4().hex[:8]}"
    topic = f"topic://public/default/{name}"
    asyncio.run(brokers.brokers[0].create_scalable(name, 1))
    asyncio.run(register(brokers.brokers[0], topic))
    leading = Site(ground, brokers, topic=topic, led=topic).controller()
    near, third = (each for n, each in enumerate(brokers.brokers) if n != leading)
    asyncio.run(follow_a_split(near, brokers.brokers[leading], topic))
    assert asyncio.run(register(third, topic)) == [1, 2]
    assert not brokers.faults(), brokers.faults()
