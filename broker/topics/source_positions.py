"""Pure: how far the replicators of other clusters came on one topic, by positions of their logs.

A replicator of cluster S publishes to cluster R under the name `pulsar.repl.S-->R` (older ones:
`pulsar.repl.S`).  Each message names its cluster in `replicated_from`, and its position there in a
property.  A replicator sends in the order of its log, so one position of a cluster says which of
its messages are stored here (Apache Pulsar's deduplication of replicated messages, V2).
"""

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.pulsar_pb2 import MessageMetadata

REPLICATOR_PREFIX: Final = "pulsar.repl."
"""How the name of a replicator's producer begins."""
TO_CLUSTER: Final = "-->"
"""What stands between the source cluster and the cluster that gets the messages."""
SOURCE_POSITION: Final = "__MSG_PROP_REPL_SOURCE_POSITION"
"""The property with a message's position in the source cluster, as `ledger:entry`."""
_POSITION: Final = re.compile(r"(\d{1,19}):(\d{1,19})", re.ASCII)
_ID_MAX: Final = 2**63 - 1
_LONGEST_KEY: Final = 255
"""Bytes of a name under which something is remembered; a longer one is known by its hash."""


def bounded_key(name: str) -> str:
    """What a name of another cluster is remembered under, as it may have any length."""
    encoded = name.encode()
    if len(encoded) <= _LONGEST_KEY:
        return name
    return f"{REPLICATOR_PREFIX}{blake2b(encoded, digest_size=32).hexdigest()}"


def source_cluster_of(producer_name: str) -> str | None:
    """The cluster whose replicator has this producer name; None for any other producer."""
    if not producer_name.startswith(REPLICATOR_PREFIX):
        return None
    return producer_name.removeprefix(REPLICATOR_PREFIX).partition(TO_CLUSTER)[0]


def source_positions_of(metadata: MessageMetadata) -> tuple[Position, Position] | None:
    """The first and the last position that the properties name; None if either is no position.

    A message has two where an application copied the properties of a replicated message into it.
    The last one is its replicator's, which appends it.  The first one is what Apache Pulsar's
    replicator compares with the receipt.
    """
    named = [each.value for each in metadata.properties if each.key == SOURCE_POSITION]
    if not named:
        return None
    first, last = _position(named[0]), _position(named[-1])
    return None if first is None or last is None else (first, last)


def _position(text: str) -> Position | None:
    found = _POSITION.fullmatch(text)
    if found is None:
        return None
    ledger_id, entry_id = int(found[1]), int(found[2])
    return Position(ledger_id, entry_id) if max(ledger_id, entry_id) <= _ID_MAX else None


class SourceCluster:
    """How far one cluster came: `last` is the source position of its last stored message.

    `saved`: a snapshot has the cluster, so that a replay counts its messages by position.
    """

    __slots__ = ("attached", "last", "saved", "seen_ms")

    def __init__(self) -> None:
        self.last = EARLIEST
        self.saved = False
        self.attached = 0
        self.seen_ms = 0


class SourcePositions:
    """The clusters whose replicators publish here by position.

    They are kept for as long as the topic, however long a replicator stays away.  Above `limit`
    those that were away for longest are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._clusters: dict[str, SourceCluster] = {}

    def __len__(self) -> int:
        return len(self._clusters)

    def get(self, cluster: str) -> SourceCluster | None:
        """What is known of a cluster, if anything."""
        return self._clusters.get(bounded_key(cluster))

    def attach(self, cluster: str) -> SourceCluster:
        """The state of a cluster whose replicator begins to publish."""
        source = self._clusters.setdefault(bounded_key(cluster), SourceCluster())
        source.attached += 1
        self._forget()
        return source

    def detach(self, cluster: str, now_ms: int) -> None:
        """Note that its replicator left."""
        source = self.get(cluster)
        if source is not None:
            source.attached -= 1
            source.seen_ms = now_ms

    def rows(self, now_ms: int) -> dict[str, list[int]]:
        """For the snapshot: when each cluster was seen last, and its position; newest first."""
        seen = {
            name: now_ms if source.attached else source.seen_ms
            for name, source in self._clusters.items()
        }
        return {
            name: [seen[name], *self._clusters[name].last]
            for name in sorted(seen, key=seen.__getitem__, reverse=True)
        }

    def load(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Take over the rows of a snapshot."""
        for name, (seen_ms, ledger_id, entry_id) in rows.items():
            source = self._clusters.setdefault(name, SourceCluster())
            source.last, source.seen_ms = Position(ledger_id, entry_id), seen_ms
            source.saved = True

    def _forget(self) -> None:
        away = [name for name, source in self._clusters.items() if not source.attached]
        surplus = len(self._clusters) - self._limit
        if surplus > 0:
            away.sort(key=lambda name: self._clusters[name].seen_ms)
            for name in away[:surplus]:
                del self._clusters[name]
