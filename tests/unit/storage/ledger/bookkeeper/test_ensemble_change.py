"""The record of an ensemble change: what is written, and when the writer is not the owner."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.ensemble_change import (
    ChangeFailed,
    ChangeState,
    EnsembleChange,
    EnsembleChanged,
    ReadRecord,
    WriteRecord,
    with_replacements,
)
from storage.ledger.bookkeeper.ensemble_choice import NotEnoughBookies
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_store import VersionedMetadata
from storage.ledger.store import LedgerAssertion, LedgerError, LedgerFenced
from tests.unit.storage.ledger.bookkeeper.test_adds import ledger

B0, B1, B2 = (BookieId(f"b{n}") for n in range(3))
NEW, NEWER = BookieId("new"), BookieId("newer")
OPEN = ledger(2, 2, 2)


def held(metadata: LedgerMetadata = OPEN, version: int = 7) -> VersionedMetadata:
    return VersionedMetadata(metadata, version)


class Choices:
    def __init__(self, *names: BookieId) -> None:
        self.names = list(names)
        self.asked: list[tuple[Sequence[BookieId], Sequence[int]]] = []

    def __call__(
        self, ensemble: Sequence[BookieId], places: Sequence[int]
    ) -> Mapping[int, BookieId]:
        self.asked.append((ensemble, list(places)))
        return dict(zip(places, self.names, strict=False))


def change(
    *names: BookieId, last: int = 4, record: VersionedMetadata | None = None
) -> EnsembleChange:
    return EnsembleChange(LedgerId(9), record or held(), last, {1: B1}, Choices(*names))


def test_a_new_ensemble_after_the_last_add_confirmed() -> None:
    effect = change(NEW).start()
    assert isinstance(effect, WriteRecord)
    assert effect.expect == 7
    assert effect.metadata == replace(
        OPEN, ensembles=(Ensemble(0, (B0, B1)), Ensemble(5, (B0, NEW)))
    )


def test_one_that_starts_there_already_is_replaced() -> None:
    before = (Ensemble(0, (B0, B1)), Ensemble(5, (B0, B1)))
    twice = with_replacements(replace(OPEN, ensembles=before), 5, {1: NEW})
    assert twice.ensembles == (Ensemble(0, (B0, B1)), Ensemble(5, (B0, NEW)))
    empty = with_replacements(OPEN, 0, {0: NEW})
    assert empty.ensembles == (Ensemble(0, (NEW, B1)),)


@pytest.mark.parametrize(("first", "new"), [(4, {1: NEW}), (6, {1: B0})])
def test_invalid_replacement_is_a_defect(first: int, new: Mapping[int, BookieId]) -> None:
    two = replace(OPEN, ensembles=(Ensemble(0, (B1, B2)), Ensemble(5, (B0, B1))))
    with pytest.raises(LedgerAssertion):
        with_replacements(two, first, new)


def test_written() -> None:
    one = change(NEW)
    effect = one.start()
    assert isinstance(effect, WriteRecord)
    stored = held(effect.metadata, 8)
    assert one.written(stored) == EnsembleChanged(stored, {1: NEW})
    assert one.state is ChangeState.CHANGED
    with pytest.raises(LedgerAssertion):
        one.conflict()


def test_a_conflict_with_an_open_record_is_tried_again_on_top_of_it() -> None:
    old = (Ensemble(0, (B1, B2)), Ensemble(3, (B0, B1)))
    one = change(NEW, record=held(replace(OPEN, ensembles=old)))
    one.start()
    assert one.conflict() == ReadRecord()
    moved = (Ensemble(0, (NEWER, B2)), Ensemble(3, (B0, B1)))
    effect = one.read(held(replace(OPEN, ensembles=moved), 12))
    assert isinstance(effect, WriteRecord)
    assert effect.expect == 12
    assert effect.metadata.ensembles == (*moved, Ensemble(5, (B0, NEW)))


@pytest.mark.parametrize("state", [LedgerState.IN_RECOVERY, LedgerState.CLOSED])
def test_a_conflict_with_another_owner_is_the_end(state: LedgerState) -> None:
    one = change(NEW)
    one.start()
    one.conflict()
    effect = one.read(held(replace(OPEN, state=state), 8))
    assert isinstance(effect, ChangeFailed)
    assert isinstance(effect.error, LedgerFenced)
    assert one.state is ChangeState.GIVEN_UP


def test_another_last_ensemble_is_another_owner_too() -> None:
    one = change(NEW)
    one.start()
    one.conflict()
    effect = one.read(held(replace(OPEN, ensembles=(Ensemble(0, (B0, NEWER)),)), 8))
    assert isinstance(effect, ChangeFailed)
    assert isinstance(effect.error, LedgerFenced)


def test_an_own_write_whose_answer_was_lost_is_found() -> None:
    one = change(NEW)
    effect = one.start()
    assert isinstance(effect, WriteRecord)
    one.conflict()
    stored = held(effect.metadata, 8)
    assert one.read(stored) == EnsembleChanged(stored, {1: NEW})


def test_change_without_bookies_fails_with_not_enough_bookies() -> None:
    made = change()
    assert isinstance(made.start(), ReadRecord)
    effect = made.read(held())
    assert isinstance(effect, ChangeFailed)
    assert isinstance(effect.error, NotEnoughBookies)


@pytest.mark.parametrize(
    "found",
    [
        replace(OPEN, state=LedgerState.IN_RECOVERY),
        replace(OPEN, state=LedgerState.CLOSED, last_entry_id=3),
        replace(OPEN, ensembles=(Ensemble(0, (B0, NEW)),)),
    ],
)
def test_change_without_bookies_by_a_former_owner_reports_fencing(found: LedgerMetadata) -> None:
    made = change()
    made.start()
    effect = made.read(held(found, version=8))
    assert isinstance(effect, ChangeFailed)
    assert isinstance(effect.error, LedgerFenced)


def test_some_of_several() -> None:
    one = EnsembleChange(LedgerId(9), held(), 4, {0: B0, 1: B1}, Choices(NEW))
    effect = one.start()
    assert isinstance(effect, WriteRecord)
    assert effect.metadata.last_ensemble == Ensemble(5, (NEW, B1))


def test_only_places_that_still_have_the_bookie_are_asked_for() -> None:
    choices = Choices(NEW)
    EnsembleChange(LedgerId(9), held(), 4, {0: BookieId("gone"), 1: B1}, choices).start()
    assert choices.asked == [((B0, B1), [1])]


def test_conflicts_are_bounded() -> None:
    one = change(NEW)
    effect = one.start()
    for version in range(bounds.RECORD_CHANGE_TRIES - 1):
        one.conflict()
        effect = one.read(held(version=20 + version))
        assert isinstance(effect, WriteRecord)
    one.conflict()
    effect = one.read(held(version=99))
    assert isinstance(effect, ChangeFailed)
    assert not isinstance(effect.error, LedgerFenced)
    assert isinstance(effect.error, LedgerError)
