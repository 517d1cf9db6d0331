"""A topic under load on a virtual clock, scaled by the pure parts alone.

Owners sample every 10 s and report as `SegmentMeter` and `Load.differs` say; the leader evaluates
every 60 s, and once a split cooldown after each split.  Nothing here does I/O or waits.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from broker.scalable import layout as layouts
from broker.scalable.auto_scale_policy import AutoScalePolicy
from broker.scalable.consumer_groups import ConsumerGroup
from broker.scalable.key_sample import KeySample
from broker.scalable.layout import Layout, Segment
from broker.scalable.load_report import LoadBoard, LoadReport, SegmentMeter
from broker.scalable.scale_decision import Action, Decision, Situation, Verdict, decide
from config.bounds import MAX_ENTRY_BUCKETS
from magnetar.protocol.key_hash import key_hash

SAMPLE_S = 10
EVALUATION_S = 60
SAMPLED_ENTRIES = 256
CHANGE = 0.25
REPEATED = 8
"""Earlier reports that a report repeats."""
MESSAGE_BYTES = 100
START_MS = 1_700_000_000_000

Keys = Mapping[str, float]
"""Keys, and the messages by the second that each gets."""


@dataclass(frozen=True)
class Done:
    """A decision that was carried out, and what it was made in."""

    at_s: int
    decision: Decision
    before: Layout
    after: Layout
    shares: tuple[float, ...]
    """Of a split: the true shares of the parts, of the load at the time; empty without load."""
    groups: tuple[ConsumerGroup, ...] = ()


class Owner:
    """The owner of one segment: it counts, samples and reports."""

    def __init__(self, at_s: int) -> None:
        self.meter = SegmentMeter(at_s)
        self.messages = 0.0
        self.bytes = 0.0
        self.writes = 0
        self.report: LoadReport | None = None
        """The last one, which the leader reads when it evaluates."""

    def sample(self, at_s: int, fan_out: int, backlog: int) -> None:
        """Sample the counters, and write a report if it is due."""
        count = int(self.messages)
        size = int(self.bytes)
        counts = (count, size, count * fan_out, size * fan_out)
        load = self.meter.sample(at_s, counts, backlog)
        if not load.differs(self.meter.written, CHANGE):
            return
        self.meter.written = load
        self.writes += 1
        earlier = self.report.and_earlier(REPEATED) if self.report else ()
        self.report = LoadReport(load, START_MS + at_s * 1000, self.writes, earlier)


class ScalingWorld:
    """One topic, its load by keys, and the policy."""

    def __init__(
        self,
        policy: AutoScalePolicy,
        *,
        segments: int = 1,
        sharing: bool = False,
        seed: int = 1,
        fan_out: int = 1,
        max_buckets: int = MAX_ENTRY_BUCKETS,
        m1_clients: bool = False,
    ) -> None:
        self.policy = policy
        self.layout = layouts.initial(segments, now_ms=START_MS)
        self.sharing = sharing
        self.consumers = 0
        """Of a STREAM subscription, whose clients can share segments if `sharing`."""
        self.checkpoint_consumers = 0
        self.sizes: dict[str, int] = {}
        """Bytes of the messages of a key; MESSAGE_BYTES of any other key."""
        self.backlog = 0
        self.at_s = 0
        self.done: list[Done] = []
        self.verdict: Verdict | None = None
        self.counts: list[tuple[int, int, float]] = []
        """Time, active segments and messages by the second, at each sample."""
        self._rng = random.Random(seed)
        self._fan_out = fan_out
        self._max_buckets = max_buckets
        self._shift = 0 if m1_clients else 16
        self._hashes: dict[str, int] = {}
        self._load: Callable[[int], Keys] = lambda _: {}
        self._owners: dict[int, Owner] = {}
        self._board = LoadBoard()
        self._evaluate_at_s = EVALUATION_S
        self._retry_at_s: int | None = None

    @property
    def now_ms(self) -> int:
        return START_MS + self.at_s * 1000

    def use_load(self, load: Callable[[int], Keys]) -> None:
        """From now on keys get the messages of `load(seconds since the start)`."""
        self._load = load

    def run(self, seconds: int) -> None:
        """Let time pass, in steps of a sample."""
        until_s = self.at_s + seconds
        while self.at_s < until_s:
            self._step()

    def segment_of(self, key: str) -> Segment:
        """The segment to which clients send a key."""
        known = self._hashes.get(key)
        if known is None:
            known = self._hashes[key] = (key_hash(key.encode()) >> self._shift) & 0xFFFF
        return self.layout.route(known)

    @property
    def writes(self) -> int:
        """Reports that were written, of the segments that are there."""
        return sum(owner.writes for owner in self._owners.values())

    def _step(self) -> None:
        keys = self._load(self.at_s)
        self.at_s += SAMPLE_S
        self._owners = {
            s.segment_id: self._owners.get(s.segment_id, Owner(self.at_s - SAMPLE_S))
            for s in self.layout.active
        }
        for key, rate in keys.items():
            owner = self._owners[self.segment_of(key).segment_id]
            owner.messages += rate * SAMPLE_S
            owner.bytes += rate * SAMPLE_S * self._size(key)
        for owner in self._owners.values():
            owner.sample(self.at_s, self._fan_out, self.backlog)
        self.counts.append((self.at_s, len(self.layout.active), sum(keys.values())))
        due = self._retry_at_s is not None and self.at_s > self._retry_at_s
        if self.at_s >= self._evaluate_at_s or due:
            self._evaluate_at_s = self.at_s + EVALUATION_S if not due else self._evaluate_at_s
            self._retry_at_s = None
            self.evaluate(keys)

    def evaluate(self, keys: Keys | None = None) -> Verdict:
        """Evaluate once, and carry out what is decided."""
        keys = self._load(self.at_s) if keys is None else keys
        self._board.use_limits(self.policy.merge)
        self._board.keep(segment.segment_id for segment in self.layout.active)
        for segment in self.layout.active:
            owner = self._owners.get(segment.segment_id)
            if owner is not None and owner.report is not None:
                self._board.take(segment.segment_id, owner.report)
        samples: dict[int, KeySample | None] = {}
        while True:
            verdict = decide(
                Situation(
                    self.layout,
                    self.policy,
                    self.now_ms,
                    self._board.loads(),
                    self._groups(),
                    max_buckets=self._max_buckets,
                    samples=samples,
                )
            )
            if verdict.sample_wanted is None:
                break
            wanted = verdict.sample_wanted.segment_id
            samples[wanted] = self._sample(wanted, keys)
        self.verdict = verdict
        if verdict.decision is not None:
            self._carry_out(verdict.decision, keys)
        return verdict

    def _size(self, key: str) -> int:
        return self.sizes.get(key, MESSAGE_BYTES)

    def _groups(self) -> tuple[ConsumerGroup, ...]:
        return (
            ConsumerGroup(self.consumers, can_share=self.sharing),
            ConsumerGroup(self.checkpoint_consumers, is_stream=False),
        )

    def _keys_in(self, segment: Segment, keys: Keys) -> dict[str, float]:
        return {key: rate for key, rate in keys.items() if self.segment_of(key) == segment}

    def _sample(self, segment_id: int, keys: Keys) -> KeySample:
        inside = self._keys_in(self.layout.segments[segment_id], keys)
        if not sum(inside.values()):
            return KeySample({})
        names = list(inside)
        drawn = Counter(self._rng.choices(names, [inside[n] for n in names], k=SAMPLED_ENTRIES))
        keyed = {key_hash(name.encode()): count for name, count in drawn.items()}
        sizes = {key_hash(n.encode()): count * self._size(n) for n, count in drawn.items()}
        return KeySample(keyed, entries=SAMPLED_ENTRIES, keyed_bytes=sizes)

    def _carry_out(self, decision: Decision, keys: Keys) -> None:
        before = self.layout
        shares: tuple[float, ...] = ()
        if decision.action is Action.SPLIT:
            (segment_id,) = decision.segment_ids
            inside = self._keys_in(before.segments[segment_id], keys)
            change = layouts.split(before, segment_id, now_ms=self.now_ms, parts=decision.parts)
            self.layout = change.layout
            if any(name.startswith("bytes") for name in decision.figures):
                inside = {key: rate * self._size(key) for key, rate in inside.items()}
            shares = self._shares(change.children, inside)
            self._retry_at_s = self.at_s + self.policy.split_cooldown_s
        elif decision.action is Action.MERGE:
            self.layout = layouts.merge(
                before, decision.segment_ids, now_ms=self.now_ms, max_buckets=self._max_buckets
            ).layout
        else:
            self.layout = layouts.rebucket(
                before, decision.segment_ids, decision.bucket_count, now_ms=self.now_ms
            ).layout
        self.done.append(Done(self.at_s, decision, before, self.layout, shares, self._groups()))

    def _shares(self, children: Iterable[Segment], inside: Keys) -> tuple[float, ...]:
        whole = sum(inside.values())
        if not whole:
            return ()
        return tuple(
            sum(rate for key, rate in inside.items() if self.segment_of(key) == child) / whole
            for child in children
        )


def even_keys(count: int, rate: float) -> Keys:
    """So many keys that share a rate evenly."""
    return {f"key-{number}": rate / count for number in range(count)}
