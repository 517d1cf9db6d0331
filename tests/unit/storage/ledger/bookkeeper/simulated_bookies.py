"""Bookies and a metadata store in a world that a seed decides, behind the doors of the client.

Requests and answers take time, overtake each other, get lost; a bookie can be dead, frozen, read
only, damaged, or back from an unclean stop with entries missing.  What arrives at a bookie stays
there; what a dead client had sent arrives nevertheless.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import (
    AddDone,
    BatchDone,
    BookieClient,
    BookieCounters,
    ReadDone,
    ReplyCode,
)
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata, LedgerState
from storage.ledger.bookkeeper.metadata_store import (
    BookieAddress,
    Bookies,
    LedgerMetadataConflict,
    LedgerMetadataStore,
    VersionedMetadata,
)
from storage.ledger.store import LedgerError, NoSuchLedger

Reply = tuple[ReplyCode, Sequence[bytes]]
TIMEOUT_S = 5.0


class SimulatedBookie:
    """What one bookie holds, and what is wrong with it."""

    def __init__(self, name: str) -> None:
        self.id = BookieId(name)
        self.entries: dict[tuple[int, int], bytes] = {}
        self.keys: dict[int, bytes] = {}
        self.fenced: set[int] = set()
        self.limbo: set[int] = set()
        self.lost: set[tuple[int, int]] = set()
        self.up = True
        self.read_only = False
        self.registered = True
        self.frozen = False

    def add(
        self, ledger: int, entry: int, key: bytes, body: Sequence[bytes], recovery: bool
    ) -> Reply:
        if self.keys.setdefault(ledger, key) != key:
            return ReplyCode.UNAUTHORISED, ()
        if not recovery and ledger in self.fenced:
            return ReplyCode.FENCED, ()
        if not recovery and self.read_only:
            return ReplyCode.READ_ONLY, ()
        self.entries[ledger, entry] = b"".join(body)
        self.lost.discard((ledger, entry))
        return ReplyCode.OK, ()

    def read(self, ledger: int, entry: int, fence_with: bytes | None) -> Reply:
        if fence_with is not None:
            if self.keys.setdefault(ledger, fence_with) != fence_with:
                return ReplyCode.UNAUTHORISED, ()
            self.fenced.add(ledger)
        if entry < 0:
            entry = max((e for held, e in self.entries if held == ledger), default=-1)
        body = self.entries.get((ledger, entry))
        if body is not None:
            return ReplyCode.OK, (body,)
        if ledger in self.limbo:
            return ReplyCode.STATE_UNKNOWN, ()
        known = ledger in self.keys
        return (ReplyCode.NO_SUCH_ENTRY if known else ReplyCode.NO_SUCH_LEDGER), ()

    def read_batch(self, ledger: int, first: int, count: int, max_bytes: int) -> Reply:
        code, bodies = self.read(ledger, first, None)
        found = list(bodies)
        while found and len(found) < count:
            body = self.entries.get((ledger, first + len(found)))
            if body is None or sum(map(len, found)) + len(body) > max_bytes:
                break
            found.append(body)
        return code, found

    def lose(self, rng: random.Random) -> None:
        """An unclean stop: some entries are gone, and it knows that it does not know."""
        ledgers = {ledger for ledger, _ in self.entries}
        self.limbo |= ledgers
        self.fenced |= ledgers
        for place in list(self.entries):
            if rng.random() < 0.3:
                del self.entries[place]
                self.lost.add(place)


@dataclass
class Weather:
    """How bad it is; a run changes it as it goes."""

    rng: random.Random
    slow_s: float = 0.01
    stragglers: float = 0.05
    """Of all delays those that are twenty times as long."""
    lose_answer: float = 0.0
    lose_request: float = 0.0
    damage: float = 0.0
    metadata_conflict: float = 0.0
    metadata_error: float = 0.0

    def delay(self) -> float:
        rng = self.rng
        return rng.random() * self.slow_s * (20 if rng.random() < self.stragglers else 1)

    def clear(self) -> None:
        self.lose_answer = self.lose_request = self.damage = 0.0
        self.metadata_conflict = self.metadata_error = 0.0
        self.slow_s = 0.01


@dataclass
class SimulatedCluster:
    """The bookies and records of one world."""

    loop: asyncio.AbstractEventLoop
    world: contextvars.Context
    """In which what has left a client goes on."""
    weather: Weather
    timeout_s: float = TIMEOUT_S
    bookies: dict[BookieId, SimulatedBookie] = field(default_factory=dict)
    records: dict[LedgerId, VersionedMetadata] = field(default_factory=dict)
    history: dict[LedgerId, list[LedgerMetadata]] = field(default_factory=dict)
    next_id: int = 0

    def registered(self) -> Bookies:
        here = BookieAddress("simulated", 3181)
        writable = [b for b in self.bookies.values() if b.registered and not b.read_only]
        return Bookies(
            writable={bookie.id: here for bookie in writable},
            read_only={bookie.id: here for bookie in self.bookies.values() if bookie.read_only},
        )

    def put(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> VersionedMetadata:
        held = self.records.get(ledger_id)
        version = 0 if held is None else held.version + 1
        made = self.records[ledger_id] = VersionedMetadata(metadata, version)
        self.history.setdefault(ledger_id, []).append(metadata)
        return made

    def touch(self, ledger_id: LedgerId) -> None:
        """Somebody else rewrites the record, as auto-recovery does, without changing its end."""
        held = self.records[ledger_id].metadata
        if held.state is not LedgerState.CLOSED:
            self.put(ledger_id, replace(held, custom={"touched": b"%d" % len(self.history)}))


class SimulatedBookieClient(BookieClient):
    """The connections of one process."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.counters = BookieCounters()
        self._cluster = cluster
        self._closed = False

    def add(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        entry_id: int,
        master_key: bytes,
        body: Sequence[bytes],
        done: AddDone,
        *,
        recovery: bool = False,
    ) -> None:
        held = tuple(body)
        self._ask(
            bookie,
            lambda to: to.add(ledger_id, entry_id, master_key, held, recovery),
            lambda code, _: done(code),
        )

    def read(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        entry_id: int,
        done: ReadDone,
        *,
        fence_with: bytes | None = None,
    ) -> None:
        self._ask(
            bookie,
            lambda to: to.read(ledger_id, entry_id, fence_with),
            lambda code, bodies: done(code, self._damaged(bodies)[0] if bodies else b""),
        )

    def read_batch(
        self,
        bookie: BookieId,
        ledger_id: LedgerId,
        first: int,
        max_entries: int,
        max_bytes: int,
        done: BatchDone,
    ) -> None:
        self._ask(
            bookie,
            lambda to: to.read_batch(ledger_id, first, max_entries, max_bytes),
            lambda code, bodies: done(code, self._damaged(bodies)),
        )

    def _damaged(self, bodies: Sequence[bytes]) -> list[bytes]:
        weather = self._cluster.weather
        return [
            body[:-1] + bytes([body[-1] ^ 1]) if weather.rng.random() < weather.damage else body
            for body in bodies
        ]

    def _ask(
        self,
        bookie: BookieId,
        serve: Callable[[SimulatedBookie], Reply],
        done: Callable[[ReplyCode, Sequence[bytes]], None],
    ) -> None:
        cluster, weather = self._cluster, self._cluster.weather
        loop, to, rng = cluster.loop, cluster.bookies[bookie], self._cluster.weather.rng
        mine = contextvars.copy_context()
        answered = False

        def answer(code: ReplyCode, bodies: Sequence[bytes] = ()) -> None:
            nonlocal answered
            if not answered:
                answered = True
                done(ReplyCode.DISCONNECTED if self._closed else code, bodies)

        def arrive() -> None:
            if not to.up:
                loop.call_later(weather.delay(), answer, ReplyCode.DISCONNECTED, context=mine)
                return
            if to.frozen:
                loop.call_later(0.5 + weather.delay(), arrive, context=cluster.world)
                return
            code, bodies = serve(to)
            if rng.random() < weather.lose_answer:
                code, bodies = ReplyCode.DISCONNECTED, ()
            loop.call_later(weather.delay(), answer, code, bodies, context=mine)

        loop.call_later(cluster.timeout_s, answer, ReplyCode.TIMED_OUT, context=mine)
        if self._closed:
            loop.call_soon(answer, ReplyCode.DISCONNECTED)
        elif rng.random() < weather.lose_request:
            loop.call_later(weather.delay(), answer, ReplyCode.DISCONNECTED, context=mine)
        else:
            loop.call_later(weather.delay(), arrive, context=cluster.world)

    async def close(self) -> None:
        self._closed = True


class SimulatedMetadata(LedgerMetadataStore):
    """The records as one process has them."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster

    async def start(self) -> None:
        await self._wait()

    async def _wait(self) -> None:
        await asyncio.sleep(self._cluster.weather.delay())

    async def next_ledger_id(self) -> LedgerId:
        await self._wait()
        self._cluster.next_id += 1
        return LedgerId(self._cluster.next_id)

    async def create(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> VersionedMetadata:
        await self._wait()
        if ledger_id in self._cluster.records:
            raise LedgerMetadataConflict("it exists: take the next id.")
        return self._cluster.put(ledger_id, metadata)

    async def read(self, ledger_id: LedgerId) -> VersionedMetadata:
        await self._fail_now_and_then()
        found = self._cluster.records.get(ledger_id)
        await self._wait()
        if found is None:
            raise NoSuchLedger(f"Ledger {ledger_id} is not there: look for another.")
        return found

    async def write(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, *, expect: int
    ) -> VersionedMetadata:
        cluster, weather = self._cluster, self._cluster.weather
        if weather.rng.random() < weather.metadata_error:
            cluster.loop.call_later(
                20 * weather.delay(),
                self._late_write,
                ledger_id,
                metadata,
                expect,
                context=cluster.world,
            )
            raise LedgerError("No answer came, the write may still be on its way: try again.")
        await self._wait()
        if weather.rng.random() < weather.metadata_conflict:
            cluster.touch(ledger_id)
        held = cluster.records.get(ledger_id)
        if held is None:
            raise NoSuchLedger(f"Ledger {ledger_id} is not there: look for another.")
        took_effect = held.version == expect
        if took_effect:
            held = cluster.put(ledger_id, metadata)
        await self._fail_now_and_then()
        if not took_effect:
            raise LedgerMetadataConflict("another version is there: read it again.")
        return held

    def _late_write(self, ledger_id: LedgerId, metadata: LedgerMetadata, expect: int) -> None:
        held = self._cluster.records.get(ledger_id)
        if held is not None and held.version == expect:
            self._cluster.put(ledger_id, metadata)

    async def _fail_now_and_then(self) -> None:
        await self._wait()
        if self._cluster.weather.rng.random() < self._cluster.weather.metadata_error:
            raise LedgerError("The store is away: try again.")

    async def delete(self, ledger_id: LedgerId) -> None:
        await self._wait()
        self._cluster.records.pop(ledger_id, None)

    async def list_ledgers(self) -> list[LedgerId]:
        await self._wait()
        return sorted(self._cluster.records)

    @property
    def bookies(self) -> Bookies:
        return self._cluster.registered()

    async def close(self) -> None:
        await self._wait()
