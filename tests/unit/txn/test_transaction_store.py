"""What the store promises to the rules: conditional writes that only rise, scans that are fresh."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from config.bounds import TXN_PAGE
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.clock import SystemClock
from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import ABSENT, VersionConflict
from txn import records
from txn.counters import TransactionCounters
from txn.group import Group
from txn.header import end_header
from txn.records import AckedPosition, AckRecord, Claim, Header, OwnerRecord, TxnState
from txn.store import TransactionStore

SEGMENT = "segment://public/default/x/0000-ffff-0"
T1, T2 = TxnId(0, 1), TxnId(0, 2)
OPEN = Header(TxnState.OPEN, 60_000, 1000)


class Watched(MemoryMetadataStore):
    """Notes which scans were asked to be fresh."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.fresh: list[bool] = []

    async def scan(self, lo: str, hi: str, **given: Any) -> Any:  # noqa: ANN401
        self.fresh.append(bool(given.get("fresh")))
        return await super().scan(lo, hi, **given)

    async def scan_index(self, index: str, lo: str, hi: str, **given: Any) -> Any:  # noqa: ANN401
        self.fresh.append(bool(given.get("fresh")))
        return await super().scan_index(index, lo, hi, **given)


@pytest.fixture
async def store() -> AsyncIterator[TransactionStore]:
    metadata = Watched()
    yield TransactionStore(metadata, TransactionCounters())
    await metadata.close()


async def test_w5_an_aborted_record_only_rises(store: TransactionStore) -> None:
    """A stale owner's late word must not uncover what a later owner recorded."""
    later, earlier = Position(7, 9), Position(5, 3)
    assert await store.record_aborted(SEGMENT, T1, later) == later
    assert await store.record_aborted(SEGMENT, T1, earlier) == later
    assert await store.read_aborted(SEGMENT, T1) == later
    assert await store.record_aborted(SEGMENT, T1, Position(8, 0)) == Position(8, 0)
    assert await store.aborted_on(SEGMENT) == {T1: Position(8, 0)}
    words = asyncio.gather(
        store.record_aborted(SEGMENT, T2, later), store.record_aborted(SEGMENT, T2, earlier)
    )
    assert list(await words) == [later, later], "both read that there was none"
    assert await store.read_aborted(SEGMENT, T2) == later


async def test_w6_a_claim_goes_by_its_exact_key(store: TransactionStore) -> None:
    """The claims of other owners and other transactions stay."""
    claims = [Claim(txn, SEGMENT, epoch, Position(1, 2)) for txn in (T1, T2) for epoch in (1, 2)]
    for claim in claims:
        await store.put_claim(claim)
    await store.delete_operation(T1, records.claim_key(T1, SEGMENT, 1))
    left = await store.claims_on(SEGMENT)
    assert {(each.txn, each.epoch) for each in left} == {(T1, 2), (T2, 1), (T2, 2)}


async def test_w7_w10_a3_scans_that_decide_are_fresh(store: TransactionStore) -> None:
    """One that may be of the past could miss a claim, and an open transaction would be shown."""
    await store.put_claim(Claim(T1, SEGMENT, 1, Position(1, 2)))
    await store.put_ack(AckRecord(T1, SEGMENT, "s", 1, 1, False, (AckedPosition(Position(1, 1)),)))
    metadata = store.metadata
    assert isinstance(metadata, Watched)
    await store.claims_on(SEGMENT)
    await store.aborted_on(SEGMENT)
    await store.acks_on(SEGMENT, "s")
    await store.acks_on_segment(SEGMENT)
    await store.operations_of(T1)
    assert await store.transactions_with_records(100) == {T1}
    assert len(metadata.fresh) >= 6
    assert all(metadata.fresh)


async def test_w7_an_epoch_is_taken_on_the_version_read(store: TransactionStore) -> None:
    version = await store.put_owner(SEGMENT, OwnerRecord(1, "a"), ABSENT)
    await store.put_owner(SEGMENT, OwnerRecord(2, "b"), version)
    with pytest.raises(VersionConflict):
        await store.put_owner(SEGMENT, OwnerRecord(2, "a"), version)


async def test_t1_a_number_is_reserved_by_one_and_its_header_made_once(
    store: TransactionStore,
) -> None:
    zero = CoordinatorId(0)
    blocks = [await store.reserve_numbers(zero, 10) for _ in range(3)]
    assert blocks == [range(10), range(10, 20), range(20, 30)]
    at_once = await asyncio.gather(*(store.reserve_numbers(zero, 10) for _ in range(3)))
    assert sorted(block.start for block in at_once) == [30, 40, 50], "all read 30"
    await store.create_header(T1, OPEN)
    with pytest.raises(VersionConflict):
        await store.create_header(T1, OPEN)


async def test_t2_an_end_is_written_on_the_version_read(store: TransactionStore) -> None:
    version = await store.create_header(T1, OPEN)
    await store.end_header(T1, end_header(OPEN, TxnState.COMMITTED, 1), version)
    with pytest.raises(VersionConflict):
        await store.end_header(T1, end_header(OPEN, TxnState.ABORTED, 2), version)
    stored = await store.read_header(T1)
    assert stored is not None
    assert stored.header.state is TxnState.COMMITTED


async def begun(store: TransactionStore, first: int, count: int, nonce: str) -> None:
    """Groups that are due one after the other."""
    for number in range(first, first + count):
        header = Header(TxnState.OPEN, 60_000 + number, 1000, group=Group(nonce, 1))
        await store.create_header(TxnId(0, number), header)


async def test_a_page_of_headers_ends_with_their_number_or_their_bytes(
    store: TransactionStore,
) -> None:
    store = TransactionStore(store.metadata, store.counters, page_bytes=256 * 1024)
    await begun(store, 0, TXN_PAGE + 200, "small")
    await begun(store, 2 * TXN_PAGE, 200, "large" * 800)
    pages = [[each.txn.least for each in page] async for page in store.open_headers()]
    numbers = [*range(TXN_PAGE + 200), *range(2 * TXN_PAGE, 2 * TXN_PAGE + 200)]
    assert [number for page in pages for number in page] == numbers
    assert len(pages[0]) == TXN_PAGE
    assert len(pages[1]) <= 200 + 66, "large ones right behind small ones"
    assert max(map(len, pages[2:])) <= 66


async def test_headers_of_one_moment_may_be_more_than_a_page(
    store: TransactionStore,
) -> None:
    store = TransactionStore(store.metadata, store.counters, page_bytes=8 * 1024)
    for number in range(20):
        header = Header(TxnState.OPEN, 60_000 + number // 10, 1000, group=Group("x" * 4000, 1))
        await store.create_header(TxnId(0, number), header)
    found = [each.txn.least async for page in store.open_headers() for each in page]
    assert found == list(range(20))
