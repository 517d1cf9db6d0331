"""Consumers of a replicated scalable topic move from cluster to cluster, while brokers are killed.

Their subscriptions are replicated: they go on where they stopped, at most a little behind, and
never ahead.  So they get each message at least once, however often they move; and when all is
consumed in one cluster, nothing is left in the other one.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, cast

import pytest

import magnetar
from magnetar.consume.message import Message
from magnetar.errors import MagnetarError
from tests.chaos.replicated_load import (
    FREE,
    PATH,
    TOPIC,
    loads,
    message_in,
    stop_all,
    stored_of,
)
from tests.chaos.replication_judge import Outcome, Sent
from tests.chaos.test_sigkill_replicated_segments import SETTINGS, trouble
from tests.support.dying_broker import DyingBroker
from tests.support.effort import by_effort, draw_seed
from tests.support.layout_steps import DiesAfter
from tests.support.replicating_clusters import Cluster, replicating
from tests.support.waiting import end, until, until_awaited

ROUNDS: Final = by_effort(quick=1, whole=1, nightly=40)
STREAM: Final = "stream"
QUEUE: Final = "queue"
RECEIVE_S: Final = 0.2
CONSUMED_S: Final = 90
SETTLED_S: Final = 60


class Consumers:
    """Those of one subscription, in one cluster at a time."""

    def __init__(self, subscription: str) -> None:
        self.subscription = subscription
        self.counts: Counter[Sent] = Counter()
        """How often each message came."""
        self.order: list[Sent] = []
        """The messages as they came first."""
        self._task: asyncio.Task[None] | None = None

    async def move(self, cluster: Cluster) -> None:
        """Leave the cluster where they are, and consume in another one."""
        await self.leave()
        self._task = asyncio.create_task(self._consume(cluster))

    async def leave(self) -> None:
        """Consume nowhere."""
        if self._task is not None:
            await end(self._task)
            self._task = None

    async def _consume(self, cluster: Cluster) -> None:
        while True:
            try:
                async with (
                    magnetar.connect(cluster.url) as client,
                    self._consumer(client) as consumer,
                ):
                    while True:
                        for each in await consumer.receive_batch(500, timeout_s=RECEIVE_S):
                            self._took(each)
                            await consumer.ack(each)
            except MagnetarError:
                await asyncio.sleep(RECEIVE_S)  # its broker is dead

    @asynccontextmanager
    async def _consumer(
        self, client: magnetar.Client
    ) -> AsyncIterator[magnetar.StreamConsumer[bytes] | magnetar.QueueConsumer[bytes]]:
        make = client.stream_consumer if self.subscription == STREAM else client.queue_consumer
        async with make(
            TOPIC,
            self.subscription,
            initial_position="earliest",
            replicate_subscription_state=True,
        ) as consumer:
            yield consumer

    def _took(self, message: Message[bytes]) -> None:
        found = message_in(message.data)
        if not self.counts[found]:
            self.order.append(found)
        self.counts[found] += 1


@asynccontextmanager
async def consumers() -> AsyncIterator[list[Consumers]]:
    """Of an ordered and of a shared subscription; all are gone at the end."""
    made = [Consumers(STREAM), Consumers(QUEUE)]
    async with AsyncExitStack() as stack:
        for each in made:
            stack.push_async_callback(each.leave)
        yield made


async def backlogs(cluster: Cluster) -> dict[str, int]:
    """The number of entries that each subscription has left."""
    shown = cast("dict[str, dict[str, dict[str, int]]]", await cluster.ask("GET", f"{PATH}/stats"))
    return {name: each["msgBacklog"] for name, each in shown["subscriptions"].items()}


async def shown_by(cluster: Cluster) -> object:
    """What is left in each segment, and how questions to the other cluster go."""
    shown = cast(
        "dict[str, dict[str, dict[str, object]]]", await cluster.ask("GET", f"{PATH}/stats")
    )
    left = {
        name: {
            number: segment["msgBacklog"]
            for number, segment in cast("dict[str, dict[str, int]]", each["segments"]).items()
        }
        for name, each in shown["subscriptions"].items()
    }
    return left, shown["replicatedSubscriptions"]


async def until_in_all(clusters: Sequence[Cluster]) -> None:
    """Return when all clusters have the subscriptions: what one drops before that it lacks."""

    async def are_there() -> bool:
        shown = [await backlogs(each) for each in clusters]
        return all(each.keys() == {STREAM, QUEUE} for each in shown)

    await until_awaited(are_there, SETTLED_S)


async def until_settled(clusters: Sequence[Cluster]) -> None:
    """Return when nothing is left of either subscription in any cluster."""

    async def is_settled() -> bool:
        shown = [await backlogs(each) for each in clusters]
        settled = all(each == {STREAM: 0, QUEUE: 0} for each in shown)
        if not settled:
            await asyncio.sleep(RECEIVE_S)
        return settled

    try:
        await until_awaited(is_settled, SETTLED_S)
    except TimeoutError:
        left = {each.name: await shown_by(each) for each in clusters}
        raise AssertionError(f"subscriptions did not move: {left}") from None


def judge(sent: Mapping[Sent, Outcome], each: Consumers) -> list[str]:
    """What is wrong with what they got."""
    missing = [m for m, told in sent.items() if told is Outcome.STORED and not each.counts[m]]
    aborted = [m for m, told in sent.items() if told is Outcome.ABORTED and each.counts[m]]
    wrong = [f"{each.subscription}: {m} is lost" for m in missing]
    wrong += [f"{each.subscription}: {m} was aborted" for m in aborted]
    if each.subscription == STREAM:
        last: dict[tuple[str, str], int] = {}
        for message in each.order:
            key = (message.origin, message.stream)
            if message.number < last.get(key, -1) and not message.stream.startswith(FREE):
                wrong.append(f"{message} came first after number {last[key]} of its key")
            last[key] = max(message.number, last.get(key, -1))
    return wrong


@pytest.mark.timeout(240 + 40 * ROUNDS)
async def test_consumers_that_move_between_clusters_miss_nothing_whatever_dies(
    tmp_path: Path,
) -> None:
    rng = random.Random(draw_seed())
    steps = rng.sample(list(DiesAfter), len(DiesAfter))
    async with (
        replicating(tmp_path, ["east", "west"], SETTINGS, DyingBroker) as clusters,
        consumers() as moving,
    ):
        for segments, each in enumerate(clusters, 1):
            await each.broker.rest("PUT", PATH, numInitialSegments=segments)
        for group in moving:
            await group.move(clusters[0])
        await until_in_all(clusters)
        async with loads(clusters, rng) as load:
            for number in range(2 * ROUNDS):
                for group in moving:
                    await group.move(clusters[number % 2])
                await asyncio.gather(*(each.goes_on() for each in load))
                if number % 2:
                    await trouble(clusters, rng, steps)
            sent = await stop_all(load)
        await has_all(moving, clusters[-1], sent)
        for group in moving:
            await group.leave()
        await until_settled(clusters)
        wrong = [each for group in moving for each in judge(sent, group)]
        doubles = {g.subscription: sum(g.counts.values()) - len(g.counts) for g in moving}
        print(f"{len(sent)} messages, {doubles} came more than once")
        assert not wrong, "\n".join(wrong)
        for each in clusters:
            assert not each.broker.faults(), each.name


async def has_all(
    moving: Sequence[Consumers], cluster: Cluster, sent: Mapping[Sent, Outcome]
) -> None:
    """Consume in one cluster until everything has come, or nothing more comes."""
    stored = stored_of(sent)
    for group in moving:
        await group.move(cluster)

    def came() -> bool:
        return all(stored <= group.counts.keys() for group in moving)

    try:
        await until(came, CONSUMED_S)
    except TimeoutError:
        return  # the judge names what is missing
