"""What a run does: drawn from its seed, so that runs differ in kind and not only in timing.

Each fault is left out of about half of the runs: a run in which everything fails at once hardly
gets anywhere, and some faults hide others.  A profile changes what luck drew, so that one kind of
trouble comes often.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.disk import DiskFaults
from tests.simulation.metadata import MetadataFaults
from tests.simulation.network import NetworkFaults

PROTOCOL = ("/txn/op/", "/txn/id/", "/txn/segment-state/", "idx:writes-", "idx:acks-")
"""Keys and indexes through which owners of segments hear of each other."""


@dataclass
class Plan:
    """See the module's docstring.  Times in virtual seconds."""

    profile: str = "general"
    seconds: float = 20.0
    topics: int = 1
    producers: int = 2
    burst_producers: int = 1
    queue_consumers: int = 2
    stream_consumers: int = 1
    transactors: int = 0
    v4_transactors: int = 0
    """Those of a version before 5, on plain topics only."""
    key_workers: int = 0
    """Clients that share a transaction key, and fence each other."""
    group_drivers: int = 0
    """Drivers of one job, each of which fences the others."""
    bucket_producers: int = 0
    """Producers whose batches are each of one entry bucket, and stamped with its hashes."""
    unstamped_producers: int = 0
    """Producers whose batches have messages of several entry buckets."""
    unstamped_pause_s: float = 0.0
    """Mean time between two rounds of such a producer."""
    sharing_consumers: int = 0
    """Ordered consumers that share segments, and come and go."""
    lone_consumers: int = 0
    """Ordered consumers that cannot share segments, and come and go."""
    leave_every_s: float = 0.0
    """Mean time for which a sharing or lone consumer stays; 0: until the end."""
    held: float = 0.0
    """Share of the deliveries from shared segments that are acknowledged in transactions."""
    entry_buckets: int = 4
    """Entry buckets of all segments of a new topic together."""
    rebuckets: bool = False
    """Whether changes of the layout include rebuckets."""
    pause_s: float = 0.05
    crash_every_s: float = 0.0
    """Mean time between crashes of the broker; 0: none."""
    break_every_s: float = 0.0
    stall_every_s: float = 0.0
    reshape_every_s: float = 0.0
    auto_scale: bool = False
    """Topics are split and merged by their load, with limits and cooldowns that fit a run."""
    replace_every_s: float = 0.0
    """Takeovers: the broker goes on for a while, beside its successor."""
    pause_every_s: float = 0.0
    """Clients that stand still and go on (zombies)."""
    readers: int = 0
    """Clients that read everything from its start, again and again, while all this goes on."""
    work_s: float = 0.005
    """The mean time for which consumers work on a message."""
    batches: float = 0.0
    """How likely one more message joins a batch."""
    negative: float = 0.0
    """Of deliveries that are not acknowledged, how many are asked for again."""
    cumulative: float = 0.0
    """Of ordered deliveries, how many are acknowledged up to there, half in transactions."""
    plain_topics: int = 0
    """Topics without segments (`persistent://`), in the same transactions."""
    migrated: bool = False
    """Whether scalable topics begin as ordinary ones, partitioned or not."""
    key_shared: bool = False
    """Consumers of queues keep keys together."""
    other_connection: float = 0.0
    """Of ends, how many come over a connection of their own."""
    restarted_programs: int = 0
    """Programs that send again under ids of their own, over layout changes: never stored twice."""
    counting_programs: int = 0
    """Programs that begin at the same id on every segment: nothing of theirs is dropped."""
    named_producers: int = 0
    """Producers that send again what was not receipted, under their name: never stored twice."""
    committers: int = 0
    """Ordered consumers that commit their progress in transactions, cumulatively."""
    seekers: int = 0
    """Consumers that go back, and acknowledge in transactions."""
    deleters: int = 0
    """Clients whose transactions touch what is deleted before they end."""
    late_queues: bool = False
    """Consumers of queues come when all is quiet: until then transactions acknowledge alone."""
    most_sends: int = 4
    """Of one transaction."""
    aborted: float = 0.3
    """Of transactions, how many their client wants to abort."""
    hasty: float = 0.0
    """Of those, how many are aborted while their sends are under way."""
    resumed: float = 0.0
    """Of transactions whose connection was lost, how many their client goes on with on the next."""
    crash_at: str = ""
    """A request for metadata, by kind and part of the key: the broker dies on it, or soon after."""
    crash_at_share: float = 0.0
    replace_at: str = ""
    replace_at_share: float = 0.0
    """The same, but the broker is replaced, and goes on with what it was about to do."""
    cut_off: float = 0.0
    """Of the connections of a broker that is replaced, how many break."""
    staying: str = ""
    """If any: with what the names of those clients begin; all other connections break."""
    beside_s: float = 20.0
    """For so long, at most, a broker that was replaced goes on."""
    restarted: bool = True
    """Whether a broker that loads everything anew comes last: a load takes up what is left."""
    ledger_entries: int = 60
    retention_s: int = 30
    """Of ended transactions."""
    collect_every_s: int = 20
    network: NetworkFaults = field(default_factory=NetworkFaults)
    disk: DiskFaults = field(default_factory=DiskFaults)
    metadata: MetadataFaults = field(default_factory=MetadataFaults)

    @property
    def deduplication(self) -> bool:
        """Whether the broker compares sequence ids."""
        return self.named_producers + self.restarted_programs + self.counting_programs > 0


def _general(plan: Plan, rng: random.Random) -> None:
    """As luck drew it."""


def _joins(plan: Plan, rng: random.Random) -> None:
    """Brokers die while transactions join; what joins late finds its transaction collected."""
    plan.crash_at, plan.crash_at_share = "put /w:", rng.uniform(0.05, 0.3)
    plan.metadata.slow = rng.uniform(0.01, 0.1)
    plan.retention_s = plan.collect_every_s = 1


def _aborts(plan: Plan, rng: random.Random) -> None:
    """Aborts overtake what they abort; ledgers are short, and read to their end."""
    plan.aborted, plan.hasty = 0.7, 0.8
    plan.ledger_entries = rng.choice((2, 3, 5))
    plan.disk.sync = (0.01, rng.uniform(0.05, 0.5))
    plan.crash_every_s = rng.uniform(2, 5)
    plan.retention_s = plan.collect_every_s = 2
    plan.burst_producers = 0
    plan.pause_s = 0.3


def _cleaning(plan: Plan, rng: random.Random) -> None:
    """Brokers die while they clean up after an end."""
    plan.aborted = 0.7
    plan.crash_at = rng.choice(("delete /w:", "put /aborted/", "delete /a:"))
    plan.crash_at_share = rng.uniform(0.05, 0.3)
    plan.metadata.slow = rng.uniform(0.01, 0.1)


def _takeovers(plan: Plan, rng: random.Random) -> None:
    """Brokers are replaced again and again, and go on beside their successors."""
    plan.crash_every_s = 0.0
    plan.cut_off = 0.5
    plan.aborted = 0.5
    plan.pause_s = rng.choice((0.1, 0.4))
    plan.burst_producers = 0
    plan.retention_s = plan.collect_every_s = rng.choice((3, 20))
    plan.replace_every_s = rng.uniform(1.5, 4)
    plan.metadata.slow = rng.uniform(0.02, 0.15)


def _handover(plan: Plan, rng: random.Random, at: str, share: float, scan: str) -> None:
    """A broker is replaced when it asks for `at`, which arrives while its successor loads."""
    _takeovers(plan, rng)
    plan.replace_every_s = 10.0
    plan.queue_consumers = 1
    plan.metadata.slow = plan.metadata.stale_slow = 0.7
    plan.metadata.slow_keys = (scan,) if scan else ()
    plan.replace_at, plan.replace_at_share = at, share


def _aborts_handed_over(plan: Plan, rng: random.Random) -> None:
    """Two owners clean up after the same abort."""
    _handover(plan, rng, "put /txn/id/", 0.2, "idx:writes-by-segment segment")
    plan.metadata.stale_slow_keys = ("/aborted/",)
    plan.aborted, plan.cut_off = 0.8, 0.9


def _commits_handed_over(plan: Plan, rng: random.Random) -> None:
    """Two owners write the same cursor: what the one before has on its way is answered late.

    Its consumers stay for a while; its successor loads for those who send.
    """
    _handover(plan, rng, "put /q", 0.1, "")
    _nothing_else(plan)
    plan.seconds = 7.0
    plan.metadata.stale_slow_keys = ("/q",)
    plan.aborted, plan.most_sends = 0.2, 0
    plan.staying, plan.cut_off, plan.beside_s = "qsx", 0.1, 3.0
    plan.burst_producers, plan.pause_s = 1, 0.1


def _acks_handed_over(plan: Plan, rng: random.Random) -> None:
    """Acknowledgements in transactions come to an owner that has been replaced.

    For a while its clients stay, who only acknowledge and commit, and by then its successor has
    loaded for the others.
    """
    _handover(plan, rng, "put /a:", 0.2, "")
    _nothing_else(plan)
    plan.seconds = 7.0
    plan.metadata.stale_slow = 0.0
    plan.aborted, plan.most_sends = 0.1, 0
    plan.staying, plan.cut_off, plan.beside_s = "x", 0.1, 2.0
    plan.late_queues, plan.transactors = True, 3
    plan.burst_producers, plan.pause_s = 1, 0.05


def _left_behind(plan: Plan, rng: random.Random) -> None:
    """Records arrive late, of brokers that were replaced and are gone soon; nobody loads again."""
    _handover(plan, rng, rng.choice(("put /w:", "put /a:")), 0.3, "")
    _nothing_else(plan)
    plan.restarted = False
    plan.seconds = 10.0
    plan.metadata.stale_slow_keys = ("/w:", "/a:")
    plan.cut_off, plan.beside_s = 0.1, 2.0
    plan.retention_s = plan.collect_every_s = 1


def _nothing_else(plan: Plan) -> None:
    """No faults but those of the profile."""
    plan.break_every_s = plan.pause_every_s = plan.reshape_every_s = 0.0
    plan.network = NetworkFaults(told_after_s=plan.network.told_after_s)
    plan.disk = DiskFaults()
    faults = plan.metadata
    faults.refused = faults.lost_answer = faults.session_expiry = 0.0


def _delayed_end_events(plan: Plan, rng: random.Random) -> None:
    """Ends are answered, and heard of up to seconds later; ordered consumers go on meanwhile."""
    plan.committers = rng.choice((1, 2))
    plan.transactors, plan.seekers = rng.choice((0, 1)), rng.choice((0, 1))
    plan.aborted = 0.5
    plan.metadata.watch_slow = rng.uniform(0.3, 0.9)
    plan.pause_s = 0.1
    plan.break_every_s = rng.choice((0.0, 2.0))
    plan.replace_every_s = rng.choice((0.0, 0.0, rng.uniform(3, 6)))
    # One that was replaced would prune, and its successor, which is alone, does not watch for that.
    plan.reshape_every_s = 0.0


def _restarts(plan: Plan, rng: random.Random) -> None:
    """Short lives, and transactions that are forgotten soon."""
    plan.crash_every_s = rng.uniform(1, 3)
    plan.retention_s = plan.collect_every_s = 1
    plan.pause_s = 0.3


def _resumed(plan: Plan, rng: random.Random) -> None:
    """Transactions write under one owner after the other; nothing else goes wrong."""
    _nothing_else(plan)
    plan.crash_every_s = rng.uniform(1.5, 3)
    plan.resumed, plan.most_sends = 0.9, 2
    plan.retention_s = plan.collect_every_s = 2
    plan.burst_producers, plan.pause_s = 0, 0.2


def _keys(plan: Plan, rng: random.Random) -> None:
    """Zombies with a transaction key; brokers die while they open it, or begin and end under it."""
    plan.key_workers = rng.choice((2, 3))
    plan.transactors = rng.choice((0, 1))
    plan.pause_every_s = rng.choice((1.0, 3.0))
    plan.pause_s = 0.2
    plan.crash_at = rng.choice(("put /txn/key/", "put /txn/id/", "get /txn/key/"))
    plan.crash_at_share = rng.choice((0.0, rng.uniform(0.02, 0.2)))
    plan.replace_every_s = rng.choice((0.0, 0.0, rng.uniform(2, 6)))
    plan.metadata.slow = rng.uniform(0.01, 0.2)
    plan.metadata.slow_keys = ("/txn/key/", "/txn/id/")
    plan.metadata.lost_answer = rng.choice((0.0, 0.01))
    plan.retention_s = plan.collect_every_s = rng.choice((1, 20))


def _groups(plan: Plan, rng: random.Random) -> None:
    """Jobs that commit batches; drivers stand still, brokers die while they begin and decide."""
    plan.group_drivers = rng.choice((2, 3))
    plan.transactors = 0
    plan.pause_every_s = rng.choice((1.5, 4.0))
    plan.pause_s = 0.2
    plan.crash_at = rng.choice(("put /txn/key/", "put /txn/id/", "get /txn/key/", "put /w:"))
    plan.crash_at_share = rng.choice((0.0, rng.uniform(0.02, 0.2)))
    plan.replace_every_s = rng.choice((0.0, 0.0, rng.uniform(2, 6)))
    plan.metadata.slow = rng.uniform(0.01, 0.2)
    plan.metadata.slow_keys = ("/txn/key/", "/txn/id/")
    plan.metadata.lost_answer = rng.choice((0.0, 0.01))
    plan.retention_s = plan.collect_every_s = rng.choice((1, 20))


def _sequences(plan: Plan, rng: random.Random) -> None:
    """Programs with sequence ids while the layout changes; brokers die in the midst of that."""
    plan.restarted_programs, plan.counting_programs = rng.choice((1, 2)), rng.choice((1, 2))
    plan.transactors = rng.choice((0, 1))
    plan.reshape_every_s = rng.uniform(0.7, 3)
    plan.crash_every_s = rng.choice((0.0, rng.uniform(2, 6)))
    plan.crash_at = rng.choice(("put /topics/", "put /managed-ledgers/", "delete /scalable-topic"))
    plan.crash_at_share = rng.choice((0.0, rng.uniform(0.02, 0.1)))
    plan.replace_every_s = rng.choice((0.0, 0.0, rng.uniform(3, 8)))
    plan.break_every_s = rng.choice((0.0, rng.uniform(1, 4)))
    plan.pause_s = rng.choice((0.02, 0.1))


def _wide(plan: Plan, rng: random.Random) -> None:
    """Everything that clients do."""
    plan.batches = rng.choice((0.0, 0.5))
    plan.negative = rng.choice((0.0, 0.8))
    plan.cumulative = rng.choice((0.0, 0.3, 0.7))
    plan.plain_topics = rng.choice((0, 1, 2))
    plan.key_shared = rng.random() < 0.5
    plan.other_connection = rng.choice((0.0, 0.5))
    plan.named_producers = rng.choice((0, 1, 2))
    plan.seekers = rng.choice((0, 1))
    plan.committers = rng.choice((0, 1, 2))
    plan.deleters = rng.choice((0, 1))
    plan.crash_every_s = rng.choice((0.0, rng.uniform(1.5, 6), rng.uniform(1.5, 6)))
    plan.replace_every_s = rng.choice((0.0, 0.0, 0.0, rng.uniform(2, 6)))
    plan.pause_s = rng.choice((0.1, 0.4))
    plan.retention_s = plan.collect_every_s = rng.choice((2, 20))


def _scaling(plan: Plan, rng: random.Random) -> None:
    """Topics split and merge by themselves, and by hand as well; brokers die and are replaced."""
    plan.auto_scale = True
    plan.seconds = rng.uniform(10, 16)
    plan.producers, plan.burst_producers = rng.choice((2, 3)), 0
    plan.transactors = plan.readers = rng.choice((0, 1))
    plan.pause_s = 0.1
    plan.stream_consumers = rng.choice((1, 3))
    plan.reshape_every_s = rng.choice((0.0, 0.0, 4.0))
    plan.crash_every_s = rng.choice((0.0, rng.uniform(3, 8)))
    plan.crash_at = rng.choice(("", "/load", "put /topics/", "put /scalable-topic-steps/"))
    plan.crash_at_share = rng.uniform(0.01, 0.1) if plan.crash_at else 0.0
    plan.replace_every_s = rng.choice((0.0, 0.0, rng.uniform(4, 9)))


def _migrations(plan: Plan, rng: random.Random) -> None:
    """Ordinary topics become scalable, and are split and merged; brokers die at each step of it."""
    plan.migrated = True
    plan.reshape_every_s = rng.uniform(1, 4)
    plan.crash_every_s = rng.choice((0.0, rng.uniform(1.5, 6)))
    plan.crash_at = rng.choice(
        (
            "put /scalable-topic-steps",
            "delete /scalable-topic-steps",
            "put /topics/",
            "put /managed",
        )
    )
    plan.crash_at_share = rng.choice((0.0, rng.uniform(0.05, 0.4)))
    plan.replace_every_s = 0.0
    plan.metadata.slow = rng.uniform(0.01, 0.1)
    plan.metadata.slow_keys = ("/scalable-topic-steps", "/topics/")
    plan.named_producers = rng.choice((0, 1, 2))
    plan.batches = rng.choice((0.0, 0.5))
    plan.pause_s = 0.1


def _buckets(plan: Plan, rng: random.Random) -> None:
    """Ordered consumers share segments, and come and go; the layout changes under them."""
    plan.topics = 1
    plan.producers = plan.burst_producers = plan.stream_consumers = 0
    plan.bucket_producers = rng.choice((1, 2))
    plan.unstamped_producers = rng.choice((0, 1))
    plan.unstamped_pause_s = rng.choice((1.0, 3.0))
    plan.sharing_consumers = rng.choice((2, 3, 5))
    plan.lone_consumers = rng.choice((0, 0, 1))
    plan.transactors, plan.readers = rng.choice((0, 0, 1)), 0
    # Plain Key_Shared sends a whole batch by its first key.
    plan.queue_consumers, plan.key_shared = 1, False
    plan.seconds = rng.uniform(8, 14)
    plan.pause_s = rng.choice((0.05, 0.2))
    plan.held, plan.negative = rng.choice((0.0, 0.05, 0.2)), 1.0
    plan.leave_every_s = rng.choice((0.0, rng.uniform(1, 6), rng.uniform(1, 6)))
    plan.entry_buckets = rng.choice((1, 4, 8))
    plan.auto_scale, plan.rebuckets = rng.random() < 0.5, True
    plan.reshape_every_s = rng.choice((0.0, rng.uniform(1.5, 5)))
    plan.crash_every_s = rng.choice((0.0, rng.uniform(2, 6)))
    plan.crash_at = rng.choice(("", "put /topics/", "put /scalable-topic-steps/"))
    plan.crash_at_share = rng.uniform(0.01, 0.1) if plan.crash_at else 0.0
    plan.replace_every_s = rng.choice((0.0, 0.0, 0.0, rng.uniform(4, 9)))
    plan.restarted_programs = rng.choice((0, 0, 0, 1))
    plan.migrated = rng.random() < 0.15
    plan.work_s = rng.choice((0.005, 0.1))
    if plan.unstamped_producers:
        # The first batch of theirs ends the sharing of a segment.
        plan.reshape_every_s = rng.uniform(0.7, 2)


def _v4(plan: Plan, rng: random.Random) -> None:
    """Transactions of clients before version 5, and later ones, on the same plain topics."""
    plan.topics, plan.plain_topics = 1, rng.choice((1, 2))
    plan.v4_transactors, plan.transactors = rng.choice((2, 3)), rng.choice((0, 1, 2))
    plan.seconds = rng.uniform(6, 12)
    plan.batches = rng.choice((0.0, 0.5))
    plan.negative = rng.choice((0.0, 0.8))
    plan.key_shared, plan.late_queues = rng.random() < 0.3, rng.random() < 0.6
    plan.other_connection = rng.choice((0.0, 0.5))
    plan.committers = rng.choice((0, 1, 2))
    plan.hasty, plan.resumed = rng.choice((0.0, 0.5)), rng.choice((0.0, 0.5))
    plan.reshape_every_s = 0.0
    plan.crash_every_s = rng.choice((0.0, rng.uniform(1.5, 6)))
    plan.crash_at = rng.choice(("", "put /w:", "put /a:", "put /txn/id/", "delete /w:"))
    plan.crash_at_share = rng.uniform(0.02, 0.2) if plan.crash_at else 0.0
    plan.replace_every_s = rng.choice((0.0, 0.0, rng.uniform(2, 6)))
    plan.pause_every_s = rng.choice((0.0, 3.0))
    plan.pause_s = rng.choice((0.1, 0.3))
    plan.retention_s = plan.collect_every_s = rng.choice((1, 20))
    if rng.random() < 0.5:
        plan.metadata.refused = plan.metadata.lost_answer = plan.metadata.session_expiry = 0.0


Profile = Callable[[Plan, random.Random], None]
PROFILES: dict[str, Profile] = {
    "general": _general,
    "joins": _joins,
    "aborts": _aborts,
    "cleaning": _cleaning,
    "takeovers": _takeovers,
    "aborts-handed-over": _aborts_handed_over,
    "commits-handed-over": _commits_handed_over,
    "acks-handed-over": _acks_handed_over,
    "left-behind": _left_behind,
    "delayed-end-events": _delayed_end_events,
    "restarts": _restarts,
    "resumed": _resumed,
    "keys": _keys,
    "wide": _wide,
    "groups": _groups,
    "sequences": _sequences,
    "scaling": _scaling,
}
BY_NAME: dict[str, Profile] = {
    **PROFILES,
    "migrations": _migrations,
    "buckets": _buckets,
    "v4": _v4,
}
"""With those that have seeds of their own, so that they change no run of the others."""
MIGRATIONS_SHARE = BUCKETS_SHARE = V4_SHARE = 0.08


def plan_of(seed: int, *, transactions: bool, profile: str | None = None) -> Plan:
    """A plan by luck; the profile too, unless one is named."""
    rng = random.Random(f"plan {seed}")
    plan = _by_luck(rng, transactions=transactions)
    plan.profile = profile or _profile_by_luck(seed, transactions=transactions)
    if plan.profile != "general":
        plan.seconds = rng.uniform(8, 20)
        plan.stall_every_s = 0.0
        plan.network.told_after_s = 0.5
        plan.metadata.slow_keys = PROTOCOL
        plan.transactors = rng.choice((2, 3))
        plan.producers = 1
        plan.readers = rng.choice((1, 2))
    BY_NAME[plan.profile](plan, rng)
    return plan


def _profile_by_luck(seed: int, *, transactions: bool) -> str:
    if random.Random(f"migrations {seed}").random() < MIGRATIONS_SHARE:
        return "migrations"
    if random.Random(f"buckets {seed}").random() < BUCKETS_SHARE:
        return "buckets"
    if transactions and random.Random(f"v4 {seed}").random() < V4_SHARE:
        return "v4"
    rng = random.Random(f"profile {seed}")
    if not transactions:
        return "general"
    return "wide" if rng.random() < 0.3 else rng.choice(list(PROFILES))


def _by_luck(rng: random.Random, *, transactions: bool) -> Plan:

    def maybe(low: float, high: float) -> float:
        return rng.uniform(low, high) if rng.random() < 0.5 else 0.0

    many = rng.random() < 0.3
    return Plan(
        seconds=rng.uniform(5, 40),
        topics=rng.choice((1, 1, 2)),
        producers=rng.choice((1, 2, 3)),
        burst_producers=rng.choice((0, 1)),
        queue_consumers=rng.choice((1, 2)),
        stream_consumers=rng.choice((1, 1, 2)),
        transactors=rng.choice((1, 2, 3)) if transactions else 0,
        pause_s=rng.choice((0.02, 0.1, 0.4)),
        crash_every_s=maybe(1.5, 15),
        break_every_s=maybe(1, 10),
        stall_every_s=maybe(1, 10),
        reshape_every_s=maybe(1, 10),
        replace_every_s=maybe(3, 15) if transactions and many else 0.0,
        pause_every_s=maybe(2, 10),
        readers=rng.choice((0, 0, 1)),
        network=NetworkFaults(slow=maybe(0.001, 0.02)),
        disk=DiskFaults(stall=maybe(0.001, 0.03), failure=maybe(0.0005, 0.01)),
        metadata=MetadataFaults(
            slow=maybe(0.001, 0.03),
            refused=maybe(0.001, 0.01),
            lost_answer=maybe(0.001, 0.01),
            watch_slow=maybe(0.01, 0.2),
            resync=maybe(0.01, 0.2),
            session_expiry=maybe(0.2, 0.8),
        ),
    )
