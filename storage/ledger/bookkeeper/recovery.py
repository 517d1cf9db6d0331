"""Recovers a ledger without a living owner: marks, fences, reads on, writes back, closes.  Pure.

The rules Q17 to Q26 are in docs/quorums.md.  Every step may be repeated after a crash.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from config import bounds
from magnetar.protocol.ids import LedgerId
from magnetar.protocol.state_table import StateTable
from storage.ledger.bookkeeper.adds import Adds, PendingAdd, Slot, Todo
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import OpenedEntry
from storage.ledger.bookkeeper.ensemble_change import ReadRecord, WriteRecord, with_replacements
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerState
from storage.ledger.bookkeeper.metadata_store import VersionedMetadata
from storage.ledger.bookkeeper.reads import (
    NEGATIVE,
    LastConfirmedRead,
    ReadOne,
    ReadState,
    enough_answers,
)
from storage.ledger.store import LedgerAssertion, LedgerError

Seal = Callable[[int, int, int, bytes], Sequence[bytes]]
"""The body of an entry from its id, the last add confirmed, the length and the data."""
Chooser = Callable[[Sequence[BookieId], Sequence[int], frozenset[BookieId]], Mapping[int, BookieId]]
"""Bookies for places of an ensemble, none of those that failed; as far as there are any."""


class RecoveryState(enum.Enum):
    """State of one recovery."""

    MARKING = "marking"
    FENCING = "fencing"
    READING = "reading"
    WRITING_BACK = "writing back"
    CLOSING = "closing"
    REREADING = "reading the record again"
    DONE = "done"
    FAILED = "failed"

    __hash__ = object.__hash__  # Enum's own is not written in C


_S = RecoveryState
_BEGINNING = frozenset({_S.MARKING, _S.FENCING, _S.DONE, _S.FAILED})
_MOVES: StateTable[RecoveryState] = StateTable(
    {
        _S.REREADING: _BEGINNING,
        _S.MARKING: frozenset({_S.FENCING, _S.REREADING}),
        _S.FENCING: frozenset({_S.READING, _S.FAILED}),
        _S.READING: frozenset({_S.WRITING_BACK, _S.CLOSING, _S.FAILED}),
        _S.WRITING_BACK: frozenset({_S.READING, _S.CLOSING, _S.FAILED}),
        _S.CLOSING: frozenset({_S.DONE, _S.REREADING}),
        _S.DONE: frozenset(),
        _S.FAILED: frozenset(),
    },
    defect=LedgerAssertion,
)


@dataclass(frozen=True, slots=True, eq=False)
class AskBookie:
    """Read an entry (-1: the last one) from a bookie, fencing the ledger there if `fence`."""

    read: ReadOne
    fence: bool


@dataclass(frozen=True, slots=True, eq=False)
class WriteBack:
    """Store an entry on a bookie, fenced or not."""

    adds: Adds
    add: PendingAdd
    slot: Slot


@dataclass(frozen=True, slots=True)
class RecoveryDone:
    """The ledger is CLOSED."""

    record: VersionedMetadata


@dataclass(frozen=True, slots=True)
class RecoveryFailed:
    """The ledger could not be recovered; a later recovery may succeed."""

    error: LedgerError


RecoveryEffect = WriteRecord | ReadRecord | AskBookie | WriteBack | RecoveryDone | RecoveryFailed


class _EntryAnswers:
    """Answers of one entry's write set."""

    __slots__ = ("found", "negatives", "waiting")

    def __init__(self, waiting: int) -> None:
        self.found: OpenedEntry | None = None
        self.negatives = 0
        self.waiting = waiting


class Recovery:
    """One recovery: fences a ledger, finds its last entry and closes it."""

    def __init__(
        self,
        ledger_id: LedgerId,
        seal: Seal,
        choose: Chooser,
        *,
        window_bytes: int = bounds.RECOVERY_WINDOW_BYTES,
    ) -> None:
        self.state = RecoveryState.REREADING
        self._ledger_id = ledger_id
        self._seal = seal
        self._choose = choose
        self._window_bytes = window_bytes
        self._rounds = 0
        self._failed: frozenset[BookieId] = frozenset()

    # The record

    def start(self, record: VersionedMetadata) -> list[RecoveryEffect]:
        """Begin with the record as it was read; call it for `ReadRecord` too."""
        metadata = record.metadata
        if metadata.state is LedgerState.CLOSED:
            return self._done(record)
        self._rounds += 1
        if self._rounds > bounds.RECOVERY_ROUNDS:
            return self._fail("its record kept changing")
        self._record = record
        # Q17: from then on the old writer can change no ensemble.
        if metadata.state is LedgerState.OPEN:
            self._move(RecoveryState.MARKING)
            marked = replace(metadata, state=LedgerState.IN_RECOVERY)
            return [WriteRecord(marked, record.version)]
        return self._fence()

    def written(self, record: VersionedMetadata) -> list[RecoveryEffect]:
        """Go on after the record was written."""
        if self.state is RecoveryState.CLOSING:
            return self._done(record)
        self._record = record
        return self._fence()

    def conflict(self) -> list[RecoveryEffect]:
        """Read the record, which was not at the expected version."""
        # Q26: if another client closed the ledger its end is taken; else all begins again.
        self._move(RecoveryState.REREADING)
        return [ReadRecord()]

    # Fencing

    def _fence(self) -> list[RecoveryEffect]:
        self._move(RecoveryState.FENCING)
        self._metadata = self._record.metadata
        self._changed = self._metadata
        self._needed = enough_answers(self._metadata)
        self._ends = LastConfirmedRead(self._metadata)
        self._answers: dict[int, _EntryAnswers] = {}
        self._requests: dict[AskBookie, _EntryAnswers] = {}
        return [AskBookie(read, fence=True) for read in self._ends.start()]

    def replied(
        self, request: AskBookie, code: ReplyCode, found: OpenedEntry | None
    ) -> list[RecoveryEffect]:
        """Take the answer to a read, or its failure; OK without an entry: the copy is damaged."""
        if self.state is RecoveryState.FENCING:
            return self._fence_replied(request, code, found)
        if self.state is RecoveryState.READING:
            return self._entry_replied(request, code, found)
        return []

    def _fence_replied(
        self, request: AskBookie, code: ReplyCode, found: OpenedEntry | None
    ) -> list[RecoveryEffect]:
        if code is ReplyCode.UNAUTHORISED:
            return self._unauthorised(request.read.bookie)
        ends = self._ends
        ends.replied(request.read, code, found)
        if ends.state is ReadState.FAILED:
            return self._fail("too few of its bookies answer")
        if ends.state is ReadState.READING:
            return []
        self._start = ends.last_confirmed
        self._length = 0
        self._end = self._start
        self._largest = 0
        self._window = bounds.RECOVERY_FIRST_WINDOW_ENTRIES
        self._adds = Adds(self._metadata, self._start)
        return self._read_window()

    # Reading

    def _read_window(self) -> list[RecoveryEffect]:
        self._move(RecoveryState.READING)
        self._answers, self._requests = {}, {}
        effects: list[RecoveryEffect] = []
        first = self._end + 1
        if self._end == self._start >= 0:
            effects += self._read_entry(self._start, fence=False)
        # Q20: the bookies of these entries may not have been fenced yet.
        for entry_id in range(first, first + self._window):
            effects += self._read_entry(entry_id, fence=True)
        return effects

    def _read_entry(self, entry_id: int, *, fence: bool) -> list[RecoveryEffect]:
        answers = self._answers[entry_id] = _EntryAnswers(self._metadata.write_quorum)
        # Q24: the ensembles of the record, not those with the bookies that were chosen here.
        bookies = self._metadata.ensemble_of(entry_id).bookies
        requests = [
            AskBookie(ReadOne(bookies[place], entry_id), fence)
            for place in self._metadata.write_set(entry_id)
        ]
        self._requests.update(dict.fromkeys(requests, answers))
        return list(requests)

    def _entry_replied(
        self, request: AskBookie, code: ReplyCode, found: OpenedEntry | None
    ) -> list[RecoveryEffect]:
        answers = self._requests.pop(request, None)
        if answers is None:
            return []
        if code is ReplyCode.UNAUTHORISED:
            return self._unauthorised(request.read.bookie)
        answers.waiting -= 1
        answers.negatives += code in NEGATIVE
        if answers.found is None:
            answers.found = found
        return self._judge()

    def _judge(self) -> list[RecoveryEffect]:
        """Go on once it is known which entries of this window exist."""
        found: list[OpenedEntry] = []
        absent = False
        for entry_id in range(self._end + 1, self._end + 1 + self._window):
            answers = self._answers[entry_id]
            if answers.found is not None:
                found.append(answers.found)
            elif answers.negatives >= self._needed:
                # Q21: it was not acknowledged, and so no entry after it was.
                absent = True
                break
            elif answers.waiting:
                return []
            else:
                return self._fail(f"it is not known whether there is an entry {entry_id}")
        if found:
            return self._write_back(found, absent)
        return self._measure()

    def _measure(self) -> list[RecoveryEffect]:
        """Find the length of the ledger, then close it: there are no further entries."""
        # Q25: the length is in the last entry itself.  One that was written back is known already.
        if self._end == self._start >= 0:
            answers = self._answers[self._start]
            if answers.found is None:
                if answers.waiting:
                    return []
                return self._fail(f"its last entry {self._start} cannot be read")
            self._length = answers.found.length
        return self._close()

    # Writing back

    def _write_back(self, found: list[OpenedEntry], at_end: bool) -> list[RecoveryEffect]:
        # Q22: an entry that one replica has may have been acknowledged.
        self._move(RecoveryState.WRITING_BACK)
        self._answers, self._requests = {}, {}
        self._at_end = at_end
        effects: list[RecoveryEffect] = []
        if self._adds.change_due:
            effects += self._change()
        if self.state is not RecoveryState.WRITING_BACK:
            return effects
        for entry in found:
            add = self._adds.add(len(entry.data), _no_callback)
            # With the last add confirmed that was found, not a higher one: another recovery must
            # not take for confirmed what is only on bookies that this one chose.
            add.body = self._seal(entry.entry_id, self._start, entry.length, entry.data)
            if add.entry_id != entry.entry_id:
                raise LedgerAssertion(
                    f"Entry {entry.entry_id} of ledger {self._ledger_id} would be written back as "
                    f"{add.entry_id}: report this as a defect."
                )
            for slot in self._adds.slots_of(add.entry_id):
                effects.append(WriteBack(self._adds, add, slot))
            self._largest = max(self._largest, len(entry.data))
        self._end = found[-1].entry_id
        self._length = found[-1].length
        return effects

    def write_replied(self, request: WriteBack, code: ReplyCode) -> list[RecoveryEffect]:
        """Take the answer of a bookie to an entry written back, or its failure."""
        if self.state is not RecoveryState.WRITING_BACK or request.adds is not self._adds:
            return []
        todo = self._adds.replied(request.add, request.slot, code)
        if todo is Todo.FAIL:
            bookie = request.slot.bookie
            return self._fail(f"bookie {bookie} refuses its entries ({code.name})")
        effects = self._change() if todo is Todo.CHANGE else []
        if self.state is RecoveryState.WRITING_BACK:
            effects += self._confirm()
        return effects

    def _change(self) -> list[RecoveryEffect]:
        """Replace failed bookies in memory, from the first entry that is not confirmed on."""
        adds = self._adds
        effects: list[RecoveryEffect] = []
        while True:
            try:
                failed = adds.begin_change()
            except LedgerError as error:
                return self._give_up(error)
            self._failed |= frozenset(failed.values())
            last = self._changed.last_ensemble
            replacements = self._choose(last.bookies, list(failed), self._failed)
            if replacements:
                first = adds.last_confirmed + 1
                self._changed = with_replacements(self._changed, first, replacements)
            for add, slot in adds.replace(replacements):
                effects.append(WriteBack(adds, add, slot))
            if adds.end_change() is Todo.CONFIRM:
                return effects
            if not replacements:
                return self._fail("too few bookies take its last entries: start more bookies")

    def _confirm(self) -> list[RecoveryEffect]:
        adds = self._adds
        while adds.next_confirmed() is not None:
            pass
        if adds.pending:
            return []
        if self._at_end:
            return self._close()
        within = self._window_bytes // max(self._largest, 1)
        self._window = max(1, min(within, 4 * self._window, bounds.RECOVERY_WINDOW_ENTRIES))
        return self._read_window()

    # The end

    def _close(self) -> list[RecoveryEffect]:
        self._move(RecoveryState.CLOSING)
        # Q23: with the ensembles that changed in memory while entries were written back.
        closed = replace(
            self._changed,
            state=LedgerState.CLOSED,
            last_entry_id=self._end,
            length=self._length,
        )
        return [WriteRecord(closed, self._record.version)]

    def _done(self, record: VersionedMetadata) -> list[RecoveryEffect]:
        self._move(RecoveryState.DONE)
        return [RecoveryDone(record)]

    def _unauthorised(self, bookie: BookieId) -> list[RecoveryEffect]:
        return self._fail(f"bookie {bookie} does not accept its password: check the configuration")

    def _fail(self, why: str) -> list[RecoveryEffect]:
        return self._give_up(
            LedgerError(
                f"Ledger {self._ledger_id} cannot be recovered now, {why}. When its bookies are "
                "back, open it again."
            )
        )

    def _give_up(self, error: LedgerError) -> list[RecoveryEffect]:
        self._move(RecoveryState.FAILED)
        return [RecoveryFailed(error)]

    def _move(self, to: RecoveryState) -> None:
        self.state = _MOVES.move(self.state, to, "A recovery")


def _no_callback(_entry_id: int, _error: LedgerError | None) -> None:
    """Do nothing: no caller waits for an entry that is written back."""
