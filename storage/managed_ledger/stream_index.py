"""The entry indexes of one stream's ledgers: kept while they are written, stored when they end.

Rules:

- A stream is counted from when somebody first asks: what nobody plans to read costs its producers
  nothing.  From then on the index of the ledger that is written grows with what becomes durable.
  When the ledger ends it is put beside the ledger's record: one record of a metadata store, which
  no tool of Apache Pulsar looks at, and which goes with the ledger (`Stores.delete_data_ledger`).
- An index that is missing (nobody had asked, a crash, a ledger of Apache Pulsar) is made by reading
  the ledger, in bounded pieces, once for all who ask, and is stored then.  A ledger that ended
  never changes, so a stored index that covers all its entries is true, whoever wrote it; any other
  is made anew.
- It is knowledge that can be had again: a failure to store or delete it fails nothing else.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Protocol

import structlog

from config.bounds import ENTRY_INDEX_READ_ENTRIES, READ_BATCH_BYTES
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.ledger.store import LedgerError
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.entry_index import BrokenIndex, LedgerIndex, Sums, index_key
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import Entry

log = structlog.get_logger(__name__)


class ReadEntries(Protocol):
    """How entries are read: `StreamReader.read`."""

    async def __call__(
        self, start: Position, *, max_entries: int, max_bytes: int, up_to: Position
    ) -> list[Entry]:
        """Entries from `start` to `up_to`."""
        ...


class StreamIndex:
    """Keeps the index of the ledger being written, and stores it when the ledger ends."""

    __slots__ = (
        "_ahead",
        "_asked",
        "_building",
        "_core",
        "_live",
        "_live_id",
        "_read",
        "_saves",
        "_totals",
    )

    def __init__(self, core: StreamCore, read: ReadEntries) -> None:
        self._core = core
        self._read = read
        self._asked = False
        self._live: LedgerIndex | None = None
        self._live_id = -1
        self._totals: dict[int, Sums] = {}
        self._building: dict[int, asyncio.Task[LedgerIndex | None]] = {}
        self._ahead: asyncio.Task[None] | None = None
        self._saves = BackgroundTasks()

    # While it is written

    def appended(self, ledger_id: int, first: int, entries: Sequence[bytes]) -> None:
        """Entries from `first` on became durable.  What is missing before them is read if asked."""
        if not self._asked:
            return
        live = self._live
        if live is None or self._live_id != ledger_id:
            self.ledgers_changed()  # the one before has ended
            live = self._live = LedgerIndex()
            self._live_id = ledger_id
        if live.entries == first:
            live.add(entries)

    def ledgers_changed(self) -> None:
        """Ledgers ended, or went."""
        ledgers = self._core.ledgers
        for ledger_id in [each for each in self._totals if ledgers.get(each) is None]:
            del self._totals[ledger_id]
        live, ledger_id = self._live, self._live_id
        info = ledgers.get(ledger_id)
        if live is None or (info is not None and not info.closed_ms):
            return
        self._live, self._live_id = None, -1
        if info is not None and live.entries == info.entries:
            self._complete(info, live)
            self._save(ledger_id, live)

    # Asking

    async def of(self, ledger_id: int) -> LedgerIndex | None:
        """The index of a ledger, over all entries that are readable now; None if it is gone.

        Raises what reading raises.
        """
        self._asked = True
        info = self._core.ledgers.get(ledger_id)
        if info is None:
            return None
        index = self._known(ledger_id)
        if index is not None and index.entries >= info.entries:
            return index
        building = self._building.get(ledger_id)
        if building is None:
            building = self._core.loop.create_task(self._build(ledger_id))
            self._building[ledger_id] = building
            building.add_done_callback(lambda done: self._built(ledger_id, done))
        try:
            return await asyncio.shield(building)
        except asyncio.CancelledError:
            if building.cancelled():
                raise self._core.stopped_error() from None
            raise

    def _built(self, ledger_id: int, building: "asyncio.Task[LedgerIndex | None]") -> None:
        self._building.pop(ledger_id, None)
        if not building.cancelled():
            building.exception()  # whoever asked may be gone

    async def totals(self, info: LedgerInfo) -> Sums:
        """What all entries of a ledger add up to; nothing if it is gone."""
        known = self._totals.get(info.ledger_id)
        if known is not None:
            return known
        index = await self.of(info.ledger_id)
        return Sums() if index is None else index.sums(0, index.block_count)

    def known_totals(self, info: LedgerInfo) -> Sums | None:
        """The same if nothing must be read for it."""
        return self._totals.get(info.ledger_id)

    def look_ahead(self, first: int) -> asyncio.Task[None]:
        """Have the totals of all ledgers from that one on; the task goes on if nobody waits."""
        if self._ahead is None:
            self._ahead = self._start(self._go_ahead(first), "entry_indexes_not_made")
            self._ahead.add_done_callback(self._ahead_ended)
        return self._ahead

    def _ahead_ended(self, _: "asyncio.Task[None]") -> None:
        self._ahead = None

    async def _go_ahead(self, first: int) -> None:
        for info in [each for each in self._core.ledgers.infos if each.ledger_id >= first]:
            await self.totals(info)

    # Making, storing, forgetting

    def _known(self, ledger_id: int) -> LedgerIndex | None:
        if ledger_id == self._live_id:
            return self._live
        return self._core.stores.indexes.get(ledger_id)

    def _complete(self, info: LedgerInfo, index: LedgerIndex) -> None:
        self._totals[info.ledger_id] = index.sums(0, index.block_count)
        self._core.stores.indexes.keep(info.ledger_id, index)

    async def _build(self, ledger_id: int) -> LedgerIndex | None:
        """Load it, or read what is missing of it."""
        core = self._core
        index = self._known(ledger_id) or await self._load(ledger_id)
        stored = index is not None
        async with core.stores.index_builds:
            if index is None:
                index = LedgerIndex()
            info = core.ledgers.get(ledger_id)
            if info is not None and not info.closed_ms:
                self._live, self._live_id = index, ledger_id
            while info is not None and index.entries < info.entries:
                stored = False
                if not await self._read_on(ledger_id, index, info.last):
                    info = core.ledgers.get(ledger_id)
                    break
                info = core.ledgers.get(ledger_id)
        if info is None:
            return None
        if index.entries < info.entries:
            raise LedgerError(
                f"Ledger {ledger_id} of {core.name} has {info.entries} entries, and after "
                f"{index.entries} nothing more is read: check the ledger store."
            )
        if info.closed_ms and index.entries == info.entries:
            self._complete(info, index)
            if not stored:
                self._save(ledger_id, index)
        return index

    async def _read_on(self, ledger_id: int, index: LedgerIndex, last: Position) -> bool:
        """One piece; False if there is nothing to read any more, because the ledger was trimmed."""
        entries = await self._read(
            Position(ledger_id, index.entries),
            max_entries=ENTRY_INDEX_READ_ENTRIES,
            max_bytes=READ_BATCH_BYTES,
            up_to=last,
        )
        if not entries or entries[0].position != Position(ledger_id, index.entries):
            return False
        index.add(entry.data for entry in entries)
        return True

    async def _load(self, ledger_id: int) -> LedgerIndex | None:
        """What is stored, if it covers the ledger."""
        info = self._core.ledgers.get(ledger_id)
        if info is None or not info.closed_ms:
            return None
        record = await self._core.stores.metadata.get(index_key(ledger_id))
        if record is None:
            return None
        try:
            index = LedgerIndex.decode(record.value)
        except BrokenIndex as error:
            log.warning("entry_index_unreadable", ledger=ledger_id, error=str(error))
            return None
        return index if index.entries == info.entries else None

    def _save(self, ledger_id: int, index: LedgerIndex) -> None:
        self._start(self._put(ledger_id, index.encode()), "entry_index_not_stored")

    async def _put(self, ledger_id: int, value: bytes) -> None:
        metadata = self._core.stores.metadata
        await metadata.put(index_key(ledger_id), value)
        if self._core.ledgers.get(ledger_id) is None:
            await metadata.delete(index_key(ledger_id))

    def _start(self, work: Coroutine[object, object, None], failed: str) -> "asyncio.Task[None]":
        async def logged() -> None:
            try:
                await work
            except MagnetarError as error:
                log.warning(failed, name=self._core.name, error=str(error))

        return self._saves.start(logged())

    async def close(self) -> None:
        """Make nothing anew any more; what is being stored is waited for."""
        if self._ahead is not None:
            self._ahead.cancel()
        for building in self._building.values():
            building.cancel()
        while left := {*self._saves.running, *self._building.values()}:
            await asyncio.wait(left)
