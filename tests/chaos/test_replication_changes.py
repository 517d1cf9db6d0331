"""What is replicated changes under load: the list of clusters, and the number of partitions."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos import audit
from tests.chaos.steady_producer import SteadyProducer, produce
from tests.chaos.test_sigkill import gaps
from tests.support.effort import by_effort, draw_seed
from tests.support.replicating_clusters import Cluster, replicating, until_replicated
from tests.support.waiting import end, until, until_awaited

ROUNDS: Final = by_effort(quick=2, whole=3, nightly=50)
TOPIC: Final = "persistent://public/default/t"
PARTS: Final = "persistent://public/default/parts"
PATH: Final = "/persistent/public/default/parts/partitions"
PACE: Final[dict[str, Any]] = {"window": 5, "pause_s": 0.02}
FIRST_COUNT: Final = 2


async def hold(cluster: Cluster, topic: str) -> None:
    """Keep what is published to a topic."""
    client = await cluster.broker.connect()
    await audit.hold_everything(client, topic)
    await client.close()


async def kill_one(rng: random.Random, clusters: Sequence[Cluster]) -> None:
    """SIGKILL, and start again."""
    broker = rng.choice(clusters).broker
    broker.kill()
    await broker.start()


async def more_from(producers: Sequence[SteadyProducer], count: int = 50) -> None:
    """Return when each has so many more receipts."""
    before = [len(each.receipts) for each in producers]
    await until(
        lambda: all(
            len(each.receipts) > n + count for each, n in zip(producers, before, strict=True)
        )
    )


@pytest.mark.timeout(180 + 20 * ROUNDS)
async def test_each_message_of_a_time_on_the_list_arrives_once(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    wanted: set[int] = set()
    async with replicating(tmp_path, ["east", "west"]) as clusters:
        east, west = clusters
        await hold(west, TOPIC)
        producer, stop = SteadyProducer(TOPIC, 1, **PACE), asyncio.Event()
        producing = asyncio.create_task(produce(east.broker, [producer], stop))

        async def has_position() -> bool:
            path = f"/{TOPIC.replace('://', '/')}/internalStats"
            shown = await east.ask("GET", path)
            assert isinstance(shown, dict)
            return "pulsar.repl.west" in shown["cursors"]

        async def has_none() -> bool:
            return not await has_position()

        async def has_sent() -> bool:
            return await east.has_sent([TOPIC])

        try:
            await more_from([producer])
            for _ in range(ROUNDS):
                await until_awaited(has_position)
                first = producer.sent
                await more_from([producer])
                await kill_one(rng, clusters)
                await more_from([producer])
                stored = len(producer.receipts)
                await until_awaited(has_sent)
                wanted |= set(range(first, stored))
                await east.replicate(["east"])
                if rng.randrange(2):
                    await kill_one(rng, clusters)
                await until_awaited(has_none)
                await more_from([producer])
                await east.replicate(["east", "west"])
            await until_awaited(has_position)
            first = producer.sent
            await more_from([producer])
            stop.set()
            await producing
        finally:
            await end(producing)
        wanted |= set(range(first, producer.sent))
        await until_replicated([east], [TOPIC])
        found = (await audit.numbers_by_producer(west.broker, TOPIC))[1]
        assert found == sorted(set(found)), gaps(found)
        assert wanted <= set(found), sorted(wanted - set(found))[:10]
        assert len(found) < producer.sent, "messages of the times off the list are there"
        stored_here = (await audit.numbers_by_producer(east.broker, TOPIC))[1]
        assert stored_here == list(range(producer.sent))
        for each in clusters:
            assert not each.broker.faults(), each.name


@pytest.mark.timeout(180 + 20 * ROUNDS)
async def test_partitions_that_are_made_in_one_cluster_are_replicated(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    stop = asyncio.Event()
    producers: list[tuple[Cluster, SteadyProducer]] = []
    tasks: list[asyncio.Task[None]] = []
    async with replicating(tmp_path, ["east", "west"]) as clusters:

        async def all_have(count: int) -> bool:
            # A cluster that has not heard of the topic answers 404.
            answers = [await each.broker.rest("GET", PATH) for each in clusters]
            return all(isinstance(a, dict) and a.get("partitions") == count for _, a in answers)

        async def begin(partition: int) -> None:
            topic = f"{PARTS}-partition-{partition}"
            for cluster in clusters:
                await hold(cluster, topic)
            for cluster in clusters:
                made = SteadyProducer(topic, len(producers), keys=5, **PACE)
                producers.append((cluster, made))
                tasks.append(asyncio.create_task(produce(cluster.broker, [made], stop)))

        try:
            await clusters[0].ask("PUT", PATH, FIRST_COUNT)
            await until_awaited(lambda: all_have(FIRST_COUNT))
            for partition in range(FIRST_COUNT):
                await begin(partition)
            for turn in range(ROUNDS):
                count = FIRST_COUNT + turn
                await more_from([each for _, each in producers], 20)
                await clusters[turn % 2].ask("POST", PATH, count + 1)
                if rng.randrange(2):
                    await kill_one(rng, clusters)
                await until_awaited(lambda: all_have(count + 1))  # noqa: B023
                await begin(count)
                await kill_one(rng, clusters)
            await more_from([each for _, each in producers], 20)
            stop.set()
            await asyncio.gather(*tasks)
        finally:
            await end(*tasks)
        topics = [f"{PARTS}-partition-{n}" for n in range(FIRST_COUNT + ROUNDS)]
        await until_replicated(clusters, topics)
        for cluster in clusters:
            found = [await audit.numbers_by_producer(cluster.broker, topic) for topic in topics]
            for origin, producer in producers:
                numbers = found[topics.index(producer.topic)].get(producer.number, [])
                assert numbers == list(range(producer.sent)), (
                    f"{cluster.name} has of {producer.topic} from {origin.name}: {gaps(numbers)}"
                )
            assert not cluster.broker.faults(), cluster.name
