"""Sessions of the embedded stores, kept alive by timers of the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

import structlog

from storage.metadata.store import Session

BEATS_PER_TIMEOUT = 3
RETRY_S = 1.0
"""Pause before the removal of an ended session, which the store refused, is tried again."""

EndSessions: TypeAlias = Callable[[tuple[int, ...]], "asyncio.Future[bool]"]
"""Queues the removal of sessions and their ephemerals."""

_log = structlog.get_logger(__name__)


class KeptSession(Session):
    """A session of the embedded stores.  States: alive, then lost.

    It is lost when the loop was blocked, or the process frozen, for longer than the timeout.
    """

    __slots__ = ("_beat_s", "_keeper", "_last_beat", "_lost", "_timeout_s", "_timer", "session_id")

    def __init__(self, keeper: "SessionKeeper", session_id: int, timeout_ms: int) -> None:
        self.session_id = session_id
        self._keeper = keeper
        self._timeout_s = timeout_ms / 1000
        self._beat_s = self._timeout_s / BEATS_PER_TIMEOUT
        self._lost = asyncio.Event()
        self._last_beat = keeper.loop.time()
        self._timer = keeper.loop.call_later(self._beat_s, self._beat)

    @property
    def lost(self) -> bool:
        """True once the session ended, by expiry or close."""
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Return when the session has ended."""
        await self._lost.wait()

    async def close(self) -> None:
        """End it now; returns when its ephemerals are removed.  Raises `MetadataError`."""
        self.end()
        await self._keeper.removed(self)

    def end(self) -> None:
        """Mark the session as lost, and stop its heartbeats."""
        self._timer.cancel()
        self._lost.set()

    def _beat(self) -> None:
        now = self._keeper.loop.time()
        silent_s = now - self._last_beat
        # Every other member of a cluster would have found such a session lost.
        if silent_s > self._timeout_s:
            _log.warning("metadata_session_expired", id=self.session_id, silent_s=silent_s)
            self.end()
            self._keeper.remove(self)
            return
        self._last_beat = now
        self._timer = self._keeper.loop.call_later(self._beat_s, self._beat)


class SessionKeeper:
    """The sessions of one store, and the removal of those that have ended.

    A removal that fails is tried again until it works or the store closes.
    """

    __slots__ = ("_end", "_removals", "_retries", "_sessions", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, end: EndSessions) -> None:
        self.loop = loop
        self._end = end
        self._sessions: dict[int, KeptSession] = {}
        self._removals: dict[int, asyncio.Future[bool]] = {}
        self._retries: dict[int, asyncio.TimerHandle] = {}

    def keep(self, session_id: int, timeout_ms: int) -> KeptSession:
        """Keep alive a session that the store has just made."""
        session = KeptSession(self, session_id, timeout_ms)
        self._sessions[session_id] = session
        return session

    def owns(self, session: Session) -> bool:
        """Whether it is one of this store's sessions, ended or not."""
        return isinstance(session, KeptSession) and session._keeper is self

    def remove(self, session: KeptSession) -> None:
        """Remove an ended session and its ephemerals, trying until it works."""
        session_id = session.session_id
        self._retries.pop(session_id, None)
        if session_id in self._removals or session_id not in self._sessions:
            return
        removal = self._end((session_id,))
        self._removals[session_id] = removal
        removal.add_done_callback(lambda done: self._removal_done(session, done))

    async def removed(self, session: KeptSession) -> None:
        """Remove it and wait for this attempt.  Raises `MetadataError` (it is tried again)."""
        self.remove(session)
        removal = self._removals.get(session.session_id)
        if removal is not None:
            await asyncio.shield(removal)

    async def close(self) -> None:
        """End every session in one commit.  Raises `MetadataError`."""
        for retry in self._retries.values():
            retry.cancel()
        self._retries.clear()
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.end()
        if sessions:
            await self._end(tuple(sessions))

    def _removal_done(self, session: KeptSession, done: "asyncio.Future[bool]") -> None:
        session_id = session.session_id
        del self._removals[session_id]
        if not done.cancelled() and done.exception() is None:
            self._sessions.pop(session_id, None)
        elif session_id in self._sessions:
            self._retries[session_id] = self.loop.call_later(RETRY_S, self.remove, session)
