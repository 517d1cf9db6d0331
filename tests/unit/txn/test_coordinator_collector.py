"""Collection of ended headers: W10 and W11."""

import asyncio
from collections.abc import Sequence

import pytest

from config.bounds import TXN_PAGE
from magnetar.protocol.ids import Position
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.metadata.store import MetadataError
from tests.unit.txn.coordinator_world import World, failing
from tests.unit.txn.virtual_time import in_virtual_time
from txn import records
from txn.collector import Collector
from txn.coordinators import Coordinators
from txn.parts import TransactionParts
from txn.records import AckedPosition, AckRecord, Claim, TxnState

ZERO = CoordinatorId(0)
COMMIT, ABORT = TxnState.COMMITTED, TxnState.ABORTED
SEGMENT = "segment://public/default/t/0000-ffff-0"


class Owner:
    """The owner of all segments: notes what it is asked to look at, and answers as told."""

    def __init__(self, here: bool = True) -> None:
        self.here = here
        self.asked: list[tuple[str, list[Claim | AckRecord]]] = []

    async def look(self, segment: str, found: Sequence[Claim | AckRecord]) -> bool:
        self.asked.append((segment, list(found)))
        return self.here


def collector_of(coordinators: Coordinators, parts: TransactionParts, owner: Owner) -> Collector:
    return Collector(parts, coordinators.leads, owner.look, interval_s=300, retention_s=900)


async def ended(coordinators: Coordinators, action: TxnState = COMMIT, tc: int = 0) -> TxnId:
    txn = await coordinators.begin(CoordinatorId(tc), 600_000, None)
    await coordinators.end_transaction(txn, action, None)
    return txn


@in_virtual_time
async def test_a_header_goes_after_its_retention_and_not_before() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, Owner())
        collector.start()
        for action in (COMMIT, ABORT):
            await ended(coordinators, action)
        still_open = await coordinators.begin(ZERO, 10_000_000, None)
        await asyncio.sleep(890)
        assert await world.metadata.get("/txn/id/0_0", partition="0_0") is not None
        await asyncio.sleep(320)
        assert await world.metadata.get("/txn/id/0_0", partition="0_0") is None
        assert await world.metadata.get("/txn/id/0_1", partition="0_1") is None
        assert await parts.store.read_header(still_open) is not None
        await collector.stop()


@in_virtual_time
async def test_the_listing_is_made_after_the_decision_and_holds_the_header() -> None:
    """W10: with a record left the header stays, and the owner is asked, once for each segment."""
    world, owner = World(), Owner()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, owner)
        claims = [
            Claim(await ended(coordinators, action), SEGMENT, 3, Position(1, 2))
            for action in (COMMIT, ABORT)
        ]
        ack = AckRecord(claims[0].txn, SEGMENT, "s", 3, 1, False, (AckedPosition(Position(1, 1)),))
        for claim in claims:
            await parts.store.put_claim(claim)
        await parts.store.put_ack(ack)
        clean = await ended(coordinators)
        world.clock.shift_ms += 901_000
        world.metadata.calls.clear()
        assert await collector.collect() == 1
        scans = [key for what, key in world.metadata.calls if what == "scan_index"]
        listings = {records.WRITES_INDEX, records.ACKS_INDEX}
        first = next(place for place, key in enumerate(scans) if key in listings)
        assert scans[:first] == [records.FINAL_STATE_INDEX], "it may have ended after a listing"
        assert await parts.store.read_header(clean) is None
        (asked,) = owner.asked
        assert asked[0] == SEGMENT
        assert sorted(asked[1], key=str) == sorted([*claims, ack], key=str)
        assert parts.counters.op_records == 3
        for claim in claims:
            key = records.claim_key(claim.txn, SEGMENT, 3)
            await parts.store.delete_operation(claim.txn, key)
        assert await collector.collect() == 1
        assert await parts.store.read_header(claims[0].txn) is not None, "its ack record is there"
        await parts.store.delete_operation(ack.txn, records.ack_key(ack))
        assert await collector.collect() == 1
        assert parts.counters.op_records == 0
        assert await world.metadata.get(records.cleanup_request_key(SEGMENT)) is None


@in_virtual_time
async def test_collector_requests_cleanup_of_a_segment_owned_elsewhere() -> None:
    world, owner = World(), Owner(here=False)
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, owner)
        txn = await ended(coordinators)
        await parts.store.put_claim(Claim(txn, SEGMENT, 3, Position(1, 2)))
        world.clock.shift_ms += 901_000
        assert await collector.collect() == 0
        request = await world.metadata.get(records.cleanup_request_key(SEGMENT))
        assert request is not None
        await parts.store.delete_cleanup_request(SEGMENT, request.version)
        assert await world.metadata.get(records.cleanup_request_key(SEGMENT)) is None


@in_virtual_time
async def test_one_that_fails_does_not_hold_up_the_others() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, Owner())
        for _ in range(3):
            await ended(coordinators)
        await world.metadata.put(
            records.header_key(TxnId(0, 999)),
            b"{",
            partition="0_999",
            indexes=records.header_indexes(records.Header(COMMIT, 1, 1, 1)),
        )
        world.clock.shift_ms += 901_000
        world.metadata.before = failing("delete", "/txn/id/0_1")
        assert await collector.collect() == 2
        world.metadata.before = None
        assert await collector.collect() == 1


@in_virtual_time
async def test_collector_leaves_coordinators_of_other_leaders_alone() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        collector = Collector(
            parts, lambda number: number == 1, Owner().look, interval_s=300, retention_s=900
        )
        theirs, mine = await ended(coordinators, tc=0), await ended(coordinators, tc=1)
        world.clock.shift_ms += 901_000
        assert await collector.collect() == 1
        assert await parts.store.read_header(mine) is None
        assert await parts.store.read_header(theirs) is not None


@in_virtual_time
async def test_a_round_that_fails_is_followed_by_the_next() -> None:
    world = World()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, Owner())
        collector.start()
        txn = await ended(coordinators)
        await asyncio.sleep(850)
        world.metadata.before = failing("scan_index", records.FINAL_STATE_INDEX)
        await asyncio.sleep(300)
        assert await parts.store.read_header(txn) is not None
        world.metadata.before = None
        await asyncio.sleep(300)
        assert await parts.store.read_header(txn) is None
        await collector.stop()


@in_virtual_time
async def test_what_a_round_that_broke_off_found_is_asked_for_once() -> None:
    world, owner, listings = World(), Owner(), list[str]()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, owner)
        await parts.store.put_claim(Claim(await ended(coordinators), SEGMENT, 3, Position(1, 2)))
        world.clock.shift_ms += 901_000

        async def fail(what: str, key: str) -> None:
            if (what, key) == ("scan_index", records.FINAL_STATE_INDEX):
                listings.append(key)
                if len(listings) == 2:
                    raise MetadataError("The disk is full: give it room.")

        world.metadata.before = fail
        with pytest.raises(MetadataError):
            await collector.collect()
        assert owner.asked == []
        await collector.collect()
        assert [len(found) for _, found in owner.asked] == [1]


@in_virtual_time
async def test_pages_are_listed_through() -> None:
    """Many ended in one millisecond, more than a page holds."""
    world = World()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, Owner())
        header = records.Header(COMMIT, 1, 1, 7)
        for first in range(0, 2500, 500):
            await asyncio.gather(
                *(parts.store.create_header(TxnId(0, first + n), header) for n in range(500))
            )
        assert await collector.collect() == 2500
        assert await collector.collect() == 0


@in_virtual_time
async def test_an_unreadable_store_stops_no_owner_from_being_asked() -> None:
    world = World()
    asked: list[str] = []

    async def look(segment: str, found: Sequence[Claim | AckRecord]) -> bool:
        asked.append(segment)
        raise MetadataError("The disk is full: give it room.")

    async with world.coordinators() as (coordinators, parts):
        collector = Collector(parts, coordinators.leads, look, interval_s=300, retention_s=0)
        for segment in ("a", "b"):
            txn = await ended(coordinators)
            await parts.store.put_claim(Claim(txn, segment, 1, Position(1, 2)))
        await collector.collect()
        assert sorted(asked) == ["a", "b"]


@in_virtual_time
async def test_one_listing_speaks_for_a_page_unless_there_are_many_records() -> None:
    world, owner = World(), Owner()
    async with world.coordinators() as (coordinators, parts):
        collector = collector_of(coordinators, parts, owner)
        held = await ended(coordinators)
        await parts.store.put_claim(Claim(held, SEGMENT, 1, Position(1, 2)))
        for _ in range(20):
            await ended(coordinators)
        world.clock.shift_ms += 901_000
        world.metadata.calls.clear()
        assert await collector.collect() == 20
        own = [key for what, key in world.metadata.calls if what == "scan"]
        assert own == [f"/txn/op/{held}/"]
        for _ in range(20):
            await ended(coordinators)
        still_open = await coordinators.begin(ZERO, 10_000_000, None)
        for number in range(TXN_PAGE):
            await parts.store.put_claim(Claim(still_open, f"s{number}", 1, Position(1, 2)))
        world.clock.shift_ms += 901_000
        world.metadata.calls.clear()
        assert await collector.collect() == 20
        assert sum(what == "scan" for what, _ in world.metadata.calls) == 21
        assert await parts.store.read_header(held) is not None
        assert parts.counters.op_records == TXN_PAGE + 1
