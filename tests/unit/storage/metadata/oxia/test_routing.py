"""Routing: the servers' hash, whole maps only, versions that name their shard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.routing import (
    HASHES,
    IncompleteShards,
    Shard,
    ShardTable,
    UnusableShards,
    hash_of,
    parse_assignments,
    version_id_of,
    version_of,
)
from storage.metadata.store import ABSENT, Version


def equal_shards(count: int) -> list[Shard]:
    bounds = [HASHES * n // count for n in range(count + 1)]
    return [Shard(n, f"host-{n}:6648", bounds[n], bounds[n + 1] - 1) for n in range(count)]


def assignments(shards: list[Shard], router: pb.ShardKeyRouter = pb.XXHASH3) -> pb.ShardAssignments:
    message = pb.ShardAssignments()
    assigned = message.namespaces["default"]
    assigned.shard_key_router = router
    for shard in shards:
        added = assigned.assignments.add(shard=shard.shard_id, leader=shard.leader)
        added.int32_hash_range.min_hash_inclusive = shard.first_hash
        added.int32_hash_range.max_hash_inclusive = shard.last_hash
    return message


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0x38D394C2), ("a", 0x1E964E1F), ("foo", 0x077E7D8A), ("/txn/1", 0xEA23DC16)],
)
def test_the_hash_is_the_servers(text: str, expected: int) -> None:
    assert hash_of(text) == expected


def test_a_partition_key_routes_instead_of_the_key() -> None:
    table = ShardTable(equal_shards(4))
    assert table.shard_of("/txn/1", None) == 3
    assert table.shard_of("/txn/1", "foo") == table.shard_of("foo", None) == 0


@given(st.text(), st.integers(1, 9))
def test_every_text_has_the_shard_whose_range_holds_its_hash(text: str, count: int) -> None:
    table = ShardTable(equal_shards(count))
    shard = next(each for each in table.shards if each.shard_id == table.shard_of(text, None))
    assert shard.first_hash <= hash_of(text) <= shard.last_hash


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_map_with_a_gap_is_not_used(missing: int) -> None:
    shards = [each for each in equal_shards(3) if each.shard_id != missing]
    with pytest.raises(IncompleteShards):
        ShardTable(shards)


def test_overlaps_are_not_used() -> None:
    with pytest.raises(IncompleteShards):
        ShardTable([*equal_shards(1), *equal_shards(2)])
    with pytest.raises(IncompleteShards):
        ShardTable([])


def test_the_order_of_a_map_does_not_matter() -> None:
    table = parse_assignments(assignments(equal_shards(4)[::-1]), "default")
    assert table.ids == (0, 1, 2, 3)
    assert table.leader(2) == "host-2:6648"
    assert table.leader(7) is None


def test_a_shard_without_leader_has_none() -> None:
    assert ShardTable([Shard(0, "", 0, HASHES - 1)]).leader(0) is None


def test_other_routers_and_namespaces_are_refused() -> None:
    with pytest.raises(UnusableShards, match="XXHASH3"):
        parse_assignments(assignments(equal_shards(1), pb.UNKNOWN), "default")
    with pytest.raises(UnusableShards, match="elsewhere"):
        parse_assignments(assignments(equal_shards(1)), "elsewhere")


@given(st.integers(0, 2**50), st.integers(0, 2**20))
def test_versions_name_their_shard(version_id: int, shard_id: int) -> None:
    version = version_of(version_id, shard_id)
    assert version_id_of(version, shard_id) == version_id
    assert version_id_of(version, shard_id + 1) is None


def test_versions_of_two_shards_differ() -> None:
    assert version_of(5, 0) != version_of(5, 1)
    assert version_id_of(ABSENT, 3) == -1
    assert version_id_of(Version(-2), 3) is None
