"""The clusters whose replicators publish to a topic, and where they are."""

import json

import pytest

from broker.topics.deduplication import SNAPSHOT_BYTES, Deduplication, origin_of
from broker.topics.source_positions import (
    SOURCE_POSITION,
    SourcePositions,
    source_cluster_of,
    source_positions_of,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("pulsar.repl.east-->here", "east"),
        ("pulsar.repl.east", "east"),
        ("pulsar.repl.", ""),
        ("pulsar.replica", None),
        ("pulsar.repl", None),
        ("east", None),
        ("", None),
    ],
)
def test_name_of_a_replicator_names_its_cluster(name: str, cluster: str | None) -> None:
    assert source_cluster_of(name) == cluster


def test_greatest_ids_are_a_position() -> None:
    metadata = pb.MessageMetadata()
    metadata.properties.add(key=SOURCE_POSITION, value=f"{2**63 - 1}:{2**63 - 1}")
    greatest = Position(2**63 - 1, 2**63 - 1)
    assert source_positions_of(metadata) == (greatest, greatest)


def test_clusters_that_were_away_for_longest_are_forgotten_above_the_limit() -> None:
    sources = SourcePositions(limit=2)
    for now_ms, cluster in enumerate(("a", "b", "a")):
        sources.attach(cluster).last = Position(1, now_ms)
        sources.detach(cluster, now_ms)
    sources.attach("c")
    assert sources.get("b") is None
    known = sources.get("a")
    assert known is not None
    assert known.last == Position(1, 2)


def test_attached_clusters_are_never_forgotten() -> None:
    sources = SourcePositions(limit=1)
    for cluster in "abc":
        sources.attach(cluster)
    assert len(sources) == 3


def test_snapshot_keeps_positions_however_long_ago_they_were_seen() -> None:
    before = Deduplication(limit=10, keep_ms=1000)
    before.sources.attach("east").last = Position(7, 3)
    before.sources.detach("east", 5)
    before.sources.attach("west")
    after = Deduplication(limit=10, keep_ms=1000)
    after.load(before.snapshot(Position(1, 1), 10_000_000))
    again = Deduplication(limit=10, keep_ms=1000)
    again.load(after.snapshot(Position(1, 1), 20_000_000))
    known = {name: again.sources.get(name) for name in ("east", "west")}
    assert {name: source and source.last for name, source in known.items()} == {
        "east": Position(7, 3),
        "west": EARLIEST,
    }


def test_long_names_of_other_clusters_take_little_room() -> None:
    long = "x" * 4000
    known = Deduplication(limit=1000, keep_ms=1000)
    for number in range(100):
        known.sources.attach(f"{long}{number}").last = Position(1, number)
    metadata = pb.MessageMetadata(producer_name=long * 1000)
    known.count_origin(origin_of(long, metadata), Position(1, 1), 0)
    text = known.snapshot(Position(1, 1), 0)
    assert known.left_out == 0
    assert len(text) < SNAPSHOT_BYTES // 10
    assert len(json.loads(text)["sources"]) == 100
    source = known.sources.get(f"{long}7")
    assert source is not None
    assert source.last == Position(1, 7)


def test_replay_counts_the_property_only_of_clusters_that_publish_by_position() -> None:
    known = Deduplication(limit=10, keep_ms=1000)
    known.sources.attach("east")
    for cluster in ("east", "west"):
        metadata = pb.MessageMetadata(
            producer_name="p", sequence_id=3, publish_time=1, replicated_from=cluster
        )
        metadata.properties.add(key=SOURCE_POSITION, value="5:6")
        known.replay(metadata, Position(1, 0), 0)
    east, west = known.sources.get("east"), known.sources.get("west")
    assert east is not None
    assert (east.last, west) == (Position(5, 6), None)
    assert known.get("p") is None
    assert known.get("pulsar.repl.east-->p") is None
    origin = known.get("pulsar.repl.west-->p")
    assert origin is not None
    assert origin.last == 3
