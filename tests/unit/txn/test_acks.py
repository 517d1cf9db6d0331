"""Pending acknowledgements over real stores: answers, ends, reloads, crashes at every operation."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from config.bounds import TXN_SLICE_POSITIONS
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S
from tests.unit.txn.ack_world import SEGMENT, SUBSCRIPTION, A, AckOwner, AckWorld, B, C, turns
from txn import records
from txn.errors import (
    InvalidTxnStatus,
    SegmentOwnershipLost,
    TransactionConflict,
    TransactionNotFound,
)
from txn.pending_ack import PendingAck
from txn.pending_acks_core import Effect
from txn.records import AckedPosition, AckRecord, TxnState
from txn.store import StoredHeader

COMMITTED, ABORTED = TxnState.COMMITTED, TxnState.ABORTED


async def test_a_commit_is_applied_then_durable_then_forgotten() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0, 2)
    assert owner.pending() == [0, 2]
    assert owner.acknowledged() == []
    (record,) = await world.records()
    assert (record.txn, record.epoch, len(record.acks)) == (A, 1, 2)
    await world.end(A, COMMITTED)
    await turns()
    await owner.idle()
    assert owner.pending() == []
    assert owner.acknowledged() == [0, 2]
    assert await world.records() == []
    assert [what for what, _ in owner.heard.events] == ["held", "applied"]
    assert owner.decisions.followed == 0
    await owner.kill()
    assert (await world.owner()).acknowledged() == [0, 2]


async def test_an_abort_releases_at_once() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    await owner.ack_up_to(A, 4)
    assert owner.pending() == [0, 1, 2, 3, 4]
    await world.end(A, ABORTED)
    await turns()
    await owner.idle()
    assert (owner.pending(), owner.acknowledged()) == ([], [])
    assert await world.records() == []
    assert owner.heard.events[-1][0] == "released"


async def test_commands_in_flight_conflict_and_a_refusal_changes_nothing() -> None:
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    first = owner.acks.acknowledge(A, [owner.at(0)])
    with pytest.raises(TransactionConflict):
        await owner.acks.acknowledge(B, [owner.at(1), owner.at(0)])
    await first
    assert owner.pending() == [0]
    await world.end(A, ABORTED)
    await turns()
    await owner.ack(B, 1, 0)


async def test_a_failing_listener_loses_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    ended = owner.acks.core.confirmed

    def end_before(taken: Sequence[PendingAck]) -> list[Effect]:
        """So that one event holds them and applies them."""
        owner.acks.core.decided(A, COMMITTED)
        return ended(taken)

    monkeypatch.setattr(owner.acks.core, "confirmed", end_before)
    monkeypatch.setattr(owner.heard, "held", lambda acks: acks[99])
    await owner.acks.acknowledge(A, [owner.at(0)])
    await owner.idle()
    assert owner.acknowledged() == [0]
    assert await world.records() == []


async def test_record_stays_until_the_cursor_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    await owner.ack(B, 3)
    with monkeypatch.context() as broken:
        broken.setattr(type(owner.cursor), "acknowledge", lambda cursor, position: position[99])
        await world.end(A, COMMITTED)
        await turns()
    await world.end(B, COMMITTED)
    await turns()
    assert {record.txn for record in await world.records()} == {A, B}
    await owner.kill()
    assert (await world.owner()).acknowledged() == [0, 3], "the next owner finds them"


async def test_a_cumulative_commit_moves_the_mark_delete_position() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack_up_to(A, 2)
    await owner.ack_up_to(A, 6)
    await world.end(A, COMMITTED)
    await turns()
    await owner.idle()
    assert owner.acknowledged() == list(range(7))
    assert owner.cursor.mark_delete == owner.at(6).position


async def test_messages_of_a_batch_are_applied_as_bits() -> None:
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    position = owner.at(3).position
    await owner.acks.acknowledge(A, [AckedPosition(position, (0b1110,), 4)])
    await owner.acks.acknowledge(B, [AckedPosition(position, (0b0001,), 4)])
    assert owner.acks.core.held.is_pending(position)
    await owner.kill()
    again = await world.owner()
    assert again.acks.core.held.is_pending(position)
    await world.end(A, COMMITTED)
    await turns()
    await again.idle()
    assert again.cursor.ack_set(position) == [0b1110]
    await world.end(B, COMMITTED)
    await turns()
    assert again.cursor.is_acknowledged(position)


async def test_late_acknowledgements_are_refused_when_the_end_is_known() -> None:
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    await owner.ack(B, 1)
    await world.end(A, COMMITTED)
    await world.end(B, ABORTED)
    await turns()
    for txn in (A, B):
        with pytest.raises(InvalidTxnStatus):
            owner.acks.acknowledge(txn, [owner.at(5)])


async def test_a_first_acknowledgement_after_the_end_is_settled_by_the_header() -> None:
    """Nobody followed when the end was told: one read of the header finds it."""
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    await world.end(A, COMMITTED)
    await world.end(B, ABORTED)
    await turns()
    owner.acks.acknowledge(A, [owner.at(0)])
    owner.acks.acknowledge(B, [owner.at(1)])
    owner.acks.acknowledge(C, [owner.at(2)])
    await turns()
    await owner.idle()
    assert owner.acknowledged() == [0]
    assert owner.pending() == []
    assert await world.records() == []
    with pytest.raises(TransactionNotFound):
        owner.acks.acknowledge(C, [owner.at(3)])


async def test_pending_acks_are_rebuilt_after_a_reload() -> None:
    """A3, A4: positions, not only transactions; then each shares the end of its transaction."""
    world = AckWorld()
    await world.begin(A, B, C)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0, 1)
    await owner.ack(B, 3)
    await owner.ack(C, 5)
    await owner.stop()
    await world.end(C, COMMITTED)
    await world.collect(C)
    await world.end(B, COMMITTED)
    again = await world.owner()
    assert again.pending() == [0, 1]
    assert again.acknowledged() == [3], "applied by the load; what has no header is void (A5)"
    with pytest.raises(TransactionConflict):
        await again.acks.acknowledge(TxnId(9, 9), [again.at(1)])
    await world.end(A, COMMITTED)
    await turns()
    await again.idle()
    assert again.acknowledged() == [0, 1, 3]
    assert await world.records() == []


async def test_an_end_during_the_load_is_not_missed() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    await owner.stop()
    for ends_after in range(40):
        fresh = AckOwner(world, eager=True)
        loading = asyncio.create_task(fresh.load())
        await turns(ends_after)
        if ends_after == 20:
            await world.end(A, ABORTED)
        await loading
        await turns()
        await fresh.idle()
        assert fresh.pending() == ([] if ends_after >= 20 else [0])
        await fresh.stop()


async def test_a3_a_transaction_is_followed_before_its_header_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else an end between the two is never told."""
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    await owner.stop()
    fresh = AckOwner(world, eager=True)
    read, followed = fresh.store.read_header, list[int]()

    async def noting(txn: TxnId, **how: bool) -> StoredHeader | None:
        followed.append(fresh.decisions.followed)
        return await read(txn, **how)

    monkeypatch.setattr(fresh.store, "read_header", noting)
    await fresh.load()
    assert followed == [1]


async def test_an_owner_that_was_replaced_answers_nothing_and_deletes_nothing() -> None:
    """A1: the record is durable after the other one scanned, and so the proof must fail."""
    world = AckWorld()
    await world.begin(A, B)
    stale = await world.owner(entries=10)
    await stale.owner.take()
    fresh = await world.owner()
    with pytest.raises(SegmentOwnershipLost):
        await stale.ack(A, 0)
    assert len(stale.lost) == 1
    (left,) = await world.records()
    assert left.epoch == 1
    await fresh.ack(B, 0)
    await world.end(B, COMMITTED)
    await turns()
    await fresh.idle()
    assert fresh.acknowledged() == [0]
    assert await world.records() == [left]
    with pytest.raises(SegmentOwnershipLost):
        stale.acks.acknowledge(A, [stale.at(1)])


async def test_a1_an_owner_replaced_while_it_puts_the_record_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proof of before the record says nothing: the new owner has looked for records between."""
    world = AckWorld()
    await world.begin(A)
    stale = await world.owner(entries=10)
    put = stale.store.put_ack

    async def put_late(record: AckRecord) -> None:
        fresh = await world.owner()
        assert fresh.pending() == []
        await put(record)

    monkeypatch.setattr(stale.store, "put_ack", put_late)
    with pytest.raises(SegmentOwnershipLost):
        await stale.ack(A, 0)


async def test_a6_records_that_nobody_holds_go_when_their_transaction_has_ended() -> None:
    """They were put late by a stale owner and never answered, so they are never applied."""
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    late = [
        AckRecord(txn, SEGMENT, SUBSCRIPTION, 1, 99, False, (owner.at(0),)) for txn in (A, B, C)
    ]
    for record in late:
        await world.transactions.put_ack(record)
    await world.end(A, COMMITTED)
    await owner.acks.rescan()
    assert await world.records() == [late[1]], "B is open, and its writer may be at work"
    await world.end(B, ABORTED)
    await owner.acks.rescan()
    assert await world.records() == []
    assert owner.acknowledged() == []


async def test_a6_records_that_are_held_are_left_to_their_holder() -> None:
    """Its cursor is not durable yet (A2)."""
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    world.metadata.faults.append((SUBSCRIPTION.replace("/", "%2F"), False))
    await world.end(A, COMMITTED)
    await turns()
    assert owner.acknowledged() == [0]
    await owner.acks.rescan()
    assert len(await world.records()) == 1


async def test_a3_a_stale_owner_cannot_move_the_cursor_and_deletes_nothing() -> None:
    """The cursor was fenced by a write at load: else the ack would be in neither place."""
    world = AckWorld()
    await world.begin(A)
    stale = await world.owner(entries=10)
    await stale.ack(A, 0)
    fresh = await world.owner()
    await fresh.decisions.stop()
    await world.end(A, COMMITTED)
    stale.acks.decided(A, COMMITTED)
    await turns()
    assert len(await world.records()) == 1
    with pytest.raises(MagnetarError):
        stale.acks.acknowledge(A, [stale.at(1)])
    fresh.acks.decided(A, COMMITTED)
    await fresh.idle()
    assert fresh.acknowledged() == [0]
    assert await world.records() == []


async def test_a_load_does_not_touch_records_of_later_owners() -> None:
    """W6: who is behind loads and deletes only epochs up to its own."""
    world = AckWorld()
    await world.begin(A)
    first = await world.owner(entries=10)
    second = await world.owner()
    await second.ack(A, 0)
    await world.end(A, COMMITTED)
    assert [each.epoch for each in await first.acks._scan()] == []


@pytest.mark.parametrize("applied", [False, True])
async def test_a_record_that_cannot_be_put_is_released_and_deleted(applied: bool) -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    world.metadata.faults.append((records.OPERATIONS, applied))
    with pytest.raises(MetadataError):
        await owner.ack(A, 0)
    assert owner.heard.events == [("refused", [owner.at(0).position])]
    await turns()
    assert owner.pending() == []
    assert await world.records() == []
    assert owner.decisions.followed == 0
    await owner.ack(A, 0)


async def test_ownership_that_cannot_be_proven_refuses() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    world.metadata.faults.append((records.owner_key("")[:-1], False))
    with pytest.raises(MetadataError):
        await owner.ack(A, 0)
    await turns()
    assert await world.records() == []


async def test_cleaning_is_tried_until_the_store_works(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "_FIRST_RETRY_S", 0.001, in_module="txn.pending_acks")
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0)
    world.metadata.faults.extend([(SUBSCRIPTION.replace("/", "%2F"), False)] * 2)
    await world.end(A, COMMITTED)
    await turns()
    assert len(await world.records()) == 1, "the cursor is not durable yet (A2)"
    assert owner.acknowledged() == [0]
    async with asyncio.timeout(TIMEOUT_S):
        while await world.records():
            await asyncio.sleep(0.001)
    await owner.kill()
    assert (await world.owner()).acknowledged() == [0]


async def test_ended_transactions_are_finished_before_a_seek() -> None:
    """A7: else the reload after a crash would apply the commit over the new place."""
    world = AckWorld()
    await world.begin(A, B)
    owner = await world.owner(entries=10)
    await owner.ack(A, 0, 1)
    await owner.ack(B, 4)
    late = owner.acks.acknowledge(A, [owner.at(2)])
    await world.end(A, COMMITTED)
    owner.acks.decided(A, COMMITTED)
    await owner.acks.finish_ended()
    assert late.done()
    assert not owner.acks.core.finishing
    assert [each.txn for each in await world.records()] == [B]
    assert owner.acknowledged() == [0, 1, 2]
    await owner.cursor.reset(owner.first)
    await owner.kill()
    again = await world.owner()
    assert again.acknowledged() == []
    assert again.pending() == [4], "what is open stays pending over a seek"


async def test_the_first_transaction_takes_the_epoch_where_there_is_one_process() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(eager=False, entries=10)
    assert owner.owner.epoch == 0
    await owner.ack(A, 0)
    assert owner.owner.epoch == 1
    await owner.stop()
    again = await world.owner(eager=False)
    assert again.owner.epoch == 0
    assert again.pending() == [0]
    await again.ack(A, 1)
    assert {each.epoch for each in await world.records()} == {1, 2}
    await world.end(A, COMMITTED)
    await turns()
    await again.idle()
    assert await world.records() == []
    assert again.acknowledged() == [0, 1]


async def test_closing_waits_for_what_is_in_flight() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    flying = owner.acks.acknowledge(A, [owner.at(0)])
    await owner.stop()
    assert flying.done()
    await flying
    with pytest.raises(SegmentOwnershipLost):
        owner.acks.acknowledge(A, [owner.at(1)])
    assert owner.decisions.followed == 0
    assert (await world.owner()).pending() == [0]


async def test_long_commands_make_several_records() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=10)
    owner.acks.core.record_positions = 3
    await owner.ack(A, *range(8))
    assert len(await world.records()) == 3
    await owner.kill()
    again = await world.owner()
    assert again.pending() == list(range(8))
    await world.end(A, COMMITTED)
    await turns()
    await again.idle()
    assert again.acknowledged() == list(range(8))


async def test_many_messages_are_held_in_slices_and_all_when_that_returns() -> None:
    world = AckWorld()
    await world.begin(A)
    count = 4 * TXN_SLICE_POSITIONS
    owner = await world.owner(entries=count)
    held = [0]

    async def watch() -> None:
        while held[-1] < count:
            await asyncio.sleep(0)
            held.append(owner.acks.core.positions)

    watching = asyncio.ensure_future(watch())
    task = await owner.acks.acknowledge_many(A, [owner.at(entry) for entry in range(count)])
    assert owner.pending(count) == list(range(count))
    await watching
    assert max(after - before for before, after in pairwise(held)) == TXN_SLICE_POSITIONS
    await task
    announced = [len(positions) for what, positions in owner.heard.events if what == "held"]
    assert announced == [TXN_SLICE_POSITIONS] * 4
    await world.end(A, COMMITTED)
    await owner.idle()
    assert owner.acknowledged(count) == list(range(count))
    assert await world.records() == []


async def test_many_messages_of_which_one_is_held_elsewhere_are_refused_whole() -> None:
    world = AckWorld()
    await world.begin(A, B)
    count = 3 * TXN_SLICE_POSITIONS
    owner = await world.owner(entries=count)
    await owner.ack(B, count - 1)
    task = await owner.acks.acknowledge_many(A, [owner.at(entry) for entry in range(count)])
    assert owner.pending(count) == [count - 1]
    with pytest.raises(TransactionConflict):
        await task
    assert {record.txn for record in await world.records()} == {B}
    assert not owner.acks.core.has(A)
    await owner.ack(B, 0)
    await world.end(B, COMMITTED)
    await owner.idle()
    assert owner.acknowledged(count) == [0, count - 1]


async def test_many_messages_are_held_once_a_transaction_that_held_one_is_found_to_have_ended() -> (
    None
):
    """A8: the end was written, and its owner here has not heard of it."""
    world = AckWorld()
    await world.begin(A, B)
    count = 3 * TXN_SLICE_POSITIONS
    owner = await world.owner(entries=count, eager=False)
    await owner.ack(B, count - 1)
    await world.end(B, ABORTED)
    task = await owner.acks.acknowledge_many(A, [owner.at(entry) for entry in range(count)])
    await task
    assert owner.pending(count) == list(range(count))


@pytest.mark.parametrize("end", [COMMITTED, ABORTED])
async def test_end_between_two_slices_refuses_all_of_them(end: TxnState) -> None:
    world = AckWorld()
    await world.begin(A)
    count = 3 * TXN_SLICE_POSITIONS
    owner = await world.owner(entries=count)

    async def end_after_the_first() -> None:
        while not owner.acks.core.positions:
            await asyncio.sleep(0)
        owner.acks.decided(A, end)

    ending = asyncio.ensure_future(end_after_the_first())
    task = await owner.acks.acknowledge_many(A, [owner.at(entry) for entry in range(count)])
    assert owner.acks.core.positions == 0
    with pytest.raises(InvalidTxnStatus):
        await task
    await ending
    await owner.idle()
    assert (owner.pending(count), owner.acknowledged(count)) == ([], [])
    assert await world.records() == []


async def test_end_between_two_records_applies_each_of_them_once() -> None:
    world = AckWorld()
    await world.begin(A)
    count = 3 * TXN_SLICE_POSITIONS
    owner = await world.owner(entries=count)
    task = await owner.acks.acknowledge_many(A, [owner.at(entry) for entry in range(count)])

    def held_so_far() -> int:
        return [what for what, _ in owner.heard.events].count("held")

    while not held_so_far():
        await asyncio.sleep(0)
    assert held_so_far() == 1
    await world.end(A, COMMITTED)
    owner.acks.decided(A, COMMITTED)
    await task
    await owner.idle()
    applied = [len(positions) for what, positions in owner.heard.events if what == "applied"]
    assert sum(applied) == count
    assert owner.acknowledged(count) == list(range(count))


# Crashes


async def _story(owner: AckOwner) -> None:
    """Two transactions hold and end, a third stays open."""
    world = owner.world
    await owner.load(10)
    await owner.ack(A, 0)
    await asyncio.gather(owner.ack(A, 2), owner.ack(B, 5), owner.ack(B, 6))
    await owner.ack(C, 8)
    await world.end(A, COMMITTED)
    await world.end(B, ABORTED)
    await turns()
    await owner.idle()
    owner.cursor.acknowledge(owner.at(9).position)
    await owner.cursor.persist()


async def _run_until_death(owner: AckOwner) -> bool:
    """Whether the story ended."""
    story = asyncio.create_task(_story(owner))
    quiet = 0
    while not story.done() and quiet < 60:
        await asyncio.sleep(0)
        quiet = quiet + 1 if owner.process.dead else 0
    if not story.done():
        story.cancel()
        await asyncio.wait({story})
        await owner.kill()
        return False
    await story
    return True


async def _check_after(world: AckWorld, before: AckOwner) -> None:
    """A new owner has every answered acknowledgement, and in the end nothing is left."""
    owner = await world.owner()
    if owner.ledger.last_confirmed.entry_id < 9:
        return  # it died before there was anything to acknowledge
    outcomes = {txn: await world.state(txn) for txn in (A, B, C)}
    for txn, ack, _ in before.answered:
        if outcomes[txn] is not ABORTED:
            assert owner.held_or_acknowledged(ack.position), (txn, ack)
    for txn in (A, B, C):
        await world.end(txn, COMMITTED if txn != B else ABORTED)
    await turns()
    await owner.idle()
    await owner.acks.rescan()
    assert await world.records() == []
    assert owner.pending() == []
    wanted = {ack.position for txn, ack, _ in before.answered if txn != B}
    done: set[Position] = {owner.at(index).position for index in owner.acknowledged()}
    assert wanted <= done
    assert done <= {owner.at(index).position for index in (0, 2, 8, 9)}
    await owner.kill()
    again = await world.owner()
    assert {again.at(index).position for index in again.acknowledged()} == done, "it was durable"


@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_at_every_operation_loses_no_answered_acknowledgement(after: bool) -> None:
    deaths = 0
    while True:
        world = AckWorld()
        await world.begin(A, B, C)
        owner = AckOwner(world, eager=True, dies_at=deaths, after=after)
        ended = await _run_until_death(owner)
        await _check_after(world, owner)
        if ended:
            break
        deaths += 1
    assert deaths > 20, "the story has that many operations"
    assert any("delete" in operation for operation in owner.mortal.operations)


async def test_large_end_is_answered_before_it_is_carried_out() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=4 * TXN_SLICE_POSITIONS)
    for first in range(0, 4 * TXN_SLICE_POSITIONS, TXN_SLICE_POSITIONS):
        await owner.ack(A, *range(first, first + TXN_SLICE_POSITIONS))

    def slices() -> int:
        return [what for what, _ in owner.heard.events].count("applied")

    ending = asyncio.get_running_loop().create_task(world.end(A, COMMITTED))
    at_answer: list[int] = []
    ending.add_done_callback(lambda _: at_answer.append(slices()))
    in_turns = [0]
    while in_turns[-1] < 4:
        await asyncio.sleep(0)
        in_turns.append(slices())
    assert at_answer == [0]
    assert max(after - before for before, after in pairwise(in_turns)) == 1
    await owner.idle()
    assert await world.records() == []


async def test_end_that_is_carried_out_on_request_waits_for_slices_and_late_acks() -> None:
    world = AckWorld()
    await world.begin(A)
    owner = await world.owner(entries=4 * TXN_SLICE_POSITIONS)
    for first in range(0, 3 * TXN_SLICE_POSITIONS, TXN_SLICE_POSITIONS):
        await owner.ack(A, *range(first, first + TXN_SLICE_POSITIONS))
    late = owner.acks.acknowledge(A, [owner.at(3 * TXN_SLICE_POSITIONS)])
    await world.end(A, COMMITTED)
    await owner.acks.carry_out_end(A, COMMITTED)
    assert late.done()
    applied = [len(positions) for what, positions in owner.heard.events if what == "applied"]
    assert sum(applied) == 3 * TXN_SLICE_POSITIONS + 1
    await owner.idle()
    assert await world.records() == []
    await owner.acks.carry_out_end(A, COMMITTED)  # a repeated request
