"""Markers of replicated subscriptions, as entries."""

import pytest

from broker.topics.subscription_markers import (
    MARKER_TYPES,
    Snapshot,
    SnapshotRequest,
    SnapshotResponse,
    SubscriptionMarker,
    SubscriptionUpdate,
    marker_entry,
    parse_marker,
    snapshot_in,
)
from config.bounds import MAX_CLUSTERS
from magnetar.protocol.frame_error import MalformedMetadata
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry, parse_metadata, payload_of

THERE = {"west": Position(7, 3), "north": Position(8, -1)}
SNAPSHOT = Snapshot("id", Position(1, 2), THERE)
MARKERS: list[SubscriptionMarker] = [
    SnapshotRequest("id", "east"),
    SnapshotResponse("id", "west", Position(7, -1)),
    SNAPSHOT,
    SubscriptionUpdate("s", THERE),
]


@pytest.mark.parametrize(("marker", "kind"), list(zip(MARKERS, MARKER_TYPES, strict=True)))
def test_marker_is_an_entry_under_pulsars_names(marker: SubscriptionMarker, kind: int) -> None:
    entry = marker_entry(marker, 1000, only_to="west")
    metadata = parse_metadata(entry)
    assert (metadata.producer_name, metadata.sequence_id) == ("pulsar.marker", 0)
    assert (metadata.publish_time, metadata.marker_type) == (1000, kind)
    assert list(metadata.replicate_to) == ["west"]
    assert not parse_metadata(marker_entry(marker, 1000)).replicate_to
    assert parse_marker(kind, bytes(payload_of(entry))) == marker


def test_request_has_the_bytes_of_apache_pulsars() -> None:
    payload = bytes(payload_of(marker_entry(SnapshotRequest("id", "east"), 1000)))
    assert payload == b"\x0a\x02id\x12\x04east"


@pytest.mark.parametrize(("kind", "payload"), [(10, b"\xff"), (13, b""), (21, b"")])
def test_marker_that_cannot_be_read_is_an_error(kind: int, payload: bytes) -> None:
    with pytest.raises(MalformedMetadata, match="skipped"):
        parse_marker(kind, payload)


@pytest.mark.parametrize(("marker", "kind"), list(zip(MARKERS, MARKER_TYPES, strict=True)))
def test_marker_with_text_that_is_not_utf_8_is_an_error(
    marker: SubscriptionMarker, kind: int
) -> None:
    payload = bytes(payload_of(marker_entry(marker, 1000)))
    for name in (b"id", b"west", b"east", b"\x01s"):
        broken = payload.replace(name, name[:-1] + b"\xff")
        if broken != payload:
            with pytest.raises(MalformedMetadata, match="skipped"):
                parse_marker(kind, broken)


def test_update_of_a_subscription_without_a_name_is_an_error() -> None:
    payload = bytes(payload_of(marker_entry(SubscriptionUpdate(" ", THERE), 1000)))
    with pytest.raises(MalformedMetadata, match="names no subscription"):
        parse_marker(MARKER_TYPES[3], payload)


def test_snapshot_of_more_clusters_than_there_can_be_is_an_error() -> None:
    there = {f"c{number}": Position(1, 1) for number in range(MAX_CLUSTERS + 1)}
    payload = bytes(payload_of(marker_entry(Snapshot("id", Position(1, 2), there), 1000)))
    with pytest.raises(MalformedMetadata, match="skipped"):
        parse_marker(MARKER_TYPES[2], payload)


def test_snapshot_of_another_cluster_is_none_of_here() -> None:
    entry = marker_entry(SNAPSHOT, 1000)
    assert snapshot_in(entry) == SNAPSHOT
    metadata = parse_metadata(entry)
    metadata.replicated_from = "west"
    assert snapshot_in(build_entry(metadata, bytes(payload_of(entry)))) is None
    assert snapshot_in(marker_entry(SnapshotRequest("id", "east"), 1000)) is None
    assert snapshot_in(b"no entry") is None
