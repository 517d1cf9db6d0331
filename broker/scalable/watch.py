"""DAG sessions: a client asks for a topic's layout once, and gets every later one too."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import structlog

from broker.placement import Placement
from broker.scalable.answers import dag_error, dag_update
from broker.scalable.dag import dag_of, synthetic_dag
from broker.scalable.live_topics import LiveTopic, LiveTopics, not_found, twin
from broker.topics.client_connection import ClientConnection
from config.bounds import DAG_COALESCE_S, SESSIONS_PER_CONNECTION
from magnetar.protocol.names import (
    TopicDomain,
    TopicName,
    parse_topic_name,
    require_persistent,
    segment_name,
)
from magnetar.protocol.pulsar_pb2 import ScalableTopicDAG
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


@dataclass(eq=False, slots=True)
class DagSession:
    """One session of one connection.

    `topic` is None until its layout can be sent; `sent` is the newest layout that was.
    """

    connection: ClientConnection
    session_id: int
    topic: TopicName | None = None
    sent: ScalableTopicDAG | None = None
    is_behind: bool = False
    """Whether the newest layout waits for the client to read."""


class DagSessions:
    """Sends a topic's layout to every session that asked for it, and every later layout.

    Each layout is pushed once to each session, in epoch order, in the turn of the loop in which the
    change became known.  A client that does not read gets only the newest one, when it reads again.
    When segments or the lead of a topic move to other brokers, its newest layout is pushed again
    with the new addresses.

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
    ) -> None:
        self._topics = topics
        self._placement = placement
        self._clock = clock
        self._create_missing = create_missing
        self._partition_count = partition_count
        self._by_connection: dict[ClientConnection, dict[int, DagSession]] = {}
        self._by_topic: dict[TopicName, dict[DagSession, None]] = {}
        self._dags: dict[TopicName, dict[bool, ScalableTopicDAG]] = {}
        """The newest layout of each topic with sessions, which share it: for those without TLS, and
        for those with TLS (`dag_of`)."""
        self._moved: dict[TopicName, asyncio.TimerHandle] = {}
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
            live = await self._resolve(name, create_if_missing=create_if_missing)
            partitions = 0 if live is not None else await self._partition_count(name)
        except MagnetarError as error:
            log.debug("dag_session_refused", topic=text, error=str(error))
            if self._is_open(session):
                self.close(connection, session_id)
                connection.send(dag_error(session_id, error))
            return
        if not self._is_open(session):
            return
        if live is None:
            # A regular topic has no later layouts, so the session ends with its answer.
            self.close(connection, session_id)
            now_ms = self._clock.now_ms()
            dag = synthetic_dag(
                name, partitions, self._placement, now_ms=now_ms, tls=connection.tls
            )
            connection.send(dag_update(session_id, dag, twin(name)))
            return
        session.topic = live.name
        self._by_topic.setdefault(live.name, {})[session] = None
        self._send(session, live.name, self._dag_of(live, connection.tls))

    def close(self, connection: ClientConnection, session_id: int) -> None:
        """SCALABLE_TOPIC_CLOSE: send nothing more.  Unknown sessions are ignored."""
        sessions = self._by_connection.get(connection, {})
        session = sessions.pop(session_id, None)
        if session is not None:
            self._leave_topic(session)

    def count(self, name: TopicName) -> int:
        """The number of sessions that get a topic's layouts."""
        return len(self._by_topic.get(name, ()))

    def created(self, name: TopicName) -> None:
        """Close the connections with sessions of an earlier topic of a name that was created again.

        Their clients then ask for the new topic's layout.
        """
        for session in list(self._by_topic.get(name, ())):
            session.connection.close(f"{name} was deleted and made again")

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
            self._dags.pop(session.topic, None)

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
        sessions = self._by_topic.get(live.name)
        if not sessions:
            return
        dags = self._dags_of(live, sessions)
        for session in list(sessions):
            self._send(session, live.name, dags[session.connection.tls])

    def _dags_of(
        self, live: LiveTopic, sessions: Iterable[DagSession]
    ) -> Mapping[bool, ScalableTopicDAG]:
        """The present layout, in the forms that these sessions need."""
        return {tls: self._dag_of(live, tls) for tls in {each.connection.tls for each in sessions}}

    def _dag_of(self, live: LiveTopic, tls: bool) -> ScalableTopicDAG:
        """The present layout; the same object for all sessions until it changes."""
        dag = dag_of(live.name, live.layout, self._placement, tls=tls)
        by_tls = self._dags.setdefault(live.name, {})
        known = by_tls.get(tls)
        if known == dag:
            return known
        by_tls[tls] = dag
        return dag

    def _send(self, session: DagSession, name: TopicName, dag: ScalableTopicDAG) -> None:
        if session.is_behind:
            return
        if not session.connection.writable:
            session.is_behind = True
            session.connection.on_writable(partial(self._send_newest, session))
            return
        session.sent = dag
        session.connection.send(dag_update(session.session_id, dag, name))

    def _send_newest(self, session: DagSession) -> None:
        """Send what was held back while the client did not read."""
        session.is_behind = False
        if session.topic is None or not self._is_open(session):
            return
        newest = self._dags.get(session.topic, {}).get(session.connection.tls)
        if newest is not None and newest != session.sent:
            self._send(session, session.topic, newest)

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
        for timer in self._moved.values():
            timer.cancel()
        self._moved.clear()

    def _push_moved(self, name: TopicName) -> None:
        del self._moved[name]
        live, sessions = self._topics.known(name), self._by_topic.get(name)
        if live is None or not sessions:
            return
        dags = self._dags_of(live, sessions)
        for session in list(sessions):
            if session.sent != (dag := dags[session.connection.tls]):
                self._send(session, live.name, dag)
