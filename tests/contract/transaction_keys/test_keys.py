"""Transaction keys on a coordinator of their own, whatever metadata store that stands on."""

import asyncio

import pytest

from magnetar.protocol.txn_id import TxnId
from txn.coordinator import Coordinator
from txn.errors import InvalidTxnStatus, TransactionKeyFenced, TransactionKeyNotFound
from txn.records import KeyEpoch, TxnState
from txn.transaction_key import NO_EPOCH, KeyName, OpenedKey

NAME = KeyName("", "k")
COMMIT, ABORT = TxnState.COMMITTED, TxnState.ABORTED


async def begin(led: Coordinator, epoch: int, beginner: str = "") -> TxnId:
    return await led.keys.begin(NAME, epoch, beginner, 60_000)


async def end(led: Coordinator, txn: TxnId, epoch: int) -> None:
    key = KeyEpoch(NAME.key, epoch)
    await led.keys.under(NAME, epoch, lambda: led.end_transaction(txn, COMMIT, None, key))


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


async def test_an_open_that_is_sent_again_is_answered_again(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    first, second = leaders
    await first.keys.open(NAME, NO_EPOCH, "")
    made = await first.keys.open(NAME, 0, "me")
    txn = await begin(first, 1)
    for led in leaders:
        for presented in (0, NO_EPOCH):
            assert await led.keys.open(NAME, presented, "me") == made
        with pytest.raises(TransactionKeyFenced):
            await led.keys.open(NAME, 0, "you")
        await led.require_open(txn, None, KeyEpoch(NAME.key, 1))  # a late copy ends nothing
    assert await second.keys.open(NAME, 1, "me") == OpenedKey(2, txn, ABORT)
    assert await first.keys.open(NAME, 2, "you") == OpenedKey(3, txn, ABORT), "none begun since"


async def test_of_many_that_open_at_once_each_gets_its_own_epoch(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    found = await asyncio.gather(
        *(leaders[n % 2].keys.open(NAME, NO_EPOCH, f"{n}") for n in range(8))
    )
    assert sorted(each.epoch for each in found) == list(range(8))
    await asyncio.gather(
        *(leaders[n % 2].keys.open(NAME, 7, f"with 7, {n}") for n in range(8)),
        return_exceptions=True,
    )
    last = await leaders[0].keys.open(NAME, NO_EPOCH, "")
    assert last.epoch == 9, "of those that presented 7 one had it"


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


async def test_a_begin_that_is_sent_again_begins_nothing_more(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    await leaders[0].keys.open(NAME, NO_EPOCH, "")
    (txn,) = set(await asyncio.gather(*(begin(leaders[n % 2], 0, "me") for n in range(8))))
    (left,) = (each for led in leaders for each in led.open_transactions())
    assert left.txn == txn
    for other in ("", "you"):
        with pytest.raises(InvalidTxnStatus, match=f"{txn} of key 'k' is open"):
            await begin(leaders[0], 0, other)


async def test_transaction_ended_by_another_leader_frees_its_key(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    """One that was deposed may end what its successor has in memory as open."""
    deposed, leader = leaders
    await leader.keys.open(NAME, NO_EPOCH, "")
    txn = await begin(leader, 0, "me")
    await end(deposed, txn, 0)
    again = await begin(leader, 0, "me")
    assert again != txn, "it is over"
    assert [each.txn for each in leader.open_transactions()] == [again]


async def test_epochs_of_a_deleted_key_are_not_given_again(
    leaders: tuple[Coordinator, Coordinator],
) -> None:
    for epoch in range(3):
        assert (await leaders[0].keys.open(NAME, NO_EPOCH, f"{epoch}")).epoch == epoch
    txn = await begin(leaders[0], 2)
    await leaders[1].keys.delete(NAME)
    stored = await leaders[0].read_header(txn)
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
