"""The states of a transaction on a segment, and of an acknowledgement record: every pair of them.

A pair is a move that some events make, which is told here, or it is refused.
"""

import itertools
from collections.abc import Callable, Mapping

import pytest

from magnetar.protocol.ids import EARLIEST, Position
from tests.unit.txn.test_buffer_core import LOST, SEGMENT, T1, FakeLog, append, at
from txn.buffer_core import SegmentBufferCore
from txn.errors import TransactionAssertion
from txn.membership import MOVES, Member, Membership
from txn.pending_ack import AckState, PendingAck
from txn.pending_acks_core import PendingAcksCore
from txn.records import AckedPosition, AckRecord, Claim, TxnState

M, A = Membership, AckState
OPEN, COMMITTED, ABORTED = TxnState.OPEN, TxnState.COMMITTED, TxnState.ABORTED

LOADED = "scan found-open ready"
JOINED = "ready write durable is-open"
MEMBERSHIP_MOVES: Mapping[tuple[Membership, Membership], str] = {
    (M.SCANNED, M.LOADED): "scan found-open",
    (M.SCANNED, M.COMMITTED): "scan found-committed",
    (M.SCANNED, M.ABORTED): "scan found-aborted",
    (M.LOADED, M.CLAIMING): f"{LOADED} write",
    (M.LOADED, M.COMMITTED): f"{LOADED} told-committed",
    (M.LOADED, M.ABORTED): f"{LOADED} told-aborted",
    (M.LOADED, M.JUDGING): f"{LOADED} told-gone",
    (M.CLAIMING, M.CHECKING): "ready write durable",
    (M.CLAIMING, M.LOADED): f"{LOADED} write lost",
    (M.CLAIMING, M.UNPROVEN): "ready write lost",
    (M.CLAIMING, M.REFUSING): "ready write told-committed durable",
    (M.CLAIMING, M.COMMITTED): f"{LOADED} write told-committed durable",
    (M.CLAIMING, M.ABORTED): f"{LOADED} write told-aborted durable",
    (M.CLAIMING, M.JUDGING): f"{LOADED} write told-gone durable",
    (M.CHECKING, M.JOINED): JOINED,
    (M.CHECKING, M.LOADED): f"{LOADED} write durable unread",
    (M.CHECKING, M.UNPROVEN): "ready write durable unread",
    (M.CHECKING, M.REFUSING): "ready write durable is-aborted",
    (M.CHECKING, M.COMMITTED): f"{LOADED} write durable is-committed",
    (M.CHECKING, M.ABORTED): f"{LOADED} write durable is-aborted",
    (M.CHECKING, M.JUDGING): f"{LOADED} write durable is-gone",
    (M.UNPROVEN, M.CLAIMING): "ready write",
    (M.UNPROVEN, M.REFUSING): "ready write lost told-aborted",
    (M.JOINED, M.COMMITTED): f"{JOINED} append told-committed",
    (M.JOINED, M.ABORTED): f"{JOINED} append told-aborted",
    (M.JOINED, M.JUDGING): f"{JOINED} told-gone",
    (M.JOINED, M.REFUSING): f"{JOINED} told-aborted",
    (M.JUDGING, M.COMMITTED): f"{JOINED} told-gone judged-committed",
    (M.JUDGING, M.ABORTED): f"{JOINED} told-gone judged-aborted",
    (M.ABORTED, M.RECORDED): f"{JOINED} append told-aborted recorded",
}


class Noting(SegmentBufferCore):
    """Keeps its moves."""

    def __init__(self, log: FakeLog) -> None:
        super().__init__(SEGMENT, log)
        self.moves: list[tuple[Membership, Membership]] = []

    def _move(self, member: Member, to: Membership) -> None:
        self.moves.append((member.state, to))
        super()._move(member, to)


def membership_events(core: SegmentBufferCore, log: FakeLog) -> Mapping[str, Callable[[], object]]:
    def write() -> None:
        core.admit(T1)
        core.claim(T1, 5)

    return {
        "scan": lambda: core.scanned([Claim(T1, SEGMENT, 4, at(2))]),
        "found-open": lambda: core.header_loaded(T1, OPEN),
        "found-committed": lambda: core.header_loaded(T1, COMMITTED),
        "found-aborted": lambda: core.header_loaded(T1, ABORTED),
        "ready": lambda: core.loaded({}),
        "write": write,
        "durable": lambda: core.claim_durable(T1),
        "lost": lambda: core.claim_failed(T1, LOST),
        "unread": lambda: core.header_failed(T1, LOST),
        "is-open": lambda: core.header_checked(T1, OPEN),
        "is-committed": lambda: core.header_checked(T1, COMMITTED),
        "is-aborted": lambda: core.header_checked(T1, ABORTED),
        "is-gone": lambda: core.header_checked(T1, None),
        "append": lambda: append(core, log, T1),
        "told-committed": lambda: core.decided(T1, COMMITTED),
        "told-aborted": lambda: core.decided(T1, ABORTED),
        "told-gone": lambda: core.decided(T1, None),
        "judged-committed": lambda: core.aborted_read(T1, None),
        "judged-aborted": lambda: core.aborted_read(T1, at(4)),
        "recorded": lambda: core.aborted_recorded(T1, at(5)),
    }


@pytest.mark.parametrize(
    "move", list(itertools.product(M, M)), ids=lambda pair: f"{pair[0]}-{pair[1]}"
)
def test_a_transaction_on_a_segment(move: tuple[Membership, Membership]) -> None:
    if move not in MEMBERSHIP_MOVES:
        with pytest.raises(TransactionAssertion):
            MOVES.move(*move, "It")
        return
    log = FakeLog(5)
    core = Noting(log)
    events = membership_events(core, log)
    for event in MEMBERSHIP_MOVES[move].split():
        events[event]()
    assert core.moves[-1] == move


ACK_MOVES: Mapping[tuple[AckState, AckState], str] = {
    (A.RESERVED, A.PUTTING): "take put",
    (A.RESERVED, A.GONE): "take fail",
    (A.PUTTING, A.CONFIRMING): "take put stored",
    (A.PUTTING, A.RELEASED): "take put fail",
    (A.CONFIRMING, A.HELD): "take put stored proven",
    (A.CONFIRMING, A.RELEASED): "take put stored fail",
    (A.LOADED, A.HELD): "load open",
    (A.LOADED, A.APPLYING): "load commit",
    (A.LOADED, A.RELEASED): "load gone",
    (A.HELD, A.APPLYING): "take put stored proven commit",
    (A.HELD, A.RELEASED): "take put stored proven abort",
    (A.APPLYING, A.APPLIED): "load commit durable",
    (A.APPLIED, A.GONE): "load commit durable deleted",
    (A.RELEASED, A.GONE): "load abort deleted",
}


class NothingAcknowledged:
    """A cursor at its beginning."""

    mark_delete = EARLIEST

    def is_acknowledged(self, position: Position) -> bool:
        return False

    def ack_set(self, position: Position) -> list[int] | None:
        return None


class OneAck:
    """An acknowledgement and what may happen to it."""

    ack: PendingAck

    def __init__(self) -> None:
        self.core = PendingAcksCore(NothingAcknowledged())
        self.record = AckRecord(T1, SEGMENT, "s", 1, 1, False, (AckedPosition(at(0)),))

    def take(self) -> None:
        (self.ack,) = self.core.reserve(T1, self.record.acks, cumulative=False)

    def load(self) -> None:
        self.core.load(self.record)
        (self.ack,) = self.core._transactions[T1].acks

    def tell(self, event: str) -> None:
        core = self.core
        events: Mapping[str, Callable[[], object]] = {
            "take": self.take,
            "load": self.load,
            "put": lambda: core.putting(self.ack, self.record),
            "stored": lambda: core.stored([self.ack]),
            "proven": lambda: (core.confirmed([self.ack]), core.end_late([self.ack])),
            "fail": lambda: core.failed([self.ack]),
            "open": lambda: core.opened(T1),
            "commit": lambda: core.decided(T1, COMMITTED),
            "abort": lambda: core.decided(T1, ABORTED),
            "gone": lambda: core.decided(T1, None),
            "durable": lambda: core.durable([self.ack]),
            "deleted": lambda: core.deleted(self.ack),
        }
        events[event]()


@pytest.mark.parametrize(
    "move", list(itertools.product(A, A)), ids=lambda m: f"{m[0].name}-{m[1].name}"
)
def test_an_acknowledgement_record(move: tuple[AckState, AckState]) -> None:
    before, after = move
    if move not in ACK_MOVES:
        with pytest.raises(TransactionAssertion):
            PendingAck(T1, False, (), before).move(after)
        return
    one = OneAck()
    *earlier, last = ACK_MOVES[move].split()
    for event in earlier:
        one.tell(event)
    assert one.ack.state is before
    one.tell(last)
    assert one.ack.state is after
