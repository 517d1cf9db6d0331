"""Deduplication over a migration: nothing is stored twice, and nothing new is dropped."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.carried_ids import CarriedId, FinalIds, FinalSequences, common_to_partitions
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.unit.broker.scalable.test_carried_ids import (
    TOPIC,
    client_of,
    deduplicate,
    producer_of,
    send_all,
    settled,
)
from tests.unit.broker.topics.test_produce import named

ORDINARY = parse_topic_name("persistent://public/default/t")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        await deduplicate(broker)
        yield broker


async def test_resend_after_a_migration_is_stored_once(broker: Broker) -> None:
    first = await client_of(broker)
    producer = await first.create_producer(str(ORDINARY), named("p-seg-0"))
    assert await send_all(producer, range(10)) == [*range(10)]
    await first.close()
    await broker.scalable.migrate(TOPIC, force=True)
    await settled(broker)
    producer = await producer_of(await client_of(broker), broker, 1)
    assert producer.success.last_sequence_id == 9
    assert await send_all(producer, range(12)) == [10, 11]


async def test_client_that_counts_anew_loses_nothing(broker: Broker) -> None:
    """A v5 client, with `initialSequenceId`, that follows the topic when it becomes scalable."""
    client = await client_of(broker)
    options = named("p-seg-0")
    options.metadata.add(key=MANAGED_PROPERTY, value="true")
    producer = await client.create_producer(str(ORDINARY), options)
    assert await send_all(producer, range(100, 110)) == [*range(100, 110)]
    await broker.scalable.migrate(TOPIC, force=False)
    await producer.close()
    child = await producer_of(client, broker, 1)
    assert await send_all(child, range(100, 112)) == [*range(100, 112)]


async def test_message_that_one_partition_lacks_is_stored(broker: Broker) -> None:
    await broker.topics.partitioned.create(ORDINARY, 2)
    first = await client_of(broker)
    for index, count in ((0, 10), (1, 4)):
        topic = str(ORDINARY.partition(index))
        await send_all(await first.create_producer(topic, named(f"p-seg-{index}")), range(count))
    await first.close()
    await broker.scalable.migrate(TOPIC, force=True)
    await settled(broker)
    producer = await producer_of(await client_of(broker), broker, 2)
    assert producer.success.last_sequence_id == 3
    assert await send_all(producer, range(6)) == [4, 5], "one partition may lack them"


def test_names_that_some_partitions_lack_are_not_carried() -> None:
    def final(name: str, last: int) -> FinalIds:
        return FinalIds(name, True, last, (CarriedId(0, 65535, last, None, None),))

    both = common_to_partitions(
        [FinalSequences([final("a", 7), final("b", 1)]), FinalSequences([final("a", 5)])]
    )
    assert both.producers == [FinalIds("a", True, 7, (CarriedId(0, 65535, 5, None, None),))]
