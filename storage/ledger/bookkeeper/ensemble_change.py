"""Replaces bookies of a ledger: a change of the record that only its owner can make.  Pure.

The rules Q12 to Q15 are in docs/quorums.md.
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
    """The record with other bookies from an entry on.

    Raises `LedgerAssertion` if earlier entries would move, or the bookies are not different.
    """
    last = metadata.last_ensemble
    # Q13: the entries of earlier ensembles are where these say.
    if first_entry_id < last.first_entry_id:
        raise LedgerAssertion(
            f"Bookies cannot change from entry {first_entry_id} on, the last ensemble starts at "
            f"{last.first_entry_id}: report this as a defect."
        )
    bookies = tuple(replacements.get(place, bookie) for place, bookie in enumerate(last.bookies))
    if len(set(bookies)) != metadata.ensemble_size:
        raise LedgerAssertion(f"Bookies {bookies} are not different: report this as a defect.")
    before = metadata.ensembles
    # Q12: no entry was confirmed in an ensemble that starts here too, so it is replaced.
    if last.first_entry_id == first_entry_id:
        before = before[:-1]
    return replace(metadata, ensembles=(*before, Ensemble(first_entry_id, bookies)))


def taken_over(ledger_id: LedgerId) -> LedgerFenced:
    """The error of a writer whose ledger belongs to another client."""
    return LedgerFenced(
        f"Ledger {ledger_id} was opened, changed or deleted by another owner: reload the topic."
    )


class ChangeState(enum.Enum):
    """State of one change."""

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
    """Write the record if it is at version `expect`; then call `written` or `conflict`."""

    metadata: LedgerMetadata
    expect: int


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Read the record; then call `read` (of a recovery: `start`)."""


@dataclass(frozen=True, slots=True)
class EnsembleChanged:
    """The record has the new bookies."""

    record: VersionedMetadata
    replacements: Mapping[int, BookieId]


@dataclass(frozen=True, slots=True)
class ChangeFailed:
    """The ensemble cannot be changed, and the writer fails with this error."""

    error: LedgerError


ChangeEffect = WriteRecord | ReadRecord | EnsembleChanged | ChangeFailed


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
        """State of the change."""
        return self._state

    def start(self) -> ChangeEffect:
        """Choose bookies and write them into the record."""
        last = self._held.metadata.last_ensemble
        places = [place for place, bookie in self._failed.items() if last.bookies[place] == bookie]
        self._replacements = self._choose(last.bookies, places)
        # Q15: some replacements are a change.  None end the writer, with an error that depends on
        # the record: a bookie may have refused because another client is the owner.
        if not self._replacements:
            return ReadRecord()
        self._wanted = with_replacements(self._held.metadata, self._first, self._replacements)
        self._tries += 1
        self._move(ChangeState.WRITING)
        return WriteRecord(self._wanted, self._held.version)

    def written(self, record: VersionedMetadata) -> ChangeEffect:
        """End the change, as the write took effect."""
        self._move(ChangeState.CHANGED)
        return EnsembleChanged(record, self._replacements)

    def conflict(self) -> ChangeEffect:
        """Read the record again: another client changed it, or our answer was lost."""
        self._move(ChangeState.READING)
        return ReadRecord()

    def read(self, record: VersionedMetadata) -> ChangeEffect:
        """Decide by the record as it is now."""
        found = record.metadata
        # Q14: an OPEN record with the same last ensemble is still ours (another client rewrote an
        # earlier ensemble); then the change is tried again.
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

    def _give_up(self, error: LedgerError) -> ChangeFailed:
        self._move(ChangeState.GIVEN_UP)
        return ChangeFailed(error)

    def _move(self, to: ChangeState) -> None:
        self._state = _MOVES.move(self._state, to, "An ensemble change")
