"""The shards of a namespace, followed live, and calls to their leaders."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import structlog

from config import bounds
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.server_error import MagnetarError
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import CallFailed, Connections, Peer
from storage.metadata.oxia.errors import Action, Failure, defect, out_of_time, refused, shard_gone
from storage.metadata.oxia.loops import Loop, log_defect
from storage.metadata.oxia.routing import IncompleteShards, ShardTable, parse_assignments
from storage.metadata.store import MetadataError

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_ASK_AGAIN_S = 0.5
"""Shortest pause before the map is asked for again: release 0.14.0 ends when it is asked between
opening its port and knowing its shards."""

NO_LEADER = Failure(Action.FIND_LEADER, "UNAVAILABLE", "the shard has no leader")
UNPROVEN = Failure(
    Action.FIND_LEADER, "UNAVAILABLE", "the shard's new leader has acknowledged no write of ours"
)


class SessionGone(Exception):
    """The server knows no such session."""


class Shards:
    """Follows the shards of a namespace and their leaders, and calls the leader of a shard.

    The map of shards comes as a stream from any server and is replaced as a whole.  When the stream
    ends, or a leader acknowledges nothing, the next server is asked.  `start` before anything else.
    """

    # Maps have no term, and a server that is partitioned off goes on sending an old one.  So only
    # the first leader of a shard is believed at once.  Any other is believed after it acknowledged
    # a put of this process, which a deposed leader cannot do: `ShardWriter` sends that put.  Until
    # then nothing is read there and no heartbeat counts, so nothing that was read or acknowledged
    # is undone.

    def __init__(
        self,
        servers: Sequence[str],
        namespace: str,
        connections: Connections,
        rng: random.Random,
    ) -> None:
        self._servers = servers
        self._namespace = namespace
        self._connections = connections
        self._rng = rng
        self._table: ShardTable | None = None
        self._believed: dict[int, str] = {}
        self._doubted = asyncio.Event()
        self._refusal: MetadataError | None = None
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._listeners_behind = False
        self._map_loop: Loop | None = None
        self._reported: set[str] = set()

    @property
    def table(self) -> ShardTable:
        """The newest map."""
        if self._table is None:
            raise MetadataError("The Oxia store has no map of shards yet: open it first.")
        return self._table

    async def start(self) -> None:
        """Return when the map is known.  Raises `MetadataError`."""
        self._map_loop = Loop("oxia-shards", self._follow, self.backoff(), self._broken)
        try:
            async with asyncio.timeout(bounds.OXIA_REQUEST_TIMEOUT_S):
                while self._table is None and self._refusal is None:
                    await self._wait_change()
        except TimeoutError:
            raise MetadataError(
                f"No Oxia server answered at {', '.join(self._servers)}: check that one runs, the "
                "address, and the TLS files and token if it asks for them."
            ) from None
        if self._table is None and self._refusal is not None:
            raise self._refusal

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the map has changed."""
        self._listeners.append(listener)

    async def close(self) -> None:
        """Stop following."""
        if self._map_loop is not None:
            await self._map_loop.stop()

    def backoff(self) -> Backoff:
        """Pauses of a new series of attempts."""
        # Some luck, so that clients do not try at the same time.
        luck = partial(self._rng.uniform, 0.8, 1.2)
        return Backoff(bounds.OXIA_BACKOFF_MIN_S, bounds.OXIA_BACKOFF_MAX_S, luck)

    def peer(self, shard_id: int) -> Peer:
        """The leader of a shard.  Raises `CallFailed` if there is none, or it is not proven."""
        if self.must_prove(shard_id):
            raise CallFailed(UNPROVEN)
        return self.named_leader(shard_id)

    def named_leader(self, shard_id: int) -> Peer:
        """The leader that the newest map names, proven or not.  Raises `CallFailed`."""
        leader = self.table.leader(shard_id)
        if leader is None:
            raise CallFailed(NO_LEADER)
        return self._connections.peer(leader)

    def must_prove(self, shard_id: int) -> bool:
        """Whether the leader that the map names has to acknowledge a put before it is believed."""
        leader = self.table.leader(shard_id)
        return leader is not None and self._believed.get(shard_id) != leader

    def proven(self, shard_id: int, leader: str) -> None:
        """Believe a leader: it has acknowledged a put, later than any other leader of the shard."""
        if self._believed.get(shard_id) != leader:
            self._believed[shard_id] = leader
            self._wake_waiting()

    def doubt(self) -> None:
        """Ask another server for the map, if there is one, as a leader acknowledges nothing."""
        if len(set(self._guides())) > 1:
            self._doubted.set()

    async def call(
        self,
        shard_id: int,
        what: str,
        attempt: Callable[[Peer, float], Awaitable[T]],
        deadline: float | None = None,
    ) -> T:
        """Call the leader of a shard and return its answer.

        `attempt(leader, timeout_s)` is tried, with pauses that grow, until `deadline` (of the
        loop's time).  `what` names the call in errors.  Raises `MetadataError` with the last
        failure, `SessionGone`, and `ShardGone` without waiting.
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
        if failure.shard_is_down and self._first_time(failure.text):
            _log.error("oxia_shard_down", code=failure.code, text=failure.text)

    async def _follow(self) -> None:
        backoff = self.backoff()
        turn = 0
        while True:
            addresses = self._guides()
            address = addresses[turn % len(addresses)]
            turn += 1
            try:
                await self._follow_at(address, backoff)
            except IncompleteShards as error:
                _log.info("oxia_shards_incomplete", error=str(error))
            except MetadataError as error:
                _log.error("oxia_shards_refused", error=str(error))
                self._refuse(error)
            except CallFailed as error:
                self._report_unreached(address, error.failure.text)
                # Another server may know the name that it is called by, or the token.
                if error.failure.action is Action.TELL_OPERATOR and turn >= len(self._servers):
                    self._refuse(refused(error.failure, "the map of shards"))
            except TimeoutError:
                self._report_unreached(address, "it does not answer")
            await asyncio.sleep(max(backoff.pause_s(), _ASK_AGAIN_S))

    def _guides(self) -> list[str]:
        """Addresses of servers to ask for the map, in turn."""
        leaders = () if self._table is None else (each.leader for each in self._table.shards)
        return [*self._servers, *filter(None, leaders), *self._believed.values()]

    async def _follow_at(self, address: str, backoff: Backoff) -> None:
        """Take the maps that a server sends, until the stream ends or its leaders are doubted.

        Raises also `TimeoutError`, if no map comes in time.
        """
        guide = await self._connections.guide(address)
        maps = guide.assignments()
        async with asyncio.timeout(bounds.OXIA_ATTEMPT_TIMEOUT_S):
            assignments = await anext(maps, None)
        self._doubted.clear()
        while assignments is not None:
            self._take(parse_assignments(assignments, self._namespace))
            await self._drop_unused()
            backoff.reset()
            assignments = await self._next_map(maps)

    async def _next_map(
        self, maps: AsyncIterator[pb.ShardAssignments]
    ) -> pb.ShardAssignments | None:
        """The next map of the server; None if the stream ended or its leaders are doubted."""
        following = asyncio.ensure_future(anext(maps, None))
        doubted = asyncio.ensure_future(self._doubted.wait())
        try:
            await asyncio.wait({following, doubted}, return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else None
        finally:
            following.cancel()
            doubted.cancel()
            await asyncio.gather(following, doubted, return_exceptions=True)

    def _report_unreached(self, server: str, why: str) -> None:
        if self._first_time(f"{server}: {why}"):
            _log.warning("oxia_server_not_reached", server=server, error=why)

    def _first_time(self, text: str) -> bool:
        """Remember a text; True if it is a new one."""
        if text in self._reported:
            return False
        if len(self._reported) >= 100:
            self._reported.clear()
        self._reported.add(text)
        return True

    def _take(self, table: ShardTable) -> None:
        known = self._table is not None and self._table.shards == table.shards
        # If a listener failed on the last map, listeners get this one even if it is the same.
        if known and not self._listeners_behind:
            return
        self._table = table
        self._refusal = None
        leaders = {each.shard_id: each.leader for each in table.shards if each.leader}
        believed = {
            shard_id: leader for shard_id, leader in self._believed.items() if shard_id in table.ids
        }
        self._believed = leaders | believed
        _log.info("oxia_shards", shards=table.ids)
        self._wake_waiting()
        self._listeners_behind = True
        for listener in self._listeners:
            listener()
        self._listeners_behind = False

    def _broken(self, _defect: BaseException) -> None:
        """Do nothing: listeners that did not take this map get the next one."""

    def _refuse(self, error: MetadataError) -> None:
        self._refusal = error
        self._wake_waiting()

    async def _drop_unused(self) -> None:
        await self._connections.keep_only(shard.leader for shard in self.table.shards)

    def _wake_waiting(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_change(self) -> None:
        await self._changed.wait()
