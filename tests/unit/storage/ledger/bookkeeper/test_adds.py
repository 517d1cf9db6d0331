"""Acknowledgements, order, and what an ensemble change does to pending adds."""

import pytest

from config import bounds
from storage.ledger.bookkeeper.adds import Adds, PendingAdd, Slot, Todo, WriterState
from storage.ledger.bookkeeper.bookie_client import ReplyCode
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
)
from storage.ledger.store import LedgerAssertion, LedgerError

OK, IO, GONE = ReplyCode.OK, ReplyCode.IO_ERROR, ReplyCode.DISCONNECTED
NEW = BookieId("new")


def nobody(_entry_id: int, _error: LedgerError | None) -> None:
    """Nobody waits."""


def ledger(ensemble_size: int, write_quorum: int, ack_quorum: int) -> LedgerMetadata:
    bookies = tuple(BookieId(f"b{place}") for place in range(ensemble_size))
    first = (Ensemble(0, bookies),)
    return LedgerMetadata(
        ensemble_size, write_quorum, ack_quorum, first, DigestType.CRC32C, b"secret"
    )


class Writer:
    """Adds, with every request that was sent."""

    def __init__(self, *quorums: int, max_changes: int = bounds.ENSEMBLE_CHANGES) -> None:
        self.adds = Adds(ledger(*quorums), max_changes=max_changes)
        self.sent: list[tuple[PendingAdd, Slot]] = []

    def add(self, size: int = 10) -> int:
        add = self.adds.add(size, nobody)
        add.body = (b"body of %d" % add.entry_id,)
        self.sent += [(add, slot) for slot in self.adds.slots_of(add.entry_id)]
        return add.entry_id

    def reply(self, entry_id: int, bookie: str, code: ReplyCode = OK) -> Todo:
        for request in self.sent:
            add, slot = request
            if add.entry_id == entry_id and slot.bookie == bookie:
                self.sent.remove(request)
                return self.adds.replied(add, slot, code)
        raise AssertionError(f"entry {entry_id} was not sent to {bookie}")

    def confirmed(self) -> list[int]:
        found = []
        while (add := self.adds.next_confirmed()) is not None:
            found.append(add.entry_id)
        return found

    def replace(self, replacements: dict[int, str]) -> list[tuple[int, str]]:
        new = {place: BookieId(name) for place, name in replacements.items()}
        resent = self.adds.replace(new)
        self.sent += resent
        return [(add.entry_id, slot.bookie) for add, slot in resent]

    def to(self, entry_id: int) -> list[str]:
        return [slot.bookie for slot in self.adds.slots_of(entry_id)]


def test_ids_lengths_and_stripes() -> None:
    writer = Writer(3, 2, 2)
    assert [writer.add(size) for size in (5, 0, 7)] == [0, 1, 2]
    assert (writer.adds.length, writer.adds.confirmed_length) == (12, 0)
    assert [writer.to(n) for n in range(4)] == [
        ["b0", "b1"],
        ["b1", "b2"],
        ["b2", "b0"],
        ["b0", "b1"],
    ]


def test_complete_at_the_ack_quorum() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    assert writer.reply(0, "b2") is Todo.NOTHING
    assert writer.confirmed() == []
    assert writer.reply(0, "b0") is Todo.CONFIRM
    assert writer.confirmed() == [0]
    assert writer.reply(0, "b1") is Todo.NOTHING
    assert (writer.adds.last_confirmed, writer.adds.confirmed_length) == (0, 10)


def test_confirmed_in_order_from_the_head() -> None:
    writer = Writer(2, 2, 2)
    for _ in range(3):
        writer.add()
    for entry_id in (2, 1):
        assert writer.reply(entry_id, "b0") is Todo.NOTHING
        assert writer.reply(entry_id, "b1") is Todo.NOTHING
    assert writer.confirmed() == []
    assert writer.adds.last_confirmed == -1
    writer.reply(0, "b0")
    assert writer.reply(0, "b1") is Todo.CONFIRM
    assert writer.confirmed() == [0, 1, 2]
    assert (writer.adds.pending, writer.adds.pending_bytes) == (0, 0)


def test_a_failure_asks_for_a_change_and_stops_confirming() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    writer.reply(0, "b0")
    assert writer.reply(0, "b1", IO) is Todo.CHANGE
    assert writer.adds.begin_change() == {1: "b1"}
    assert writer.adds.state is WriterState.CHANGING_ENSEMBLE
    assert writer.reply(0, "b2") is Todo.NOTHING
    assert writer.confirmed() == []
    writer.replace({1: NEW})
    assert writer.adds.end_change() is Todo.CONFIRM
    assert writer.confirmed() == [0]


def test_entries_of_the_place_are_sent_again_and_no_others() -> None:
    writer = Writer(3, 2, 2)
    for _ in range(4):
        writer.add()
    writer.reply(0, "b1", IO)
    writer.adds.begin_change()
    assert writer.replace({1: NEW}) == [(0, NEW), (1, NEW), (3, NEW)]
    assert {request[0].body for request in writer.sent if request[1].bookie == NEW} == {
        (b"body of 0",),
        (b"body of 1",),
        (b"body of 3",),
    }
    writer.adds.end_change()
    assert writer.to(4) == [NEW, "b2"]


def test_ack_of_a_replaced_bookie_does_not_count() -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    writer.add()
    writer.reply(1, "b0")
    writer.reply(1, "b1")
    writer.reply(0, "b0")
    writer.reply(0, "b1", GONE)
    writer.adds.begin_change()
    writer.replace({1: NEW})
    assert writer.adds.end_change() is Todo.CONFIRM
    assert writer.confirmed() == []
    assert writer.reply(0, NEW) is Todo.CONFIRM
    assert writer.confirmed() == [0]
    writer.reply(1, NEW)
    assert writer.confirmed() == [1]


def test_late_replies_of_a_replaced_bookie_do_not_count() -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    writer.add()
    writer.reply(0, "b0")
    writer.reply(1, "b1", GONE)
    writer.adds.begin_change()
    writer.replace({1: NEW})
    writer.adds.end_change()
    assert writer.reply(0, "b1") is Todo.NOTHING
    assert writer.confirmed() == []
    assert writer.adds.state is WriterState.OPEN
    assert writer.reply(0, NEW) is Todo.CONFIRM


def test_not_even_when_the_bookie_comes_back() -> None:
    """It is another slot: what the first one was asked is no answer for the second one."""
    writer = Writer(2, 2, 2)
    writer.add()
    (first, old) = next(request for request in writer.sent if request[1].bookie == "b1")
    for bookie, other in (("b1", NEW), (NEW, "b1")):
        writer.reply(0, bookie, GONE)
        writer.adds.begin_change()
        writer.replace({1: other})
        writer.adds.end_change()
    writer.reply(0, "b0")
    assert writer.adds.replied(first, old, OK) is Todo.NOTHING
    assert writer.confirmed() == []


def test_failures_during_a_change_are_dealt_with_first() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    writer.reply(0, "b0", GONE)
    writer.adds.begin_change()
    assert writer.reply(0, "b1", GONE) is Todo.NOTHING
    writer.replace({0: NEW})
    assert writer.adds.end_change() is Todo.CHANGE
    assert writer.adds.state is WriterState.CHANGING_ENSEMBLE
    assert writer.adds.begin_change() == {1: "b1"}
    assert writer.adds.tried == {"b0", "b1"}
    writer.replace({1: "newer"})
    assert writer.adds.end_change() is Todo.CONFIRM


def test_failures_of_what_is_replaced_meanwhile_are_done_with() -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    writer.add()
    writer.reply(0, "b0", GONE)
    writer.adds.begin_change()
    writer.reply(1, "b0", GONE)
    writer.replace({0: NEW})
    assert writer.adds.end_change() is Todo.CONFIRM


def test_a_failure_after_confirmation_waits_for_the_next_add() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    writer.reply(0, "b0")
    writer.reply(0, "b1")
    assert writer.confirmed() == [0]
    assert not writer.adds.change_due
    assert writer.reply(0, "b2", IO) is Todo.NOTHING
    assert writer.adds.change_due
    assert writer.adds.begin_change() == {2: "b2"}


def test_a_failure_of_a_complete_but_waiting_entry_asks_for_a_change() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    writer.add()
    writer.reply(1, "b0")
    writer.reply(1, "b1")
    assert writer.reply(1, "b2", ReplyCode.FENCED) is Todo.CHANGE


@pytest.mark.parametrize(
    "code",
    [
        ReplyCode.FENCED,
        ReplyCode.UNAUTHORISED,
        ReplyCode.BAD_REQUEST,
        ReplyCode.BAD_VERSION,
        ReplyCode.TOO_LARGE,
    ],
)
def test_fatal_reply_code_fails_all_pending_adds(code: ReplyCode) -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    writer.add()
    assert writer.reply(0, "b0", code) is Todo.FAIL
    assert [add.entry_id for add in writer.adds.fail()] == [0, 1]
    assert writer.adds.pending_bytes == 0
    assert writer.reply(0, "b1") is Todo.NOTHING
    assert writer.reply(0, "b2") is Todo.NOTHING
    assert writer.confirmed() == []
    assert writer.adds.skip() == 2


def test_fencing_ends_the_writer_during_a_change_too() -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    writer.reply(0, "b0", GONE)
    writer.adds.begin_change()
    assert writer.reply(0, "b1", ReplyCode.FENCED) is Todo.FAIL


@pytest.mark.parametrize(
    "code",
    [
        ReplyCode.IO_ERROR,
        ReplyCode.READ_ONLY,
        ReplyCode.TOO_MANY_REQUESTS,
        ReplyCode.TIMED_OUT,
        ReplyCode.STATE_UNKNOWN,
        ReplyCode.DISCONNECTED,
        ReplyCode.OTHER,
        ReplyCode.NO_SUCH_LEDGER,
    ],
)
def test_retryable_reply_code_changes_the_ensemble(code: ReplyCode) -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    assert writer.reply(0, "b0", code) is Todo.CHANGE


def test_a_place_that_is_kept_fails_nothing_that_can_do_without() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    writer.reply(0, "b0", GONE)
    writer.reply(0, "b1", GONE)
    assert writer.adds.begin_change() == {0: "b0", 1: "b1"}
    assert writer.replace({0: NEW}) == [(0, NEW)]
    assert writer.adds.end_change() is Todo.CONFIRM
    writer.reply(0, NEW)
    assert writer.reply(0, "b2") is Todo.CONFIRM
    assert writer.confirmed() == [0]
    writer.add()
    assert writer.reply(1, "b1", GONE) is Todo.NOTHING
    assert writer.reply(1, "b2", GONE) is Todo.CHANGE
    assert writer.adds.begin_change() == {1: "b1", 2: "b2"}


def test_an_entry_that_cannot_do_without_asks_again() -> None:
    writer = Writer(3, 3, 3)
    writer.add()
    writer.reply(0, "b0", GONE)
    writer.reply(0, "b1", GONE)
    writer.adds.begin_change()
    writer.replace({0: NEW})
    assert writer.adds.end_change() is Todo.CHANGE
    assert writer.adds.begin_change() == {1: "b1"}


def test_failed_bookie_is_not_retried_before_there_is_progress() -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    writer.reply(0, "b0", GONE)
    writer.adds.begin_change()
    writer.replace({0: NEW})
    writer.adds.end_change()
    writer.reply(0, NEW, GONE)
    writer.adds.begin_change()
    assert writer.adds.tried == {"b0", NEW}
    writer.replace({0: "newer"})
    writer.adds.end_change()
    writer.reply(0, "newer")
    writer.reply(0, "b1")
    assert writer.confirmed() == [0]
    writer.add()
    writer.reply(1, "newer", GONE)
    writer.adds.begin_change()
    assert writer.adds.tried == {"newer"}


def test_changes_are_bounded() -> None:
    writer = Writer(2, 2, 2, max_changes=2)
    writer.add()
    for name in ("x", "y"):
        writer.reply(0, writer.to(0)[0], GONE)
        writer.adds.begin_change()
        writer.replace({0: name})
        writer.adds.end_change()
    writer.reply(0, "y", GONE)
    with pytest.raises(LedgerError, match="changed 2 times"):
        writer.adds.begin_change()


def test_bodies_are_let_go_when_confirmed() -> None:
    writer = Writer(3, 3, 2)
    writer.add()
    waiting = writer.sent[2][0]
    writer.reply(0, "b0")
    writer.reply(0, "b1")
    writer.confirmed()
    assert waiting.body == ()


def test_ending() -> None:
    writer = Writer(2, 2, 2)
    writer.add()
    with pytest.raises(LedgerAssertion):
        writer.adds.begin_close()
    writer.reply(0, "b0")
    writer.reply(0, "b1")
    writer.confirmed()
    writer.adds.begin_close()
    writer.adds.closed()
    assert writer.adds.state is WriterState.CLOSED
    with pytest.raises(LedgerAssertion):
        writer.adds.fail()
