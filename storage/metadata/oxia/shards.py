"""The shards of a namespace, followed live, and calls to whoever leads one.

Rules:
- The map of shards arrives as a stream from any server and is replaced as a whole.  When the
  stream ends another server is asked.  Whoever did not take a map is told of the next one, be it
  the same.
- A call that fails is tried again, after a pause that doubles, until its time is up.  Then the
  caller is told what happened last, and what to look at.  A defect of ours is not tried again.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import structlog

from config import bounds
from protocol.server_error import MagnetarError
from storage.metadata.oxia.connection import CallFailed, Connections, Peer
from storage.metadata.oxia.errors import Action, Failure, defect, out_of_time, refused, shard_gone
from storage.metadata.oxia.loops import Backoff, Loop, log_defect
from storage.metadata.oxia.routing import IncompleteShards, ShardTable, parse_assignments
from storage.metadata.store import MetadataError

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_ASK_AGAIN_S = 0.5
"""Shortest pause before the map is asked for again: release 0.14.0 ends when it is asked between
opening its port and knowing its shards."""

NO_LEADER = Failure(Action.FIND_LEADER, "UNAVAILABLE", "the shard has no leader")


class SessionGone(Exception):
    """The server knows no such session."""


class Shards:
    """See the module's rules.  `start` before anything else."""

    def __init__(
        self, address: str, namespace: str, connections: Connections, rng: random.Random
    ) -> None:
        self._address = address
        self._namespace = namespace
        self._connections = connections
        self._rng = rng
        self._table: ShardTable | None = None
        self._refusal: MetadataError | None = None
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._untold = False
        self._following: Loop | None = None
        self._reported: set[str] = set()

    @property
    def table(self) -> ShardTable:
        """The newest map."""
        if self._table is None:
            raise MetadataError("The Oxia store has no map of shards yet: open it first.")
        return self._table

    async def start(self) -> None:
        """Return when the map is known.  Raises `MetadataError`."""
        self._following = Loop("oxia-shards", self._follow, self.backoff(), self._broken)
        try:
            async with asyncio.timeout(bounds.OXIA_REQUEST_TIMEOUT_S):
                while self._table is None and self._refusal is None:
                    await self._wait_change()
        except TimeoutError:
            raise MetadataError(
                f"No Oxia server answered at {self._address}: check that it runs, the address, and "
                "the TLS files and token if it asks for them."
            ) from None
        if self._table is None and self._refusal is not None:
            raise self._refusal

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the map is another one."""
        self._listeners.append(listener)

    async def close(self) -> None:
        """Stop following."""
        if self._following is not None:
            await self._following.stop()

    def backoff(self) -> Backoff:
        """Pauses of a new series of attempts."""
        return Backoff(self._rng)

    def peer(self, shard_id: int) -> Peer:
        """Who leads a shard.  Raises `CallFailed` if nobody does now."""
        leader = self.table.leader(shard_id)
        if leader is None:
            raise CallFailed(NO_LEADER)
        return self._connections.peer(leader)

    async def call(
        self,
        shard_id: int,
        what: str,
        attempt: Callable[[Peer, float], Awaitable[T]],
        deadline: float | None = None,
    ) -> T:
        """What `attempt(leader, timeout_s)` returns, tried until `deadline` (of the loop's time).

        Raises `MetadataError`, `SessionGone`, and `ShardGone` without waiting.
        """
        loop = asyncio.get_running_loop()
        if deadline is None:
            deadline = loop.time() + bounds.OXIA_REQUEST_TIMEOUT_S
        backoff = self.backoff()
        while True:
            if shard_id not in self.table.ids:
                raise shard_gone(shard_id)
            left_s = deadline - loop.time()
            try:
                timeout_s = max(min(left_s, bounds.OXIA_ATTEMPT_TIMEOUT_S), 0.0)
                return await attempt(self.peer(shard_id), timeout_s)
            except CallFailed as error:
                failure = error.failure
            except MagnetarError:
                raise
            except Exception as error:
                log_defect(what, error)
                raise defect(what, error) from error
            if failure.action is Action.SESSION_GONE:
                raise SessionGone(failure.text)
            if failure.action is Action.TELL_OPERATOR:
                raise refused(failure, what)
            pause_s = backoff.pause_s()
            if loop.time() + pause_s >= deadline:
                raise out_of_time(what, failure)
            await self.pause(failure, pause_s)

    async def pause(self, failure: Failure, pause_s: float) -> None:
        """Wait before another attempt; a new map ends the wait if a leader is looked for."""
        self.report(failure)
        if failure.action is not Action.FIND_LEADER:
            await asyncio.sleep(pause_s)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wait_change()

    def report(self, failure: Failure) -> None:
        """Log a failure that needs an operator, once."""
        if failure.shard_is_down and failure.text not in self._reported:
            if len(self._reported) >= 100:
                self._reported.clear()
            self._reported.add(failure.text)
            _log.error("oxia_shard_down", code=failure.code, text=failure.text)

    async def _follow(self) -> None:
        backoff = self.backoff()
        turn = 0
        while True:
            addresses = [self._address]
            if self._table is not None:
                addresses += [each.leader for each in self._table.shards if each.leader]
            address = addresses[turn % len(addresses)]
            turn += 1
            try:
                guide = await self._connections.guide(address)
                async for assignments in guide.assignments():
                    self._take(parse_assignments(assignments, self._namespace))
                    await self._drop_unused()
                    backoff.reset()
            except IncompleteShards as error:
                _log.info("oxia_shards_incomplete", error=str(error))
            except MetadataError as error:
                _log.error("oxia_shards_refused", error=str(error))
                self._refuse(error)
            except CallFailed as error:
                if error.failure.action is Action.TELL_OPERATOR:
                    self._refuse(refused(error.failure, "the map of shards"))
            await asyncio.sleep(max(backoff.pause_s(), _ASK_AGAIN_S))

    def _take(self, table: ShardTable) -> None:
        known = self._table is not None and self._table.shards == table.shards
        if known and not self._untold:
            return
        self._table = table
        self._refusal = None
        _log.info("oxia_shards", shards=table.ids)
        self._tell()
        self._untold = True
        for listener in self._listeners:
            listener()
        self._untold = False

    def _broken(self, _defect: BaseException) -> None:
        """Nothing to put in order: the next map is told to those who did not take this one."""

    def _refuse(self, error: MetadataError) -> None:
        self._refusal = error
        self._tell()

    async def _drop_unused(self) -> None:
        await self._connections.keep_only(shard.leader for shard in self.table.shards)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_change(self) -> None:
        await self._changed.wait()
