"""Transaction keys of a coordinator: what is shown neither by the schedules nor by the contract.

Clients that go away, answers of the store that are lost, time, owners, bounds.
"""

import asyncio
from contextlib import suppress

import pytest

from config.bounds import TXN_PAGE_BYTES
from magnetar.protocol.txn_id import CoordinatorId
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.unit.txn.coordinator_world import World, failing
from tests.unit.txn.keyed import ABORT, COMMIT, KEY, NAME, Holder, begin, open_key, state_of
from tests.unit.txn.virtual_time import in_virtual_time
from txn import key_records
from txn.coordinators import Coordinators
from txn.errors import (
    TooManyTransactionKeys,
    TransactionKeyFenced,
    TransactionKeyNotFound,
)
from txn.key_collector import TransactionKeyCollector
from txn.key_store import TransactionKeyStore
from txn.records import KeyEpoch
from txn.transaction_key import NO_EPOCH, KeyName, OpenedKey, name_transaction, new_key_record

DAY_MS = 24 * 3600 * 1000


@in_virtual_time
async def test_k2_an_open_goes_on_when_its_client_goes_away() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        txn = await begin(led, 0)
        world.metadata.calls.clear()
        task = asyncio.ensure_future(open_key(led))
        while ("put", key_records.key_path(NAME)) not in world.metadata.calls[-1:]:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(1)
        assert await state_of(parts, txn) is ABORT


@in_virtual_time
async def test_k2_a_round_ends_what_an_open_that_died_left_open() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        txn = await begin(led, 0)
        world.metadata.before = failing("put", "/txn/id/")
        with pytest.raises(MetadataError):
            await open_key(led)
    async with world.coordinators() as (led, parts):
        collector = TransactionKeyCollector(led, interval_s=1000, retention_s=7 * 24 * 3600)
        collector.start()
        await asyncio.sleep(1)
        assert await state_of(parts, txn) is ABORT
        await collector.stop()


@pytest.mark.parametrize("made", [True, False])
def test_k3_a_begin_of_unknown_outcome_is_named_or_aborted(*, made: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        world = World()
        async with world.coordinators() as (led, parts):
            await open_key(led)
            store = TransactionKeyStore(parts.store.metadata, led.coordinator_of(KEY))

            async def lose(what: str, key: str) -> None:
                if (what, key) != ("put", key_records.key_path(NAME)):
                    return
                world.metadata.before = None
                if made:
                    (one,) = led.open_transactions()
                    stored = await store.read(NAME)
                    assert stored is not None
                    await store.change(stored, name_transaction(stored.record, one.txn, "", 0))
                raise MetadataError("The answer was lost: ask again.")

            world.metadata.before = lose
            if made:
                txn = await begin(led, 0)
                assert [each.txn for each in led.open_transactions()] == [txn]
            else:
                with pytest.raises(MetadataError):
                    await begin(led, 0)
                assert led.open_transactions() == []

    run()


@in_virtual_time
async def test_a_deadline_ends_a_keyed_transaction() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        txn = await begin(led, 0)
        await asyncio.sleep(61)
        assert await state_of(parts, txn) is ABORT
        assert await begin(led, 0) != txn


@in_virtual_time
async def test_a_key_is_its_owners_own() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        keys, name = led.keys_of(led.coordinator_of(KEY), "alice", KEY)
        assert (await keys.open(name, NO_EPOCH, "")).epoch == 0
        txn = await led.begin(led.coordinator_of(KEY), 1000, "alice", KeyEpoch(KEY, 0))
        with pytest.raises(Exception, match="There is no transaction"):
            await led.end_transaction(txn, COMMIT, None, KeyEpoch(KEY, 0))
        await open_key(led)
        await led.end_transaction(txn, COMMIT, "alice", KeyEpoch(KEY, 0))


@in_virtual_time
async def test_no_more_keys_are_read_than_a_page_has() -> None:
    """A store that is to look at the partition of each hit cannot stop at the limit."""
    world = World()
    store = TransactionKeyStore(world.metadata, CoordinatorId(3))
    await store.create(NAME, new_key_record(1))
    asked: list[dict[str, object]] = []
    scan = world.metadata.scan_index

    async def scan_index(index: str, lo: str, hi: str, **given: object) -> object:
        asked.append(given)
        return await scan(index, lo, hi, **given)

    world.metadata.scan_index = scan_index  # type: ignore[method-assign]
    assert [each.name for each in (await store.page("", 5))[0]] == [NAME]
    assert asked == [{"limit": 5, "max_bytes": TXN_PAGE_BYTES}]


# K7: what is deleted


async def collect(led: Coordinators, retention_ms: int = 7 * DAY_MS) -> None:
    for one in led.led():
        await one.keys.collect(retention_ms)


@in_virtual_time
async def test_k7_an_idle_key_goes_and_its_next_epoch_is_higher() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        holder = Holder()
        for _ in range(5):
            await open_key(led, holder=holder)
        world.clock.shift_ms += 8 * DAY_MS
        await collect(led)
        assert (await keys.get(name)).record.last_used_ms == world.clock.now_ms(), "held"
        assert keys.tally is not None
        assert (keys.tally.count, keys.tally.highest_epoch) == (1, 4)
        holder.end()
        await collect(led)
        await keys.get(name)
        txn = await begin(led, 4)
        world.clock.shift_ms += 8 * DAY_MS
        await collect(led)
        await keys.get(name)  # its transaction is open
        await led.end_transaction(txn, COMMIT, None, KeyEpoch(KEY, 4))
        await collect(led)
        assert keys.tally is not None
        assert keys.tally.count == 0
        with pytest.raises(TransactionKeyNotFound):
            await keys.get(name)
        for zombie in (lambda: open_key(led, 4), lambda: begin(led, 4)):
            with pytest.raises(TransactionKeyFenced):
                await zombie()
        assert await open_key(led) == OpenedKey(5, None, None)
        with pytest.raises(TransactionKeyFenced):
            await begin(led, 4)


@in_virtual_time
async def test_k7_key_used_during_a_collection_stays() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        await open_key(led)
        world.clock.shift_ms += 8 * DAY_MS

        async def use(what: str, key: str) -> None:
            if what == "delete":
                world.metadata.before = None
                await begin(led, 0)

        world.metadata.before = use
        await collect(led)
        assert (await keys.get(name)).record.transaction is not None


@in_virtual_time
async def test_k7_attaching_during_a_collection_keeps_the_key() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        await open_key(led)
        holder = Holder()

        async def attach(what: str, key: str) -> None:
            if what == "put" and key.startswith(key_records.FLOORS):
                world.metadata.before = None
                await keys.attach(name, 0, holder)

        world.clock.shift_ms += 8 * DAY_MS
        world.metadata.before = attach
        await collect(led)
        assert not holder.closed
        assert (await keys.get(name)).record.epoch == 0


@in_virtual_time
async def test_keys_of_a_coordinator_are_bounded() -> None:
    async with World().coordinators(parallelism=1) as (led, _):
        keys, _ = led.keys_of(CoordinatorId(0), None, KEY)
        await open_key(led)
        await collect(led)
        with pytest.MonkeyPatch.context() as patch:
            set_bound(patch, "TXN_KEYS_OF_COORDINATOR", 1)
            with pytest.raises(TooManyTransactionKeys):
                await keys.open(KeyName("", "another"), NO_EPOCH, "")
            await open_key(led)


@pytest.mark.parametrize("bound", ["TXN_KEYS_OF_COORDINATOR", "TXN_KEY_CONNECTIONS"])
def test_a_role_leaves_as_many_keys_to_others_as_it_has(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any role may open keys: none locks out the others, over one connection or many."""
    set_bound(monkeypatch, bound, 12)

    @in_virtual_time
    async def run() -> None:
        async with World().coordinators(parallelism=1) as (led, _):
            keys, _ = led.keys_of(CoordinatorId(0), "mallory", KEY)
            await collect(led)

            async def open_keys(owner: str, count: int) -> int:
                holder, opened = Holder(), 0
                with suppress(TooManyTransactionKeys):
                    for number in range(count):
                        await keys.open(KeyName(owner, str(number)), NO_EPOCH, "", holder)
                        opened += 1
                return opened

            assert await open_keys("mallory", 100) == 6
            assert await open_keys("alice", 100) == 3
            await keys.delete(KeyName("mallory", "0"))
            assert await open_keys("bob", 2) == 2

    run()


# K5: the connections that hold a key


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
async def test_k5_connection_closed_while_it_attaches_is_not_remembered() -> None:
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
async def test_k5_remembered_connections_are_bounded() -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_bound(patch, "TXN_KEY_CONNECTIONS", 2)
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
