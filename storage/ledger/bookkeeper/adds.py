"""Pending adds of one writer: acknowledgements counted, confirmed in order of their ids.  Pure.

The rules Q2 to Q11 are in docs/quorums.md.
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
    """State of a ledger that is being written."""

    OPEN = "open"
    CHANGING_ENSEMBLE = "changing ensemble"
    CLOSING = "closing"
    """No add is pending, and the end is being made durable."""
    CLOSED = "closed"
    FAILED = "failed"

    __hash__ = object.__hash__  # Enum's own is not written in C


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
"""Each add is compared with these members: looking one up in its enum takes as long as the rest."""

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
    """The next step of the writer after a reply."""

    NOTHING = "nothing"
    CONFIRM = "confirm"
    """Confirm the entries that `next_confirmed` gives: the head of the queue is complete."""
    CHANGE = "change"
    """Begin an ensemble change."""
    FAIL = "fail"
    """Fail the writer."""


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
        """Whether it failed and could not be replaced."""


class PendingAdd:
    """One entry that is not confirmed.  `acks` and `failures` are sets of places, as bits."""

    __slots__ = ("acks", "body", "complete", "confirmed", "done", "entry_id", "failures", "size")

    def __init__(self, entry_id: int, size: int, done: AppendCallback) -> None:
        self.entry_id = entry_id
        self.size = size
        self.done = done
        self.body: Sequence[bytes] = ()
        """The body to send, in pieces; kept until the entry is confirmed."""
        self.acks = 0
        self.failures = 0
        self.complete = False
        self.confirmed = False


class Adds:
    """Counts the acknowledgements of pending adds and confirms them in order of entry ids.

    An add is complete when `ack_quorum` bookies of its write set have it.  The public attributes
    are for reading only; they are no properties because callers read them for every entry.
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
        """Continue after the entry `last_confirmed`, up to which the ledger has `length` bytes."""
        self.state = WriterState.OPEN
        self.next_entry_id = last_confirmed + 1
        """The id that the next entry gets."""
        self.length = length
        """Bytes of the ledger up to the last entry that got an id."""
        self.last_confirmed = last_confirmed
        """The last add confirmed."""
        self.confirmed_length = length
        """Bytes of the ledger up to the last add confirmed."""
        self.pending_bytes = 0
        """Bytes of the entries that are not confirmed."""
        self.change_due = False
        """Whether a bookie failed for a confirmed entry: the next add needs a change first."""
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

    # State

    @property
    def pending(self) -> int:
        """Number of entries that are not confirmed."""
        return len(self._queue)

    @property
    def tried(self) -> Set[BookieId]:
        """Bookies that failed since the last progress."""
        return self._tried

    # Adding

    def add(self, size: int, done: AppendCallback) -> PendingAdd:
        """Give the next entry its id: 0, 1, 2 and so on.  Send it to `slots_of` that id."""
        entry_id = self.next_entry_id
        add = PendingAdd(entry_id, size, done)
        self.next_entry_id = entry_id + 1
        self.length += size  # Q4: with the id
        self.pending_bytes += size
        self._queue.append(add)
        return add

    def skip(self) -> int:
        """The id of an entry that will not be stored, after a failure."""
        self.next_entry_id += 1
        return self.next_entry_id - 1

    def slots_of(self, entry_id: int) -> tuple[Slot, ...]:
        """The write set of an entry now."""
        return self._write_slots[entry_id % self._ensemble_size]

    def replied(self, add: PendingAdd, slot: Slot, code: ReplyCode) -> Todo:
        """Count the answer to an add that was sent to `slot`, or its failure."""
        # Q6: the bookie was replaced since.
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
        """Confirm the next entry and return it; None: wait for replies."""
        queue = self._queue
        # Q2: only the head of the queue.  Q3: not during an ensemble change.
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
        # Q11: another owner fenced the ledger, or no other bookie would answer differently.
        if not add.complete and code in ENDS_THE_WRITER:
            return Todo.FAIL
        # A bookie that could not be replaced: a further change is of use only to a stuck entry.
        if slot.kept and not self._is_stuck(add):
            return Todo.NOTHING
        self._failed[slot.place] = slot
        if self.state is not WriterState.OPEN:
            return Todo.NOTHING
        # Q9: the entry is safe, and the next one needs another bookie.
        if add.confirmed:
            self.change_due = True
            return Todo.NOTHING
        return Todo.CHANGE

    def _is_stuck(self, add: PendingAdd) -> bool:
        """Whether too many bookies failed for the entry to become complete."""
        return not add.complete and add.failures.bit_count() > self._may_fail

    # Ensemble change

    def begin_change(self) -> Mapping[int, BookieId]:
        """Stop confirming; returns the bookies to replace, by place.

        Raises `LedgerError` after too many changes.  Call it again in the same change if
        `end_change` returns CHANGE.
        """
        if self.state is WriterState.OPEN:
            self._move(WriterState.CHANGING_ENSEMBLE)
        # Q10: changes are bounded, and `tried` bookies are not chosen again until an entry is
        # confirmed.  So changes end.
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
        """Take the new bookies, which are in the record; returns the adds to send to them."""
        for slot in self._changing.values():
            slot.kept = True
        self._changing = {}
        for place, bookie in replacements.items():
            self._slots[place] = Slot(place, bookie)
        self._place()
        resent: list[tuple[PendingAdd, Slot]] = []
        # Q7: acknowledgements of the replaced bookies do not count, so that a complete entry may
        # become incomplete.  The new bookies get the same bytes.
        for add in self._queue:
            for slot in self.slots_of(add.entry_id):
                if slot.place in replacements:
                    add.acks &= ~slot.bit
                    add.failures &= ~slot.bit
                    resent.append((add, slot))
            add.complete = add.acks.bit_count() >= self._ack_quorum
        return resent

    def end_change(self) -> Todo:
        """End the change: CONFIRM.  CHANGE means that another change must begin first."""
        # Q8: failures during the change come before any entry is confirmed.
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
        """Begin to close.  Raises `LedgerAssertion` if adds are pending."""
        if self._queue:
            raise LedgerAssertion("A ledger with pending entries cannot end: report this.")
        self._move(WriterState.CLOSING)

    def closed(self) -> None:
        """Note that the end is durable."""
        self._move(WriterState.CLOSED)

    def fail(self) -> list[PendingAdd]:
        """Confirm no entry any more; returns the pending ones, whose outcome is unknown."""
        self._move(WriterState.FAILED)
        lost = list(self._queue)
        self._queue.clear()
        self.pending_bytes = 0
        for add in lost:
            add.body = ()
        return lost

    def _place(self) -> None:
        """Compute the write sets from the slots."""
        size = len(self._slots)
        self._write_slots = [
            tuple(self._slots[(first + copy) % size] for copy in range(self._write_quorum))
            for first in range(size)
        ]

    def _move(self, to: WriterState) -> None:
        self.state = _MOVES.move(self.state, to, "A writer")
