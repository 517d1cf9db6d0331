"""Random faults in random lives: what was acknowledged is there, once, in order.

Entries whose callers got an error may be there or not, but nothing is there twice, nothing out of
the order of appending, and nothing comes after the end of a terminated stream.
"""

import asyncio
import random

import pytest

from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import DiskFull, LedgerError
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.records import decode_stream, ledger_key
from storage.managed_ledger.types import Limits, ManagedLedgerState
from storage.metadata.store import MetadataError
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    AppendFault,
    Outcomes,
    World,
    contents,
    data_of,
    publish,
    settle,
)

LIMITS = Limits(ledger_max_entries=6, ledger_min_age_ms=0, cursor_flush_ms=1)
STEPS = 30


class Life:
    """One stream with everything that can go wrong."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(LIMITS)
        self.said = Outcomes()
        self.taken: list[bytes] = []
        self.ended = False

    async def opened(self) -> ManagedLedger:
        """Open it whatever faults are waiting: each attempt uses one up."""
        while True:
            try:
                return await self.world.open()
            except (LedgerError, MetadataError):
                continue

    def inject(self) -> None:
        rng, ledgers = self.rng, self.world.ledgers
        kind = rng.choice(["append", "append", "create", "open", "close", "delete", "put", "room"])
        error = rng.choice([DiskFull("full"), LedgerError("broken"), MetadataError("down")])
        if kind == "append":
            cause = error if isinstance(error, LedgerError) else LedgerError("broken")
            ledgers.fault = AppendFault(ledgers.appends + rng.randrange(8), cause, rng.randrange(4))
        elif kind == "room":
            ledgers.room = rng.choice([1, 3, 10**9])
        elif kind == "put":
            self.world.metadata.faults.append((NAME, rng.random() < 0.5))
        else:
            ledgers.fail(kind, error)

    def append(self, ledger: ManagedLedger) -> None:
        for _ in range(self.rng.randint(1, 10)):
            data = f"{len(self.taken)}".encode()
            try:
                self.said.append(ledger, data)
            except MagnetarError:
                return
            self.taken.append(data)

    async def step(self, ledger: ManagedLedger) -> ManagedLedger:
        what = self.rng.choices(
            ["append", "fault", "turns", "settle", "crash", "restart", "seal"],
            [10, 5, 10, 3, 1, 1, 0.2],
        )[0]
        if what == "append":
            self.append(ledger)
        elif what == "fault":
            self.inject()
        elif what == "turns":
            for _ in range(self.rng.randrange(12)):
                await asyncio.sleep(0)
        elif what == "settle":
            await settle()
        elif what == "crash":
            ledger = await self.world.crash(keep=self.rng.randrange(4))
        elif what == "restart":
            await self.world.factory.close()
            self.world.factory = self.world.new_factory()
            ledger = await self.opened()
        else:
            task = asyncio.ensure_future(ledger.terminate())
            await settle()
            self.ended = self.ended or (task.done() and task.exception() is None)
        assert ledger.state is not ManagedLedgerState.FENCED, "no other owner, no broken invariant"
        record = await self.world.metadata.get(ledger_key(NAME))
        assert record is not None
        named = [info.ledger_id for info in decode_stream(record.key, record.value).ledgers]
        assert set(named) <= set(self.world.ledgers.ledgers), "what is listed exists"
        return ledger

    async def check(self) -> None:
        ledger = await self.world.crash(keep=self.rng.randrange(4))
        found = data_of(await contents(ledger))
        numbers = [int(data) for data in found]
        assert numbers == sorted(set(numbers))
        acknowledged = set(self.said.stored)
        assert acknowledged <= set(found)
        assert set(found) <= set(self.taken)
        assert [data for data in found if data in acknowledged] == self.said.stored
        assert len({data for data, _, _ in self.said.said}) == len(self.said.said)
        places = {entry.data: entry.position for entry in await contents(ledger)}
        for data, position, _ in self.said.said:
            assert position is None or places[data] == position
        if self.ended:
            assert ledger.state is ManagedLedgerState.TERMINATED
        if ledger.state is not ManagedLedgerState.TERMINATED:
            await publish(ledger, 1)


@pytest.mark.parametrize("seed", range(150))
async def test_a_life_full_of_faults(seed: int) -> None:
    life = Life(seed)
    ledger = await life.world.open()
    while "hold" not in ledger.cursors:
        await ledger.open_cursor("hold", EARLIEST)
    for _ in range(STEPS):
        ledger = await life.step(ledger)
    await life.check()
