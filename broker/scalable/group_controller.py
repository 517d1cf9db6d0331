"""One subscription's ordered consumers: a `ConsumerGroup` with its connections and timers."""

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import structlog

from broker.scalable.answers import assignment_of, assignment_update, success
from broker.scalable.assignment_writer import AssignmentWriter
from broker.scalable.counters import ScalableCounters
from broker.scalable.group import Assignments, ConsumerGroup, SessionState
from broker.scalable.live_topics import LiveTopic
from broker.scalable.mirror import SegmentConsumer
from broker.scalable.records import SubscriptionKind
from broker.scalable.relay_exchange import RELAY_CLIENT
from broker.scalable.sharing_clients import can_share_segments
from broker.scalable.topic_store import StoredSubscription, TopicStore
from broker.topics.client_connection import ClientConnection
from config.bounds import (
    ASSIGNMENT_REPEAT_S,
    FIRST_TAKE_UP_WAIT_S,
    LETTING_GO_CHECK_S,
    RELEASE_COALESCE_S,
    RELEASE_WAIT_S,
    TAKE_UP_WAIT_S,
)
from magnetar.protocol.names import segment_suffix
from magnetar.protocol.pulsar_pb2 import ScalableConsumerAssignment

Key = TypeVar("Key")
log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class Member:
    """The newest registration of a consumer; what earlier connections do has no effect."""

    connection: ClientConnection
    consumer_id: int
    forget_connection: Callable[[], None]

    def is_of(self, connection: ClientConnection, consumer_id: int) -> bool:
        """Whether this registration came on that connection, for its consumer of that id."""
        return self.connection is connection and self.consumer_id == consumer_id


class GroupController:
    """Drives one `ConsumerGroup`: passes events on, sends assignments, runs the timers.

    Changes are sent in the same turn of the loop as the event that causes them, so pushes leave in
    the order of decisions.  There are two exceptions, as a consumer comes and goes with as many
    events as it has segments: segments that are released within RELEASE_COALESCE_S are granted
    together, and timers are checked RELEASE_COALESCE_S after an event at a segment.

    `changed` is called with the name of a consumer that came (back) or went, so that its
    registration is stored or removed.  `is_loaded` returns whether any broker has a segment of the
    topic loaded.  `grace_s` returns how long a consumer that is lost now keeps its segments.

    The assignment is stored in the background after each change of it.  A controller that begins
    with the record of an earlier one gives every consumer what it had.
    """

    def __init__(
        self,
        live: LiveTopic,
        subscription: str,
        kind: SubscriptionKind,
        *,
        store: TopicStore,
        stored: StoredSubscription | None,
        grace_s: Callable[[], float],
        changed: Callable[["GroupController", str], None],
        is_loaded: Callable[[int], bool],
        counters: ScalableCounters,
    ) -> None:
        self.live = live
        self.subscription = subscription
        self.kind = kind
        self.group = ConsumerGroup(live.layout, ordered=kind is SubscriptionKind.STREAM)
        self._grace_s = grace_s
        self._changed = changed
        self._is_loaded = is_loaded
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._members: dict[str, Member] = {}
        self._former: dict[str, Member] = {}
        self._dismiss: dict[str, asyncio.TimerHandle] = {}
        """The timers of those of them that other brokers relay."""
        self._attached: dict[SegmentConsumer, tuple[int, str]] = {}
        self._grace: dict[str, asyncio.TimerHandle] = {}
        self._release: dict[tuple[int, str], asyncio.TimerHandle] = {}
        self._take_up: dict[str, asyncio.TimerHandle] = {}
        self._repeat: dict[str, asyncio.TimerHandle] = {}
        self._missing_since: dict[tuple[str, int], float] = {}
        """When a consumer was told of a segment where it is missing, or was last given it anew."""
        self._dealing: asyncio.TimerHandle | None = None
        """The timer of the next deal."""
        self._dealt_s = -math.inf
        self._watching: asyncio.TimerHandle | None = None
        """The timer of the next check of the timers."""
        self._seen_holdings = self.group.holdings
        self._proving: dict[ClientConnection, asyncio.Task[None]] = {}
        """Connections of consumers that have yet to release a segment."""
        self._stored = None if stored is None else stored.assignment
        self._writer = AssignmentWriter(
            store, live.name, subscription, self.group.to_store, stored, counters
        )

    def begin(self, names: Collection[str], drained: Collection[int]) -> None:
        """Take in the layout and consumers registered earlier; their grace periods begin now."""
        # A registration that is not in the record is of a consumer that had not joined yet, or had
        # just left: what the others have does not depend on it before it comes.
        known = names if self._stored is None else self._stored.granted.keys() & set(names)
        # It may have changed while the states of its sealed segments were asked for.
        self.group.set_layout(self.live.layout)
        self.group.restore(known, self._stored)
        for name in names:
            self._start_grace(name)
        self.group.drained = set(drained)

    def connections(self) -> list[ClientConnection]:
        """The connections of the registered, and of those that may attach again."""
        members = (*self._members.values(), *self._former.values())
        return list(dict.fromkeys(member.connection for member in members))

    def send_away(self, why: str) -> None:
        """End the connections of the registered: it makes their clients register again."""
        connections = self.connections()
        # First: nobody is to get what they lose.
        self.close()
        for connection in connections:
            connection.close(why)

    def close(self) -> None:
        """The topic is gone, or led by another: stop all timers, tell nothing."""
        for timers in (self._grace, self._release, self._take_up, self._repeat, self._dismiss):
            for timer in timers.values():
                timer.cancel()
            timers.clear()
        for pending in (self._dealing, self._watching):
            if pending is not None:
                pending.cancel()
        self._missing_since.clear()
        self._end_proofs(self._proving.keys())
        for member in (*self._members.values(), *self._former.values()):
            member.forget_connection()
        self._members.clear()
        self._former.clear()
        self._writer.end()

    async def stored(self) -> None:
        """Return when the assignment is stored; after `close`, when its last write has ended."""
        await self._writer.stored()

    def is_registered(self, name: str) -> bool:
        """Whether a consumer has a share now."""
        return name in self.group.sessions

    def speaks_at_segments(self, name: str) -> bool:
        """Whether a segment consumer of that name is one of ours, now or by its connection."""
        return name in self.group.sessions or name in self._former

    @property
    def idle(self) -> bool:
        """Whether nobody is registered, attached, or may come back, and this is stored."""
        used = self.group.sessions or self._former or self._attached or self._grace
        return not (used or self._writer.busy)

    @property
    def members(self) -> Mapping[str, Member]:
        """The connected consumers."""
        return self._members

    # What clients do at the controller

    def register(
        self, name: str, connection: ClientConnection, consumer_id: int
    ) -> ScalableConsumerAssignment:
        """A consumer comes, or comes back; its whole assignment."""
        for members in (self._members, self._former):
            earlier = members.pop(name, None)
            if earlier is not None:
                earlier.forget_connection()
        self._cancel(self._grace, name)
        self._enter(name, connection, consumer_id)
        can_share = can_share_segments(connection.client_version)
        assignments = dict(self.group.connect(name, can_share=can_share))
        own = assignments.pop(name)
        self._tell(assignments)
        log.debug("ordered_consumer_registered", consumer=name, segments=sorted(own))
        return self._assignment(own)

    def unregister(self, name: str, connection: ClientConnection, consumer_id: int) -> None:
        """SCALABLE_TOPIC_UNSUBSCRIBE; nothing if another registration speaks for it by now."""
        for members in (self._members, self._former):
            member = members.get(name)
            if member is not None and member.is_of(connection, consumer_id):
                del members[name]
                member.forget_connection()
                self._leave(name)

    def forget_if_left(self, name: str, connection: ClientConnection, consumer_id: int) -> bool:
        """Forget the connection of a consumer that is taken for closed; whether it has left."""
        present, former = self._members.get(name), self._former.get(name)
        if present is not None and present.is_of(connection, consumer_id):
            return False
        if former is not None and former.is_of(connection, consumer_id):
            del self._former[name]
            former.forget_connection()
        return True

    # What happens at the segments

    def attached(self, segment_id: int, consumer: SegmentConsumer) -> None:
        """Note that a segment consumer attached.

        A consumer that was taken for closed, and attaches while its connection lives, is registered
        again: that it had left was inferred from what the official client does, and may be wrong.
        """
        if consumer in self._attached:
            return
        name = self._owner_of(segment_id, consumer)
        self._attached[consumer] = (segment_id, name)
        former = self._former.get(name)
        self.group.attached(segment_id, name)
        if former is not None and not former.connection.closing:
            log.info("ordered_consumer_registered_again", consumer=name, segment=segment_id)
            assignment = self.register(name, former.connection, former.consumer_id)
            former.connection.send(assignment_update(former.consumer_id, assignment))
            self._changed(self, name)
        self._store_if_changed()
        self._watch_soon()

    def detached(self, consumer: SegmentConsumer, *, by_command: bool, seen: bool = True) -> None:
        """A segment consumer is gone; unless `seen`, nobody knows how."""
        known = self._attached.pop(consumer, None)
        if known is None:
            return
        segment_id, name = known
        if seen:
            is_free = self.group.detached_needs_deal(segment_id, name, by_command=by_command)
        else:
            is_free = self.group.lost_sight_needs_deal(segment_id, name)
        if is_free:
            self._deal_soon()
        self._watch_soon()
        if seen and by_command and self.group.has_closed_down(name):
            log.debug("ordered_consumer_closed", consumer=name)
            self._part_with(name)

    def replay(self, segment_id: int, consumer: SegmentConsumer) -> None:
        """A segment consumer was there before this controller."""
        if consumer not in self._attached:
            name = self._owner_of(segment_id, consumer)
            self._attached[consumer] = (segment_id, name)
            self.group.attached(segment_id, name)

    def mark_drained(self, segment_id: int, drained: bool) -> None:
        """A sealed segment is drained, or not any longer."""
        known = self.group.drained
        if drained != (segment_id in known):
            self._tell(self.group.set_drained(known ^ {segment_id}))

    def mark_shareable(self, states: Mapping[int, bool]) -> None:
        """Consumers may share these segments, or not any longer, as far as their messages go."""
        known = self.group.shareable
        changed = {each for each, shareable in states.items() if shareable != (each in known)}
        if changed and self.group.shareable_needs_deal(known ^ changed):
            self._tell(self.group.deal())

    def layout_changed(self) -> None:
        """The topic's layout is a newer one."""
        self._tell(self.group.set_layout(self.live.layout))

    def start(self) -> None:
        """Deal for the first time."""
        self._tell(self.group.deal())

    # Within

    def _enter(self, name: str, connection: ClientConnection, consumer_id: int) -> None:
        forget = connection.on_close(lambda: self._connection_lost(name, member))
        member = self._members[name] = Member(connection, consumer_id, forget)

    def _owner_of(self, segment_id: int, consumer: SegmentConsumer) -> str:
        """The registered consumer that a segment consumer belongs to; else its own name."""
        suffix = segment_suffix(segment_id)
        if consumer.name.endswith(suffix):
            return consumer.name.removesuffix(suffix)
        for name, member in self._members.items():
            if member.connection is consumer.connection and segment_id in self.group.holdings.of(
                name
            ):
                return name
        return consumer.name

    def _connection_lost(self, name: str, member: Member) -> None:
        if self._former.get(name) is member:
            del self._former[name]
        if self._members.get(name) is member:
            del self._members[name]
            self._start_grace(name)
            self._tell(self.group.disconnect(name))

    def _start_grace(self, name: str) -> None:
        self._cancel(self._grace, name)
        self._grace[name] = self._loop.call_later(self._grace_s(), self._grace_over, name)

    def _grace_over(self, name: str) -> None:
        self._grace.pop(name, None)
        session = self.group.sessions.get(name)
        if session is None:
            self._changed(self, name)
        elif session.state is SessionState.DISCONNECTED:
            log.info("ordered_consumer_evicted", consumer=name, subscription=self.subscription)
            self._leave(name)

    def _part_with(self, name: str) -> None:
        """It seems to have closed down; its connection may still speak for it."""
        member = self._members.pop(name, None)
        if member is not None:
            self._former[name] = member
            if member.connection.client_version.startswith(RELAY_CLIENT):
                # The relay is a connection of its own, and only this one knows that it is not used.
                timer = self._loop.call_later(TAKE_UP_WAIT_S, self._end_relay, name, member)
                self._cancel(self._dismiss, name)
                self._dismiss[name] = timer
        self._leave(name)

    def _end_relay(self, name: str, member: Member) -> None:
        """Have the relay of a consumer ended that closed down, and has not come back since."""
        del self._dismiss[name]
        if self._former.get(name) is member:
            del self._former[name]
            member.forget_connection()
            member.connection.send(success(member.consumer_id))

    def _leave(self, name: str) -> None:
        self._cancel(self._grace, name)
        self._tell(self.group.leave(name))
        self._changed(self, name)

    def _tell(self, assignments: Assignments) -> None:
        self._counters.rebalances += bool(assignments)
        for name, own in assignments.items():
            member = self._members.get(name)
            if member is not None:
                update = assignment_update(member.consumer_id, self._assignment(own))
                member.connection.send(update)
                self._counters.assignments_sent += 1
        self._store_if_changed()
        self._watch_over()

    def _deal_soon(self) -> None:
        """Grant a segment that was released: at once, or together with others."""
        if self._dealing is None:
            wait_s = self._dealt_s + RELEASE_COALESCE_S - self._loop.time()
            if wait_s > 0:
                self._dealing = self._loop.call_later(wait_s, self._deal)
            else:
                self._deal()

    def _deal(self) -> None:
        self._dealing = None
        self._dealt_s = self._loop.time()
        self._tell(self.group.deal())

    def _store_if_changed(self) -> None:
        """Have the assignment stored.  It changes only with the holdings."""
        if self.group.holdings is not self._seen_holdings:
            self._seen_holdings = self.group.holdings
            self._writer.changed()

    def _assignment(self, own: Iterable[int]) -> ScalableConsumerAssignment:
        layout = self.live.layout
        segments = [layout.segments[segment_id] for segment_id in own]
        shared = self.group.holdings.shared
        return assignment_of(self.live.name, layout.epoch, segments, shared=shared)

    # Timers for what may never happen

    def _watch_soon(self) -> None:
        """Check the timers a moment later, once for many events: they run for seconds."""
        if self._watching is None:
            self._watching = self._loop.call_later(RELEASE_COALESCE_S, self._watch_over)

    def _watch_over(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        awaited = self.group.awaited()
        for each in self._release.keys() - awaited:
            self._cancel(self._release, each)
        for each in awaited - self._release.keys():
            self._release[each] = self._loop.call_later(RELEASE_WAIT_S, self._give_up, each)
        idle = {name for name in self._members if self.group.is_idle(name)}
        for name in self._take_up.keys() - idle:
            self._cancel(self._take_up, name)
        for name in idle - self._take_up.keys():
            # One that was closed before it had any segment said nothing: the official client tells
            # the controller nothing, and there was no segment to close.
            if self.group.was_seen(name):
                timer = self._loop.call_later(TAKE_UP_WAIT_S, self._not_taken_up, name)
            else:
                timer = self._loop.call_later(FIRST_TAKE_UP_WAIT_S, self._not_seen, name)
            self._take_up[name] = timer
        self._watch_differing()
        former = self.group.holdings.former
        letting_go = {
            consumer.connection
            for consumer, (segment_id, name) in self._attached.items()
            if name in former(segment_id) and consumer.connection is not None
        }
        self._end_proofs(self._proving.keys() - letting_go)
        for connection in letting_go - self._proving.keys():
            self._proving[connection] = self._loop.create_task(self._prove(connection))

    def _watch_differing(self) -> None:
        group, now_s = self.group, self._loop.time()
        missing = [(name, s) for name in self._members for s in group.missing_from(name)]
        self._missing_since = {each: self._missing_since.get(each, now_s) for each in missing}
        behind = {name for name, _ in missing}
        behind.update(name for name in self._members if group.not_released_by(name))
        for name in self._repeat.keys() - behind:
            self._cancel(self._repeat, name)
        for name in behind - self._repeat.keys():
            self._repeat_later(name)

    def _repeat_later(self, name: str) -> None:
        self._repeat[name] = self._loop.call_later(ASSIGNMENT_REPEAT_S, self._send_again, name)

    def _send_again(self, name: str) -> None:
        """Send its assignment again to a consumer that differs from it, and check again later.

        The M1 client loses an assignment that comes while it attaches to the segments of its first
        one.
        """
        member, missing = self._members[name], self.group.missing_from(name)
        if not missing and not self.group.not_released_by(name):
            # It attached or let go since the timers were checked.
            del self._repeat[name]
            return
        own = self.group.to_send_again(name)
        assignments = [own]
        now_s = self._loop.time()
        failed = {
            s
            for s in missing
            if now_s - self._missing_since.get((name, s), now_s) >= TAKE_UP_WAIT_S
        }
        if failed:
            # A subscribe of the official client ends within its operation timeout (30 s).  If it
            # failed, only a segment that comes anew is tried again.  A segment that is missing for
            # less may be subscribed to right now.
            self._missing_since.update(dict.fromkeys([(name, s) for s in failed], now_s))
            assignments = [own - failed, own]
        log.debug("ordered_consumer_assignment_sent_again", consumer=name, missing=sorted(missing))
        for segments in assignments:
            update = assignment_update(member.consumer_id, self._assignment(segments))
            member.connection.send(update)
            self._counters.assignments_sent += 1
        self._repeat_later(name)

    async def _prove(self, connection: ClientConnection) -> None:
        # A client that knows its connection to be lost closes no segment over it, and nobody else
        # asks for the segment before it is free.  So only a PING shows that it is lost.
        while True:
            if not await connection.is_alive():
                break
            await asyncio.sleep(LETTING_GO_CHECK_S)
        del self._proving[connection]
        connection.abort("it is silent and others wait for a segment that was taken from it")

    def _end_proofs(self, connections: Iterable[ClientConnection]) -> None:
        for connection in list(connections):
            self._proving.pop(connection).cancel()

    def _give_up(self, awaited: tuple[int, str]) -> None:
        self._release.pop(awaited, None)
        self._tell(self.group.give_up_waiting({awaited}))

    def _not_seen(self, name: str) -> None:
        """It was never seen: it is taken for closed, unless all of its segments may be loading."""
        if any(map(self._is_loaded, self.group.holdings.of(name))):
            self._not_taken_up(name)
        else:
            rest_s = TAKE_UP_WAIT_S - FIRST_TAKE_UP_WAIT_S
            self._take_up[name] = self._loop.call_later(rest_s, self._not_taken_up, name)

    def _not_taken_up(self, name: str) -> None:
        """Others are waiting, and this one reads nothing: it is taken for closed."""
        self._take_up.pop(name, None)
        if self.group.is_idle(name) and len(self.group.registered()) > 1:
            log.info("idle_ordered_consumer_removed", consumer=name)
            self._part_with(name)
        else:
            self._watch_over()

    @staticmethod
    def _cancel(timers: dict[Key, asyncio.TimerHandle], key: Key) -> None:
        timer = timers.pop(key, None)
        if timer is not None:
            timer.cancel()
