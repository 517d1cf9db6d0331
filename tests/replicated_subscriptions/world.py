"""Two clusters with a subscription in both: `tests/segment_replication`, and consumers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from broker.replication.subscription_backlog import NONE_LEFT
from broker.scalable import layout as layouts
from broker.scalable.layout import Layout
from broker.topics.replicated_ranges import SourceSegment
from broker.topics.subscription_positions import FirstCopy
from magnetar.protocol.ids import EARLIEST, Position
from tests.replicated_subscriptions.rules import Rules
from tests.replicated_subscriptions.segments import (
    ConsumedSegment,
    CopySegment,
    HomeSegment,
    LogEntry,
)
from tests.segment_replication.source import Log, Message, PartFrame
from tests.segment_replication.target import Violation
from tests.segment_replication.world import STALE_MAX, World

QUESTIONS_MAX = 4
"""Questions on their way, of the present leader and of earlier ones."""
ROUNDS_MAX = 60
"""Rounds in which the subscriptions have to come to the same state."""


@dataclass
class Question:
    """A question of the source's leader, on its way to all owners and back."""

    incarnation: int
    layout: Layout
    logs: dict[int, Log]
    to_collect: list[int]
    below: dict[int, Position] = field(default_factory=dict)
    answered: dict[int, Position] = field(default_factory=dict)
    segments: frozenset[int] = frozenset()
    """Those of the other cluster, as its leader knows them, and which of them are ACTIVE."""
    active: frozenset[int] = frozenset()
    to_ask: list[int] | None = None
    answers: dict[int, dict[int, FirstCopy]] = field(default_factory=dict)
    """By segment of the source: the answers of the other cluster's segments."""
    to_tell: list[int] | None = None

    def twice(self) -> "Question":
        """The same question, that goes on apart from this one."""
        return replace(
            self,
            to_collect=list(self.to_collect),
            below=dict(self.below),
            answered=dict(self.answered),
            to_ask=None if self.to_ask is None else list(self.to_ask),
            answers={each: dict(answers) for each, answers in self.answers.items()},
            to_tell=None if self.to_tell is None else list(self.to_tell),
        )


class SubscriptionWorld(World):
    """One run.  `run` raises `Violation`."""

    def __init__(self, seed: int, broken: str = "") -> None:
        super().__init__(seed)
        rng = self.rng
        self.broken = Rules(broken)
        self.limit = rng.choice((5, 1000))
        self.in_order = rng.random() < 0.5
        """Whether consumers read a segment when they have all of its ancestors, as STREAM ones."""
        self.ahead = 1 if self.in_order else rng.choice((1, 3, 10))
        self.homes: dict[Log, HomeSegment] = {}
        self.copies: dict[int, CopySegment] = {}
        self.pruned: set[int] = set()
        """Segments of the target that its layout has no more."""
        self.consumed: set[Message] = set()
        """By consumers of either cluster: what it loses in a crash the other one may still know."""
        self.consuming = rng.choice(("S", "R", "SR"))
        self.unsent: set[Message] = set()
        """Messages that were there when replication began."""
        # Few backlogs have room for entries that stay.
        self._write_unsent(rng.choice((0, 4)) if self.limit > 100 else 0)
        self.layouts = [self.source.layout]
        self.remote_layouts = [self._remote_layout()]
        self.questions: list[Question] = []
        events, weights = self._events
        # Left out: restores, of which nothing is promised, and transactions.
        self.source.transactional = 0
        left_out = {self.source.back_up, self.restore, self.end_transaction, self.source.settle}
        weights = [
            0.0 if event in left_out else weight
            for event, weight in zip(events, weights, strict=True)
        ]
        replaced = {
            self.source.prune: self.prune,
            self.source.persist: self.persist,
        }
        mine: list[tuple[Callable[[], None], float]] = [
            (self.consume, rng.choice((10, 30))),
            (self.read, 30),
            (self.ask, 6),
            (self.go_on, rng.choice((30, 80))),
            (self.lose_question, rng.choice((0, 0, 1))),
            (self.subscribe, rng.choice((2, 10))),
            (self.fail_over, rng.choice((0, 0.5))),
            (self.prune_target, 2),
            (self.foreign, rng.choice((0, 3))),
            (self.persist_cursor, 3),
        ]
        self._events = (
            [replaced.get(event, event) for event in events] + [event for event, _ in mine],
            weights + [weight for _, weight in mine],
        )
        for event in (self.source.reshape, self.target.reshape):
            assert event in events

    def _write_unsent(self, count: int) -> None:
        for _ in range(count):
            self.source.produce()
        while self.source.chunking is not None:
            self.source.produce_chunk()
        for log in self.source.logs.values():
            log.acked.update(entry.position for entry in log.entries)
            log.durable = set(log.acked)
            self.unsent.update(message for entry in log.entries for message in entry.messages)
            self._home(log).sent_after = max(log.acked, default=EARLIEST)
        self.target.judge.expired |= self.unsent

    # The segments of both clusters

    def _home(self, log: Log) -> HomeSegment:
        return self.homes.setdefault(log, HomeSegment(self.broken, self.limit, log))

    def _copy(self, segment_id: int) -> CopySegment:
        segment = self.target.segments[segment_id]
        return self.copies.setdefault(segment_id, CopySegment(self.broken, self.limit, segment))

    def _places(self) -> list[ConsumedSegment]:
        homes: list[ConsumedSegment] = [self._home(log) for log in self.source.logs.values()]
        there = self.target.segments.keys() - self.pruned
        return homes + [self._copy(each) for each in sorted(there)]

    def _notice(self) -> None:
        """See that children have the cursors of their parents, and remember new layouts."""
        for segment in self.source.layout.segments.values():
            parents = [self._home(self.source.logs[each]) for each in segment.parent_ids]
            home = self._home(self.source.logs[segment.segment_id])
            home.has_cursor |= any(parent.has_cursor for parent in parents)
        for segment_id, target in self.target.layout.segments.items():
            held = [self._copy(each).has_cursor for each in target.parent_ids]
            self._copy(segment_id).has_cursor |= any(held)
        if self.source.layout is not self.layouts[-1]:
            self.layouts.append(self.source.layout)
        remote = self._remote_layout()
        if remote != self.remote_layouts[-1]:
            self.remote_layouts.append(remote)

    def _remote_layout(self) -> tuple[frozenset[int], frozenset[int]]:
        """The ids of the target's segments, and of the ACTIVE ones."""
        every = frozenset(self.target.layout.segments) - self.pruned
        return every, frozenset(each.segment_id for each in self.target.layout.active)

    # Events of the world that the subscription has a part in

    def crash_source(self) -> None:
        """A segment of the source gets another owner; the former one may go on."""
        log = self.source.crash()
        if log is None:
            return
        self._home(log).crash()
        if len(self.stale) == STALE_MAX:
            self._stop(self.stale.pop(0))

    def crash_target(self) -> None:
        """A segment of the target gets another owner."""
        segment = self._busy() or self.target.any()
        while segment.on_its_way and self.rng.random() < 0.5:
            segment.store()
        segment.crash()
        self._copy(segment.segment.segment_id).crash()

    def recreate(self) -> None:
        """Delete the topic in the source, and create it anew."""
        super().recreate()
        self.homes.clear()
        self.layouts = [self.source.layout]

    def persist(self) -> None:
        """Make the cursor of a replicator durable."""
        self.source.persist()

    def prune(self) -> None:
        """Drop a sealed segment of the source that the subscription and the replicator have."""
        for segment in self.source.layout.sealed:
            segment_id = segment.segment_id
            log = self.source.logs[segment_id]
            sent = segment_id in self.source.drained()
            if sent and not segment.parent_ids and self._home(log).is_drained():
                self.source.layout = layouts.prune(self.source.layout, [segment_id])
                self.source.logs.pop(segment_id).owner_epoch += 1
                return

    def prune_target(self) -> None:
        """Drop a sealed segment of the target that the subscription has."""
        for segment in self.target.layout.sealed:
            if self._copy(segment.segment_id).is_drained() and (
                set(segment.parent_ids) <= self.pruned
            ):
                self.pruned.add(segment.segment_id)

    def foreign(self) -> None:
        """Store an entry that is not from the source: in it, or in the target."""
        if self.rng.random() < 0.5:
            log = self.rng.choice(list(self.source.logs.values()))
            if not log.terminated:
                log.append(())
                for acked in (log.acked, log.durable, *self._acked_by_senders(log)):
                    acked.add(log.entries[-1].position)
            return
        segment = self.target.any()
        if not segment.terminated and not segment.parents:
            nobody = SourceSegment("R", 0, 0)
            segment.log.append(PartFrame(0, nobody, None, (), None))

    def _acked_by_senders(self, log: Log) -> Iterator[set[Position]]:
        for sender in (*self.senders.values(), *self.stale):
            if sender.log is log:
                yield sender.acked

    # The subscription

    def subscribe(self) -> None:
        """A segment gets the subscription, at its first entry."""
        self._notice()
        self.rng.choice(self._places()).has_cursor = True

    def fail_over(self) -> None:
        """Consumers go to the other cluster, or to both."""
        self.consuming = self.rng.choice(("S", "R", "SR"))

    def persist_cursor(self) -> None:
        """Make a cursor durable."""
        place = self.rng.choice(self._places())
        place.durable = set(place.acked)

    def consume(self) -> None:
        """A consumer acknowledges an entry."""
        self._notice()
        cluster = self.rng.choice(self.consuming)
        self._consume(self.rng.choice(self._readable(cluster)))

    def _consume(self, place: ConsumedSegment) -> bool:
        before = len(place.acked)
        self.consumed.update(place.consume(self.rng, self.ahead))
        return len(place.acked) > before

    def _readable(self, cluster: str) -> list[ConsumedSegment]:
        """The segments that consumers read now."""
        places: dict[int, ConsumedSegment] = {}
        if cluster == "S":
            layout = self.source.layout
            places |= {each: self._home(log) for each, log in self.source.logs.items()}
        else:
            layout = self.target.layout
            places |= {each: self._copy(each) for each in self.target.segments}
        if not self.in_order:
            return list(places.values())
        return [
            place
            for segment_id, place in places.items()
            if all(places[each].is_drained() for each in layout.ancestors(segment_id))
        ]

    def read(self) -> None:
        """An owner reads on."""
        self._notice()
        self.rng.choice(self._places()).read(self.rng.choice((1, 4, 20)))

    # A question, and what comes of it

    def ask(self) -> None:
        """A leader of the source begins a question; it may know an older layout."""
        if len(self.questions) < QUESTIONS_MAX:
            late = self.rng.random() < 0.2
            self._ask(self.rng.choice(self.layouts[-4:]) if late else self.source.layout)

    def _ask(self, layout: Layout) -> Question:
        self._notice()
        logs = dict(self.source.logs)
        ids = [each for each in layout.segments if each in logs]
        self.rng.shuffle(ids)
        asked = Question(self.source.incarnation, layout, logs, ids)
        self.questions.append(asked)
        return asked

    def lose_question(self) -> None:
        """A question or its answer is lost."""
        if self.questions:
            self.questions.remove(self.rng.choice(self.questions))

    def go_on(self) -> None:
        """A question comes to the next owner, or back from it."""
        if self.questions:
            question = self.rng.choice(self.questions)
            if self.rng.random() < 0.05 and len(self.questions) < QUESTIONS_MAX:
                self.questions.append(question.twice())
            self._go_on(question)

    def _go_on(self, question: Question) -> None:
        """One step.  Raises `Violation`."""
        self._notice()
        if question.to_collect:
            self._collect_of(question, question.to_collect.pop())
        elif question.to_ask is None:
            late = self.rng.random() < 0.2
            known = self.rng.choice(self.remote_layouts[-4:]) if late else self.remote_layouts[-1]
            question.segments, question.active = known
            question.to_ask = list(known[0])
            self.rng.shuffle(question.to_ask)
        elif question.to_ask:
            self._answer(question, question.to_ask.pop())
        elif question.to_tell is None:
            question.to_tell = list(question.below)
            self.rng.shuffle(question.to_tell)
        elif question.to_tell:
            self._take(question, question.to_tell.pop())
        else:
            self.questions.remove(question)

    def _collect_of(self, question: Question, segment_id: int) -> None:
        """The owner of a segment of the source tells its state."""
        log = question.logs[segment_id]
        if self.source.logs.get(segment_id) is not log:
            return
        home = self._home(log)
        below = home.below()
        if self.broken.breaks("F9") and home.told.get("below") == below:
            below = EARLIEST
        home.told["below"] = below
        question.below[segment_id] = below
        question.answered[segment_id] = home.answered()

    def _source(self, question: Question, segment_id: int) -> SourceSegment:
        incarnation = 0 if self.broken.breaks("F6") else question.incarnation
        return SourceSegment("S", incarnation, segment_id)

    def _answer(self, question: Question, segment_id: int) -> None:
        """The owner of a segment of the target takes a question."""
        place = self._copy(segment_id)
        segment = place.segment
        is_old = segment.sources.is_newer_known("S", question.incarnation, question.layout.epoch)
        if segment_id in self.pruned or (is_old and not self.broken.breaks("F8-epoch")):
            return
        if self.rng.random() < 0.05:
            return
        consumed = self._consumed()
        if place.has_cursor:
            incarnation = self._source(question, 0).incarnation
            ids = question.layout.segments.keys()
            place.acknowledge(place.backlog.acknowledge_pruned("S", incarnation, ids), consumed)
            place.lacks(incarnation, question.below, ids)
        for asked, below in question.below.items():
            source = self._source(question, asked)
            if place.has_cursor:
                place.acknowledge(place.backlog.acknowledge_copies(source, below), consumed)
            first = place.answer(source, below)
            if first is not None:
                question.answers.setdefault(asked, {})[segment_id] = first

    def _take(self, question: Question, segment_id: int) -> None:
        """The owner of a segment of the source hears what is left of it."""
        answers = question.answers.get(segment_id, {})
        first = self.broken.first_left(question.active, question.segments, answers)
        log = question.logs[segment_id]
        if first is None or self.source.logs.get(segment_id) is not log:
            return
        home = self._home(log)
        if not home.has_cursor:
            return
        late = self.broken.breaks("F3")
        answered = home.answered() if late else question.answered[segment_id]
        sent_after = EARLIEST if self.broken.breaks("F3-sent") else home.sent_after
        positions = home.backlog.acknowledge_own("R", first, sent_after, answered)
        home.acknowledge(positions, self._consumed())

    def _consumed(self) -> set[Message]:
        """What may be acknowledged."""
        return self.consumed | (self.target.judge.expired - self.unsent)

    # The end

    def finish(self) -> None:
        """No more faults: both clusters come to the same state.  Raises `Violation`."""
        while self.source.chunking is not None:
            self.source.produce_chunk()
        super().finish()
        for _ in range(ROUNDS_MAX):
            if not all(log.read for log in self.source.logs.values()):
                self._round()
        for place in self._places():
            place.has_cursor = True
        for question in list(self.questions):
            while question in self.questions:
                self._go_on(question)
        self._settle()
        if self.limit > 100:
            self._compare()
        self._consume_all(self.rng.choice("SR"))

    def _settle(self) -> None:
        """Ask until an answer changes nothing."""
        for _ in range(ROUNDS_MAX):
            before = sum(len(place.acked) for place in self._places())
            for place in self._places():
                place.read(1 << 20)
            question = self._ask(self.source.layout)
            while question in self.questions:
                self._go_on(question)
            after = sum(len(place.acked) for place in self._places())
            if after == before and self._is_answered(question):
                return
        raise Violation("the subscriptions do not come to an end")

    def _is_answered(self, question: Question) -> bool:
        every = self._remote_layout()[0]
        return question.segments == every and all(
            question.answers.get(each, {}).keys() == every for each in self.source.layout.segments
        )

    def _compare(self) -> None:
        """Each cluster has what the other one has, up to the first message that is left."""
        of_segment: dict[SourceSegment, list[tuple[Position, ConsumedSegment, Position]]] = {}
        for segment_id in self._remote_layout()[0]:
            place = self._copy(segment_id)
            for entry in place.entries():
                if entry.stored.copied_from is not None and entry.messages:
                    source, at = entry.stored.copied_from
                    found = (at, place, entry.stored.position)
                    of_segment.setdefault(source, []).append(found)
        for segment_id, log in self.source.logs.items():
            home = self._home(log)
            source = SourceSegment("S", self.source.incarnation, segment_id)
            own = [each.stored.position for each in home.entries() if each.messages]
            copies = of_segment.get(source, [])
            left_here = min((at for at in own if at not in home.acked), default=NONE_LEFT)
            left = [at for at, place, position in copies if position not in place.acked]
            left_there = min(left, default=NONE_LEFT)
            if any(at < left_here for at in left):
                raise Violation(f"the target is behind segment {segment_id}")
            own = [at for at in own if at > home.sent_after]
            if any(at < left_there for at in own if at not in home.acked):
                raise Violation(f"the source is behind what the target has of {segment_id}")

    def _consume_all(self, cluster: str) -> None:
        """All is consumed in one cluster: so it is in the other one."""
        for _ in range(ROUNDS_MAX):
            self.source.terminate()
            while any(self._consume(place) for place in self._readable(cluster)):
                pass
            for place in self._places():
                place.acked |= {
                    each.stored.position for each in place.unacknowledged() if self._stays(each)
                }
            self._settle()
            left = [each for each in self._left() if cluster == "S" or each not in self.unsent]
            if not left:
                return
        raise Violation(f"all is consumed in {cluster}, and these are left: {left}")

    def _stays(self, entry: LogEntry) -> bool:
        """Whether no cluster tells of an entry: consumers have to take it where it is.

        Else a few of them fill a backlog, whose bound is stated.
        """
        lives = {message.life for message in entry.messages}
        return not entry.stored.uuid and self.source.life not in lives

    def _left(self) -> list[Message]:
        """Messages with an entry that is not acknowledged, that of an earlier chunk too."""
        left: list[Message] = []
        for place in self._places():
            unacknowledged = place.unacknowledged()
            uuids = {each.stored.uuid for each in unacknowledged if each.stored.uuid}
            for entry in place.entries():
                if entry in unacknowledged or entry.stored.uuid in uuids:
                    left += entry.messages
        return [
            each
            for each in left
            if each.life == self.source.life and each not in self.target.judge.expired
        ]


def problem_of(
    seed: int, broken: str = "", world: type[SubscriptionWorld] = SubscriptionWorld
) -> str | None:
    """What goes wrong in a run."""
    try:
        world(seed, broken).run()
    except Violation as violation:
        return str(violation)
    return None


def first_seed(
    broken: str, seeds: range, world: type[SubscriptionWorld] = SubscriptionWorld
) -> tuple[int, str] | None:
    """The first run that shows that a rule is broken, and what goes wrong."""
    for seed in seeds:
        problem = problem_of(seed, broken, world)
        if problem is not None:
            return seed, problem
    return None
