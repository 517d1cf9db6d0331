"""How a writer replaces bookies of its ledger: a change of the record that only an owner can make.
Pure.

Rules:

- The new bookies are there from the entry after the last add confirmed on.  An ensemble that
  starts there already is replaced; earlier ones are never touched.
- The record is written with the version that is held.  After a conflict it is read again: OPEN with
  the same last ensemble (others rewrote an earlier one) means once more; anything else that another
  client is the owner now.
- Some replaced and some not is a change; none at all is the end of the writer.  What it is told
  then depends on the record: a bookie may have refused because another client is the owner.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from config import bounds
from magnetar.protocol.ids import LedgerId
from magnetar.protocol.state_table import StateTable
from storage.ledger.bookkeeper.ensemble_choice import NotEnoughBookies
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_store import VersionedMetadata
from storage.ledger.store import LedgerAssertion, LedgerError, LedgerFenced

Chooser = Callable[[Sequence[BookieId], Sequence[int]], Mapping[int, BookieId]]
"""Bookies for places of an ensemble, as far as there are any."""


def with_replacements(
    metadata: LedgerMetadata, first_entry_id: int, replacements: Mapping[int, BookieId]
) -> LedgerMetadata:
    """The record with other bookies from an entry on.  Raises if entries before would move."""
    last = metadata.last_ensemble
    if first_entry_id < last.first_entry_id:
        raise LedgerAssertion(
            f"Bookies cannot change from entry {first_entry_id} on, the last ensemble starts at "
            f"{last.first_entry_id}: report this as a defect."
        )
    bookies = tuple(replacements.get(place, bookie) for place, bookie in enumerate(last.bookies))
    if len(set(bookies)) != metadata.ensemble_size:
        raise LedgerAssertion(f"Bookies {bookies} are not different: report this as a defect.")
    before = metadata.ensembles
    if last.first_entry_id == first_entry_id:
        before = before[:-1]
    return replace(metadata, ensembles=(*before, Ensemble(first_entry_id, bookies)))


def taken_over(ledger_id: LedgerId) -> LedgerFenced:
    """The error of a writer whose ledger belongs to another client."""
    return LedgerFenced(
        f"Ledger {ledger_id} was opened, changed or deleted by another owner: reload the topic."
    )


class ChangeState(enum.Enum):
    """Of one change."""

    WRITING = "writing"
    READING = "reading"
    """After a conflict."""
    CHANGED = "changed"
    GIVEN_UP = "given up"


_MOVES: StateTable[ChangeState] = StateTable(
    {
        ChangeState.WRITING: frozenset(
            {ChangeState.READING, ChangeState.CHANGED, ChangeState.GIVEN_UP}
        ),
        ChangeState.READING: frozenset(
            {ChangeState.WRITING, ChangeState.CHANGED, ChangeState.GIVEN_UP}
        ),
        ChangeState.CHANGED: frozenset(),
        ChangeState.GIVEN_UP: frozenset(),
    },
    defect=LedgerAssertion,
)


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """Write it if the record is at version `expect`; then `written`, or `conflict`."""

    metadata: LedgerMetadata
    expect: int


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read the record; then `read`."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The record has the new bookies."""

    record: VersionedMetadata
    replacements: Mapping[int, BookieId]


@dataclass(frozen=True, slots=True)
class GaveUp:
    """The writer is at its end."""

    error: LedgerError


ChangeEffect = WriteRecord | ReadRecord | Changed | GaveUp


class EnsembleChange:
    """One replacement of failed bookies in the ensemble of a ledger."""

    def __init__(
        self,
        ledger_id: LedgerId,
        held: VersionedMetadata,
        last_confirmed: int,
        failed: Mapping[int, BookieId],
        choose: Chooser,
    ) -> None:
        self._ledger_id = ledger_id
        self._held = held
        self._first = last_confirmed + 1
        self._failed = failed
        self._choose = choose
        self._tries = 0
        self._state = ChangeState.READING
        self._wanted = held.metadata
        self._replacements: Mapping[int, BookieId] = {}

    @property
    def state(self) -> ChangeState:
        """Where the change is."""
        return self._state

    def start(self) -> ChangeEffect:
        """Choose bookies and write them."""
        last = self._held.metadata.last_ensemble
        places = [place for place, bookie in self._failed.items() if last.bookies[place] == bookie]
        self._replacements = self._choose(last.bookies, places)
        if not self._replacements:
            return ReadRecord()
        self._wanted = with_replacements(self._held.metadata, self._first, self._replacements)
        self._tries += 1
        self._move(ChangeState.WRITING)
        return WriteRecord(self._wanted, self._held.version)

    def written(self, record: VersionedMetadata) -> ChangeEffect:
        """The write took effect."""
        self._move(ChangeState.CHANGED)
        return Changed(record, self._replacements)

    def conflict(self) -> ChangeEffect:
        """Somebody changed the record, or the answer to the own write was lost."""
        self._move(ChangeState.READING)
        return ReadRecord()

    def read(self, record: VersionedMetadata) -> ChangeEffect:
        """The record as it is now."""
        found = record.metadata
        if found.state is not LedgerState.OPEN:
            return self._give_up(taken_over(self._ledger_id))
        if self._replacements and found.last_ensemble == self._wanted.last_ensemble:
            return self.written(record)
        if found.last_ensemble != self._held.metadata.last_ensemble:
            return self._give_up(taken_over(self._ledger_id))
        if not self._replacements:
            names = ", ".join(sorted(set(self._failed.values())))
            return self._give_up(
                NotEnoughBookies(
                    f"No bookie can take the place of {names} in ledger {self._ledger_id}: start "
                    "more bookies."
                )
            )
        if self._tries >= bounds.RECORD_CHANGE_TRIES:
            return self._give_up(
                LedgerError(
                    f"The record of ledger {self._ledger_id} changed {self._tries} times while its "
                    "bookies were being replaced: look at what else writes to it."
                )
            )
        self._held = record
        return self.start()

    def _give_up(self, error: LedgerError) -> GaveUp:
        self._move(ChangeState.GIVEN_UP)
        return GaveUp(error)

    def _move(self, to: ChangeState) -> None:
        self._state = _MOVES.move(self._state, to, "An ensemble change")
