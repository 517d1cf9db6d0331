"""Pending adds of one writer: acknowledgements counted, confirmed in order of their ids.  Pure.

Rules:

- Ids are 0, 1, 2...; the length of the ledger grows when the id is given.
- An add is complete when `ack_quorum` bookies of its write set have it.  Adds are confirmed only
  in order from the head of the queue, and the last add confirmed is that of the newest one.
- While an ensemble change runs nothing is confirmed.  Further failures are collected, and dealt
  with before anything is confirmed again.
- A reply counts only if the bookie still has the place that it was asked for.  A new bookie gets
  every pending entry of its place; what it replaced has not acknowledged anything, so that a
  complete entry may become incomplete.
- FENCED and UNAUTHORISED for an incomplete entry, and what no other bookie would answer
  differently, end the writer.  Any other failure asks for an ensemble change; of an entry that was
  confirmed already: before the next add.
- A place whose bookie could not be replaced keeps it.  Its failures ask for another change only
  when an entry cannot become complete without it.
- A bookie that failed since the last progress is not asked again: changes end.
"""

import enum
from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import Final

from config import bounds
from magnetar.protocol.state_table import StateTable
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.ledger_metadata import BookieId, LedgerMetadata
from storage.ledger.store import AppendCallback, LedgerAssertion, LedgerError


class WriterState(enum.Enum):
    """Of a ledger that is being written."""

    OPEN = "open"
    CHANGING_ENSEMBLE = "changing ensemble"
    CLOSING = "closing"
    """Nothing is pending, and the end is being made durable."""
    CLOSED = "closed"
    FAILED = "failed"

    __hash__ = object.__hash__  # that of Enum is not written in C


_S = WriterState
_MOVES: Final[StateTable[WriterState]] = StateTable(
    {
        _S.OPEN: frozenset({_S.CHANGING_ENSEMBLE, _S.CLOSING, _S.FAILED}),
        _S.CHANGING_ENSEMBLE: frozenset({_S.OPEN, _S.FAILED}),
        _S.CLOSING: frozenset({_S.CLOSED, _S.FAILED}),
        _S.CLOSED: frozenset(),
        _S.FAILED: frozenset(),
    },
    defect=LedgerAssertion,
)
_TAKES_FAILURES = frozenset({_S.OPEN, _S.CHANGING_ENSEMBLE})

_OK: Final = ReplyCode.OK
_OPEN: Final = WriterState.OPEN
"""Members that every entry is compared with: asking an enum for one takes as long as all else."""

ENDS_THE_WRITER = frozenset(
    {
        ReplyCode.FENCED,
        ReplyCode.UNAUTHORISED,
        ReplyCode.BAD_REQUEST,
        ReplyCode.BAD_VERSION,
        ReplyCode.TOO_LARGE,
    }
)


class Todo(enum.Enum):
    """What a reply leads to."""

    NOTHING = "nothing"
    CONFIRM = "confirm"
    """The head of the queue is complete: take what `next_confirmed` gives."""
    CHANGE = "change"
    """Begin an ensemble change."""
    FAIL = "fail"
    """The writer is at its end."""


_NOTHING: Final = Todo.NOTHING
_CONFIRM: Final = Todo.CONFIRM


class Slot:
    """One bookie at one place of the ensemble.  Another bookie there is another slot."""

    __slots__ = ("bit", "bookie", "kept", "place")

    def __init__(self, place: int, bookie: BookieId) -> None:
        self.place = place
        self.bookie = bookie
        self.bit = 1 << place
        self.kept = False
        """It failed and could not be replaced."""


class PendingAdd:
    """One entry.  `acks` and `failures` are sets of places, as bits."""

    __slots__ = ("acks", "body", "complete", "confirmed", "done", "entry_id", "failures", "size")

    def __init__(self, entry_id: int, size: int, done: AppendCallback) -> None:
        self.entry_id = entry_id
        self.size = size
        self.done = done
        self.body: Sequence[bytes] = ()
        """What is sent, in pieces; kept until it is confirmed."""
        self.acks = 0
        self.failures = 0
        self.complete = False
        self.confirmed = False


class Adds:
    """Counts the acknowledgements of pending adds and confirms them in order of entry ids.

    What callers read for every entry are attributes; nobody else writes them.
    """

    __slots__ = (
        "_ack_quorum",
        "_changes",
        "_changing",
        "_confirmed_at_change",
        "_ensemble_size",
        "_failed",
        "_max_changes",
        "_may_fail",
        "_queue",
        "_slots",
        "_tried",
        "_write_quorum",
        "_write_slots",
        "change_due",
        "confirmed_length",
        "last_confirmed",
        "length",
        "next_entry_id",
        "pending_bytes",
        "state",
    )

    def __init__(
        self,
        metadata: LedgerMetadata,
        last_confirmed: int = -1,
        length: int = 0,
        *,
        max_changes: int = bounds.ENSEMBLE_CHANGES,
    ) -> None:
        """`last_confirmed` and its `length`: where to go on."""
        self.state = WriterState.OPEN
        self.next_entry_id = last_confirmed + 1
        """The id that the next entry gets."""
        self.length = length
        """Bytes of the ledger up to the last entry that got an id."""
        self.last_confirmed = last_confirmed
        """The last add confirmed."""
        self.confirmed_length = length
        """Bytes of the ledger up to that one."""
        self.pending_bytes = 0
        """Of entries that are not confirmed."""
        self.change_due = False
        """Something failed after its entry was confirmed: change before the next add."""
        self._max_changes = max_changes
        self._ensemble_size = metadata.ensemble_size
        self._ack_quorum = metadata.ack_quorum
        self._write_quorum = metadata.write_quorum
        self._may_fail = metadata.write_quorum - metadata.ack_quorum
        self._queue: deque[PendingAdd] = deque()
        self._slots = [
            Slot(place, bookie) for place, bookie in enumerate(metadata.last_ensemble.bookies)
        ]
        self._write_slots: list[tuple[Slot, ...]] = []
        self._failed: dict[int, Slot] = {}
        self._changing: dict[int, Slot] = {}
        self._changes = 0
        self._confirmed_at_change = last_confirmed
        self._tried: set[BookieId] = set()
        self._place()

    # What it is

    @property
    def pending(self) -> int:
        """Entries that are not confirmed."""
        return len(self._queue)

    @property
    def tried(self) -> Set[BookieId]:
        """Bookies that failed since the last progress."""
        return self._tried

    # Adding

    def add(self, size: int, done: AppendCallback) -> PendingAdd:
        """Give the next entry its id; send it to `slots_of` that."""
        entry_id = self.next_entry_id
        add = PendingAdd(entry_id, size, done)
        self.next_entry_id = entry_id + 1
        self.length += size
        self.pending_bytes += size
        self._queue.append(add)
        return add

    def skip(self) -> int:
        """The id of an entry that will not be stored, after a failure."""
        self.next_entry_id += 1
        return self.next_entry_id - 1

    def slots_of(self, entry_id: int) -> tuple[Slot, ...]:
        """Who gets an entry now."""
        return self._write_slots[entry_id % self._ensemble_size]

    def replied(self, add: PendingAdd, slot: Slot, code: ReplyCode) -> Todo:
        """A bookie answered, or did not, what was sent to it as `slot`."""
        if self._slots[slot.place] is not slot:
            return _NOTHING
        if code is not _OK:
            return self._failure(add, slot, code)
        acks = add.acks = add.acks | slot.bit
        if not add.complete and acks.bit_count() >= self._ack_quorum:
            add.complete = True
            if self.state is _OPEN and self._queue[0] is add:
                return _CONFIRM
        return _NOTHING

    def next_confirmed(self) -> PendingAdd | None:
        """The entry that is confirmed next, now counted as such; None: wait for replies."""
        queue = self._queue
        if not queue or not queue[0].complete or self.state is not _OPEN:
            return None
        add = queue.popleft()
        if add.entry_id != self.last_confirmed + 1:
            raise LedgerAssertion(
                f"Entry {add.entry_id} would be confirmed after {self.last_confirmed}: report "
                "this as a defect."
            )
        self.last_confirmed = add.entry_id
        self.confirmed_length += add.size
        self.pending_bytes -= add.size
        add.confirmed = True
        add.body = ()
        return add

    def _failure(self, add: PendingAdd, slot: Slot, code: ReplyCode) -> Todo:
        if self.state not in _TAKES_FAILURES:
            return Todo.NOTHING
        add.failures |= slot.bit
        if not add.complete and code in ENDS_THE_WRITER:
            return Todo.FAIL
        if slot.kept and not self._is_stuck(add):
            return Todo.NOTHING
        self._failed[slot.place] = slot
        if self.state is not WriterState.OPEN:
            return Todo.NOTHING
        if add.confirmed:
            self.change_due = True
            return Todo.NOTHING
        return Todo.CHANGE

    def _is_stuck(self, add: PendingAdd) -> bool:
        """Whether too many failed for the entry to become complete."""
        return not add.complete and add.failures.bit_count() > self._may_fail

    # Ensemble change

    def begin_change(self) -> Mapping[int, BookieId]:
        """Stop confirming; returns what has to be replaced, by place.

        Raises `LedgerError` when there were too many changes.  Called again in the same change if
        `end_change` says so.
        """
        if self.state is WriterState.OPEN:
            self._move(WriterState.CHANGING_ENSEMBLE)
        if self._changes >= self._max_changes:
            raise LedgerError(
                f"The bookies of a ledger were changed {self._changes} times: look at the bookies' "
                "logs; another ledger takes what follows."
            )
        self._changes += 1
        if self.last_confirmed > self._confirmed_at_change:
            self._tried.clear()
        self._confirmed_at_change = self.last_confirmed
        self.change_due = False
        self._changing = self._failed
        self._changing.update((slot.place, slot) for slot in self._slots if slot.kept)
        self._failed = {}
        self._tried.update(slot.bookie for slot in self._changing.values())
        return {place: slot.bookie for place, slot in sorted(self._changing.items())}

    def replace(self, replacements: Mapping[int, BookieId]) -> list[tuple[PendingAdd, Slot]]:
        """New bookies are in the record; returns what to send to which of them, in order."""
        for slot in self._changing.values():
            slot.kept = True
        self._changing = {}
        for place, bookie in replacements.items():
            self._slots[place] = Slot(place, bookie)
        self._place()
        resent: list[tuple[PendingAdd, Slot]] = []
        for add in self._queue:
            for slot in self.slots_of(add.entry_id):
                if slot.place in replacements:
                    add.acks &= ~slot.bit
                    add.failures &= ~slot.bit
                    resent.append((add, slot))
            add.complete = add.acks.bit_count() >= self._ack_quorum
        return resent

    def end_change(self) -> Todo:
        """CHANGE: not over, begin again.  CONFIRM: it is."""
        self._failed = {
            place: slot
            for place, slot in self._failed.items()
            if self._slots[place] is slot and not slot.kept
        }
        if self._failed or any(self._is_stuck(add) for add in self._queue):
            return Todo.CHANGE
        self._move(WriterState.OPEN)
        return Todo.CONFIRM

    # Ending

    def begin_close(self) -> None:
        """Only when nothing is pending."""
        if self._queue:
            raise LedgerAssertion("A ledger with pending entries cannot end: report this.")
        self._move(WriterState.CLOSING)

    def closed(self) -> None:
        """The end is durable."""
        self._move(WriterState.CLOSED)

    def fail(self) -> list[PendingAdd]:
        """No entry is confirmed any more; returns those whose outcome is not known, in order."""
        self._move(WriterState.FAILED)
        lost = list(self._queue)
        self._queue.clear()
        self.pending_bytes = 0
        for add in lost:
            add.body = ()
        return lost

    def _place(self) -> None:
        """Work out the write sets anew."""
        size = len(self._slots)
        self._write_slots = [
            tuple(self._slots[(first + copy) % size] for copy in range(self._write_quorum))
            for first in range(size)
        ]

    def _move(self, to: WriterState) -> None:
        self.state = _MOVES.move(self.state, to, "A writer")
