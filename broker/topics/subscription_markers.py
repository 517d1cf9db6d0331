"""Markers of replicated subscriptions, as entries and back.  Pure.

A marker is an entry that brokers write for brokers: clusters agree by markers on positions in their
logs that belong together (Apache Pulsar's `Markers`; `../../docs/geo-replication.md`).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final, cast

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from config.bounds import MAX_CLUSTERS
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frame_error import FrameError, MalformedMetadata
from magnetar.protocol.ids import Position, from_wire, to_wire
from magnetar.protocol.message import build_entry, parse_metadata, payload_of
from magnetar.protocol.text_check import TextPlan, has_broken_text, text_plan

MARKER_TYPES: Final = range(
    pb.REPLICATED_SUBSCRIPTION_SNAPSHOT_REQUEST, pb.REPLICATED_SUBSCRIPTION_UPDATE + 1
)
MARKER_RECEIPT: Final = 2**63
"""-2^63 in an unsigned field: the highest sequence id in the receipt of a marker."""
_PRODUCER: Final = "pulsar.marker"
"""The producer name of all markers, which is Apache Pulsar's."""
_TEXT: Final[Mapping[type[Message], TextPlan | None]] = {
    kind: text_plan(cast("Descriptor", kind.DESCRIPTOR))
    for kind in (
        pb.ReplicatedSubscriptionsSnapshotRequest,
        pb.ReplicatedSubscriptionsSnapshotResponse,
        pb.ReplicatedSubscriptionsSnapshot,
        pb.ReplicatedSubscriptionsUpdate,
    )
}
"""The text in the payloads of markers."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Asks every other cluster for a position of its log."""

    snapshot_id: str
    source_cluster: str


@dataclass(frozen=True, slots=True)
class SnapshotResponse:
    """The last position of a cluster's log when it read the request."""

    snapshot_id: str
    cluster: str
    position: Position


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Positions that belong together.

    Whoever has consumed the local log up to `position` has consumed that of each other cluster up
    to its position in `remote`.
    """

    snapshot_id: str
    position: Position
    remote: Mapping[str, Position]


@dataclass(frozen=True, slots=True)
class SubscriptionUpdate:
    """How far a subscription came: a position in the log of each other cluster."""

    subscription: str
    positions: Mapping[str, Position]


SubscriptionMarker = SnapshotRequest | SnapshotResponse | Snapshot | SubscriptionUpdate


def marker_entry(marker: SubscriptionMarker, now_ms: int, *, only_to: str | None = None) -> bytes:
    """The entry of a marker that is written at `now_ms`; `only_to` names the cluster that gets it.

    Without `only_to` all clusters get it.
    """
    kind, payload = _encoded(marker)
    metadata = pb.MessageMetadata(
        producer_name=_PRODUCER, sequence_id=0, publish_time=now_ms, marker_type=kind
    )
    if only_to is not None:
        metadata.replicate_to.append(only_to)
    return build_entry(metadata, payload)


def _encoded(marker: SubscriptionMarker) -> tuple[int, bytes]:
    if isinstance(marker, SnapshotRequest):
        request = pb.ReplicatedSubscriptionsSnapshotRequest(
            snapshot_id=marker.snapshot_id, source_cluster=marker.source_cluster
        )
        return pb.REPLICATED_SUBSCRIPTION_SNAPSHOT_REQUEST, request.SerializeToString()
    if isinstance(marker, SnapshotResponse):
        response = pb.ReplicatedSubscriptionsSnapshotResponse(
            snapshot_id=marker.snapshot_id, cluster=_named(marker.cluster, marker.position)
        )
        return pb.REPLICATED_SUBSCRIPTION_SNAPSHOT_RESPONSE, response.SerializeToString()
    if isinstance(marker, Snapshot):
        snapshot = pb.ReplicatedSubscriptionsSnapshot(
            snapshot_id=marker.snapshot_id,
            local_message_id=_id(marker.position),
            clusters=[_named(*each) for each in sorted(marker.remote.items())],
        )
        return pb.REPLICATED_SUBSCRIPTION_SNAPSHOT, snapshot.SerializeToString()
    update = pb.ReplicatedSubscriptionsUpdate(
        subscription_name=marker.subscription,
        clusters=[_named(*each) for each in sorted(marker.positions.items())],
    )
    return pb.REPLICATED_SUBSCRIPTION_UPDATE, update.SerializeToString()


def parse_marker(marker_type: int, payload: bytes) -> SubscriptionMarker:
    """The marker of this type.  Raises `MalformedMetadata`."""
    if marker_type == pb.REPLICATED_SUBSCRIPTION_SNAPSHOT_REQUEST:
        request = pb.ReplicatedSubscriptionsSnapshotRequest()
        _parse(request, payload)
        return SnapshotRequest(request.snapshot_id, request.source_cluster)
    if marker_type == pb.REPLICATED_SUBSCRIPTION_SNAPSHOT_RESPONSE:
        response = pb.ReplicatedSubscriptionsSnapshotResponse()
        _parse(response, payload)
        cluster = response.cluster
        return SnapshotResponse(
            response.snapshot_id, cluster.cluster, _position(cluster.message_id)
        )
    if marker_type == pb.REPLICATED_SUBSCRIPTION_SNAPSHOT:
        snapshot = pb.ReplicatedSubscriptionsSnapshot()
        _parse(snapshot, payload)
        here = _position(snapshot.local_message_id)
        return Snapshot(snapshot.snapshot_id, here, _positions(snapshot.clusters))
    if marker_type == pb.REPLICATED_SUBSCRIPTION_UPDATE:
        update = pb.ReplicatedSubscriptionsUpdate()
        _parse(update, payload)
        if not update.subscription_name.strip():
            raise MalformedMetadata("A marker names no subscription: it is skipped.")
        return SubscriptionUpdate(update.subscription_name, _positions(update.clusters))
    raise MalformedMetadata(
        f"A marker has type {marker_type}, which is none of replicated subscriptions: it is "
        "skipped."
    )


def _parse(message: Message, payload: bytes) -> None:
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise MalformedMetadata(f"A marker cannot be read ({error}): it is skipped.") from error
    if not message.IsInitialized():
        raise MalformedMetadata("A marker lacks a field: it is skipped.")
    plan = _TEXT[type(message)]
    if plan is not None and not payload.isascii() and has_broken_text(message, plan):
        raise MalformedMetadata("A marker has text that is not UTF-8: it is skipped.")


def snapshot_in(entry: bytes) -> Snapshot | None:
    """The snapshot in an entry; None for any other entry, and for one of another cluster."""
    try:
        metadata = parse_metadata(entry)
        if metadata.marker_type != pb.REPLICATED_SUBSCRIPTION_SNAPSHOT or metadata.replicated_from:
            return None
        found = parse_marker(metadata.marker_type, bytes(payload_of(entry)))
    except FrameError:
        return None
    return found if isinstance(found, Snapshot) else None


def _id(position: Position) -> pb.MarkersMessageIdData:
    return pb.MarkersMessageIdData(
        ledger_id=to_wire(position.ledger_id), entry_id=to_wire(position.entry_id)
    )


def _named(cluster: str, position: Position) -> pb.ClusterMessageId:
    return pb.ClusterMessageId(cluster=cluster, message_id=_id(position))


def _position(message_id: pb.MarkersMessageIdData) -> Position:
    return Position(from_wire(message_id.ledger_id), from_wire(message_id.entry_id))


def _positions(clusters: Collection[pb.ClusterMessageId]) -> dict[str, Position]:
    if len(clusters) > MAX_CLUSTERS:
        raise MalformedMetadata(f"A marker names {len(clusters)} clusters: it is skipped.")
    return {each.cluster: _position(each.message_id) for each in clusters}
