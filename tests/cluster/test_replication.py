"""Three brokers of one cluster replicate to another cluster while owners are killed and paused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.chaos import audit
from tests.chaos.replicated_load import (
    LOCAL_NAME,
    everything_is_everywhere_once,
    loads,
    make_topic,
    segments_of,
)
from tests.chaos.steady_producer import RETRY_PAUSE_S, SteadyProducer
from tests.chaos.test_sigkill import gaps, receipts_of
from tests.chaos.test_sigkill_replicated_segments import draw_change, request_change
from tests.cluster.conftest import SESSION_TIMEOUT_MS, three_brokers
from tests.servers.ground import Ground
from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess, running
from tests.support.effort import by_effort, draw_seed
from tests.support.raw_client import BrokerError
from tests.support.replicating_clusters import Cluster, settings_of, until_replicated
from tests.support.routed_client import RoutedClient
from tests.support.waiting import end, until

ROUNDS: Final = by_effort(quick=4, whole=4, nightly=20)
SEGMENT_ROUNDS: Final = by_effort(quick=1, whole=2, nightly=20)
TOPICS: Final = [f"persistent://public/default/t{number}" for number in range(3)]
PACE: Final[dict[str, Any]] = {"window": 5, "pause_s": 0.02}
REPLICATED_S: Final = 120
"""A broker that is away without a word is known to the other cluster to be gone after a minute."""

pytestmark = pytest.mark.cluster


async def produce(
    brokers: Sequence[BrokerProcess], producer: SteadyProducer, stop: asyncio.Event
) -> None:
    """Keep a producer at whichever broker owns its topic."""
    while True:
        async with RoutedClient(brokers) as routes:
            try:
                await producer.produce(await routes.to_owner(producer.topic), stop)
            except BrokerError as error:
                if error.code not in (pb.ServiceNotReady, pb.ProducerBusy):
                    raise
            except (OSError, TimeoutError):
                pass
            else:
                return
        await asyncio.sleep(RETRY_PAUSE_S)


async def owner_of(cluster: Cluster, topic: str) -> BrokerProcess:
    """The broker that owns a topic."""
    async with RoutedClient(cluster.brokers) as routes:
        port = await routes.port_of(topic)
    return next(each for each in cluster.brokers if each.port == port)


async def numbers_of(cluster: Cluster, topic: str) -> dict[int, list[int]]:
    """The numbers of the messages that a cluster has of a topic, by producer."""
    return await audit.numbers_by_producer(await owner_of(cluster, topic), topic)


async def hold(cluster: Cluster) -> None:
    """Keep all messages of all topics."""
    async with RoutedClient(cluster.brokers) as routes:
        for topic in TOPICS:
            await audit.hold_everything(await routes.to_owner(topic), topic)


async def trouble(clusters: Sequence[Cluster], rng: random.Random, turn: int) -> None:
    """End the owner of a topic, pause it for longer than its session, or kill the other one."""
    near, far = clusters
    if turn % 4 == 2:
        far.broker.kill()
        await far.broker.start()
        return
    owner = await owner_of(near, rng.choice(TOPICS))
    if turn % 4 == 3:
        # It hands its topics over.
        assert await owner.terminate() == 0
        await owner.start()
    elif turn % 4 == 0:
        owner.kill()
        await asyncio.sleep(rng.uniform(0, 2 * SESSION_TIMEOUT_MS / 1000))
        await owner.start()
    else:
        owner.pause()
        await asyncio.sleep(2 * SESSION_TIMEOUT_MS / 1000)
        owner.resume()


async def replicate_under_trouble(brokers: BrokerCluster, directory: Path) -> None:
    """Producers in both clusters; in the end each has each message once."""
    rng = random.Random(draw_seed())
    async with AsyncExitStack() as stack:
        alone = await stack.enter_async_context(running(directory, settings_of("far", {})))
        near, far = clusters = Cluster("near", brokers.brokers), Cluster("far", [alone])
        await near.register(far)
        await far.register(near)
        for each in clusters:
            await each.replicate(["near", "far"])
        for each in clusters:
            await hold(each)
        stop = asyncio.Event()
        producers = [
            (cluster, SteadyProducer(topic, 10 * n + m, name=f"p{n}", **PACE))
            for n, cluster in enumerate(clusters)
            for m, topic in enumerate(TOPICS)
        ]
        tasks = [
            asyncio.create_task(produce(cluster.brokers, producer, stop))
            for cluster, producer in producers
        ]

        async def goes_on() -> None:
            before = [receipts_of([each]) for _, each in producers]
            await until(
                lambda: (
                    any(each.done() for each in tasks)
                    or all(
                        receipts_of([each]) > n + 50
                        for (_, each), n in zip(producers, before, strict=True)
                    )
                ),
                REPLICATED_S,
            )

        try:
            for turn in range(ROUNDS):
                await goes_on()
                await trouble(clusters, rng, turn)
            await goes_on()
            stop.set()
            await asyncio.gather(*tasks)
        finally:
            await end(*tasks)
        await until_replicated(clusters, TOPICS, REPLICATED_S)
        for cluster in clusters:
            found = {topic: await numbers_of(cluster, topic) for topic in TOPICS}
            for origin, producer in producers:
                numbers = found[producer.topic].get(producer.number, [])
                assert numbers == list(range(producer.sent)), (
                    f"{cluster.name} has of {producer.topic} from {origin.name}: {gaps(numbers)}"
                )
        assert not alone.faults()


@pytest.mark.timeout(300 + 60 * ROUNDS)
def test_messages_arrive_once_when_other_brokers_take_topics_over(
    ground: Ground, metadata_store_url: str, tmp_path: Path
) -> None:
    with three_brokers(
        tmp_path, ground, metadata_store_url, cluster_name="near", deduplication=True
    ) as brokers:
        asyncio.run(replicate_under_trouble(brokers, tmp_path / "far"))
        assert not brokers.faults(), brokers.faults()


async def send_what_is_left(brokers: BrokerCluster, directory: Path) -> None:
    """Nobody uses the topic after its owner was killed, and the other cluster lacks a part."""
    topic, count = TOPICS[0], 100
    async with running(directory, settings_of("far", {})) as alone:
        near, far = clusters = Cluster("near", brokers.brokers), Cluster("far", [alone])
        await near.register(far)
        await far.register(near)
        for each in clusters:
            await each.replicate(["near", "far"])
        await hold(far)
        alone.kill()
        async with RoutedClient(near.brokers) as routes:
            producer = await (await routes.to_owner(topic)).create_producer(topic)
            await producer.send_many(b"%d" % number for number in range(count))
        owner = await owner_of(near, topic)
        owner.kill()
        await alone.start()
        client = await alone.connect()
        consumer = await audit.subscribe(client, topic)
        found = [await consumer.receive(REPLICATED_S) for _ in range(count)]
        assert [int(each.payload) for each in found] == list(range(count))
        await client.close()
        await owner.start()


@pytest.mark.timeout(300)
def test_what_is_left_of_a_topic_that_nobody_uses_is_sent_by_another_broker(
    ground: Ground, metadata_store_url: str, tmp_path: Path
) -> None:
    with three_brokers(
        tmp_path, ground, metadata_store_url, cluster_name="near", deduplication=True
    ) as brokers:
        asyncio.run(send_what_is_left(brokers, tmp_path / "far"))
        assert not brokers.faults(), brokers.faults()


async def owner_of_a_segment(cluster: Cluster, rng: random.Random) -> BrokerProcess:
    """The broker that owns one of the segments of the topic."""
    segments = await segments_of(cluster)
    number = rng.choice(sorted(segments))
    bounds = segments[number]["hashRange"]
    assert isinstance(bounds, dict)
    name = f"{bounds['start']:04x}-{bounds['end']:04x}-{number}"
    return await owner_of(cluster, f"segment://public/default/{LOCAL_NAME}/{name}")


async def replicate_segments_under_trouble(brokers: BrokerCluster, directory: Path) -> None:
    """Both clusters change their layouts; owners of segments of one of them are killed."""
    rng = random.Random(draw_seed())
    async with running(directory, settings_of("far", {})) as alone:
        near, far = clusters = Cluster("near", brokers.brokers), Cluster("far", [alone])
        await near.register(far)
        await far.register(near)
        for each in clusters:
            await each.replicate(["near", "far"])
        await make_topic(near, 3)
        await make_topic(far, 2)
        async with loads(clusters, rng) as load:
            for _ in range(SEGMENT_ROUNDS):
                await asyncio.gather(*(each.goes_on() for each in load))
                paths = [(await draw_change(each, rng))[1] for each in clusters]
                owner = await owner_of_a_segment(near, rng)
                changing = [
                    asyncio.create_task(request_change(each, path))
                    for each, path in zip(clusters, paths, strict=True)
                ]
                await asyncio.sleep(rng.uniform(0, 0.2))
                owner.kill()
                await asyncio.gather(*changing)
                await owner.start()
            await asyncio.gather(*(each.goes_on() for each in load))
            for producers in load:
                await producers.stop()
        sent = {message: told for each in load for message, told in each.sent.items()}
        await everything_is_everywhere_once(clusters, sent)
        assert not alone.faults()


@pytest.mark.timeout(300 + 60 * SEGMENT_ROUNDS)
def test_segments_arrive_once_when_other_brokers_take_them_over(
    ground: Ground, metadata_store_url: str, tmp_path: Path
) -> None:
    with three_brokers(
        tmp_path, ground, metadata_store_url, cluster_name="near", deduplication=True
    ) as brokers:
        asyncio.run(replicate_segments_under_trouble(brokers, tmp_path / "far"))
        assert not brokers.faults(), brokers.faults()
