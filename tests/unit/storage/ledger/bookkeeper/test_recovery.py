"""One recovery step by step: marked, fenced, read on, written back, closed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from config import bounds
from magnetar.protocol.ids import LedgerId
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.digest import OpenedEntry
from storage.ledger.bookkeeper.ensemble_change import ReadRecord, WriteRecord
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_store import VersionedMetadata
from storage.ledger.bookkeeper.recovery import (
    AskBookie,
    Recovery,
    RecoveryDone,
    RecoveryEffect,
    RecoveryFailed,
    RecoveryState,
    WriteBack,
)
from storage.ledger.store import LedgerAssertion
from tests.unit.storage.ledger.bookkeeper.test_adds import ledger

OK, NONE, NO_LEDGER = ReplyCode.OK, ReplyCode.NO_SUCH_ENTRY, ReplyCode.NO_SUCH_LEDGER
GONE, UNKNOWN = ReplyCode.DISCONNECTED, ReplyCode.STATE_UNKNOWN
SIZE = 10


def entry(entry_id: int, last_add_confirmed: int | None = None) -> OpenedEntry:
    """Entries of ten bytes each."""
    confirmed = entry_id - 1 if last_add_confirmed is None else last_add_confirmed
    return OpenedEntry(entry_id, confirmed, SIZE * (entry_id + 1), b"%010d" % entry_id)


class Case:
    """A recovery, with every request that was not answered yet."""

    def __init__(
        self,
        *quorums: int,
        state: LedgerState = LedgerState.OPEN,
        spare: Sequence[str] = (),
        window_bytes: int = bounds.RECOVERY_WINDOW_BYTES,
    ) -> None:
        self.spare = [BookieId(name) for name in spare]
        self.sealed: list[tuple[int, int, int, bytes]] = []
        self.machine = Recovery(LedgerId(9), self._seal, self._choose, window_bytes=window_bytes)
        self.metadata = replace(ledger(*quorums), state=state)
        self.asked: list[AskBookie] = []
        self.writes: list[WriteBack] = []
        self.other: list[RecoveryEffect] = []

    def _seal(self, entry_id: int, last: int, length: int, data: bytes) -> Sequence[bytes]:
        self.sealed.append((entry_id, last, length, data))
        return (data,)

    def _choose(
        self, ensemble: Sequence[BookieId], places: Sequence[int], failed: frozenset[BookieId]
    ) -> Mapping[int, BookieId]:
        left = [name for name in self.spare if name not in ensemble and name not in failed]
        return dict(zip(places, left, strict=False))

    def take(self, effects: list[RecoveryEffect]) -> None:
        for effect in effects:
            if isinstance(effect, AskBookie):
                self.asked.append(effect)
            elif isinstance(effect, WriteBack):
                self.writes.append(effect)
            else:
                self.other.append(effect)

    def start(self, version: int = 3) -> None:
        self.take(self.machine.start(VersionedMetadata(self.metadata, version)))

    def fencing(self) -> "Case":
        """The record is marked."""
        self.start()
        marked = self.written()
        assert marked.metadata.state is LedgerState.IN_RECOVERY
        return self

    def reading(self, last_add_confirmed: int = -1) -> "Case":
        """All are fenced, and know this much."""
        self.fencing()
        for place in range(self.metadata.ensemble_size):
            if self.machine.state is RecoveryState.FENCING:
                newest = last_add_confirmed + 1
                found = entry(newest) if last_add_confirmed >= 0 else None
                self.reply(f"b{place}", -1, OK if found else NONE, found)
        self.asked = [each for each in self.asked if each.read.entry_id >= 0]
        return self

    def written(self) -> WriteRecord:
        effect = self.other.pop(0)
        assert isinstance(effect, WriteRecord)
        stored = VersionedMetadata(effect.metadata, effect.expect + 1)
        self.take(self.machine.written(stored))
        return effect

    def reply(
        self, bookie: str, entry_id: int, code: ReplyCode, found: OpenedEntry | None = None
    ) -> None:
        request = next(
            each
            for each in self.asked
            if each.read.bookie == bookie and each.read.entry_id == entry_id
        )
        self.asked.remove(request)
        self.take(self.machine.replied(request, code, found))

    def give(self, *entry_ids: int) -> None:
        """Every copy of these is there; of what follows there is none."""
        for request in list(self.asked):
            if request not in self.asked:
                continue
            entry_id = request.read.entry_id
            if entry_id in entry_ids:
                self.reply(request.read.bookie, entry_id, OK, entry(entry_id))
            elif entry_id > max(entry_ids, default=-1):
                self.reply(request.read.bookie, entry_id, NONE)

    def write_reply(self, entry_id: int, bookie: str, code: ReplyCode = OK) -> None:
        request = next(
            each
            for each in self.writes
            if each.slot.bookie == bookie and each.add.entry_id == entry_id
        )
        self.writes.remove(request)
        self.take(self.machine.write_replied(request, code))

    def all_written(self) -> None:
        for each in list(self.writes):
            self.write_reply(each.add.entry_id, each.slot.bookie)

    def closing(self) -> LedgerMetadata:
        assert self.machine.state is RecoveryState.CLOSING
        effect = self.other[-1]
        assert isinstance(effect, WriteRecord)
        return effect.metadata

    def failure(self) -> str:
        assert self.machine.state is RecoveryState.FAILED
        effect = self.other[-1]
        assert isinstance(effect, RecoveryFailed)
        return str(effect.error)


def test_a_closed_ledger_is_done() -> None:
    case = Case(2, 2, 2, state=LedgerState.CLOSED)
    case.start()
    assert case.other == [RecoveryDone(VersionedMetadata(case.metadata, 3))]


def test_marked_before_anything_else() -> None:
    case = Case(2, 2, 2)
    case.start()
    assert case.other == [WriteRecord(replace(case.metadata, state=LedgerState.IN_RECOVERY), 3)]
    assert not case.asked
    case.written()
    assert [(each.read.bookie, each.fence) for each in case.asked] == [("b0", True), ("b1", True)]


def test_one_that_is_marked_already_is_fenced_at_once() -> None:
    case = Case(2, 2, 2, state=LedgerState.IN_RECOVERY)
    case.start()
    assert not case.other
    assert len(case.asked) == 2


@pytest.mark.parametrize("state", [LedgerState.OPEN, LedgerState.IN_RECOVERY])
def test_a_conflict_at_the_mark_begins_again(state: LedgerState) -> None:
    case = Case(2, 2, 2)
    case.start()
    case.take(case.machine.conflict())
    assert case.other.pop() == ReadRecord()
    case.metadata = replace(case.metadata, state=state)
    case.start(version=8)
    expected = RecoveryState.MARKING if state is LedgerState.OPEN else RecoveryState.FENCING
    assert case.machine.state is expected


@pytest.mark.parametrize("answer", [OK, NONE, NO_LEDGER])
def test_fencing_ends_when_answers_cover_all_write_sets(answer: ReplyCode) -> None:
    """3/2/2: one of each neighbouring pair, so any two of the three."""
    case = Case(3, 2, 2).fencing()
    found = entry(0) if answer is OK else None
    case.reply("b0", -1, answer, found)
    before = case.machine.state
    case.reply("b2", -1, answer, found)
    assert (before, case.machine.state) == (RecoveryState.FENCING, RecoveryState.READING)


@pytest.mark.parametrize("answer", [GONE, UNKNOWN, ReplyCode.IO_ERROR, ReplyCode.TIMED_OUT, OK])
def test_fencing_fails_when_answers_do_not_cover_all_write_sets(answer: ReplyCode) -> None:
    """OK without an entry is a damaged one."""
    case = Case(3, 2, 2).fencing()
    case.reply("b0", -1, answer)
    case.reply("b1", -1, NONE)
    assert case.machine.state is RecoveryState.FENCING
    case.reply("b2", -1, answer)
    assert "too few of its bookies answer" in case.failure()


def test_recovery_names_a_wrong_password() -> None:
    case = Case(2, 2, 2).fencing()
    case.reply("b0", -1, ReplyCode.UNAUTHORISED)
    assert "password" in case.failure()


def test_reading_starts_after_the_highest_last_add_confirmed() -> None:
    case = Case(3, 3, 3).fencing()
    case.reply("b1", -1, OK, entry(7))
    assert {
        each.read.entry_id for each in case.asked if each.fence and each.read.entry_id >= 0
    } == {*range(7, 7 + bounds.RECOVERY_FIRST_WINDOW_ENTRIES)}
    assert {each.read.entry_id for each in case.asked if not each.fence} == {6}


def test_or_at_the_start_of_the_last_ensemble() -> None:
    case = Case(2, 2, 2)
    new = (BookieId("n0"), BookieId("n1"))
    case.metadata = replace(case.metadata, ensembles=(*case.metadata.ensembles, Ensemble(5, new)))
    case.fencing()
    case.reply("n1", -1, NO_LEDGER)
    assert (
        min(each.read.entry_id for each in case.asked if each.fence and each.read.entry_id >= 0)
        == 5
    )


def test_the_length_is_read_where_the_last_ensemble_is_empty() -> None:
    case = Case(2, 2, 2)
    new = (BookieId("n0"), BookieId("n1"))
    case.metadata = replace(case.metadata, ensembles=(*case.metadata.ensembles, Ensemble(5, new)))
    case.fencing()
    case.reply("n0", -1, NO_LEDGER)
    case.reply("n0", 5, NO_LEDGER)
    assert case.machine.state is RecoveryState.READING
    case.reply("b0", 4, GONE)
    case.reply("b1", 4, OK, entry(4))
    closed = case.closing()
    assert (closed.last_entry_id, closed.length) == (4, 5 * SIZE)


def test_no_length_no_end() -> None:
    case = Case(2, 2, 2)
    new = (BookieId("n0"), BookieId("n1"))
    case.metadata = replace(case.metadata, ensembles=(*case.metadata.ensembles, Ensemble(5, new)))
    case.fencing()
    case.reply("n0", -1, NO_LEDGER)
    case.reply("n0", 5, NO_LEDGER)
    case.reply("b0", 4, GONE)
    case.reply("b1", 4, NONE)
    assert "last entry 4" in case.failure()


def test_an_empty_ledger() -> None:
    case = Case(2, 2, 2).reading()
    case.reply("b0", 0, NO_LEDGER)
    closed = case.closing()
    assert (closed.last_entry_id, closed.length, closed.state) == (-1, 0, LedgerState.CLOSED)
    case.written()
    assert isinstance(case.other[-1], RecoveryDone)
    assert case.machine.state is RecoveryState.DONE


def test_the_length_of_a_last_entry_that_others_than_the_newest_tell() -> None:
    """The newest one known to a bookie may be behind a gap: its length is not that of the end."""
    case = Case(3, 2, 2).fencing()
    case.reply("b2", -1, OK, entry(8, last_add_confirmed=5))
    case.reply("b1", -1, OK, entry(5, last_add_confirmed=4))
    case.reply("b0", 6, NONE)
    case.reply("b2", 5, OK, entry(5))
    closed = case.closing()
    assert (closed.last_entry_id, closed.length) == (5, 6 * SIZE)


@pytest.mark.parametrize(
    ("quorums", "replies", "state"),
    [
        ((2, 2, 2), [NONE], RecoveryState.CLOSING),
        ((3, 3, 2), [NONE], RecoveryState.READING),
        ((3, 3, 2), [NONE, NO_LEDGER], RecoveryState.CLOSING),
        ((3, 3, 2), [NONE, UNKNOWN, GONE], RecoveryState.FAILED),
        ((3, 3, 2), [GONE, NONE, ReplyCode.IO_ERROR], RecoveryState.FAILED),
        ((3, 3, 2), [UNKNOWN, NONE, NONE], RecoveryState.CLOSING),
        ((3, 3, 3), [NONE], RecoveryState.CLOSING),
        ((3, 3, 1), [NONE, NONE], RecoveryState.READING),
    ],
)
def test_when_an_entry_is_absent(
    quorums: tuple[int, int, int], replies: list[ReplyCode], state: RecoveryState
) -> None:
    case = Case(*quorums).reading()
    for place, code in enumerate(replies):
        case.reply(f"b{place}", 0, code)
    assert case.machine.state is state


def test_one_copy_is_enough_to_be_written_back() -> None:
    case = Case(3, 3, 2).reading()
    case.reply("b0", 0, NONE)
    case.reply("b1", 0, OK, entry(0))
    case.reply("b0", 1, NONE)
    before = case.machine.state
    case.reply("b2", 1, NONE)
    assert (before, case.machine.state) == (RecoveryState.READING, RecoveryState.WRITING_BACK)
    assert [each.slot.bookie for each in case.writes] == ["b0", "b1", "b2"]


def test_a_damaged_copy_is_no_answer() -> None:
    case = Case(2, 2, 2).reading()
    case.reply("b0", 0, OK)
    assert case.machine.state is RecoveryState.READING
    case.reply("b1", 0, OK)
    assert "entry 0" in case.failure()


def test_reads_fence_too() -> None:
    case = Case(2, 2, 2).reading()
    assert case.asked
    assert all(each.fence for each in case.asked)


def test_everything_found_is_written_back_with_what_is_known_to_be_confirmed() -> None:
    """And closed only when enough bookies have all of it."""
    case = Case(3, 3, 2).reading(last_add_confirmed=1)
    case.give(2, 3)
    assert [sealed[:3] for sealed in case.sealed] == [(2, 1, 30), (3, 1, 40)]
    assert {each.add.entry_id for each in case.writes} == {2, 3}
    case.write_reply(3, "b0")
    case.write_reply(3, "b1")
    case.write_reply(2, "b2")
    assert case.machine.state is RecoveryState.WRITING_BACK
    case.write_reply(2, "b1")
    closed = case.closing()
    assert (closed.last_entry_id, closed.length) == (3, 4 * SIZE)


def test_recovery_drops_entries_behind_a_gap() -> None:
    case = Case(2, 2, 2).reading()
    for request in list(case.asked):
        if request.read.entry_id == 2:
            case.reply(request.read.bookie, 2, OK, entry(2))
    case.reply("b0", 0, OK, entry(0))
    case.reply("b0", 1, NONE)
    assert {each.add.entry_id for each in case.writes} == {0}
    case.all_written()
    assert case.closing().last_entry_id == 0


def test_windows_follow_each_other() -> None:
    case = Case(2, 2, 2).reading()
    first = bounds.RECOVERY_FIRST_WINDOW_ENTRIES
    case.give(*range(first))
    case.all_written()
    assert case.machine.state is RecoveryState.READING
    ids = {each.read.entry_id for each in case.asked}
    assert ids == set(range(first, first + 4 * first))
    case.give(first)
    case.all_written()
    assert case.closing().last_entry_id == first


def test_windows_are_bounded_in_bytes() -> None:
    case = Case(2, 2, 2, window_bytes=3 * SIZE).reading()
    case.give(*range(bounds.RECOVERY_FIRST_WINDOW_ENTRIES))
    case.all_written()
    assert len({each.read.entry_id for each in case.asked}) == 3


def test_bookies_are_replaced_in_memory_and_written_with_the_close() -> None:
    case = Case(2, 2, 2, spare=["new"]).reading()
    case.give(0, 1)
    case.write_reply(0, "b0")
    case.write_reply(0, "b1")
    case.write_reply(1, "b1", GONE)
    assert [(each.add.entry_id, each.slot.bookie) for each in case.writes] == [
        (1, "b0"),
        (1, "new"),
    ]
    assert not case.other
    case.all_written()
    assert case.closing().ensembles == (
        Ensemble(0, (BookieId("b0"), BookieId("b1"))),
        Ensemble(1, (BookieId("b0"), BookieId("new"))),
    )


def test_reading_goes_on_where_the_record_says() -> None:
    """What this recovery chose has nothing that it did not write itself."""
    case = Case(2, 2, 2, spare=["new"]).reading()
    case.give(*range(bounds.RECOVERY_FIRST_WINDOW_ENTRIES))
    case.write_reply(0, "b1", GONE)
    case.all_written()
    assert case.machine.state is RecoveryState.READING
    assert {each.read.bookie for each in case.asked} == {"b0", "b1"}


def test_too_few_bookies_for_what_is_written_back() -> None:
    case = Case(2, 2, 2).reading()
    case.give(0)
    case.write_reply(0, "b1", GONE)
    assert "too few bookies" in case.failure()


def test_one_that_is_not_needed_may_be_missing() -> None:
    case = Case(3, 3, 2).reading()
    case.give(0)
    case.write_reply(0, "b1", GONE)
    assert case.machine.state is RecoveryState.WRITING_BACK
    case.write_reply(0, "b0")
    case.write_reply(0, "b2")
    assert case.closing().ensembles == case.metadata.ensembles


def test_a_bookie_that_knows_it_deleted_ends_the_recovery() -> None:
    case = Case(2, 2, 2, spare=["new"]).reading()
    case.give(0)
    case.write_reply(0, "b0", ReplyCode.FENCED)
    assert "FENCED" in case.failure()


def test_others_were_first() -> None:
    case = Case(2, 2, 2).reading()
    case.reply("b0", 0, NONE)
    case.take(case.machine.conflict())
    assert case.other.pop() == ReadRecord()
    case.metadata = replace(case.metadata, state=LedgerState.CLOSED, last_entry_id=17, length=170)
    case.start(version=30)
    assert case.other[-1] == RecoveryDone(VersionedMetadata(case.metadata, 30))


def test_another_record_begins_again_and_old_answers_do_not_count() -> None:
    case = Case(3, 3, 2).reading()
    late = next(each for each in case.asked if each.read.entry_id == 0)
    case.asked.remove(late)
    for bookie in ("b1", "b2"):
        case.reply(bookie, 0, NONE)
    case.asked.clear()
    case.take(case.machine.conflict())
    case.metadata = replace(case.metadata, state=LedgerState.IN_RECOVERY)
    case.start(version=30)
    states = [case.machine.state]
    for bookie in ("b0", "b1"):
        case.reply(bookie, -1, NONE)
    case.reply("b0", 0, NONE)
    case.take(case.machine.replied(late, NONE, None))
    states.append(case.machine.state)
    case.reply("b1", 0, NONE)
    states.append(case.machine.state)
    assert states == [RecoveryState.FENCING, RecoveryState.READING, RecoveryState.CLOSING]


def test_rounds_are_bounded() -> None:
    case = Case(2, 2, 2)
    for version in range(bounds.RECOVERY_ROUNDS):
        case.start(version)
        case.take(case.machine.conflict())
    case.start(99)
    assert "kept changing" in case.failure()


def test_no_way_back() -> None:
    case = Case(2, 2, 2).reading()
    with pytest.raises(LedgerAssertion):
        case.machine.conflict()
