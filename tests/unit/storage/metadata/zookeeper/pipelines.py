"""Write pipelines on a ZooKeeper in memory, the writes for them, and what they stored."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import cast

from storage.metadata.operations import (
    Delete,
    Put,
    SequencePut,
    checked_delete,
    checked_put,
    checked_sequence_put,
)
from storage.metadata.store import (
    IndexEntry,
    Version,
)
from storage.metadata.zookeeper.client import ZooKeeperClient
from storage.metadata.zookeeper.layout import Layout, decode, entry_of, record_name
from storage.metadata.zookeeper.pipeline import WritePipeline
from storage.metadata.zookeeper.requests import Stat
from tests.unit.storage.metadata.zookeeper.fake_zookeeper import FakeClient, FakeTree

LAYOUT = Layout("")


def fresh_tree() -> FakeTree:
    tree = FakeTree()
    tree.make(LAYOUT.fixed_nodes())
    return tree


@asynccontextmanager
async def pipeline(
    tree: FakeTree, seed: int, breaks: Callable[[], str] = str
) -> AsyncIterator[tuple[WritePipeline, FakeClient]]:
    rng = Random(seed)
    client = FakeClient(tree, rng, breaks)
    writes = WritePipeline(cast("ZooKeeperClient", client), LAYOUT, rng, "test")
    client.on_change = writes.connection_changed
    await writes.open()
    try:
        yield writes, client
    finally:
        await writes.close()


def put(
    key: str, value: bytes, expect: Version | None = None, indexes: tuple[IndexEntry, ...] = ()
) -> Put:
    return checked_put(
        key,
        value,
        partition=None,
        expect=expect,
        session_id=None,
        indexes=indexes,
        now_ms=1,
    )


class FakeSession:
    """A session, on another connection to the same tree."""

    def __init__(self, tree: FakeTree) -> None:
        self.connection = FakeClient(tree, Random(1))
        self.client = cast("ZooKeeperClient", self.connection)
        self.lost = False

    def put(self, key: str, value: bytes, indexes: tuple[IndexEntry, ...] = ()) -> Put:
        return checked_put(
            key,
            value,
            partition=None,
            expect=None,
            session_id=self.connection.session,
            indexes=indexes,
            now_ms=1,
        )


def owners(tree: FakeTree, part: str) -> set[int]:
    """Sessions that hold the nodes with this in their path."""
    return {node.owner for path, node in tree.nodes.items() if part in path}


def add(prefix: str, value: bytes) -> SequencePut:
    return checked_sequence_put(
        prefix, value, partition="p", expect=None, session_id=None, indexes=(), now_ms=1
    )


def delete(key: str, expect: Version | None = None) -> Delete:
    return checked_delete(key, partition=None, expect=expect)


def stored(tree: FakeTree) -> dict[str, tuple[bytes, int]]:
    """Value and count of every record; checks lives and index entries against them."""
    found = {}
    lives, entries = set(), set()
    for path, node in tree.nodes.items():
        directory, _, name = path.rpartition("/")
        if path.startswith("/records/") and record_name(name) is not None:
            key = f"{directory.removeprefix('/records')}/{record_name(name)}"
            stat = Stat(node.czxid, node.mzxid, node.version, node.owner)
            record = decode(key, node.data, stat)
            found[key] = (record.value, record.modifications)
            header = node.data.partition(b"\n")[0]
            lives.add(header.partition(b'"life":"')[2][:24].decode())
            if b'"indexes"' in header:
                entries.add(key)
    assert {
        path.rpartition("/")[2]
        for path in tree.nodes
        if path.startswith("/lives/") and path[8:9] and path.count("/") == 3
    } == lives
    indexed = {
        entry[1]
        for path in tree.nodes
        if path.startswith("/indexes/") and (entry := entry_of(path.rpartition("/")[2]))
    }
    assert indexed == entries
    return found
