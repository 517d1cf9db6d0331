"""Another cluster is away for days of virtual time: what waits for it stays small, then arrives.

Two whole brokers run, each a cluster on stores of its own.  Messages come all the time; they expire
and are evicted, and the layout of the scalable topic changes.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import structlog

from broker.app.service import Broker
from broker.policies.cluster_data import ClusterData
from broker.replication.replicated_segment import ReplicatedSegment
from broker.replication.topic_replication import ReplicatedTopic
from config.bounds import REACH_RETRY_MAX_S
from config.settings import Settings
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import NamespaceName, SegmentName, parse_topic_name
from tests.simulation.broker_host import BrokerHost
from tests.simulation.disk import DiskFaults, TimedDisk
from tests.simulation.loop import SimulatedLoop
from tests.simulation.metadata import MetadataService
from tests.simulation.network import Network
from tests.simulation.world import VirtualClock
from tests.support.raw_client import RawClient
from tests.unit.broker.replication.conftest import FROM_THE_BEGINNING

T = TypeVar("T")

NAMESPACE = NamespaceName("public", "default")
ORDINARY = parse_topic_name("persistent://public/default/t")
SCALABLE = parse_topic_name("topic://public/default/s")
PORTS = {"east": 6651, "west": 6652}
HOUR_S, DAY_S = 3600, 86_400
DAYS_AWAY = 2
TTL_S = DAY_S // 2 + HOUR_S // 4
"""No message is as old when the west comes back."""
STEP_S = HOUR_S // 2
RESHAPED_EVERY = 16
"""Steps from one layout change to the next."""
PAYLOAD_BYTES = 2_000
KEPT_BYTES = 40_000
"""The quota evicts what is more than this, some hours of messages."""
EXPECTED = {
    "replicator_detached",
    "replicator_refused",
    "segment_replicator_refused",
    "backlog_evicted",
}
"""What is logged as a warning while the west is away."""


class Clusters:
    """East and west on one loop, and a client."""

    def __init__(self) -> None:
        self.loop = SimulatedLoop(random.Random(1))
        self.clock = VirtualClock(self.loop)
        self.network = Network(self.loop, random.Random(2))
        self.attempts: Counter[int] = Counter()
        """Connections that were tried, by port."""
        self.warnings: list[str] = []
        """The names of the events that were logged as warnings or errors."""
        self.published: list[bytes] = []
        self._stores = {
            name: MetadataService(self.loop, random.Random(name), self.clock) for name in PORTS
        }
        self._files: dict[str, dict[str, bytes]] = {name: {} for name in PORTS}
        self.hosts: dict[str, BrokerHost] = {}
        connect = self.network.connect

        async def counted(factory: Callable[[], asyncio.Protocol], port: int):  # type: ignore[no-untyped-def]
            self.attempts[port] += 1
            return await connect(factory, port)

        self.network.connect = counted  # type: ignore[method-assign]

    def log(self, _: object, level: str, event: MutableMapping[str, Any]) -> NoReturn:
        if level in ("warning", "error", "critical"):
            self.warnings.append(str(event["event"]))
        raise structlog.DropEvent

    async def start(self, name: str) -> None:
        """A process of a cluster, on what the last one stored."""
        host = self.loop.new_host(f"{name}-{len(self.hosts)}")
        disk = TimedDisk(self.loop, random.Random(name), DiskFaults(), self._files[name])
        settings = Settings(
            cluster_name=name,
            port=PORTS[name],
            http_port=1,
            ledger_max_entries=40,
            ledger_min_age_s=0,
            scalable_topic_auto_scale_enabled=False,
            idle_topic_unload_s=0,
            message_expiry_check_interval_s=HOUR_S // 6,
            backlog_quota_check_interval_s=HOUR_S,
            sealed_segment_prune_interval_s=HOUR_S,
            scalable_topic_load_report_interval_s=HOUR_S,
            transaction_gc_interval_s=HOUR_S,
        )
        made = BrokerHost(host, disk, self._stores[name].handle(host), settings, shared=False)
        self.hosts[name] = made
        await self.loop.spawn(host, made.run(self.clock, random.Random(name)))

    def kill(self, name: str) -> None:
        """End the process of a cluster."""
        made = self.hosts[name]
        self.loop.crash(made.host)
        self.network.crashed(made.host)
        self._stores[name].crashed(made.host)
        self._files[name] = made.disk.after_crash()

    def broker(self, name: str) -> Broker:
        return self.hosts[name].broker

    async def at(self, name: str, work: Awaitable[T]) -> T:
        """Do something in the process of a cluster."""

        async def run() -> T:
            return await work

        return await self.loop.spawn(self.hosts[name].host, run())

    async def set_up(self, name: str, other: str) -> None:
        """Let a cluster replicate to the other one."""
        broker = self.broker(name)
        data = ClusterData(broker_service_url=f"pulsar://{other}:{PORTS[other]}")
        await self.at(name, broker.clusters.create(other, data))
        both = sorted(PORTS)
        quota = {
            "limitSize": KEPT_BYTES,
            "limitTime": -1,
            "policy": "consumer_backlog_eviction",
        }

        def change(record: dict[str, object]) -> None:
            record["replication_clusters"] = both
            record["message_ttl_in_seconds"] = TTL_S
            record["retention_policies"] = {"retentionTimeInMinutes": 60, "retentionSizeInMB": 1}
            record["backlog_quota_map"] = {"destination_storage": quota}

        await self.at(name, broker.namespaces.change(NAMESPACE, change))

    # What happens

    async def publish(self) -> None:
        """One message to the ordinary topic, and one to each active segment."""
        segments = [SegmentName(SCALABLE, *each) for each in await self.active()]
        client = await RawClient.open("broker", PORTS["east"])
        payload = (b"%d " % len(self.published)).ljust(PAYLOAD_BYTES, b".")
        self.published.append(payload)
        for topic in (str(ORDINARY), *(str(each) for each in segments)):
            producer = await client.create_producer(topic)
            written = pb.MessageMetadata(publish_time=self.clock.now_ms())
            await producer.send(payload, metadata=written)
        await client.close()

    async def active(self) -> list[tuple[int, int, int]]:
        """The first and last hash, and the id, of the active segments of the east."""
        record = await self.at("east", self.broker("east").scalable.get(SCALABLE))
        return [(each.hash_start, each.hash_end, each.segment_id) for each in record.layout.active]

    async def reshape(self, number: int) -> None:
        """Split the first segment, or merge the first two."""
        scalable, ids = self.broker("east").scalable, [each[2] for each in await self.active()]
        if number % 2:
            await self.at("east", scalable.merge(SCALABLE, ids[:2]))
        else:
            await self.at("east", scalable.split(SCALABLE, ids[0]))

    def stored(self, name: str) -> dict[str, int]:
        """Entries of the loaded topics of a cluster."""
        loaded = self.broker(name).topics.loaded()
        return {each: topic.ledger.entry_count for each, topic in loaded.items()}

    def unsent(self) -> dict[str, int]:
        """Entries of the loaded topics of the east that the west does not have yet."""
        return {
            each: cursor.backlog
            for each, topic in self.broker("east").topics.loaded().items()
            for cursor in topic.replicator_cursors.values()
        }

    async def received(self, count: int) -> list[bytes]:
        """The first messages of the ordinary topic in the west."""
        client = await RawClient.open("broker", PORTS["west"])
        consumer = await client.subscribe(str(ORDINARY), "s", FROM_THE_BEGINNING, permits=1000)
        found = [(await consumer.receive()).payload for _ in range(count)]
        await client.close()
        return found


class Held(NamedTuple):
    """What a broker holds while the other cluster is away."""

    tasks: int
    timers: int
    replicators: int
    read_ahead_bytes: int
    """What replicators have read and cannot send."""


def held_by(clusters: Clusters) -> Held:
    """What the broker of the east holds now."""
    host, broker = clusters.hosts["east"].host, clusters.broker("east")
    replicators = [
        each
        for topic in broker.topics.loaded().values()
        if isinstance(topic.replication, ReplicatedTopic | ReplicatedSegment)
        for each in topic.replication.replicators.values()
    ]
    return Held(
        tasks=sum(not each.done() for each in host.tasks),
        timers=clusters.loop.timers_of(host),
        replicators=len(replicators),
        read_ahead_bytes=broker.replications.cluster("west").read_ahead.held_bytes,
    )


@contextlib.contextmanager
def logged_by(clusters: Clusters) -> Iterator[None]:
    """Keep the names of warnings, and drop all else."""
    saved = structlog.get_config()
    structlog.configure(
        processors=[clusters.log],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**saved)


async def replicate(clusters: Clusters) -> None:
    """Have both topics in both clusters, with a message that has arrived."""
    for name in PORTS:
        await clusters.start(name)
    for name in PORTS:
        broker = clusters.broker(name)
        await clusters.at(name, broker.scalable.create(SCALABLE, segments=2, properties={}))
    await clusters.set_up("east", "west")
    await clusters.set_up("west", "east")
    await clusters.publish()
    await until(lambda: is_done(clusters), clusters)


async def stay_away(clusters: Clusters) -> list[Held]:
    """Let the west be away, and return what the east held in the end of each half day."""
    clusters.kill("west")
    clusters.warnings.clear()
    clusters.attempts.clear()
    samples = []
    for step in range(1, int(DAYS_AWAY * DAY_S / STEP_S) + 1):
        await asyncio.sleep(STEP_S)
        await clusters.publish()
        if step % RESHAPED_EVERY == 0:
            await clusters.reshape(step // RESHAPED_EVERY - 1)
        if step * STEP_S % (DAY_S / 2) == 0:
            samples.append(held_by(clusters))
    return samples


async def days_away(clusters: Clusters) -> None:
    await replicate(clusters)
    arrived = clusters.stored("west")
    samples = await stay_away(clusters)
    assert max(each.tasks for each in samples) <= 60, samples
    assert max(each.timers for each in samples) <= 60, samples
    assert max(each.replicators for each in samples) <= 12, samples
    assert all(each.read_ahead_bytes == 0 for each in samples), samples
    # One attempt reaches for all topics, and again and again.
    away_s = DAYS_AWAY * DAY_S
    assert away_s / 60 < clusters.attempts[PORTS["west"]] < 1.2 * away_s / REACH_RETRY_MAX_S
    # Each replicator says once why it stands, not at each attempt.
    logged = Counter(clusters.warnings)
    assert logged.keys() == EXPECTED, logged
    assert logged.total() < 100, logged
    unsent = clusters.unsent()
    count = unsent[str(ORDINARY)]
    assert 10 < count <= KEPT_BYTES / PAYLOAD_BYTES
    await clusters.start("west")
    await until(lambda: is_done(clusters), clusters)
    stored = clusters.stored("west")
    assert stored.keys() == arrived.keys()
    assert sum(stored.values()) == sum(arrived.values()) + sum(unsent.values())
    assert await clusters.received(1 + count) == [
        clusters.published[0],
        *clusters.published[-count:],
    ]


def is_done(clusters: Clusters) -> bool:
    """Whether the west has all that it is to get."""
    unsent = clusters.unsent()
    return len(unsent) > 2 and not any(unsent.values())


async def until(condition: Callable[[], bool], clusters: Clusters) -> None:
    deadline = clusters.loop.time() + 600
    while not condition():
        assert clusters.loop.time() < deadline
        await asyncio.sleep(1)


def test_what_waits_for_a_cluster_that_is_away_for_days_stays_small() -> None:
    clusters = Clusters()
    with logged_by(clusters), contextlib.closing(clusters.loop):
        main = clusters.loop.spawn(clusters.loop.world, days_away(clusters), "main")
        try:
            clusters.loop.run_until_complete(main)
        finally:
            clusters.loop.bury()
