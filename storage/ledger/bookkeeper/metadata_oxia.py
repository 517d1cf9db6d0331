"""Ledger records and the list of bookies in Oxia, in the form of Apache Pulsar's driver."""

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from functools import partial
from typing import TypeVar

import structlog

from config import bounds
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper import metadata_format
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata
from storage.ledger.bookkeeper.metadata_format import SHORT_ID_LIMIT, LedgerPaths, UnreadableRecord
from storage.ledger.bookkeeper.metadata_store import (
    BookieAddress,
    Bookies,
    LedgerMetadataConflict,
    LedgerMetadataStore,
    VersionedMetadata,
)
from storage.ledger.store import LedgerError, NoSuchLedger
from storage.metadata.store import (
    ABSENT,
    Event,
    MetadataError,
    MetadataStore,
    PutResult,
    Record,
    Version,
    VersionConflict,
)
from storage.metadata.watch_follower import WatchFollower

_log = structlog.get_logger(__name__)

_HIGH_PREFIX = "HOB-"

T = TypeVar("T")


class OxiaLedgerMetadata(LedgerMetadataStore):
    """`LedgerMetadataStore` on Oxia, with the records of Apache Pulsar's driver.

    Records have no partition keys and no indexes, as that driver finds them by key alone.  On
    servers before release 0.14.4 a process may have only one store for each Oxia cluster: pass the
    open one.
    """

    def __init__(self, store: MetadataStore, *, close_store: bool = True) -> None:
        """Make it in the running loop.  With `close_store` the store is closed with it."""
        self._store = store
        self._close_store = close_store
        self._paths = LedgerPaths()
        self._bookies = Bookies()
        self._followings = [
            WatchFollower(watch, self._bookies_changed, self._bookies_changed)
            for watch in (
                partial(store.watch_children, self._paths.available),
                partial(store.watch_children, self._paths.read_only),
                partial(store.watch_key, metadata_format.RACKS_PATH),
            )
        ]
        self._tasks = BackgroundTasks(_log)
        self._stale = asyncio.Event()

    async def start(self) -> None:
        """See `LedgerMetadataStore.start`.  Raises `UnreadableRecord` for another layout."""
        try:
            layout = await self._store.get(self._paths.layout)
            metadata_format.check_layout(None if layout is None else layout.value)
            for following in self._followings:
                following.watch()
            await self._list_bookies()
        except MetadataError as error:
            await self.close()
            raise LedgerError(str(error)) from error
        except BaseException:
            await self.close()
            raise
        for following in self._followings:
            self._tasks.keep("watch of bookies", following.run)
        self._tasks.keep("list of bookies", self._list_when_stale)

    async def next_ledger_id(self) -> LedgerId:
        """See `LedgerMetadataStore.next_ledger_id`."""
        highs = await self._high_parts()
        if not highs:
            number = await self._count(self._paths.id_generator)
            if number < SHORT_ID_LIMIT:
                return LedgerId(number)
        for high in range(max(highs, default=1), max(highs, default=1) + 2):
            path = f"{self._paths.long_id_generator}/{_HIGH_PREFIX}{high:010d}"
            number = await self._count(path)
            if number < SHORT_ID_LIMIT:
                return metadata_format.long_ledger_id(high, number)
        raise LedgerError(
            f"Ledger ids have run out below {self._paths.long_id_generator}: look at its children."
        )

    async def create(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> VersionedMetadata:
        """See `LedgerMetadataStore.create`."""
        path = self._paths.ledger(ledger_id)
        await self._make_parents(path)
        version = await self._put(ledger_id, metadata, ABSENT)
        return VersionedMetadata(metadata, version)

    async def read(self, ledger_id: LedgerId) -> VersionedMetadata:
        """See `LedgerMetadataStore.read`."""
        record = await self._record(ledger_id)
        if record is None:
            raise _no_such_ledger(ledger_id)
        metadata = metadata_format.decode_metadata(record.value, ledger_id)
        return VersionedMetadata(metadata, record.version)

    async def write(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, *, expect: int
    ) -> VersionedMetadata:
        """See `LedgerMetadataStore.write`."""
        if expect < 0:  # it would create
            raise _conflict(ledger_id)
        try:
            version = await self._put(ledger_id, metadata, Version(expect))
        except LedgerMetadataConflict:
            if await self._record(ledger_id) is None:
                raise _no_such_ledger(ledger_id) from None
            raise
        return VersionedMetadata(metadata, version)

    async def delete(self, ledger_id: LedgerId) -> None:
        """See `LedgerMetadataStore.delete`.  The parents stay: there are few."""
        await _ledger_errors(self._store.delete(self._paths.ledger(ledger_id)))

    async def list_ledgers(self) -> list[LedgerId]:
        """See `LedgerMetadataStore.list_ledgers`."""
        found: list[LedgerId] = []
        levels = [self._paths.root]
        while levels:
            page, levels = levels[: bounds.OXIA_LISTED_LEVELS], levels[bounds.OXIA_LISTED_LEVELS :]
            lists = await _ledger_errors(_gather([self._store.children(each) for each in page]))
            for level, names in zip(page, lists, strict=True):
                for name in names:
                    path = f"{level}/{name}"
                    ledger_id = self._paths.ledger_id(path)
                    if ledger_id is not None:
                        found.append(ledger_id)
                    elif metadata_format.is_level(name):
                        levels.append(path)
        return sorted(found)

    @property
    def bookies(self) -> Bookies:
        """See `LedgerMetadataStore.bookies`."""
        return self._bookies

    async def close(self) -> None:
        """See `LedgerMetadataStore.close`.  Idempotent."""
        try:
            await self._tasks.stop()
        finally:
            for following in self._followings:
                following.close()
            if self._close_store:
                await _ledger_errors(self._store.close())

    # Records

    async def _record(self, ledger_id: LedgerId) -> Record | None:
        return await _ledger_errors(self._store.get(self._paths.ledger(ledger_id)))

    async def _put(self, ledger_id: LedgerId, metadata: LedgerMetadata, expect: Version) -> Version:
        value = metadata_format.encode_metadata(metadata)
        try:
            made = await self._store.put(self._paths.ledger(ledger_id), value, expect=expect)
        except VersionConflict:
            raise _conflict(ledger_id) from None
        except MetadataError as error:
            # The outcome is unknown.  The same bytes under another version are our write.
            record = await self._record(ledger_id)
            if record is None or record.value != value or record.version == expect:
                raise LedgerError(str(error)) from error
            return record.version
        return made.version

    async def _make_parents(self, path: str) -> None:
        """Make the missing parents of a record, from the top."""
        # Children are found only below parents that are records.  Each is checked: other clients
        # make parents from below, and may have died half-way.
        parents = self._paths.parents(path)[::-1]
        found = await _ledger_errors(self._store.get_many(parents))
        for parent, record in zip(parents, found, strict=True):
            if record is not None:
                continue
            try:
                await _ledger_errors(self._store.put(parent, b"", expect=ABSENT))
            except VersionConflict:
                continue

    # Ids

    async def _high_parts(self) -> list[int]:
        """The high halves of long ids that are in use; empty while ids are short."""
        path = self._paths.long_id_generator
        if await _ledger_errors(self._store.get(path)) is None:
            return []
        names = await _ledger_errors(self._store.children(path))
        numbers = [
            metadata_format.number_of(name) for name in names if name.startswith(_HIGH_PREFIX)
        ]
        return [number for number in numbers if number is not None] or [1]

    async def _count(self, path: str) -> int:
        """The next number of a counter; the first one is 1."""
        # It is the record's number of modifications.  The record is never deleted, and a lost
        # answer costs one number.
        made = await self._put_again(path)
        if made.modifications == 0:
            await self._make_parents(path)
            made = await self._put_again(path)
        return made.modifications

    async def _put_again(self, path: str) -> PutResult:
        for _ in range(bounds.OXIA_COUNTER_TRIES - 1):
            try:
                return await self._store.put(path, b"")
            except MetadataError as error:
                _log.info("oxia_ledger_id_lost", path=path, error=str(error))
        return await _ledger_errors(self._store.put(path, b""))

    # Bookies

    async def _bookies_changed(self, _event: Event | None = None) -> None:
        self._stale.set()

    async def _list_when_stale(self) -> None:
        while True:
            await self._stale.wait()
            self._stale.clear()
            try:
                await self._list_bookies()
            except BaseException:
                self._stale.set()  # for the next run
                raise

    async def _list_bookies(self) -> None:
        paths = self._paths
        writable, read_only, racks = await asyncio.gather(
            self._addresses(paths.available),
            self._addresses(paths.read_only),
            self._store.get(metadata_format.RACKS_PATH),
        )
        self._bookies = Bookies(writable, read_only, self._racks(racks))

    async def _addresses(self, level: str) -> dict[BookieId, BookieAddress]:
        """The registered bookies that have an address."""
        names = await self._store.children(level)
        names = [name for name in names if name != metadata_format.READ_ONLY]
        records = await self._store.get_many([f"{level}/{name}" for name in names])
        found: dict[BookieId, BookieAddress] = {}
        for name, record in zip(names, records, strict=True):
            if record is None:
                continue
            address = metadata_format.decode_bookie(BookieId(name), record.value)
            if address is not None:
                found[BookieId(name)] = address
        return found

    def _racks(self, record: Record | None) -> dict[BookieId, str]:
        """The racks; those known before if the record cannot be decoded."""
        if record is None:
            return {}
        try:
            return dict(metadata_format.decode_racks(record.value))
        except UnreadableRecord as error:
            _log.warning("racks_unreadable", error=str(error))
            return dict(self._bookies.racks)


async def _gather(calls: Sequence[Coroutine[object, object, T]]) -> list[T]:
    return list(await asyncio.gather(*calls))


async def _ledger_errors(call: Awaitable[T]) -> T:
    """Await a call of the metadata store; its errors become `LedgerError`."""
    try:
        return await call
    except MetadataError as error:
        raise LedgerError(str(error)) from error


def _conflict(ledger_id: LedgerId) -> LedgerMetadataConflict:
    return LedgerMetadataConflict(
        f"The record of ledger {ledger_id} was made or changed by another: read it again."
    )


def _no_such_ledger(ledger_id: LedgerId) -> NoSuchLedger:
    return NoSuchLedger(f"There is no ledger {ledger_id}: it was deleted, or never made.")
