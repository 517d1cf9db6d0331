"""The handle that writes a ledger: `adds` and `ensemble_change` with bookies and the record."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from config import bounds
from storage.ledger.bookkeeper.adds import Adds, PendingAdd, Slot, Todo, WriterState
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.ensemble_change import (
    ChangeEffect,
    ChangeFailed,
    EnsembleChange,
    EnsembleChanged,
    WriteRecord,
    taken_over,
)
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata, LedgerState
from storage.ledger.bookkeeper.ledger_services import LedgerCell, LedgerServices
from storage.ledger.bookkeeper.metadata_store import LedgerMetadataConflict, VersionedMetadata
from storage.ledger.bookkeeper.readable_ledger import BookKeeperLedger
from storage.ledger.store import (
    AppendCallback,
    LedgerBusy,
    LedgerClosed,
    LedgerError,
    LedgerFenced,
    NoSuchLedger,
    WritableLedger,
    entry_too_large,
)

_log = structlog.get_logger(__name__)

_NOTHING: Final = Todo.NOTHING
_CONFIRM: Final = Todo.CONFIRM


class BookKeeperWritableLedger(BookKeeperLedger, WritableLedger):
    """A ledger that this process made and may append to.

    Entries are taken and sent during an ensemble change too.  After the first failure no entry is
    confirmed any more, and the record stays as it is: the next `open` of the ledger recovers the
    entries in flight.
    """

    def __init__(
        self,
        services: LedgerServices,
        cell: LedgerCell,
        record: VersionedMetadata,
        max_entry_bytes: int,
        ended: Callable[["BookKeeperWritableLedger"], None],
    ) -> None:
        """`ended` is called when the ledger was closed through this handle."""
        super().__init__(services, cell, record.metadata)
        self._loop = asyncio.get_running_loop()
        self._ledger_id = cell.ledger_id
        self._send_add = services.bookies.add
        self._record = record
        self._ended = ended
        self._max_entry_bytes = max_entry_bytes
        self._adds = Adds(record.metadata)
        self._pending = services.pending
        self._change: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._dead: LedgerError | None = None
        self._failure: LedgerError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def metadata(self) -> LedgerMetadata:
        """The record as this handle wrote it last."""
        return self._record.metadata

    @property
    def last_add_confirmed(self) -> int:
        """The last durable entry."""
        return self._adds.last_confirmed

    @property
    def length(self) -> int:
        """Bytes of the durable entries."""
        return self._adds.confirmed_length

    @property
    def state(self) -> WriterState:
        """State of the writer."""
        return self._adds.state

    def _adopt(self, metadata: LedgerMetadata) -> None:
        """Do nothing: this handle reads up to the entry that it confirmed."""

    # Adding

    def append(self, entry: bytes, done: AppendCallback) -> int:
        """See `WritableLedger`."""
        if self._dead is not None:
            raise type(self._dead)(*self._dead.args)
        adds = self._adds
        size = len(entry)
        if size > self._max_entry_bytes:
            raise entry_too_large(size, self._max_entry_bytes)
        if self._failure is not None:
            self._services.counters.failed_adds += 1
            entry_id = adds.skip()
            self._loop.call_soon(done, entry_id, self._failure)
            return entry_id
        pending = self._pending
        # All writers of the store share this bound, which is below that of connections.  So an
        # entry with an id never meets the bound of a connection.
        if (
            pending.entries >= bounds.LEDGER_PENDING_ADDS
            or pending.size_bytes >= bounds.LEDGER_PENDING_BYTES
        ):
            raise LedgerBusy(
                f"{pending.entries} entries of {pending.size_bytes} bytes wait for bookies: send "
                "again after a pause."
            )
        if adds.change_due:
            self._begin_change()
            if self._failure is not None:
                return self.append(entry, done)
        pending.entries += 1
        pending.size_bytes += size
        add = adds.add(size, done)
        entry_id = add.entry_id
        ledger_id, seal = self._ledger_id, self._seal
        # No task, future or timer for an entry: it is sent here, and `_replied` counts answers.
        try:
            # Q5: the last add confirmed is that of now.
            body = add.body = seal.digest.seal(
                ledger_id, entry_id, adds.last_confirmed, adds.length, entry
            )
            send, key, replied = self._send_add, seal.master_key, self._replied
            for slot in adds.slots_of(entry_id):
                send(slot.bookie, ledger_id, entry_id, key, body, partial(replied, add, slot))
        except Exception as error:  # noqa: BLE001 - reported to the loop
            # The entry has an id, so its callback must run: the writer fails.
            self._fail_after_defect(error)
        return entry_id

    def _send(self, add: PendingAdd, slot: Slot) -> None:
        """Send an entry again, to another bookie."""
        self._send_add(
            slot.bookie,
            self._ledger_id,
            add.entry_id,
            self._seal.master_key,
            add.body,
            partial(self._replied, add, slot),
        )

    def _replied(self, add: PendingAdd, slot: Slot, code: ReplyCode) -> None:
        try:
            todo = self._adds.replied(add, slot, code)
            if todo is _NOTHING:
                return
            if todo is _CONFIRM:
                self._confirm()
            elif todo is Todo.CHANGE:
                self._begin_change()
            else:
                self._fail(self._refused(slot.bookie, code))
        except Exception as error:  # noqa: BLE001 - reported to the loop
            self._fail_after_defect(error)

    def _confirm(self) -> None:
        """Confirm complete entries in order."""
        try:
            self._call_back()
        except Exception as error:  # noqa: BLE001 - reported to the loop
            self._fail_after_defect(error)
        if self._waiters:
            self._wake()

    def _call_back(self) -> None:
        """Run the callbacks of confirmed entries; one that raises does not keep the others."""
        adds, counters, pending = self._adds, self._services.counters, self._pending
        while (add := adds.next_confirmed()) is not None:
            pending.entries -= 1
            pending.size_bytes -= add.size
            counters.adds += 1
            counters.add_bytes += add.size
            try:
                add.done(add.entry_id, None)
            except Exception as failure:  # noqa: BLE001 - reported to the loop
                self._loop.call_exception_handler(
                    {"message": "append callback failed", "exception": failure}
                )

    def _refused(self, bookie: BookieId, code: ReplyCode) -> LedgerError:
        if code is ReplyCode.FENCED:
            return taken_over(self.ledger_id)
        return LedgerError(
            f"Bookie {bookie} refused an entry of ledger {self.ledger_id} ({code.name}): check "
            "the password, the frame size and the versions of bookies."
        )

    # Failing

    def _fail(self, error: LedgerError) -> None:
        """Fail the writer: the outcome of pending entries is unknown."""
        if self._adds.state in (WriterState.FAILED, WriterState.CLOSED):
            return
        self._failure = error
        if isinstance(error, LedgerFenced):
            self._services.counters.fenced += 1
            self._dead = error
        self._pending.size_bytes -= self._adds.pending_bytes
        lost = self._adds.fail()
        self._pending.entries -= len(lost)
        self._services.counters.failed_adds += len(lost)
        for add in lost:
            self._loop.call_soon(add.done, add.entry_id, error)
        self._wake()

    def _fail_after_defect(self, error: Exception) -> None:
        """Report a defect to the loop, and fail the writer."""
        what = f"writing ledger {self.ledger_id} broke off"
        self._loop.call_exception_handler({"message": what, "exception": error})
        self._fail(
            LedgerError(
                f"Writing ledger {self.ledger_id} broke off after an error in this process "
                f"({type(error).__name__}): report it with the log as a defect."
            )
        )

    # Ensemble change

    def _begin_change(self) -> None:
        try:
            failed = self._adds.begin_change()
        except LedgerError as error:
            self._fail(error)
            return
        except Exception as error:  # noqa: BLE001 - reported to the loop
            self._fail_after_defect(error)
            return
        self._change = self._loop.create_task(self._change_ensemble(failed))

    async def _change_ensemble(self, failed: Mapping[int, BookieId]) -> None:
        """Replace failed bookies, until no further one failed meanwhile."""
        adds = self._adds
        failure = LedgerError(
            f"Replacing bookies of ledger {self.ledger_id} was broken off: reload the topic."
        )
        try:
            while True:
                changed = await self._change_record(failed)
                if adds.state is not WriterState.CHANGING_ENSEMBLE:
                    return
                self._record = changed.record
                for add, slot in adds.replace(changed.replacements):
                    self._send(add, slot)
                if adds.end_change() is Todo.CONFIRM:
                    break
                failed = adds.begin_change()
            self._services.counters.ensemble_changes += 1
        except LedgerError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - reported to the loop
            self._fail_after_defect(error)
        finally:
            self._change = None
            if adds.state is WriterState.CHANGING_ENSEMBLE:
                self._fail(failure)
        self._confirm()

    async def _change_record(self, failed: Mapping[int, BookieId]) -> EnsembleChanged:
        """Write the new ensemble into the record.  Raises `LedgerError`."""
        services = self._services
        services.note_failures(list(failed.values()))
        _log.info("ledger_bookies_failed", ledger=self.ledger_id, bookies=sorted(failed.values()))
        quorum, tried = self._record.metadata.write_quorum, self._adds.tried
        change = EnsembleChange(
            self.ledger_id,
            self._record,
            self._adds.last_confirmed,
            failed,
            lambda bookies, places: services.choose_replacements(quorum, bookies, places, tried),
        )
        effect = change.start()
        while not isinstance(effect, EnsembleChanged):
            if isinstance(effect, ChangeFailed):
                raise effect.error
            effect = await self._ask_record(change, effect)
        return effect

    async def _ask_record(self, change: EnsembleChange, effect: ChangeEffect) -> ChangeEffect:
        metadata = self._services.metadata
        try:
            if isinstance(effect, WriteRecord):
                return change.written(
                    await metadata.write(self.ledger_id, effect.metadata, expect=effect.expect)
                )
            return change.read(await metadata.read(self.ledger_id))
        except LedgerMetadataConflict:
            return change.conflict()
        except NoSuchLedger as error:
            raise taken_over(self.ledger_id) from error

    # Ending

    async def settle(self) -> None:
        """Return when every append has its outcome.  Call it after appends were stopped."""
        while not self._is_quiet():
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _is_quiet(self) -> bool:
        state = self._adds.state
        if state is WriterState.OPEN:
            return not self._adds.pending
        return state is not WriterState.CHANGING_ENSEMBLE

    def _wake(self) -> None:
        if self._waiters and self._is_quiet():
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def stop(self, why: LedgerError) -> None:
        """Refuse further appends; those in flight get `WRITER_DRAIN_S`, then they fail."""
        if self._dead is None or isinstance(why, LedgerFenced):
            self._dead = why
        await self.drain()
        if not self._is_quiet():
            self._fail(why)

    async def drain(self) -> None:
        """Wait until no append is in flight, but no longer than `WRITER_DRAIN_S`."""
        try:
            async with asyncio.timeout(bounds.WRITER_DRAIN_S):
                await self.settle()
        except TimeoutError:
            return

    def abandon(self, why: LedgerError) -> None:
        """Refuse further appends, and fail those in flight."""
        self._dead = why
        self._fail(why)

    async def close(self) -> None:
        """See `WritableLedger`.  Raises `LedgerFenced` if another owner ended it elsewhere."""
        if self._adds.state is WriterState.CLOSED:
            return
        if self._dead is None:
            self._dead = LedgerClosed(
                f"Ledger {self.ledger_id} is closed: append to the current one."
            )
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
            self._closing.add_done_callback(self._close_done)
        await asyncio.shield(self._closing)

    def _close_done(self, task: asyncio.Task[None]) -> None:
        """Forget the task: a close that failed may be tried again."""
        self._closing = None
        if not task.cancelled():
            task.exception()

    async def _close(self) -> None:
        await self.settle()
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        if self._adds.state is WriterState.OPEN:
            self._adds.begin_close()
        try:
            self._record = await self._write_end()
        except (LedgerFenced, NoSuchLedger) as error:
            fenced = taken_over(self.ledger_id)
            self._fail(fenced)
            raise fenced from error
        self._adds.closed()
        self._ended(self)

    async def _write_end(self) -> VersionedMetadata:
        """Move the record to CLOSED, unless it is CLOSED already with the same end."""
        # Q16: every write names the version that was read.
        metadata, record = self._services.metadata, self._record
        last, length = self.last_add_confirmed, self.length
        for _ in range(bounds.RECORD_CHANGE_TRIES):
            closed = replace(
                record.metadata, state=LedgerState.CLOSED, last_entry_id=last, length=length
            )
            try:
                return await metadata.write(self.ledger_id, closed, expect=record.version)
            except LedgerMetadataConflict:
                record = await metadata.read(self.ledger_id)
            found = record.metadata
            if found.state is LedgerState.CLOSED:
                if (found.last_entry_id, found.length) == (last, length):
                    return record
                raise taken_over(self.ledger_id)
            if found.state is not LedgerState.OPEN:
                raise taken_over(self.ledger_id)
            if found.last_ensemble != self.metadata.last_ensemble:
                raise taken_over(self.ledger_id)
        raise LedgerError(
            f"The record of ledger {self.ledger_id} kept changing while it was being closed: look "
            "at what else writes to it, then close it again."
        )
