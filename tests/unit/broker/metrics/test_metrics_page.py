"""The page of metrics: made in parts, shared by those who ask meanwhile, by topic or namespace."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.app.service import Broker
from broker.metrics.exposition import topic_families
from broker.metrics.page import MetricsPage
from broker.topics.subscription import Subscription
from magnetar.protocol.ids import EARLIEST, SegmentId
from magnetar.protocol.names import parse_topic_name
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.waiting import until

TOPICS = 30


async def make_topics(broker: Broker) -> None:
    for number in range(TOPICS):
        topic = await broker.topics.create(
            parse_topic_name(f"persistent://public/default/t-{number}")
        )
        await topic.create_subscription('a "name" with \\ in it', EARLIEST)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        await make_topics(broker)
        yield broker


class Clock:
    """Each reading takes `step`."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def samples(text: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_those_who_ask_meanwhile_share_one_page(broker: Broker) -> None:
    page = MetricsPage(broker)
    first, second = await asyncio.gather(page.text(), page.text())
    assert first is second


async def test_a_page_is_kept_for_a_multiple_of_its_cost(broker: Broker) -> None:
    clock = Clock(step=0.1)
    page = MetricsPage(broker, now=clock)
    first = await page.text()
    clock.step = 0
    clock.now += 1.9
    assert await page.text() is first
    clock.now += 1000
    assert await page.text() is not first


async def test_one_who_leaves_does_not_end_it_for_others(broker: Broker) -> None:
    page = MetricsPage(broker)
    leaving = asyncio.ensure_future(page.text())
    staying = asyncio.ensure_future(page.text())
    await asyncio.sleep(0)
    leaving.cancel()
    assert b"pulsar_topics_count" in await staying


async def test_the_page_is_made_in_parts(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "METRICS_PART_SAMPLES", 20)
    making = asyncio.ensure_future(MetricsPage(broker).text())
    turns = 0
    while not making.done():
        await asyncio.sleep(0)
        turns += 1
    count = sum(len(each) for each in samples(making.result()).values())
    assert count > TOPICS * 20
    assert turns > count / 20


async def test_the_subscriptions_of_one_topic_are_gone_through_in_parts(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "METRICS_PART_SAMPLES", 20)
    topic = await broker.topics.create(parse_topic_name("persistent://public/default/many"))
    for number in range(40):
        await topic.create_subscription(f"s-{number}", EARLIEST)
    asked: set[str] = set()

    def backlog(subscription: Subscription) -> int:
        asked.add(subscription.name)
        return 3

    monkeypatch.setattr(Subscription, "backlog", property(backlog))
    most = 0
    families = topic_families(broker)
    for _ in families.collect([topic], [], {}):
        most = max(most, len(asked))
        asked.clear()
    assert 0 < most <= 4
    lines = "".join(families.text()).splitlines()
    assert next(each for each in lines if each.startswith("pulsar_msg_backlog{")).endswith(" 120.0")


async def test_topics_and_subscriptions_have_their_labels(broker: Broker) -> None:
    found = samples(await MetricsPage(broker).text())
    assert len(found["pulsar_in_messages_total"]) == TOPICS
    (labels, _), *_ = found["pulsar_subscription_back_log"]
    assert labels["subscription"] == 'a "name" with \\ in it'
    assert labels["topic"].startswith("persistent://public/default/t-")


async def test_namespaces_have_the_sums_of_their_topics(tmp_path: Path) -> None:
    async with running(tmp_path, topic_level_metrics=False) as broker:
        await make_topics(broker)
        found = samples(await MetricsPage(broker).text())
    labels = {"cluster": "standalone", "namespace": "public/default"}
    assert found["pulsar_subscriptions_count"] == [(labels, TOPICS)]
    assert found["pulsar_subscription_back_log"] == [(labels, 0)]
    assert not [name for name, each in found.items() if any("topic" in one for one, _ in each)]


ORDERS = parse_topic_name("topic://public/default/orders")


async def test_segments_of_scalable_topics_are_shown(broker: Broker) -> None:
    scalable = broker.scalable
    await scalable.create(ORDERS, segments=2, properties={})
    await scalable.split(ORDERS, SegmentId(0))
    await until(lambda: scalable.counters.segments_sealed == 1)
    client = await RawClient.open("127.0.0.1", broker.port)
    await client.subscribe_scalable(str(ORDERS), "s", "a")
    await client.subscribe_scalable(str(ORDERS), "s", "b")
    shown = samples(await MetricsPage(broker).text())
    labels = {"cluster": "standalone", "namespace": "public/default", "topic": str(ORDERS)}
    assert shown["magnetar_active_segments"] == [(labels, 3)]
    assert shown["magnetar_sealed_segments"] == [(labels, 1)]
    buckets = sum(each.entry_buckets for each in (await scalable.get(ORDERS)).layout.active)
    assert shown["magnetar_entry_buckets"] == [(labels, buckets)]
    assert shown["magnetar_ordered_consumers"] == [(labels | {"subscription": "s"}, 2)]
    changes = {each["kind"]: count for each, count in shown["magnetar_layout_changes_total"]}
    assert changes == {"split": 1, "merge": 0, "rebucket": 0, "migrate": 0, "prune": 0}
    for name in ("segments_sealed", "rebalances", "assignments_sent"):
        ((_, count),) = shown[f"magnetar_{name}_total"]
        assert count >= 1, name
    await client.close()


async def test_controller_that_takes_over_is_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await broker.scalable.create(ORDERS, segments=1, properties={})
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.subscribe_scalable(str(ORDERS), "s", "a")
        assert broker.scalable.counters.controllers_taken_over == 0
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        await client.subscribe_scalable(str(ORDERS), "s", "a")
        assert broker.scalable.counters.controllers_taken_over == 1
        await client.close()


async def test_segments_are_summed_by_namespace(tmp_path: Path) -> None:
    async with running(tmp_path, topic_level_metrics=False) as broker:
        for name in ("a", "b"):
            topic = parse_topic_name(f"topic://public/default/{name}")
            await broker.scalable.create(topic, segments=2, properties={})
        shown = samples(await MetricsPage(broker).text())
        labels = {"cluster": "standalone", "namespace": "public/default"}
        assert shown["magnetar_active_segments"] == [(labels, 4)]
