"""The buffer of a segment over real metadata stores: waits, failures, restarts."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.ledger.store import DiskFull
from storage.managed_ledger.types import (
    AppendOutcomeUnknown,
    ManagedLedgerFenced,
    ManagedLedgerState,
)
from storage.metadata.store import MetadataError
from tests.support.waiting import until
from tests.unit.txn.buffer_world import SEGMENT, T1, T2, T3, World, a_world
from txn.errors import SegmentOwnershipLost, TransactionEnded
from txn.forget_segment import forget_segment
from txn.records import Claim, TxnState

COMMITTED, ABORTED = TxnState.COMMITTED, TxnState.ABORTED


@pytest.fixture(params=["memory", "sqlite"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(request.param, tmp_path) as world:
        yield world


async def finished(world: World) -> None:
    await until(lambda: world.buffer.idle)


async def test_commit_shows_everything_and_leaves_no_claim(world: World) -> None:
    await world.begin(T1)
    moved: list[Position] = []
    world.buffer.on_max_read_position(lambda: moved.append(world.buffer.max_read_position))
    before = world.ledger.confirm()
    last = [await world.append(T1) for _ in range(3)][-1]
    assert world.buffer.max_read_position == before
    assert await world.claims() == [(T1, 1)]
    await world.end(T1, COMMITTED)
    await finished(world)
    assert moved == [before, last]
    assert not world.buffer.is_aborted(T1)
    assert await world.claims() == []
    assert world.decisions.followed == 0


async def test_abort_hides_its_entries_for_good(world: World) -> None:
    await world.begin(T1, T2)
    hidden = await world.append(T1)
    await world.append(T2)
    await world.end(T1, ABORTED)
    await until(lambda: world.buffer.is_aborted(T1))
    assert world.buffer.max_read_position == hidden
    await world.end(T2, COMMITTED)
    await finished(world)
    await world.collect(T1)
    await world.reload()
    assert world.buffer.is_aborted(T1)
    assert not world.buffer.is_aborted(T2)
    assert world.buffer.max_read_position == world.ledger.last_confirmed


async def test_committed_data_is_readable_from_earliest_after_collection_and_restart(
    world: World,
) -> None:
    await world.begin(T1)
    last = await world.append(T1)
    await world.end(T1, COMMITTED)
    await finished(world)
    await world.collect(T1)
    await world.reload()
    assert world.buffer.max_read_position == last
    assert not world.buffer.is_aborted(T1)


async def test_many_writes_share_one_claim_and_one_read(world: World) -> None:
    await world.begin(T1)
    world.store.calls.clear()
    await asyncio.gather(*(world.buffer.join(T1) for _ in range(100)))
    assert world.store.calls == ["put_owner", "put_claim", "read_header"]
    assert world.buffer.admit(T1, lambda _: None)


async def test_w1_w2_a_first_write_waits_while_its_claim_is_stored(world: World) -> None:
    await world.begin(T1)
    stored = world.store.held["put_claim"] = asyncio.Event()
    world.store.calls.clear()
    joining = asyncio.create_task(world.buffer.join(T1))
    await until(lambda: "put_claim" in world.store.calls)
    for _ in range(20):
        await asyncio.sleep(0)
    assert world.store.calls == ["put_owner", "put_claim"], "the header is not read yet"
    assert not joining.done()
    stored.set()
    await joining
    assert world.store.calls == ["put_owner", "put_claim", "read_header"]


async def test_a_write_after_the_end_is_refused_without_a_store_access(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.end(T1, COMMITTED)
    await finished(world)
    world.store.calls.clear()
    with pytest.raises(TransactionEnded):
        await world.buffer.join(T1)
    assert world.store.calls == []


@pytest.mark.parametrize("exists", [True, False])
async def test_a_write_of_an_ended_or_collected_transaction_leaves_nothing(
    world: World, exists: bool
) -> None:
    if exists:
        await world.begin(T1)
        await world.end(T1, ABORTED)
    with pytest.raises(TransactionEnded):
        await world.buffer.join(T1)
    await finished(world)
    assert await world.claims() == []
    assert await world.store.aborted_on(SEGMENT) == {}


async def test_a_send_between_commit_and_its_watch_is_shown_with_the_others(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.decisions.stop()
    await world.end(T1, COMMITTED)
    late = await world.append(T1)
    world.buffer._decided(T1, COMMITTED)
    await finished(world)
    assert world.buffer.max_read_position == late
    await world.reload()
    assert world.buffer.max_read_position == late


async def test_an_append_in_flight_while_the_abort_is_being_cleaned_up(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    world.buffer.issued(T1)
    world.store.calls.clear()
    await world.end(T1, ABORTED)
    await until(lambda: world.buffer.is_aborted(T1))
    assert world.store.calls == []
    late = world.ledger.confirm()
    world.buffer.appended(T1, late, None)
    await finished(world)
    assert world.store.calls == ["record_aborted", "delete_operation"]
    assert await world.store.aborted_on(SEGMENT) == {T1: late}


async def test_a_claim_whose_append_never_happened_pins_until_the_end(world: World) -> None:
    world.ledger.confirm()
    await world.begin(T1)
    await world.buffer.join(T1)
    world.ledger.confirm()
    await world.reload()
    world.ledger.confirm()
    assert world.buffer.max_read_position == Position(5, 0)
    await world.end(T1, ABORTED)
    await finished(world)
    assert world.buffer.max_read_position == world.ledger.last_confirmed
    assert await world.claims() == []


async def test_after_a_restart_the_first_write_puts_a_claim_of_its_own(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.reload()
    await world.append(T1)
    assert await world.claims() == [(T1, 1), (T1, 2)]
    assert world.buffer.max_read_position == Position(5, -1)
    await world.end(T1, COMMITTED)
    await finished(world)
    assert await world.claims() == []
    assert world.buffer.max_read_position == Position(5, 1)


@pytest.mark.parametrize("end", [COMMITTED, ABORTED])
async def test_transaction_ended_without_an_owner_is_finished_at_load(
    world: World, end: TxnState
) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.buffer.close()
    await world.end(T1, end)
    await world.load()
    assert world.buffer.max_read_position == world.ledger.last_confirmed
    assert world.buffer.is_aborted(T1) is (end is ABORTED)
    await finished(world)
    assert await world.claims() == []


async def test_an_end_during_the_load_is_not_missed(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.buffer.close()
    gate = world.store.held["aborted_on"] = asyncio.Event()
    loading = asyncio.create_task(world.load())
    await until(lambda: "aborted_on" in world.store.calls[-1:])
    await world.end(T1, ABORTED)
    await until(lambda: world.decisions.followed == 0)
    gate.set()
    await loading
    assert world.buffer.is_aborted(T1)
    await finished(world)
    assert await world.claims() == []


async def test_a_failed_load_follows_nothing(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.buffer.close()
    world.store.failures["aborted_on"] = 1
    with pytest.raises(MetadataError):
        await world.load()
    assert world.decisions.followed == 0


@pytest.mark.parametrize("call", ["put_claim", "read_header", "put_owner"])
async def test_failed_join_raises_and_is_retried_with_the_next_write(
    world: World, call: str
) -> None:
    await world.begin(T1)
    world.store.failures[call] = 1
    with pytest.raises(MetadataError):
        await world.buffer.join(T1)
    await world.append(T1)
    await world.end(T1, COMMITTED)
    await finished(world)
    assert await world.claims() == []


async def test_a_claim_of_unknown_outcome_is_deleted_at_the_end(world: World) -> None:
    await world.begin(T1)
    world.store.lost["put_claim"] = 1
    with pytest.raises(MetadataError):
        await world.buffer.join(T1)
    assert await world.claims() == [(T1, 1)]
    await world.end(T1, ABORTED)
    await finished(world)
    assert await world.claims() == []


async def test_cleaning_is_tried_until_it_is_done_and_hides_at_once(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    world.store.failures["record_aborted"] = 1
    world.store.failures["delete_operation"] = 1
    await world.end(T1, ABORTED)
    await until(lambda: world.buffer.is_aborted(T1))
    assert world.buffer.max_read_position == world.ledger.last_confirmed
    await finished(world)
    assert await world.claims() == []
    assert world.store.calls[-4:] == ["record_aborted"] * 2 + ["delete_operation"] * 2


async def test_closing_ends_retries_and_refuses_waiting_calls(world: World) -> None:
    await world.begin(T1, T2)
    await world.append(T1)
    world.store.failures["record_aborted"] = 10**6
    await world.end(T1, ABORTED)
    await until(lambda: "record_aborted" in world.store.calls)
    gate = world.store.held["put_claim"] = asyncio.Event()
    waiting = asyncio.create_task(world.buffer.join(T2))
    await until(lambda: "put_claim" in world.store.calls[-1:])
    closing = asyncio.create_task(world.buffer.close())
    with pytest.raises(SegmentOwnershipLost):
        await waiting
    assert not closing.done()
    gate.set()
    await closing
    with pytest.raises(SegmentOwnershipLost):
        await world.buffer.join(T3)
    world.store.failures.clear()
    await world.load()
    await until(lambda: len(world.buffer.open_transactions()) == 1)
    assert await world.claims() == [(T2, 1)]
    assert await world.store.aborted_on(SEGMENT) != {}


@pytest.mark.parametrize(
    "outcome",
    [AppendOutcomeUnknown("The disk is gone."), ManagedLedgerFenced("Another one has it."), None],
)
async def test_an_unknown_append_stops_the_owner_for_good(
    world: World, outcome: MagnetarError | None
) -> None:
    await world.begin(T1, T2)
    await world.append(T1)
    world.buffer.issued(T1)
    world.buffer.appended(T1, None, outcome)
    await world.end(T1, ABORTED)
    with pytest.raises(SegmentOwnershipLost):
        await world.buffer.join(T2)
    await world.buffer.close()
    assert await world.claims() == [(T1, 1)]
    recovered = world.ledger.confirm()
    await world.load()
    await finished(world)
    assert world.buffer.is_aborted(T1)
    assert await world.store.aborted_on(SEGMENT) == {T1: recovered}


async def test_a_failed_append_holds_nothing_back(world: World) -> None:
    await world.begin(T1)
    await world.buffer.join(T1)
    world.buffer.issued(T1)
    world.ledger.confirm()
    assert world.buffer.max_read_position == Position(5, -1)
    world.buffer.appended(T1, None, DiskFull("The disk is full."))
    assert world.buffer.max_read_position == Position(5, 0)
    world.buffer.issued(T1)
    world.buffer.not_taken(T1)
    await world.end(T1, ABORTED)
    await finished(world)


async def test_a_terminated_segment_is_not_joined(world: World) -> None:
    await world.begin(T1)
    world.ledger.state = ManagedLedgerState.TERMINATED
    await world.buffer.join(T1)
    assert await world.claims() == []


async def test_rescan_cleans_up_what_a_stale_owner_put_late(world: World) -> None:
    await world.begin(T1, T2)
    await world.end(T1, ABORTED)
    for txn in (T1, T2, T3):
        await world.store.put_claim(Claim(txn, SEGMENT, 1, Position(5, -1)))
    await world.buffer.rescan()
    await finished(world)
    assert await world.claims() == [(T2, 1)]
    assert set(await world.store.aborted_on(SEGMENT)) == {T1}


async def test_w6_claims_of_later_owners_are_left_alone(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.store.put_claim(Claim(T2, SEGMENT, 9, Position(5, -1)))
    await world.buffer.rescan()
    await finished_but(world, T1)
    assert (T2, 9) in await world.claims()


async def finished_but(world: World, txn: TxnId) -> None:
    await until(lambda: [each.txn for each in world.buffer.open_transactions()] == [txn])


async def test_aborted_records_go_with_their_ledgers(world: World) -> None:
    await world.begin(T1)
    await world.append(T1)
    await world.end(T1, ABORTED)
    await finished(world)
    await world.buffer.rescan()
    assert world.buffer.is_aborted(T1)
    world.ledger.first_ledger_id = 6
    world.ledger.last_confirmed = Position(6, 0)
    await world.reload()
    await finished(world)
    assert not world.buffer.is_aborted(T1)
    assert await world.store.aborted_on(SEGMENT) == {}


async def test_open_transactions_are_listed(world: World) -> None:
    await world.begin(T1, T2)
    await world.append(T1)
    await world.reload()
    await world.append(T2)
    await world.append(T2)
    world.buffer.issued(T2)
    loaded, own = world.buffer.open_transactions()
    assert (loaded.txn, loaded.pin, loaded.loaded, loaded.entries) == (T1, Position(5, -1), True, 0)
    assert (own.txn, own.pin, own.first) == (T2, Position(5, 0), Position(5, 1))
    assert (own.entries, own.in_flight, own.loaded) == (2, 1, False)


async def test_a_deleted_segment_leaves_nothing(world: World) -> None:
    await world.begin(T1, T2)
    await world.append(T1)
    await world.append(T2)
    await world.end(T1, ABORTED)
    await until(lambda: len(world.buffer.open_transactions()) == 1)
    await world.buffer.forget()
    assert await world.claims() == []
    assert await world.store.aborted_on(SEGMENT) == {}
    assert await world.store.read_owner(SEGMENT) is None
    await forget_segment(world.store, SEGMENT)


async def test_waiting_writes_get_one_answer_each(world: World) -> None:
    await world.begin(T1)
    answers: list[MagnetarError | None] = []
    assert not world.buffer.admit(T1, answers.append)
    assert not world.buffer.admit(T1, answers.append)
    assert answers == []
    await until(lambda: answers)
    assert answers == [None, None]


async def test_end_that_is_carried_out_on_request_waits_for_a_claim_that_is_being_put(
    world: World,
) -> None:
    await world.begin(T1, T2)
    visible = await world.append(T1)
    await world.end(T1, COMMITTED)
    await world.buffer.carry_out_end(T1, COMMITTED)
    assert world.buffer.max_read_position == visible
    gate = world.store.held["put_claim"] = asyncio.Event()
    joining = asyncio.get_running_loop().create_task(world.buffer.join(T2))
    await until(lambda: world.store.calls[-1] == "put_claim")
    await world.end(T2, ABORTED)
    ending = asyncio.get_running_loop().create_task(world.buffer.carry_out_end(T2, ABORTED))
    await asyncio.sleep(0)
    assert not ending.done()
    gate.set()
    await ending
    with pytest.raises(TransactionEnded):
        await joining
    await world.buffer.carry_out_end(T2, ABORTED)  # a repeated request
    await finished(world)
    assert await world.claims() == []
