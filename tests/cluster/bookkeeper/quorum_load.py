"""A store on real bookies, and a load on one ledger that notes what it was told.

Run as a program it is a writer in a process of its own: it prints the ledger's id, a line for each
entry that was acknowledged, and what ended it.
"""

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from magnetar.protocol.ids import LedgerId
from storage.clock import SystemClock
from storage.ledger.bookkeeper.bookie_options import BookieOptions
from storage.ledger.bookkeeper.ledger_metadata import DigestType
from storage.ledger.bookkeeper.open import open_bookkeeper
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore, BookKeeperOptions
from storage.ledger.store import Copies, LedgerError, ReadableLedger, WritableLedger
from storage.metadata.access import StoreAccess

REQUEST_TIMEOUT_S = 20.0
"""For a machine that has much else to do: a bookie that answers late is no failure."""
WINDOW = 200
Quorums = tuple[int, int, int]


@asynccontextmanager
async def store_on(uri: str, quorums: Quorums) -> AsyncIterator[BookKeeperLedgerStore]:
    """A client of its own: connections, session, list of bookies."""
    store = await open_bookkeeper(
        uri,
        SystemClock(),
        random.Random(),
        ledgers=BookKeeperOptions(Copies(*quorums), DigestType.CRC32C, b"secret"),
        bookies=BookieOptions(request_timeout_s=REQUEST_TIMEOUT_S),
        access=StoreAccess(),
    )
    try:
        yield store
    finally:
        await store.close()


def entry(entry_id: int) -> bytes:
    """The data of an entry: of different sizes, up to 1 KB."""
    return b"%d:" % entry_id + b"x" * (entry_id * 37 % 1000)


class Load:
    """Appends with `WINDOW` in flight, until told to stop or an append fails."""

    def __init__(self, ledger: WritableLedger, *, loud: bool = False) -> None:
        self.ledger = ledger
        self.acknowledged = -1
        self.error: LedgerError | None = None
        self._loud = loud
        self._called_back = 0
        self._appended = 0
        self._stopping = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._refill()

    def _refill(self) -> None:
        while (
            not self._stopping
            and self.error is None
            and self._appended - self._called_back < WINDOW
        ):
            try:
                entry_id = self.ledger.append(entry(self._appended), self._done)
            except LedgerError as error:
                self.error = error
                break
            assert entry_id == self._appended
            self._appended += 1
        done = self._stopping or self.error is not None
        if done and self._called_back == self._appended and not self._ended.done():
            self._ended.set_result(None)

    def _done(self, entry_id: int, error: LedgerError | None) -> None:
        assert entry_id == self._called_back, "callbacks are out of order"
        self._called_back += 1
        if error is None:
            assert self.error is None, "an entry succeeded after a failure"
            self.acknowledged = entry_id
            if self._loud:
                print(entry_id, flush=True)
        elif self.error is None:
            self.error = error
        asyncio.get_running_loop().call_soon(self._refill)

    async def reached(self, entry_id: int) -> None:
        """Wait until so much is acknowledged.  Raises what ends the load."""
        while self.acknowledged < entry_id:
            if self.error is not None:
                raise self.error
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """No more appends; return when all have their outcome."""
        self._stopping = True
        self._refill()
        await self.ended()

    async def ended(self) -> None:
        """Wait until nothing is in flight after the load was stopped, or failed."""
        await self._ended


async def check(reader: ReadableLedger) -> None:
    """Every entry up to the last add confirmed is what was appended, and the length is right."""
    last = reader.last_add_confirmed
    assert reader.length == sum(len(entry(number)) for number in range(last + 1))
    first = 0
    while first <= last:
        found = await reader.read(first, last, max_bytes=1 << 20)
        assert found == [entry(number) for number in range(first, first + len(found))]
        first += len(found)


async def _write(uri: str, quorums: Quorums) -> None:
    async with store_on(uri, quorums) as store:
        ledger = await store.create(custom={})
        print(LedgerId(ledger.ledger_id), flush=True)
        load = Load(ledger, loud=True)
        await load.ended()
        print(type(load.error).__name__, flush=True)


if __name__ == "__main__":
    _ensemble, _write_quorum, _ack_quorum = map(int, sys.argv[2:5])
    asyncio.run(_write(sys.argv[1], (_ensemble, _write_quorum, _ack_quorum)))
