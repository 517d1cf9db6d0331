"""A cursor: what one subscription or reader has acknowledged, and what it reads next."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial

import structlog

from config import bounds
from magnetar.protocol import ack_set as batch_bits
from magnetar.protocol.backoff import Backoff
from magnetar.protocol.ids import LATEST, Position
from magnetar.protocol.server_error import InternalError, MagnetarError
from storage.damage import EntryRange
from storage.managed_ledger.ack_ranges import AckRanges, BatchBits
from storage.managed_ledger.core import StreamCore
from storage.managed_ledger.cursor_store import CursorStore
from storage.managed_ledger.records import REPLICATED, CursorSnapshot, CursorState

log = structlog.get_logger(__name__)


class Cursor:
    """The acknowledgements of one subscription or reader; `Cursors.open` and `open_reader` make it.

    All entries up to `mark_delete` are acknowledged; after it single entries and parts of batches
    may be.  `mark_delete` moves over acknowledged entries that follow it.  Acknowledging an entry
    again, or one that does not exist (never written, trimmed), changes nothing.

    An acknowledgement counts at once.  It is durable within `cursor_flush_ms` (later if the policy
    of the stream allows fewer writes) or at `persist`; a crash redelivers the rest.  `backlog`, and
    acknowledging the next entry, cost O(1).
    """

    __slots__ = ("_acked", "_batches", "_boundary", "_core", "_flusher", "_mark_rank", "_store",
                 "began", "mark_delete", "name", "notes", "numbers", "resets", "sent_as", "sent_to",
                 "unused_since_ms")  # fmt: skip

    def __init__(
        self, core: StreamCore, name: str, mark_delete: Position, store: CursorStore | None
    ) -> None:
        self.name = name
        self._core = core
        self._store = store
        self._acked = AckRanges()
        self._batches = BatchBits()
        self._flusher: CursorFlusher | None = None
        if store is not None:
            self._flusher = CursorFlusher(
                f"{core.name}/{name}",
                core.loop,
                core.cursor_pause_s,
                lambda: store.write(self.snapshot),
            )
        self.numbers: Mapping[str, int] = {}
        """Properties that Apache Pulsar stored with the position that was loaded."""
        self.notes: tuple[int, ...] = ()
        """Numbers that its user stored with the position."""
        self.unused_since_ms: int | None = None
        """When its last user left, in ms since 1970; None: in use, or not known."""
        self.began: Position | None = None
        """Of a replicator: the other cluster may lack what is up to here; None: not noted.

        It begins here, or was moved up to here over entries that were not sent.  It is durable with
        the mark-delete position.
        """
        self.sent_as: int | None = None
        """Of a replicator: the incarnation of the topic as which it sends what is behind `began`.

        It is durable with the mark-delete position; None: nothing was sent, or it is not noted.
        """
        self.sent_to: int | None = None
        """Of a replicator: the incarnation of the other cluster's topic that has what is sent.

        It is durable with the mark-delete position; None: it is not known.
        """
        self.resets = 0
        """How often it was moved by `reset`."""
        self.mark_delete = mark_delete
        self._mark_rank = core.ledgers.rank(mark_delete)
        self._boundary = core.ledgers.end_after(mark_delete)

    # State

    @property
    def durable(self) -> bool:
        """False for cursors of readers."""
        return self._store is not None

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties that users attached to it."""
        stored = {} if self._store is None else self._store.properties
        if REPLICATED not in stored:
            return stored
        return {name: value for name, value in stored.items() if name != REPLICATED}

    @property
    def replicated(self) -> bool:
        """Whether users asked for its replication to other clusters."""
        return self._store is not None and REPLICATED in self._store.properties

    @property
    def replication_note(self) -> str:
        """What its user has noted with that."""
        return "" if self._store is None else self._store.properties.get(REPLICATED, "")

    @property
    def backlog(self) -> int:
        """Number of entries that are not, or not wholly, acknowledged."""
        return self._core.ledgers.total - self._mark_rank - self._acked.count

    @property
    def ledger(self) -> tuple[int, int]:
        """The cursor ledger and its last entry; -1 both while the position is in the record."""
        return (-1, -1) if self._store is None else self._store.ledger

    @property
    def acked_run_count(self) -> int:
        """Number of runs of acknowledged entries after `mark_delete`."""
        return self._acked.run_count()

    @property
    def progress(self) -> tuple[Position, int]:
        """A value that each entry that is acknowledged changes, until the next `reset`."""
        return self.mark_delete, self._acked.count

    def acked_runs(self) -> Iterator[tuple[int, int, int]]:
        """Runs of acknowledged entries after `mark_delete`: ledger, first and last entry."""
        return self._acked.ranges()

    def entries_up_to(self, position: Position) -> int:
        """Number of entries after `mark_delete` up to `position`."""
        return max(0, self._core.ledgers.rank(position) - self._mark_rank)

    @property
    def dirty(self) -> bool:
        """True while an acknowledgement is not known to be durable."""
        return self._flusher is not None and self._flusher.dirty

    def is_acknowledged(self, position: Position) -> bool:
        """True if all of the entry is acknowledged."""
        return position <= self.mark_delete or position in self._acked

    def ack_set(self, position: Position) -> list[int] | None:
        """`BitSet` words of the messages left of a partly acknowledged batch; else None."""
        remaining = self._batches.get(position)
        return None if remaining is None else batch_bits.to_words(remaining)

    def first_unacknowledged(self, at_or_after: Position) -> Position:
        """The first entry at or after that position that is not acknowledged: read there next.

        At the end of the stream it is a position that has no entry yet.
        """
        ledgers = self._core.ledgers
        if at_or_after <= self.mark_delete:
            position = ledgers.next(self.mark_delete)
        else:
            position = ledgers.at_or_after(at_or_after)
        while self._acked.count:
            end = self._acked.run_end(position)
            if end is None:
                break
            position = ledgers.next(Position(position.ledger_id, end))
        return position

    def nth_unacknowledged(self, count: int) -> Position:
        """The entry with that number among those that are not acknowledged, the first being 1.

        Behind the last one it is the position after the end of the stream.  Costs by the runs of
        acknowledged entries before it, whatever their length.
        """
        ledgers, rank = self._core.ledgers, self._mark_rank + count - 1
        for ledger_id, first, last in self._acked.ranges():
            before = ledgers.rank(Position(ledger_id, first - 1))
            if before > rank:
                break
            rank += last - first + 1
        return ledgers.at(rank)

    def snapshot(self) -> CursorSnapshot:
        """The present state, to be encoded before anything changes."""
        return CursorSnapshot(
            self.mark_delete,
            self._acked,
            self._batches,
            self.unused_since_ms,
            self.began,
            self.notes,
            self.sent_as,
            self.sent_to,
        )

    def set_unused_since(self, ms: int | None) -> None:
        """Note when its last user left; None: it is in use.  Durable as an acknowledgement is.

        Each change costs one write of the cursor's record.
        """
        if self._store is not None and ms != self.unused_since_ms:
            self.unused_since_ms = ms
            self._touch()

    def begin_here(self) -> None:
        """Note that it begins at its mark-delete position, unless that is noted already."""
        if self.began is None:
            self.began = self.mark_delete
            self._touch()

    def pass_over(self, position: Position) -> None:
        """Note, if it notes where it began, that what it acknowledges up to here was not sent.

        It is durable with these acknowledgements, which follow at once.
        """
        if self.began is not None:
            self.began = max(self.began, position)

    def set_notes(self, notes: tuple[int, ...]) -> None:
        """Store these numbers with the position.  Durable as an acknowledgement is."""
        if notes != self.notes:
            self.notes = notes
            self._touch()

    def send_as(self, incarnation: int) -> None:
        """Note the incarnation of the topic as which entries are sent from now on.

        What was sent as another one is not there as this one.
        """
        if self.sent_as != incarnation:
            if self.sent_as is not None:
                self._pass_over_sent()
            self.sent_as = incarnation
            self._touch()

    def send_to(self, incarnation: int) -> None:
        """Note the incarnation of the topic to which entries are sent from now on.

        What was sent to another one is not there any more.
        """
        if self.sent_to != incarnation:
            if self.sent_to is not None:
                self._pass_over_sent()
            self.sent_to = incarnation
            self._touch()

    def _pass_over_sent(self) -> None:
        for ledger_id, _, last in self.acked_runs():
            self.pass_over(Position(ledger_id, last))
        self.pass_over(self.mark_delete)

    # Acknowledging

    def acknowledge(self, position: Position) -> bool:
        """Acknowledge one entry; True if it was not before."""
        mark = self.mark_delete
        if position <= mark or not self._exists(position):
            return False
        if len(self._batches):
            self._batches.discard(position)
        if position.ledger_id == mark.ledger_id and position.entry_id == mark.entry_id + 1:
            follows = True
        else:
            follows = position.entry_id == 0 and self._core.ledgers.next(mark) == position
        if not follows:
            if not self._acked.add(position):
                return False
        elif self._acked.count:
            self._absorb(position)
        else:
            self.mark_delete = position
            self._mark_rank += 1
            if position >= self._boundary:
                self._passed_ledger()
        self._touch()
        return True

    def acknowledge_batch(
        self, position: Position, ack_set: Sequence[int], batch_size: int
    ) -> bool:
        """Acknowledge the messages whose bits are not in `ack_set`; True if none is left then.

        Raises `MalformedBatch` for a size that no batch has.
        """
        pending = batch_bits.from_words(ack_set, batch_size)
        if self.is_acknowledged(position) or not self._exists(position):
            return False
        if pending == batch_bits.pending_all(batch_size):
            return False
        before = self._batches.get(position)
        remaining = self._batches.narrow(position, pending)
        if remaining == 0:
            return self.acknowledge(position)
        if remaining != before:
            self._touch()
        return False

    def acknowledge_up_to(self, position: Position, ack_set: Sequence[int] = ()) -> None:
        """Acknowledge all entries up to and with `position` (cumulative).

        With `ack_set`: of that last entry only the messages whose bits are not in it.
        """
        core = self._core
        if position > core.last_confirmed:
            position, ack_set = core.last_confirmed, ()
        pending = batch_bits.from_words(ack_set, len(ack_set) * 64) if ack_set else 0
        if position <= self.mark_delete:
            return
        if pending and self._exists(position):
            previous = core.ledgers.before(position)
            if previous > self.mark_delete:
                self._jump(previous)
            self.acknowledge_batch(position, ack_set, len(ack_set) * 64)
            return
        last = core.ledgers.before(position.following)
        if last > self.mark_delete:
            self._jump(last)

    def step_over(self, ledger_id: int, missing: Sequence[EntryRange]) -> None:
        """Count entries of a ledger that were lost as acknowledged."""
        info = self._core.ledgers.get(ledger_id)
        if info is None:
            return
        for first, last in missing:
            self._acked.add_range(ledger_id, first, min(last, info.entries - 1))
        self._acked.discard_up_to(self.mark_delete)
        self._absorb(self.mark_delete)
        self._touch()

    def step_over_lost(self) -> None:
        """Count all entries that are known to be lost as acknowledged."""
        for info in self._core.ledgers.infos:
            if missing := self._core.lost_entries(info.ledger_id):
                self.step_over(info.ledger_id, missing)

    def _exists(self, position: Position) -> bool:
        ledgers = self._core.ledgers
        newest = ledgers.last
        if newest is not None and position.ledger_id == newest.ledger_id:
            return 0 <= position.entry_id < newest.entries
        return ledgers.contains(position)

    def _jump(self, mark: Position) -> None:
        """Move the mark forward, over entries that are acknowledged or not."""
        self._acked.discard_up_to(mark)
        self._batches.discard_up_to(mark)
        self._absorb(mark)
        self._touch()

    def _absorb(self, mark: Position) -> None:
        """Set the mark and move it over the acknowledged entries that follow."""
        acked, ledgers = self._acked, self._core.ledgers
        while acked.count:
            following = ledgers.next(mark)
            end = acked.run_end(following)
            if end is None:
                break
            acked.discard_range(following.ledger_id, following.entry_id, end)
            mark = Position(following.ledger_id, end)
        self.mark_delete = mark
        self._mark_rank = ledgers.rank(mark)
        if mark >= self._boundary:
            self._passed_ledger()

    def refresh_boundary(self) -> None:
        """Note the next end of a ledger that the mark passes, after ledgers or the mark changed."""
        self._boundary = self._core.ledgers.end_after(self.mark_delete)

    def _passed_ledger(self) -> None:
        self.refresh_boundary()
        self._core.trim_soon()

    def _touch(self) -> None:
        if self._flusher is not None:
            self._flusher.touch()

    # Moving, and making durable

    def restore(self, state: CursorState) -> None:
        """Set the position that was read from the store, as far as its entries exist."""
        ledgers, mark = self._core.ledgers, state.mark_delete
        self.numbers, self.began, self.sent_as = state.numbers, state.began, state.sent_as
        self.notes, self.sent_to = state.notes, state.sent_to
        ledgers.remember(mark)
        for after, up_to in state.spans:
            for info in ledgers.infos:
                if after.ledger_id <= info.ledger_id <= up_to.ledger_id:
                    own_start = after.entry_id + 1 if info.ledger_id == after.ledger_id else 0
                    own_end = up_to.entry_id if info.ledger_id == up_to.ledger_id else info.entries
                    first, last = max(own_start, 0), min(own_end, info.entries - 1)
                    self._acked.add_range(info.ledger_id, first, last)
        for ledger_id, words in state.words:
            found = ledgers.get(ledger_id)
            if found is not None:
                self._acked.add_words(ledger_id, words, found.entries)
        for position, pending in state.batches.items():
            if self._exists(position) and position > mark and position not in self._acked:
                self._batches.narrow(position, pending)
        self._acked.discard_up_to(mark)
        self._absorb(mark)

    async def persist(self) -> None:
        """Return when all acknowledgements so far are durable.

        Raises `MetadataError`, `LedgerError`, `ManagedLedgerFenced`, `ManagedLedgerClosed`.
        """
        if self._flusher is not None:
            await self._flusher.persist()

    async def reset(self, position: Position) -> None:
        """Forget all acknowledgements; the next entry is the first one at or after `position`.

        This counts at once; the call returns when it is durable.  Raises as `persist` does; then it
        becomes durable later, unless a crash comes first.
        """
        ledgers = self._core.ledgers
        self.resets += 1
        self._acked.clear()
        self._batches.clear()
        mark = ledgers.before(ledgers.at_or_after(position))
        self._boundary = LATEST
        self._absorb(mark)
        self.pass_over(mark)
        self.step_over_lost()
        self._passed_ledger()
        self._touch()
        await self.persist()

    async def replace_properties(self, properties: Mapping[str, str]) -> None:
        """Have these properties of users and no others, durably.  A reader's cursor has none.

        Raises `CursorNotFound` once it is deleted, and as `persist`.
        """
        await self._change_properties(
            lambda stored: {
                **properties,
                **{name: text for name, text in stored.items() if name == REPLICATED},
            }
        )

    async def set_replicated(self, replicated: bool, note: str = "") -> None:
        """Note durably whether users want it replicated.  A reader's cursor has no such note.

        `note` is what its user notes with that.  Raises as `replace_properties`.
        """
        if replicated is self.replicated and note == self.replication_note:
            return
        noted = {REPLICATED: note} if replicated else {}
        await self._change_properties(
            lambda stored: {
                **{name: text for name, text in stored.items() if name != REPLICATED},
                **noted,
            }
        )

    async def change_replication_note(self, change: Callable[[str], str]) -> None:
        """Note something else with that, durably, if it is still noted at all.

        Raises as `replace_properties`.
        """

        def changed(stored: Mapping[str, str]) -> Mapping[str, str]:
            is_noted = REPLICATED in stored
            return {**stored, REPLICATED: change(stored[REPLICATED])} if is_noted else stored

        if self.replicated:
            await self._change_properties(changed)

    async def _change_properties(
        self, change: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        if self._store is not None:
            # A client that leaves meanwhile cancels the caller.
            await self._core.complete(self._store.change_properties(change, self.snapshot))

    async def close(self) -> None:
        """Stop writing by timer and make the position durable.  Raises as `persist` does."""
        if self._store is not None and self._flusher is not None:
            await self._flusher.stop()
            self._core.require_running()
            await self._store.close(self.snapshot, dirty=self._flusher.dirty)
            self.release()

    async def delete(self) -> None:
        """Remove the stored position.  Raises as `persist` does."""
        if self._store is not None and self._flusher is not None:
            await self._store.delete()
            await self._flusher.stop()
            self.release()

    def release(self) -> None:
        """Drop the callbacks of a cursor that is closed; see `StreamCore.release`.  Idempotent."""
        flusher = self._flusher
        if self._store is not None and flusher is not None and not flusher.released:
            # The store refuses what is still written.
            snapshot = self.snapshot()
            flusher.released = True
            flusher.write = partial(self._store.write, lambda: snapshot)


class CursorFlusher:
    """Writes a cursor's position in batches, by a timer that runs only while it is dirty.

    All changes until the timer fires, `pause_s` after the first of them, are one write, and one
    write runs at a time.  A failed write is tried again after growing pauses, until it works or the
    stream stops.  `write` makes the state at the time of its call durable, or a later one.
    """

    __slots__ = ("_backoff", "_durable", "_generation", "_loop", "_name", "_pause_s", "_retry_s",
                 "_stopped", "_task", "_timer", "released", "write")  # fmt: skip

    def __init__(
        self,
        name: str,
        loop: asyncio.AbstractEventLoop,
        pause_s: Callable[[], float],
        write: Callable[[], Coroutine[object, object, None]],
    ) -> None:
        self._name = name
        self._loop = loop
        self._pause_s = pause_s
        self._retry_s: float | None = None
        """The pause after a failed write; None: the last one worked."""
        after_failure_s = min(2 * pause_s(), bounds.CURSOR_RETRY_MAX_S)
        self._backoff = Backoff(after_failure_s, bounds.CURSOR_RETRY_MAX_S)
        self.write = write
        self.released = False
        """Whether `write` keeps the cursor no longer."""
        self._generation = 0
        self._durable = 0
        self._stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def dirty(self) -> bool:
        """True while there are changes not known to be durable."""
        return self._durable != self._generation

    def touch(self) -> None:
        """Note that the state changed."""
        self._generation += 1
        if self._timer is None and self._task is None:
            self._arm()

    def _arm(self) -> None:
        if not self._stopped:
            pause_s = self._pause_s() if self._retry_s is None else self._retry_s
            self._timer = self._loop.call_later(pause_s, self._due)

    async def persist(self) -> None:
        """Return when all changes up to now are durable; raises what the write raises."""
        # A write that runs already may have begun before the last change: then one more follows.
        wanted = self._generation
        while self._durable < wanted:
            task = self._task or self._start()
            await asyncio.shield(task)

    async def stop(self) -> None:
        """Write no more by timer; wait for the write that runs."""
        self._stopped = True
        self._stop_timer()
        if self._task is not None:
            await asyncio.wait({self._task})

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> asyncio.Task[None]:
        self._stop_timer()
        self._task = self._loop.create_task(self._flush())
        self._task.add_done_callback(self._ended)
        return self._task

    def _due(self) -> None:
        self._timer = None
        if self._task is None:
            self._start()

    async def _flush(self) -> None:
        generation = self._generation
        try:
            await self.write()
            self._durable = generation
            self._retry_s = None
            self._backoff.reset()
        except InternalError:
            raise
        except MagnetarError:
            self._retry_s = self._backoff.pause_s()
            self._arm()
            raise
        finally:
            self._task = None
        if self.dirty and self._timer is None:
            self._arm()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, MagnetarError):
            log.warning("cursor_not_persisted", cursor=self._name, error=str(error))
        elif error is not None:
            raise error
