"""Appends of one managed ledger: the hot path, rolling over, recovery after a failed write."""

import asyncio
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from config import bounds
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import InternalError, MagnetarError
from storage.callbacks import SlicedCalls, ignore
from storage.ledger.store import (
    AppendCallback,
    AppendRefused,
    DiskFull,
    LedgerAssertion,
    LedgerBusy,
    LedgerError,
    LedgerFenced,
    NoSuchLedger,
    ReadableLedger,
    WritableLedger,
    entry_too_large,
)
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.ledger_map import LedgerInfo
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    Entry,
    ManagedLedgerBusy,
    ManagedLedgerState,
    PublishCallback,
)
from storage.metadata.store import MetadataError

log = structlog.get_logger(__name__)
Listener = Callable[[], None]
_NEVER = sys.maxsize
_new_tuple: Final = tuple.__new__
"""A NamedTuple without the call of its Python constructor."""

GroupCallback = Callable[[Sequence[Position], MagnetarError | None], None]
"""Called with the positions, in one ledger, of entries that were appended one after the other and
are durable; or with none and the error, once for each entry that failed."""

EntriesCounter = Callable[[int, int, Sequence[bytes]], None]
"""Called with each group that became durable: its ledger, its first entry id, its entries."""


def one_by_one(done: PublishCallback) -> GroupCallback:
    """`done` for an entry that was appended alone."""

    def completed(positions: Sequence[Position], error: MagnetarError | None) -> None:
        done(positions[0] if positions else None, error)

    return completed


class LedgerWriter:
    """Appends entries, rolls over to new ledgers, and recovers from failed writes.

    A ledger is made when an entry needs one, so idle streams have no open ledger
    (docs/decisions/ledgers-on-demand.md).  Entries that come while it is made are held back in
    order, up to a bound.

    Entry ids in the current ledger: `_confirmed` <= `_durable` (durable, not yet confirmed) <=
    `_returned` (the store called back) < `_next_id`.  `_inflight` has the entries above
    `_confirmed`.
    """

    __slots__ = (
        "_attempts",
        "_completed",
        "_confirmed",
        "_core",
        "_counted",
        "_current",
        "_done",
        "_durable",
        "_failure",
        "_full_at",
        "_full_bytes",
        "_held_back",
        "_inflight",
        "_last_error",
        "_ledger_id",
        "_limits",
        "_listener_calls",
        "_listener_keys",
        "_listeners",
        "_loop",
        "_next_id",
        "_opened_at",
        "_prepared",
        "_prepared_ms",
        "_quiet",
        "_refusal",
        "_returned",
        "_roll_wanted",
        "_rolled",
        "_rolling",
        "_size_bytes",
        "_stopped",
        "_sweep_due",
        "_timer",
        "_unsettled",
        "_writable",
    )

    def __init__(
        self, core: StreamCore, rolled: Callable[[], None], counted: EntriesCounter
    ) -> None:
        self._core = core
        self._counted = counted
        self._loop = core.loop
        self._limits = core.stores.limits
        self._rolled = rolled
        self._refusal: MagnetarError | None = None
        self._listeners: dict[int, Listener] = {}
        self._listener_keys = itertools.count()
        self._listener_calls = SlicedCalls[int, Listener](operator.call)
        self._held_back: deque[tuple[bytes, GroupCallback]] = deque()
        self._completed: deque[tuple[GroupCallback, Sequence[Position], MagnetarError | None]] = (
            deque()
        )
        # Made once, not for each append.
        self._done: AppendCallback = self._on_done
        self._rolling: asyncio.Task[None] | None = None
        self._roll_wanted = False
        self._attempts = 0
        self._prepared: WritableLedger | None = None
        self._prepared_ms = 0
        self._quiet: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sweep_due = False
        self._stopped = False
        self._last_error: MagnetarError | None = None
        self._begin(None)
        core.on_stop(self._stop)

    def _begin(self, ledger: WritableLedger | None) -> None:
        """Make this the current ledger, and reset what is counted in it."""
        self._current = ledger
        self._writable: WritableLedger | None = None
        self._ledger_id = -1 if ledger is None else int(ledger.ledger_id)
        self._inflight: deque[tuple[bytes, GroupCallback]] = deque()
        self._next_id = 0
        self._confirmed = self._durable = self._returned = -1
        self._size_bytes = 0
        self._full_at = self._limits.ledger_max_entries - 1
        self._full_bytes = self._limits.ledger_max_size_bytes
        self._failure: MagnetarError | None = None
        self._unsettled = False
        self._opened_at = self._loop.time()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if ledger is not None:
            self._timer = self._loop.call_later(
                self._limits.ledger_max_age_ms / 1000, self._age_due
            )

    @property
    def pending_entries(self) -> int:
        """Number of entries that were taken and are not decided yet."""
        return len(self._inflight) + len(self._held_back)

    @property
    def ledger_age_s(self) -> float | None:
        """How long ago the current ledger was made; None without one."""
        return None if self._current is None else self._loop.time() - self._opened_at

    # The hot path

    def append(self, data: bytes, done: PublishCallback) -> None:
        """Store one entry; `done` follows on the loop, in order.  Raises when it is not taken."""
        self.append_all((data,), one_by_one(done))

    def append_all(self, entries: Sequence[bytes], done: GroupCallback) -> int:
        """Store entries; returns how many were taken.  Raises when the first is not taken."""
        ledger = self._writable
        if ledger is None:
            self._hold_back(entries[0], done)
            return 1
        enqueue, confirm = self._inflight.append, self._done
        taken = 0
        for data in entries:
            enqueue((data, done))
            taken += 1
            try:
                entry_id = ledger.append(data, confirm)
            except AppendRefused:
                # The store refused this entry only: the ledger takes others as before.
                self._inflight.pop()
                taken -= 1
                if taken:
                    break
                raise
            except LedgerError as error:
                self._fail(error)
                break
            if entry_id != self._next_id:
                self._core.fence(self._wrong_id(entry_id))
                break
            self._next_id = entry_id + 1
            self._size_bytes += len(data)
            if entry_id >= self._full_at or self._size_bytes >= self._full_bytes:
                self._full()
                if self._writable is None:
                    break
        return taken

    def _on_done(self, entry_id: int, error: LedgerError | None) -> None:
        self._returned = entry_id
        if error is not None:
            self._fail(error)
        elif self._failure is None:
            self._durable = entry_id
            # One sweep confirms all entries of this loop turn: no task or timer for each entry.
            if not self._sweep_due:
                self._sweep_due = True
                self._loop.call_soon(self._sweep)
        if self._quiet is not None and entry_id == self._next_id - 1:
            self._quiet.set_result(None)
            self._quiet = None

    def _sweep(self) -> None:
        """Confirm the entries that became durable, as one group.

        The order is: positions, cache, publish callbacks in order, then each listener once.
        """
        self._sweep_due = False
        # A FENCED stream confirms nothing: the new owner's recovery decides about its entries.
        if self._durable == self._confirmed or self._core.state is ManagedLedgerState.FENCED:
            return
        ledger_id, take, completed = self._ledger_id, self._inflight.popleft, self._completed
        entries: list[Entry] = []
        stored: list[bytes] = []
        size_bytes = 0
        group: GroupCallback | None = None
        positions: list[Position] = []
        first = self._confirmed + 1
        for entry_id in range(first, self._durable + 1):
            data, done = take()
            position = _new_tuple(Position, (ledger_id, entry_id))
            entries.append(_new_tuple(Entry, (position, data)))
            stored.append(data)
            size_bytes += len(data)
            if done is not group:
                group, positions = done, []
                completed.append((done, positions, None))
            positions.append(position)
        self._confirmed = self._durable
        core = self._core
        core.ledgers.grow(len(entries), size_bytes)
        core.last_confirmed = entries[-1].position
        core.stores.cache.add(ledger_id, entries, size_bytes)
        self._counted(ledger_id, first, stored)
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Run publish callbacks, then listeners; one that raises does not keep the rest."""
        completed, whole = self._completed, False
        try:
            while completed:
                done, positions, error = completed.popleft()
                done(positions, error)
            whole = True
        finally:
            if not whole:
                self._loop.call_soon(self._run_callbacks)
        self._listener_calls.call_all(self._listeners)

    def on_append(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` once for each completed group; returns a function that removes it."""
        key = next(self._listener_keys)
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)
            self._listener_calls.discard(key)

        return remove

    # Refusing, holding back, failing

    def _hold_back(self, data: bytes, done: GroupCallback) -> None:
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        if self._core.state not in (ManagedLedgerState.OPEN, ManagedLedgerState.ROLLING):
            raise self._core.stopped_error()
        largest = self._core.stores.ledgers.max_entry_bytes
        if len(data) > largest:
            raise entry_too_large(len(data), largest)
        if len(self._held_back) >= self._limits.roll_over_buffer_entries:
            raise ManagedLedgerBusy(
                f"Managed ledger {self._core.name} opens its next ledger, and "
                f"{len(self._held_back)} appends wait for it: send again after a pause."
            )
        self._held_back.append((data, done))
        self._start_roll()

    def refuse(self, error: MagnetarError) -> None:
        """Make `append` raise `error` from now on; entries taken before are finished."""
        self._refusal = error
        self._writable = None

    def _fail(self, error: LedgerError) -> None:
        """Stop writing to the current ledger; recovery decides about the entries in flight."""
        if self._failure is None:
            self._failure = error
        self._writable = None
        if isinstance(error, LedgerFenced):
            self._core.fence(error)
            return
        self._roll_wanted = True
        self._start_roll()

    def _stop(self, error: MagnetarError) -> None:
        """Fail all entries that are not confirmed: the stream is FENCED."""
        self._stopped = True
        self._writable = None
        if self._timer is not None:
            self._timer.cancel()
        self._fail_entries(self._inflight, error)
        self._fail_entries(self._held_back, error)
        self._run_callbacks()

    def _fail_entries(
        self, queue: deque[tuple[bytes, GroupCallback]], error: MagnetarError
    ) -> None:
        self._completed.extend((done, (), error) for _, done in queue)
        queue.clear()

    def _wrong_id(self, entry_id: int) -> LedgerAssertion:
        return LedgerAssertion(
            f"Ledger {self._ledger_id} gave entry id {entry_id} where {self._next_id} was due: "
            "report this as a defect."
        )

    # Rolling over

    def _full(self) -> None:
        """Roll over a full ledger, now or as soon as it has its least age."""
        age_ms = (self._loop.time() - self._opened_at) * 1000
        wait_ms = self._limits.ledger_min_age_ms - age_ms
        if wait_ms <= 0:
            self._age_due()
            return
        self._full_at = self._full_bytes = _NEVER
        max_wait_ms = max(self._limits.ledger_max_age_ms - age_ms, 0)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(min(wait_ms, max_wait_ms) / 1000, self._age_due)

    def _age_due(self) -> None:
        self._writable = None
        self._roll_wanted = True
        self._start_roll()

    async def end_ledger(self) -> None:
        """End the ledger that is written to, as if it were full; the next entry opens another.

        Entries taken before are decided first.  A failure is logged: the ledger goes on then.
        """
        if self._current is not None:
            self._age_due()
        if self._rolling is not None:
            await asyncio.wait({self._rolling})

    def _start_roll(self) -> None:
        if self._rolling is not None or self._stopped:
            return
        if self._core.state is ManagedLedgerState.OPEN:
            self._core.move(ManagedLedgerState.ROLLING)
        self._rolling = self._loop.create_task(self._roll_over())

    async def _roll_over(self) -> None:
        """End the current ledger; open the next one if entries are held back for it."""
        failure: MagnetarError | None = LedgerAssertion(
            f"Rolling over managed ledger {self._core.name} broke off: report this as a defect."
        )
        try:
            self._roll_wanted = True
            while self._roll_wanted:
                self._roll_wanted = False
                await self._end_current()
                if self._held_back:
                    await self._open_next()
            failure = None
        except MagnetarError as error:
            failure = error
        finally:
            self._rolling = None
            self._rolled_over(failure)

    def _rolled_over(self, failure: MagnetarError | None) -> None:
        self._last_error = failure
        if isinstance(failure, InternalError):
            self._core.fence(failure)
            return
        if self._core.state is ManagedLedgerState.ROLLING:
            self._core.move(ManagedLedgerState.OPEN)
        if failure is not None:
            log.warning("managed_ledger_write_failed", name=self._core.name, error=str(failure))
            self._fail_entries(self._held_back, failure)
            self._run_callbacks()
        self._rolled()

    async def _end_current(self) -> None:
        """Close the current ledger, or recover it when a write has failed.

        Raises the failure if the entries that recovery did not find are not to be written again.
        """
        current = self._current
        if current is None:
            return
        if self._failure is None:
            try:
                await current.close()
            except LedgerFenced as error:
                self._core.fence(error)
            except (LedgerError, MetadataError) as error:
                self._failure = self._failure or error
        await self._all_returned()
        self._core.require_running()
        self._sweep()
        failure = self._failure
        if failure is not None:
            await self._recover(current, failure)
        self._attempts = 0 if failure is None else 1 if self._confirmed >= 0 else self._attempts + 1
        self._list_end()
        self._begin(None)
        # The next ledger would fail on a full disk too: callers get the error, and the next append
        # starts anew.
        if failure is not None and (
            isinstance(failure, DiskFull) or self._attempts >= bounds.ROLL_OVER_ATTEMPTS
        ):
            self._attempts = 0
            raise failure

    async def _all_returned(self) -> None:
        """Wait until the store called back for every append to the current ledger."""
        while self._returned < self._next_id - 1:
            self._quiet = self._loop.create_future()
            await self._quiet

    def _list_end(self) -> None:
        """Note the end of the current ledger in the list; an empty ledger is dropped from it."""
        info = self._core.ledgers.last
        if info is None or info.ledger_id != self._ledger_id:
            raise LedgerAssertion(
                f"Ledger {self._ledger_id} is not the newest of {self._core.name}: report this "
                "as a defect."
            )
        info.closed_ms = self._core.stores.clock.now_ms()
        if info.entries == 0:
            self._core.drop(info.ledger_id)

    async def _recover(self, current: WritableLedger, failure: MagnetarError) -> None:
        """Recover the ledger: entries that are found are confirmed, the rest is held back again.

        If that is not possible now, callers get `AppendOutcomeUnknown`, and nothing is appended
        until it was possible.
        """
        try:
            ledger = await self._core.stores.ledgers.open(current.ledger_id)
        except (LedgerFenced, NoSuchLedger) as error:
            self._core.fence(error)
            raise self._core.stopped_error() from error
        except (LedgerError, MetadataError) as error:
            self._unsettled = True
            unknown = AppendOutcomeUnknown(
                f"A write to ledger {self._ledger_id} failed ({failure}) and it cannot be "
                f"recovered now ({error}): mend the storage; the entry may or may not be stored."
            )
            unknown.__cause__ = failure
            self._fail_entries(self._inflight, unknown)
            raise
        end = ledger.last_add_confirmed
        if not self._confirmed <= end < self._next_id:
            raise LedgerAssertion(
                f"Recovery of ledger {self._ledger_id} ended at entry {end}, but "
                f"{self._confirmed} was confirmed and {self._next_id - 1} was the last one "
                "written: the disk lost data; restore it from a backup."
            )
        if self._unsettled:
            self._adopt(ledger)
        else:
            self._durable = end
            self._sweep()
        self._held_back.extendleft(reversed(self._inflight))
        self._inflight.clear()

    def _adopt(self, ledger: ReadableLedger) -> None:
        """Confirm entries whose callers got `AppendOutcomeUnknown`."""
        info = self._core.ledgers.last
        added = ledger.last_add_confirmed - self._confirmed
        if info is None or added == 0:
            return
        self._core.stores.cache.drop(self._ledger_id)
        self._core.ledgers.grow(added, ledger.length - info.size_bytes)
        self._confirmed = self._durable = ledger.last_add_confirmed
        self._core.last_confirmed = info.last
        self._run_callbacks()

    async def _open_next(self) -> None:
        """Make a ledger, list it, and append the entries that were held back."""
        ledger = await self._list_next()
        self._prepared = None
        self._begin(ledger)
        self._roll_wanted = False
        self._writable = ledger
        while self._held_back and self._writable is not None:
            data, done = self._held_back.popleft()
            try:
                self.append_all((data,), done)
            except LedgerBusy:
                self._held_back.appendleft((data, done))
                await self._wait_for_room(ledger)
        if self._refusal is not None:
            self._writable = None

    async def _list_next(self) -> WritableLedger:
        """Name the next ledger in the record, and return it.

        It is a new one, or one made before that could not be listed then.
        """
        core = self._core
        while True:
            if self._prepared is None:
                self._prepared_ms = core.stores.clock.now_ms()
                self._prepared = await core.stores.create_ledger(core.name)
            ledger = self._prepared
            try:
                async with core.lock:
                    if core.stores.may_name(self._prepared_ms):
                        await core.save(adding=LedgerInfo(int(ledger.ledger_id)))
                        return ledger
                    # A write of unknown outcome may have named it: it goes after the next save.
                    core.drop(int(ledger.ledger_id))
                    self._prepared = None
            except InternalError:
                self._prepared = None
                await core.stores.delete_ledger(ledger.ledger_id)
                raise

    async def _wait_for_room(self, ledger: WritableLedger) -> None:
        """Hold all entries back until the busy ledger has decided about all that it took."""
        self._writable = None
        if self._returned == self._next_id - 1:
            # Others keep the store busy: no callback of ours will come when that is over.
            await asyncio.sleep(bounds.LEDGER_BUSY_PAUSE_S)
        await self._all_returned()
        self._core.require_running()
        if not self._roll_wanted:
            self._writable = ledger

    # Ending

    async def finish(self) -> None:
        """After `refuse`: wait until all entries are decided, and end the current ledger.

        Raises the error of a recovery that failed; the stream's end is not known then.
        """
        tried = False
        while True:
            while self._rolling is not None:
                await asyncio.wait({self._rolling})
            self._core.require_running()
            if self._current is None:
                return
            if tried and self._last_error is not None:
                raise self._last_error
            tried = True
            self._start_roll()

    async def discard_prepared(self) -> None:
        """Delete a ledger that was made and never listed.  Call it after the last `save`."""
        if self._prepared is not None:
            ledger_id = int(self._prepared.ledger_id)
            if self._core.ledgers.get(ledger_id) is None:
                await self._core.stores.delete_ledger(ledger_id)
            self._prepared = None

    def release(self) -> None:
        """Drop the callbacks of a closed stream; see `StreamCore.release`."""
        self._rolled = self._done = ignore

    def reader(self, ledger_id: int) -> ReadableLedger | None:
        """The handle of that ledger if it is the current one, else None."""
        return self._current if ledger_id == self._ledger_id else None
