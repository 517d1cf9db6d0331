"""DAG sessions: a client asks for a topic's layout once, and gets every later one too."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import structlog

from broker.placement import Placement
from broker.scalable.answers import LayoutUpdate, dag_error
from broker.scalable.dag import dag_of, synthetic_dag
from broker.scalable.layout import Layout, Segment
from broker.scalable.live_topics import LiveTopic, LiveTopics, not_found, twin
from broker.scalable.records import segment_of
from broker.scalable.send_pause import ProducersOf, SendPause, by_connection
from broker.topics.client_connection import ClientConnection
from broker.topics.producer import Producer
from config.bounds import DAG_COALESCE_S, SESSIONS_PER_CONNECTION
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import (
    SegmentName,
    TopicDomain,
    TopicName,
    parse_topic_name,
    require_persistent,
    segment_name,
)
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.clock import Clock

log = structlog.get_logger(__name__)


class TooManySessions(PeerError):
    """A connection has too many sessions, watches or ordered consumers at once."""

    code: ClassVar[ServerError] = ServerError.TOO_MANY_REQUESTS


CreateMissing = Callable[[TopicName], Awaitable[LiveTopic | None]]
"""Creates a missing topic if that is allowed; None if it is not."""
PartitionCount = Callable[[TopicName], Awaitable[int]]
"""Counts the partitions of a regular topic; 0 for an unpartitioned or missing one."""


class OtherBrokers(Protocol):
    """The segments of other brokers, and the senders to them."""

    def has(self, segment: SegmentName) -> bool:
        """Whether another broker owns a segment, as far as is known."""
        ...

    def has_owner(self, segment: SegmentName) -> bool:
        """Whether a broker owns a segment, as far as is known."""
        ...

    async def find_owners(self, segments: Collection[SegmentName]) -> None:
        """Have segments without an owner loaded; return once their owners are known here.

        Returns after OWNERS_WAIT_S in any case.
        """
        ...

    def paused(
        self, closing: Collection[SegmentName], active: Collection[SegmentName]
    ) -> AbstractAsyncContextManager[bool]:
        """Have the senders to the segments `closing` pause while the context lasts.

        Enters once they have, or after PAUSE_ELSEWHERE_S; false if there are none.  `active` are
        the topic's other segments.
        """
        ...


@dataclass(eq=False, slots=True)
class DagSession:
    """One session of one connection.

    `topic` is None until its layout can be sent; `sent` is the newest layout that was.  `ordinary`:
    the client attaches to an ordinary topic, whose name in the `topic` domain is `topic`; the next
    layout comes when that one becomes scalable.
    """

    connection: ClientConnection
    session_id: int
    topic: TopicName | None = None
    sent: LayoutUpdate | None = None
    ordinary: bool = False
    is_behind: bool = False
    """Whether the newest layout waits for the client to read, or for a pause of its SENDs."""


class DagSessions:
    """Sends a topic's layout to every session that asked for it, and every later layout.

    Each layout is pushed once to each session, in epoch order, in the turn of the loop in which the
    change became known.  A client that does not read gets only the newest one, when it reads again,
    and one with a producer at a segment that was sealed gets it in a pause of its SENDs.  If other
    brokers have such segments, all sessions wait for the pauses there: nobody knows which of them
    belongs to whom.
    When segments or the lead of a topic move to other brokers, its newest layout is pushed again
    with the new addresses.  A session of an ordinary topic gets a layout with the topic or its
    partitions as segments, and goes on with real layouts when the topic becomes scalable.

    An error is only ever sent as a first answer: after a layout clients would stop listening and
    keep a stale layout for good.
    """

    def __init__(
        self,
        topics: LiveTopics,
        placement: Placement,
        clock: Clock,
        *,
        create_missing: CreateMissing,
        partition_count: PartitionCount,
        producers_of: ProducersOf,
        others: OtherBrokers | None = None,
    ) -> None:
        """`others` are the other brokers, None for a single broker."""
        self._topics = topics
        self._placement = placement
        self._clock = clock
        self._create_missing = create_missing
        self._partition_count = partition_count
        self._producers_of = producers_of
        self._others = others
        self._by_connection: dict[ClientConnection, dict[int, DagSession]] = {}
        self._by_topic: dict[TopicName, dict[DagSession, None]] = {}
        self._updates: dict[TopicName, dict[bool, tuple[Layout, LayoutUpdate]]] = {}
        """The newest layout of each topic with sessions, and the update that they share: one for
        those without TLS, and one for those with TLS (`dag_of`)."""
        self._moved: dict[TopicName, asyncio.TimerHandle] = {}
        self._awaiting_others: set[DagSession] = set()
        """Sessions that are behind, as senders at other brokers have not paused."""
        self._pushes = BackgroundTasks(log, failure_event="layout_not_pushed")
        topics.on_layout(self._push)

    async def open(
        self, connection: ClientConnection, session_id: int, text: str, *, create_if_missing: bool
    ) -> None:
        """SCALABLE_TOPIC_LOOKUP: answer with the layout and push later ones, or with an error."""
        self.close(connection, session_id)
        try:
            session = self._enter(connection, session_id)
        except TooManySessions as error:
            connection.send(dag_error(session_id, error))
            return
        try:
            name = parse_topic_name(text)
            if name.domain is TopicDomain.PERSISTENT and name.partition_index is None:
                # Before the record is read: it may be created at any time.
                self._await_migration(session, name)
            live = await self._resolve(name, create_if_missing=create_if_missing)
            partitions = 0 if live is not None else await self._partition_count(name)
        except MagnetarError as error:
            log.debug("dag_session_refused", topic=text, error=str(error))
            if self._is_open(session):
                self.close(connection, session_id)
                connection.send(dag_error(session_id, error))
            return
        if not self._is_open(session) or session.sent is not None or session.is_behind:
            return  # closed; or the topic became scalable, and its layout was pushed
        if live is None:
            now_ms = self._clock.now_ms()
            dag = synthetic_dag(
                name, partitions, self._placement, now_ms=now_ms, tls=connection.tls
            )
            session.sent = LayoutUpdate(dag, twin(name))
            connection.send_encoded(session.sent.frame(session_id))
            return
        session.ordinary = False
        self._follow(session, live.name)
        self._send(session, self._update_of(live, connection.tls))

    def _await_migration(self, session: DagSession, name: TopicName) -> None:
        """Push the layout of an ordinary topic when it becomes scalable."""
        session.ordinary = True
        self._follow(session, twin(name))
        self._topics.follow_name(twin(name))

    def _follow(self, session: DagSession, name: TopicName) -> None:
        session.topic = name
        self._by_topic.setdefault(name, {})[session] = None

    def close(self, connection: ClientConnection, session_id: int) -> None:
        """SCALABLE_TOPIC_CLOSE: send nothing more.  Unknown sessions are ignored."""
        sessions = self._by_connection.get(connection, {})
        session = sessions.pop(session_id, None)
        if session is not None:
            self._leave_topic(session)

    def count(self, name: TopicName) -> int:
        """The number of sessions that get a topic's layouts."""
        return len(self._by_topic.get(name, ()))

    def had(self, connection: ClientConnection) -> bool:
        """Whether a connection has, or had, a session."""
        return connection in self._by_connection

    def created(self, name: TopicName) -> None:
        """Serve the sessions of a name under which a topic was created.

        Clients of an earlier topic have their connections closed, so that they ask for the layout
        of the new one.  Clients of an ordinary topic stay with that one: see `migrated`.
        """
        for session in self._following(name):
            session.connection.close(f"{name} was deleted and made again")

    def migrated(self, name: TopicName) -> None:
        """Push the layout of a topic to the clients of the ordinary topic that it was made of."""
        live = self._topics.known(name)
        if live is None or not live.layout.legacy:
            return
        waiting = [each for each in self._by_topic.get(name, ()) if each.ordinary]
        for session in waiting:
            session.ordinary = False
        closing = [each for each in live.layout.sealed if each.legacy_topic_name is not None]
        self._push_in_pause(live, waiting, closing, live.layout.active)

    def _enter(self, connection: ClientConnection, session_id: int) -> DagSession:
        sessions = self._by_connection.get(connection)
        if sessions is None:
            sessions = self._by_connection[connection] = {}
            connection.on_close(lambda: self._connection_closed(connection))
        if len(sessions) >= SESSIONS_PER_CONNECTION:
            raise TooManySessions(
                f"This connection watches {len(sessions)} topics already: close some, or open "
                "another connection."
            )
        session = sessions[session_id] = DagSession(connection, session_id)
        return session

    def _is_open(self, session: DagSession) -> bool:
        sessions = self._by_connection.get(session.connection, {})
        return sessions.get(session.session_id) is session

    def _connection_closed(self, connection: ClientConnection) -> None:
        for session in self._by_connection.pop(connection, {}).values():
            self._leave_topic(session)

    def _leave_topic(self, session: DagSession) -> None:
        if session.topic is None:
            return
        sessions = self._by_topic.get(session.topic, {})
        sessions.pop(session, None)
        if not sessions:
            self._by_topic.pop(session.topic, None)
            self._updates.pop(session.topic, None)
            self._topics.forget_name(session.topic)

    async def _resolve(self, name: TopicName, *, create_if_missing: bool) -> LiveTopic | None:
        """The topic whose layout answers for a name; None for a regular topic."""
        require_persistent(name)
        if name.domain is TopicDomain.SEGMENT:
            return await self._topics.get(segment_name(name).parent)
        found = await self._topics.find(name)
        if found is not None:
            return found
        if name.domain is TopicDomain.PERSISTENT:
            if name.partition_index is not None:
                raise not_found(name)
            return None
        made = await self._create_missing(name) if create_if_missing else None
        if made is None:
            raise not_found(name)
        return made

    def _push(self, live: LiveTopic) -> None:
        before = [layout for layout, _ in self._updates.get(live.name, {}).values()]
        known = {each.segment_id for layout in before for each in layout.active}
        closing = [each for each in live.layout.sealed if each.segment_id in known]
        made = [each for each in live.layout.active if known and each.segment_id not in known]
        self._push_in_pause(live, self._following(live.name), closing, made)

    def _push_in_pause(
        self,
        live: LiveTopic,
        sessions: Collection[DagSession],
        closing: Iterable[Segment],
        made: Iterable[Segment],
    ) -> None:
        """Push the newest layout to sessions, in a pause of the SENDs to segments it closes.

        Among several brokers each segment that was made gets an owner before: a client that is
        sent to another one tries again 100 ms later.
        """
        ready = [each for each in sessions if not each.is_behind]
        if self._others is None or not ready:
            self._push_to(live, sessions)
            return
        names = [segment_of(live.name, each) for each in closing]
        far = [each for each in names if self._others.has(each)]
        new = [segment_of(live.name, each) for each in made]
        unowned = [each for each in new if not self._others.has_owner(each)]
        if not far and not unowned:
            self._push_to(live, sessions)
            return
        for session in ready:
            session.is_behind = True
        self._awaiting_others.update(ready)
        active = [segment_of(live.name, each) for each in live.layout.active]
        paused = self._others.paused(far, active)
        find_owners = partial(self._others.find_owners, unowned)
        self._pushes.start(self._push_when_paused(live.name, ready, find_owners, paused))

    async def _push_when_paused(
        self,
        name: TopicName,
        sessions: Collection[DagSession],
        find_owners: Callable[[], Awaitable[None]],
        paused: AbstractAsyncContextManager[bool],
    ) -> None:
        try:
            await find_owners()
            async with paused as any_paused:
                connections = self._push_to_those_behind(name, sessions)
                if any_paused:
                    # The layout is there then, and receipts may come on other connections.
                    await asyncio.gather(*(each.echo() for each in connections))
        finally:
            self._push_to_those_behind(name, sessions)

    def _push_to_those_behind(
        self, name: TopicName, sessions: Collection[DagSession]
    ) -> set[ClientConnection]:
        """Push the newest layout to those that wait for a pause at other brokers.

        Some may have waited for something else when it came, and lack it: they get it too.
        """
        following = self._following(name)
        ready = {each for each in following if each in self._awaiting_others and each in sessions}
        self._awaiting_others.difference_update(sessions)
        for session in ready:
            session.is_behind = False
        live = self._topics.known(name)
        if live is not None and following:
            newest = self._updates_of(live, following)
            lacking = [each for each in following if each.sent is not newest[each.connection.tls]]
            self._push_to(live, [each for each in lacking if not each.is_behind])
        return {each.connection for each in ready}

    def _push_to(self, live: LiveTopic, sessions: Collection[DagSession]) -> None:
        """Push the newest layout to sessions, in a pause of their SENDs to sealed segments."""
        if not sessions:
            return
        updates = self._updates_of(live, sessions)
        closing = self._producers(live, live.layout.sealed)
        publishing = self._producers(live, live.layout.active) if closing else {}
        waiting: dict[ClientConnection, list[DagSession]] = {}
        for session in sessions:
            if session.connection not in closing:
                self._send(session, updates[session.connection.tls])
            elif not session.is_behind:
                session.is_behind = True
                waiting.setdefault(session.connection, []).append(session)
        for connection, behind in waiting.items():
            others = publishing.get(connection, ())
            SendPause(closing[connection], others, partial(self._send_newest_to, behind))

    def _producers(
        self, live: LiveTopic, segments: Iterable[Segment]
    ) -> dict[ClientConnection, list[Producer]]:
        """The producers of each connection at those of the segments that run here."""
        return by_connection(self._producers_of, (segment_of(live.name, each) for each in segments))

    def _following(self, name: TopicName) -> list[DagSession]:
        """The sessions that get the layouts of a scalable topic."""
        return [each for each in self._by_topic.get(name, ()) if not each.ordinary]

    def _updates_of(
        self, live: LiveTopic, sessions: Iterable[DagSession]
    ) -> Mapping[bool, LayoutUpdate]:
        """The present layout, in the forms that these sessions need."""
        forms = {each.connection.tls for each in sessions}
        return {tls: self._update_of(live, tls) for tls in forms}

    def _update_of(self, live: LiveTopic, tls: bool) -> LayoutUpdate:
        """The present layout; the same object for all sessions until it changes."""
        by_tls = self._updates.setdefault(live.name, {})
        layout, known = by_tls.get(tls, (None, None))
        # With one broker the addresses in a layout never change.
        if known is not None and layout is live.layout and not self._placement.shared:
            return known
        dag = dag_of(live.name, live.layout, self._placement, tls=tls)
        if known is None or known.dag != dag:
            known = LayoutUpdate(dag, live.name)
        by_tls[tls] = (live.layout, known)
        return known

    def _send(self, session: DagSession, update: LayoutUpdate) -> None:
        if session.is_behind:
            return
        if not session.connection.writable:
            session.is_behind = True
            session.connection.on_writable(partial(self._send_newest, session))
            return
        session.sent = update
        session.connection.send_encoded(update.frame(session.session_id))

    def _send_newest_to(self, sessions: Iterable[DagSession]) -> None:
        for session in sessions:
            self._send_newest(session)

    def _send_newest(self, session: DagSession) -> None:
        """Send what was held back while the client did not read, or while it sent messages."""
        session.is_behind = False
        if session.topic is None or not self._is_open(session):
            return
        newest = self._updates.get(session.topic, {}).get(session.connection.tls)
        if newest is not None and newest[1] is not session.sent:
            self._send(session, newest[1])

    def moved(self, name: TopicName) -> None:
        """Push a topic's layout again: a segment, or its lead, may be at another broker."""
        if name in self._by_topic and name not in self._moved:
            loop = asyncio.get_running_loop()
            # Moves within this time go out together.
            self._moved[name] = loop.call_later(DAG_COALESCE_S, self._push_moved, name)

    def all_moved(self) -> None:
        """Push all layouts again: brokers came or went."""
        for name in list(self._by_topic):
            self.moved(name)

    def stop(self) -> None:
        """Push nothing more."""
        self._pushes.cancel()
        for timer in self._moved.values():
            timer.cancel()
        self._moved.clear()

    def _push_moved(self, name: TopicName) -> None:
        del self._moved[name]
        live, sessions = self._topics.known(name), self._following(name)
        if live is None:
            return
        updates = self._updates_of(live, sessions)
        for session in sessions:
            if session.sent is not (update := updates[session.connection.tls]):
                self._send(session, update)
