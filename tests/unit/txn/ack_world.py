"""Owners of one segment, one after the other or at once, with subscriptions of pending acks.

A process dies at a chosen operation of its stores, before or after it took effect: that call never
returns, and neither does any later one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.cursor import Cursor
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Limits
from storage.metadata.store import MetadataStore
from tests.support.clocks import FakeClock
from tests.unit.storage.managed_ledger.fakes import (
    NAME,
    FakeLedgerStore,
    FaultyMetadata,
    Outcomes,
    Process,
    ProcessLedgers,
)
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.parts import TransactionParts
from txn.pending_ack import PendingAck
from txn.pending_acks import PendingAcks
from txn.records import AckedPosition, AckRecord, Header, TxnState
from txn.segment_owner import SegmentOwner
from txn.store import TransactionStore

SEGMENT, SUBSCRIPTION = "segment://t/n/x/0000-ffff-0", "s/1"
LIMITS = Limits(cursor_flush_ms=10**6, claim_on_open=True)
A, B, C = TxnId(0, 0), TxnId(0, 1), TxnId(3, 7)


class MortalStore:
    """The metadata store as one process sees it; it dies at operation `dies_at`, from 0."""

    def __init__(
        self, store: FaultyMetadata, process: Process, dies_at: int | None, *, after: bool
    ) -> None:
        self._store = store
        self._process = process
        self._dies_at = dies_at
        self._after = after
        self.operations: list[str] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self._store, name)
        return self._mortal(name, found) if asyncio.iscoroutinefunction(found) else found

    def _mortal(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def mortal(*args: Any, **options: Any) -> Any:  # noqa: ANN401
            await self._process.alive()
            dies = len(self.operations) == self._dies_at
            self.operations.append(f"{name} {args[0] if args else ''}")
            if dies and not self._after:
                self._process.dead = True
            await self._process.alive()
            result = await call(*args, **options)
            if dies:
                self._process.dead = True
            await self._process.alive()
            return result

        return mortal


class Heard:
    """What a subscription is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[Position]]] = []

    def _hear(self, what: str, acks: Sequence[PendingAck]) -> None:
        self.events.append((what, [each.position for ack in acks for each in ack.acks]))

    def held(self, acks: Sequence[PendingAck]) -> None:
        self._hear("held", acks)

    def refused(self, acks: Sequence[PendingAck]) -> None:
        self._hear("refused", acks)

    def applied(self, acks: Sequence[PendingAck]) -> None:
        self._hear("applied", acks)

    def released(self, acks: Sequence[PendingAck]) -> None:
        self._hear("released", acks)


class AckWorld:
    """What outlives processes, and a coordinator that never fails."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.metadata = FaultyMetadata(self.clock)
        self.ledgers = FakeLedgerStore(self.clock)
        self.transactions = TransactionStore(self.metadata, TransactionCounters())

    async def begin(self, *txns: TxnId) -> None:
        for txn in txns:
            await self.transactions.create_header(txn, Header(TxnState.OPEN, 60_000, 0))

    async def end(self, txn: TxnId, state: TxnState) -> None:
        stored = await self.transactions.read_header(txn)
        assert stored is not None
        if stored.header.state is TxnState.OPEN:
            await self.transactions.end_header(txn, Header(state, 60_000, 0, 1), stored.version)

    async def collect(self, txn: TxnId) -> None:
        stored = await self.transactions.read_header(txn)
        assert stored is not None
        await self.transactions.delete_header(stored)

    async def state(self, txn: TxnId) -> TxnState | None:
        stored = await self.transactions.read_header(txn)
        return None if stored is None else stored.header.state

    async def records(self) -> list[AckRecord]:
        return await self.transactions.acks_on(SEGMENT, SUBSCRIPTION)

    async def owner(
        self,
        *,
        eager: bool = True,
        dies_at: int | None = None,
        after: bool = False,
        entries: int = 0,
        acks_class: type[PendingAcks] = PendingAcks,
    ) -> "AckOwner":
        owner = AckOwner(self, eager=eager, dies_at=dies_at, after=after)
        await owner.load(entries, acks_class)
        return owner


class AckOwner:
    """One process that owns the segment, or thinks so."""

    ledger: ManagedLedger
    cursor: Cursor
    acks: PendingAcks

    def __init__(
        self, world: AckWorld, *, eager: bool, dies_at: int | None = None, after: bool = False
    ) -> None:
        self.world = world
        self.process = Process()
        self.mortal = MortalStore(world.metadata, self.process, dies_at, after=after)
        metadata = cast("MetadataStore", self.mortal)
        ledgers = ProcessLedgers(self.process, world.ledgers)
        self.factory = ManagedLedgerFactory(metadata, ledgers, world.clock, LIMITS)
        counters = TransactionCounters()
        self.store = TransactionStore(metadata, counters)
        self.decisions = Decisions(self.store)
        self.decisions.start()
        self.parts = TransactionParts(
            self.store, self.decisions, counters, world.clock, "broker", eager
        )
        self.lost: list[MagnetarError] = []
        self.owner = SegmentOwner(SEGMENT, self.parts, self.lost.append)
        self.heard = Heard()
        self.answered: list[tuple[TxnId, AckedPosition, bool]] = []

    async def load(self, entries: int = 0, acks_class: type[PendingAcks] = PendingAcks) -> None:
        if self.parts.eager_epochs:
            await self.owner.take()
        self.ledger = await self.factory.open(NAME)
        outcomes = Outcomes()
        outcomes.append_all(self.ledger, entries)
        while len(outcomes.positions) < entries:
            await asyncio.sleep(0)
        self.cursor = await self.ledger.open_cursor(SUBSCRIPTION, EARLIEST)
        self.acks = await acks_class.load(
            SEGMENT, SUBSCRIPTION, self.cursor, self.owner, self.parts, self.heard
        )

    @property
    def first(self) -> Position:
        return self.ledger.next_position(EARLIEST)

    def at(self, index: int) -> AckedPosition:
        first = self.first
        return AckedPosition(Position(first.ledger_id, first.entry_id + index))

    async def ack(self, txn: TxnId, *indexes: int) -> None:
        await self.acks.acknowledge(txn, [self.at(each) for each in indexes])
        self.answered += [(txn, self.at(each), False) for each in indexes]

    async def ack_up_to(self, txn: TxnId, index: int) -> None:
        await self.acks.acknowledge(txn, [self.at(index)], cumulative=True)
        self.answered.append((txn, self.at(index), True))

    def pending(self, count: int = 10) -> list[int]:
        """Indexes of those of the first entries that are held."""
        is_pending = self.acks.core.held.is_pending
        return [each for each in range(count) if is_pending(self.at(each).position)]

    def acknowledged(self, count: int = 10) -> list[int]:
        """Indexes of those of the first entries that are acknowledged."""
        done = self.cursor.is_acknowledged
        return [each for each in range(count) if done(self.at(each).position)]

    def held_or_acknowledged(self, position: Position) -> bool:
        return self.cursor.is_acknowledged(position) or self.acks.core.held.is_pending(position)

    async def idle(self) -> None:
        """Everything that ended is cleaned up."""
        while self.acks.core.finishing or self.acks.core.to_clean:
            await asyncio.sleep(0)

    async def kill(self) -> None:
        """The process is gone: nothing of it has an effect any more."""
        self.process.dead = True
        await self.decisions.stop()

    async def stop(self) -> None:
        """A clean end of the owner."""
        await self.acks.close()
        await self.owner.close()
        await self.factory.unload(NAME)
        await self.decisions.stop()


async def turns(count: int = 50) -> None:
    """Let everything that is scheduled run: the stores need no more turns than this."""
    for _ in range(count):
        await asyncio.sleep(0)
