"""Loads beside other owners: their order (W7, W8), and whose claims they take up (W6)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol.ids import Position
from tests.support.waiting import until
from tests.unit.txn.buffer_world import SEGMENT, T1, World, a_world
from txn import records
from txn.buffer import SegmentBuffer
from txn.records import Claim, TxnState
from txn.store import TransactionStore


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with a_world("memory", tmp_path) as world:
        yield world


async def test_w8_abort_by_a_stale_owner_during_the_load_is_in_the_aborted_set(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It records the abort and deletes its claim just before the claims are scanned."""
    await world.begin(T1)
    up_to = await world.append(T1)
    await world.buffer.close()
    await world.end(T1, TxnState.ABORTED)
    scan = TransactionStore.claims_on

    async def finish_then_scan(store: TransactionStore, segment: str) -> list[Claim]:
        await TransactionStore.record_aborted(store, segment, T1, up_to)
        key = records.claim_key(T1, segment, 1)
        await TransactionStore.delete_operation(store, T1, key)
        return await scan(store, segment)

    monkeypatch.setattr(TransactionStore, "claims_on", finish_then_scan)
    await world.load()
    assert world.buffer.is_aborted(T1)


async def test_w7_end_after_the_header_was_read_reaches_the_buffer(
    world: World,
) -> None:
    """Followed before its header is read, else the end falls between the two."""
    await world.begin(T1)
    await world.append(T1)
    await world.buffer.close()
    followed_at_read: list[int] = []
    before = world.store._before

    async def noting(name: str) -> None:
        if name == "read_header":
            followed_at_read.append(world.decisions.followed)
        await before(name)

    world.store._before = noting  # type: ignore[method-assign]
    await world.load()
    assert followed_at_read == [1]
    await world.end(T1, TxnState.COMMITTED)
    await until(lambda: world.buffer.max_read_position == world.ledger.last_confirmed)


async def test_w6_a_load_takes_up_no_claims_of_later_owners(world: World) -> None:
    """This one was fenced in mid-load; the live owner relies on its claim."""
    await world.begin(T1)
    await world.append(T1)
    await world.buffer.close()
    await world.end(T1, TxnState.COMMITTED)
    behind = world.owner()
    await behind.take()
    live = Claim(T1, SEGMENT, behind.epoch + 1, Position(5, 0))
    await world.store.put_claim(live)
    world.buffer = await SegmentBuffer.load(SEGMENT, world.ledger, behind, world.parts)
    await until(lambda: world.buffer.idle)
    assert await world.store.claims_on(SEGMENT) == [live]


async def test_w6_a_stale_owner_deletes_its_own_claims_only(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    live = Claim(T1, SEGMENT, 2, Position(5, 0))
    await world.store.put_claim(live)
    await world.end(T1, TxnState.COMMITTED)
    await until(lambda: world.buffer.idle)
    assert await world.store.claims_on(SEGMENT) == [live]


async def test_w13_an_open_transaction_pins_its_floor_after_a_load(world: World) -> None:
    """The floor is what was confirmed when the claim was put: entries come after it."""
    shown = world.ledger.confirm()
    await world.begin(T1)
    await world.append(T1)
    await world.append(T1)
    (claim,) = await world.store.claims_on(SEGMENT)
    assert claim.floor == shown
    await world.reload()
    assert world.buffer.max_read_position == shown
    assert world.ledger.last_confirmed == Position(5, 2)
