"""The metadata records of scalable topics: paths and JSON, Pulsar's own and two of Magnetar.  Pure.

/topics/<tenant>/<namespace>/<topic>        the topic: layout and properties
    .../controller                          its leader (ephemeral)
    .../subscriptions/<sub>                 its type, and its assignment (not Pulsar's)
    .../subscriptions/<sub>/consumers/<c>   a registered consumer
    .../segments/<id>/load                  the last load report of a segment (see `load_report`)
    .../history/-<number>                   changes (not Pulsar's, see `history`)
/scalable-topic-steps/<topic>:<step>        work begun (not Pulsar's, see `steps`)
"""

import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from broker.scalable.assignment_record import StoredAssignment, assignment_from_json
from broker.scalable.last_changes import LastChanges, decode_last_changes
from broker.scalable.layout import CorruptLayout, Layout, Segment, SegmentState, verify
from config.bounds import (
    ASSIGNMENT_RECORD_BYTES,
    MAX_TOPIC_PROPERTIES,
    MAX_TOPIC_PROPERTIES_BYTES,
    METADATA_KEY_BYTES,
)
from magnetar.protocol.names import (
    InvalidNamespaceName,
    InvalidTopicName,
    NamespaceName,
    SegmentName,
    TopicDomain,
    TopicName,
    decode_name,
    parse_topic_name,
)
from magnetar.protocol.names import encode_name as url_encode
from storage.managed_ledger.records import NAMES_INDEX
from storage.metadata.store import IndexEntry, RecordTooLarge

TOPICS_ROOT = "/topics"
SEALED = IndexEntry("magnetar:scalable-topics", "with-sealed-segments")
"""The index entry of topics with sealed segments, by which pruning finds them."""

_KEPT_CHANGES = "lastChangesPruned"
_CONSUMER_GRACE = "consumerSessionGracePeriodSeconds"
_INCARNATION = "replicationIncarnation"
_OWN_INDEXES = frozenset({NAMES_INDEX, SEALED.index})
_NOT_IN_INDEX_NAMES = re.compile(r"[/\x00-\x1f\x7f-\x9f\ud800-\udfff\U0010ffff]")
_NOT_IN_INDEX_KEYS = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\U0010ffff]")


class SubscriptionKind(enum.Enum):
    """The type of a subscription of a scalable topic, fixed when it is created."""

    STREAM = "STREAM"
    QUEUE = "QUEUE"
    CHECKPOINT = "CHECKPOINT"


@dataclass(frozen=True, slots=True)
class ScalableTopicRecord:
    """The record of one topic.

    `auto_scale_policy` is the topic's override of the policy of automatic splits, as it was stored.
    `consumer_grace_s` is how long a lost ordered consumer keeps its segments, in seconds; None
    means as long as in the topic's namespace.  Pulsar's records have no such member.
    """

    layout: Layout
    properties: Mapping[str, str] = field(default_factory=dict)
    auto_scale_policy: Mapping[str, object] | None = None
    consumer_grace_s: int | None = None
    kept_changes: LastChanges | None = None
    """Times of changes whose parents were pruned; see `last_changes`."""
    incarnation: int | None = None
    """The number that other clusters know this life of the topic by, once it was replicated."""

    def to_json(self) -> dict[str, object]:
        """The record as it is stored and as REST answers it."""
        members: dict[str, object] = {
            "epoch": self.layout.epoch,
            "nextSegmentId": self.layout.next_segment_id,
            "segments": {str(s.segment_id): _segment(s) for s in self.layout.segments.values()},
            "properties": dict(self.properties),
        }
        if self.auto_scale_policy is not None:
            members["autoScalePolicy"] = dict(self.auto_scale_policy)
        if self.consumer_grace_s is not None:
            members[_CONSUMER_GRACE] = self.consumer_grace_s
        if self.kept_changes is not None:
            members[_KEPT_CHANGES] = self.kept_changes.to_json()
        if self.incarnation is not None:
            members[_INCARNATION] = f"{self.incarnation:016x}"
        return members


def namespace_path(namespace: NamespaceName) -> str:
    """The path whose children are the topics of a namespace."""
    return f"{TOPICS_ROOT}/{_part(namespace.tenant)}/{_part(namespace.namespace)}"


def topic_path(name: TopicName) -> str:
    """The path of a topic's record."""
    return f"{namespace_path(name.namespace_name)}/{_part(name.local_name)}"


def topic_in(namespace: NamespaceName, part: str) -> TopicName:
    """The topic whose record is the child `part` of a namespace.  Raises `InvalidTopicName`."""
    local_name = decode_name(part)
    return TopicName(TopicDomain.TOPIC, namespace.tenant, namespace.namespace, local_name)


def topic_at(path: str) -> TopicName | None:
    """The topic whose record is at a path; None if the path is not that of a topic."""
    parts = path.removeprefix(f"{TOPICS_ROOT}/").split("/")
    if len(parts) != 3 or not path.startswith(f"{TOPICS_ROOT}/"):
        return None
    try:
        return topic_in(NamespaceName(decode_name(parts[0]), decode_name(parts[1])), parts[2])
    except (InvalidTopicName, InvalidNamespaceName):
        return None


def controller_path(name: TopicName) -> str:
    """The path of the record that names a topic's leader."""
    return f"{topic_path(name)}/controller"


def subscriptions_path(name: TopicName) -> str:
    """The path whose children are the subscriptions that have a record."""
    return f"{topic_path(name)}/subscriptions"


def subscription_path(name: TopicName, subscription: str) -> str:
    """The path of a subscription's record."""
    return f"{subscriptions_path(name)}/{_part(subscription)}"


def consumers_path(name: TopicName, subscription: str) -> str:
    """The path whose children are the registered consumers of a subscription."""
    return f"{subscription_path(name, subscription)}/consumers"


def consumer_path(name: TopicName, subscription: str, consumer: str) -> str:
    """The path of a consumer's registration."""
    return f"{consumers_path(name, subscription)}/{_part(consumer)}"


def load_path(name: TopicName, segment_id: int) -> str:
    """The path of a segment's load report."""
    return f"{topic_path(name)}/segments/{segment_id}/load"


def segment_of(name: TopicName, segment: Segment) -> SegmentName:
    """The name of a segment of a topic."""
    legacy = segment.legacy_topic_name
    return SegmentName(
        name,
        segment.hash_start,
        segment.hash_end,
        segment.segment_id,
        None if legacy is None else parse_topic_name(legacy),
    )


def encode_topic(record: ScalableTopicRecord) -> bytes:
    """Encode a topic's record."""
    return json.dumps(record.to_json(), separators=(",", ":")).encode()


def require_storable(properties: Mapping[str, str]) -> None:
    """Raise `RecordTooLarge` for properties with which not every layout could be stored."""
    if len(properties) > MAX_TOPIC_PROPERTIES:
        raise RecordTooLarge(
            f"A topic was to have {len(properties)} properties: give it {MAX_TOPIC_PROPERTIES} at "
            "most, as each one has an index entry."
        )
    size = len(json.dumps(dict(properties), separators=(",", ":")))
    if size > MAX_TOPIC_PROPERTIES_BYTES:
        raise RecordTooLarge(
            f"A topic was to have properties of {size} bytes, as JSON: keep them to "
            f"{MAX_TOPIC_PROPERTIES_BYTES}."
        )


def decode_topic(value: bytes) -> ScalableTopicRecord:
    """Decode a topic's record and verify its layout.  Raises `CorruptLayout`."""
    try:
        members = json.loads(value)
        segments = {int(key): _decode_segment(s) for key, s in members["segments"].items()}
        layout = Layout(
            int(members["epoch"]),
            int(members["nextSegmentId"]),
            MappingProxyType(dict(sorted(segments.items()))),
        )
        properties = {str(k): str(v) for k, v in (members.get("properties") or {}).items()}
        policy = members.get("autoScalePolicy")
        grace = members.get(_CONSUMER_GRACE)
        grace_s = None if grace is None else _number(grace)
        kept = decode_last_changes(members.get(_KEPT_CHANGES))
        drawn = members.get(_INCARNATION)
        incarnation = None if drawn is None else int(drawn, 16)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptLayout(
            f"The record of a scalable topic cannot be read ({error!r}): restore it from a backup."
        ) from error
    return ScalableTopicRecord(
        verify(layout), MappingProxyType(properties), policy, grace_s, kept, incarnation
    )


def indexes_of(record: ScalableTopicRecord) -> tuple[IndexEntry, ...]:
    """The index entries of a topic's record.

    There is one for each property that can be indexed (index = its name, key = its value), and one
    more if the topic has sealed segments.
    """
    properties = sorted(record.properties.items())
    entries = [IndexEntry(key, value) for key, value in properties if is_indexed(key, value)]
    if record.layout.sealed:
        entries.append(SEALED)
    return tuple(entries)


def is_indexed(key: str, value: str) -> bool:
    """Whether a property has an index entry, so that the index finds every topic that has it."""
    return bool(
        key
        and value
        and key not in _OWN_INDEXES
        and len(key.encode(errors="surrogatepass")) <= METADATA_KEY_BYTES
        and len(value.encode(errors="surrogatepass")) <= METADATA_KEY_BYTES
        and not _NOT_IN_INDEX_NAMES.search(key)
        and not _NOT_IN_INDEX_KEYS.search(value)
    )


def encode_subscription(kind: SubscriptionKind) -> bytes:
    """Encode a subscription's record."""
    return json.dumps({"type": kind.value}).encode()


def decode_subscription(value: bytes) -> SubscriptionKind | None:
    """Decode the type of a subscription; None when its record has none."""
    try:
        return SubscriptionKind(json.loads(value).get("type"))
    except (ValueError, AttributeError):
        return None


def with_assignment(value: bytes, assignment: StoredAssignment | None) -> bytes:
    """A subscription's record with another assignment, or without one.

    Its other members stay as they are.
    """
    members = json.loads(value)
    if assignment is None:
        members.pop("assignment", None)
    else:
        members["assignment"] = assignment.to_json()
    return json.dumps(members).encode()


def fits_record(value: bytes, assignment: StoredAssignment) -> bool:
    """Whether a subscription's record has at most ASSIGNMENT_RECORD_BYTES with an assignment."""
    return len(with_assignment(value, assignment)) <= ASSIGNMENT_RECORD_BYTES


def decode_assignment(value: bytes) -> StoredAssignment | None:
    """The assignment in a subscription's record; None if it has none that can be read."""
    try:
        return assignment_from_json(json.loads(value)["assignment"])
    except (ValueError, KeyError, TypeError):
        return None


def decode_part(part: str) -> str:
    """Decode the name of the subscription or consumer whose path ends in `part`."""
    return decode_name(part)


def _part(text: str) -> str:
    # URL-encoded as in Pulsar.  No path may contain `.` or `..`: they are written with `%2E`.
    encoded = url_encode(text)
    return encoded.replace(".", "%2E") if encoded in {".", ".."} else encoded


def _segment(segment: Segment) -> dict[str, object]:
    members: dict[str, object] = {
        "segmentId": segment.segment_id,
        "hashRange": {"start": segment.hash_start, "end": segment.hash_end},
        "state": segment.state.value,
        "parentIds": list(segment.parent_ids),
        "childIds": list(segment.child_ids),
        "createdAtEpoch": segment.created_at_epoch,
        "sealedAtEpoch": segment.sealed_at_epoch,
        "createdAtMs": segment.created_at_ms,
        "sealedAtMs": segment.sealed_at_ms,
    }
    if segment.legacy_topic_name is not None:
        members["legacyTopicName"] = segment.legacy_topic_name
    if segment.entry_bucket_splits:
        members["entryBucketSplits"] = list(segment.entry_bucket_splits)
    return {
        **members,
        "sealed": not segment.active,
        "active": segment.active,
        "root": not segment.parent_ids,
        "leaf": not segment.child_ids,
        "legacy": segment.legacy_topic_name is not None,
    }


def _decode_segment(members: Mapping[str, object]) -> Segment:
    hash_range = members["hashRange"]
    if not isinstance(hash_range, dict):
        raise TypeError("hashRange is no object")
    legacy = members.get("legacyTopicName")
    return Segment(
        segment_id=_number(members["segmentId"]),
        hash_start=_number(hash_range["start"]),
        hash_end=_number(hash_range["end"]),
        created_at_epoch=_number(members["createdAtEpoch"]),
        created_at_ms=_number(members["createdAtMs"]),
        state=SegmentState(members["state"]),
        parent_ids=_numbers(members["parentIds"]),
        child_ids=_numbers(members["childIds"]),
        sealed_at_epoch=_number(members["sealedAtEpoch"]),
        sealed_at_ms=_number(members["sealedAtMs"]),
        legacy_topic_name=legacy if isinstance(legacy, str) else None,
        entry_bucket_splits=_numbers(members.get("entryBucketSplits") or []),
    )


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return tuple(_number(item) for item in value)
