"""One writer, some who recover and read its ledger, and faults: a whole story from a seed.

The checker judges what everybody was told against what is in the records and on the bookies.
"""

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import structlog

from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata, LedgerState
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.store import Copies, LedgerError, ReadableLedger, WritableLedger
from tests.simulation.loop import Host, SimulatedLoop
from tests.support.clocks import FakeClock
from tests.unit.storage.ledger.bookkeeper.simulated_bookies import (
    SimulatedBookie,
    SimulatedBookieClient,
    SimulatedCluster,
    SimulatedMetadata,
    Weather,
)

QUORUMS = (
    (1, 1, 1),
    (2, 2, 1),
    (2, 2, 2),
    (2, 2, 2),
    (3, 2, 1),
    (3, 2, 2),
    (3, 2, 2),
    (3, 3, 2),
    (3, 3, 2),
    (3, 3, 3),
    (4, 3, 2),
    (5, 3, 2),
)
TROUBLE_S = 20.0
"""How long faults go on; then everything is mended, and the last recovery must succeed."""


class Broken(AssertionError):
    """What must not be."""


@dataclass
class Told:
    """What the writer was told of its appends."""

    data: list[bytes] = field(default_factory=list)
    outcomes: list[tuple[int, LedgerError | None]] = field(default_factory=list)

    def __call__(self, entry_id: int, error: LedgerError | None) -> None:
        if entry_id != len(self.outcomes):
            raise Broken(f"entry {entry_id} was called back after {len(self.outcomes) - 1}")
        if error is None and any(failed is not None for _, failed in self.outcomes):
            raise Broken(f"entry {entry_id} succeeded after a failure")
        self.outcomes.append((entry_id, error))

    @property
    def last_acked(self) -> int:
        return max((entry_id for entry_id, error in self.outcomes if error is None), default=-1)


class QuorumRun:
    """The run of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"plan {seed}")
        self.loop = SimulatedLoop(random.Random(f"loop {seed}"))
        weather = Weather(random.Random(f"weather {seed}"))
        self.cluster = SimulatedCluster(self.loop, self.loop.world.context, weather)
        self.quorums = self.rng.choice(QUORUMS)
        for number in range(self.quorums[0] + self.rng.randint(0, 3)):
            bookie = SimulatedBookie(f"bookie-{number}")
            self.cluster.bookies[bookie.id] = bookie
        self.told = Told()
        self.ledger_id: LedgerId | None = None
        self.writer_host: Host | None = None
        self.writer_ended = False
        self.ends: list[tuple[str, int, int]] = []
        self.trouble = True
        self.contended = self.rng.random() < 0.4
        self.unhandled: list[object] = []

    def run(self) -> None:
        """Raises `Broken`."""
        with _quiet_logs():
            task = self.loop.spawn(self.loop.world, self._story(), "story")
            asyncio.set_event_loop(self.loop)
            self.loop.set_exception_handler(self._unhandled)
            try:
                self.loop.run_until_complete(task)
                if self.unhandled:
                    raise Broken(f"a callback raised {self.unhandled[0]!r}")
            finally:
                asyncio.set_event_loop(None)
                self.loop.bury()

    def _unhandled(self, loop: object, context: dict[str, object]) -> None:
        if "handle" in context or "callback" in str(context["message"]):
            self.unhandled.append(context.get("exception"))

    def _store(self, name: str) -> BookKeeperLedgerStore:
        return BookKeeperLedgerStore(
            SimulatedMetadata(self.cluster),
            SimulatedBookieClient(self.cluster),
            FakeClock(),
            random.Random(f"{name} {self.rng.random()}"),
            BookKeeperOptions(Copies(*self.quorums)),
        )

    async def _story(self) -> None:
        self.writer_host = self.loop.new_host("writer")
        writer = self.loop.spawn(self.writer_host, self._write(), "writer")
        while self.ledger_id is None:
            await asyncio.sleep(0.01)
        count = self.rng.randint(1, 3) if self.contended else self.rng.randint(0, 3)
        others = [self._start_other(number) for number in range(count)]
        faults = self.loop.spawn(self.loop.world, self._faults(), "faults")
        deadline = self.loop.time() + TROUBLE_S * self.rng.random()
        while self.loop.time() < deadline and not (writer.done() and all(t.done() for t in others)):
            await asyncio.sleep(0.2)
        self.trouble = False
        await faults
        self._mend()
        await self._until_called_back()
        end = await self._last_recovery()
        for task in (writer, *others):
            if task.done() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        await self._judge(end)

    # Actors

    async def _write(self) -> None:
        rng, store = self.rng, self._store("writer")
        await store.start()
        ledger = await store.create(custom={})
        if self.contended:
            self.cluster.weather.slow_s = rng.choice((0.01, 0.05))
            self.cluster.weather.stragglers = rng.choice((0.05, 0.4))
        elif rng.random() < 0.3:
            self.cluster.weather.slow_s = 0.3
        self.ledger_id = ledger.ledger_id
        life = rng.random()
        for _ in range(rng.randint(20, 50) if self.contended else rng.randint(1, 25)):
            for _ in range(rng.randint(1, 2 if self.contended else 6)):
                if not self._append(ledger):
                    return
            pauses = (0.005, 0.02) if self.contended else (0, 0.001, 0.02, 0.3)
            await asyncio.sleep(rng.choice(pauses))
            self._check_reads_of_writer(ledger)
        if life < 0.3:
            await self._close(ledger)
        elif life < 0.6 and self.writer_host is not None:
            self.writer_ended = True
            self.loop.crash(self.writer_host)
        elif life < 0.7:
            await self._open(store, "the writer's own store")

    def _append(self, ledger: WritableLedger) -> bool:
        data = b"%d " % len(self.told.data) + b"x" * self.rng.randint(0, 40)
        self.told.data.append(data)
        try:
            ledger.append(data, self.told)
        except LedgerError:
            self.told.data.pop()
            return False
        return True

    def _check_reads_of_writer(self, ledger: WritableLedger) -> None:
        if ledger.last_add_confirmed < self.told.last_acked:
            raise Broken("the last add confirmed is behind what was called back")

    async def _close(self, ledger: WritableLedger) -> None:
        try:
            await ledger.close()
        except LedgerError:
            return
        self.ends.append(("writer", ledger.last_add_confirmed, ledger.length))

    def _start_other(self, number: int) -> "asyncio.Task[None]":
        host = self.loop.new_host(f"other-{number}")
        if self.rng.random() < 0.3:
            host.crash_at_step = self.rng.randint(1, 150)
            host.on_crash = lambda: self.loop.crash(host)
        store = self._store(host.name)
        if self.rng.random() < 0.3:
            return self.loop.spawn(host, self._look(store), host.name)
        return self.loop.spawn(host, self._recover(store, host.name), host.name)

    async def _recover(self, store: BookKeeperLedgerStore, name: str) -> None:
        longest = self.rng.choice((0.3, 1) if self.contended else (0.1, 1, 10))
        await asyncio.sleep(self.rng.random() * longest)
        for _ in range(5):
            if await self._open(store, name):
                return
            await asyncio.sleep(self.rng.random())

    async def _open(self, store: BookKeeperLedgerStore, name: str) -> bool:
        if self.ledger_id is None:
            return False
        try:
            reader = await store.open(self.ledger_id)
        except LedgerError:
            return False
        self.ends.append((name, reader.last_add_confirmed, reader.length))
        return True

    async def _look(self, store: BookKeeperLedgerStore) -> None:
        """Read without recovery."""
        for _ in range(3):
            await asyncio.sleep(self.rng.random())
            if self.ledger_id is None:
                continue
            try:
                reader = await store.open_no_recovery(self.ledger_id)
                await self._check_data(reader)
            except LedgerError:
                continue

    # Faults

    async def _faults(self) -> None:
        rng, weather = self.rng, self.cluster.weather
        weather.damage = rng.choice((0, 0, 0.02))
        weather.lose_answer = rng.choice((0, 0, 0.01, 0.1))
        weather.lose_request = rng.choice((0, 0, 0.01, 0.1))
        weather.metadata_conflict = rng.choice((0, 0.1, 0.3))
        weather.metadata_error = rng.choice((0, 0, 0.05))
        pause = rng.choice((0.05, 0.2) if self.contended else (0.05, 0.5, 3.0))
        unclean = self.quorums[2] > 1 and rng.random() < 0.3
        while self.trouble:
            await asyncio.sleep(rng.expovariate(1 / pause))
            bookie = rng.choice(list(self.cluster.bookies.values()))
            kind = rng.random()
            if kind < 0.25:
                bookie.up = False
            elif kind < 0.55:
                bookie.up, bookie.frozen = True, False
            elif kind < 0.65:
                bookie.frozen = True
            elif kind < 0.75:
                bookie.read_only = not bookie.read_only
            elif kind < 0.8:
                bookie.registered = not bookie.registered
            elif kind < 0.85 and unclean:
                unclean = False
                bookie.lose(rng)
            elif kind < 0.95:
                await self._freeze_writer()
            elif self.ledger_id in self.cluster.records:
                self.cluster.touch(self.ledger_id)

    async def _freeze_writer(self) -> None:
        host = self.writer_host
        if host is not None and not host.dead:
            self.loop.pause(host)
            await asyncio.sleep(self.rng.random() * 3)
            self.loop.resume(host)

    def _mend(self) -> None:
        self.cluster.weather.clear()
        for bookie in self.cluster.bookies.values():
            bookie.up, bookie.frozen, bookie.read_only, bookie.registered = True, False, False, True

    # The checker

    async def _until_called_back(self) -> None:
        """With nothing broken any more, everything that was appended gets its outcome."""
        for _ in range(300):
            if self.writer_ended or len(self.told.outcomes) == len(self.told.data):
                return
            await asyncio.sleep(0.2)
        raise Broken(f"{len(self.told.outcomes)} of {len(self.told.data)} were called back")

    async def _last_recovery(self) -> ReadableLedger:
        assert self.ledger_id is not None
        store = self._store("last")
        error: LedgerError | None = None
        for _ in range(5):
            try:
                return await store.open(self.ledger_id)
            except LedgerError as failed:
                error = failed
                await asyncio.sleep(1)
        raise Broken(f"nothing is broken, and the ledger cannot be opened: {error}")

    async def _judge(self, end: ReadableLedger) -> None:
        last, length = end.last_add_confirmed, end.length
        for name, other_last, other_length in self.ends:
            if (other_last, other_length) != (last, length):
                raise Broken(f"{name} saw {other_last, other_length}, the end is {last, length}")
        if last < self.told.last_acked:
            raise Broken(f"{self.told.last_acked} was acknowledged, the ledger ends at {last}")
        if last >= len(self.told.data):
            raise Broken(f"the ledger ends at {last}, {len(self.told.data)} were appended")
        if length != sum(map(len, self.told.data[: last + 1])):
            raise Broken(f"the length {length} is not that of entries up to {last}")
        await self._check_data(end)
        assert self.ledger_id is not None
        history = self.cluster.history[self.ledger_id]
        for before, after in itertools.pairwise(history):
            self._check_change(before, after)
        self._check_copies(history[-1])

    async def _check_data(self, reader: ReadableLedger) -> None:
        found: list[bytes] = []
        last = reader.last_add_confirmed
        while len(found) <= last:
            found += await reader.read(len(found), last, max_bytes=self.rng.choice((0, 50, 500)))
        if found != self.told.data[: last + 1]:
            raise Broken("what is read is not what was appended")

    def _check_change(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        if before.state is LedgerState.CLOSED:
            raise Broken("a closed record changed")
        if before.state is LedgerState.IN_RECOVERY and after.state is LedgerState.OPEN:
            raise Broken("a record went back to OPEN")
        firsts = [ensemble.first_entry_id for ensemble in after.ensembles]
        if firsts[0] != 0 or firsts != sorted(set(firsts)):
            raise Broken(f"ensembles start at {firsts}")
        if any(len(set(e.bookies)) != after.ensemble_size for e in after.ensembles):
            raise Broken("an ensemble has a bookie twice")
        kept = before.ensembles[:-1]
        if after.ensembles[: len(kept)] != kept:
            raise Broken("an earlier ensemble was touched")

    def _check_copies(self, record: LedgerMetadata) -> None:
        assert self.ledger_id is not None
        for entry_id in range(record.last_entry_id + 1):
            bookies = record.ensemble_of(entry_id).bookies
            place = (self.ledger_id, entry_id)
            copies = [
                bookie
                for index in record.write_set(entry_id)
                for bookie in [self._bookie(bookies[index])]
                if place in bookie.entries or place in bookie.lost
            ]
            if len(copies) < record.ack_quorum:
                raise Broken(f"entry {entry_id} has {len(copies)} copies where its record says")

    def _bookie(self, name: BookieId) -> SimulatedBookie:
        return self.cluster.bookies[name]


@contextlib.contextmanager
def _quiet_logs() -> Iterator[None]:
    saved = structlog.get_config()
    structlog.configure(processors=[_drop])
    try:
        yield
    finally:
        structlog.configure(**saved)


def _drop(logger: object, level: str, event: object) -> NoReturn:
    raise structlog.DropEvent
