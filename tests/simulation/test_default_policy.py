"""A load that rises tenfold and falls again, on the default policy and in virtual time.

The whole broker runs, with all settings as they are: reports every 10 s, evaluations every 60 s,
limits of thousands of messages per second.  A SEND says that it has many messages; it has one,
which the checker follows to the consumers.
"""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from broker.scalable.auto_scale_policy import AutoScalePolicy, policy_of
from broker.scalable.history import ChangeKind, HistoryEntry
from config.settings import Settings
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.conftest import Report
from tests.simulation.actors import Producer
from tests.simulation.client import SimulatedClient
from tests.simulation.consumers import QueueConsumer, Receiver, StreamConsumer
from tests.simulation.history import Message
from tests.simulation.loop import Host
from tests.simulation.plan import Plan
from tests.simulation.world import PORT, START_MS, World
from tests.support.raw_client import Delivery, RawConsumer

LOW, HIGH = 4_500, 45_000
"""Messages per second."""
LIMIT = 10_000
"""Messages per second above which a segment is split."""
KEYS = 60
PERIOD_S = 10
"""Time between two SENDs of a key: that between two samples of the load."""
CALM_S, BUSY_S, FALLEN_S = 60, 240, 540
SAMPLE_S = 60


class LoadWorld(World):
    """One topic of one segment; `rate` messages/s come in."""

    def __init__(self, seed: int) -> None:
        plan = Plan(topics=1, queue_consumers=0, stream_consumers=0)
        super().__init__(seed, plan)
        self.settings = Settings(http_port=1, port=PORT)
        self.rate = LOW
        self.counts: list[tuple[int, int, int]] = []
        """Time in seconds, messages per second and active segments."""
        self.changes: Sequence[HistoryEntry] = ()

    async def _main(self) -> None:
        self.start_broker()
        await self._until_up()
        scalable, host = self.running.broker.scalable, self.running.host
        name = parse_topic_name(self.topics[0])
        await self.loop.spawn(host, scalable.create(name, segments=1, properties={}))
        await self._subscriptions(name)
        self.add(lambda name, host, rng: LoadSender(self, name, host, rng), "p0")
        self.add(lambda name, host, rng: OrderedReader(self, name, host, rng, self.topics[0]), "s0")
        self.add(lambda name, host, rng: QueueReader(self, name, host, rng, self.topics[0]), "q0")
        for actor in self.actors:
            self.loop.spawn(actor.host, actor.run(), actor.name)
        for self.rate, lasts_s in ((LOW, CALM_S), (HIGH, BUSY_S), (LOW, FALLEN_S)):
            for _ in range(0, lasts_s, SAMPLE_S):
                await asyncio.sleep(SAMPLE_S)
                record = await self.loop.spawn(host, scalable.get(name))
                active = len(record.layout.active)
                self.counts.append((round(self.loop.time()), self.rate, active))
        self.changes = await self.loop.spawn(host, scalable.history(name))
        await self._quieten()
        await self._drain()


class LoadSender(Producer):
    """Sends under one key after the other, evenly."""

    world: LoadWorld

    def __init__(self, world: LoadWorld, name: str, host: Host, rng: random.Random) -> None:
        super().__init__(world, name, host, rng, world.topics, burst=1, pause_s=PERIOD_S / KEYS)
        self._due_s = 0.0

    async def session(self, client: SimulatedClient) -> None:
        await self.open(client)
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s, loop.time())
        while not self.stopping and client.alive:
            await self._send_one(client)
            self._due_s += self.pause_s
            await asyncio.sleep(max(0.0, self._due_s - loop.time()))

    def new_message(self, **given: object) -> Message:
        self.sent += 1
        key = f"k{self.sent % KEYS}"
        return Message(f"{self.name}-{self.sent}", self.topics[0], key, self.name, self.sent, True)

    def _content(
        self, messages: Sequence[Message]
    ) -> tuple[pb.MessageMetadata, pb.CommandSend, bytes]:
        metadata, send, payload = super()._content(messages)
        send.num_messages = round(self.world.rate * self.pause_s)
        return metadata, send, payload


class Reader(Receiver):
    """Acknowledges all that it gets."""

    async def handle(
        self, client: SimulatedClient, consumer: RawConsumer, delivery: Delivery
    ) -> None:
        acks = self.acking(client.seen(consumer, delivery))
        await self.answered(acks, consumer.ack_answered(delivery.message_id))


class OrderedReader(Reader, StreamConsumer):
    """The ordered consumer."""


class QueueReader(Reader, QueueConsumer):
    """The consumer of the queue."""


@pytest.mark.long
def test_topic_grows_and_shrinks_with_the_default_policy(report: Report) -> None:
    world = LoadWorld(1)
    outcome = world.run()
    assert not outcome.violations, outcome.violations[:20]
    for each in world.counts:
        print("{} s: {} messages/s, {} segments".format(*each))
    for change in world.changes:
        print(f"{change.time_ms - START_MS} ms: {change.kind.value}. {change.cause}")
    assert [active for _, rate, active in world.counts if rate == LOW][-1] == 1
    most = max(active for _, _, active in world.counts)
    assert most * LIMIT >= HIGH
    check_cooldowns(world.changes, policy_of(world.settings))
    kinds = [each.kind.value for each in world.changes if each.cause]
    report(
        f"the default policy in virtual time: {LOW} to {HIGH} to {LOW} messages/s, 1 to {most} to "
        f"1 segments by {kinds.count('split')} splits and {kinds.count('merge')} merges"
    )


def check_cooldowns(changes: Sequence[HistoryEntry], policy: AutoScalePolicy) -> None:
    """Splits are a cooldown apart, and no merge undoes one within the windows."""
    splits = [each for each in changes if each.kind is ChangeKind.SPLIT]
    merges = [each for each in changes if each.kind is ChangeKind.MERGE]
    assert len(splits) > 1
    for before, after in pairwise(splits):
        assert after.time_ms - before.time_ms >= policy.split_cooldown_s * 1000
    for merge in merges:
        made_ms = [each.time_ms for each in splits if set(each.children) & set(merge.parents)]
        assert merge.time_ms - max(made_ms) >= policy.keep_split_s * 1000
