"""The cursors of one managed ledger."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from config import bounds
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.cursor_store import CursorStore
from storage.managed_ledger.records import cursor_key, cursor_name
from storage.managed_ledger.trimming import ReaderPositions
from storage.managed_ledger.types import CursorExists, CursorNotFound, ManagedLedgerFenced
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import Record

log = structlog.get_logger(__name__)
T = TypeVar("T")


class Cursors:
    """Creates, loads, deletes and closes the cursors of one managed ledger.

    `durable` has every cursor that is durably recorded, `readers` those that are not durable.
    They share one name space.
    """

    __slots__ = ("_core", "durable", "readers")

    def __init__(self, core: StreamCore) -> None:
        self._core = core
        self.durable: dict[str, Cursor] = {}
        self.readers: dict[str, Cursor] = {}

    async def load(self) -> None:
        """Open every cursor that is recorded (A3)."""
        core = self._core
        # A3: on shared stores the scan must be fresh.  Pending acknowledgements of transactions on
        # a cursor that it missed would be lost when a subscription of that name is made.
        found = await core.stores.metadata.scan(
            *children_range(core.record.key), fresh=core.stores.limits.claim_on_open
        )
        cursors: dict[str, Cursor] = {}
        for some in _slices(found):
            loaded = await asyncio.gather(
                *(self._load(cursor_name(name_of(record.key)), record) for record in some)
            )
            cursors.update((cursor.name, cursor) for cursor in loaded)
        self.durable = cursors

    async def _load(self, name: str, record: Record) -> Cursor:
        store = CursorStore(self._core, name, {})
        state = await store.load(record)
        cursor = Cursor(self._core, name, state.mark_delete, store)
        cursor.unused_since_ms = store.unused_since_ms
        cursor.restore(state)
        cursor.step_over_lost()
        if store.corrected:
            await store.write(cursor.snapshot)
        return cursor

    def step_over(self, ledger_id: int) -> None:
        """Count the lost entries of a ledger as acknowledged, where the operator goes on without.

        Else no subscription could ever finish its backlog.
        """
        missing = self._core.lost_entries(ledger_id)
        if missing:
            for cursor in (*self.durable.values(), *self.readers.values()):
                cursor.step_over(ledger_id, missing)

    async def open(
        self, name: str, start: Position, properties: Mapping[str, str], *, begins: bool = False
    ) -> Cursor:
        """The durable cursor `name`; made at `start` if it is new, else as it is.

        `begins`: a new one notes where it began; see `Cursor.began`.
        """
        core = self._core
        if name not in self.durable:
            # Under the lock no ledger is trimmed that the new cursor is to read.
            async with core.lock:
                core.require_running()
                if name not in self.durable:
                    self._require_unused(self.readers, name)
                    self.durable[name] = await self._make(name, start, properties, begins=begins)
        return self.durable[name]

    async def _make(
        self, name: str, start: Position, properties: Mapping[str, str], *, begins: bool
    ) -> Cursor:
        """Make and record a new cursor."""
        # A record that is there was left by a creation whose outcome was unknown, here or at an
        # earlier owner.
        left = await self._core.stores.metadata.get(cursor_key(self._core.name, name))
        store = CursorStore(self._core, name, properties)
        cursor = Cursor(self._core, name, self._place(start), store)
        if begins:
            cursor.began = cursor.mark_delete
        await store.create(left, cursor.snapshot)
        cursor.step_over_lost()
        return cursor

    def open_reader(self, name: str, start: Position) -> Cursor:
        """A new cursor that is not durable; its entries stay until it is deleted."""
        self._core.require_running()
        self._require_unused(self.durable, name)
        self._require_unused(self.readers, name)
        cursor = self.readers[name] = Cursor(self._core, name, self._place(start), None)
        cursor.step_over_lost()
        return cursor

    async def delete(self, name: str) -> None:
        """Remove a cursor of either kind.  Raises `CursorNotFound`."""
        if self.readers.pop(name, None) is None:
            async with self._core.lock:
                self._core.require_running()
                cursor = self.durable.get(name)
                if cursor is None:
                    raise CursorNotFound(
                        f"Managed ledger {self._core.name} has no cursor {name!r}: check the name."
                    )
                await cursor.delete()
                del self.durable[name]
        self._core.trim_soon()

    async def close(self) -> None:
        """Make every position durable; failures are logged, as a crash would lose no more."""
        for closing in _slices(list(self.durable.values())):
            await self._close_some(closing)

    async def _close_some(self, closing: Sequence[Cursor]) -> None:
        results = await asyncio.gather(
            *(cursor.close() for cursor in closing), return_exceptions=True
        )
        for cursor, error in zip(closing, results, strict=True):
            if isinstance(error, ManagedLedgerFenced):
                continue
            if isinstance(error, MagnetarError):
                name = f"{self._core.name}/{cursor.name}"
                log.warning("cursor_not_persisted", cursor=name, error=str(error))
            elif error is not None:
                raise error

    def release(self) -> None:
        """Drop the callbacks of a closed stream; see `StreamCore.release`.

        A cursor that was closed without a failure has dropped them.
        """
        for cursor in self.durable.values():
            cursor.release()

    def _place(self, start: Position) -> Position:
        """The mark-delete of a cursor that begins after `start`, EARLIEST or LATEST."""
        ledgers = self._core.ledgers
        return ledgers.before(ledgers.next(start))

    def _require_unused(self, cursors: Mapping[str, Cursor], name: str) -> None:
        if name in cursors:
            raise CursorExists(
                f"Managed ledger {self._core.name} has an open cursor {name!r}: delete it first."
            )

    def reader_positions(self) -> ReaderPositions:
        """The positions that trimming needs."""
        marks = [cursor.mark_delete for cursor in (*self.durable.values(), *self.readers.values())]
        return ReaderPositions(min(marks, default=None), bool(self.durable))

    def refresh_boundaries(self) -> None:
        """Refresh the boundary of every cursor, as ledgers ended or were dropped."""
        for cursor in (*self.durable.values(), *self.readers.values()):
            cursor.refresh_boundary()


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """CURSORS_AT_ONCE of the items at a time."""
    for start in range(0, len(items), bounds.CURSORS_AT_ONCE):
        yield items[start : start + bounds.CURSORS_AT_ONCE]
