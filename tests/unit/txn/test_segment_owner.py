"""Epochs and the proof of owning a segment."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from storage.metadata.store import MetadataError
from tests.support.waiting import until
from tests.unit.txn.buffer_world import SEGMENT, World, a_world
from txn.errors import SegmentOwnershipLost, TransactionAssertion
from txn.forget_segment import forget_segment


@pytest.fixture(params=["memory", "sqlite"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(request.param, tmp_path) as world:
        yield world


async def test_callers_at_once_share_one_epoch(world: World) -> None:
    owner = world.owner()
    assert await asyncio.gather(*(owner.take() for _ in range(10))) == [1] * 10
    assert await owner.take() == 1
    assert world.store.calls.count("put_owner") == 1


async def test_every_owner_gets_a_higher_epoch(world: World) -> None:
    first, second = world.owner(), world.owner()
    assert sorted(await asyncio.gather(first.take(), second.take())) == [1, 2]
    assert await world.owner().take() == 3


async def test_a_segment_made_again_has_higher_epochs_than_any_that_was_deleted(
    world: World,
) -> None:
    """Else a late claim of its former life has the key of one of the new owner (W3, W6)."""
    for _ in range(3):
        last = await world.owner().take()
    await forget_segment(world.store, SEGMENT)
    assert await world.owner().take() == last + 1
    await forget_segment(world.store, SEGMENT)
    await forget_segment(world.store, "segment://t/n/other/0000-ffff-0")
    assert await world.owner().take() == last + 2


async def test_a_put_of_unknown_outcome_costs_an_epoch(world: World) -> None:
    owner = world.owner()
    world.store.lost["put_owner"] = 1
    with pytest.raises(MetadataError):
        await owner.take()
    assert await owner.take() == 2


async def test_one_write_proves_ownership_for_all_earlier_calls(world: World) -> None:
    owner = world.owner()
    await owner.take()
    world.store.calls.clear()
    gate = world.store.held["put_owner"] = asyncio.Event()
    first = [asyncio.create_task(owner.confirm()) for _ in range(3)]
    await until(lambda: world.store.calls == ["put_owner"])
    later = [asyncio.create_task(owner.confirm()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in first + later)
    gate.set()
    await asyncio.gather(*first, *later)
    assert world.store.calls == ["put_owner"] * 2


async def test_a_replaced_owner_finds_out_and_is_lost_for_good(world: World) -> None:
    old, new = world.owner(), world.owner()
    await old.take()
    await new.take()
    for _ in range(2):
        with pytest.raises(SegmentOwnershipLost):
            await old.confirm()
    with pytest.raises(SegmentOwnershipLost):
        await old.take()
    assert len(world.lost) == 1
    await new.confirm()


async def test_an_unknown_outcome_of_its_own_is_no_loss(world: World) -> None:
    owner = world.owner()
    await owner.take()
    world.store.lost["put_owner"] = 1
    with pytest.raises(MetadataError):
        await owner.confirm()
    await owner.confirm()
    await owner.confirm()
    assert world.lost == []


async def test_an_unknown_outcome_does_not_hide_another_owner(world: World) -> None:
    old = world.owner()
    await old.take()
    world.store.failures["put_owner"] = 1
    with pytest.raises(MetadataError):
        await old.confirm()
    await world.owner().take()
    with pytest.raises(SegmentOwnershipLost):
        await old.confirm()


async def test_a_deleted_record_is_a_loss(world: World) -> None:
    owner = world.owner()
    await owner.take()
    await world.store.delete_owner(SEGMENT)
    with pytest.raises(SegmentOwnershipLost):
        await owner.confirm()


async def test_proof_before_the_epoch_is_a_defect(world: World) -> None:
    with pytest.raises(TransactionAssertion):
        await world.owner().confirm()
