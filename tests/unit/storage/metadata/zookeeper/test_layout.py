"""Names of nodes, and what is in them."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.group import Sequence, Stored
from storage.metadata.keys import exact_range
from storage.metadata.operations import checked_put
from storage.metadata.store import IndexEntry, InvalidMetadataRequest, MetadataError, Version
from storage.metadata.zookeeper.address import (
    InvalidZooKeeperAddress,
    ZooKeeperAddress,
    parse_address,
)
from storage.metadata.zookeeper.layout import (
    Directory,
    Layout,
    decode_directory,
    decode_record,
    encode_record,
    encode_sequence,
    entry_of,
    record_name,
)
from storage.metadata.zookeeper.requests import Stat

LAYOUT = Layout("/root")
REFUSED = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]|//|/$|/\\.{1,2}(/|$)"
)
"""What ZooKeeper takes for no path (it counts in UTF-16)."""
STAT = Stat(5, 7, 3, 0)
PARTS = st.one_of(
    st.sampled_from(
        ["=", "=a", "^", "^,", "^3D", "|", "a|b", ".", "..", "...", "%2F", "a,b", "🙂"]
    ),
    st.text(min_size=1, max_size=8),
)


def is_key(key: str) -> bool:
    try:
        checked_put(key, b"", partition=None, expect=None, session_id=None, indexes=(), now_ms=1)
    except InvalidMetadataRequest:
        return False
    return True


@given(st.lists(PARTS, min_size=1, max_size=4), st.lists(PARTS, min_size=1, max_size=4))
def test_every_key_has_a_node_of_its_own(one: list[str], two: list[str]) -> None:
    keys = ["/" + "/".join(parts) for parts in (one, two)]
    if not all(map(is_key, keys)):
        return
    paths = [LAYOUT.record(key) for key in keys]
    assert (paths[0] == paths[1]) == (keys[0] == keys[1])
    for key, path in zip(keys, paths, strict=True):
        assert not REFUSED.search(path)
        directory, _, node = path.rpartition("/")
        assert record_name(node) == key.rpartition("/")[2]
        assert directory == LAYOUT.directory(key[: key.rfind("/") + 1])
        below = LAYOUT.directories(key[: key.rfind("/") + 1])
        assert [each.count("/") for each in below] == list(range(3, 3 + len(below)))
        assert not any(record_name(each.rpartition("/")[2]) for each in below)


@given(PARTS, PARTS, PARTS)
def test_every_index_entry_has_a_node_of_its_own(index: str, index_key: str, part: str) -> None:
    key = f"/k/{part}"
    entry = IndexEntry(index, index_key)
    try:
        checked_put(
            key, b"", partition=None, expect=None, session_id=None, indexes=(entry,), now_ms=1
        )
    except InvalidMetadataRequest:
        return
    path = LAYOUT.entry(entry, key)
    assert not REFUSED.search(path)
    bucket, _, node = path.rpartition("/")
    assert entry_of(node) == (index_key, key)
    assert LAYOUT.buckets(index, *exact_range(index_key)) == [bucket]
    assert bucket in LAYOUT.buckets(index, "a", "b")


def stored(**changes: object) -> Stored:
    entries = (IndexEntry("i", "k"), IndexEntry("j", "ü"))
    plain = Stored(Version(7), 2, 10, 20, "p", None, entries)
    return plain._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value",
    [b"", b"\n\n", b"{}", b"v" * 1_000_000, random.Random(1).randbytes(200_000)],
    ids=["empty", "lines", "json", "long", "random"],
)
@pytest.mark.parametrize("partition", [None, "p"])
def test_a_record_is_read_as_written(value: bytes, partition: str | None) -> None:
    data = encode_record(stored(partition=partition), "ab", value)
    node, found = decode_record("/a", data, STAT)
    assert (node.stored, node.life, node.node_version) == (stored(partition=partition), "ab", 3)
    assert found == value
    assert len(data) < len(value) + 300


def test_long_values_are_deflated_where_it_helps() -> None:
    assert len(encode_record(stored(), "ab", b"v" * 1_000_000)) < 10_000


def test_an_owner_makes_it_ephemeral() -> None:
    data = encode_record(stored(), "ab", b"")
    node, _ = decode_record("/a", data, Stat(5, 7, 3, 99))
    assert node.stored.session_id == 99


@pytest.mark.parametrize("data", [b"", b"text", b"{}\n", b"[]\n", b'{"life":"a"}', b"\xff\n"])
def test_invalid_record_is_refused(data: bytes) -> None:
    with pytest.raises(MetadataError):
        decode_record("/a", data, STAT)


def test_directories_are_empty_or_sequences() -> None:
    assert decode_directory("/d", b"", STAT) == Directory(3, None)
    sequence = Sequence("p", 12)
    assert decode_directory("/d", encode_sequence(sequence), STAT) == Directory(3, sequence)
    for data in (b"text", b"{}", b"[]"):
        with pytest.raises(MetadataError):
            decode_directory("/d", data, STAT)


@pytest.mark.parametrize(
    ("url", "servers", "root"),
    [
        ("zk:localhost", "localhost:2181", ""),
        ("zk:a:1,b:2", "a:1,b:2", ""),
        ("zk:a:1,b/x/y/", "a:1,b:2181", "/x/y"),
        ("zk:[::1]:5/", "[::1]:5", ""),
    ],
)
def test_addresses(url: str, servers: str, root: str) -> None:
    assert parse_address(url) == ZooKeeperAddress(servers, root)


@pytest.mark.parametrize("url", ["zk:", "zk:/x", "zk:a:1,,b", "zk:a:b", "zk:a/../x", "zk:a//x"])
def test_impossible_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidZooKeeperAddress):
        parse_address(url)
