"""What open transactions hold: random histories against sets of messages, and each rule by name."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from magnetar.protocol.ack_set import from_words, pending_all, to_words
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from tests.support.bounds import set_bound
from txn.errors import (
    InvalidTxnStatus,
    TooManyPendingAcks,
    TransactionAssertion,
    TransactionConflict,
    TransactionNotFound,
)
from txn.pending_ack import AckState, PendingAck
from txn.pending_acks_core import Apply, Forget, Hold, PendingAcksCore, Refuse, Release
from txn.records import AckedPosition, AckRecord, TxnState

A, B, C = TxnId(0, 0), TxnId(0, 1), TxnId(1, 0)
COMMITTED, ABORTED = TxnState.COMMITTED, TxnState.ABORTED
SIZES = (1, 1, 3, 1, 4, 3)
"""Messages of the entries of the random histories."""


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def part(entry_id: int, *messages: int, size: int) -> AckedPosition:
    remaining = pending_all(size) & ~sum(1 << each for each in messages)
    return AckedPosition(at(entry_id), tuple(to_words(remaining)) or (0,), size)


def whole(entry_id: int) -> AckedPosition:
    return AckedPosition(at(entry_id))


class SetCursor:
    """A cursor over `SIZES`, as a set of acknowledged messages."""

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        self.sizes = sizes
        self.acked: set[tuple[int, int]] = set()

    def messages(self, entry_id: int) -> set[tuple[int, int]]:
        return {(entry_id, each) for each in range(self.sizes[entry_id])}

    @property
    def mark_delete(self) -> Position:
        mark = -1
        while mark + 1 < len(self.sizes) and self.messages(mark + 1) <= self.acked:
            mark += 1
        return at(mark)

    def is_acknowledged(self, position: Position) -> bool:
        return self.messages(position.entry_id) <= self.acked

    def ack_set(self, position: Position) -> list[int] | None:
        left = self.messages(position.entry_id) - self.acked
        if len(left) == self.sizes[position.entry_id]:
            return None
        return to_words(sum(1 << message for _, message in left))

    def named(self, ack: AckedPosition, *, cumulative: bool) -> set[tuple[int, int]]:
        """The messages that an acknowledgement speaks of."""
        entry_id = ack.position.entry_id
        found = self.messages(entry_id)
        if ack.ack_set:
            left = from_words(ack.ack_set, self.sizes[entry_id])
            found = {each for each in found if not left >> each[1] & 1}
        if cumulative:
            for earlier in range(entry_id):
                found |= self.messages(earlier)
        return found


class Records:
    """Gives every acknowledgement its record."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, core: PendingAcksCore, taken: Sequence[PendingAck]) -> None:
        for ack in taken:
            self.count += 1
            core.putting(ack, record(ack.txn, *ack.acks, number=self.count))


def record(
    txn: TxnId, *acks: AckedPosition, number: int = 1, cumulative: bool = False
) -> AckRecord:
    return AckRecord(txn, "seg", "sub", 1, number, cumulative, acks)


def hold(core: PendingAcksCore, txn: TxnId, *acks: AckedPosition, cumulative: bool = False) -> None:
    taken = core.reserve(txn, acks, cumulative=cumulative)
    RECORDS.put(core, taken)
    core.stored(taken)
    assert core.confirmed(taken) == [Hold(taken)]
    assert core.end_late(taken) == []


RECORDS = Records()


@dataclass
class Model:
    """The same rules over sets of messages."""

    cursor: SetCursor
    individual: list[tuple[TxnId, set[tuple[int, int]], PendingAck]] = field(default_factory=list)
    cumulative: list[tuple[TxnId, set[tuple[int, int]], PendingAck]] = field(default_factory=list)

    @property
    def held(self) -> set[tuple[int, int]]:
        return {each for _, found, _ in (*self.individual, *self.cumulative) for each in found}

    def conflicts(self, txn: TxnId, acks: Sequence[AckedPosition], *, cumulative: bool) -> bool:
        cursor = self.cursor
        if cumulative:
            (last,) = acks
            named = cursor.named(last, cumulative=True)
            mark = cursor.mark_delete.entry_id
            return (
                last.position <= cursor.mark_delete
                or any(other != txn for other, _, _ in self.cumulative)
                or any(named <= found for _, found, _ in self.cumulative)
                or any(
                    other != txn and {each for each in named & found if each[0] > mark}
                    for other, found, _ in self.individual
                )
            )
        taken = self.held
        for ack in acks:
            named = cursor.named(ack, cumulative=False)
            if named & taken or cursor.is_acknowledged(ack.position):
                return True
            if ack.ack_set and named & cursor.acked:
                return True
            taken = taken | named
        return False

    def drop(self, acks: Sequence[PendingAck]) -> None:
        self.individual = [each for each in self.individual if each[2] not in acks]
        self.cumulative = [each for each in self.cumulative if each[2] not in acks]


class History:
    """One random history, judged after every step."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cursor = SetCursor()
        self.core = PendingAcksCore(self.cursor)
        self.model = Model(self.cursor)
        self.reserved: list[list[PendingAck]] = []
        self.putting: list[list[PendingAck]] = []
        self.confirming: list[list[PendingAck]] = []
        self.ended: dict[TxnId, TxnState | None] = {}
        self.records = Records()
        self.conflicts = self.taken = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            moves = (self.take, self.take, self.go_on, self.go_on, self.plain, self.end, self.clean)
            self.rng.choice(moves)()
            self.check()
        for txn in (A, B, C):
            self.decide(txn, self.rng.choice((COMMITTED, ABORTED, None)))
        while self.reserved or self.putting or self.confirming:
            self.go_on()
            self.check()
        self.clean()
        assert not self.core.finishing
        assert not self.core.positions
        assert not self.core.transactions
        assert not self.core.held.any

    def take(self) -> None:
        rng, txn = self.rng, self.rng.choice((A, B, C))
        cumulative = rng.random() < 0.3
        acks = [self.random_ack(cumulative) for _ in range(1 if cumulative else rng.choice((1, 2)))]
        if txn in self.ended:
            missing = self.ended[txn] is None
            with pytest.raises(TransactionNotFound if missing else InvalidTxnStatus):
                self.core.reserve(txn, acks, cumulative=cumulative)
            return
        if self.model.conflicts(txn, acks, cumulative=cumulative):
            self.conflicts += 1
            with pytest.raises(TransactionConflict):
                self.core.reserve(txn, acks, cumulative=cumulative)
            return
        self.taken += 1
        taken = self.core.reserve(txn, acks, cumulative=cumulative)
        (ack,) = taken
        named = {m for each in acks for m in self.cursor.named(each, cumulative=cumulative)}
        (self.model.cumulative if cumulative else self.model.individual).append((txn, named, ack))
        self.reserved.append(taken)

    def random_ack(self, cumulative: bool) -> AckedPosition:
        entry_id = self.rng.randrange(len(SIZES))
        size = SIZES[entry_id]
        if size == 1 or self.rng.random() < 0.3:
            return whole(entry_id)
        if cumulative:
            return part(entry_id, *range(self.rng.randint(1, size - 1)), size=size)
        count = self.rng.randint(1, size)
        return part(entry_id, *self.rng.sample(range(size), count), size=size)

    def go_on(self) -> None:
        stage = self.rng.choice((self.reserved, self.putting, self.confirming))
        if not stage:
            return
        taken = stage.pop(self.rng.randrange(len(stage)))
        if self.rng.random() < 0.2:
            effects = self.core.failed(taken)
            assert effects[0] == Refuse(taken)
            self.model.drop(taken)
        elif stage is self.reserved:
            self.records.put(self.core, taken)
            self.putting.append(taken)
        elif stage is self.putting:
            self.core.stored(taken)
            self.confirming.append(taken)
        else:
            self.settle(taken[0].txn, self.core.confirmed(taken))
            self.settle(taken[0].txn, self.core.end_late(taken))

    def settle(self, txn: TxnId, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                assert self.ended[txn] is COMMITTED
                for ack in effect.acks:
                    for each in ack.acks:
                        self.cursor.acked |= self.cursor.named(each, cumulative=ack.cumulative)
                self.model.drop(effect.acks)
            elif isinstance(effect, Release):
                assert self.ended[txn] is not COMMITTED
                self.model.drop(effect.acks)
            else:
                assert isinstance(effect, Hold)

    def plain(self) -> None:
        if self.rng.random() < 0.3:
            self.cursor.acked |= self.cursor.named(self.random_ack(False), cumulative=False)
        elif self.rng.random() < 0.1:
            self.cursor.acked.clear()  # a seek

    def end(self) -> None:
        if self.rng.random() < 0.2:
            self.decide(self.rng.choice((A, B, C)), self.rng.choice((COMMITTED, ABORTED, None)))

    def decide(self, txn: TxnId, outcome: TxnState | None) -> None:
        if txn not in self.ended:
            self.ended[txn] = outcome
            self.settle(txn, self.core.decided(txn, outcome))
        assert self.core.decided(txn, self.ended[txn]) == []

    def clean(self) -> None:
        self.core.durable(self.core.applying)
        for ack in self.core.deletable:
            self.core.deleted(ack)

    def check(self) -> None:
        held = self.model.held
        assert self.core.held.any == bool(held)
        for entry_id, size in enumerate(SIZES):
            messages = self.cursor.messages(entry_id)
            left = messages - self.cursor.acked
            if not left:
                continue
            pending = messages & held
            assert self.core.held.is_pending(at(entry_id)) == (left <= pending), entry_id
            words = self.core.held.remaining(at(entry_id), self.cursor.ack_set(at(entry_id)), size)
            deliverable = {
                (entry_id, each)
                for each in range(size)
                if words is None or from_words(words, size) >> each & 1
            }
            assert deliverable == left - pending, entry_id


def test_random_histories_agree_with_sets_of_messages() -> None:
    conflicts = taken = 0
    for seed in range(400):
        history = History(seed)
        history.run(40)
        conflicts += history.conflicts
        taken += history.taken
    assert conflicts > 500
    assert taken > 500, "both are seen often"


# Rules by name


def test_a_message_is_held_once_by_its_own_transaction_too() -> None:
    core = PendingAcksCore(SetCursor())
    hold(core, A, whole(0))
    for txn in (A, B):
        with pytest.raises(TransactionConflict, match="1:0 is held"):
            core.reserve(txn, [whole(1), whole(0)], cumulative=False)
    assert not core.held.is_pending(at(1)), "all or nothing"
    with pytest.raises(TransactionConflict):
        core.reserve(A, [whole(1), whole(1)], cumulative=False)


def test_two_commands_in_flight_conflict() -> None:
    core = PendingAcksCore(SetCursor())
    core.reserve(A, [whole(0)], cumulative=False)
    with pytest.raises(TransactionConflict):
        core.reserve(B, [whole(0)], cumulative=False)


def test_ack_of_an_acknowledged_message_conflicts() -> None:
    cursor = SetCursor()
    cursor.acked |= {(0, 0), (2, 1)}
    core = PendingAcksCore(cursor)
    with pytest.raises(TransactionConflict, match="acknowledged already"):
        core.reserve(A, [whole(0)], cumulative=False)
    with pytest.raises(TransactionConflict, match="in part"):
        core.reserve(A, [part(2, 1, size=3)], cumulative=False)
    core.reserve(A, [part(2, 0, size=3)], cumulative=False)


def test_messages_of_a_batch_conflict_only_where_they_overlap() -> None:
    core = PendingAcksCore(SetCursor())
    hold(core, A, part(4, 0, 1, size=4))
    hold(core, B, part(4, 2, size=4))
    with pytest.raises(TransactionConflict):
        core.reserve(C, [part(4, 1, 3, size=4)], cumulative=False)
    with pytest.raises(TransactionConflict):
        core.reserve(C, [whole(4)], cumulative=False)
    assert core.held.remaining(at(4), None, 4) == [0b1000]
    assert not core.held.is_pending(at(4))
    hold(core, C, part(4, 3, size=4))
    assert core.held.is_pending(at(4))
    core.decided(B, ABORTED)
    assert core.held.remaining(at(4), None, 4) == [0b0100]


def test_a_plain_acknowledgement_of_the_rest_leaves_nothing_to_deliver() -> None:
    cursor = SetCursor()
    core = PendingAcksCore(cursor)
    hold(core, A, part(4, 0, 1, size=4))
    cursor.acked |= {(4, 2), (4, 3)}
    assert core.held.is_pending(at(4))


def test_a_cumulative_acknowledgement_is_raised_by_its_own_transaction_only() -> None:
    core = PendingAcksCore(SetCursor())
    hold(core, A, whole(1), cumulative=True)
    hold(core, A, part(2, 0, size=3), cumulative=True)
    assert core.held.is_pending(at(0))
    assert core.held.remaining(at(2), None, 3) == [0b110]
    for lower in (whole(1), part(2, 0, size=3)):
        with pytest.raises(TransactionConflict):
            core.reserve(A, [lower], cumulative=True)
    hold(core, A, part(2, 0, 1, size=3), cumulative=True)
    hold(core, A, whole(2), cumulative=True)
    with pytest.raises(TransactionConflict, match="another transaction"):
        core.reserve(B, [whole(4)], cumulative=True)
    with pytest.raises(TransactionConflict):
        core.reserve(B, [whole(0)], cumulative=False)
    hold(core, B, whole(3))
    with pytest.raises(TransactionConflict, match="1:3 is held by another"):
        core.reserve(A, [whole(4)], cumulative=True)


def test_a_cumulative_acknowledgement_at_the_mark_delete_position_conflicts() -> None:
    cursor = SetCursor()
    cursor.acked |= {(0, 0), (1, 0)}
    core = PendingAcksCore(cursor)
    for entry_id in (0, 1):
        with pytest.raises(TransactionConflict):
            core.reserve(A, [whole(entry_id)], cumulative=True)
    core.reserve(A, [whole(2)], cumulative=True)


def test_a_failed_raise_leaves_the_one_before() -> None:
    core = PendingAcksCore(SetCursor())
    hold(core, A, whole(1), cumulative=True)
    higher = core.reserve(A, [whole(3)], cumulative=True)
    assert core.held.is_pending(at(3))
    core.failed(higher)
    assert core.held.is_pending(at(1))
    assert not core.held.is_pending(at(2))


def test_ack_in_flight_at_the_end_shares_the_outcome() -> None:
    core = PendingAcksCore(SetCursor())
    (late,) = core.reserve(A, [whole(0)], cumulative=False)
    assert core.decided(A, COMMITTED) == []
    with pytest.raises(InvalidTxnStatus):
        core.reserve(A, [whole(1)], cumulative=False)
    assert core.held.is_pending(at(0))
    RECORDS.put(core, [late])
    core.stored([late])
    assert core.confirmed([late]) == [Hold([late])]
    assert core.held.is_pending(at(0)), "nobody has it before it is known what becomes of it"
    assert core.end_late([late]) == [Apply([late])]
    (other,) = core.reserve(B, [whole(1)], cumulative=False)
    RECORDS.put(core, [other])
    core.stored([other])
    assert core.decided(B, ABORTED) == []
    assert core.confirmed([other]) == [Hold([other])]
    assert core.end_late([other]) == [Release([other])]


def test_only_what_is_durable_in_the_cursor_is_deletable() -> None:
    core = PendingAcksCore(SetCursor())
    hold(core, A, whole(0))
    (effect,) = core.decided(A, COMMITTED)
    assert isinstance(effect, Apply)
    (ack,) = effect.acks
    assert core.applying == [ack]
    assert core.deletable == []
    assert core.finishing
    core.durable([ack])
    assert core.deletable == [ack]
    assert core.deleted(ack) == [Forget(A)]
    assert not core.finishing
    assert ack.state is AckState.GONE


def test_a_record_without_header_is_void() -> None:
    core = PendingAcksCore(SetCursor())
    core.load(record(A, whole(0)))
    assert core.held.is_pending(at(0))
    (effect,) = core.decided(A, None)
    assert isinstance(effect, Release)
    with pytest.raises(TransactionNotFound):
        core.reserve(A, [whole(1)], cumulative=False)
    (in_flight,) = core.reserve(B, [whole(1)], cumulative=False)
    RECORDS.put(core, [in_flight])
    core.stored([in_flight])
    assert core.decided(B, None) == []
    assert core.confirmed([in_flight]) == [Hold([in_flight])]
    assert core.end_late([in_flight]) == [Release([in_flight])]


def test_loaded_records_hold_their_messages_and_may_overlap() -> None:
    core = PendingAcksCore(SetCursor())
    core.load(record(A, whole(0), number=1))
    core.load(record(B, whole(0), part(2, 1, size=3), number=2))
    core.load(record(C, whole(1), number=3, cumulative=True))
    core.opened(A)
    core.opened(C)
    assert core.knows(record(A, whole(0), number=1))
    assert not core.knows(record(A, whole(0), number=2))
    core.decided(A, ABORTED)
    assert core.held.is_pending(at(0))
    core.decided(B, ABORTED)
    assert core.held.is_pending(at(0)), "the cumulative one covers it"
    core.decided(C, ABORTED)
    assert not core.held.any


def test_ended_transactions_are_remembered_within_a_bound() -> None:
    core = PendingAcksCore(SetCursor(), ended_kept=2)
    for least in range(3):
        core.decided(TxnId(0, least), ABORTED)
    core.require_not_ended(TxnId(0, 0))
    for least in (1, 2):
        with pytest.raises(InvalidTxnStatus):
            core.require_not_ended(TxnId(0, least))


def test_long_commands_make_several_records() -> None:
    core = PendingAcksCore(SetCursor((1,) * 10), record_positions=3)
    taken = core.reserve(A, [whole(each) for each in range(7)], cumulative=False)
    assert [len(ack.acks) for ack in taken] == [3, 3, 1]


def test_held_positions_are_bounded() -> None:
    core = PendingAcksCore(SetCursor(), max_positions=2)
    hold(core, A, whole(0))
    with pytest.raises(TooManyPendingAcks):
        core.reserve(A, [whole(1), whole(3)], cumulative=False)
    hold(core, A, whole(1))


def test_a_move_that_is_not_in_the_table_is_a_defect() -> None:
    core = PendingAcksCore(SetCursor())
    taken = core.reserve(A, [whole(0)], cumulative=False)
    with pytest.raises(TransactionAssertion):
        core.confirmed(taken)


def test_an_end_of_one_slice_comes_with_the_decision_and_a_larger_one_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "TXN_SLICE_POSITIONS", 2, in_module="txn.pending_acks_core")
    core = PendingAcksCore(SetCursor((1,) * 8))
    for entry_id in range(2):
        hold(core, A, whole(entry_id))
    for entry_id in range(2, 7):
        hold(core, B, whole(entry_id))
    (applied,) = core.decided(A, COMMITTED)
    assert isinstance(applied, Apply)
    assert [ack.acks[0].position.entry_id for ack in applied.acks] == [0, 1]
    assert core.decided(B, COMMITTED) == []
    assert core.ending
    assert all(core.held.is_pending(at(entry_id)) for entry_id in range(2, 7))
    slices = []
    while core.ending:
        (part_of_it,) = core.end_some()
        assert isinstance(part_of_it, Apply)
        slices.append(len(part_of_it.acks))
    assert slices == [2, 2, 1]
