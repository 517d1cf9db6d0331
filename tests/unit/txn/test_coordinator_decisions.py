"""Who is told how a transaction ended, when, and what cannot be read."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import Event, IndexEntry, Record
from tests.unit.txn.coordinator_world import World, failing
from tests.unit.txn.virtual_time import in_virtual_time
from txn import decisions as decisions_module
from txn import records
from txn.cleanup_requests import CleanupRequests
from txn.decisions import Decisions
from txn.header import end_header
from txn.parts import TransactionParts
from txn.records import Header, TxnState
from txn.store import StoredHeader, stored_header

OPEN = Header(TxnState.OPEN, 60_000, 1)
TXN = TxnId(0, 1)


class Told(list[tuple[TxnId, TxnState | None]]):
    """A follower that remembers."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __call__(self, txn: TxnId, state: TxnState | None) -> None:
        self.append((txn, state))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Tracebacks are not drawn for a terminal, which takes long."""
    with capture_logs():
        yield


@asynccontextmanager
async def deciding(world: World) -> AsyncIterator[tuple[Decisions, TransactionParts]]:
    parts = world.parts()
    parts.decisions.start()
    try:
        yield parts.decisions, parts
    finally:
        await parts.decisions.stop()


async def end(parts: TransactionParts, txn: TxnId, action: TxnState) -> None:
    version = await parts.store.create_header(txn, OPEN)
    await parts.store.end_header(txn, end_header(OPEN, action, 2), version)


async def collect(parts: TransactionParts, txn: TxnId) -> None:
    stored = await parts.store.read_header(txn)
    assert stored is not None
    await parts.store.delete_header(stored)


@in_virtual_time
async def test_each_follower_is_called_once() -> None:
    world, told, other, forgotten = World(), Told(), Told(), Told()
    async with deciding(world) as (decisions, parts):
        for follower in (told, other, forgotten):
            decisions.follow(TXN, follower)
        decisions.forget(TXN, forgotten)
        await end(parts, TXN, TxnState.ABORTED)
        await asyncio.sleep(1)
        await collect(parts, TXN)
        await asyncio.sleep(1)
        assert told == other == [(TXN, TxnState.ABORTED)]
        assert forgotten == []
        assert decisions.followed == 0


@in_virtual_time
async def test_a_follower_that_fails_does_not_keep_others_from_hearing() -> None:
    world, told = World(), Told()

    def fail(txn: TxnId, state: TxnState | None) -> None:
        raise ValueError("a defect")

    async with deciding(world) as (decisions, parts):
        decisions.follow(TXN, fail)
        decisions.follow(TXN, told)
        await end(parts, TXN, TxnState.COMMITTED)
        await asyncio.sleep(1)
        assert told == [(TXN, TxnState.COMMITTED)]


def test_header_without_followers_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []

    def note(record: Record) -> StoredHeader:
        decoded.append(record.key)
        return stored_header(record)

    monkeypatch.setattr(decisions_module, "stored_header", note)

    @in_virtual_time
    async def run() -> None:
        async with deciding(World()) as (decisions, parts):
            told = Told()
            decisions.follow(TxnId(0, 7), told)
            for number in range(10):
                await end(parts, TxnId(0, number), TxnState.COMMITTED)
            await asyncio.sleep(1)
            assert len(told) == 1

    run()
    assert set(decoded) == {"/txn/id/0_7"}


@in_virtual_time
async def test_changes_of_a_header_without_followers_are_ignored() -> None:
    world, told, member, taken = World(), Told(), Told(), set[str]()
    group = TxnId(0, 8)
    async with deciding(world) as (decisions, parts):
        take = decisions._take_header_event

        def note(event: Event) -> None:
            taken.add(event.key)
            take(event)

        decisions._take_header_event = note  # type: ignore[method-assign]
        decisions.follow(TXN, told)
        decisions.follow(group.attempt_of(1), member)
        for txn in (TxnId(0, 7), TXN, group):
            await end(parts, txn, TxnState.COMMITTED)
        await asyncio.sleep(1)
        assert len(told) == len(member) == 1
        assert taken == {records.header_key(TXN), records.header_key(group)}
        taken.clear()
        await collect(parts, TXN)
        await asyncio.sleep(1)
        assert not taken


@in_virtual_time
async def test_after_a_resync_everything_followed_is_read() -> None:
    world, told = World(), Told()
    async with deciding(world) as (decisions, parts):
        await end(parts, TxnId(0, 1), TxnState.COMMITTED)
        await end(parts, TxnId(0, 2), TxnState.ABORTED)
        await parts.store.create_header(TxnId(0, 3), OPEN)
        for number in range(1, 5):
            decisions.follow(TxnId(0, number), told)
        decisions._following._watch.resync()  # type: ignore[union-attr]
        await asyncio.sleep(1)
        assert sorted(told, key=lambda one: one[0]) == [
            (TxnId(0, 1), TxnState.COMMITTED),
            (TxnId(0, 2), TxnState.ABORTED),
            (TxnId(0, 4), None),
        ]
        assert decisions.followed == 1


@in_virtual_time
async def test_header_deleted_before_its_event_is_reported_as_deleted() -> None:
    world, told = World(), Told()
    async with deciding(world) as (decisions, parts):
        await end(parts, TXN, TxnState.ABORTED)
        await asyncio.sleep(1)
        decisions.follow(TXN, told)
        await collect(parts, TXN)
        await asyncio.sleep(1)
        assert told == [(TXN, None)]


@in_virtual_time
async def test_unreadable_header_is_read_again_and_delays_no_other() -> None:
    world, told, other = World(), Told(), Told()
    async with deciding(world) as (decisions, parts):
        decisions.follow(TXN, told)
        await world.metadata.put(
            records.header_key(TXN),
            b"{",
            partition=str(TXN),
            indexes=[IndexEntry(records.FINAL_STATE_INDEX, "COMMITTED:00000000000000000001")],
        )
        await asyncio.sleep(5)
        assert told == []
        decisions.follow(TxnId(0, 2), other)
        await end(parts, TxnId(0, 2), TxnState.COMMITTED)
        await asyncio.sleep(0.1)
        assert other == [(TxnId(0, 2), TxnState.COMMITTED)]
        whole = end_header(OPEN, TxnState.COMMITTED, 2)
        await world.metadata.put(
            records.header_key(TXN), records.encode_header(whole), partition=str(TXN)
        )
        await asyncio.sleep(11)
        assert told == [(TXN, TxnState.COMMITTED)]


@in_virtual_time
async def test_a_store_that_fails_is_asked_again_until_it_answers() -> None:
    world, told = World(), Told()
    async with deciding(world) as (decisions, parts):
        await end(parts, TXN, TxnState.ABORTED)
        await asyncio.sleep(1)
        decisions.follow(TXN, told)
        world.metadata.before = failing("get", "/txn/id/")
        decisions._following._watch.resync()  # type: ignore[union-attr]
        await asyncio.sleep(30)
        assert told == []
        world.metadata.before = None
        await asyncio.sleep(11)
        assert told == [(TXN, TxnState.ABORTED)]


@in_virtual_time
async def test_a_failing_follower_does_not_stop_the_others() -> None:
    world, told = World(), [Told(), Told()]
    async with deciding(world) as (decisions, parts):
        take, failures = decisions._take_header_event, [RuntimeError("a defect")]

        def fails(event: Event) -> None:
            if failures:
                raise failures.pop()
            take(event)

        decisions._take_header_event = fails  # type: ignore[method-assign]
        for number, each in enumerate(told):
            decisions.follow(TxnId(0, number), each)
            await end(parts, TxnId(0, number), TxnState.COMMITTED)
        await asyncio.sleep(1)
        await end(parts, TxnId(0, 7), TxnState.ABORTED)
        await asyncio.sleep(10)
        assert not failures
        assert [len(each) for each in told] == [1, 1]


@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), asyncio.CancelledError("of what it waited for")], ids=repr
)
def test_an_interrupted_read_does_not_stop_other_followers(error: BaseException) -> None:
    @in_virtual_time
    async def run() -> None:
        world, told, failures = World(), [Told(), Told()], [error]
        async with deciding(world) as (decisions, parts):
            for number in range(len(told)):
                await end(parts, TxnId(0, number), TxnState.COMMITTED)
            await asyncio.sleep(1)

            async def fail(what: str, key: str) -> None:
                await asyncio.sleep(0.01)
                if failures and (what, key) == ("get", "/txn/id/0_0"):
                    raise failures.pop()

            world.metadata.before = fail
            for number, each in enumerate(told):
                decisions.follow(TxnId(0, number), each)
            decisions._read_soon([TxnId(0, 0), TxnId(0, 1)])
            await asyncio.sleep(10)
            assert not failures
            assert [len(each) for each in told] == [1, 1]

    run()


@in_virtual_time
async def test_a_defect_while_one_request_is_answered_costs_none_of_the_others() -> None:
    world, looked, failures = World(), list[str](), [RuntimeError("a defect")]
    store = world.parts().store

    async def look_again(segment: str, _: object) -> bool:
        if failures:
            raise failures.pop()
        looked.append(segment)
        return True

    cleanup_requests = CleanupRequests(store, look_again)
    cleanup_requests.start()
    await asyncio.sleep(1)
    for segment in ("persistent://public/default/a", "persistent://public/default/b"):
        await store.request_cleanup(segment, 1)
        await asyncio.sleep(10)
    await cleanup_requests.stop()
    assert looked == ["persistent://public/default/a", "persistent://public/default/b"]
    assert await world.metadata.children(records.CLEANUP_REQUESTS) == []
