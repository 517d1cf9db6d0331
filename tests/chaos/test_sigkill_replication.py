"""Clusters that replicate to each other, while brokers are killed and links are cut.

At the end each cluster has each message once, those of each origin in their order.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from tests.chaos import audit
from tests.chaos.steady_producer import SteadyProducer, numbers_in, produce
from tests.chaos.test_sigkill import gaps, receipts_of
from tests.support.effort import by_effort, draw_seed
from tests.support.replicating_clusters import Cluster, replicating, until_replicated
from tests.support.waiting import end, until

ROUNDS: Final = by_effort(quick=3, whole=5, nightly=100)
PATH: Final = "/persistent/public/default/parts/partitions"
PARTITIONS: Final = 2
SINGLE: Final = "persistent://public/default/single"
PARTS: Final = [f"persistent://public/default/parts-partition-{n}" for n in range(PARTITIONS)]
TOPICS: Final = [SINGLE, *PARTS]
SETTINGS: Final = {
    "ledger_max_entries": 400,
    "ledger_min_age_s": 0,
    "log_file_size_bytes": 1024 * 1024,
}
"""Small ledgers and files, so that kills meet roll-overs of both."""
TARGETS: Final = ((), ("west",), ("__local__",), ("east", "north"))
PACE: Final[Mapping[str, Any]] = {"window": 5, "pause_s": 0.05}
"""Of producers: the brokers and the tests share few cores."""
PAUSE_S: Final = 0.5
"""How long a process is stopped, or a link cut, at most."""


def make_producers(cluster: int) -> list[SteadyProducer]:
    """Those of one cluster; all have the same names as those of the others."""
    first = 10 * cluster
    return [
        SteadyProducer(SINGLE, first + 1, name="chosen", **PACE),
        SteadyProducer(SINGLE, first + 2, batch=5, **PACE),
        SteadyProducer(SINGLE, first + 9, targets=TARGETS, **PACE),
        *(SteadyProducer(each, first + 3 + n, keys=7, **PACE) for n, each in enumerate(PARTS)),
    ]


class Load:
    """Producers in all clusters, which go on whatever happens to their broker."""

    def __init__(self, clusters: Sequence[Cluster]) -> None:
        self.clusters = clusters
        self.producers = {each.name: make_producers(number) for number, each in enumerate(clusters)}
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Load":
        for each in self.clusters:
            work = produce(each.broker, self.producers[each.name], self._stop)
            self._tasks.append(asyncio.create_task(work))
        return self

    async def __aexit__(self, *error: object) -> None:
        await end(*self._tasks)

    async def stop(self) -> None:
        """Return when all that was sent has its receipt."""
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def goes_on(self) -> None:
        """Return when every producer has more receipts, and more has gone over every link."""
        producers = [each for group in self.producers.values() for each in group]
        links = [link for each in self.clusters for link in each.links.values()]
        before = [receipts_of([each]) for each in producers]
        entries = [link.entries for link in links]

        def so_far() -> bool:
            return any(task.done() for task in self._tasks) or (
                all(receipts_of([e]) > n for e, n in zip(producers, before, strict=True))
                and all(link.entries > n + 20 for link, n in zip(links, entries, strict=True))
            )

        await until(so_far, 60)
        for task in self._tasks:
            if task.done():
                task.result()


async def trouble(clusters: Sequence[Cluster], rng: random.Random, turn: int) -> None:
    """Break a link and a broker, each in one of its ways; both are whole again afterwards."""
    source = rng.choice(clusters)
    link = rng.choice(list(source.links.values()))
    rng.choice((link.cut, link.hold, link.tear, link.reset))()
    await asyncio.sleep(rng.uniform(0, PAUSE_S))
    for topic in rng.sample(TOPICS, rng.randrange(len(TOPICS))):
        await rng.choice(clusters).ask("PUT", f"/{topic.replace('://', '/')}/unload")
    await end_process(rng.choice(clusters), rng, turn)
    if not rng.randrange(3):
        rng.choice(clusters).broker.kill()
    link.mend()
    for each in clusters:
        if not each.broker.running:
            await each.broker.start()


async def end_process(cluster: Cluster, rng: random.Random, turn: int) -> None:
    """SIGKILL, mostly; else SIGTERM, or SIGSTOP for a while."""
    broker = cluster.broker
    if not broker.running:
        return
    if turn % 4 == 1:
        assert await broker.terminate() == 0
    elif turn % 4 == 2:
        broker.pause()
        await asyncio.sleep(rng.uniform(0, PAUSE_S))
        broker.resume()
    else:
        broker.kill()


async def everything_is_everywhere_once(load: Load) -> None:
    """Compare what every cluster has with what was sent in each of them."""
    origins = {p.number: (name, p) for name, group in load.producers.items() for p in group}
    for cluster in load.clusters:
        stored: dict[int, list[int]] = {number: [] for number in origins}
        for topic in TOPICS:
            for entry in await audit.read_entries(cluster.broker, topic):
                numbers = numbers_in(entry)
                origin, producer = origins[numbers[0][0]]
                assert producer.topic == topic
                assert entry.metadata.replicated_from == ("" if origin == cluster.name else origin)
                assert entry.metadata.partition_key == (producer.key_of(numbers[0][1]) or "")
                stored[producer.number] += [message for _, message in numbers]
        for number, (origin, producer) in origins.items():
            wanted = [
                n
                for n in range(producer.sent)
                if origin == cluster.name or producer.is_for(n, cluster.name)
            ]
            assert stored[number] == wanted, (
                f"{cluster.name} has of {producer.topic} from {origin}, which sent "
                f"{producer.sent}: {gaps(stored[number])}, "
                f"twice: {[n for n, count in Counter(stored[number]).items() if count > 1][:5]}"
            )


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2, id="two clusters"),
        pytest.param(3, id="three clusters", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(240 + 20 * ROUNDS)
async def test_each_message_is_in_each_cluster_once(tmp_path: Path, count: int) -> None:
    rng = random.Random(draw_seed())
    async with replicating(tmp_path, ["east", "west", "north"][:count], SETTINGS) as clusters:
        for each in clusters:
            await each.ask("PUT", f"{PATH}?createLocalTopicOnly=true", PARTITIONS)
        for each in clusters:
            client = await each.broker.connect()
            for topic in TOPICS:
                await audit.hold_everything(client, topic)
            await client.close()
        async with Load(clusters) as load:
            for turn in range(ROUNDS):
                await load.goes_on()
                await trouble(clusters, rng, turn)
            await load.goes_on()
            await load.stop()
            await until_replicated(clusters, TOPICS)
            await everything_is_everywhere_once(load)
        for each in clusters:
            assert not each.broker.faults(), each.name
    sent = {name: sum(each.sent for each in group) for name, group in load.producers.items()}
    print(f"sent: {sent}")
