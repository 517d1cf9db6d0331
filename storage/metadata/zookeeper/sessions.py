"""Sessions of the store, each of which is one of ZooKeeper, with a connection of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial as bind
from random import Random
from typing import Final

import structlog

from storage.metadata.access import StoreAccess
from storage.metadata.store import MetadataError, Session
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import (
    Connection,
    RequestFailed,
    ZooKeeperClient,
)
from storage.metadata.zookeeper.layout import Layout
from storage.metadata.zookeeper.requests import Answer

BEATS_PER_TIMEOUT: Final = 3
NAME_BITS: Final = 96

_log = structlog.get_logger(__name__)


class ZooKeeperSession(Session):
    """A session of ZooKeeper, on a connection of its own.  States: alive, then lost.

    It ends by `close`, when the server expires it, or when this process finds that the server may
    have expired it.  The timeout is the one that the server agreed to: 2 to 20 of its ticks.
    """

    def __init__(
        self,
        servers: str,
        layout: Layout,
        *,
        timeout_ms: int,
        access: StoreAccess | None,
        settled: Callable[[], Awaitable[None]],
        ended: Callable[["ZooKeeperSession"], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        """`settled` waits until all earlier requests of the store are answered.

        `ended` is awaited once the ephemerals are gone.  `changed` is called when the state of the
        connection has changed.
        """
        self._loop = asyncio.get_running_loop()
        self.layout = layout
        """The layout of its store, by which sessions of two stores differ."""
        self._settled = settled
        self._ended = ended
        self._changed = changed
        self._lost = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._answered_at = 0.0
        self._timeout_s = timeout_ms / 1000
        self._ending: asyncio.Task[None] | None = None
        self.session_id = 0
        """ZooKeeper's number of the session, once it is open."""
        self.client = ZooKeeperClient(
            servers,
            session_timeout_ms=timeout_ms,
            on_state=self._state_changed,
            on_change=lambda _: None,
            access=access,
        )
        """The connection that ephemeral records are put through."""

    async def open(self, identity: str, rng: Random) -> None:
        """Connect and begin the heartbeats.  Raises `MetadataError`."""
        try:
            begun_at = self._loop.time()
            await self.client.connect()
            self._timeout_s = self.client.negotiated_ms / 1000
            self._answered_at = begun_at
            self.session_id = self.client.session_id
            name = f"{self.layout.sessions}/{rng.getrandbits(NAME_BITS):x}"
            request = requests.create(name, identity.encode(), ephemeral=True)
            await self.client.call(request)
        except RequestFailed as error:
            await self.close()
            raise MetadataError(
                f"ZooKeeper did not take a session ({error.failure.name}): look at its servers."
            ) from error
        except BaseException:
            self.end()
            raise
        self._beat()

    @property
    def lost(self) -> bool:
        """True once the session ended, by expiry or close."""
        return self._lost.is_set()

    async def wait_lost(self) -> None:
        """Return when the session has ended."""
        await self._lost.wait()

    async def close(self) -> None:
        """End it now; returns when its ephemerals are gone, or no server can be reached."""
        try:
            if not self.lost:
                await self._settled()
        finally:
            ending = self.end()
        await asyncio.shield(ending)

    def end(self) -> "asyncio.Task[None]":
        """Mark it lost, and end it at the server."""
        self._lost.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())
        return self._ending

    async def _end(self) -> None:
        try:
            await self.client.close()
        except Exception as error:  # noqa: BLE001 - the server ends it after its timeout
            _log.error("metadata_session_not_closed", id=self.session_id, exc_info=error)
        await self._ended(self)

    def _state_changed(self, state: Connection) -> None:
        if state is Connection.LOST and self._timer is not None:
            self._mark_lost("the server expired it")
        self._changed()

    def _beat(self) -> None:
        now = self._loop.time()
        # The server knew of the session when the last answered heartbeat was sent, so it does not
        # expire it earlier than a timeout after that.
        left_s = self._answered_at + self._timeout_s - now
        if left_s <= 0:
            self._mark_lost("the server was not heard of for its timeout")
            return
        if not self.lost:
            pause_s = min(left_s, self._timeout_s / BEATS_PER_TIMEOUT)
            self._timer = self._loop.call_later(pause_s, self._beat)
            request = requests.exists(self.layout.sessions)
            self.client.submit(request, bind(self._beat_answered, now))

    def _beat_answered(self, sent_at: float, answer: Answer) -> None:
        if answer.failure is None:
            self._answered_at = max(self._answered_at, sent_at)

    def _mark_lost(self, why: str) -> None:
        if not self.lost:
            _log.warning("metadata_session_expired", id=self.session_id, reason=why)
        self.end()
        self._changed()
