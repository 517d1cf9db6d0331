"""`SegmentSubscriptions`: the replicated subscriptions of one segment, as its owner moves them."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol
from weakref import ref

import structlog

from broker.replication.errors import LoggedReasons
from broker.replication.subscription_backlog import (
    NONE_LEFT,
    EntryRoom,
    StoredEntry,
    SubscriptionBacklog,
    stored_entry_of,
)
from broker.topics.completeness import Completeness, received_of, still_lacking
from broker.topics.replicated_ranges import SourceSegment
from broker.topics.segment_sources import SegmentSources, StaleSender
from broker.topics.source_positions import REPLICATOR_PREFIX
from broker.topics.subscription import Subscription
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    PositionsTold,
    SubscriptionState,
)
from broker.topics.topic import Topic
from broker.topics.weak_references import TopicGone, require_present
from config.bounds import (
    CURSORS_AT_ONCE,
    READ_BATCH_BYTES,
    READ_BATCH_ENTRIES,
    REPLICATED_SUBSCRIPTION_ENTRIES,
    REPLICATED_SUBSCRIPTION_ENTRIES_AT_ONCE,
    SUBSCRIPTION_IDLE_PERIODS,
)
from magnetar.protocol.frame_error import FrameError
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import TopicName, segment_name
from magnetar.protocol.server_error import MagnetarError
from storage.callbacks import ignore
from storage.managed_ledger.types import CursorNotFound, Entry, ManagedLedgerState
from txn.ack_records import for_each

log = structlog.get_logger(__name__)


class Exchange(NamedTuple):
    """How a broker exchanges the positions of subscriptions with other clusters."""

    enabled: bool
    period_s: float
    """Between two questions of one topic."""
    ask_soon: Callable[[TopicName, str], None]
    """Tell the leader of a scalable topic that there is something to ask another cluster."""
    room: EntryRoom
    """For the entries of all segments here that are not acknowledged."""


class SentEntries(Protocol):
    """What is known of the replicators of a segment."""

    def listed(self) -> frozenset[str]:
        """The other clusters of the list in force."""
        ...

    def last_sent(self, cluster: str) -> Position | None:
        """The last entry that can have been sent to a cluster; None: there is no replicator."""
        ...

    async def incarnation(self) -> int:
        """That of the scalable topic, as new as any change that was answered.

        Raises `TopicNotFound` once the segment is pruned.
        """
        ...


class _Tracked:
    """One replicated subscription, from its cursor's position on."""

    def __init__(self, subscription: Subscription, room: EntryRoom) -> None:
        cursor = subscription.cursor
        self.subscription = subscription
        self.resets = cursor.resets
        self.backlog = SubscriptionBacklog(
            cursor.mark_delete,
            cursor.is_acknowledged,
            limit=REPLICATED_SUBSCRIPTION_ENTRIES,
            room=room,
            progress=lambda: cursor.progress,
        )
        self.told: dict[str, Position] = {}
        """By cluster: below this position all is acknowledged here, and copies there too."""
        self._lacking: dict[tuple[str, int], Mapping[int, Position]] = {}
        """By cluster and incarnation: see `still_lacking`."""

    def is_of(self, subscription: Subscription) -> bool:
        """Whether what was read of it still holds: not after a seek."""
        return subscription is self.subscription and subscription.cursor.resets == self.resets

    @property
    def completeness(self) -> Completeness:
        """What is noted of it (F11)."""
        return _completeness_of(self.subscription)

    def lacking(self, told: PositionsTold, sources: SegmentSources | None) -> Collection[int]:
        """The source segments of which it may lack copies that are not consumed there (F11)."""
        name, noted = self.subscription.name, self.completeness
        if sources is None or told.cluster in noted.clusters or name in told.made_for:
            return ()
        key = (told.cluster, told.incarnation)
        lacking = self._lacking.get(key)
        if lacking is None:
            # By now at least as much was received as when it was made.
            received = sources.last_received() if noted.received is None else noted.received
            lacking = received_of(received, *key)
        if not lacking:
            return ()
        self._lacking[key] = still_lacking(lacking, told.below[name], told.segments)
        return self._lacking[key].keys()

    @property
    def next_position(self) -> Position:
        """The next entry to read, or its place."""
        read = self.backlog.read
        behind = read.following
        return self.subscription.cursor.first_unacknowledged(behind)


class SegmentSubscriptions:
    """Reads what replicated subscriptions have before them, and moves them as clusters tell.

    The rules F1 to F11 are in `../../docs/decisions/replicated-subscriptions-of-segments.md`.  Its
    owner asks nobody: the leader of the topic asks it, and is told when there is something to ask.
    Without news it has no timer, and reads nothing.
    """

    def __init__(self, topic: Topic, sent: SentEntries, exchange: Exchange) -> None:
        self._reference = ref(topic)
        self._parent = segment_name(topic.name).parent
        self._sent = sent
        self._exchange = exchange
        self._loop = asyncio.get_running_loop()
        self._tracked: dict[str, _Tracked] = {}
        self._reading = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[bool] | None = None
        self._has_news = self._renewing = self._closed = False
        self._logged = LoggedReasons()
        self._listened: list[Subscription] = []
        self._stop_listening: Sequence[Callable[[], None]] = ()

    @property
    def _topic(self) -> Topic:
        return require_present(self._reference)

    @property
    def quiet(self) -> bool:
        """Whether it does nothing until something happens."""
        return self._timer is None and self._looking is None and not self._renewing

    def changed(self) -> None:
        """Begin or end, soon: other subscriptions have the note now, or the list has changed."""
        if not self._renewing and not self._closed:
            self._renewing = True
            self._loop.call_soon(self._renew)

    def _renew(self) -> None:
        """Listen for news of the subscriptions that are replicated now, and of replicators."""
        self._renewing = False
        if self._closed:
            return
        self._track()
        self._stop()
        if not self._tracked:
            return
        topic = self._topic
        self._stop_listening = (
            topic.ledger.on_append(self.news),
            topic.buffer.on_max_read_position(self.news),
        )
        replicated = [each.subscription for each in self._tracked.values()]
        self._listened = [*replicated, *topic.replicator_cursors.values()]
        for each in self._listened:
            each.on_acknowledged = self.news
        self.news()

    def close(self) -> None:
        """Do nothing more."""
        self._closed = True
        self._stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._looking is not None:
            self._looking.cancel()
        for name in list(self._tracked):
            self._forget(name)
        # Its owner has it: a circle would wait for a garbage collection.
        self._sent = _Nothing()

    def _stop(self) -> None:
        for stop in self._stop_listening:
            stop()
        self._stop_listening = ()
        for each in self._listened:
            each.on_acknowledged = ignore
        self._listened.clear()

    # Requests of the leader

    async def state(self, cluster: str) -> SubscriptionState:
        """How far the subscriptions have come, for another cluster (F1, F3).

        Raises the errors of reading.
        """
        await self._read_on()
        return self._state(cluster)

    async def take_positions(self, told: PositionsTold) -> CopiesLeft:
        """Acknowledge the copies that are acknowledged in their source cluster (F1, F8).

        Raises `StaleSender`, and the errors of reading, of writing and of proving that the segment
        is owned.
        """
        await self._read_on()
        # Nothing is awaited from here on until all is decided.
        self._track()
        topic, sources = self._topic, self._topic.sequence_store.sources
        if sources is not None and sources.is_newer_known(
            told.cluster, told.incarnation, told.layout_epoch
        ):
            raise StaleSender(
                f"Cluster {told.cluster} has a newer layout of {self._parent} than that of epoch "
                f"{told.layout_epoch}: read it again."
            )
        tracked = {name: self._tracked[name] for name in told.below if name in self._tracked}
        taken = {name: _take_told(each, told) for name, each in tracked.items()}
        lacking = {name: each.lacking(told, sources) for name, each in tracked.items()}
        first = {
            name: self._first_copies(each, told, lacking[name]) for name, each in tracked.items()
        }
        late = frozenset(name for name, segments in lacking.items() if segments)
        is_active = self._exchange.enabled and bool(self._sent.listed())
        missing = frozenset(
            name for name in told.below if is_active and not _has(topic.subscriptions, name)
        )
        await self._acknowledge(tracked, taken)
        # F9: once it is told that nothing is left, the other cluster asks no more.
        dirty = [s for each in tracked.values() if (s := each.subscription).cursor.dirty]
        await for_each(dirty, Subscription.persist, at_once=CURSORS_AT_ONCE)
        if sources is None or sources.is_newest(told.cluster, told.incarnation):
            await self.note_complete(told.cluster, first.keys() - late)
        if first and topic.context.transactions.eager_epochs:
            # A former owner does not know what copies came after it.
            await topic.owner.confirm()
        is_terminated = topic.ledger.state is ManagedLedgerState.TERMINATED
        from_start = frozenset(n for n, each in tracked.items() if each.completeness.from_start)
        return CopiesLeft(is_terminated, first, missing, late, from_start)

    async def note_complete(self, cluster: str, subscriptions: Collection[str]) -> None:
        """Note durably of which subscriptions nothing of a cluster is missing here (F11).

        Raises the errors of writing.
        """
        for name in subscriptions:
            subscription = self._topic.subscriptions.get(name)
            if subscription is not None and cluster not in _completeness_of(subscription).clusters:
                await _note(subscription, lambda noted: noted.complete_for(cluster))

    async def take_answer(self, answer: CopiesAnswered) -> None:
        """Acknowledge the entries of which no copy is left in another cluster (F2, F3).

        Raises as `SentEntries.incarnation`.
        """
        self._track()
        found = self._topic.replicator_cursors.get(REPLICATOR_PREFIX + answer.cluster)
        if found is None:
            return
        cursor, cluster, answered = found.cursor, answer.cluster, answer.answered
        began = cursor.began
        if began is not None and any(
            each.backlog.has_own(cluster, began, answered) for each in self._tracked.values()
        ):
            # F6: copies of what was sent as another incarnation were not asked for.
            cursor.send_as(await self._sent.incarnation())
            self._track()
        if cursor.sent_to != answer.incarnation:
            # F6: what another incarnation had there is gone, and so tells nothing.
            cursor.send_to(answer.incarnation)
            await cursor.persist()
            self._track()
        tracked = {name: self._tracked[name] for name in answer.first if name in self._tracked}
        taken: dict[str, list[Position]] = {}
        for name, each in tracked.items():
            # F9: copies behind the first one that is left may not have been read there.
            known = min(answer.below.get(name, EARLIEST), answer.first[name])
            each.told[cluster] = max(known, each.told.get(cluster, EARLIEST))
            if cursor.began is not None:
                # The owner that was asked may have died with what it had passed over.
                sent_after = max(cursor.began, answer.began)
                taken[name] = each.backlog.acknowledge_own(
                    cluster, answer.first[name], sent_after, answered
                )
        await self._acknowledge(tracked, taken)
        for name, each in tracked.items():
            if each.completeness.made_for == cluster and name not in answer.late:
                await _note(each.subscription, Completeness.made_here)

    async def _acknowledge(
        self, tracked: Mapping[str, _Tracked], taken: Mapping[str, Sequence[Position]]
    ) -> None:
        """Acknowledge what was taken out of backlogs."""
        waiting = dict(taken)
        try:
            for name, positions in taken.items():
                await tracked[name].subscription.acknowledged_elsewhere(positions)
                del waiting[name]
        finally:
            # Cut off, as the leader's connection was lost: what is left is read anew.
            for name in waiting:
                if self._tracked.get(name) is tracked[name]:
                    self._forget(name)

    def _state(self, cluster: str) -> SubscriptionState:
        self._track()
        found = self._topic.replicator_cursors.get(REPLICATOR_PREFIX + cluster)
        made_for = frozenset(
            name for name, each in self._tracked.items() if each.completeness.made_for == cluster
        )
        if found is None or not self._tracked:
            return SubscriptionState(None, {}, settled=True, made_for=made_for)
        answered = found.cursor.mark_delete
        below = {name: self._below(each, cluster, answered) for name, each in self._tracked.items()}
        last_sent, began = self._sent.last_sent(cluster), found.cursor.began
        settled = True
        for name, each in self._tracked.items():
            told = each.told.get(cluster, EARLIEST)
            # Of entries that were not sent nothing has to be told.
            is_told = told >= below[name] or (last_sent is not None and told > last_sent)
            is_left = began is not None and each.backlog.has_own(cluster, began, answered)
            settled = settled and is_told and not is_left
        return SubscriptionState(answered, below, settled, made_for, began or answered)

    def _below(self, tracked: _Tracked, cluster: str, answered: Position) -> Position:
        ledger = self._topic.ledger
        below = tracked.backlog.acknowledged_below(cluster, answered)
        is_over = ledger.state is ManagedLedgerState.TERMINATED and below > ledger.last_confirmed
        return NONE_LEFT if is_over else below

    def _first_copies(
        self, tracked: _Tracked, told: PositionsTold, lacking: Collection[int]
    ) -> Mapping[int, Position]:
        # F5: copies behind the max read position are answered, and cannot be read yet.
        is_all_read = tracked.next_position > self._topic.ledger.last_confirmed
        first: dict[int, Position] = {}
        for segment_id, below in told.below[tracked.subscription.name].items():
            source = SourceSegment(told.cluster, told.incarnation, segment_id)
            copy = tracked.backlog.first_copy(source, is_all_read=is_all_read)
            # F11: their cluster knows that for itself.
            first[segment_id] = min(copy, below) if segment_id in lacking else copy
        return first

    # News

    def news(self) -> None:
        """See within a period whether there is something to ask other clusters."""
        if not self._has_news:
            self._has_news = True
            self._look_in(self._exchange.period_s)

    def _look_in(self, pause_s: float) -> None:
        if self._closed or self._looking is not None:
            return  # `_looked` goes on
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(pause_s, self._look_soon)

    def _look_soon(self) -> None:
        self._timer = None
        self._looking = self._loop.create_task(self._look())
        self._looking.add_done_callback(self._looked)

    async def _look(self) -> bool:
        """Remind the leader of clusters that are to be asked; whether to look again by itself."""
        self._has_news = False
        try:
            await self._read_on()
            self._logged.forget()
        except MagnetarError as error:
            if self._logged.is_new(error):
                segment = str(self._topic.name)
                log.warning("subscription_not_read", segment=segment, error=str(error))
            self._has_news = True
        for each in list(self._tracked.values()):
            each.backlog.make_room()
            await asyncio.sleep(0)
        unsettled = [each for each in self._sent.listed() if not self._state(each).settled]
        for cluster in unsettled:
            self._exchange.ask_soon(self._parent, cluster)
        # What other segments held may be acknowledged meanwhile, and nobody tells this one.
        waiting = any(each.backlog.waits_for_others for each in self._tracked.values())
        return waiting or bool(unsettled)

    def _looked(self, task: "asyncio.Task[bool]") -> None:
        self._looking = None
        if task.cancelled() or self._closed:
            return
        error = task.exception()
        if error is not None:
            log.error("subscription_not_read", segment=str(self._parent), exc_info=error)
        if error is None and self._has_news:
            self._look_in(self._exchange.period_s)
        elif error is not None or task.result():
            # A leader that asks goes on by itself.  Another one may follow it that does not know.
            self._look_in(SUBSCRIPTION_IDLE_PERIODS * self._exchange.period_s)

    # Reading

    def _track(self) -> None:
        """Take up the subscriptions that are replicated now, at their positions."""
        wanted: dict[str, Subscription] = {}
        if self._exchange.enabled and self._sent.listed() and not self._closed:
            wanted = {
                name: each
                for name, each in self._topic.subscriptions.items()
                if each.cursor.replicated
            }
        for name, tracked in list(self._tracked.items()):
            if name not in wanted or not tracked.is_of(wanted[name]):
                self._forget(name)
        for name, subscription in wanted.items():
            if name not in self._tracked:
                self._tracked[name] = _Tracked(subscription, self._exchange.room)
            self._tracked[name].backlog.moved(subscription.cursor.mark_delete)

    def _forget(self, name: str) -> None:
        """Read a subscription anew if it is still replicated."""
        self._tracked.pop(name).backlog.close()

    async def _read_on(self) -> None:
        """Read what is committed, as far as there is room, in slices.  Raises as reading does."""
        async with self._reading:
            while await self._read_some():
                pass

    async def _read_some(self) -> bool:
        """Read the entries that come next for one subscription, or for several; False: none."""
        topic = self._topic
        self._track()
        last = topic.max_read_position()
        starts = [each.next_position for each in self._tracked.values() if each.backlog.has_room()]
        start = min(starts, default=last)
        if self._closed or not starts or start > last:
            return False
        ledger, size = topic.ledger, READ_BATCH_ENTRIES
        entries = ledger.read_cached(start, size, READ_BATCH_BYTES)
        if entries is None:
            entries = await ledger.read(
                start, max_entries=size, max_bytes=READ_BATCH_BYTES, up_to=last
            )
        self._track()
        # After a seek a subscription may have more to read before these entries.
        readers = {each for each in self._tracked.values() if each.next_position >= start}
        committed = [entry for entry in entries if entry.position <= last]
        noted = 0
        for entry in committed:
            self._add(entry, readers)
            noted += len(readers)
            if noted >= REPLICATED_SUBSCRIPTION_ENTRIES_AT_ONCE:
                noted = 0
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        return bool(committed)

    def _add(self, entry: Entry, readers: set[_Tracked]) -> None:
        """Give an entry to the readers; one without room gets no further entries."""
        position = entry.position
        stored = self._stored_entry(entry)
        for each in list(readers):
            if position <= each.backlog.read:
                continue
            if not each.backlog.has_room():
                readers.discard(each)
                continue
            if stored is None:
                # As dispatchers do: no consumer may see it.
                each.subscription.skip(position)
            each.backlog.add(stored or StoredEntry(position, of_no_origin=True))

    def _stored_entry(self, entry: Entry) -> StoredEntry | None:
        """What an entry is; None for a marker, or one of an aborted transaction."""
        try:
            metadata = parse_metadata(entry.data)
        except FrameError:
            return StoredEntry(entry.position, of_no_origin=True)
        if metadata.marker_type or self._topic.is_aborted(entry):
            return None
        return stored_entry_of(metadata, entry.position)


class _Nothing:
    """Nothing is sent: the segment is closed."""

    def listed(self) -> frozenset[str]:
        """No cluster."""
        return frozenset()

    def last_sent(self, cluster: str) -> None:
        """No replicator."""

    async def incarnation(self) -> int:
        """Raise `TopicGone`."""
        raise TopicGone("The segment was closed: look its topic up again.")


def _take_told(tracked: _Tracked, told: PositionsTold) -> list[Position]:
    """The entries to acknowledge as another cluster tells."""
    backlog = tracked.backlog
    positions = backlog.acknowledge_pruned(told.cluster, told.incarnation, told.segments)
    for segment_id, below in told.below[tracked.subscription.name].items():
        source = SourceSegment(told.cluster, told.incarnation, segment_id)
        positions += backlog.acknowledge_copies(source, below)
    return positions


def _completeness_of(subscription: Subscription) -> Completeness:
    return Completeness.parse(subscription.cursor.replication_note)


async def _note(subscription: Subscription, change: Callable[[Completeness], Completeness]) -> None:
    with suppress(CursorNotFound):  # it was deleted meanwhile
        await subscription.cursor.change_replication_note(
            lambda note: change(Completeness.parse(note)).note
        )


def _has(subscriptions: Mapping[str, Subscription], name: str) -> bool:
    found = subscriptions.get(name)
    return found is not None and found.durable
