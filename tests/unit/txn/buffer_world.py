"""A segment's buffer on a real metadata store whose calls can be held or made to fail."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.clock import SystemClock
from storage.managed_ledger.types import ManagedLedgerState
from storage.metadata.open import open_metadata_store
from storage.metadata.store import MetadataError
from txn.buffer import SegmentBuffer
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.parts import TransactionParts
from txn.records import AckRecord, Claim, Header, OwnerRecord, TxnState
from txn.segment_owner import SegmentOwner
from txn.store import StoredHeader, TransactionStore

SEGMENT = "segment://public/default/x/0000-ffff-0"
T1, T2, T3 = TxnId(1, 0), TxnId(1, 1), TxnId(1, 2)


class FailingStore(TransactionStore):
    """`failures[name]` calls fail, `lost[name]` fail after they took effect; `held[name]` wait."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.failures: defaultdict[str, int] = defaultdict(int)
        self.lost: defaultdict[str, int] = defaultdict(int)
        self.held: dict[str, asyncio.Event] = {}
        self.calls: list[str] = []

    async def _before(self, name: str) -> None:
        self.calls.append(name)
        if name in self.held:
            await self.held[name].wait()
        if self.failures[name]:
            self.failures[name] -= 1
            raise MetadataError(f"{name} was made to fail.")

    def _after(self, name: str) -> None:
        if self.lost[name]:
            self.lost[name] -= 1
            raise MetadataError(f"The outcome of {name} is unknown.")

    async def put_claim(self, claim: Claim) -> None:
        await self._before("put_claim")
        await super().put_claim(claim)
        self._after("put_claim")

    async def read_header(self, txn: TxnId, *, fresh: bool = False) -> StoredHeader | None:
        await self._before("read_header")
        return await super().read_header(txn, fresh=fresh)

    async def delete_operation(self, txn: TxnId, key: str) -> None:
        await self._before("delete_operation")
        await super().delete_operation(txn, key)

    async def record_aborted(self, segment: str, txn: TxnId, up_to: Position) -> Position:
        await self._before("record_aborted")
        return await super().record_aborted(segment, txn, up_to)

    async def aborted_on(self, segment: str) -> dict[TxnId, Position]:
        await self._before("aborted_on")
        return await super().aborted_on(segment)

    async def put_owner(self, segment: str, owner: OwnerRecord, expect: int) -> int:  # type: ignore[override]
        await self._before("put_owner")
        version = await super().put_owner(segment, owner, expect)  # type: ignore[arg-type]
        self._after("put_owner")
        return version


class FakeLedger:
    """What the buffer needs of a managed ledger."""

    def __init__(self) -> None:
        self.last_confirmed = Position(5, -1)
        self.first_ledger_id = 5
        self.state = ManagedLedgerState.OPEN

    def previous_position(self, position: Position) -> Position:
        if position.ledger_id < self.first_ledger_id:
            return Position(self.first_ledger_id, -1)
        return Position(position.ledger_id, position.entry_id - 1)

    def confirm(self) -> Position:
        self.last_confirmed = Position(5, self.last_confirmed.entry_id + 1)
        return self.last_confirmed


class World:
    """One segment, its store, and one owner at a time."""

    def __init__(self, store: FailingStore) -> None:
        self.store = store
        self.decisions = Decisions(store)
        self.parts = TransactionParts(
            store=store,
            decisions=self.decisions,
            counters=store.counters,
            clock=SystemClock(),
            broker_id="here:8080",
            eager_epochs=False,
        )
        self.ledger = FakeLedger()
        self.lost: list[MagnetarError] = []
        self.buffer: SegmentBuffer

    def owner(self) -> SegmentOwner:
        return SegmentOwner(SEGMENT, self.parts, self.lost.append)

    async def load(self) -> SegmentBuffer:
        self.buffer = await SegmentBuffer.load(SEGMENT, self.ledger, self.owner(), self.parts)
        return self.buffer

    async def reload(self) -> SegmentBuffer:
        """As after a crash: nothing of the old owner runs on."""
        await self.buffer.close()
        return await self.load()

    async def begin(self, *txns: TxnId) -> None:
        for txn in txns:
            await self.store.create_header(txn, Header(TxnState.OPEN, 60_000, 1000))

    async def end(self, txn: TxnId, state: TxnState) -> None:
        stored = await TransactionStore.read_header(self.store, txn)
        assert stored is not None
        header = Header(state, 60_000, 1000, 2000)
        await self.store.end_header(txn, header, stored.version)

    async def collect(self, txn: TxnId) -> None:
        assert await self.store.operations_of(txn) == []
        stored = await TransactionStore.read_header(self.store, txn)
        assert stored is not None
        await self.store.delete_header(stored)

    async def append(self, txn: TxnId) -> Position:
        await self.buffer.join(txn)
        self.buffer.issued(txn)
        position = self.ledger.confirm()
        self.buffer.appended(txn, position, None)
        return position

    async def claims(self) -> list[tuple[TxnId, int]]:
        return sorted((claim.txn, claim.epoch) for claim in await self.store.claims_on(SEGMENT))

    async def operations(self, txn: TxnId) -> list[Claim | AckRecord]:
        return await self.store.operations_of(txn)


@asynccontextmanager
async def a_world(kind: str, directory: Path) -> AsyncIterator[World]:
    url = "memory:" if kind == "memory" else f"sqlite:{directory / 'metadata.db'}"
    metadata = await open_metadata_store(url, SystemClock())
    world = World(FailingStore(metadata, TransactionCounters()))
    world.decisions.start()
    await world.load()
    try:
        yield world
    finally:
        for event in world.store.held.values():
            event.set()
        await world.buffer.close()
        await world.decisions.stop()
        await metadata.close()
