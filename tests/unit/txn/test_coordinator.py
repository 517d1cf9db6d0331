"""Coordinators: numbers, ends, deadlines, leadership."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from config.bounds import TXN_ID_BLOCK, TXN_PAGE
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import MetadataError
from tests.unit.txn.coordinator_world import World, failing
from tests.unit.txn.virtual_time import in_virtual_time
from txn import records
from txn.coordinator import Coordinator
from txn.coordinator_elections import Leader
from txn.coordinators import CoordinatorCountDiffers, Coordinators
from txn.deadlines import Deadlines
from txn.errors import InvalidTxnStatus, TooManyTransactions, TransactionNotFound
from txn.header import end_header
from txn.numbers import NumberBlocks
from txn.parts import TransactionParts
from txn.records import Header, TxnState

ZERO = CoordinatorId(0)
COMMIT, ABORT = TxnState.COMMITTED, TxnState.ABORTED


async def state_of(parts: TransactionParts, txn: TxnId) -> TxnState | None:
    stored = await parts.store.read_header(txn)
    return None if stored is None else stored.header.state


@in_virtual_time
async def test_begin_and_end_are_one_write_each() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        await coordinators.begin(ZERO, 1000, None)
        world.metadata.of_transactions()
        txn = await coordinators.begin(ZERO, 1000, "alice")
        assert world.metadata.of_transactions() == ["put"]
        await coordinators.require_open(txn, "alice")
        assert world.metadata.of_transactions() == []
        await coordinators.end_transaction(txn, COMMIT, "alice")
        assert world.metadata.of_transactions() == ["put"]
        assert await state_of(parts, txn) is COMMIT
        counters = coordinators.led()[0].counters
        assert (counters.created, counters.committed) == (2, 1)
        assert parts.counters.header_cas_ok == 1


@in_virtual_time
async def test_no_number_is_given_twice_over_blocks_restarts_and_rivals() -> None:
    world = World()
    seen: set[TxnId] = set()
    count = TXN_ID_BLOCK + TXN_ID_BLOCK // 2
    for _ in range(2):
        async with (
            world.coordinators() as (coordinators, _),
            world.coordinators("here") as (rival, _),
        ):
            begun = await asyncio.gather(
                *(coordinators.begin(ZERO, 1000, None) for _ in range(count)),
                *(rival.begin(ZERO, 1000, None) for _ in range(count)),
            )
        assert len(set(begun)) == 2 * count
        assert not seen & set(begun)
        seen |= set(begun)


@in_virtual_time
async def test_beginning_does_not_wait_for_numbers() -> None:
    world = World()
    async with world.coordinators() as (coordinators, _):
        await coordinators.begin(ZERO, 1000, None)
        world.metadata.before = failing("put", "/txn/tc-seq/")
        for _ in range(TXN_ID_BLOCK - 1):
            await coordinators.begin(ZERO, 1000, None)
        with pytest.raises(MetadataError):
            await coordinators.begin(ZERO, 1000, None)
        world.metadata.before = None
        assert (await coordinators.begin(ZERO, 1000, None)).least == TXN_ID_BLOCK


@in_virtual_time
async def test_an_end_that_lost_the_race_reads_again() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 60_000, None)
        stored = await parts.store.read_header(txn)
        assert stored is not None
        await parts.store.end_header(txn, end_header(stored.header, ABORT, 1), stored.version)
        with pytest.raises(InvalidTxnStatus):
            await coordinators.end_transaction(txn, COMMIT, None)
        assert parts.counters.header_cas_conflict == 1
        assert parts.counters.header_cas_reject == 1
        await coordinators.end_transaction(txn, ABORT, None)
        assert coordinators.open_transactions() == []


@in_virtual_time
async def test_an_end_of_unknown_outcome_can_be_asked_for_again() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 60_000, None)

        async def lose_the_answer(what: str, key: str) -> None:
            if (what, key) == ("put", records.header_key(txn)):
                world.metadata.before = None
                stored = await parts.store.read_header(txn)
                assert stored is not None
                final = end_header(stored.header, COMMIT, 1)
                await parts.store.end_header(txn, final, stored.version)
                raise MetadataError("The answer was lost: ask again.")

        world.metadata.before = lose_the_answer
        with pytest.raises(MetadataError):
            await coordinators.end_transaction(txn, COMMIT, None)
        await coordinators.end_transaction(txn, COMMIT, None)
        assert coordinators.open_transactions() == []


@in_virtual_time
async def test_a_collected_transaction_is_not_made_again() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 60_000, None)
        await coordinators.end_transaction(txn, COMMIT, None)
        stored = await parts.store.read_header(txn)
        assert stored is not None
        await parts.store.delete_header(stored)
        with pytest.raises(TransactionNotFound):
            await coordinators.end_transaction(txn, COMMIT, None)
        assert await state_of(parts, txn) is None


@in_virtual_time
async def test_of_another_owner_there_is_none() -> None:
    world = World()
    async with world.coordinators() as (coordinators, _):
        txn = await coordinators.begin(ZERO, 60_000, "alice")
        for owner in ("bob", None):
            with pytest.raises(TransactionNotFound):
                await coordinators.require_open(txn, owner)
            for action in (COMMIT, ABORT):
                with pytest.raises(TransactionNotFound, match="There is no transaction"):
                    await coordinators.end_transaction(txn, action, owner)
        assert len(coordinators.open_transactions()) == 1
        await coordinators.end_transaction(txn, COMMIT, "alice")


@in_virtual_time
async def test_transaction_being_begun_counts_against_the_limit() -> None:
    world = World()
    async with world.coordinators(max_open=3) as (coordinators, _):
        begun = await asyncio.gather(
            *(coordinators.begin(ZERO, 1000, None) for _ in range(5)), return_exceptions=True
        )
        assert sum(isinstance(one, TooManyTransactions) for one in begun) == 2
        await coordinators.begin(CoordinatorId(1), 1000, None)


@in_virtual_time
async def test_a_role_leaves_as_many_open_transactions_to_others_as_it_has() -> None:
    """Any role may begin transactions: none locks out the others."""
    world = World()
    async with world.coordinators(max_open=12) as (coordinators, _):

        async def begin(owner: str, count: int) -> list[TxnId]:
            begun = await asyncio.gather(
                *(coordinators.begin(ZERO, 60_000, owner) for _ in range(count)),
                return_exceptions=True,
            )
            refused = [each for each in begun if isinstance(each, BaseException)]
            assert all(isinstance(each, TooManyTransactions) for each in refused)
            return [each for each in begun if isinstance(each, TxnId)]

        greedy = await begin("mallory", 100)
        assert len(greedy) == 6
        assert len(await begin("alice", 100)) == 3
        assert await begin("mallory", 1) == []
        assert len(await begin("bob", 1)) == 1
        for txn in greedy:
            await coordinators.end_transaction(txn, ABORT, "mallory")
        assert len(await begin("mallory", 1)) == 1
        assert len(await begin("alice", 100)) == 2


@in_virtual_time
async def test_failed_begin_does_not_count_against_the_limit() -> None:
    world = World()
    async with world.coordinators(max_open=1) as (coordinators, _):
        world.metadata.before = failing("put", "/txn/id/")
        with pytest.raises(MetadataError):
            await coordinators.begin(ZERO, 1000, None)
        world.metadata.before = None
        await coordinators.begin(ZERO, 1000, None)


# Deadlines


@in_virtual_time
async def test_cancelled_begin_leaves_nothing_open() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        world.metadata.calls.clear()
        begun = asyncio.create_task(coordinators.begin(ZERO, 3_600_000, None))
        while not world.metadata.of_transactions():
            await asyncio.sleep(0)
        begun.cancel()
        await asyncio.sleep(1)
        assert begun.cancelled()
        assert [page async for page in parts.store.open_headers()] == []
        assert await state_of(parts, TxnId(0, 0)) is ABORT
        assert coordinators.open_transactions() == []


@in_virtual_time
async def test_a_begin_of_unknown_outcome_leaves_nothing_open() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):

        async def lose_the_answer(what: str, key: str) -> None:
            if what == "put" and key.startswith(records.HEADERS):
                world.metadata.before = None
                header = Header(TxnState.OPEN, 3_600_000, world.clock.now_ms())
                await parts.store.create_header(records.txn_of_header(key), header)
                raise MetadataError("The answer was lost: ask again.")

        world.metadata.before = lose_the_answer
        with pytest.raises(MetadataError):
            await coordinators.begin(ZERO, 3_600_000, None)
        await asyncio.sleep(1)
        assert [page async for page in parts.store.open_headers()] == []
        assert await state_of(parts, TxnId(0, 0)) is ABORT


@in_virtual_time
async def test_a_deadline_aborts_when_it_comes_and_not_before() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        late = await coordinators.begin(ZERO, 90_000, None)
        soon = await coordinators.begin(ZERO, 30_000, None)
        await asyncio.sleep(29.9)
        assert await state_of(parts, soon) is TxnState.OPEN
        await asyncio.sleep(0.2)
        assert await state_of(parts, soon) is ABORT
        assert await state_of(parts, late) is TxnState.OPEN
        await asyncio.sleep(60)
        assert await state_of(parts, late) is ABORT
        counters = coordinators.led()[0].counters
        assert (counters.timed_out, counters.aborted) == (2, 2)


@in_virtual_time
async def test_a_broker_whose_clock_is_ahead_does_not_end_anothers_transaction_early() -> None:
    """Nor one that nobody told it of; what it begins itself ends when its own time has come."""
    world = World()
    world.clock_slack_ms = 10_000
    async with world.coordinators() as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 30_000, None)
        header = await parts.store.read_header(txn)
        assert header is not None
    async with world.coordinators("next", ahead_ms=9_000) as (coordinators, parts):
        own = await coordinators.begin(ZERO, 30_000, None)
        await asyncio.sleep(29.9)
        assert await state_of(parts, txn) is TxnState.OPEN
        assert await state_of(parts, own) is TxnState.OPEN
        await asyncio.sleep(0.2)
        assert await state_of(parts, own) is ABORT
        await asyncio.sleep(2)
        assert await state_of(parts, txn) is ABORT


@in_virtual_time
async def test_a_deadline_that_another_broker_raised_is_judged_with_the_slack() -> None:
    world = World()
    world.clock_slack_ms = 10_000
    async with world.coordinators(ahead_ms=9_000) as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 30_000, None)
        stored = await parts.store.read_header(txn)
        assert stored is not None
        raised_to_ms = world.clock.now_ms() + 60_000
        header = replace(stored.header, timeout_ms=raised_to_ms - stored.header.created_ms)
        await parts.store.change_header(txn, header, stored.version)
        await asyncio.sleep(59.9)
        assert await state_of(parts, txn) is TxnState.OPEN
        await asyncio.sleep(2)
        assert await state_of(parts, txn) is ABORT


@in_virtual_time
async def test_thousands_of_deadlines_at_once() -> None:
    world = World()
    async with world.coordinators() as (coordinators, _):
        await asyncio.gather(*(coordinators.begin(ZERO, 5_000, None) for _ in range(3_000)))
        await asyncio.sleep(6)
        assert coordinators.led()[0].counters.timed_out == 3_000
        assert coordinators.open_transactions() == []


@in_virtual_time
async def test_a_wall_clock_put_forward_is_noticed() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 3_600_000, None)
        world.clock.shift_ms += 3_600_000
        await asyncio.sleep(11)
        assert await state_of(parts, txn) is ABORT


@in_virtual_time
async def test_an_abort_that_fails_is_tried_until_it_works() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 1_000, None)
        world.metadata.before = failing("put", "/txn/id/")
        await asyncio.sleep(5)
        assert await state_of(parts, txn) is TxnState.OPEN
        world.metadata.before = None
        await asyncio.sleep(1.1)
        assert await state_of(parts, txn) is ABORT


@in_virtual_time
async def test_transaction_begun_by_a_former_leader_times_out() -> None:
    """As by a leader that did not know yet that it no longer was, after this one had looked."""
    world = World()
    async with world.coordinators() as (coordinators, parts):
        txn = TxnId(0, 10**6)
        header = records.Header(TxnState.OPEN, 1000, world.clock.now_ms())
        await parts.store.create_header(txn, header)
        await asyncio.sleep(62)
        assert await state_of(parts, txn) is ABORT
        assert coordinators.open_transactions() == []


@in_virtual_time
async def test_a_damaged_header_does_not_hold_up_the_others() -> None:
    world = World()
    async with world.coordinators() as (coordinators, _):
        good = [await coordinators.begin(ZERO, 600_000, None) for _ in range(3)]
        damaged = records.header_key(TxnId(0, 999_999))
        await world.metadata.put(
            damaged,
            b"{",
            partition="0_999999",
            indexes=records.header_indexes(records.Header(TxnState.OPEN, 1, 1)),
        )
    async with world.coordinators() as (coordinators, _):
        assert [stored.txn for stored in coordinators.open_transactions()] == good


@in_virtual_time
async def test_more_headers_of_one_deadline_than_fit_a_page() -> None:
    world = World()
    count = 2 * TXN_PAGE + 500
    async with world.coordinators() as (coordinators, _):
        await coordinators.begin(ZERO, 599_999, None)
        same = (coordinators.begin(ZERO, 600_000, None) for _ in range(count))
        await asyncio.gather(*same)
        await coordinators.begin(ZERO, 600_001, None)
    async with world.coordinators() as (coordinators, parts):
        assert len({stored.txn for stored in coordinators.open_transactions()}) == count + 2
        found = [len(page) async for page in parts.store.open_headers()]
        assert sum(found) == count + 2


# Leadership


@in_virtual_time
async def test_leaders_records_are_pulsars() -> None:
    world = World()
    async with world.coordinators("a") as (coordinators, _):
        record = await world.metadata.get("/txn/tc/leader/3")
        assert record is not None
        assert record.ephemeral
        assert record.value == (
            b'{"brokerId":"a","brokerServiceUrl":"pulsar://a:6650","webServiceUrl":"http://a:8080"}'
        )
        assert len(coordinators.assignments()) == 4
    assert await world.metadata.get("/txn/tc/leader/3") is None
    parallelism = await world.metadata.get("/txn/tc/parallelism")
    assert parallelism is not None
    assert parallelism.value == b"4"


@in_virtual_time
async def test_the_other_process_takes_over_with_what_is_open() -> None:
    world = World()
    changes: list[int] = []
    async with world.coordinators("b") as (second, parts):
        second.on_change(lambda: changes.append(len(second.led())))
        assert [one.coordinator_id for one in second.led()] == [0, 1, 2, 3]
        async with world.coordinators("c") as (third, _):
            assert third.led() == []
            assert {leader.broker_id for leader in third.assignments().values()} == {"b"}
            txn = await second.begin(ZERO, 5_000, None)
            await second.stop()
            await asyncio.sleep(0.5)
            assert third.leads(ZERO)
            assert {leader.broker_id for leader in third.assignments().values()} == {"c"}
            assert [stored.txn for stored in third.open_transactions()] == [txn]
            await asyncio.sleep(5)
            assert await state_of(parts, txn) is ABORT


@in_virtual_time
async def test_a_lost_session_ends_leadership_and_begins_another() -> None:
    world = World()
    async with world.coordinators("a") as (coordinators, parts):
        txn = await coordinators.begin(ZERO, 600_000, None)
        led = coordinators.led()[0]
        world.metadata.before = failing("put", "/txn/tc/leader/")
        await coordinators._elections._session.close()  # type: ignore[union-attr]
        await asyncio.sleep(1)
        assert not coordinators.leads(ZERO)
        assert coordinators.assignments() == {}
        assert parts.counters.coordinators_lost == 4
        world.metadata.before = None
        await asyncio.sleep(15)
        assert coordinators.leads(ZERO)
        assert coordinators.led()[0] is not led
        assert [stored.txn for stored in coordinators.open_transactions()] == [txn]
        await coordinators.end_transaction(txn, COMMIT, None)
        assert await state_of(parts, txn) is COMMIT


@in_virtual_time
async def test_a_session_that_could_not_be_opened_in_an_unforeseen_way_is_opened_again() -> None:
    world = World()
    async with world.coordinators("a") as (coordinators, _):
        opened, failures = world.metadata.open_session, [RuntimeError("a defect")]

        async def fails(**given: object) -> object:
            if failures:
                raise failures.pop()
            return await opened(**given)  # type: ignore[arg-type]

        world.metadata.open_session = fails  # type: ignore[method-assign,assignment]
        await coordinators._elections._session.close()  # type: ignore[union-attr]
        await asyncio.sleep(5)
        assert not failures
        assert coordinators.leads(ZERO)


@in_virtual_time
async def test_records_of_leaders_are_followed_after_a_defect() -> None:
    world = World()
    async with world.coordinators("a") as (coordinators, _):
        elections, failures = coordinators._elections, [RuntimeError("a defect")]
        elect = elections._elect

        async def fails(number: CoordinatorId) -> object:
            if failures:
                raise failures.pop()
            return await elect(number)

        elections._elect = fails  # type: ignore[method-assign,assignment]
        for _ in range(2):
            await world.metadata.delete(records.leader_key(ZERO))
            await asyncio.sleep(5)
            assert coordinators.leads(ZERO)
        assert not failures


def scans_of_open_headers(world: World) -> int:
    return world.metadata.calls.count(("scan_index", records.DEADLINE_INDEX))


@in_virtual_time
async def test_coordinator_won_during_a_take_over_is_taken_over_too() -> None:
    world, listed, go_on = World(), asyncio.Event(), asyncio.Event()
    async with world.coordinators("b") as (second, _):
        scan_index = world.metadata.scan_index

        async def slow(index: str, lo: str, hi: str, **given: object) -> object:
            found = await scan_index(index, lo, hi, **given)
            listed.set()
            await go_on.wait()
            return found

        world.metadata.scan_index = slow  # type: ignore[method-assign]
        third = Coordinators(
            world.parts("c"),
            Leader("c", "pulsar://c:6650"),
            parallelism=4,
            max_open=0,
            session_timeout_ms=30_000,
        )
        starting = asyncio.ensure_future(third.start())
        await listed.wait()
        txn = await second.begin(ZERO, 600_000, None)
        await second.stop()
        await asyncio.sleep(1)
        assert third.leads(ZERO)
        go_on.set()
        await starting
        await asyncio.sleep(1)
        assert [stored.txn for stored in third.open_transactions()] == [txn]
        await third.stop()


@in_virtual_time
async def test_coordinators_won_one_by_one_share_one_scan_of_open_transactions() -> None:
    world = World()
    async with world.coordinators("a") as (coordinators, _):
        txns = [await coordinators.begin(CoordinatorId(n), 600_000, None) for n in range(4)]
        led = list[CoordinatorId]()

        async def slow(what: str, key: str) -> None:
            if what == "scan_index":
                await asyncio.sleep(1)

        world.metadata.before = slow
        world.metadata.calls.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(coordinators._elections), "led_here", property(lambda _: led))
            coordinators._leaders_changed()
            assert coordinators.open_transactions() == []
            for number in range(4):
                led.append(CoordinatorId(number))
                coordinators._leaders_changed()
                await asyncio.sleep(0.1)
            await asyncio.sleep(10)
            assert sorted(one.txn for one in coordinators.open_transactions()) == txns
        assert scans_of_open_headers(world) == 2, "one for the first, another for all that followed"


@in_virtual_time
async def test_a_listener_that_fails_keeps_no_other_from_hearing() -> None:
    world, heard = World(), list[int]()

    def fail() -> None:
        raise RuntimeError("a defect")

    async with world.coordinators("a") as (coordinators, _):
        coordinators.on_change(fail)
        coordinators.on_change(lambda: heard.append(len(coordinators.assignments())))
        with capture_logs() as logs:
            await world.metadata.delete(records.leader_key(ZERO))
            await asyncio.sleep(0.01)
        assert heard == [3, 4]
        failed = [one["event"] for one in logs if one["log_level"] == "error"]
        assert failed == ["transaction_listener_failed"] * 2


@in_virtual_time
async def test_another_number_of_coordinators_is_refused() -> None:
    world = World()
    async with world.coordinators(parallelism=4):
        pass
    with pytest.raises(CoordinatorCountDiffers, match="set it to 4"):
        async with world.coordinators(parallelism=5):
            pass


def test_stopping_twice_is_fine() -> None:
    async def twice() -> None:
        async with World().coordinators() as (coordinators, _):
            await coordinators.stop()

    asyncio.run(twice())


@in_virtual_time
async def test_numbers_are_taken_while_the_coordinator_closes() -> None:
    world = World()
    numbers = NumberBlocks(world.parts().store, ZERO)
    first = asyncio.ensure_future(numbers.take())
    await asyncio.sleep(0)
    await asyncio.gather(first, numbers.close())
    assert first.result() == numbers.last


@in_virtual_time
async def test_a_coordinator_that_closes_late_leaves_the_deadlines_of_the_next_one() -> None:
    """Leadership was lost and won again while an END was under way."""
    world = World()
    parts, due = world.parts(), list[TxnId]()
    deadlines = Deadlines(world.clock, due.extend)
    old = Coordinator(ZERO, parts, deadlines, max_open=0)
    ending, left_open = await old.begin(60_000, None), await old.begin(1000, None)
    go_on = asyncio.Event()

    async def wait(what: str, key: str) -> None:
        if (what, key) == ("put", records.header_key(ending)):
            await go_on.wait()

    world.metadata.before = wait
    end = asyncio.ensure_future(old.end_transaction(ending, COMMIT, None))
    await asyncio.sleep(0.001)
    closing = asyncio.ensure_future(old.close())
    await asyncio.sleep(0.001)
    new = Coordinator(ZERO, parts, deadlines, max_open=0)
    stored = await parts.store.read_header(left_open)
    assert stored is not None
    new.adopt([stored])
    go_on.set()
    await asyncio.gather(end, closing)
    await asyncio.sleep(1.1)
    assert due == [left_open]
    await new.close()
    deadlines.close()
