"""Names of namespaces, topics and segments, and their paths.

    topic      <domain>://<tenant>/<namespace>/<local name>      short: `x`, `tenant/namespace/x`
    segment    segment://<tenant>/<namespace>/<topic>/<start>-<end>-<id>

Start and end are the inclusive range of hashes in four lower-case hex digits; the id is decimal.
The local name of a `topic://` or `segment://` name is everything after the namespace, with slashes;
elsewhere it has no slash.  Local names are not decoded, so two names are equal only if their text
is.  In paths they are encoded as by `java.net.URLEncoder`.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar, Final
from urllib.parse import quote_plus, unquote_to_bytes

from magnetar.protocol.server_error import PeerError, ServerError

MAX_NAME_LENGTH: Final = 4096
"""The largest number of characters in a name."""
DEFAULT_TENANT: Final = "public"
DEFAULT_NAMESPACE: Final = "default"
MAX_SEGMENT_ID: Final = 2**63 - 1
_KEPT: Final = 1024
"""Cached parsed and encoded names: transactions use the same few all the time."""
PARTITION_SUFFIX: Final = "-partition-"

_ENTITY: Final = re.compile(r"(?!\.\.?\Z)[-=:.A-Za-z0-9_]+")
_DOTS: Final = frozenset((".", ".."))
"""Texts that are not allowed as a part of a name, as they have a meaning in paths."""
_PARTITION: Final = re.compile(r"-partition-(0|[1-9][0-9]{0,9})\Z")
_DESCRIPTOR: Final = re.compile(r"([0-9a-fA-F]{1,8})-([0-9a-fA-F]{1,8})-([0-9]{1,20})")
_BROKEN_ESCAPE: Final = re.compile(r"%(?![0-9a-fA-F]{2})")


class InvalidTopicName(PeerError):
    """The text is not a valid name of a topic."""

    code: ClassVar[ServerError] = ServerError.INVALID_TOPIC_NAME


class InvalidNamespaceName(PeerError):
    """The text is not a valid name of a tenant or namespace."""

    code: ClassVar[ServerError] = ServerError.INVALID_TOPIC_NAME


class NonPersistentTopicRefused(PeerError):
    """The name begins with `non-persistent://`, and the request is about stored messages."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


class TopicDomain(StrEnum):
    """The domain of a topic's name."""

    PERSISTENT = "persistent"
    NON_PERSISTENT = "non-persistent"
    TOPIC = "topic"
    SEGMENT = "segment"


_SLASHED: Final = frozenset((TopicDomain.TOPIC, TopicDomain.SEGMENT))


@dataclass(frozen=True, slots=True, order=True)
class NamespaceName:
    """A namespace of a tenant.  Raises `InvalidNamespaceName` for invalid characters."""

    tenant: str
    namespace: str

    def __post_init__(self) -> None:
        for kind, text in (("tenant", self.tenant), ("namespace", self.namespace)):
            if not _ENTITY.fullmatch(text) or len(text) > MAX_NAME_LENGTH:
                raise InvalidNamespaceName(
                    f"{_short(text)} is not the name of a {kind}; "
                    "use letters, digits and any of - = : . _ only, and not . or .. alone."
                )

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}"


@dataclass(frozen=True, slots=True, order=True)
class TopicName:
    """A topic of any domain.  Segments are in canonical form; `segment_name` parses them."""

    domain: TopicDomain
    tenant: str
    namespace: str
    local_name: str

    def __str__(self) -> str:
        return f"{self.domain.value}://{self.tenant}/{self.namespace}/{self.local_name}"

    @property
    def namespace_name(self) -> NamespaceName:
        """The namespace of the topic."""
        return NamespaceName(self.tenant, self.namespace)

    @property
    def partition_index(self) -> int | None:
        """N if the name ends in `-partition-N`, else None; None for segments.

        N has no leading zero and is less than 2^31; else it is an ordinary part of the name.
        """
        match = _PARTITION.search(self.local_name)
        if match is None or self.domain is TopicDomain.SEGMENT:
            return None
        index = int(match[1])
        return index if index < 2**31 else None

    @property
    def partitioned(self) -> "TopicName":
        """The topic of which this one is a partition, or itself if it is not a partition."""
        if self.partition_index is None:
            return self
        whole = self.local_name[: self.local_name.rindex(PARTITION_SUFFIX)]
        return TopicName(self.domain, self.tenant, self.namespace, whole) if whole else self

    def partition(self, index: int) -> "TopicName":
        """The name of one partition of this topic."""
        return self._with(self.domain, f"{self.local_name}{PARTITION_SUFFIX}{index}")

    def in_domain(self, domain: TopicDomain) -> "TopicName":
        """The same local name in another domain, e.g. the `topic://` twin of a persistent name.

        Raises `InvalidTopicName` if that domain does not allow the local name.
        """
        return parse_topic_name(str(self._with(domain, self.local_name)))

    def _with(self, domain: TopicDomain, local_name: str) -> "TopicName":
        return TopicName(domain, self.tenant, self.namespace, local_name)

    @property
    def ledger_path(self) -> str:
        """The name of its managed ledger, under which Pulsar stores the ledger's records."""
        if self.domain is TopicDomain.SEGMENT:
            return segment_name(self).ledger_path
        return f"{self.tenant}/{self.namespace}/{self.domain.value}/{encode_name(self.local_name)}"

    @property
    def schema_id(self) -> str:
        """The id of its schema history, which a topic shares with its partitions and segments."""
        if self.domain is TopicDomain.SEGMENT:
            return segment_name(self).parent.schema_id
        return f"{self.tenant}/{self.namespace}/{encode_name(self.partitioned.local_name)}"


@dataclass(frozen=True, slots=True, order=True)
class SegmentName:
    """One segment of a scalable topic: `hash_start` to `hash_end`, both included.

    `legacy_topic` is the ordinary topic or partition that is the segment, where a topic was
    migrated: clients attach to that name, and its ledger has the data.
    """

    parent: TopicName
    hash_start: int
    hash_end: int
    segment_id: int
    legacy_topic: TopicName | None = None

    @property
    def descriptor(self) -> str:
        """The last part of the name."""
        return f"{self.hash_start:04x}-{self.hash_end:04x}-{self.segment_id}"

    @property
    def topic_name(self) -> TopicName:
        """The topic that is served: of the `segment` domain, or the legacy one."""
        if self.legacy_topic is not None:
            return self.legacy_topic
        parent = self.parent
        local_name = f"{parent.local_name}/{self.descriptor}"
        return TopicName(TopicDomain.SEGMENT, parent.tenant, parent.namespace, local_name)

    def __str__(self) -> str:
        return str(self.topic_name)

    @property
    def ledger_path(self) -> str:
        """The name of its managed ledger."""
        if self.legacy_topic is not None:
            return self.legacy_topic.ledger_path
        parent = self.parent
        topic = encode_name(parent.local_name)
        return f"{parent.tenant}/{parent.namespace}/segment/{topic}/{self.descriptor}"


@lru_cache(_KEPT)
def parse_topic_name(text: str) -> TopicName:
    """Parse a full or short name of a topic.  Raises `InvalidTopicName`."""
    if len(text) > MAX_NAME_LENGTH:
        raise _invalid(text, f"has {len(text)} characters; use at most {MAX_NAME_LENGTH}.")
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _parse_short(text)
    try:
        domain = TopicDomain(scheme)
    except ValueError:
        domains = ", ".join(f"{domain.value}://" for domain in TopicDomain)
        raise _invalid(text, f"has no domain of ours; begin it with one of {domains}.") from None
    parts = rest.split("/", 2)
    if len(parts) != 3:
        raise _invalid(text, f"is not whole; write {scheme}://tenant/namespace/name.")
    return _checked(text, domain, *parts)


def _parse_short(text: str) -> TopicName:
    parts = text.split("/")
    if len(parts) == 1:
        parts = [DEFAULT_TENANT, DEFAULT_NAMESPACE, *parts]
    if len(parts) != 3:
        raise _invalid(text, "is neither short nor full; write name or tenant/namespace/name.")
    return _checked(text, TopicDomain.PERSISTENT, *parts)


def _checked(
    text: str, domain: TopicDomain, tenant: str, namespace: str, local_name: str
) -> TopicName:
    """The topic of these parts, if each is valid."""
    for kind, part in (("tenant", tenant), ("namespace", namespace)):
        if not _ENTITY.fullmatch(part):
            raise _invalid(
                text,
                f"has a {kind} that is . or .. or has other characters than letters, digits and "
                "- = : . _; correct it.",
            )
    if not local_name:
        raise _invalid(text, "ends after the namespace; add the name of the topic.")
    if local_name in _DOTS:
        raise _invalid(text, "ends with . or .. as the name of the topic; choose another one.")
    if "/" in local_name and domain not in _SLASHED:
        raise _invalid(
            text, f"has more than three parts; write {domain.value}://tenant/namespace/name."
        )
    if domain is TopicDomain.SEGMENT:
        return _parse_segment(text, tenant, namespace, local_name).topic_name
    return TopicName(domain, tenant, namespace, local_name)


def _parse_segment(text: str, tenant: str, namespace: str, local_name: str) -> SegmentName:
    topic, _, descriptor = local_name.rpartition("/")
    match = _DESCRIPTOR.fullmatch(descriptor)
    if match is None or not topic or topic in _DOTS:
        raise _invalid(text, "is no segment; write segment://tenant/namespace/topic/0000-ffff-0.")
    start, end, segment_id = int(match[1], 16), int(match[2], 16), int(match[3])
    if not start <= end <= 0xFFFF or segment_id > MAX_SEGMENT_ID:
        raise _invalid(text, "has no range of hashes or no id; ranges lie in 0000 to ffff.")
    parent = TopicName(TopicDomain.TOPIC, tenant, namespace, topic)
    return SegmentName(parent, start, end, segment_id)


def segment_suffix(segment_id: int) -> str:
    """The suffix that v5 clients add to the name of a producer or consumer on a segment."""
    return f"-seg-{segment_id}"


def segment_name(name: TopicName) -> SegmentName:
    """Parse a `segment://` name.  Raises `InvalidTopicName` for any other."""
    if name.domain is not TopicDomain.SEGMENT:
        raise _invalid(str(name), "is no segment; begin it with segment://.")
    return _parse_segment(str(name), name.tenant, name.namespace, name.local_name)


def parse_namespace_name(text: str) -> NamespaceName:
    """Parse `tenant/namespace`.  Raises `InvalidNamespaceName`."""
    tenant, separator, namespace = text.partition("/")
    if not separator:
        raise InvalidNamespaceName(f"{_short(text)} is no namespace; write tenant/namespace.")
    return NamespaceName(tenant, namespace)


def parse_ledger_path(path: str) -> TopicName:
    """The topic with this `ledger_path`.  Raises `InvalidTopicName`."""
    parts = path.split("/")
    if len(parts) == 4 or (len(parts) == 5 and parts[2] == TopicDomain.SEGMENT):
        tenant, namespace, domain, *local_name = parts
        local_name[0] = decode_name(local_name[0])
        return parse_topic_name(f"{domain}://{tenant}/{namespace}/{'/'.join(local_name)}")
    raise _invalid(path, "is no path of a managed ledger; write tenant/namespace/domain/name.")


def require_persistent(name: TopicName) -> None:
    """Raise `NonPersistentTopicRefused` for a `non-persistent://` name."""
    if name.domain is TopicDomain.NON_PERSISTENT:
        raise NonPersistentTopicRefused(
            f"{_short(str(name))} is not persistent, so it stores nothing that could serve this; "
            "use persistent:// or topic://."
        )


def require_creatable(name: TopicName) -> None:
    """Raise `InvalidTopicName` for a name with blanks at its ends, which no new topic may have."""
    local_name = name.local_name
    if local_name != local_name.strip() or local_name[0] <= " " or local_name[-1] <= " ":
        raise _invalid(str(name), "begins or ends with a blank; leave it out.")


@lru_cache(_KEPT)
def encode_name(text: str) -> str:
    """Encode a text as one part of a path, as `java.net.URLEncoder` does in UTF-8."""
    return quote_plus(text, safe="*", errors="replace").replace("~", "%7E")


def decode_name(encoded: str) -> str:
    """Decode a text of `encode_name`.  Raises `InvalidTopicName`."""
    if not _BROKEN_ESCAPE.search(encoded):
        try:
            return unquote_to_bytes(encoded.replace("+", " ")).decode()
        except UnicodeDecodeError:
            pass
    raise _invalid(encoded, "is not percent-encoded UTF-8; encode it as URLEncoder does.")


def _invalid(text: str, sentence: str) -> InvalidTopicName:
    return InvalidTopicName(f"The topic name {_short(text)} {sentence}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:120] + "...")
