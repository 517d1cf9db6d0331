"""Stores whose faults a test chooses, and shorthands for streams over them.

`FakeLedgerStore` keeps entries in memory.  Appends complete in groups at the next turn of the loop,
or when the test says so (`hold`); above `room` of them in one ledger it is busy.  A fault ends a
handle as the interface says: from the chosen entry on all fail, and the test says how many of those
are on the disk nevertheless.
`FaultyMetadata` is the memory store with puts that fail before or after they took effect.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from magnetar.protocol.ids import LedgerId, Position
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock
from storage.ledger.store import (
    AppendCallback,
    Copies,
    LedgerBusy,
    LedgerDescription,
    LedgerError,
    LedgerFenced,
    LedgerStore,
    NoSuchEntry,
    NoSuchLedger,
    ReadableLedger,
    WritableLedger,
    entry_too_large,
)
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry, Limits, Persistence
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import (
    IndexEntry,
    MetadataError,
    MetadataStore,
    PutResult,
    Session,
    Version,
)
from storage.metadata.store_wrapper import MetadataStoreWrapper
from tests.support.clocks import FakeClock
from tests.support.waiting import until

T = TypeVar("T")
NAME = "public/default/persistent/t"
SMALL = Limits(ledger_max_entries=10, ledger_min_age_ms=0, cursor_flush_ms=1)
"""Ten entries for each ledger, at once."""


@dataclass
class AppendFault:
    """The append number `at` (over all ledgers, from 0) fails; `stored` later ones are on disk."""

    at: int
    error: LedgerError
    stored: int = 0


class _Stored:
    """What the disk has of one ledger."""

    def __init__(self, custom: Mapping[str, bytes], created_ms: int) -> None:
        self.custom = dict(custom)
        self.created_ms: int | None = created_ms
        self.entries: list[bytes] = []
        self.confirmed = -1
        self.closed = False
        self.handle: FakeLedger | None = None


class FakeReader(ReadableLedger):
    def __init__(self, store: "FakeLedgerStore", ledger_id: LedgerId) -> None:
        self._store = store
        self._id = ledger_id

    @property
    def ledger_id(self) -> LedgerId:
        return self._id

    @property
    def last_add_confirmed(self) -> int:
        return self._store.stored(self._id).confirmed

    @property
    def length(self) -> int:
        stored = self._store.stored(self._id)
        return sum(len(entry) for entry in stored.entries[: stored.confirmed + 1])

    async def read(self, first: int, last: int, *, max_bytes: int) -> list[bytes]:
        self._store.reads += 1
        await asyncio.sleep(0)
        self._store.take_error("read")
        stored = self._store.stored(self._id)
        if not 0 <= first <= last <= stored.confirmed:
            raise NoSuchEntry(f"{first}-{last} of {self._id}")
        found: list[bytes] = []
        for entry in stored.entries[first : last + 1]:
            max_bytes -= len(entry)
            if found and max_bytes < 0:
                break
            found.append(entry)
        return found


class FakeLedger(FakeReader, WritableLedger):
    def __init__(self, store: "FakeLedgerStore", ledger_id: LedgerId) -> None:
        super().__init__(store, ledger_id)
        self.waiting: deque[tuple[int, bytes, AppendCallback]] = deque()
        self.next_id = 0
        self.dead: LedgerError | None = None
        self.on_disk_anyway = 0
        self._due = False

    def append(self, entry: bytes, done: AppendCallback) -> int:
        if len(entry) > self._store.max_entry_bytes:
            raise entry_too_large(len(entry), self._store.max_entry_bytes)
        if len(self.waiting) >= self._store.room:
            raise LedgerBusy("Wait.")
        entry_id = self.next_id
        self.next_id += 1
        if self in self._store.crashed:
            return entry_id
        self.waiting.append((entry_id, entry, done))
        if not self._due and not self._store.hold:
            self._due = True
            asyncio.get_running_loop().call_soon(self.complete)
        return entry_id

    def complete(self, count: int = 10**9) -> None:
        """Finish up to `count` of the waiting appends."""
        self._due = False
        stored = self._store.stored_or_none(self._id)
        while self.waiting and count > 0:
            count -= 1
            entry_id, entry, done = self.waiting.popleft()
            fault = self._store.fault
            if self.dead is None and fault is not None and fault.at == self._store.appends:
                self.dead, self.on_disk_anyway = fault.error, fault.stored
                self._store.fault = None
            self._store.appends += 1
            if self.dead is None and stored is not None:
                stored.entries.append(entry)
                stored.confirmed = entry_id
                done(entry_id, None)
                continue
            if self.on_disk_anyway > 0 and stored is not None and not stored.closed:
                self.on_disk_anyway -= 1
                stored.entries.append(entry)
            done(entry_id, self.dead or LedgerFenced("deleted"))

    async def close(self) -> None:
        while self.waiting:
            await asyncio.sleep(0)
        await self._store.alive(self)
        self._store.take_error("close")
        stored = self._store.stored(self._id)
        if self.dead is not None:
            raise self.dead
        stored.closed = True


class FakeLedgerStore(LedgerStore):
    most_bytes = 10**9
    room = 10**9

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ledgers: dict[LedgerId, _Stored] = {}
        self.next_id = 1
        self.appends = 0
        self.reads = 0
        self.hold = False
        self.fault: AppendFault | None = None
        self.errors: dict[str, deque[MagnetarError | None]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.copies: list[Copies | None] = []
        """Copies that were asked for each ledger, in the order of creation."""
        self.crashed: set[FakeLedger] = set()

    def fail(self, operation: str, *errors: MagnetarError | None) -> None:
        """The next calls of create, open, close, read or delete fail so; None lets one pass."""
        self.errors.setdefault(operation, deque()).extend(errors)

    def take_error(self, operation: str) -> None:
        waiting = self.errors.get(operation)
        if waiting:
            error = waiting.popleft()
            if error is not None:
                raise error

    async def gate(self, operation: str) -> None:
        """Wait if the test put a gate before this operation."""
        await asyncio.sleep(0)
        if operation in self.gates:
            await self.gates[operation].wait()

    async def alive(self, ledger: "FakeLedger") -> None:
        """Handles of a process that crashed never answer."""
        if ledger in self.crashed:
            await asyncio.Future()

    def stored_or_none(self, ledger_id: LedgerId) -> _Stored | None:
        return self.ledgers.get(ledger_id)

    def stored(self, ledger_id: LedgerId) -> _Stored:
        if ledger_id not in self.ledgers:
            raise NoSuchLedger(f"no ledger {ledger_id}")
        return self.ledgers[ledger_id]

    def release(self, count: int = 10**9) -> None:
        """Complete held appends of the newest writable ledger."""
        for stored in self.ledgers.values():
            if stored.handle is not None and stored.handle.waiting:
                stored.handle.complete(count)
                return

    def crash(self, *, keep: int = 0) -> None:
        """Every handle dies silently; `keep` of the waiting appends reached the disk."""
        for stored in self.ledgers.values():
            handle, stored.handle = stored.handle, None
            if handle is None:
                continue
            for _, entry, _ in list(handle.waiting)[:keep]:
                stored.entries.append(entry)
            handle.waiting.clear()
            self.crashed.add(handle)
        self.hold = False
        self.fault = None
        self.errors.clear()
        self.gates.clear()

    @property
    def max_entry_bytes(self) -> int:
        return self.most_bytes

    async def create(
        self, *, custom: Mapping[str, bytes], copies: Copies | None = None
    ) -> WritableLedger:
        await self.gate("create")
        self.take_error("create")
        self.copies.append(copies)
        ledger_id = LedgerId(self.next_id)
        self.next_id += 1
        stored = self.ledgers[ledger_id] = _Stored(custom, self.clock.now_ms())
        stored.handle = FakeLedger(self, ledger_id)
        return stored.handle

    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        await self.gate("open")
        self.take_error("open")
        stored = self.stored(ledger_id)
        if not stored.closed:
            handle = stored.handle
            if handle is not None:
                handle.dead = handle.dead or LedgerFenced(f"ledger {ledger_id} was opened again")
                handle.complete()
            stored.confirmed = len(stored.entries) - 1
            stored.closed = True
        return FakeReader(self, ledger_id)

    async def open_no_recovery(self, ledger_id: LedgerId) -> ReadableLedger:
        return FakeReader(self, ledger_id)

    async def delete(self, ledger_id: LedgerId) -> None:
        await self.gate("delete")
        self.take_error("delete")
        self.ledgers.pop(ledger_id, None)

    async def list_ledgers(self) -> list[LedgerId]:
        return sorted(self.ledgers)

    async def describe(self, ledger_id: LedgerId) -> LedgerDescription:
        await self.gate("describe")
        stored = self.stored(ledger_id)
        return LedgerDescription(stored.custom, stored.created_ms)

    async def close(self) -> None:
        return None


class FaultyMetadata(MemoryMetadataStore):
    """`faults` are (part of a key, applied): such a put fails, after it was applied or not."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.faults: deque[tuple[str, bool]] = deque()
        self.puts: list[str] = []

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        partition: str | None = None,
        expect: Version | None = None,
        session: Session | None = None,
        sequence: bool = False,
        indexes: Sequence[IndexEntry] = (),
    ) -> PutResult:
        fault = None
        if self.faults and self.faults[0][0] in key:
            fault = self.faults.popleft()
        if fault is not None and not fault[1]:
            raise MetadataError("the test says no: try again.")
        self.puts.append(key)
        result = await super().put(
            key,
            value,
            partition=partition,
            expect=expect,
            session=session,
            sequence=sequence,
            indexes=indexes,
        )
        if fault is not None:
            raise MetadataError("the answer was lost: try again.")
        return result


class Process:
    """One process: when it has died, its calls never return and have no effect."""

    def __init__(self) -> None:
        self.dead = False

    async def alive(self) -> None:
        if self.dead:
            await asyncio.Future()


class ProcessMetadata(MetadataStoreWrapper):
    """The metadata store as one process sees it."""

    def __init__(self, process: Process, store: MetadataStore) -> None:
        super().__init__(store)
        self.process = process

    def _asked(self, request: Coroutine[object, object, T]) -> Coroutine[object, object, T]:
        return self._alive(request)

    async def _alive(self, request: Coroutine[object, object, T]) -> T:
        with closing(request):
            await self.process.alive()
            found = await request
            await self.process.alive()
            return found


class ProcessLedgers(FakeLedgerStore):
    """The ledger store as one process sees it."""

    def __init__(self, process: Process, store: FakeLedgerStore) -> None:
        self._process = process
        self._store = store

    @property
    def max_entry_bytes(self) -> int:
        return self._store.most_bytes

    async def create(
        self, *, custom: Mapping[str, bytes], copies: Copies | None = None
    ) -> WritableLedger:
        await self._process.alive()
        ledger = await self._store.create(custom=custom, copies=copies)
        await self._process.alive()
        return ledger

    async def open(self, ledger_id: LedgerId) -> ReadableLedger:
        await self._process.alive()
        ledger = await self._store.open(ledger_id)
        await self._process.alive()
        return ledger

    async def open_no_recovery(self, ledger_id: LedgerId) -> ReadableLedger:
        await self._process.alive()
        return await self._store.open_no_recovery(ledger_id)

    async def delete(self, ledger_id: LedgerId) -> None:
        await self._process.alive()
        await self._store.delete(ledger_id)
        await self._process.alive()

    async def list_ledgers(self) -> list[LedgerId]:
        await self._process.alive()
        return await self._store.list_ledgers()

    async def describe(self, ledger_id: LedgerId) -> LedgerDescription:
        await self._process.alive()
        return await self._store.describe(ledger_id)


class World:
    """Two stores, and one process after the other using them."""

    def __init__(self, limits: Limits = SMALL) -> None:
        self.clock = FakeClock(1_000_000)  # records that name small times are young
        self.metadata = FaultyMetadata(self.clock)
        self.ledgers = FakeLedgerStore(self.clock)
        self.limits = limits
        self.persistence: dict[str, Persistence] = {}
        """The policies of streams, by name."""
        self.factory = self.new_factory()

    def new_factory(self) -> ManagedLedgerFactory:
        self.process = Process()
        return ManagedLedgerFactory(
            ProcessMetadata(self.process, self.metadata),
            ProcessLedgers(self.process, self.ledgers),
            self.clock,
            self.limits,
            persistence=lambda name: self.persistence.get(name, Persistence()),
        )

    async def open(self, name: str = NAME) -> ManagedLedger:
        return await self.factory.open(name)

    async def restart(self, name: str = NAME) -> ManagedLedger:
        """A clean stop, and a new process."""
        await self.factory.close()
        self.factory = self.new_factory()
        return await self.open(name)

    async def crash(self, name: str = NAME, *, keep: int = 0) -> ManagedLedger:
        """The process dies now, and a new one opens the stream."""
        self.process.dead = True
        self.ledgers.crash(keep=keep)
        self.metadata.faults.clear()
        self.factory = self.new_factory()
        return await self.open(name)


class Outcomes:
    """What publish callbacks said, in the order in which they said it."""

    def __init__(self) -> None:
        self.said: list[tuple[bytes, Position | None, MagnetarError | None]] = []

    def append(self, ledger: ManagedLedger, data: bytes) -> None:
        def done(position: Position | None, error: MagnetarError | None) -> None:
            self.said.append((data, position, error))

        ledger.append(data, done)

    def append_all(self, ledger: ManagedLedger, count: int, prefix: str = "e") -> None:
        start = len(self.said)
        for number in range(count):
            self.append(ledger, f"{prefix}{start + number}".encode())

    @property
    def stored(self) -> list[bytes]:
        return [data for data, _, error in self.said if error is None]

    @property
    def positions(self) -> list[Position]:
        return [position for _, position, _ in self.said if position is not None]

    @property
    def errors(self) -> list[MagnetarError]:
        return [error for _, _, error in self.said if error is not None]

    async def wait(self, count: int) -> None:
        await until(lambda: len(self.said) >= count, poll_s=0)


async def settle() -> None:
    """Let everything that can run without time passing do so."""
    for _ in range(50):
        await asyncio.sleep(0)


async def publish(ledger: ManagedLedger, count: int, prefix: str = "e") -> list[Position]:
    """Append `count` entries and wait until they are confirmed; where they are."""
    outcomes = Outcomes()
    for number in range(count):
        outcomes.append(ledger, f"{prefix}{number}".encode())
        if number % 10_000 == 9_999:
            await outcomes.wait(number)
    await outcomes.wait(count)
    assert not outcomes.errors
    return outcomes.positions


async def publish_each(ledger: ManagedLedger, count: int, prefix: str = "e") -> list[Position]:
    """The same, one after the other."""
    return [(await publish(ledger, 1, f"{prefix}{number}."))[0] for number in range(count)]


async def contents(ledger: ManagedLedger) -> list[Entry]:
    """Every entry there is, read in small pieces."""
    found: list[Entry] = []
    position = Position(-1, -1)
    while True:
        entries = await ledger.read(position, max_entries=7, max_bytes=1000)
        if not entries:
            return found
        found += entries
        position = ledger.next_position(entries[-1].position)


def data_of(entries: Sequence[Entry]) -> list[bytes]:
    return [entry.data for entry in entries]


def remaining(cursor: Cursor, positions: Sequence[Position]) -> list[Position]:
    return [position for position in positions if not cursor.is_acknowledged(position)]
