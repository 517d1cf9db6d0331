"""What groups of a coordinator commit, once each, and what their key tells of it."""

import asyncio

import pytest

from config.bounds import (
    TXN_ATTEMPT_BLOCK,
    TXN_GROUP_HEADER_BYTES,
    TXN_GROUP_POSITIONS_BYTES,
    TXN_KEY_QUERIES,
)
from magnetar.protocol.txn_id import LAST_ATTEMPT, TxnId
from storage.metadata.store import MetadataError
from tests.unit.txn.coordinator_world import World, failing, hold_next
from tests.unit.txn.grouped import (
    BATCH,
    HEADERS,
    KEY_PATH,
    a_round,
    attempt,
    begin_attempt,
    commit,
    groups_of,
    key_record,
    writes,
)
from tests.unit.txn.keyed import ABORT, COMMIT, KEY, NAME, begin, open_key, state_of
from tests.unit.txn.virtual_time import in_virtual_time
from txn import records
from txn.errors import (
    InvalidGroup,
    InvalidTxnStatus,
    TransactionKeyFenced,
    TransactionNotFound,
)
from txn.group import Batch, GroupRecord, SegmentCount, bounded_commit
from txn.header import OPERATOR
from txn.records import KeyEpoch, TxnState
from txn.transaction_groups import CommittedGroup
from txn.transaction_key import OpenedKey


@in_virtual_time
async def test_g4_a_commit_is_one_write_and_is_answered_again() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        writes(world)
        done = await commit(led, [one])
        assert writes(world) == [("put", records.header_key(one))]
        assert await commit(led, [one]) == done
        assert await commit(led) == done, "one that lost what it knew"
        with pytest.raises(InvalidTxnStatus):
            await commit(led, [one], Batch("q", 1))
        with pytest.raises(InvalidTxnStatus):
            await commit(led, [one], Batch("other", 0))
        assert writes(world) == []
        await a_round(parts).collect()
        assert await state_of(parts, one) is None
        assert await commit(led, [one]) == done, "the key tells, when the header is collected"


@in_virtual_time
async def test_g4_the_group_must_be_the_keys_and_of_that_nonce() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        for nonce, group in (("n", TxnId(one.most, 999)), ("m", one.group), ("m", None)):
            with pytest.raises(InvalidTxnStatus):
                await commit(led, nonce=nonce, group=group)
        for winners in (
            [one.group],
            [one, one.group.attempt_of(TXN_ATTEMPT_BLOCK + 1)],
            [TxnId(one.most, one.least + 1)],
        ):
            with pytest.raises(InvalidGroup):
                await commit(led, winners, group=one.group)
        with pytest.raises(InvalidGroup):
            await groups_of(led).commit(NAME, 0, "", None, bounded_commit(BATCH, None, []), [])
        assert await state_of(parts, one) is TxnState.OPEN
        await groups_of(led).abort(NAME, 0)
        with pytest.raises(InvalidTxnStatus, match="has ended"):
            await commit(led, [one])


@in_virtual_time
async def test_g4_only_the_group_ends_its_attempts() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        key = KeyEpoch(KEY, 0)
        for txn, action in ((one, COMMIT), (one, ABORT), (one.group, COMMIT)):
            for owner, under in ((None, key), (OPERATOR, None)):
                with pytest.raises(InvalidTxnStatus, match="of a group"):
                    await led.end_transaction(txn, action, owner, under)
        with pytest.raises(TransactionNotFound):
            await led.end_transaction(one.group.attempt_of(LAST_ATTEMPT), ABORT, None, key)
        assert await state_of(parts, one) is TxnState.OPEN
        await led.end_transaction(one.group, ABORT, None, key)
        assert await state_of(parts, one) is ABORT


@in_virtual_time
async def test_g4_commit_overtaken_by_a_newer_epoch_is_fenced() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        go_on = hold_next(world.metadata, "put", HEADERS)
        late = asyncio.ensure_future(commit(led, [one]))
        await asyncio.sleep(0.001)
        assert await open_key(led) == OpenedKey(1, one.group, ABORT)
        go_on.set()
        with pytest.raises(TransactionKeyFenced):
            await late
        assert await state_of(parts, one) is ABORT


@in_virtual_time
async def test_g4_commit_during_an_open_is_fenced() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        one = await begin_attempt(led)
        go_on = hold_next(world.metadata, "put", HEADERS)
        opening = asyncio.ensure_future(open_key(led))
        await asyncio.sleep(0.001)
        with pytest.raises(TransactionKeyFenced):
            await commit(led, [one])
        go_on.set()
        assert await opening == OpenedKey(1, one.group, ABORT)


@in_virtual_time
async def test_g4_an_empty_batch_is_recorded() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        committed = await commit(led, positions="here")
        assert committed.group is not None
        assert not committed.done
        assert await state_of(parts, committed.group) is COMMIT
        assert await commit(led) == committed
        assert (await open_key(led)).committed == GroupRecord(BATCH, "here", committed.group)
        with pytest.raises(InvalidGroup):
            await groups_of(led).commit(
                NAME, 1, "m", None, bounded_commit(Batch("q", 9), None, []), [committed.group]
            )
        assert led.open_transactions() == []


@in_virtual_time
async def test_g4_an_abort_is_not_taken_for_a_commit_after_an_unknown_outcome() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        one = await begin_attempt(led)
        world.metadata.before = failing("put", HEADERS)
        with pytest.raises(MetadataError):
            await commit(led, [one])
        world.metadata.before = None
        await groups_of(led).abort(NAME, 0)
        with pytest.raises(InvalidTxnStatus, match="has ended"):
            await commit(led, [one])


@in_virtual_time
async def test_commit_too_large_for_a_header_is_refused_before_the_write() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        one, two = await begin_attempt(led), await begin_attempt(led)
        names = [f"segment://public/default/{'x' * 200}/{n}" for n in range(4000)]
        counts = {name: SegmentCount(2**60, 2**63) for name in names}
        with pytest.raises(InvalidGroup, match=f"and {TXN_GROUP_HEADER_BYTES} is the most"):
            await groups_of(led).commit(
                NAME, 0, "n", one.group, bounded_commit(BATCH, None, [(one, counts)]), [one]
            )
        assert await state_of(parts, one) is TxnState.OPEN
        some = dict(list(counts.items())[:2400])
        both = bounded_commit(BATCH, "x" * TXN_GROUP_POSITIONS_BYTES, [(one, some), (two, some)])
        assert both.totals is None
        await groups_of(led).commit(NAME, 0, "n", one.group, both, [one, two])
        stored = await parts.store.read_header(one.group)
        assert stored is not None
        assert stored.header.group is not None
        kept = stored.header.group.commit
        assert kept is not None
        assert kept.totals is not None, "the totals fit, the counts of each do not"
        assert set(kept.winners) == {1, 2}


@in_virtual_time
async def test_g5_commit_is_folded_into_the_key_when_the_next_group_is_named() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        first = await begin_attempt(led)
        await commit(led, [first], positions="p")
        assert (await key_record(parts, led)).committed is None, "the header tells it"
        writes(world)
        second = await begin_attempt(led, nonce="m")
        assert writes(world) == [("put", records.header_key(second)), ("put", KEY_PATH)]
        assert (await key_record(parts, led)).committed == GroupRecord(BATCH, "p", first.group)
        await groups_of(led).abort(NAME, 0)
        assert (await open_key(led)).committed == GroupRecord(BATCH, "p", first.group)
        plain = await begin(led, 1)
        await led.end_transaction(plain, COMMIT, None, KeyEpoch(KEY, 1))
        assert (await open_key(led)).committed == GroupRecord(BATCH, "p", first.group)


@in_virtual_time
async def test_g5_a_plain_transaction_folds_too() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        first = await begin_attempt(led)
        await commit(led, [first])
        await begin(led, 0)
        assert (await key_record(parts, led)).committed == GroupRecord(BATCH, None, first.group)


@in_virtual_time
async def test_g5_commit_is_folded_into_the_key_before_its_header_is_deleted() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        await commit(led, [one])
        world.metadata.before = failing("put", KEY_PATH)
        assert await a_round(parts).collect() == 0
        assert await state_of(parts, one) is COMMIT, "the key does not know it yet"
        world.metadata.before = None
        writes(world)
        assert await a_round(parts).collect() == 1
        assert writes(world) == [("put", KEY_PATH), ("delete", records.header_key(one))]
        assert (await key_record(parts, led)).committed == GroupRecord(BATCH, None, one.group)
        assert (await open_key(led)).committed == GroupRecord(BATCH, None, one.group)
        assert await attempt(led, 1, "m", batch=BATCH) is None


@in_virtual_time
async def test_g5_a_commit_that_is_sent_again_while_its_header_is_collected_is_answered() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        done = await commit(led, [one])

        async def collect(what: str, key: str) -> None:
            if (what, key) == ("get", records.header_key(one)):
                world.metadata.before = None
                assert await a_round(parts).collect() == 1

        world.metadata.before = collect
        assert await commit(led, [one]) == done
        assert await state_of(parts, one) is None


@in_virtual_time
async def test_g5_an_open_after_collection_returns_the_last_commit() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        await commit(led, [one])
        reads = 0

        async def collect(what: str, key: str) -> None:
            nonlocal reads
            reads += (what, key) == ("get", records.header_key(one))
            if reads == 2:
                world.metadata.before = None
                assert await a_round(parts).collect() == 1

        world.metadata.before = collect
        committed = GroupRecord(BATCH, None, one.group)
        assert await open_key(led) == OpenedKey(1, one.group, COMMIT, committed)
        assert reads == 2


@in_virtual_time
async def test_g5_earlier_queries_keep_their_last_batch() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        for number in range(TXN_KEY_QUERIES + 2):
            for batch in range(2):
                query = f"q{number}"
                await commit(led, batch=Batch(query, batch), nonce=f"{query}-{batch}")
        for number in range(1, TXN_KEY_QUERIES + 2):
            old = await attempt(led, nonce="x", batch=Batch(f"q{number}", 1))
            assert old is None, f"{number} is remembered"
        forgotten = await attempt(led, nonce="x", batch=Batch("q0", 1))
        assert forgotten is not None
        again = await commit(led, nonce="x", batch=Batch("q5", 2))
        assert not again.done
        await begin_attempt(led, nonce="y")
        record = await key_record(parts, led)
        queries = [each.query for each in record.earlier]
        assert len(queries) == len(set(queries)) == TXN_KEY_QUERIES
        assert "q5" not in queries


@in_virtual_time
async def test_g6_a_batch_that_was_committed_is_done() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        first = await begin_attempt(led)
        await commit(led, [first], Batch("q", 5))
        for batch in (0, 4, 5):
            assert await attempt(led, nonce="m", batch=Batch("q", batch)) is None
        assert led.open_transactions() == []
        replay = await begin_attempt(led, nonce="m")
        answer = await commit(led, [replay], Batch("q", 5), nonce="m")
        assert answer == CommittedGroup(True, first.group)
        assert await state_of(parts, replay) is ABORT
        assert await commit(led, [replay], Batch("q", 5), nonce="m") == answer
        assert await commit(led, [], Batch("q", 4), nonce="z") == CommittedGroup(True, None)
        assert await attempt(led, nonce="k", batch=Batch("q", 6)) is not None
        await open_key(led)
        assert await attempt(led, 1, "l", batch=Batch("q", 5)) is None
        assert sum(one.counters.groups_done for one in led.led()) == 7


@in_virtual_time
async def test_g6_another_batch_under_the_number_of_the_last_one_is_refused() -> None:
    """A job that lost what it noted of its last batch plans another one under that number."""
    async with World().coordinators() as (led, parts):
        await open_key(led)
        first = await begin_attempt(led)
        await commit(led, [first], Batch("q", 5), positions="as planned")
        other = await begin_attempt(led, nonce="m")
        with pytest.raises(InvalidTxnStatus, match="with other positions"):
            await commit(led, [other], Batch("q", 5), nonce="m", positions="planned anew")
        assert await state_of(parts, other) is ABORT
        with pytest.raises(InvalidTxnStatus, match="with other positions"):
            await commit(led, [], Batch("q", 5), nonce="z", positions="planned anew")
        for batch, positions in ((5, "as planned"), (5, None), (4, "planned anew")):
            done = await commit(led, [], Batch("q", batch), nonce="y", positions=positions)
            assert done.done
