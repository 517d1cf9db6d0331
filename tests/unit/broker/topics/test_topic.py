"""A topic by itself: no broker, no connection."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.topics.consumer import SubscriptionType
from magnetar.protocol.ids import EARLIEST
from tests.support.lone_topics import LoneTopics, lone_topics
from tests.support.waiting import until
from tests.unit.broker.topics.fakes import attach, entry_bytes

ORDERS = "persistent://public/default/orders"


@pytest.fixture
async def topics(tmp_path: Path) -> AsyncIterator[LoneTopics]:
    async with lone_topics(tmp_path) as made:
        yield made


async def test_a_topic_delivers_what_is_stored(topics: LoneTopics) -> None:
    topic = await topics.open(ORDERS)
    subscription = await topic.create_subscription("s", EARLIEST)
    topic.ledger.append(entry_bytes(1), lambda *_: None)
    _, connection = await attach(subscription, SubscriptionType.EXCLUSIVE, permits=10)
    await until(lambda: connection.got() == [0])
    await topic.close()


async def test_a_topic_that_is_opened_again_knows_its_subscriptions(topics: LoneTopics) -> None:
    topic = await topics.open(ORDERS)
    await topic.create_subscription("s", EARLIEST)
    await topic.close()
    topic = await topics.open(ORDERS)
    assert list(topic.subscriptions) == ["s"]
    await topic.close()
