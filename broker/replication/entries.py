"""Pure: which entries another cluster gets, and with what metadata.

An entry is sent as it is: a batch, its compression, encryption and chunks stay.  Its metadata tells
where it is from (Apache Pulsar's replicator; `../../docs/geo-replication.md`).
"""

import enum
from dataclasses import dataclass

from broker.topics.source_positions import REPLICATOR_PREFIX, SOURCE_POSITION, TO_CLUSTER
from broker.topics.subscription_markers import MARKER_TYPES
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry, payload_of
from magnetar.protocol.pulsar_pb2 import MessageMetadata


class Skipped(enum.Enum):
    """Why another cluster does not get an entry."""

    MARKER = "written by a broker for its own cluster"
    REPLICATED = "from another cluster, which sends it to all"
    NOT_ADDRESSED = "for other clusters only"
    EXPIRED = "older than its time to live"


@dataclass(frozen=True, slots=True)
class Route:
    """From one cluster to another one."""

    local: str
    remote: str

    @property
    def producer(self) -> str:
        """The name of the replicator's producer at the remote cluster."""
        return f"{REPLICATOR_PREFIX}{self.local}{TO_CLUSTER}{self.remote}"


def skipped(
    metadata: MessageMetadata, remote: str, *, now_ms: int = 0, ttl_s: int = 0
) -> Skipped | None:
    """Why an entry is not for the cluster `remote`; None if it is.

    At `now_ms` an entry is too old if it was published more than `ttl_s` ago; with 0 none is.
    Markers of replicated subscriptions are sent as messages are.
    """
    if metadata.marker_type and metadata.marker_type not in MARKER_TYPES:
        return Skipped.MARKER
    # All clusters of a set replicate to each other, so nothing is passed on, and nothing loops.
    if metadata.replicated_from:
        return Skipped.REPLICATED
    if metadata.replicate_to and remote not in metadata.replicate_to:
        return Skipped.NOT_ADDRESSED
    if ttl_s and metadata.publish_time < now_ms - 1000 * ttl_s:
        return Skipped.EXPIRED
    return None


def outgoing(
    entry: bytes,
    metadata: MessageMetadata,
    position: Position,
    local: str,
    schema_version: bytes | None,
) -> bytes:
    """The entry for another cluster; `metadata` is its own, and is left as it is.

    `schema_version` is the other cluster's.  Raises `MalformedEntry`.
    """
    sent = with_origin(metadata, local, schema_version)
    # A copy of an application's would be read in its place.
    sent.ClearField("properties")
    sent.properties.extend(each for each in metadata.properties if each.key != SOURCE_POSITION)
    sent.properties.add(key=SOURCE_POSITION, value=position.text)
    return build_entry(sent, bytes(payload_of(entry)))


def with_origin(
    metadata: MessageMetadata, local: str, schema_version: bytes | None
) -> MessageMetadata:
    """The metadata of an entry as another cluster gets it, without its position here."""
    sent = MessageMetadata()
    sent.CopyFrom(metadata)
    sent.replicated_from = local
    # Committed messages arrive as plain ones: the other cluster does not know the transaction.
    sent.ClearField("txnid_most_bits")
    sent.ClearField("txnid_least_bits")
    if schema_version is None:
        sent.ClearField("schema_version")
    else:
        sent.schema_version = schema_version
    return sent
