"""Transaction keys on a coordinator of their own, whatever metadata store that stands on."""

import asyncio

import pytest

from txn.coordinator import Coordinator
from txn.errors import InvalidTxnStatus, TransactionKeyFenced, TransactionKeyNotFound
from txn.records import KeyEpoch, TxnState
from txn.transaction_key import NO_EPOCH, KeyName, OpenedKey
from txn.txn_id import TxnId

NAME = KeyName("", "k")
COMMIT, ABORT = TxnState.COMMITTED, TxnState.ABORTED


async def begin(led: Coordinator, epoch: int, beginner: str = "") -> TxnId:
    return await led.keys.begin(NAME, epoch, beginner, 60_000)


async def end(led: Coordinator, txn: TxnId, epoch: int) -> None:
    key = KeyEpoch(NAME.key, epoch)
    await led.keys.under(NAME, epoch, lambda: led.end(txn, COMMIT, None, key))


async def test_the_newest_epoch_wins_under_two_leaders(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    deposed, leader = leaders
    assert await deposed.keys.open(NAME, NO_EPOCH, "first") == OpenedKey(0, None, None)
    txn = await begin(deposed, 0)
    assert await leader.keys.open(NAME, NO_EPOCH, "second") == OpenedKey(1, txn, ABORT)
    for led in leaders:
        with pytest.raises(TransactionKeyFenced):
            await end(led, txn, 0)
        with pytest.raises(TransactionKeyFenced):
            await begin(led, 0)
        with pytest.raises(InvalidTxnStatus, match="ExpiredTransaction"):
            await end(led, txn, 1)
    new = await begin(leader, 1)
    await end(deposed, new, 1)
    assert await deposed.keys.open(NAME, 1, "third") == OpenedKey(2, new, COMMIT)


async def test_of_many_that_open_at_once_each_gets_its_own_epoch(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    found = await asyncio.gather(
        *(leaders[n % 2].keys.open(NAME, NO_EPOCH, f"{n}") for n in range(8))
    )
    assert sorted(each.epoch for each in found) == list(range(8))


async def test_of_many_that_begin_at_once_one_does(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    await leaders[0].keys.open(NAME, NO_EPOCH, "")
    found = await asyncio.gather(
        *(begin(leaders[n % 2], 0, f"{n}") for n in range(8)), return_exceptions=True
    )
    (begun,) = (each for each in found if isinstance(each, TxnId))
    assert all(isinstance(each, InvalidTxnStatus) for each in found if each is not begun)
    assert await leaders[0].keys.open(NAME, 0, "") == OpenedKey(1, begun, ABORT)


async def test_epochs_of_a_deleted_key_are_not_given_again(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    for epoch in range(3):
        assert (await leaders[0].keys.open(NAME, NO_EPOCH, f"{epoch}")).epoch == epoch
    txn = await begin(leaders[0], 2)
    await leaders[1].keys.delete(NAME)
    stored = await leaders[0].header(txn)
    assert stored is not None
    assert stored.header.state is ABORT
    with pytest.raises(TransactionKeyNotFound):
        await leaders[0].keys.get(NAME)
    for led in leaders:
        with pytest.raises(TransactionKeyFenced):
            await end(led, txn, 2)
    assert await leaders[0].keys.open(NAME, NO_EPOCH, "") == OpenedKey(3, None, None)


async def test_an_idle_key_is_collected_under_its_floor(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    assert (await leaders[0].keys.open(NAME, NO_EPOCH, "")).epoch == 0
    await leaders[1].keys.collect(retention_ms=-1)
    with pytest.raises(TransactionKeyFenced):
        await begin(leaders[0], 0)
    assert (await leaders[1].keys.open(NAME, NO_EPOCH, "")).epoch == 1
