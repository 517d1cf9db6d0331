"""Ranges of other clusters' segments outlive owners of a segment, splits and merges."""

import asyncio
import json
from collections.abc import Mapping

import pytest
from structlog.testing import capture_logs

from broker.topics.deduplication import REPLICATED_MEMBER, SNAPSHOT_PROPERTY
from broker.topics.replicated_ranges import (
    EVERYTHING,
    LAST_HASH,
    NOTHING,
    Mark,
    PartRecord,
    ReplicatedRanges,
    Run,
    SourceSegment,
)
from broker.topics.segment_sources import SegmentSources, SourceState
from broker.topics.sequence_store import AWAITED_PROPERTY
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.names import SegmentName
from storage.managed_ledger.ledger import ManagedLedger
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster
from tests.unit.broker.scalable.node import TOPIC, Node
from tests.unit.broker.scalable.several import hold, take_lead
from tests.unit.broker.scalable.stored import nothing_is_noted

WHOLE = SegmentName(TOPIC, 0, 0xFFFF, 0)
LEFT, RIGHT = SegmentName(TOPIC, 0, 0x7FFF, 1), SegmentName(TOPIC, 0x8000, 0xFFFF, 2)
SOURCE = SourceSegment("east", 7, 3)
OTHER = SourceSegment("east", 7, 4)


def sources_of(topic: Topic) -> SegmentSources:
    """What a segment has of other clusters."""
    sources = topic.sequence_store.sources
    assert sources is not None
    return sources


async def ranges_of(node: Node, segment_id: int) -> Mapping[SourceSegment, ReplicatedRanges]:
    """The ranges of a segment, which is loaded if need be."""
    return sources_of(await node.segment(segment_id)).durable()


def only(ranges: Mapping[SourceSegment, ReplicatedRanges]) -> tuple[Run, ...]:
    """The runs of the one source segment that there is."""
    (found,) = ranges.values()
    return found.runs


async def store(topic: Topic, metadata: pb.MessageMetadata) -> Position:
    """Append an entry, and count it as one that is durable."""
    stored: asyncio.Future[Position] = asyncio.get_running_loop().create_future()

    def done(position: Position | None, error: Exception | None) -> None:
        assert position is not None, error
        topic.sequence_store.durable = position
        topic.sequence_store.unsaved_entries += 1
        stored.set_result(position)

    topic.ledger.append(build_entry(metadata, b"m"), done)
    return await stored


async def replicate(
    topic: Topic, entry: int, start: int, end: int, source: SourceSegment = SOURCE
) -> None:
    """Store an entry of a source segment, for some hashes."""
    record = PartRecord(Position(1, entry), start, end)
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=5, publish_time=1, replicated_from=source.cluster
    )
    metadata.replicated_part.CopyFrom(record.to_wire(source))
    await store(topic, metadata)
    sources_of(topic).replay(source, record)


async def finished(node: Node) -> None:
    """Return when the layout's changes are all done."""
    live = await node.live()
    await until(lambda: not live.work.busy)


async def test_a_successor_reads_the_records_of_entries_that_no_snapshot_has(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    await replicate(segment, 4, 0, 99)
    await segment.sequence_store.save()
    await replicate(segment, 5, 0, 49)
    await replicate(segment, 6, 0, 9, OTHER)
    after = await node.kill()
    found = await ranges_of(after, 0)
    assert found[SOURCE].runs == (
        Run(0, 49, Mark(1, 5)),
        Run(50, 99, Mark(1, 4)),
        Run(100, LAST_HASH, NOTHING),
    )
    assert found[OTHER].runs == (Run(0, 9, Mark(1, 6)), Run(10, LAST_HASH, NOTHING))
    await after.stop()


async def test_a_snapshot_has_the_ranges(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    await replicate(segment, 4, 0, 99)
    await node.topics.unload(segment.name)
    snapshot = json.loads(segment.ledger.properties[SNAPSHOT_PROPERTY])
    assert snapshot[REPLICATED_MEMBER] == sources_of(segment).to_json()
    assert not snapshot["producers"]
    after = await node.kill()
    assert only(await ranges_of(after, 0)) == only(sources_of(segment).durable())
    await after.stop()


async def test_a_replicated_entry_counts_for_no_producer_name(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await replicate(await node.segment(0), 4, 0, 99)
    after = await node.kill()
    assert not len((await after.segment(0)).sequences)
    await after.stop()


async def test_an_attachment_that_changes_what_is_forgotten_is_saved_before_any_entry(
    node: Node,
) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    sources = sources_of(segment)
    state = SourceState(SOURCE, 1, 9, frozenset({3, 4}), frozenset({4}), EARLIEST)
    session = sources.attach(state)
    assert sources.stored_of(session) is None
    await segment.sequence_store.save_writer()
    assert sources.stored_of(session) is not None
    after = await node.kill()
    assert (await ranges_of(after, 0))[OTHER].at(0) == EVERYTHING
    await after.stop()


async def test_an_entry_with_a_record_that_no_sender_makes_is_passed_over(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    segment = await node.segment(0)
    record = pb.ReplicatedPart(
        incarnation=7, segment_id=3, ledger_id=1, entry_id=1, hash_start=9, hash_end=8
    )
    metadata = pb.MessageMetadata(
        producer_name="p",
        sequence_id=5,
        publish_time=1,
        replicated_from="east",
        replicated_part=record,
    )
    await store(segment, metadata)
    await replicate(segment, 4, 0, 99)
    with capture_logs() as logs:
        after = await node.kill()
        assert only(await ranges_of(after, 0))[0] == Run(0, 99, Mark(1, 4))
    assert [each["event"] for each in logs].count("entry_unreadable") == 1
    await after.stop()


async def test_children_of_a_split_begin_with_the_ranges_of_their_parent(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    parent = await node.segment(0)
    producer = await node.peer().produce(0)
    await replicate(parent, 4, 0, LAST_HASH)
    await node.scalable.split(TOPIC, 0)
    # The parent takes more until it is terminated.
    await replicate(parent, 5, 0x4000, 0xBFFF)
    assert not await ranges_of(node, 1)
    await producer.close()
    await finished(node)
    assert only(await ranges_of(node, 1)) == (
        Run(0, 0x3FFF, Mark(1, 4)),
        Run(0x4000, 0x7FFF, Mark(1, 5)),
    )
    assert only(await ranges_of(node, 2)) == (
        Run(0x8000, 0xBFFF, Mark(1, 5)),
        Run(0xC000, LAST_HASH, Mark(1, 4)),
    )


async def test_a_merged_segment_has_the_ranges_of_its_parents_side_by_side(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=2, properties={})
    await replicate(await node.segment(0), 4, 0, 0x7FFF)
    await replicate(await node.segment(1), 6, 0x8000, LAST_HASH, OTHER)
    await replicate(await node.segment(1), 5, 0x8000, LAST_HASH)
    await node.scalable.merge(TOPIC, (0, 1))
    await finished(node)
    found = await ranges_of(node, 2)
    assert found[SOURCE].runs == (Run(0, 0x7FFF, Mark(1, 4)), Run(0x8000, LAST_HASH, Mark(1, 5)))
    assert found[OTHER].runs == (Run(0, 0x7FFF, NOTHING), Run(0x8000, LAST_HASH, Mark(1, 6)))


async def test_a_segment_that_was_split_twice_hands_on_what_it_inherited(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    await replicate(await node.segment(0), 4, 0, LAST_HASH)
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    await node.scalable.split(TOPIC, 2)
    await finished(node)
    assert only(await ranges_of(node, 4)) == (Run(0xC000, LAST_HASH, Mark(1, 4)),)


async def test_the_write_after_which_no_parent_is_awaited_has_the_ranges(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[Mapping[str, str]] = []
    set_properties = ManagedLedger.set_properties

    async def noting(ledger: ManagedLedger, properties: Mapping[str, str]) -> None:
        if AWAITED_PROPERTY in properties:
            writes.append(properties)
        await set_properties(ledger, properties)

    await node.scalable.create(TOPIC, segments=1, properties={})
    await replicate(await node.segment(0), 4, 0, LAST_HASH)
    monkeypatch.setattr(ManagedLedger, "set_properties", noting)
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    noted = [each for each in writes if each[AWAITED_PROPERTY] == "[]"]
    assert len(noted) == 2
    for each in noted:
        ((cluster, *_),) = json.loads(each[SNAPSHOT_PROPERTY])[REPLICATED_MEMBER]
        assert cluster == "east"


async def test_a_child_inherits_once(node: Node) -> None:
    await node.scalable.create(TOPIC, segments=1, properties={})
    parent = await node.segment(0)
    await replicate(parent, 4, 0, LAST_HASH)
    await node.scalable.split(TOPIC, 0)
    await finished(node)
    child = await node.segment(1)
    await replicate(child, 9, 0, 0x7FFF)
    final = await parent.final_sequences(WHOLE, 0)
    await child.sequence_store.inherit(LEFT, final)
    assert only(await ranges_of(node, 1)) == (Run(0, 0x7FFF, Mark(1, 9)),)


async def test_children_on_other_brokers_begin_with_the_ranges_of_their_parent(
    cluster: Cluster,
) -> None:
    a, b = await cluster.add(), await cluster.add()
    await a.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(b, str(WHOLE))
    await take_lead(a)
    parent = b.broker.topics.loaded()[str(WHOLE)]
    await replicate(parent, 4, 0, LAST_HASH)
    await a.broker.scalable.split(TOPIC, 0)
    await until_awaited(lambda: nothing_is_noted(cluster.metadata))
    found = {
        name: only(sources_of(topic).durable())
        for each in (a, b)
        for name, topic in each.broker.topics.loaded().items()
    }
    assert found == {
        str(WHOLE): (Run(0, LAST_HASH, Mark(1, 4)),),
        str(LEFT): (Run(0, 0x7FFF, Mark(1, 4)),),
        str(RIGHT): (Run(0x8000, LAST_HASH, Mark(1, 4)),),
    }
