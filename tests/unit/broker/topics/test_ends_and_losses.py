"""What a plan says of a topic's ends, and who is not served: over the wire."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.range_plan import RangeRequest, plan_range
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import parse_topic_name
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.stream_ranges import after
from storage.managed_ledger.types import Entry, Retention
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.broker.placement.cluster import Cluster
from tests.unit.broker.topics.reads import TOPIC, Reads, place, topic_of
from tests.unit.broker.transactions.conftest import TransactionClient
from tests.unit.broker.transactions.test_writes import send

PARENT = parse_topic_name("topic://public/default/t")
WHOLE = "segment://public/default/t/0000-ffff-0"
KEPT = {"ledger_max_entries": 5, "ledger_min_age_s": 0, "retention_size_mb": -1}


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """Of small ledgers, which stay."""
    async with running(tmp_path, retention_time_minutes=-1, **KEPT) as broker:
        yield broker


async def fill(reads: Reads, times_ms: list[int]) -> list[Position]:
    producer = await reads.raw.create_producer(reads.topic)
    receipts = [
        await producer.send(b"%d" % number, metadata=pb.MessageMetadata(publish_time=time_ms))
        for number, time_ms in enumerate(times_ms)
    ]
    await producer.close()
    return [place(receipt.message_id) for receipt in receipts]


async def trim_to(broker: Broker, first: Position) -> None:
    """Drop the ledgers before that entry, with which one begins."""
    topic = await topic_of(broker)
    ledger = topic.ledger
    await topic.sequence_store.save()
    cursor = await ledger.open_cursor("trims", EARLIEST)
    cursor.acknowledge_up_to(ledger.previous_position(first))
    ledger.use_retention(lambda: Retention(0, 0))
    await until(lambda: ledger.ranges.first_retained == first)


async def test_a_range_crosses_ledgers_and_ends_right_after_its_last_entry(reads: Reads) -> None:
    positions = await fill(reads, [1000] * 23)
    assert len({position.ledger_id for position in positions}) == 5
    start = EARLIEST
    counts: list[int] = []
    while (plan := await reads.plan(start, max_messages=5)).entries:
        assert place(plan.end) == after(positions[sum(counts) + plan.entries - 1])
        counts.append(plan.entries)
        start = place(plan.end)
    assert counts == [5, 5, 5, 5, 3]
    assert [each.payload for each in await reads.read_all(EARLIEST, LATEST, max_bytes=300)] == [
        b"%d" % number for number in range(23)
    ]


async def test_ranges_by_time_meet_though_times_do_not_rise(reads: Reads) -> None:
    times = [1000, 3000, 2000, 1500, 4000, 3500, 5000, 1000, 6000, 5500, 7000]
    positions = await fill(reads, times)
    at_3000 = await reads.plan(from_publish_time_ms=3000, before_publish_time_ms=5000)
    assert place(at_3000.start) == positions[1]
    assert place(at_3000.end) == after(positions[5])
    assert (at_3000.first_publish_time_ms, at_3000.last_publish_time_ms) == (1500, 4000)
    at_5000 = await reads.plan(from_publish_time_ms=5000, before_publish_time_ms=6000)
    assert place(at_5000.start) == positions[6]
    assert at_5000.entries == 2
    before = await reads.plan(before_publish_time_ms=1000)
    assert (before.entries, place(before.start) == place(before.end)) == (0, True)
    never = await reads.plan(from_publish_time_ms=8000)
    assert never.entries == 0
    assert place(never.start) == place(never.end) == place(never.horizon)


async def test_trimmed_entries_are_lost_and_the_end_of_a_trimmed_ledger_is_not(
    reads: Reads, broker: Broker
) -> None:
    positions = await fill(reads, [1000] * 18)
    await trim_to(broker, positions[10])
    lost = await reads.plan(positions[9])
    assert lost.lost
    assert place(lost.start) == place(lost.earliest) == positions[10]
    assert lost.entries == 8
    exact = await reads.plan(after(positions[9]))
    assert not exact.lost
    assert place(exact.start) == after(positions[9])
    assert exact.entries == 8
    assert not (await reads.plan()).lost
    assert [each.position for each in await reads.read_all(positions[3], LATEST)] == positions[10:]


async def test_read_skips_entries_trimmed_between_two_answers(reads: Reads, broker: Broker) -> None:
    positions = await fill(reads, [1000] * 18)
    answer = await reads.read(positions[0], LATEST, max_bytes=150)
    assert not answer.at_end
    await trim_to(broker, positions[15])
    found = await reads.read_all(place(answer.next), LATEST, max_bytes=150)
    assert [each.position for each in found] == positions[15:]


async def test_entries_trimmed_while_they_are_read_are_left_out(
    reads: Reads, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they were aborted may be forgotten when they are judged."""
    positions = await fill(reads, [1000] * 12)
    real = ManagedLedger.read

    async def slow(
        ledger: ManagedLedger,
        start: Position,
        *,
        max_entries: int,
        max_bytes: int,
        up_to: Position | None = None,
    ) -> list[Entry]:
        entries = await real(
            ledger, start, max_entries=max_entries, max_bytes=max_bytes, up_to=up_to
        )
        assert entries[0].position == positions[0]
        monkeypatch.setattr(ManagedLedger, "read", real)
        await trim_to(broker, positions[10])
        return entries

    monkeypatch.setattr(ManagedLedger, "read", slow)
    answer = await reads.read(positions[0], LATEST)
    assert [place_of(each) for each in answer.entries] == positions[10:]


def place_of(entry: pb.ReadEntry) -> Position:
    return Position(entry.ledger_id, entry.entry_id)


async def test_a_long_stretch_of_aborted_entries_is_passed_in_bounded_steps(
    reads: Reads, broker: Broker
) -> None:
    client = TransactionClient(reads.raw)
    producer = await reads.raw.create_producer(TOPIC)
    txn = await client.begin()
    for _ in range(12):
        await send(producer, txn, bytes(100))
    await send(producer, None, b"seen")
    await client.end(txn, pb.ABORT)
    topic = await topic_of(broker)
    await until(lambda: topic.buffer.idle)
    first = await reads.read(EARLIEST, LATEST, max_bytes=700)
    assert (len(first.entries), first.at_end) == (0, False)
    assert place(first.next) > EARLIEST
    found = await reads.read_all(EARLIEST, LATEST, max_bytes=700)
    assert [each.payload for each in found] == [b"seen"]


async def test_markers_are_not_messages(reads: Reads) -> None:
    producer = await reads.raw.create_producer(TOPIC)
    await producer.send(b"message")
    await producer.send(b"marker", metadata=pb.MessageMetadata(marker_type=20))
    plan = await reads.plan()
    assert (plan.entries, plan.messages) == (2, 1)
    start, end = place(plan.start), place(plan.end)
    assert [each.payload for each in await reads.read_all(start, end)] == [b"message"]
    raw = await reads.read_all(start, end, raw=True)
    assert [each.visibility for each in raw] == [pb.ReadEntry.READABLE, pb.ReadEntry.MARKER]


async def test_a_sealed_segment_says_so(reads: Reads, broker: Broker) -> None:
    await broker.scalable.create(PARENT, segments=1, properties={})
    reads.topic = WHOLE
    positions = await fill(reads, [1000] * 7)
    assert not (await reads.plan()).sealed
    await broker.scalable.split(PARENT, 0)
    for unloaded in (False, True):
        if unloaded:
            await broker.topics.unload(parse_topic_name(WHOLE))
        while not (plan := await reads.plan(positions[3])).sealed:
            await asyncio.sleep(0.01)
        ends = {place(plan.end), place(plan.raw_end), place(plan.horizon)}
        assert ends == {after(positions[-1])}
        assert (plan.entries, plan.backlog_messages) == (4, 4)
        found = await reads.read_all(positions[3], LATEST)
        assert [each.position for each in found] == positions[3:]


async def test_scalable_topics_and_nonsense_are_refused(reads: Reads, broker: Broker) -> None:
    await broker.scalable.create(PARENT, segments=1, properties={})
    for name, code in ((str(PARENT), pb.NotAllowedError), ("persistent://t", pb.InvalidTopicName)):
        reads.topic = name
        for call in (reads.plan(), reads.read(EARLIEST, LATEST)):
            with pytest.raises(BrokerError) as refusal:
                await call
            assert refusal.value.code == code
    await reads.raw.ping()


async def test_plan_has_the_backlog_once_it_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash the ledgers are read for it; a plan does not wait for all of that."""
    set_bound(monkeypatch, "PLAN_BACKLOG_WAIT_S", 0.01)
    settings = {"retention_time_minutes": -1, **KEPT}
    async with running(tmp_path, **settings) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        reads = Reads(client)
        positions = await fill(reads, [1000] * 23)
        for ledger_id in {position.ledger_id for position in positions}:
            await broker.metadata.delete(f"/entry-index/{ledger_id // 1000}/{ledger_id}")
        await client.close()
    async with running(tmp_path, **settings) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        reads = Reads(client)
        topic = await topic_of(broker)
        for ledger_id in {position.ledger_id for position in positions}:
            await broker.metadata.delete(f"/entry-index/{ledger_id // 1000}/{ledger_id}")
        builds = broker.managed_ledgers._stores.index_builds
        stream = topic.ledger.ranges._index
        assert await stream.of(positions[0].ledger_id)
        await builds.acquire()
        await builds.acquire()
        await topic.ledger.ranges.fitting(EARLIEST, LATEST, 3, 10**6)  # what follows waits for none
        early = asyncio.ensure_future(plan_range(topic, RangeRequest(max_messages=3)))
        topic.ledger.ranges.look_ahead(LATEST)  # of somebody who reads at the end
        assert (await asyncio.wait_for(early, TIMEOUT_S)).backlog is None
        plan = await reads.plan(max_messages=3)
        assert (plan.entries, plan.messages) == (3, 3)
        assert not plan.HasField("backlog_messages")
        assert not plan.HasField("hidden_messages")
        builds.release()
        while not plan.HasField("backlog_messages"):
            plan = await reads.plan(max_messages=3)
        assert (plan.backlog_messages, plan.hidden_messages) == (23, 0)
        await client.close()


async def test_broker_that_does_not_own_the_topic_refuses_reads(cluster: Cluster) -> None:
    owner, other = await cluster.add(), await cluster.add()
    while not owner.owns(TOPIC):
        try:
            producer = await (await owner.client()).create_producer(TOPIC)
        except BrokerError:
            owner, other = other, owner
    await producer.send(b"x")
    assert (await Reads(await owner.client()).plan()).entries == 1
    reads = Reads(await other.client())
    for call in (reads.plan(), reads.read(EARLIEST, LATEST)):
        with pytest.raises(BrokerError) as refusal:
            await call
        assert refusal.value.code == pb.ServiceNotReady


async def stalled_peers(broker: Broker, count: int) -> list[Reads]:
    """Each with a connection of its own, from which it reads nothing until it is told to."""
    peers = [Reads(await RawClient.open("127.0.0.1", broker.port)) for _ in range(count)]
    for each in peers:
        assert each.raw.transport is not None
        each.raw.transport.pause_reading()
    return peers


async def test_a_client_that_reads_nothing_delays_no_other(
    broker: Broker, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond what may wait for peers, it gets nothing more until it has read what it got."""
    set_bound(monkeypatch, "SEGMENT_READS_AHEAD", 1)
    monkeypatch.setattr(broker.segment_reads, "_under_way", asyncio.Semaphore(1))
    producer = await reads.raw.create_producer(TOPIC)
    for _ in range(4):
        await producer.send(bytes(4_000_000))
    stalled = await stalled_peers(broker, 3)
    waiting = [
        asyncio.ensure_future(each.read_all(EARLIEST, LATEST)) for each in stalled for _ in range(6)
    ]
    await until(lambda: broker.segment_reads._ahead > 0)
    assert len(await reads.read_all(EARLIEST, LATEST)) == 4
    for each in stalled:
        each.raw.transport.resume_reading()  # type: ignore[union-attr]
    assert [len(found) for found in await asyncio.gather(*waiting)] == [4] * 18
    for each in stalled:
        await each.raw.close()


async def test_answers_that_wait_for_peers_are_bounded_however_many_peers_there_are(
    broker: Broker, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They all wait for a place to read before the first of them is seen to be stalled."""
    set_bound(monkeypatch, "SEGMENT_READS_AHEAD", 1)
    monkeypatch.setattr(broker.segment_reads, "_under_way", asyncio.Semaphore(1))
    producer = await reads.raw.create_producer(TOPIC)
    await producer.send(bytes(4_000_000))
    own = set(broker.connections)
    stalled = await stalled_peers(broker, 6)
    waiting = [
        asyncio.ensure_future(each.read(EARLIEST, LATEST)) for each in stalled for _ in range(6)
    ]
    most = 0
    while any(each.writable for each in broker.connections - own):
        await asyncio.sleep(0)
        most = max(most, broker.segment_reads._ahead)
    assert len((await reads.read(EARLIEST, LATEST)).entries) == 1, "all others have had their turn"
    assert max(most, broker.segment_reads._ahead) <= 2, "one that waits, and one that is read"
    for each in stalled:
        each.raw.transport.resume_reading()  # type: ignore[union-attr]
    assert [len(answer.entries) for answer in await asyncio.gather(*waiting)] == [1] * 36
    for each in stalled:
        await each.raw.close()
