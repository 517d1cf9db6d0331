"""Transaction keys of a coordinator, on a store in memory."""

import asyncio

import pytest

from config.bounds import TXN_PAGE_BYTES
from storage.metadata.store import MetadataError
from tests.unit.txn.coordinator_world import World, failing
from tests.unit.txn.keyed import ABORT, COMMIT, KEY, NAME, Holder, begin, open_key, state_of
from tests.unit.txn.virtual_time import in_virtual_time
from txn import key_records
from txn.collector import Collector
from txn.coordinator import Coordinator
from txn.coordinators import Coordinators
from txn.deadlines import Deadlines
from txn.errors import (
    InvalidTransactionKey,
    InvalidTxnStatus,
    TooManyTransactionKeys,
    TransactionKeyFenced,
    TransactionKeyNotFound,
)
from txn.header import OPERATOR
from txn.key_collector import TransactionKeyCollector
from txn.key_store import TransactionKeyStore
from txn.records import KeyEpoch
from txn.transaction_key import NO_EPOCH, KeyName, OpenedKey, begun, unborn
from txn.txn_id import CoordinatorId, TxnId

DAY_MS = 24 * 3600 * 1000


@in_virtual_time
async def test_the_whole_life_of_a_key() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        assert await open_key(led) == OpenedKey(0, None, None)
        txn = await begin(led, 0)
        await led.require_open(txn, None, KeyEpoch(KEY, 0))
        await led.end(txn, COMMIT, None, KeyEpoch(KEY, 0))
        assert await open_key(led, 0) == OpenedKey(1, txn, COMMIT)
        left = await begin(led, 1)
        assert await open_key(led) == OpenedKey(2, left, ABORT)
        assert await state_of(parts, left) is ABORT
        assert await open_key(led, 2) == OpenedKey(3, left, ABORT), "none was begun since"


@in_virtual_time
async def test_k1_an_open_that_is_sent_again_is_answered_again() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        first = await open_key(led, 0, "me")
        assert await open_key(led, 0, "me") == first
        assert await open_key(led, NO_EPOCH, "me") == first
        txn = await begin(led, 1)
        assert await open_key(led, 0, "me") == first, "a late copy ends nothing"
        await led.require_open(txn, None, KeyEpoch(KEY, 1))
        with pytest.raises(TransactionKeyFenced):
            await open_key(led, 0, "you")
        assert (await open_key(led, 1, "me")).epoch == 2


@in_virtual_time
async def test_k1_of_many_that_open_at_once_each_gets_its_own_epoch() -> None:
    async with World().coordinators() as (led, _):
        found = await asyncio.gather(*(open_key(led) for _ in range(8)))
        assert sorted(each.epoch for each in found) == list(range(8))
        await asyncio.gather(*(open_key(led, 7, f"{n}") for n in range(8)), return_exceptions=True)
        assert (await open_key(led)).epoch == 9, "of those that presented 7 one had it"


@in_virtual_time
async def test_k2_what_was_open_has_ended_when_open_is_answered() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        txn = await begin(led, 0)
        world.metadata.before = failing("put", "/txn/id/")
        with pytest.raises(MetadataError):
            await open_key(led, NO_EPOCH, "me")
        world.metadata.before = None
        assert await open_key(led, NO_EPOCH, "me") == OpenedKey(1, txn, ABORT)


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


@in_virtual_time
async def test_k3_a_key_has_one_open_transaction() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        txn = await begin(led, 0, "me")
        with pytest.raises(InvalidTxnStatus, match=f"{txn} of key 'k' is open"):
            await begin(led, 0)
        with pytest.raises(InvalidTxnStatus):
            await begin(led, 0, "you")
        assert await begin(led, 0, "me") == txn
        await led.end(txn, COMMIT, None, KeyEpoch(KEY, 0))
        assert await begin(led, 0, "me") != txn
        at_once = await asyncio.gather(
            *(begin(led, 0, "you") for _ in range(4)), return_exceptions=True
        )
        assert all(isinstance(each, InvalidTxnStatus) for each in at_once)


@in_virtual_time
async def test_k3_begins_at_once_open_one_and_abort_the_others() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        found = await asyncio.gather(
            *(begin(led, 0, "me") for _ in range(4)), return_exceptions=True
        )
        assert len(set(found)) == 1, "all of the same request"
        (left,) = led.open_transactions()
        assert left.txn == found[0]


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
                    await store.change(stored, begun(stored.record, one.txn, "", 0))
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
async def test_k4_late_requests_get_the_right_error() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        old = await begin(led, 0)
        await open_key(led)
        before, now = KeyEpoch(KEY, 0), KeyEpoch(KEY, 1)
        for late in (
            lambda: begin(led, 0),
            lambda: led.require_open(old, None, before),
            lambda: led.end(old, COMMIT, None, before),
            lambda: led.end(TxnId(old.most, 999), COMMIT, None, before),
        ):
            with pytest.raises(TransactionKeyFenced):
                await late()
        for expired in (
            lambda: led.require_open(old, None, now),
            lambda: led.end(old, COMMIT, None, now),
            lambda: led.end(old, ABORT, None, now),
        ):
            with pytest.raises(InvalidTxnStatus, match="ExpiredTransaction"):
                await expired()
        new = await begin(led, 1)
        for without in (lambda: led.end(new, COMMIT, None), lambda: led.require_open(new, None)):
            with pytest.raises(InvalidTransactionKey):
                await without()
        plain = await led.begin(led.coordinator_of(KEY), 1000, None)
        with pytest.raises(InvalidTransactionKey):
            await led.end(plain, COMMIT, None, now)
        await led.end(plain, COMMIT, None)
        await led.end(new, COMMIT, OPERATOR)


@in_virtual_time
async def test_k4_a_commit_that_a_newer_epoch_overtakes_is_told_of_it() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        txn = await begin(led, 0)
        go_on = asyncio.Event()

        async def wait(what: str, key: str) -> None:
            if what == "put" and key.startswith("/txn/id/"):
                world.metadata.before = None
                await go_on.wait()

        world.metadata.before = wait
        end = asyncio.ensure_future(led.end(txn, COMMIT, None, KeyEpoch(KEY, 0)))
        await asyncio.sleep(0.001)
        assert (await open_key(led)).ended is ABORT
        go_on.set()
        with pytest.raises(TransactionKeyFenced):
            await end


@in_virtual_time
async def test_k4_an_end_that_comes_when_all_is_collected_is_told_of_the_newer_epoch() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        txn = await begin(led, 0)

        async def overtake(what: str, key: str) -> None:
            if what == "put" and key.startswith("/txn/id/"):
                world.metadata.before = None
                await open_key(led)
                stored = await parts.store.read_header(txn)
                assert stored is not None
                await parts.store.delete_header(stored)

        world.metadata.before = overtake
        with pytest.raises(TransactionKeyFenced):
            await led.end(txn, COMMIT, None, KeyEpoch(KEY, 0))


@in_virtual_time
async def test_a_deadline_ends_a_keyed_transaction() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        txn = await begin(led, 0)
        await asyncio.sleep(61)
        assert await state_of(parts, txn) is ABORT
        assert await begin(led, 0) != txn


@in_virtual_time
async def test_a_key_is_served_by_its_own_coordinator() -> None:
    async with World().coordinators() as (led, _):
        elsewhere = CoordinatorId((led.coordinator_of(KEY) + 1) % 4)
        with pytest.raises(InvalidTransactionKey, match="served by coordinator"):
            led.keys_of(elsewhere, None, KEY)
        with pytest.raises(InvalidTransactionKey):
            await led.begin(elsewhere, 1000, None, KeyEpoch(KEY, 0))


@in_virtual_time
async def test_a_key_is_its_owners_own() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        keys, name = led.keys_of(led.coordinator_of(KEY), "alice", KEY)
        assert (await keys.open(name, NO_EPOCH, "")).epoch == 0
        txn = await led.begin(led.coordinator_of(KEY), 1000, "alice", KeyEpoch(KEY, 0))
        with pytest.raises(Exception, match="neither the owner"):
            await led.end(txn, COMMIT, None, KeyEpoch(KEY, 0))
        await open_key(led)
        await led.end(txn, COMMIT, "alice", KeyEpoch(KEY, 0))


# K6: restarts and moves


@in_virtual_time
async def test_k6_keys_outlive_their_leader() -> None:
    world = World()
    async with world.coordinators("a") as (led, _):
        await open_key(led, opener="me")
        txn = await begin(led, 0, "first")
    async with world.coordinators("b") as (led, _):
        assert await open_key(led, opener="me") == OpenedKey(0, None, None)
        assert await begin(led, 0, "first") == txn
        await led.require_open(txn, None, KeyEpoch(KEY, 0))
        assert await open_key(led) == OpenedKey(1, txn, ABORT)


@in_virtual_time
async def test_k6_what_another_leader_ended_keeps_no_key_busy() -> None:
    """One that was deposed may end what its successor has in memory as open."""
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        txn = await begin(led, 0, "first")
        deadlines = Deadlines(world.clock, lambda txns: None)
        deposed = Coordinator(txn.coordinator, world.parts("b"), deadlines, max_open=0)
        await deposed.end(txn, COMMIT, None, KeyEpoch(KEY, 0))
        again = await begin(led, 0, "first")
        assert again != txn, "it is over"
        assert [each.txn for each in led.open_transactions()] == [again]
        await deposed.close()
        deadlines.close()


@in_virtual_time
async def test_no_more_keys_are_read_than_a_page_has() -> None:
    """A store that is to look at the partition of each hit cannot stop at the limit."""
    world = World()
    store = TransactionKeyStore(world.metadata, CoordinatorId(3))
    await store.create(NAME, unborn(1))
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
        await led.end(txn, COMMIT, None, KeyEpoch(KEY, 4))
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
async def test_k7_what_is_used_meanwhile_stays() -> None:
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
async def test_k7_who_attaches_while_an_idle_key_is_collected_keeps_it() -> None:
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
async def test_k7_an_operator_deletes_a_key_with_what_it_has_open() -> None:
    async with World().coordinators() as (led, parts):
        keys, name = led.keys_of(led.coordinator_of(KEY), None, KEY)
        holder = Holder()
        await open_key(led, holder=holder)
        txn = await begin(led, 0)
        await keys.delete(name)
        assert holder.closed
        assert await state_of(parts, txn) is ABORT
        with pytest.raises(TransactionKeyFenced):
            await led.end(txn, COMMIT, None, KeyEpoch(KEY, 0))
        with pytest.raises(TransactionKeyNotFound):
            await keys.delete(name)
        assert (await open_key(led)).epoch == 1


@in_virtual_time
async def test_keys_of_a_coordinator_are_bounded() -> None:
    async with World().coordinators(parallelism=1) as (led, _):
        keys, _ = led.keys_of(CoordinatorId(0), None, KEY)
        await open_key(led)
        await collect(led)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("txn.transaction_keys.TXN_KEYS_OF_COORDINATOR", 1)
            with pytest.raises(TooManyTransactionKeys):
                await keys.open(KeyName("", "another"), NO_EPOCH, "")
            await open_key(led)


# K8: how the last one ended


@in_virtual_time
async def test_k8_who_opens_long_after_is_told_how_the_last_transaction_ended() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        others = [await begin(led, 0)]
        await led.end(others[0], ABORT, None, KeyEpoch(KEY, 0))
        last = await begin(led, 0)
        await led.end(last, COMMIT, None, KeyEpoch(KEY, 0))

        async def none_left(segment: str, found: object) -> bool:
            return True

        collector = Collector(parts, led.leads, none_left, interval_s=1000, retention_s=0)
        assert await collector.collect() == 2
        assert await state_of(parts, last) is None
        assert await open_key(led) == OpenedKey(1, last, COMMIT)
        assert await open_key(led) == OpenedKey(2, last, COMMIT)


@in_virtual_time
async def test_k8_a_header_stays_until_its_end_is_noted() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        last = await begin(led, 0)
        await led.end(last, COMMIT, None, KeyEpoch(KEY, 0))

        async def none_left(segment: str, found: object) -> bool:
            return True

        collector = Collector(parts, led.leads, none_left, interval_s=1000, retention_s=0)
        world.metadata.before = failing("put", "/txn/key/")
        assert await collector.collect() == 0
        assert await state_of(parts, last) is COMMIT
        world.metadata.before = None
        assert await collector.collect() == 1
