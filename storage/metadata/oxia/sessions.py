"""Sessions of the store, each of which is one session on every shard."""

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress

import structlog

from config import bounds
from magnetar.background_tasks import BackgroundTasks
from storage.metadata.operations import BeginSession
from storage.metadata.oxia.connection import CallFailed, Peer
from storage.metadata.oxia.errors import Action
from storage.metadata.oxia.shard_writer import ShardWriter
from storage.metadata.oxia.shards import SessionGone, Shards
from storage.metadata.store import InvalidMetadataRequest, MetadataError, Session

_log = structlog.get_logger(__name__)


def beat_s(timeout_s: float) -> float:
    """Pause between heartbeats, in seconds: as Oxia's clients, but at least three per timeout."""
    return min(max(timeout_s / 10, 2.0), timeout_s / 3)


class OxiaSession(Session):
    """A session: one on every shard, kept alive by heartbeats.  States: alive, then lost.

    It is lost on all shards as soon as one of them does not know it any more, or as no heartbeat
    came through to one for the timeout.  Before that no other process can have its ephemerals.
    """

    def __init__(
        self, sessions: "OxiaSessions", begin: BeginSession, ids: Mapping[int, int], now_s: float
    ) -> None:
        self.identity = begin.identity
        self.timeout_ms = begin.timeout_ms
        self.ids = dict(ids)
        self.beaten_s = dict.fromkeys(ids, now_s)
        self._sessions = sessions
        self._lost = asyncio.Event()
        self._beating = asyncio.create_task(self._beat(), name="oxia-session")
        self._ending: asyncio.Task[None] | None = None

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
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def id_on(self, shard_id: int) -> int | None:
        """The id of the session on a shard; None if it has none there."""
        return self.ids.get(shard_id)

    def end(self) -> None:
        """Mark it lost, stop its heartbeats, and end it on the servers.

        There too, so that its ephemerals on other shards go.
        """
        if self.lost:
            return
        self._lost.set()
        self._beating.cancel()
        self._ending = asyncio.create_task(self._sessions.remove(self), name="oxia-session-end")
        self._ending.add_done_callback(_log_failed_end)

    def belongs_to(self, sessions: "OxiaSessions") -> bool:
        """Whether it is a session of that store."""
        return self._sessions is sessions

    async def _beat(self) -> None:
        # The session ends however this ends: nothing else would find it without heartbeats.
        try:
            await self._beat_while_known()
        except Exception:  # noqa: BLE001 - whatever it was, the session must not seem alive
            _log.exception("oxia_session_beat_failed", identity=self.identity)
        _log.warning("oxia_session_lost", identity=self.identity)
        self.end()

    async def _beat_while_known(self) -> None:
        timeout_s = self.timeout_ms / 1000
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(beat_s(timeout_s))
            # A process that was frozen for longer than the timeout need not ask.
            if self._is_silent(loop.time(), timeout_s):
                return
            known = await asyncio.gather(
                *(
                    self._beat_on(shard_id, its_id, timeout_s)
                    for shard_id, its_id in self.ids.items()
                )
            )
            if not all(known) or self._is_silent(loop.time(), timeout_s):
                return

    def _is_silent(self, now_s: float, timeout_s: float) -> bool:
        return any(now_s - beaten_s > timeout_s for beaten_s in self.beaten_s.values())

    async def _beat_on(self, shard_id: int, its_id: int, timeout_s: float) -> bool:
        """Send a heartbeat; False if the shard does not know the session.

        The shard may leave the map in the meantime.
        """
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        try:
            peer = self._sessions.shards.peer(shard_id)
            await peer.keep_alive(shard_id, its_id, beat_s(timeout_s))
        except CallFailed as error:
            gone = error.failure.action is Action.SESSION_GONE
            return not gone or self.ids.get(shard_id) != its_id
        if self.ids.get(shard_id) == its_id:
            self.beaten_s[shard_id] = asked_s
        return True


class OxiaSessions:
    """The sessions of one store."""

    def __init__(self, shards: Shards, writers: Mapping[int, ShardWriter]) -> None:
        self.shards = shards
        self._writers = writers
        self._sessions: set[OxiaSession] = set()
        self._tasks = BackgroundTasks()
        self._extending: set[tuple[OxiaSession, int]] = set()

    async def open(self, begin: BeginSession) -> OxiaSession:
        """A new session, made on every shard.  Raises `MetadataError`, `InvalidMetadataRequest`."""
        if begin.timeout_ms < bounds.OXIA_SESSION_TIMEOUT_MIN_MS:
            raise InvalidMetadataRequest(
                f"Oxia refuses a session timeout of {begin.timeout_ms} ms: "
                f"use {bounds.OXIA_SESSION_TIMEOUT_MIN_MS} or more."
            )
        making = asyncio.create_task(self._make(begin))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_abandon)
            raise

    def owns(self, session: Session) -> bool:
        """Whether it is one of this store's sessions, ended or not."""
        return isinstance(session, OxiaSession) and session.belongs_to(self)

    def shards_changed(self, shard_ids: Iterable[int]) -> None:
        """Give every session the shards that are new; forget those that are gone."""
        present = set(shard_ids)
        for session in self._sessions:
            if session.lost:
                continue
            for gone in set(session.ids) - present:
                del session.ids[gone], session.beaten_s[gone]
            for shard_id in present - set(session.ids):
                if (session, shard_id) in self._extending:
                    continue
                self._extending.add((session, shard_id))
                self._tasks.start(self._extend(session, shard_id))

    async def remove(self, session: OxiaSession) -> None:
        """End a lost session on the servers.  Raises `MetadataError`."""
        ids = list(session.ids.items())
        ended = await asyncio.gather(*(self._end_on(*each) for each in ids), return_exceptions=True)
        self._sessions.discard(session)
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome

    async def close(self) -> None:
        """End all sessions.  Raises `MetadataError`."""
        self._tasks.cancel()
        ended = await asyncio.gather(
            *(session.close() for session in list(self._sessions)), return_exceptions=True
        )
        for outcome in ended:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _make(self, begin: BeginSession) -> OxiaSession:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        shard_ids = self.shards.table.ids
        made = await asyncio.gather(
            *(self._make_on(shard_id, begin.timeout_ms, begin.identity) for shard_id in shard_ids),
            return_exceptions=True,
        )
        ids = {
            shard_id: session_id
            for shard_id, session_id in zip(shard_ids, made, strict=True)
            if isinstance(session_id, int)
        }
        failed = [each for each in made if isinstance(each, BaseException)]
        if failed:
            with suppress(MetadataError):
                await asyncio.gather(*(self._end_on(*each) for each in ids.items()))
            raise failed[0]
        session = OxiaSession(self, begin, ids, now_s)
        self._sessions.add(session)
        self.shards_changed(self.shards.table.ids)
        return session

    async def _make_on(self, shard_id: int, timeout_ms: int, identity: str) -> int:
        async def make(peer: Peer, timeout_s: float) -> int:
            return await peer.create_session(shard_id, timeout_ms, identity, timeout_s)

        writer = self._writers.get(shard_id)
        if writer is None:
            raise MetadataError(f"Oxia's shard {shard_id} is gone: open the session again.")
        return await writer.call_alone("the opening of a session", make)

    async def _end_on(self, shard_id: int, session_id: int) -> None:
        async def end(peer: Peer, timeout_s: float) -> None:
            await peer.close_session(shard_id, session_id, timeout_s)

        writer = self._writers.get(shard_id)
        if writer is None:
            return
        with suppress(SessionGone):
            await writer.call_alone("the end of a session", end)

    async def _extend(self, session: OxiaSession, shard_id: int) -> None:
        now_s = asyncio.get_running_loop().time()
        try:
            made = await self._make_on(shard_id, session.timeout_ms, session.identity)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is a session without a shard
            gone = shard_id not in self.shards.table.ids
            _log.error("oxia_session_not_extended", shard=shard_id, gone=gone, exc_info=error)
            if not gone:
                session.end()
            return
        finally:
            self._extending.discard((session, shard_id))
        if shard_id in self.shards.table.ids:
            session.ids[shard_id] = made
            session.beaten_s[shard_id] = now_s


def _abandon(making: "asyncio.Task[OxiaSession]") -> None:
    """End a session whose caller was cancelled."""
    if not making.cancelled() and making.exception() is None:
        making.result().end()


def _log_failed_end(ending: "asyncio.Task[None]") -> None:
    # Servers end the session by themselves then, after its timeout.
    if not ending.cancelled() and (error := ending.exception()) is not None:
        _log.warning("oxia_session_end_failed", error=str(error))
