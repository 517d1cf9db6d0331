"""The write side of a segment, event by event.  Named for the rules it keeps."""

import pytest

from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import InternalError
from magnetar.protocol.txn_id import TxnId
from txn.buffer_core import SegmentBufferCore
from txn.buffer_effects import (
    Admission,
    AdmitWrites,
    DeleteClaims,
    Effect,
    ForgetAborted,
    MaxReadPositionMoved,
    PutClaim,
    ReadAborted,
    ReadHeader,
    RecordAborted,
    RefuseWrites,
    StopFollowing,
    StopOwner,
)
from txn.errors import TransactionAssertion
from txn.membership import Membership
from txn.records import Claim, TxnState

SEGMENT = "segment://t/n/x/0000-ffff-0"
T1, T2 = TxnId(1, 0), TxnId(1, 1)
OPEN, COMMITTED, ABORTED = TxnState.OPEN, TxnState.COMMITTED, TxnState.ABORTED
LOST = InternalError("gone")


class FakeLog:
    """Entries of one ledger, durable one by one."""

    def __init__(self, entries: int = 0) -> None:
        self.entries = entries

    @property
    def last_confirmed(self) -> Position:
        return Position(3, self.entries - 1)

    def previous_position(self, position: Position) -> Position:
        return Position(position.ledger_id, position.entry_id - 1)

    def confirm(self) -> Position:
        self.entries += 1
        return self.last_confirmed


def loaded_core(
    log: FakeLog, *claims: Claim, aborted: dict[TxnId, Position] | None = None
) -> SegmentBufferCore:
    core = SegmentBufferCore(SEGMENT, log)
    core.scanned(claims)
    for claim in claims:
        core.header_loaded(claim.txn, OPEN)
    core.loaded(aborted or {})
    return core


def effects(core: SegmentBufferCore) -> list[Effect]:
    return list(core.take_effects())


def joined(core: SegmentBufferCore, txn: TxnId, epoch: int = 1) -> None:
    assert core.admit(txn) is Admission.WAITS
    core.claim(txn, epoch)
    core.claim_durable(txn)
    core.header_checked(txn, OPEN)
    assert effects(core) == [PutClaim(txn), ReadHeader(txn), AdmitWrites(txn)]


def append(core: SegmentBufferCore, log: FakeLog, txn: TxnId) -> Position:
    assert core.admit(txn) is Admission.JOINED
    core.issued(txn)
    position = log.confirm()
    core.appended(txn, position)
    return position


def at(entry_id: int) -> Position:
    return Position(3, entry_id)


def test_w1_w2_a_write_waits_for_its_claim_and_then_for_one_header_read() -> None:
    core = loaded_core(FakeLog(5))
    assert core.admit(T1) is Admission.WAITS
    assert core.admit(T1) is Admission.WAITS
    assert effects(core) == [PutClaim(T1)]
    assert core.claim(T1, 7) == Claim(T1, SEGMENT, 7, at(4))
    assert effects(core) == []
    core.claim_durable(T1)
    assert effects(core) == [ReadHeader(T1)]
    assert core.admit(T1) is Admission.WAITS
    core.header_checked(T1, OPEN)
    assert effects(core) == [AdmitWrites(T1)]
    assert core.admit(T1) is Admission.JOINED


def test_an_entry_appended_without_joining_is_a_defect() -> None:
    core = loaded_core(FakeLog())
    core.admit(T1)
    with pytest.raises(TransactionAssertion):
        core.issued(T1)


@pytest.mark.parametrize("state", [COMMITTED, ABORTED, None])
def test_w2_ended_before_the_claim_is_refused_and_only_the_own_claim_goes(
    state: TxnState | None,
) -> None:
    core = loaded_core(FakeLog(1))
    core.admit(T1)
    core.claim(T1, 7)
    core.claim_durable(T1)
    effects(core)
    core.header_checked(T1, state)
    assert effects(core) == [RefuseWrites(T1, None), DeleteClaims(T1, (7,))]
    assert core.admit(T1) is Admission.ENDED
    core.claims_deleted(T1)
    assert effects(core) == [StopFollowing(T1)]
    assert core.admit(T1) is Admission.ENDED
    assert not core.is_aborted(T1)


def test_w3_a_loaded_claim_pins_and_permits_nothing_until_the_own_one_is_put() -> None:
    log = FakeLog(10)
    core = loaded_core(log, Claim(T1, SEGMENT, 4, at(2)), Claim(T1, SEGMENT, 3, at(6)))
    assert core.max_read_position == at(2)
    assert core.admit(T1) is Admission.WAITS
    core.claim(T1, 5)
    core.claim_durable(T1)
    core.header_checked(T1, OPEN)
    append(core, log, T1)
    assert core.max_read_position == at(2)
    effects(core)
    core.decided(T1, COMMITTED)
    assert DeleteClaims(T1, (3, 4, 5)) in effects(core)
    assert core.max_read_position == at(10)


def test_w3_a_loaded_transaction_that_ended_before_the_check_is_finished() -> None:
    core = loaded_core(FakeLog(10), Claim(T1, SEGMENT, 4, at(2)))
    core.admit(T1)
    core.claim(T1, 5)
    core.claim_durable(T1)
    effects(core)
    core.header_checked(T1, ABORTED)
    assert RecordAborted(T1, at(9)) in effects(core)
    assert core.is_aborted(T1)
    core.aborted_recorded(T1, at(9))
    assert effects(core) == [DeleteClaims(T1, (4, 5))]


def test_w4_an_append_in_flight_while_the_abort_is_being_cleaned_up() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    append(core, log, T1)
    core.issued(T1)
    effects(core)
    core.decided(T1, ABORTED)
    assert core.is_aborted(T1)
    assert core.max_read_position == at(5)
    assert not any(isinstance(each, RecordAborted | DeleteClaims) for each in effects(core))
    core.appended(T1, log.confirm())
    assert RecordAborted(T1, at(6)) in effects(core)


def test_w4_a_failed_append_is_decided_too() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    core.issued(T1)
    core.decided(T1, ABORTED)
    assert not any(isinstance(each, RecordAborted) for each in effects(core))
    core.not_appended(T1)
    assert RecordAborted(T1, at(4)) in effects(core)


def test_w4_an_unknown_outcome_stops_the_owner_for_good() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    core.issued(T1)
    core.admit(T2)
    effects(core)
    core.append_unknown(LOST)
    assert effects(core) == [RefuseWrites(T2, LOST), StopOwner(LOST)]
    core.decided(T1, ABORTED)
    core.claim_durable(T2)
    core.prune(100)
    core.stray(TxnId(2, 2), [1], ABORTED)
    assert core.admit(T1) is Admission.STOPPED
    assert effects(core) == []
    log.confirm()
    assert core.max_read_position == at(4)


def test_w5_the_aborted_record_is_durable_before_claims_go() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    append(core, log, T1)
    effects(core)
    core.decided(T1, ABORTED)
    assert effects(core) == [
        RefuseWrites(T1, None),
        RefuseWrites(T1, None),
        MaxReadPositionMoved(),
        RecordAborted(T1, at(5)),
    ]
    core.claims_deleted(T1)
    assert core.members[T1].state is Membership.ABORTED
    core.aborted_recorded(T1, at(8))
    assert effects(core) == [DeleteClaims(T1, (1,))]
    assert core.aborted == {T1: at(8)}
    core.claims_deleted(T1)
    assert effects(core) == [StopFollowing(T1)]
    assert core.is_aborted(T1)


def test_w9_a_header_that_is_gone_is_judged_by_the_aborted_record() -> None:
    log = FakeLog(5)
    for up_to, aborted in ((at(5), True), (None, False)):
        core = loaded_core(log, Claim(T1, SEGMENT, 1, at(2)))
        core.decided(T1, None)
        assert ReadAborted(T1) in effects(core)
        assert core.admit(T1) is Admission.ENDED
        assert core.max_read_position == at(2)
        core.aborted_read(T1, up_to)
        assert core.max_read_position == at(4)
        assert core.is_aborted(T1) is aborted


def test_w9_a_claim_without_header_is_void_at_load() -> None:
    core = SegmentBufferCore(SEGMENT, FakeLog(5))
    core.scanned([Claim(T1, SEGMENT, 1, at(0)), Claim(T2, SEGMENT, 1, at(0))])
    core.header_loaded(T1, None)
    core.header_loaded(T2, None)
    core.loaded({T2: at(3)})
    assert core.max_read_position == at(4)
    assert not core.is_aborted(T1)
    assert core.is_aborted(T2)
    assert DeleteClaims(T1, (1,)) in effects(core)


def test_decision_during_the_load_outranks_the_header_read_before() -> None:
    core = SegmentBufferCore(SEGMENT, FakeLog(5))
    core.scanned([Claim(T1, SEGMENT, 1, at(0)), Claim(T2, SEGMENT, 1, at(1))])
    core.decided(T1, ABORTED)
    core.header_loaded(T1, OPEN)
    core.header_loaded(T2, OPEN)
    core.decided(T2, COMMITTED)
    core.loaded({})
    assert core.max_read_position == at(4)
    assert core.is_aborted(T1)


def test_loading_with_a_header_unread_is_a_defect() -> None:
    core = SegmentBufferCore(SEGMENT, FakeLog(5))
    core.scanned([Claim(T1, SEGMENT, 1, at(0))])
    with pytest.raises(TransactionAssertion):
        core.loaded({})


def test_w11_strays_of_ended_transactions_are_cleaned_up_and_open_ones_left() -> None:
    core = loaded_core(FakeLog(5))
    core.stray(T1, [1, 2], OPEN)
    assert effects(core) == []
    core.stray(T1, [1, 2], ABORTED)
    assert RecordAborted(T1, at(4)) in effects(core)
    core.stray(T2, [3], None)
    assert DeleteClaims(T2, (3,)) in effects(core)
    assert not core.is_aborted(T2)


def test_w13_the_pin_is_there_from_the_first_append_and_becomes_exact() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    assert core.max_read_position == at(4)
    core.issued(T1)
    log.confirm()
    log.confirm()
    assert core.max_read_position == at(4)
    core.appended(T1, log.confirm())
    assert effects(core) == [MaxReadPositionMoved()]
    assert core.max_read_position == at(6)
    log.confirm()
    assert core.max_read_position == at(6)


def test_a_first_append_that_failed_holds_nothing_back() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    core.issued(T1)
    core.issued(T1)
    log.confirm()
    core.not_appended(T1)
    assert core.max_read_position == at(4)
    core.not_appended(T1)
    assert effects(core) == [MaxReadPositionMoved()]
    assert core.max_read_position == at(5)


def test_a_claim_whose_append_never_happened_goes_without_an_aborted_record() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    core.decided(T1, ABORTED)
    assert effects(core)[-1] == DeleteClaims(T1, (1,))
    assert not core.is_aborted(T1)
    assert core.admit(T1) is Admission.ENDED


def test_a_send_between_commit_and_its_watch_is_taken_and_after_it_refused() -> None:
    log = FakeLog(5)
    core = loaded_core(log)
    joined(core, T1)
    append(core, log, T1)
    append(core, log, T1)
    core.issued(T1)
    core.decided(T1, COMMITTED)
    assert core.admit(T1) is Admission.ENDED
    core.claims_deleted(T1)
    late = log.confirm()
    core.appended(T1, late)
    assert core.max_read_position == late
    assert not core.is_aborted(T1)


def test_a_first_send_between_commit_and_its_watch_holds_nothing_back() -> None:
    """Its entry becomes durable after the end is known, and after the transaction is forgotten."""
    for forgotten in (False, True):
        log = FakeLog(5)
        core = loaded_core(log)
        joined(core, T1)
        core.issued(T1)
        core.decided(T1, COMMITTED)
        if forgotten:
            core.claims_deleted(T1)
        late = log.confirm()
        core.appended(T1, late)
        assert core.max_read_position == late
        assert not core.is_aborted(T1)


@pytest.mark.parametrize("durable", [True, False])
def test_end_decided_while_the_claim_is_put_is_not_lost(durable: bool) -> None:
    core = loaded_core(FakeLog(1))
    core.admit(T1)
    core.claim(T1, 2)
    core.decided(T1, COMMITTED)
    effects(core)
    if durable:
        core.claim_durable(T1)
    else:
        core.claim_failed(T1, LOST)
    assert effects(core) == [RefuseWrites(T1, None), DeleteClaims(T1, (2,))]


def test_a_claim_of_unknown_outcome_is_put_again_and_deleted_at_the_end() -> None:
    core = loaded_core(FakeLog(1))
    core.admit(T1)
    core.claim(T1, 2)
    effects(core)
    core.claim_failed(T1, LOST)
    assert effects(core) == [RefuseWrites(T1, LOST)]
    assert core.members[T1].state is Membership.UNPROVEN
    assert core.admit(T1) is Admission.WAITS
    core.claim_durable(T1)
    core.header_failed(T1, LOST)
    effects(core)
    core.decided(T1, ABORTED)
    assert effects(core) == [RefuseWrites(T1, None), DeleteClaims(T1, (2,))]


def test_where_no_epoch_could_be_taken_nothing_is_left() -> None:
    core = loaded_core(FakeLog(1))
    core.admit(T1)
    effects(core)
    core.claim_failed(T1, LOST)
    assert effects(core) == [RefuseWrites(T1, LOST), StopFollowing(T1)]
    assert core.members == {}


def test_ended_transactions_are_bounded_and_evicted_ones_read_the_header() -> None:
    core = SegmentBufferCore(SEGMENT, FakeLog(1), ended_kept=2)
    core.loaded({})
    txns = [TxnId(1, number) for number in range(4)]
    for txn in txns:
        joined(core, txn)
        core.decided(txn, COMMITTED)
        core.claims_deleted(txn)
        effects(core)
    assert core.admit(txns[3]) is Admission.ENDED
    assert core.admit(txns[2]) is Admission.ENDED
    assert core.admit(txns[0]) is Admission.WAITS
    core.claim(txns[0], 1)
    core.claim_durable(txns[0])
    core.header_checked(txns[0], COMMITTED)
    assert core.admit(txns[0]) is Admission.ENDED
    assert effects(core)[-1] == DeleteClaims(txns[0], (1,))


def test_aborted_entries_are_forgotten_with_their_ledgers_only() -> None:
    core = loaded_core(FakeLog(1), aborted={T1: Position(1, 9), T2: Position(3, 0)})
    assert core.admit(T1) is Admission.ENDED
    core.prune(1)
    assert effects(core) == []
    core.prune(2)
    assert effects(core) == [ForgetAborted(T1)]
    assert core.aborted == {T2: Position(3, 0)}
