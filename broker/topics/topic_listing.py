"""Listings of the topics of a namespace: made once per change, and shared by all who ask.

A listing is made in parts of `TOPIC_LISTING_PART` names, between which the loop serves others.
"""

import asyncio
import json
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar

import google_crc32c

from broker.topics.partitions import partitioned_level
from config.bounds import TOPIC_LISTING_PART, TOPIC_LISTING_PATTERNS, TOPIC_LISTINGS_KEPT
from magnetar.protocol.names import (
    NamespaceName,
    TopicDomain,
    TopicName,
    decode_name,
    parse_ledger_path,
)
from magnetar.protocol.pulsar_pb2 import CommandGetTopicsOfNamespaceResponse
from storage.metadata.keys import children_range, name_of
from storage.metadata.store import MetadataStore

T = TypeVar("T")
Select = Callable[[Iterable[str]], Awaitable[list[str]]]
"""Returns those of some names that match a pattern, in parts: it may wait in between."""


def topics_hash(names: Iterable[str]) -> str:
    """The hash of a set of names, as Pulsar's client computes it.

    It is the CRC32C of the sorted names, joined by commas, as four little-endian bytes in hex.
    """
    return _hash_of_sorted(sorted(names))


def _hash_of_sorted(names: Sequence[str]) -> str:
    checksum = google_crc32c.value(",".join(names).encode())
    return int(checksum).to_bytes(4, "little").hex()


@dataclass(frozen=True, slots=True, eq=False)
class MatchingTopics:
    """The names of a listing that match a pattern, sorted."""

    names: tuple[str, ...]
    hash: str

    def has(self, name: str) -> bool:
        """Whether a name is among them."""
        # A set would take seven times the memory of the names, for each pattern of a client.
        at = bisect_left(self.names, name)
        return at < len(self.names) and self.names[at] == name

    def with_changes(self, added: Set[str], removed: Set[str]) -> "MatchingTopics":
        """The names with some added and some removed."""
        names = tuple(sorted({*self.names, *added} - removed))
        return MatchingTopics(names, _hash_of_sorted(names))


NO_MATCHING_TOPICS = MatchingTopics((), topics_hash(()))


@dataclass(frozen=True, slots=True, eq=False)
class TopicListing:
    """Topic names, sorted, with what answers have of them."""

    names: tuple[str, ...]
    hash: str
    encoded: bytes
    """The fields of GET_TOPICS_OF_NAMESPACE_RESPONSE beside its request id."""
    unchanged: bytes
    """The same for a client that has this hash: no names."""
    _of_patterns: dict[str, MatchingTopics] = field(default_factory=dict)

    async def matching(self, pattern: str, select: Select) -> MatchingTopics:
        """The names that match a pattern; found once for each pattern."""
        known = self._of_patterns.get(pattern)
        if known is None:
            names = tuple(await select(self.names))
            known = MatchingTopics(names, _hash_of_sorted(names))
            for other in self._of_patterns.values():
                if other.hash == known.hash and other.names == known.names:
                    known = other
            if len(self._of_patterns) >= TOPIC_LISTING_PATTERNS:
                del self._of_patterns[next(iter(self._of_patterns))]
            self._of_patterns[pattern] = known
        return known


def listing_of(names: Sequence[str]) -> TopicListing:
    """Hash and encode sorted names."""
    known = _hash_of_sorted(names)
    return TopicListing(
        tuple(names), known, _encode(known, names), _encode(known, (), changed=False)
    )


def _encode(known: str, names: Sequence[str], *, changed: bool = True) -> bytes:
    response = CommandGetTopicsOfNamespaceResponse(
        topics=names, filtered=False, topics_hash=known, changed=changed
    )
    # The request id is required, and each connection adds its own.
    return response.SerializePartialToString()


@dataclass(frozen=True, slots=True)
class _Stored:
    """What the store has of a namespace: names of ledgers, and records of partitioned topics."""

    ledgers: Sequence[str]
    partitioned: Sequence[tuple[str, bytes]]


@dataclass(slots=True)
class _Namespace:
    """The last listing of one namespace, and the reads that are asked for."""

    stored: _Stored | None = None
    listing: TopicListing | None = None
    number: int = 0
    """Number of the read that the listing is of."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


_Change = tuple[MatchingTopics, frozenset[str], frozenset[str]]


class TopicListings:
    """Reads the topics of namespaces, and keeps the last listings.

    The store is read for every request, as any broker may have changed it; requests that arrive
    while a read is in progress share the next one.  A new listing is made only if what was read has
    changed.
    """

    def __init__(self, metadata: MetadataStore, ledgers_of: Callable[[str], str]) -> None:
        """`ledgers_of` maps a prefix of ledger paths to the parent key of their records."""
        self._metadata = metadata
        self._ledgers_of = ledgers_of
        self._namespaces: dict[NamespaceName, _Namespace] = {}
        self._reads = 0
        self._changed: dict[_Change, MatchingTopics] = {}

    def changed(
        self, topics: MatchingTopics, added: frozenset[str], removed: frozenset[str]
    ) -> MatchingTopics:
        """The names after a change; those who had the same ones share the new ones."""
        change = topics, added, removed
        known = self._changed.get(change)
        if known is None:
            known = topics.with_changes(added, removed)
            if len(self._changed) >= TOPIC_LISTING_PATTERNS:
                del self._changed[next(iter(self._changed))]
            self._changed[change] = known
        return known

    def arrival(self) -> int:
        """A number for `get`: reads that begin from now on have higher ones."""
        return self._reads

    async def get(self, namespace: NamespaceName, arrival: int | None = None) -> TopicListing:
        """The present listing: of a read that began after `arrival`, which is now by default."""
        after = self._reads if arrival is None else arrival
        kept = self._kept(namespace)
        while kept.listing is None or kept.number <= after:
            async with kept.reading:
                if kept.listing is None or kept.number <= after:
                    await self._read(namespace, kept)
        return kept.listing

    def _kept(self, namespace: NamespaceName) -> _Namespace:
        kept = self._namespaces.pop(namespace, None) or _Namespace()
        self._namespaces[namespace] = kept
        for other in list(self._namespaces)[:-TOPIC_LISTINGS_KEPT]:
            del self._namespaces[other]
        return kept

    async def _read(self, namespace: NamespaceName, kept: _Namespace) -> None:
        self._reads += 1
        number = self._reads
        prefix = f"{namespace}/{TopicDomain.PERSISTENT.value}"
        ledgers = await self._metadata.children(self._ledgers_of(prefix))
        lo, hi = children_range(partitioned_level(namespace))
        records = await self._metadata.scan(lo, hi)
        stored = _Stored(ledgers, [(name_of(record.key), record.value) for record in records])
        if kept.listing is None or stored != kept.stored:
            names = sorted(await _names(namespace, prefix, stored))
            await asyncio.sleep(0)
            kept.listing = listing_of(names)
            kept.stored = stored
        kept.number = number


async def _names(namespace: NamespaceName, prefix: str, stored: _Stored) -> set[str]:
    """The full names of topics, in parts; each partition is one."""
    names: set[str] = set()
    for part in parts_of(stored.ledgers):
        names.update(str(parse_ledger_path(f"{prefix}/{child}")) for child in part)
        await asyncio.sleep(0)
    for encoded, value in stored.partitioned:
        record = json.loads(value)
        count = record.get("partitions") if isinstance(record, dict) else 0
        whole = TopicName(
            TopicDomain.PERSISTENT, namespace.tenant, namespace.namespace, decode_name(encoded)
        )
        for indexes in parts_of(range(count if isinstance(count, int) else 0)):
            names.update(f"{whole}-partition-{index}" for index in indexes)
            await asyncio.sleep(0)
    return names


def parts_of(items: Sequence[T]) -> Iterable[Sequence[T]]:
    """The items, TOPIC_LISTING_PART at a time."""
    return (
        items[first : first + TOPIC_LISTING_PART]
        for first in range(0, len(items), TOPIC_LISTING_PART)
    )
