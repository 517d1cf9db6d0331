"""Scans of indexes while what is scanned changes in each try."""

from collections.abc import Callable
from random import Random
from typing import cast

import pytest

from storage.metadata.keys import number
from storage.metadata.store import IndexEntry, IndexHit, is_cut
from storage.metadata.zookeeper.client import ZooKeeperClient
from storage.metadata.zookeeper.record_reader import RecordReader
from storage.metadata.zookeeper.requests import Answer, Request, _MultiRead
from tests.unit.storage.metadata.zookeeper.fake_zookeeper import FakeClient, FakeTree
from tests.unit.storage.metadata.zookeeper.pipelines import LAYOUT, fresh_tree, pipeline, put

RANGE = ("\x02", "\U0010ffff")


class ChangingClient(FakeClient):
    """Something changes before each read of many nodes."""

    def __init__(self, tree: FakeTree, change: Callable[[], None]) -> None:
        super().__init__(tree, Random(1))
        self._change = change

    def _answer(self, request: Request) -> Answer:
        if isinstance(request, _MultiRead):
            self._change()
        return super()._answer(request)


def remove(tree: FakeTree, key: str, index_keys: list[str]) -> None:
    del tree.nodes[LAYOUT.record(key)]
    for index_key in index_keys:
        del tree.nodes[LAYOUT.entry(IndexEntry("i", index_key), key)]


async def stored_tree(records: dict[str, list[str]]) -> FakeTree:
    """Records of ten bytes, with these keys in the index."""
    tree = fresh_tree()
    async with pipeline(tree, 1) as (writes, _):
        for key, index_keys in records.items():
            entries = tuple(IndexEntry("i", each) for each in index_keys)
            await writes.submit(put(key, b"v" * 10, indexes=entries), None)
    return tree


async def scan(client: FakeClient, limit: int | None, max_bytes: int | None) -> list[IndexHit]:
    reader = RecordReader(cast("ZooKeeperClient", client), LAYOUT)
    return await reader.scan_index(
        "i", *RANGE, partition=None, fresh=True, limit=limit, max_bytes=max_bytes
    )


@pytest.mark.parametrize(("limit", "max_bytes"), [(10, None), (10, 1000), (None, 100), (12, 100)])
@pytest.mark.parametrize("going", [5, 20, 35])
async def test_w10_limited_scan_is_not_taken_for_the_end_while_records_are_deleted(
    limit: int | None, max_bytes: int | None, going: int
) -> None:
    """One goes before each read, the first ones first: whatever is read, it is read too late."""
    records = {f"/n/{n:02}": [number(n)] for n in range(60)}
    tree = await stored_tree(records)
    goes = iter([(key, records[key]) for key in list(records)[:going]])

    def one_goes() -> None:
        for key, index_keys in goes:
            remove(tree, key, index_keys)
            break

    hits = await scan(ChangingClient(tree, one_goes), limit, max_bytes)
    assert is_cut(hits, limit, max_bytes)
    stay = [f"/n/{n:02}" for n in range(going, 60)]
    found = [hit.record.key for hit in hits]
    assert [key for key in stay if key <= found[-1]] == [key for key in found if key in stay]


async def test_limited_scan_omits_nothing_before_its_last_hit() -> None:
    """A record is read for its first key, and has one further on: that is not the next hit."""
    records = {f"/n/{n:02}": [number(n)] for n in range(1, 30)}
    tree = await stored_tree({"/n/00": [number(0), number(99)], **records})
    goes = iter(list(records.items())[:9])

    def one_goes() -> None:
        for key, index_keys in goes:
            remove(tree, key, index_keys)
            break

    hits = await scan(ChangingClient(tree, one_goes), 10, None)
    found = [hit.index_key for hit in hits]
    assert len(found) == 10
    assert [number(n) for n in range(10, 19)] == [key for key in found if key >= number(10)]
