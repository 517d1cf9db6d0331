"""K5: the connections that hold a transaction key, and which of them are closed."""

import asyncio

import pytest

from tests.unit.txn.coordinator_world import World
from tests.unit.txn.keyed import KEY, Holder, begin, open_key
from tests.unit.txn.virtual_time import in_virtual_time
from txn import key_holders
from txn.errors import TooManyTransactionKeys, TransactionKeyFenced


@in_virtual_time
async def test_k5_a_newer_epoch_closes_the_connections_of_older_ones() -> None:
    async with World().coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        first, attached, second = Holder(), Holder(), Holder()
        await open_key(led, holder=first)
        await keys.attach(name, 0, attached)
        await open_key(led, holder=second)
        assert [len(each.closed) for each in (first, attached, second)] == [1, 1, 0]
        await open_key(led, holder=second)
        assert not second.closed, "it holds the newer epoch itself"
        await keys.attach(name, 2, attached)
        with pytest.raises(TransactionKeyFenced):
            await keys.attach(name, 1, attached)
        assert keys.holders.epoch_of(name, attached) == 2
        with pytest.raises(TransactionKeyFenced):
            await keys.attach(name, 1, first)
        assert keys.holders.count_of(name) == 2
        second.end()
        attached.end()
        assert not keys.holders.is_held(name)
        assert len(keys.holders) == 0


@in_virtual_time
async def test_k5_who_attaches_while_the_key_is_opened_is_refused_or_closed() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        await open_key(led)
        for turns in range(12):
            holder = Holder()
            now = (await keys.get(name)).record.epoch
            opening = asyncio.ensure_future(open_key(led))
            for _ in range(turns):
                await asyncio.sleep(0)
            try:
                await keys.attach(name, now, holder)
            except TransactionKeyFenced:
                continue
            finally:
                await opening
            assert holder.closed


@in_virtual_time
async def test_k5_an_open_that_a_newer_one_overtakes_holds_nothing() -> None:
    """It is slow to abort what was open; meanwhile another one opens the key."""
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        await open_key(led)
        await begin(led, 0)
        go_on = asyncio.Event()

        async def wait(what: str, key: str) -> None:
            if what == "put" and key.startswith("/txn/id/"):
                world.metadata.before = None
                await go_on.wait()

        world.metadata.before = wait
        slow, newest = Holder(), Holder()
        opening = asyncio.ensure_future(open_key(led, opener="slow", holder=slow))
        await asyncio.sleep(0.001)
        assert (await open_key(led, opener="newest", holder=newest)).epoch == 2
        go_on.set()
        with pytest.raises(TransactionKeyFenced):
            await opening
        assert keys.holders.epoch_of(name, newest) == 2
        assert keys.holders.count_of(name) == 1
        assert not newest.closed


@in_virtual_time
async def test_k5_a_wrong_attach_hides_no_holder_from_an_open() -> None:
    """A connection that holds an old epoch asks for one that there is not, at any moment of it."""
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        for turns in range(12):
            holder = Holder()
            now = (await open_key(led, holder=holder)).epoch
            opening = asyncio.ensure_future(open_key(led))
            for _ in range(turns):
                await asyncio.sleep(0)
            with pytest.raises(TransactionKeyFenced):
                await keys.attach(name, now + 99, holder)
            await opening
            assert holder.closed, turns


@in_virtual_time
async def test_k5_who_is_closed_while_it_attaches_is_not_remembered() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        await open_key(led)
        holder = Holder()

        async def goes(what: str, key: str) -> None:
            world.metadata.before = None
            holder.end()

        world.metadata.before = goes
        await keys.attach(name, 0, holder)
        assert not keys.holders.is_held(name)


@in_virtual_time
async def test_k5_what_is_remembered_is_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_holders, "TXN_KEY_CONNECTIONS", 2)
        async with World().coordinators() as (led, _):
            keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
            first, second, third = Holder(), Holder(), Holder()
            await open_key(led, holder=first)
            await keys.attach(name, 0, second)
            with pytest.raises(TooManyTransactionKeys):
                await keys.attach(name, 0, third)
            with pytest.raises(TooManyTransactionKeys):
                await open_key(led, holder=third)
            await keys.attach(name, 0, first)
            second.end()
            await keys.attach(name, 0, third)
