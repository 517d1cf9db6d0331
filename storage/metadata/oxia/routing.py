"""The map of shards: which shard holds a record, and its leader.  Pure."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.store import ABSENT, MetadataError, Version

HASHES = 1 << 32
_SHARD_BITS = 16
_SHARD_MASK = (1 << _SHARD_BITS) - 1


class UnusableShards(MetadataError):
    """The servers' map of shards cannot be used.  Reported as MetadataError."""


class IncompleteShards(UnusableShards):
    """The map has gaps or overlaps, as while a shard is split: the next one may be whole."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard, the hashes it holds (both bounds included), its leader as host:port."""

    shard_id: int
    leader: str
    first_hash: int
    last_hash: int


def hash_of(text: str) -> int:
    """The hash of a partition key or key: the low 32 bits of XXH3-64 with seed 0.

    Oxia's own clients route by the same hash.
    """
    return xxh3_64_intdigest(text.encode()) & (HASHES - 1)


class ShardTable:
    """The shards of a namespace.  Immutable."""

    __slots__ = ("_by_id", "_firsts", "shards")

    def __init__(self, shards: Iterable[Shard]) -> None:
        """Raises `IncompleteShards` unless they cover every hash once."""
        self.shards = tuple(sorted(shards, key=lambda shard: shard.first_hash))
        self._firsts = [shard.first_hash for shard in self.shards]
        self._by_id = {shard.shard_id: shard for shard in self.shards}
        following = 0
        for shard in self.shards:
            if shard.first_hash != following or shard.last_hash < shard.first_hash:
                break
            following = shard.last_hash + 1
        if following != HASHES or len(self._by_id) != len(self.shards):
            raise IncompleteShards(
                "The Oxia shards do not cover every hash once: wait for the coordinator to finish, "
                "or look at the namespace with its administration tool."
            )

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of all shards, in order of their hashes."""
        return tuple(shard.shard_id for shard in self.shards)

    def shard_of(self, key: str, partition: str | None) -> int:
        """The shard of a record: that of its partition key, else of its key."""
        if len(self.shards) == 1:
            return self.shards[0].shard_id
        found = hash_of(key if partition is None else partition)
        return self.shards[bisect_right(self._firsts, found) - 1].shard_id

    def leader(self, shard_id: int) -> str | None:
        """The leader of a shard; None if there is no such shard or no leader."""
        shard = self._by_id.get(shard_id)
        return shard.leader or None if shard is not None else None


def parse_assignments(assignments: pb.ShardAssignments, namespace: str) -> ShardTable:
    """The table of one namespace.

    Raises `IncompleteShards`, and `UnusableShards` for a namespace that is not routed by this hash.
    """
    if namespace not in assignments.namespaces:
        raise UnusableShards(
            f"The Oxia servers know no namespace {namespace!r}: "
            "create it, or name another one in the URL."
        )
    assigned = assignments.namespaces[namespace]
    if assigned.shard_key_router != pb.XXHASH3:
        raise UnusableShards(
            f"The Oxia namespace {namespace!r} routes keys in a way ({assigned.shard_key_router}) "
            "that is not known here: use a namespace routed by XXHASH3."
        )
    return ShardTable(
        Shard(
            each.shard,
            each.leader,
            each.int32_hash_range.min_hash_inclusive,
            each.int32_hash_range.max_hash_inclusive,
        )
        for each in assigned.assignments
        if each.HasField("int32_hash_range")
    )


def version_of(version_id: int, shard_id: int) -> Version:
    """A version of the store: the shard's version id, with the shard.

    So versions are unique in the store, and one that was read before a record moved to another
    shard never matches there by chance.
    """
    return Version(version_id << _SHARD_BITS | shard_id & _SHARD_MASK)


def version_id_of(version: Version, shard_id: int) -> int | None:
    """The shard's own id of a version; None if it is a version of another shard."""
    if version == ABSENT:
        return -1
    if version < 0 or version & _SHARD_MASK != shard_id & _SHARD_MASK:
        return None
    return version >> _SHARD_BITS
