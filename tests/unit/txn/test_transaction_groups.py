"""Groups of attempts of a coordinator, on a store in memory."""

import asyncio
from dataclasses import replace

import pytest

from config.bounds import (
    TXN_ATTEMPT_BLOCK,
    TXN_COMMITS_REMEMBERED,
    TXN_KEY_NONCES,
    TXN_TIMEOUT_MAX_MS,
)
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import LAST_ATTEMPT, TxnId
from storage.metadata.store import MetadataError
from tests.unit.txn.coordinator_world import World, failing
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
    keys_of,
    writes,
)
from tests.unit.txn.keyed import ABORT, COMMIT, KEY, NAME, begin, open_key, state_of
from tests.unit.txn.virtual_time import ClockSetBack, in_virtual_time
from txn import records
from txn.coordinator import Coordinator
from txn.deadlines import Deadlines
from txn.errors import (
    InvalidGroup,
    InvalidTransactionKey,
    InvalidTxnStatus,
    TooManyTransactions,
    TransactionKeyFenced,
    TransactionNotFound,
)
from txn.group import Batch, GroupRecord, bounded_commit
from txn.records import Claim, KeyEpoch, TxnState
from txn.transaction_groups import CommittedGroup
from txn.transaction_key import OpenedKey


@in_virtual_time
async def test_the_whole_life_of_a_group() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one, two, three = [await begin_attempt(led) for _ in range(3)]
        group = one.group
        assert [each.attempt_index for each in (one, two, three)] == [1, 2, 3]
        assert {each.group for each in (one, two, three)} == {group}
        for each in (one, two, three):
            await led.require_open(each, None, KeyEpoch(KEY, 0))
            assert await state_of(parts, each) is TxnState.OPEN
        found = led.find_open(two)
        assert found is not None
        assert (found.txn, found.header.state) == (two, TxnState.OPEN)
        assert await commit(led, [one, three], positions="p") == CommittedGroup(False, group)
        states = [await state_of(parts, each) for each in (group, one, two, three)]
        assert states == [COMMIT, COMMIT, ABORT, COMMIT]
        assert await state_of(parts, group.attempt_of(TXN_ATTEMPT_BLOCK)) is ABORT
        assert await state_of(parts, group.attempt_of(TXN_ATTEMPT_BLOCK + 1)) is None
        committed = GroupRecord(BATCH, "p", group)
        assert await open_key(led, 0) == OpenedKey(1, group, COMMIT, committed)
        assert await open_key(led, 1) == OpenedKey(2, group, COMMIT, committed)


@in_virtual_time
async def test_g1_attempts_are_used_under_their_groups_key_and_the_group_takes_no_writes() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        one = await begin_attempt(led)
        for wrong in (None, KeyEpoch("other", 0)):
            with pytest.raises(InvalidTransactionKey):
                await led.require_open(one, None, wrong)
        with pytest.raises(TransactionKeyFenced):
            await led.require_open(one, None, KeyEpoch(KEY, 1))
        with pytest.raises(InvalidTxnStatus):
            await led.require_open(one.group, None, KeyEpoch(KEY, 0))
        with pytest.raises(TransactionNotFound):
            await led.require_open(
                one.group.attempt_of(TXN_ATTEMPT_BLOCK + 1), None, KeyEpoch(KEY, 0)
            )
        await open_key(led)
        with pytest.raises(InvalidTxnStatus, match="ExpiredTransaction"):
            await led.require_open(one, None, KeyEpoch(KEY, 1))


@in_virtual_time
async def test_g2_indexes_come_from_blocks_that_are_reserved_first() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        writes(world)
        first = await begin_attempt(led)
        header = records.header_key(first)
        assert writes(world) == [("put", header), ("put", KEY_PATH)]
        begun = [await begin_attempt(led) for _ in range(TXN_ATTEMPT_BLOCK - 1)]
        assert writes(world) == [], "the first block was reserved with the group"
        at_once = await asyncio.gather(*(begin_attempt(led) for _ in range(TXN_ATTEMPT_BLOCK)))
        assert writes(world) == [("put", header)], "one block for all who wait"
        given = [each.attempt_index for each in (first, *begun, *at_once)]
        assert given == list(range(1, 2 * TXN_ATTEMPT_BLOCK + 1))
        assert await commit(led, at_once) == CommittedGroup(False, first.group)
        assert await state_of(parts, at_once[-1]) is COMMIT
        assert await state_of(parts, first) is ABORT


@in_virtual_time
async def test_g2_two_leaders_give_no_index_twice() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one, two = (
            Coordinator(
                led.coordinator_of(KEY),
                world.parts(name),
                Deadlines(world.clock, lambda _: None),
                max_open=0,
            )
            for name in ("one", "two")
        )

        async def begin_at(leader: Coordinator) -> TxnId:
            begun = await leader.groups.begin_attempt(NAME, 0, "n", 60_000)
            assert begun is not None
            return begun.attempt

        given = [await begin_at(leader) for leader in (one, two, one, two, two)]
        assert len({each.group for each in given}) == 1
        assert [each.attempt_index for each in given] == [1, 65, 2, 66, 67]
        many = await asyncio.gather(*(begin_at(each) for _ in range(100) for each in (one, two)))
        assert len({*many, *given}) == 205
        whole = bounded_commit(BATCH, None, [(each, {}) for each in given[1:3]])
        answer = await one.groups.commit(NAME, 0, "n", given[0].group, whole, given[1:3])
        assert answer == CommittedGroup(False, given[0].group), "though another leader reserved"
        assert [await state_of(parts, each) for each in given] == [
            *(ABORT, COMMIT, COMMIT),
            *(ABORT, ABORT),
        ]
        with pytest.raises(InvalidTxnStatus):
            await begin_at(two)
        assert two.open_count == 0
        for leader in (one, two):
            await leader.close()


@in_virtual_time
async def test_g2_new_leader_does_not_reuse_reserved_indexes() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        first = await begin_attempt(led)
    async with world.coordinators() as (led, _):
        assert (await begin_attempt(led)) == first.group.attempt_of(TXN_ATTEMPT_BLOCK + 1)


@in_virtual_time
async def test_g2_a_group_has_as_many_attempts_as_there_are_indexes() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        first = await begin_attempt(led)
        stored = await parts.store.read_header(first.group)
        assert stored is not None
        assert stored.header.group is not None
        group = replace(stored.header.group, reserved=LAST_ATTEMPT)
        await parts.store.change_header(
            first.group, replace(stored.header, group=group), stored.version
        )
        for _ in range(TXN_ATTEMPT_BLOCK - 1):
            await begin_attempt(led)
        with pytest.raises(InvalidGroup, match="as many as it may have"):
            await begin_attempt(led)


@in_virtual_time
async def test_g3_a_nonce_has_one_group() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        first = await begin_attempt(led)
        with pytest.raises(InvalidTxnStatus, match="is open"):
            await begin_attempt(led, nonce="m")
        await groups_of(led).abort(NAME, 0)
        for _ in range(2):
            with pytest.raises(InvalidTxnStatus, match="has ended"):
                await begin_attempt(led)
        second = await begin_attempt(led, nonce="m")
        assert second.group != first.group
        with pytest.raises(InvalidTxnStatus):
            await begin_attempt(led)
        await commit(led, [second], nonce="m")
        for nonce in "nm":
            with pytest.raises(InvalidTxnStatus, match="has ended"):
                await begin_attempt(led, nonce=nonce)
        await open_key(led)
        for nonce in "nm":
            with pytest.raises(InvalidTxnStatus, match="has ended"):
                await begin_attempt(led, 1, nonce=nonce)


@in_virtual_time
async def test_g3_nonces_of_the_last_groups_are_remembered() -> None:
    async with World().coordinators() as (led, parts):
        await open_key(led)
        for number in range(TXN_KEY_NONCES + 2):
            await commit(led, batch=Batch("q", number), nonce=f"{number}")
        for number in range(2, TXN_KEY_NONCES + 2):
            with pytest.raises(InvalidTxnStatus, match="has ended"):
                await begin_attempt(led, nonce=f"{number}")
        assert len((await key_record(parts, led)).nonces) == TXN_KEY_NONCES


@in_virtual_time
async def test_g3_groups_and_plain_transactions_of_a_key_exclude_each_other() -> None:
    async with World().coordinators() as (led, _):
        await open_key(led)
        plain = await begin(led, 0, "n")
        with pytest.raises(InvalidTxnStatus, match="is open"):
            await begin_attempt(led)
        with pytest.raises(InvalidTxnStatus, match="is open"):
            await commit(led)
        await led.end_transaction(plain, ABORT, None, KeyEpoch(KEY, 0))
        one = await begin_attempt(led)
        for beginner in ("", "n"):
            with pytest.raises(InvalidTxnStatus, match="is open"):
                await begin(led, 0, beginner)
        await commit(led, [one])
        await begin(led, 0, "n")


@in_virtual_time
async def test_g3_begins_at_once_are_of_one_group() -> None:
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        writes(world)
        found = await asyncio.gather(*(begin_attempt(led) for _ in range(20)))
        assert writes(world) == [("put", records.header_key(found[0])), ("put", KEY_PATH)]
        assert len({each.group for each in found}) == 1
        assert len(set(found)) == 20
        (left,) = led.open_transactions()
        assert left.txn == found[0].group


@in_virtual_time
async def test_the_header_of_the_last_batch_is_not_read_for_every_task_of_the_next() -> None:
    """It names all winners: reading it for each of as many tasks would hold up everybody."""
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        last = await begin_attempt(led)
        await commit(led, [last])
        world.metadata.calls = []
        await asyncio.gather(*(begin_attempt(led, nonce="next") for _ in range(20)))
        assert world.metadata.calls.count(("get", records.header_key(last))) == 1


@in_virtual_time
async def test_the_header_of_a_batch_that_comes_again_is_not_read_for_every_task_of_it() -> None:
    """They do not begin a group that the others could find."""
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        for number in range(TXN_COMMITS_REMEMBERED + 2):
            batch, nonce = Batch("q", number), f"n{number}"
            last = await begin_attempt(led, nonce=nonce)
            await commit(led, [last], batch, nonce=nonce)
            world.metadata.calls = []
            for replay in range(5):
                assert await attempt(led, nonce=f"again{replay}", batch=batch) is None
            assert world.metadata.calls.count(("get", records.header_key(last))) == 1
        assert len(keys_of(led)._commits) == TXN_COMMITS_REMEMBERED
        again = await commit(led, [], batch, nonce="again")
        assert again == CommittedGroup(True, last.group)
        assert (await open_key(led, 0)).epoch == 1
        with pytest.raises(TransactionKeyFenced):
            await attempt(led, nonce="late", batch=batch)
        await a_round(parts).collect()
        assert await attempt(led, 1, nonce="again", batch=batch) is None


@in_virtual_time
async def test_of_a_group_that_could_not_be_read_nothing_is_kept() -> None:
    """Nobody here would be told of its end."""
    world = World()
    async with world.coordinators() as (led, _):
        await open_key(led)
        deadlines = Deadlines(world.clock, lambda _: None)
        other = Coordinator(led.coordinator_of(KEY), world.parts("o"), deadlines, max_open=0)
        await begin_attempt(led)
        world.metadata.before = failing("put", HEADERS)
        with pytest.raises(MetadataError):
            await other.groups.begin_attempt(NAME, 0, "n", 60_000)
        world.metadata.before = None
        assert not other.groups._indexes
        assert await other.groups.begin_attempt(NAME, 0, "n", 60_000)
        assert len(other.groups._indexes) == 1
        await commit(led)
        with pytest.raises(InvalidTxnStatus):
            await other.groups.begin_attempt(NAME, 0, "n", 60_000)
        assert not other.groups._indexes


@pytest.mark.parametrize("what", ["header", "key"])
def test_g3_a_begin_of_unknown_outcome_leaves_no_second_group(what: str) -> None:
    @in_virtual_time
    async def run() -> None:
        world = World()
        async with world.coordinators() as (led, _):
            await open_key(led)
            world.metadata.before = failing("put", HEADERS if what == "header" else KEY_PATH)
            with pytest.raises(MetadataError):
                await begin_attempt(led)
            world.metadata.before = None
            one = await begin_attempt(led)
            await asyncio.sleep(1)
            assert [each.txn for each in led.open_transactions()] == [one.group]

    run()


@in_virtual_time
async def test_g7_an_abort_is_fine_whatever_became_of_the_group() -> None:
    async with World().coordinators() as (led, parts):
        groups = groups_of(led)
        assert not await groups.abort(NAME, 0), "there is no key"
        await open_key(led)
        assert not await groups.abort(NAME, 0), "there is no group"
        one = await begin_attempt(led)
        assert not await groups.abort(NAME, 1)
        assert await state_of(parts, one) is TxnState.OPEN
        assert await groups.abort(NAME, 0)
        assert await state_of(parts, one) is ABORT
        assert not await groups.abort(NAME, 0)
        two = await begin_attempt(led, nonce="m")
        await commit(led, [two], nonce="m")
        assert not await groups.abort(NAME, 0)
        assert await state_of(parts, two) is COMMIT
        await open_key(led)
        three = await begin_attempt(led, 1, "k")
        assert not await groups.abort(NAME, 0), "of an old epoch"
        assert await state_of(parts, three) is TxnState.OPEN
        await a_round(parts).collect()
        assert await groups.abort(NAME, 1)
        await a_round(parts).collect()
        assert not await groups.abort(NAME, 1), "it is collected"


@in_virtual_time
async def test_g8_a_deadline_is_extended_and_only_rises() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        begun = await attempt(led, timeout_ms=40_000)
        assert begun is not None
        began_ms = world.clock.now_ms()
        assert begun.deadline_ms == began_ms + 50_000, "a quarter more than asked for"
        group, groups = begun.attempt.group, groups_of(led)
        writes(world)
        assert await groups.extend(NAME, 0, group, 50_000) == began_ms + 50_000
        assert writes(world) == [], "it is open for that long"
        assert await groups.extend(NAME, 0, group, 80_000) == began_ms + 100_000
        assert writes(world) == [("put", records.header_key(group))]
        assert await groups.extend(NAME, 0, group, 10**15) == began_ms + TXN_TIMEOUT_MAX_MS
        await asyncio.sleep(3600)
        assert await state_of(parts, group) is TxnState.OPEN
        with pytest.raises(InvalidGroup):
            await groups.extend(NAME, 0, begun.attempt, 10)
        foreign = await led.begin(group.coordinator, 60_000, "alice")
        for unknown in (TxnId(group.most, 999), foreign):
            with pytest.raises(TransactionNotFound):
                await groups.extend(NAME, 0, unknown, 10)
        await asyncio.sleep(TXN_TIMEOUT_MAX_MS / 1000 - 3599)
        assert await state_of(parts, group) is ABORT
        with pytest.raises(InvalidTxnStatus):
            await groups.extend(NAME, 0, group, 10)
        assert await state_of(parts, group) is ABORT
        plain = await begin(led, 0)
        with pytest.raises(InvalidGroup):
            await groups.extend(NAME, 0, plain, 10)
        await open_key(led)
        with pytest.raises(TransactionKeyFenced):
            await groups.extend(NAME, 0, plain, 10)
        other = await begin_attempt(led, 1, "m")
        await open_key(led)
        with pytest.raises(InvalidTxnStatus, match="ExpiredTransaction"):
            await groups.extend(NAME, 2, other.group, 10)


@in_virtual_time
async def test_g8_attempts_extend_their_group() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        first = await attempt(led, timeout_ms=40_000)
        assert first is not None
        writes(world)
        await asyncio.sleep(9)
        assert await attempt(led, timeout_ms=40_000) is not None
        assert writes(world) == [], "what was added suffices"
        await asyncio.sleep(31)
        late = await asyncio.gather(*(attempt(led, timeout_ms=40_000) for _ in range(10)))
        assert writes(world) == [("put", records.header_key(first.attempt))]
        assert {each and each.deadline_ms for each in late} == {world.clock.now_ms() + 50_000}
        await asyncio.sleep(49)
        assert await state_of(parts, first.attempt) is TxnState.OPEN
        await asyncio.sleep(2)
        assert await state_of(parts, first.attempt) is ABORT


@pytest.mark.parametrize("looks", range(1, 4))
def test_g8_an_attempt_begins_while_the_clock_is_set_back(looks: int) -> None:
    @in_virtual_time
    async def begun() -> None:
        world = World()
        world.clock = clock = ClockSetBack()
        async with world.coordinators() as (led, _):
            await open_key(led)
            assert await attempt(led, timeout_ms=40_000) is not None
            clock.looks = looks
            assert await attempt(led, timeout_ms=TXN_TIMEOUT_MAX_MS) is not None
            assert clock.looks <= 0

    begun()


@in_virtual_time
async def test_g8_a_deadline_that_another_leader_extended_is_not_acted_upon() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one = await begin_attempt(led)
        stored = await parts.store.read_header(one.group)
        assert stored is not None
        longer = replace(stored.header, timeout_ms=200_000)
        await parts.store.change_header(one.group, longer, stored.version)
        await asyncio.sleep(150)
        assert await state_of(parts, one) is TxnState.OPEN
        await asyncio.sleep(51)
        assert await state_of(parts, one) is ABORT


@in_virtual_time
async def test_g9_a_header_stays_while_any_of_its_attempts_has_a_record() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        one, two = await begin_attempt(led), await begin_attempt(led)
        claim = Claim(two, "segment", 1, Position(1, 1))
        await parts.store.put_claim(claim)
        assert await parts.store.operations_of(one.group) == [claim]
        assert await parts.store.operations_of(two) == [claim]
        assert await parts.store.operations_of(one) == []
        assert await parts.store.transactions_with_records(10) == {one.group}
        await commit(led, [one])
        assert await a_round(parts).collect() == 0
        assert await state_of(parts, two) is ABORT
        await parts.store.delete_operation(two, records.claim_key(two, "segment", 1))
        assert await a_round(parts).collect() == 1
        assert await state_of(parts, one) is None


@in_virtual_time
async def test_groups_count_as_open_transactions() -> None:
    async with World().coordinators(max_open=1) as (led, _):
        await open_key(led)
        await begin_attempt(led)
        await begin_attempt(led)
        with pytest.raises(TooManyTransactions):
            await led.begin(led.coordinator_of(KEY), 1000, None)


@pytest.mark.parametrize(("tasks", "segments", "rows"), [(1, 1, 1), (5, 3, 1), (5, 3, 50)])
def test_an_epoch_costs_writes_by_tasks_and_segments_and_not_by_rows(
    tasks: int, segments: int, rows: int
) -> None:
    """Two to begin, one for each task and segment, one to commit; as many deletes again."""

    @in_virtual_time
    async def run() -> None:
        world = World()
        async with world.coordinators() as (led, parts):
            await open_key(led)
            writes(world)
            given = [await begin_attempt(led) for _ in range(tasks)]
            for each in given:
                for segment in range(segments):
                    await parts.store.put_claim(Claim(each, f"{segment}", 1, Position(1, rows)))
            await commit(led, given)
            assert len(writes(world)) == 3 + tasks * segments
            assert parts.counters.op_writes == tasks * segments

    run()


@in_virtual_time
async def test_nothing_of_ended_groups_stays_in_memory() -> None:
    world = World()
    async with world.coordinators() as (led, parts):
        await open_key(led)
        held = groups_of(led)._indexes
        await commit(led, [await begin_attempt(led)])
        await begin_attempt(led, nonce="aborted")
        assert await groups_of(led).abort(NAME, 0)
        await begin_attempt(led, nonce="late")
        await asyncio.sleep(100)
        await begin_attempt(led, nonce="fenced")
        assert len(held) == 1
        await open_key(led)
        assert held == {}
        one = await begin_attempt(led, 1, "elsewhere")
        deadlines = Deadlines(world.clock, lambda _: None)
        other = Coordinator(led.coordinator_of(KEY), parts, deadlines, max_open=0)
        reads = 0

        async def end(what: str, key: str) -> None:
            nonlocal reads
            reads += (what, key) == ("get", records.header_key(one))
            if reads == 2:
                world.metadata.before = None
                assert await groups_of(led).abort(NAME, 1)

        world.metadata.before = end
        with pytest.raises(InvalidTxnStatus, match="has ended"):
            await other.groups.begin_attempt(NAME, 1, "elsewhere", 60_000)
        assert reads == 2, "it ended after the key was looked at"
        assert other.groups._indexes == {}
        await other.close()
