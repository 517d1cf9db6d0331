"""Attempts where they write and acknowledge: rules hold of them as of transactions (G1, G9)."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Generator, Sequence
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from config.bounds import TXN_CLEANING_AT_ONCE, TXN_SLICE_ENDS
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import TxnId
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.txn import buffer_world
from tests.unit.txn.ack_world import AckWorld, turns
from tests.unit.txn.buffer_world import a_world
from tests.unit.txn.coordinator_world import World
from tests.unit.txn.virtual_time import in_virtual_time
from txn import records
from txn.decisions import Decisions
from txn.errors import InvalidTxnStatus, TransactionEnded, TransactionNotFound
from txn.group import Batch, Group, GroupCommit
from txn.header import end_header
from txn.records import AckedPosition, AckRecord, Claim, Header, TxnState
from txn.store import TransactionStore

T = TypeVar("T")
OPEN, COMMITTED, ABORTED = TxnState.OPEN, TxnState.COMMITTED, TxnState.ABORTED
GROUP = TxnId(1, 7)
WINNER, LOSER, OTHER = (GROUP.attempt_of(index) for index in (1, 2, 3))
UNKNOWN = GROUP.attempt_of(65)
NEVER_GIVEN = TxnId(GROUP.most, 2**63 | GROUP.least)
HEADER = Header(OPEN, 60_000, 0, group=Group("n", 64))


async def begin(store: TransactionStore) -> None:
    await store.create_header(GROUP, HEADER)


async def end(store: TransactionStore, state: TxnState, *winners: TxnId) -> None:
    stored = await TransactionStore.read_header(store, GROUP)
    assert stored is not None
    header = end_header(stored.header, state, 1)
    assert header.group is not None
    if state is COMMITTED:
        commit = GroupCommit(Batch("q", 0), None, {each.attempt_index: {} for each in winners})
        header = replace(header, group=replace(header.group, commit=commit))
    await store.end_header(GROUP, header, stored.version)


@pytest.fixture(params=["memory", "sqlite"])
async def world(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[buffer_world.World]:
    async with a_world(request.param, tmp_path) as world:
        yield world


async def test_of_a_group_the_winners_are_shown_and_the_losers_hidden(
    world: buffer_world.World,
) -> None:
    await begin(world.store)
    before = world.ledger.confirm()
    for attempt in (WINNER, LOSER, WINNER, OTHER):
        last = await world.append(attempt)
    assert world.buffer.max_read_position == before
    assert await world.claims() == sorted((each, 1) for each in (WINNER, LOSER, OTHER))
    await end(world.store, COMMITTED, WINNER, OTHER)
    await until(lambda: world.buffer.idle)
    assert world.buffer.max_read_position == last
    hidden = [world.buffer.is_aborted(each) for each in (WINNER, LOSER, OTHER)]
    assert hidden == [False, True, False]
    assert await world.claims() == []
    assert world.decisions.followed == 0
    await world.collect(GROUP)
    await world.reload()
    hidden = [world.buffer.is_aborted(each) for each in (WINNER, LOSER, OTHER)]
    assert hidden == [False, True, False]


async def test_g1_group_and_ended_attempt_cannot_be_joined(
    world: buffer_world.World,
) -> None:
    await begin(world.store)
    with pytest.raises(TransactionEnded):
        await world.append(UNKNOWN)
    await world.append(WINNER)
    await end(world.store, COMMITTED, WINNER)
    with pytest.raises(TransactionEnded):
        await world.append(LOSER)
    await until(lambda: world.buffer.idle)
    assert await world.claims() == []


async def test_g1_a_group_takes_no_writes(world: buffer_world.World) -> None:
    """They would be seen with its winners, and no attempt would have written them."""
    await begin(world.store)
    with pytest.raises(TransactionEnded):
        await world.append(GROUP)
    await world.append(WINNER)
    await until(lambda: world.buffer.unfinished == 1)
    assert await world.claims() == [(WINNER, 1)]


async def test_g1_a_group_takes_no_acknowledgements() -> None:
    world = AckWorld()
    await begin(world.transactions)
    owner = await world.owner(entries=10)
    owner.acks.acknowledge(GROUP, [owner.at(1)])
    await owner.ack(WINNER, 2)
    await turns()
    assert owner.pending() == [2]
    await end(world.transactions, COMMITTED, WINNER)
    await owner.idle()
    assert owner.acknowledged() == [2]


async def test_an_id_that_is_never_given_leaves_no_record(world: buffer_world.World) -> None:
    """A record under it could not be read, and the segment could not be loaded again."""
    await begin(world.store)
    with pytest.raises(TransactionEnded):
        await world.append(NEVER_GIVEN)
    assert "put_claim" not in world.store.calls
    assert not world.buffer.unfinished


async def test_no_acknowledgement_is_kept_under_an_id_that_is_never_given() -> None:
    world = AckWorld()
    await begin(world.transactions)
    owner = await world.owner(entries=10)
    with pytest.raises(TransactionNotFound):
        owner.acks.acknowledge(NEVER_GIVEN, [owner.at(1)])
    await owner.ack(WINNER, 1)
    assert owner.pending() == [1]


@pytest.mark.parametrize("state", [COMMITTED, ABORTED, OPEN])
async def test_a_load_reads_what_became_of_attempts(
    world: buffer_world.World, state: TxnState
) -> None:
    await begin(world.store)
    first = await world.append(LOSER)
    last = await world.append(WINNER)
    await world.buffer.close()
    if state is not OPEN:
        await end(world.store, state, WINNER)
    await world.load()
    if state is OPEN:
        assert world.buffer.max_read_position < first
        await end(world.store, COMMITTED, WINNER)
    await until(lambda: world.buffer.idle)
    assert world.buffer.max_read_position == last
    assert world.buffer.is_aborted(LOSER)
    assert world.buffer.is_aborted(WINNER) is (state is ABORTED)
    assert await world.claims() == []


async def test_g9_claims_of_attempts_are_each_their_own(world: buffer_world.World) -> None:
    await begin(world.store)
    await world.append(WINNER)
    await world.append(LOSER)
    assert len(await world.store.operations_of(GROUP)) == 2
    stale = await world.store.operations_of(LOSER)
    await end(world.store, COMMITTED, WINNER)
    await until(lambda: world.buffer.idle)
    assert await world.store.operations_of(GROUP) == []
    for claim in stale:
        await world.store.put_claim(claim)  # type: ignore[arg-type]
    await world.buffer.rescan()
    await until(lambda: world.buffer.idle)
    assert await world.store.operations_of(GROUP) == []


async def test_deleting_a_segment_deletes_records_of_attempts(world: buffer_world.World) -> None:
    await begin(world.store)
    await world.append(WINNER)
    ack = AckRecord(
        LOSER,
        buffer_world.SEGMENT,
        "s",
        1,
        1,
        cumulative=False,
        acks=(AckedPosition(Position(5, 0)),),
    )
    await world.store.put_ack(ack)
    await world.store.record_aborted(buffer_world.SEGMENT, OTHER, Position(5, 0))
    assert await world.store.aborted_on(buffer_world.SEGMENT) == {OTHER: Position(5, 0)}
    await world.buffer.forget()
    assert await world.store.operations_of(GROUP) == []
    assert await world.store.aborted_on(buffer_world.SEGMENT) == {}


async def test_of_a_group_the_winners_acknowledgements_are_applied() -> None:
    world = AckWorld()
    await begin(world.transactions)
    owner = await world.owner(entries=10)
    await owner.ack(WINNER, 0, 1)
    await owner.ack(LOSER, 2)
    await owner.ack(OTHER, 3)
    assert {each.txn for each in await world.records()} == {WINNER, LOSER, OTHER}
    await owner.kill()
    again = await world.owner()
    assert again.pending() == [0, 1, 2, 3]
    await end(world.transactions, COMMITTED, WINNER, OTHER)
    await turns()
    await again.idle()
    assert again.acknowledged() == [0, 1, 3]
    assert again.heard.events[-1] != ("applied", [])
    assert await world.transactions.operations_of(GROUP) == []
    with pytest.raises(InvalidTxnStatus):
        again.acks.acknowledge(WINNER, [again.at(5)])


async def test_acknowledgements_of_attempts_that_ended_before_are_settled_by_the_header() -> None:
    world = AckWorld()
    await begin(world.transactions)
    owner = await world.owner(entries=10)
    await end(world.transactions, COMMITTED, WINNER)
    for attempt in (WINNER, LOSER, UNKNOWN):
        owner.acks.acknowledge(attempt, [owner.at(attempt.attempt_index % 10)])
    await turns()
    await owner.idle()
    assert owner.acknowledged() == [1]
    assert await world.transactions.operations_of(GROUP) == []


async def test_a6_strays_of_attempts_go_when_their_group_has_ended() -> None:
    world = AckWorld()
    await begin(world.transactions)
    owner = await world.owner(entries=10)
    await owner.ack(LOSER, 2)
    (record,) = await world.records()
    await owner.kill()
    again = await world.owner()
    stray = replace(record, txn=OTHER, number=99)
    await world.transactions.put_ack(stray)
    await again.acks.rescan()
    assert stray in await world.records()
    await end(world.transactions, ABORTED)
    await turns()
    await again.acks.rescan()
    await again.idle()
    assert await world.records() == []


@in_virtual_time
async def test_followers_of_attempts_are_called_by_the_groups_header() -> None:
    world = World()
    parts = world.parts()
    parts.decisions.start()
    told: list[tuple[TxnId, TxnState | None]] = []

    def follower(txn: TxnId, state: TxnState | None) -> None:
        told.append((txn, state))

    await begin(parts.store)
    for txn in (WINNER, LOSER, OTHER, UNKNOWN, GROUP):
        parts.decisions.follow(txn, follower)
    parts.decisions.forget(OTHER, follower)
    world.metadata.calls.clear()
    await end(parts.store, COMMITTED, WINNER, OTHER)
    await asyncio.sleep(1)
    assert [what for what, _ in world.metadata.calls if what == "get"] == ["get"], "by the end only"
    assert sorted(told, key=lambda one: one[0]) == [
        (GROUP, COMMITTED), (WINNER, COMMITTED), (LOSER, ABORTED), (UNKNOWN, None),
    ]  # fmt: skip
    assert parts.decisions.followed == 0
    await parts.decisions.stop()


@pytest.mark.parametrize("gone", [False, True])
def test_after_a_resync_headers_of_attempts_are_read_again(*, gone: bool) -> None:
    @in_virtual_time
    async def run() -> None:
        world = World()
        parts = world.parts()
        told: list[tuple[TxnId, TxnState | None]] = []

        def follower(txn: TxnId, state: TxnState | None) -> None:
            told.append((txn, state))

        await begin(parts.store)
        await end(parts.store, COMMITTED, WINNER)
        parts.decisions.start()
        await asyncio.sleep(1)
        for txn in (WINNER, LOSER):
            parts.decisions.follow(txn, follower)
        await asyncio.sleep(1)
        assert told == []
        if gone:
            stored = await parts.store.read_header(GROUP)
            assert stored is not None
            await parts.store.delete_header(stored)
        else:
            parts.decisions._following._watch.resync()  # type: ignore[union-attr]
        await asyncio.sleep(1)
        states: Sequence[TxnState | None] = (None, None) if gone else (COMMITTED, ABORTED)
        assert sorted(told) == list(zip((WINNER, LOSER), states, strict=True))
        assert isinstance(parts.decisions, Decisions)
        await parts.decisions.stop()

    run()


def test_a_group_leaves_nothing_in_memory_of_followers() -> None:
    @in_virtual_time
    async def run() -> None:
        parts = World().parts()

        def follower(txn: TxnId, state: TxnState | None) -> None:
            """Hear nothing."""

        for _ in range(2):
            for txn in (WINNER, LOSER, GROUP):
                parts.decisions.follow(txn, follower)
            for txn in (GROUP, LOSER, WINNER):
                parts.decisions.forget(txn, follower)
        assert parts.decisions.followed == 0
        assert parts.decisions._attempts == {}

    run()
    assert records.header_key(WINNER) == records.header_key(GROUP)


# Large groups: nobody else may have to wait for them.

MANY = 1_000
ATTEMPTS = [GROUP.attempt_of(index) for index in range(1, MANY + 1)]


async def end_with_claims(world: buffer_world.World) -> None:
    """A commit of many attempts, each with a claim on the segment that an earlier owner left."""
    await world.store.create_header(GROUP, replace(HEADER, group=Group("n", MANY)))
    for attempt in ATTEMPTS:
        await TransactionStore.put_claim(
            world.store, Claim(attempt, buffer_world.SEGMENT, 0, Position(0, 0))
        )
    await end(world.store, COMMITTED, *ATTEMPTS)


async def test_a_load_decodes_the_header_of_a_group_once(
    world: buffer_world.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt would decode all winners else: a segment of 2,000 loaded in 82 s."""
    await end_with_claims(world)
    await world.buffer.close()
    decoded, decode = list[str](), records.decode_header

    def counted(key: str, value: bytes) -> Header:
        decoded.append(key)
        return decode(key, value)

    monkeypatch.setattr(records, "decode_header", counted)
    await world.load()
    assert decoded == [records.header_key(GROUP)]


async def test_the_cleaning_of_a_large_commit_lets_others_in_between(
    world: buffer_world.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more requests wait at the store at once than others can wait behind."""
    await end_with_claims(world)
    await world.buffer.close()
    delete, under_way, most = world.store.delete_operation, 0, 0

    async def counted(txn: TxnId, key: str) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        await delete(txn, key)
        under_way -= 1

    monkeypatch.setattr(world.store, "delete_operation", counted)
    await world.load()
    await until(lambda: world.buffer.idle)
    assert await world.claims() == []
    assert 1 < most <= TXN_CLEANING_AT_ONCE


async def test_end_reaches_many_attempts_in_several_turns(world: buffer_world.World) -> None:
    await world.store.create_header(GROUP, replace(HEADER, group=Group("n", MANY)))
    turn, told = 0, list[tuple[int, TxnId]]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    for attempt in ATTEMPTS:
        world.decisions.follow(attempt, lambda txn, state: told.append((turn, txn)))
    counting = asyncio.create_task(count_turns())
    await end(world.store, COMMITTED, *ATTEMPTS)
    await until(lambda: len(told) == MANY)
    counting.cancel()
    assert [txn for _, txn in told] == ATTEMPTS
    assert max(Counter(when for when, _ in told).values()) <= TXN_SLICE_ENDS


async def test_a_load_begins_to_clean_up_in_several_turns(world: buffer_world.World) -> None:
    """A segment with claims of a large group is loaded while other clients are served."""
    await end_with_claims(world)
    await world.buffer.close()
    loop, begun, most = asyncio.get_running_loop(), 0, 0

    def begin(
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        nonlocal begun
        begun += 1
        return asyncio.Task(work, loop=loop, context=context)

    def end_turn() -> None:
        nonlocal begun, most
        most, begun = max(most, begun), 0
        if not world.buffer.idle:
            loop.call_soon(end_turn)

    loop.set_task_factory(begin)
    await world.load()
    loop.call_soon(end_turn)
    await until(lambda: world.buffer.idle)
    assert await world.claims() == []
    assert most <= TXN_SLICE_ENDS + 10, f"{most} tasks were begun in one turn of the loop"


async def test_an_ending_owner_does_not_wait_for_the_cleaning_of_others(
    world: buffer_world.World,
) -> None:
    await end_with_claims(world)
    await world.buffer.close()
    slots = world.parts.cleanup_slots
    for _ in range(TXN_CLEANING_AT_ONCE):
        await slots.acquire()
    await world.load()
    async with asyncio.timeout(TIMEOUT_S):
        await world.buffer.close()
    assert len(await world.claims()) == MANY, "nothing is deleted after the end"
    for _ in range(TXN_CLEANING_AT_ONCE):
        slots.release()
    await world.load()
    await until(lambda: world.buffer.idle)
    assert await world.claims() == []
    assert not slots.locked()
