"""A run: one broker after another over stores that last, clients, faults, and the judgement.

1. Set up, without faults: topics and their subscriptions.
2. Chaos, for as long as the plan says.
3. Quiet: faults off, the broker up, no new messages; consumers take what is left.
4. A last crash and restart: what was acknowledged stays so.
5. Collection: time goes by until ended transactions have been forgotten.
6. The checker judges the history.
"""

import asyncio
import contextlib
import gc
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import structlog

from broker.app.service import Broker
from config.settings import Settings
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import TopicDomain, TopicName, decode_name, parse_topic_name
from magnetar.protocol.server_error import MagnetarError
from tests.simulation.actors import (
    COMMITTER,
    MIGRATED,
    PLAIN,
    QUEUE,
    SEEKER,
    STREAM,
    Actor,
    NamedProducer,
    Producer,
    Sender,
)
from tests.simulation.broker_host import BrokerHost
from tests.simulation.bucket_producers import BucketProducer, UnstampedProducer
from tests.simulation.checker import Checker
from tests.simulation.consumers import (
    Committer,
    PlainConsumer,
    QueueConsumer,
    Rereader,
    Seeker,
    StreamConsumer,
)
from tests.simulation.deleter import Deleter
from tests.simulation.disk import DiskFaults, TimedDisk
from tests.simulation.group_driver import GroupDriver
from tests.simulation.headers import watch_headers
from tests.simulation.history import History
from tests.simulation.injection import ASSERTING, Parts, injected
from tests.simulation.key_worker import KeyWorker
from tests.simulation.loop import Host, SimulatedLoop, Stuck
from tests.simulation.metadata import MetadataFaults, MetadataService
from tests.simulation.network import Network, NetworkFaults
from tests.simulation.plan import Plan, plan_of
from tests.simulation.programs import CountingProgram, RestartedProgram
from tests.simulation.sharing_consumers import SharingConsumer, TransientConsumer
from tests.simulation.transactor import COORDINATORS, Transactor
from tests.simulation.v4_transactor import V4Transactor
from tests.simulation.work_probe import WorkProbe
from txn import records

T = TypeVar("T")

START_MS = 1_700_000_000_000
PORT = 6650
OWNERS = records.owner_key("")
SOUGHT = f"{PLAIN}public/default/sought"
COMMITTED_TOPIC = f"{PLAIN}public/default/committed"
HELD = "held"
"""A subscription which acknowledges nothing, so that what is sought is still there."""
COLLECTED_S = 200.0
"""Virtual time after which nothing of an ended transaction may be left."""
LEAST_REIGN_S = 1.0
"""For so long a broker is not replaced because of what it asks for."""
SETTLE_S = 200.0
"""Virtual time after which what is not delivered never will be."""
UP_S = 600.0
"""The longest that a broker may take to come up, those that crash as they start included."""


class VirtualClock:
    """Wall-clock time of the run."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def now_ms(self) -> int:
        return START_MS + int(self._loop.time() * 1000)


@dataclass
class Outcome:
    """What came of a run."""

    seed: int
    profile: str
    violations: list[str]
    digest: int
    seconds: float
    steps: int
    messages: int
    deliveries: int
    crashes: int
    transactions: int


def _settings_of(plan: Plan) -> Settings:
    """The settings of the brokers of a run."""
    return Settings(
        http_port=1,
        port=PORT,
        ledger_max_entries=plan.ledger_entries,
        ledger_min_age_s=0,
        cursor_flush_ms=100,
        idle_topic_unload_s=5,
        sealed_segment_prune_interval_s=7,
        scalable_consumer_grace_period_s=3,
        scalable_topic_entry_bucket_budget=plan.entry_buckets,
        scalable_topic_rebucket_cooldown_s=1,
        scalable_topic_auto_scale_enabled=plan.auto_scale,
        scalable_topic_auto_scale_interval_s=1,
        scalable_topic_load_report_interval_s=1,
        scalable_topic_max_segments=8,
        scalable_topic_split_cooldown_s=1,
        scalable_topic_merge_cooldown_s=1,
        scalable_topic_merge_window_s=2,
        scalable_topic_split_msg_rate_in_threshold=12,
        scalable_topic_merge_msg_rate_in_threshold=5,
        transaction_coordinators=COORDINATORS,
        transaction_gc_interval_s=plan.collect_every_s,
        transaction_gc_retention_s=plan.retention_s,
        deduplication=plan.deduplication,
    )


class World:
    """See the module's docstring."""

    def __init__(
        self, seed: int, plan: Plan, parts: Parts = ASSERTING, *, shared: bool = False
    ) -> None:
        """`parts` of the broker are replaced while it runs; `shared`: so are their stores."""
        self.shared = shared
        self.parts = parts
        self.seed = seed
        self.plan = plan
        self.rng = random.Random(f"world {seed}")
        self.loop = SimulatedLoop(random.Random(f"loop {seed}"))
        self.clock = VirtualClock(self.loop)
        self.history = History(self.loop.time)
        self.network = Network(self.loop, random.Random(f"network {seed}"))
        self.metadata = MetadataService(self.loop, random.Random(f"metadata {seed}"), self.clock)
        self.disk_rng = random.Random(f"disk {seed}")
        self.disk_faults = DiskFaults()
        local = MIGRATED if plan.migrated else "/t"
        self.topics = [f"topic://public/default{local}{n}" for n in range(plan.topics)]
        self.plain_topics = [f"{PLAIN}public/default/p{n}" for n in range(plan.plain_topics)]
        self.sought_topics = [SOUGHT][: plan.seekers]
        self.committed_topics = [COMMITTED_TOPIC][: plan.committers]
        kinds = pb.CommandSubscribe
        self.queue_kind = kinds.Key_Shared if plan.key_shared else kinds.Shared
        self.actors: list[Actor] = []
        self.draining = False
        self.restarts = True
        """Whether a broker that crashed is followed by another one."""
        self.crashes = 0
        self.port = PORT
        self.running: BrokerHost
        self.replaced: list[BrokerHost] = []
        self._files: dict[str, bytes] = {}
        self._incarnation = 0
        self._replaced_at = 0.0
        self._quiet = plan.migrated  # until all is set up, which makes what brokers die on
        self.settings = _settings_of(plan)
        self.checker = Checker(
            self.history,
            {
                **{topic: [QUEUE, STREAM] for topic in self.topics + self.plain_topics},
                **{topic: [SEEKER] for topic in self.sought_topics},
                **{topic: [COMMITTER] for topic in self.committed_topics},
            },
            ordered=[STREAM, QUEUE] if plan.key_shared else [STREAM],
        )
        self.loop.set_exception_handler(self._unhandled)
        self._watch_metadata()

    def _watch_metadata(self) -> None:
        self.metadata.asked = self._asked
        self.metadata.stored = self._stored
        watch_headers(self.metadata.store, self.history)

    # Brokers

    def start_broker(self) -> BrokerHost:
        """A new process on the disk as the last one left it."""
        self._incarnation += 1
        host = self.loop.new_host(f"broker-{self._incarnation}")
        disk = TimedDisk(self.loop, self.disk_rng, self.disk_faults, self._files)
        handle = self.metadata.handle(host)
        made = BrokerHost(host, disk, handle, self.settings, shared=self.shared)
        host.on_crash = lambda: self.crash(made)
        self.running = made
        self.history.note(host.name, "starts")
        rng = random.Random(f"broker {self.seed} {self._incarnation}")
        self.loop.spawn(host, self._run_broker(made, rng), f"{host.name} main")
        return made

    async def _run_broker(self, made: BrokerHost, rng: random.Random) -> None:
        try:
            await made.run(self.clock, rng)
        except MagnetarError as error:
            self.history.note(made.host.name, f"cannot start: {error}")
            made.host.crash_at_step = made.host.steps + 1
        else:
            self.history.note(made.host.name, "serves")

    def take_over(self) -> BrokerHost:
        """A new process gets the disk; the one before it goes on, and cannot write to it."""
        before = self.running
        before.disk.fenced = True
        before.host.replaced_at = self.loop.time()
        self._files = before.disk.survivors("durable")
        self.history.note(before.host.name, "is replaced")
        self.replaced.append(before)
        return self.start_broker()

    def crash(self, broker: BrokerHost) -> None:
        """The process is gone, here and now; another one follows."""
        if broker.host.dead:
            return
        self.crashes += 1
        self.history.note(broker.host.name, "crashes")
        self.loop.crash(broker.host)
        self.network.crashed(broker.host)
        self.metadata.crashed(broker.host)
        if broker is not self.running:
            return
        self._files = broker.disk.after_crash()
        if not self.restarts:
            return
        later = self.rng.choice((0.01, self.rng.uniform(0.05, 4)))
        self.loop.call_later(later, self.start_broker, context=self.loop.world.context.copy())

    # The run

    def run(self) -> Outcome:
        """All of it.  What is wrong is in the outcome."""
        with injected(self.parts), _determined(self), contextlib.closing(self.loop):
            main = self.loop.spawn(self.loop.world, self._main(), "main")
            try:
                self.loop.run_until_complete(main)
            except Stuck as error:
                self.history.violated(str(error))
            return self._outcome()

    def _outcome(self) -> Outcome:
        history = self.history
        return Outcome(
            seed=self.seed,
            profile=self.plan.profile,
            violations=self.checker.violations(),
            digest=self.loop.digest,
            seconds=self.loop.time(),
            steps=self.loop.steps,
            messages=len(history.messages),
            deliveries=len(history.deliveries),
            crashes=self.crashes,
            transactions=len(history.headers),
        )

    async def _main(self) -> None:
        await self._set_up()
        self._faults_on()
        tasks = [
            asyncio.create_task(self._every(self.plan.crash_every_s, self._crash_soon)),
            asyncio.create_task(self._every(self.plan.break_every_s, self._break_something)),
            asyncio.create_task(self._every(self.plan.stall_every_s, self._stall_something)),
            asyncio.create_task(self._every(self.plan.reshape_every_s, self._reshape)),
            asyncio.create_task(self._every(self.plan.replace_every_s, self._replace)),
            asyncio.create_task(self._every(self.plan.pause_every_s, self._pause_a_client)),
        ]
        for actor in self.actors:
            self.loop.spawn(actor.host, actor.run(), actor.name)
        await asyncio.sleep(self.plan.seconds)
        for task in tasks:
            task.cancel()
        if self._violated():
            return
        await self._quieten()
        await self._drain()
        await self._probe()
        if self._violated():
            return
        if self.plan.restarted:
            self.crash(self.running)
            await self._until_up()
            await asyncio.sleep(10)
        await self._collect()

    def _violated(self) -> bool:
        """Whether it is too late for anything to make it good: then nobody needs the rest."""
        return bool(self.checker.shown() or self.history.violations)

    async def _set_up(self) -> None:
        self.start_broker()
        await self._until_up()
        scalable = self.running.broker.scalable
        host = self.running.host
        for topic in self.topics:
            name = parse_topic_name(topic)
            if self.plan.migrated:
                await self._ordinary(name.in_domain(TopicDomain.PERSISTENT))
                continue
            segments = self.rng.choice((1, 1, 2, 4))
            await self.loop.spawn(host, scalable.create(name, segments=segments, properties={}))
            await self._subscriptions(name)
        for topic in self.plain_topics:
            await self._plain(topic, [QUEUE, STREAM])
        for topic in self.sought_topics:
            await self._plain(topic, [SEEKER, HELD])
        for topic in self.committed_topics:
            await self._plain(topic, [COMMITTER])
        self._make_actors()

    async def _ordinary(self, name: TopicName) -> None:
        """A topic that is migrated later."""
        count = self.rng.choice((0, 0, 2, 3))
        if count == 0:
            await self._plain(str(name), [QUEUE, STREAM])
        else:
            await self._partitioned(name, count)

    async def _partitioned(self, name: TopicName, count: int) -> None:
        topics, host = self.running.broker.topics, self.running.host
        await self.loop.spawn(host, topics.partitioned.create(name, count))
        partitions = [name.partition(index) for index in range(count)]
        self.history.partitions[str(name.in_domain(TopicDomain.TOPIC))] = [*map(str, partitions)]
        for partition in partitions:
            made = await self.loop.spawn(host, topics.get(partition, create=True))
            for subscription in (QUEUE, STREAM):
                await self.loop.spawn(host, made.create_subscription(subscription, EARLIEST))

    async def _plain(self, topic: str, subscriptions: list[str]) -> None:
        host, topics = self.running.host, self.running.broker.topics
        made = await self.loop.spawn(host, topics.create(parse_topic_name(topic)))
        for name in subscriptions:
            await self.loop.spawn(host, made.create_subscription(name, EARLIEST))

    async def _subscriptions(self, name: TopicName) -> None:
        scalable = self.running.broker.scalable
        for subscription, kind in ((QUEUE, "QUEUE"), (STREAM, "STREAM")):
            work = scalable.create_subscription(name, subscription, kind=kind, start=EARLIEST)
            await self.loop.spawn(self.running.host, work)

    def _make_actors(self) -> None:
        plan = self.plan
        topics = self.topics + self.plain_topics + self.sought_topics + self.committed_topics
        for number in range(plan.producers + plan.burst_producers):
            burst = 1 if number < plan.producers else 8
            self.add(
                lambda name, host, rng, burst=burst: Producer(  # type: ignore[misc]
                    self, name, host, rng, topics, burst=burst, pause_s=plan.pause_s * burst
                ),
                f"p{number}",
            )
        self._add_many("x", plan.transactors, Transactor, topics)
        self._add_many("v", plan.v4_transactors, V4Transactor, topics[len(self.topics) :])
        self._add_many("w", plan.key_workers, KeyWorker, topics)
        self._add_many("g", plan.group_drivers, GroupDriver, topics)
        self._add_many("r", plan.readers, Rereader, self.topics)
        self._add_many("n", plan.named_producers, NamedProducer, topics)
        self._add_many("a", plan.restarted_programs, RestartedProgram, self.topics)
        self._add_many("i", plan.counting_programs, CountingProgram, self.topics)
        self._add_many("d", plan.deleters, Deleter, topics)
        self._add_many("b", plan.bucket_producers, BucketProducer, self.topics)
        self._add_many("u", plan.unstamped_producers, UnstampedProducer, self.topics)
        ordered: list[tuple[str, Callable[..., Actor]]] = [
            *((topic, StreamConsumer) for topic in self.topics),
            *((topic, PlainConsumer) for topic in self.plain_topics),
        ]
        for number, (topic, kind) in enumerate(ordered):
            for name, count, make in (
                ("q", plan.queue_consumers, QueueConsumer),
                ("s", plan.stream_consumers, kind),
            ):
                self._add_many(f"{name}{number}", count, make, topic)
        for topic in self.topics:
            self._add_many("s", plan.sharing_consumers, SharingConsumer, topic)
            self._add_many("o", plan.lone_consumers, TransientConsumer, topic)
        for topic in self.sought_topics:
            self._add_many("k", 1, Seeker, topic)
        for topic in self.committed_topics:
            self._add_many("c", plan.committers, Committer, topic)

    def _add_many(
        self,
        called: str,
        count: int,
        make: Callable[["World", str, Host, random.Random, T], Actor],
        of: T,
    ) -> None:
        for number in range(count):
            self.add(lambda name, host, rng: make(self, name, host, rng, of), f"{called}{number}")

    def add(self, make: Callable[[str, Host, random.Random], Actor], name: str) -> Actor:
        actor = make(name, self.loop.new_host(name), random.Random(f"{name} {self.seed}"))
        self.actors.append(actor)
        return actor

    async def _until_up(self) -> None:
        end = self.loop.time() + UP_S
        while not self.running.alive:
            assert self.loop.time() < end, f"{self.running.host.name} has not come up in {UP_S} s"
            await asyncio.sleep(0.05)

    async def _quieten(self) -> None:
        """No faults, no new messages, everybody awake."""
        self._quiet = True
        self.history.note("world", "quiet now")
        self.network.faults = NetworkFaults()
        self.metadata.faults = MetadataFaults()
        self.disk_faults.stall = self.disk_faults.failure = 0.0
        for broker in self.replaced:
            self.crash(broker)
        for actor in self.actors:
            self.loop.resume(actor.host)
            if isinstance(actor, Sender):
                actor.stopping = True
            if isinstance(actor, TransientConsumer):
                actor.stays = True
        self.running.host.crash_at_step = -1
        await asyncio.sleep(60)
        await self._until_up()
        if self.plan.migrated:
            for topic in self.topics:
                work = self._migrate(self.running.broker, parse_topic_name(topic))
                await self.loop.spawn(self.running.host, work)
        self.draining = True

    async def _drain(self) -> None:
        """Until everything has come out, or never will."""
        give_up = self.loop.time() + SETTLE_S
        while self.loop.time() < give_up:
            if self._violated():
                return
            await asyncio.sleep(1)
            if self.checker.settled() and not self._backlogs():
                self.history.note("world", "drained")
                await asyncio.sleep(2)
                return
        for backlog in self._backlogs():
            self.history.violated(f"backlog: {backlog} when everything should be acknowledged")

    async def _probe(self) -> None:
        """Show that each ordered consumer that should have work has some."""
        for topic in self.topics if self.plan.sharing_consumers else ():
            probe = WorkProbe(self, topic)
            await self.loop.spawn(probe.host, probe.run())
            await self._drain()

    def _backlogs(self) -> list[str]:
        return [
            f"{name} {subscription} has {found.cursor.backlog}"
            for name, topic in self.running.broker.topics.loaded().items()
            for subscription, found in topic.subscriptions.items()
            if found.cursor.backlog and subscription in (QUEUE, STREAM, SEEKER, COMMITTER)
        ]

    async def _collect(self) -> None:
        """Nothing of ended transactions may stay for ever."""
        if not self.history.headers:
            return
        await asyncio.sleep(COLLECTED_S)
        tables = self.metadata.store._tables
        for level in (records.HEADERS, records.OPERATIONS):
            for key in sorted(tables._records):
                if key.startswith(level):
                    self.history.violated(f"left behind: {key}")

    # Faults

    def _faults_on(self) -> None:
        self._quiet = False
        self.network.faults = self.plan.network
        self.metadata.faults = self.plan.metadata
        self.disk_faults.__dict__.update(self.plan.disk.__dict__)

    async def _every(self, mean_s: float, fault: Callable[[], None]) -> None:
        while mean_s:
            await asyncio.sleep(self.rng.expovariate(1 / mean_s))
            fault()

    def _crash_soon(self) -> None:
        host = self.running.host
        host.crash_at_step = host.steps + self.rng.randrange(1, 400)

    def _stored(self, host: Host, key: str) -> None:
        if key.startswith(OWNERS):
            self.history.owned(decode_name(key.removeprefix(OWNERS)), host.name)

    def _asked(self, host: Host, kind: str, key: str) -> None:
        """A request for metadata: one of those on which brokers die, or are replaced?"""
        plan, running = self.plan, self.running.host
        if host is not running or self._quiet or not self.running.alive or not self.actors:
            return  # without actors the topics are still being made
        if _meant(plan.crash_at, kind, key) and self.rng.random() < plan.crash_at_share:
            running.crash_at_step = running.steps + self.rng.randrange(1, 60)
        rested = self.loop.time() >= self._replaced_at + LEAST_REIGN_S
        meant = rested and _meant(plan.replace_at, kind, key)
        if meant and self.rng.random() < plan.replace_at_share:
            self._replaced_at = self.loop.time()
            self.loop.world.context.copy().run(self._replace)

    def _replace(self) -> None:
        if not self.running.alive:
            return
        before = self.running
        staying = tuple(self.plan.staying)
        for transport in self.network.connections_of(before.host):
            leaves = staying and not transport.peer.host.name.startswith(staying)
            if self.rng.random() < self.plan.cut_off or leaves:
                self.network.break_connection(transport)
        if self.rng.random() < (0.2 if self.plan.replace_at else 0.5):
            self.loop.pause(before.host)
            self.loop.call_later(self.rng.uniform(0, 10), self.loop.resume, before.host)
        self.take_over()
        self.loop.call_later(self.rng.uniform(0.5, self.plan.beside_s), self.crash, before)

    def _break_something(self) -> None:
        transports = list(self.network.transports.values())
        if transports:
            chosen = self.rng.choice(transports)
            self.history.note("network", f"breaks the connection of {chosen.host.name}")
            self.network.break_connection(chosen)

    def _stall_something(self) -> None:
        transports = list(self.network.transports.values())
        if transports:
            seconds = self.rng.choice((0.2, 2.0, 30.0))
            self.network.stall(self.rng.choice(transports), seconds)

    def _pause_a_client(self) -> None:
        host = self.rng.choice(self.actors).host
        seconds = self.rng.choice((0.5, 3.0, 12.0))
        self.history.note(host.name, f"stands still for {seconds} s")
        self.loop.pause(host)
        self.loop.call_later(seconds, self.loop.resume, host)

    def _reshape(self) -> None:
        if self.running.alive:
            name = parse_topic_name(self.rng.choice(self.topics))
            self.loop.spawn(self.running.host, self._split_or_merge(self.running.broker, name))

    async def _split_or_merge(self, broker: Broker, name: TopicName) -> None:
        try:
            if self.plan.migrated and not await broker.scalable.exists(name):
                await self._migrate(broker, name)
                return
            record = await broker.scalable.get(name)
            active = [each.segment_id for each in record.layout.active]
            if self.plan.rebuckets and self.rng.random() < 0.4:
                chosen, count = self.rng.choice(active), self.rng.choice((1, 2, 4, 8))
                self.history.note("world", f"rebucket {chosen} to {count}")
                await broker.scalable.rebucket(name, [chosen], count)
                return
            if len(active) > 1 and self.rng.random() < 0.5:
                first = self.rng.randrange(len(active) - 1)
                self.history.note("world", f"merge {active[first]} {active[first + 1]}")
                await broker.scalable.merge(name, active[first : first + 2])
            elif len(active) < 8:
                chosen = self.rng.choice(active)
                self.history.note("world", f"split {chosen}")
                await broker.scalable.split(name, chosen)
        except MagnetarError as error:
            self.history.note("world", f"no reshape: {error}")

    async def _migrate(self, broker: Broker, name: TopicName) -> None:
        """Make an ordinary topic scalable, unless it is so."""
        self.history.note("world", f"migrate {name}")
        try:
            await broker.scalable.migrate(name, force=True)
        except MagnetarError as error:
            self.history.note("world", f"no migration: {error}")

    # What must not happen anywhere

    def _unhandled(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, Stuck):
            raise error
        self.history.violated(f"unhandled: {context.get('message')}: {error!r}")

    def logged(self, logger: object, level: str, event: MutableMapping[str, Any]) -> NoReturn:
        """Every line that the broker logs."""
        error = event.get("exc_info")
        error = sys.exc_info()[1] if error is True else error
        text = " ".join(f"{key}={value}" for key, value in event.items())
        self.history.note("log", f"{level} {text}")
        if error is not None and not isinstance(error, MagnetarError):
            self.history.violated(f"logged: {text}")
        raise structlog.DropEvent


@contextlib.contextmanager
def _determined(world: World) -> Iterator[None]:
    """Logs to the world, no garbage collection in between, quiet destruction afterwards."""
    saved, hook = structlog.get_config(), sys.unraisablehook
    level = logging.DEBUG if world.history.keep_lines else logging.WARNING
    structlog.configure(
        processors=[world.logged],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = lambda unraisable: None
        structlog.configure(processors=[_drop])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            world.loop.bury()
            gc.collect()
        sys.unraisablehook = hook
        structlog.configure(**saved)
        if collecting:
            gc.enable()


def _meant(request: str, kind: str, key: str) -> bool:
    """Whether a request is one of those that a plan describes: "kind part-of-key"."""
    on, _, part = request.partition(" ")
    return kind == on and part in key


def _drop(logger: object, level: str, event: object) -> NoReturn:
    raise structlog.DropEvent


def simulate(
    seed: int,
    *,
    transactions: bool = True,
    profile: str | None = None,
    late: bool = False,
    trace: Callable[[str], None] | None = None,
    parts: Parts = ASSERTING,
) -> Outcome:
    """One run of a seed.

    `profile` of the plan, else by luck.  `late`: requests of dead brokers still arrive, as at a
    metadata service over a network.
    """
    plan = plan_of(seed, transactions=transactions, profile=profile)
    plan.metadata.late = late
    world = World(seed, plan, parts, shared=plan.replace_every_s > 0)
    if trace is not None:
        world.history.keep_lines = True
        world.history.on_line = trace
    return world.run()
