"""Random histories of transactions on one segment, over crashes: the invariants of the rules.

The world around the core is as small as the rules allow: a log, headers, claims, aborted records.
Everything the core asks for takes effect at some later moment, in any order.
"""

import random
from dataclasses import dataclass, field

import pytest

from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from txn.buffer_core import SegmentBufferCore
from txn.buffer_effects import (
    Admission,
    DeleteClaims,
    Effect,
    ForgetAborted,
    MaxReadPositionMoved,
    PutClaim,
    ReadAborted,
    ReadHeader,
    RecordAborted,
)
from txn.errors import TransactionAssertion
from txn.membership import MOVES, Membership
from txn.records import Claim, TxnState

SEGMENT = "s"


@dataclass
class World:
    """What survives an owner, and one owner."""

    random: random.Random
    decisions: dict[TxnId, TxnState] = field(default_factory=dict)
    """Every decision ever; what is missing is open."""
    collected: set[TxnId] = field(default_factory=set)
    claims: dict[tuple[TxnId, int], Position] = field(default_factory=dict)
    records: dict[TxnId, Position] = field(default_factory=dict)
    log: list[TxnId | None] = field(default_factory=list)
    epoch: int = 0

    def __post_init__(self) -> None:
        self.txns = [TxnId(1, number) for number in range(4)]
        self.load()

    @property
    def last_confirmed(self) -> Position:
        return Position(0, len(self.log) - 1)

    def previous_position(self, position: Position) -> Position:
        return Position(0, position.entry_id - 1)

    def header(self, txn: TxnId) -> TxnState | None:
        return None if txn in self.collected else self.decisions.get(txn, TxnState.OPEN)

    def load(self) -> None:
        self.epoch += 1
        self.core = SegmentBufferCore(SEGMENT, self, ended_kept=1)
        self.pending: list[Effect] = []
        self.in_flight: list[TxnId | None] = []
        self.told: set[TxnId] = set()
        self.shown = Position(0, -1)
        self.core.scanned(
            Claim(txn, SEGMENT, epoch, floor) for (txn, epoch), floor in self.claims.items()
        )
        for txn in list(self.core.members):
            self.core.header_loaded(txn, self.header(txn))
        self.core.loaded(dict(self.records))

    def crash(self) -> None:
        recovered = self.random.randint(0, len(self.in_flight))
        self.log += self.in_flight[:recovered]
        for effect in self.pending:
            if isinstance(effect, PutClaim) and self.random.random() < 0.5:
                self.claims[effect.txn, self.epoch] = self.last_confirmed
        self.load()

    def step(self) -> None:
        txn = self.random.choice(self.txns)
        choice = self.random.random()
        if choice < 0.3:
            self.send(txn if self.random.random() < 0.8 else None)
        elif choice < 0.35 and txn not in self.decisions:
            self.decisions[txn] = self.random.choice((TxnState.COMMITTED, TxnState.ABORTED))
        elif choice < 0.45 and txn in self.decisions:
            self.core.decided(txn, self.header(txn))
        elif choice < 0.65 and self.in_flight:
            self.settle(durable=self.random.random() < 0.9)
        elif choice < 0.95 and self.pending:
            self.finish(self.pending.pop(self.random.randrange(len(self.pending))))
        elif choice < 0.97 and txn in self.decisions and not self.claims_of(txn):
            self.collected.add(txn)
        elif choice < 0.975:
            self.crash()
        elif choice < 0.98:
            self.rescan()
        self.pending += self.core.take_effects()

    def claims_of(self, txn: TxnId) -> list[int]:
        return [epoch for each, epoch in self.claims if each == txn]

    def send(self, txn: TxnId | None) -> None:
        if txn is None:
            self.in_flight.append(None)
        elif self.core.admit(txn) is Admission.JOINED:
            self.core.issued(txn)
            self.in_flight.append(txn)

    def settle(self, *, durable: bool) -> None:
        txn = self.in_flight.pop(0)
        if durable:
            self.log.append(txn)
        if txn is not None and durable:
            self.core.appended(txn, self.last_confirmed)
        elif txn is not None:
            self.core.not_appended(txn)

    def rescan(self) -> None:
        for txn in {txn for txn, _ in self.claims}:
            if txn not in self.core.members:
                self.core.stray(txn, self.claims_of(txn), self.header(txn))

    def finish(self, effect: Effect) -> None:
        core = self.core
        match effect:
            case PutClaim(txn):
                claim = core.claim(txn, self.epoch)
                self.claims[txn, self.epoch] = claim.floor
                core.claim_durable(txn)
            case ReadHeader(txn):
                core.header_checked(txn, self.header(txn))
            case ReadAborted(txn):
                core.aborted_read(txn, self.records.get(txn))
            case RecordAborted(txn, up_to):
                self.records[txn] = max(up_to, self.records.get(txn, up_to))
                core.aborted_recorded(txn, self.records[txn])
            case DeleteClaims(txn, epochs):
                for epoch in epochs:
                    self.claims.pop((txn, epoch), None)
                core.claims_deleted(txn)
            case ForgetAborted() | MaxReadPositionMoved() | _:
                pass

    def check(self) -> None:
        horizon = self.core.max_read_position
        assert horizon >= self.shown, "the max read position moved back"
        self.shown = horizon
        for entry_id, txn in enumerate(self.log):
            if txn is None:
                continue
            decision = self.decisions.get(txn)
            if entry_id <= horizon.entry_id:
                wanted = TxnState.ABORTED if self.core.is_aborted(txn) else TxnState.COMMITTED
                assert decision is wanted, f"{txn} is {decision} and read as {wanted}"
            if decision is TxnState.ABORTED and not self.claims_of(txn):
                covered = self.records.get(txn, Position(0, -1)).entry_id
                assert entry_id <= covered, f"uncovered entry {entry_id} of {txn}"

    def come_to_rest(self) -> None:
        for txn in self.txns:
            self.decisions.setdefault(txn, TxnState.ABORTED)
        for _ in range(50):
            while self.in_flight:
                self.settle(durable=True)
            self.pending += self.core.take_effects()
            while self.pending:
                self.finish(self.pending.pop(0))
                self.pending += self.core.take_effects()
            for txn in self.txns:
                self.core.decided(txn, self.header(txn))
            self.rescan()
            self.pending += self.core.take_effects()
            if not self.pending and not self.core.members:
                return


@pytest.mark.parametrize("seed", range(300))
def test_nothing_open_or_aborted_is_read_and_all_is_cleaned_up(seed: int) -> None:
    run(seed)


def run(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(250):
        world.step()
        world.check()
    world.come_to_rest()
    world.check()
    assert world.claims == {}
    assert world.core.max_read_position == world.last_confirmed


class _ClaimsFirst(SegmentBufferCore):
    """Breaks W5."""

    def _clean_aborted(self, member: object) -> None:
        member.state = Membership.RECORDED  # type: ignore[attr-defined]
        self._delete_claims(member)  # type: ignore[arg-type]


class _NoWait(SegmentBufferCore):
    """Breaks W4."""

    def _appends_decided(self, member: object) -> bool:
        return True


class _NoHeaderRead(SegmentBufferCore):
    """Breaks W2."""

    def _after_claim(self, member: object) -> None:
        member.state = Membership.CHECKING  # type: ignore[attr-defined]
        self._join(member)  # type: ignore[arg-type]


class _Parallel(SegmentBufferCore):
    """Breaks W1."""

    def _first_write(self, member: object) -> Admission:
        super()._first_write(member)  # type: ignore[arg-type]
        member.state = Membership.JOINED  # type: ignore[attr-defined]
        return Admission.JOINED


@pytest.mark.parametrize("broken", [_ClaimsFirst, _NoWait, _NoHeaderRead, _Parallel])
def test_the_invariants_find_each_broken_rule(
    broken: type[SegmentBufferCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(World.load.__globals__, "SegmentBufferCore", broken)
    with pytest.raises(AssertionError):
        _run_all()


def _run_all() -> None:
    for seed in range(300):
        run(seed)


def test_moves_that_are_not_in_the_table_are_defects() -> None:
    with pytest.raises(TransactionAssertion):
        MOVES.move(Membership.LOADED, Membership.JOINED, "It")
