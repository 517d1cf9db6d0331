"""All writes once, in order, whatever happens to the connection and whoever else writes."""

import asyncio
from random import Random

import pytest

from storage.metadata.store import (
    ABSENT,
    IndexEntry,
    InvalidMetadataRequest,
    MetadataError,
    PutResult,
    SessionLost,
    Version,
    VersionConflict,
)
from storage.metadata.zookeeper.layout import decode
from storage.metadata.zookeeper.pipeline import WritePipeline
from storage.metadata.zookeeper.requests import Done, Request, Stat, Value
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S
from tests.unit.storage.metadata.zookeeper.pipelines import (
    LAYOUT,
    FakeSession,
    add,
    delete,
    fresh_tree,
    owners,
    pipeline,
    put,
    stored,
)

KEYS = ("/a", "/b", "/a/x", "/a/y", "/c/d/e")


class Model:
    """What the writes of one process come to, one after the other."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[bytes, int]] = {}
        self.numbers = 0

    def put(self, key: str, value: bytes, absent: bool) -> object:
        if absent and key in self.rows:
            return VersionConflict
        count = self.rows[key][1] + 1 if key in self.rows else 0
        self.rows[key] = (value, count)
        return (key, count)

    def delete(self, key: str) -> object:
        return self.rows.pop(key, None) is not None

    def add(self, prefix: str, value: bytes) -> object:
        self.numbers += 1
        key = f"{prefix}-{self.numbers:020}"
        self.rows[key] = (value, 0)
        return (key, 0)


def brief(outcome: object) -> object:
    if isinstance(outcome, PutResult):
        return (outcome.key, outcome.modifications)
    return type(outcome) if isinstance(outcome, Exception) else outcome


async def test_an_update_writes_no_index_entry_that_stays() -> None:
    tree = fresh_tree()
    stays, goes, comes = (IndexEntry("i", key) for key in ("stays", "goes", "comes"))
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        await writes.submit(put("/a", b"1", indexes=(stays, goes)), None)
        await writes.submit(put("/a", b"2", indexes=(stays, comes)), None)
    entries = {entry: tree.nodes.get(LAYOUT.entry(entry, "/a")) for entry in (stays, goes, comes)}
    assert [entry.key for entry, node in entries.items() if node is not None] == ["stays", "comes"]
    kept = entries[stays]
    assert kept is not None
    assert (kept.version, kept.mzxid) == (0, kept.czxid)


@pytest.mark.parametrize("seed", range(60))
async def test_outcomes_are_those_of_one_after_the_other(seed: int) -> None:
    """Also when connections break at every point: nothing is lost, doubled or out of order."""
    rng = Random(seed)
    rate = (0, 0.1, 0.3)[seed % 3]
    tree, model = fresh_tree(), Model()
    expected: list[object] = []
    futures: list[asyncio.Future[PutResult | bool]] = []
    async with (
        asyncio.timeout(TIMEOUT_S),
        pipeline(tree, seed, lambda: "break" if rng.random() < rate else "") as (writes, client),
    ):
        for number in range(150):
            key, value = rng.choice(KEYS), str(number).encode()
            match rng.randrange(5):
                case 0:
                    futures.append(writes.submit(delete(key), None))
                    expected.append(model.delete(key))
                case 1:
                    futures.append(writes.submit(add("/s/", value), None))
                    expected.append(model.add("/s/", value))
                case 2:
                    futures.append(writes.submit(put(key, value, ABSENT), None))
                    expected.append(model.put(key, value, absent=True))
                case _:
                    indexes = (IndexEntry("i", rng.choice("xyz")),) * rng.randrange(2)
                    futures.append(writes.submit(put(key, value, None, indexes), None))
                    expected.append(model.put(key, value, absent=False))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [brief(each) for each in outcomes] == expected
        assert stored(tree) == model.rows
        assert client.broken or rate < 0.3


@pytest.mark.parametrize("seed", range(20))
async def test_sessions_that_expire_leave_no_wrong_answer(seed: int) -> None:
    """What is told to be stored is; what is told to be unknown may be; and nothing is doubled."""
    rng = Random(seed)
    tree = fresh_tree()
    async with (
        asyncio.timeout(TIMEOUT_S),
        pipeline(tree, seed, lambda: "expire" if rng.random() < 0.1 else "") as (writes, _),
    ):
        futures = []
        for number in range(200):
            key = f"/k/{number}" if rng.random() < 0.5 else "/k/hot"
            futures.append((key, number, writes.submit(put(key, str(number).encode()), None)))
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.wait([future for _, _, future in futures])
        rows = stored(tree)
        unknown = 0
        hot: list[int] = []
        for key, number, future in futures:
            error = future.exception()
            unknown += error is not None
            if error is not None:
                assert isinstance(error, MetadataError)
                assert "unknown" in str(error)
            elif key == "/k/hot":
                hot.append(number)
            else:
                assert rows[key] == (str(number).encode(), 0)
        assert len(hot) - 1 <= rows["/k/hot"][1] <= len(hot) + unknown - 1
        assert int(rows["/k/hot"][0]) >= max(hot)


@pytest.mark.parametrize("seed", range(10))
async def test_two_processes_lose_no_increment(seed: int) -> None:
    rng = Random(seed)
    tree = fresh_tree()

    def breaks() -> str:
        return "break" if rng.random() < 0.03 else ""

    async with (
        asyncio.timeout(TIMEOUT_S),
        pipeline(tree, seed, breaks) as (one, _),
        pipeline(tree, seed + 1000, breaks) as (two, _),
    ):
        await one.submit(put("/counter", b"0"), None)

        async def increment(writes: WritePipeline) -> None:
            while True:
                node = tree.nodes["/records/=counter"]
                stat = Stat(node.czxid, node.mzxid, node.version, node.owner)
                record = decode("/counter", node.data, stat)
                value = str(int(record.value) + 1).encode()
                await asyncio.sleep(0)
                try:
                    await writes.submit(put("/counter", value, record.version), None)
                except VersionConflict:
                    continue
                return

        added = [writes.submit(add("/s/", b""), None) for writes in (one, two) * 20]
        await asyncio.gather(*(increment(writes) for writes in (one, two) * 10))
        made = await asyncio.gather(*added)
        rows = stored(tree)
        assert rows["/counter"] == (b"20", 20)
        keys = [each.key for each in made if isinstance(each, PutResult)]
        assert len(set(keys)) == 40
        assert set(keys) == {key for key in rows if key.startswith("/s/")}
        for process in (keys[::2], keys[1::2]):
            assert process == sorted(process)


async def test_a_write_that_others_always_come_before_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_TRIES", 3)
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, client):
        await writes.submit(put("/a", b"1"), None)
        apply = tree.apply

        def meddle(request: Request, session: int) -> Value:
            if type(request).__name__ == "_Multi":
                tree.nodes["/records/=a"].version += 1
            return apply(request, session)

        monkeypatch.setattr(tree, "apply", meddle)
        with pytest.raises(MetadataError, match="nothing was stored"):
            await writes.submit(put("/a", b"2"), None)
        monkeypatch.undo()
        assert not client.broken
        await writes.submit(put("/a", b"3"), None)
        assert stored(tree)["/a"] == (b"3", 1)


async def test_a_guard_that_is_used_up_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "LAST_NODE_VERSION", 5, in_module="storage.metadata.zookeeper.guard")
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        for number in range(30):
            await writes.submit(put("/a", str(number).encode()), None)
        assert stored(tree)["/a"] == (b"29", 29)
        assert len(tree.children("/writers")) > 1


async def test_a_key_of_a_sequence_level_is_refused_by_another_process() -> None:
    """The other one does not know of the sequence, and must find out."""
    tree = fresh_tree()
    async with (
        asyncio.timeout(TIMEOUT_S),
        pipeline(tree, 1) as (one, _),
        pipeline(tree, 2) as (two, _),
    ):
        await two.submit(put("/s/below/it", b""), None)
        await one.submit(add("/s/", b""), None)
        with pytest.raises(InvalidMetadataRequest):
            await two.submit(put("/s/other", b"", ABSENT), None)
        assert (await two.submit(add("/s/", b""), None)) == PutResult(
            f"/s/-{2:020}", Version(tree.zxid), 0
        )


async def test_empty_directories_go_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "ZOOKEEPER_PRUNE_S", 0)
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        for _ in range(3):
            await writes.submit(put("/a/b/c", b"1"), None)
            await writes.submit(add("/q/s/", b"1"), None)
            await writes.submit(delete("/a/b/c"), None)
            while "/records/a" in tree.nodes:
                await asyncio.sleep(0)
        assert "/records/q/s" in tree.nodes


async def test_closing_the_pipeline_answers_waiting_writes() -> None:
    tree = fresh_tree()
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        last = writes.submit(put("/a", b"1"), None)
    assert isinstance(await last, PutResult)
    with pytest.raises(MetadataError):
        await writes.submit(put("/a", b"2"), None)


async def test_ephemeral_records_belong_to_their_session_and_change_hands() -> None:
    tree = fresh_tree()
    lanes = [FakeSession(tree), FakeSession(tree)]
    entries = (IndexEntry("i", "k"),)
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, client):
        outcomes = await asyncio.gather(
            writes.submit(put("/e", b"0", None, entries), None),
            writes.submit(lanes[0].put("/e", b"1", entries), lanes[0]),
            writes.submit(put("/p", b"0"), None),
            writes.submit(lanes[1].put("/e", b"2", entries), lanes[1]),
            writes.submit(lanes[1].put("/e", b"3", entries), lanes[1]),
        )
        assert [brief(each) for each in outcomes] == [
            ("/e", 0),
            ("/e", 1),
            ("/p", 0),
            ("/e", 2),
            ("/e", 3),
        ]
        assert owners(tree, "=e") == owners(tree, "^,|e") == {lanes[1].connection.session}
        assert stored(tree) == {"/e": (b"3", 3), "/p": (b"0", 0)}
        tree.expire(lanes[1].connection.session)
        assert stored(tree) == {"/p": (b"0", 0)}
        await writes.submit(lanes[0].put("/e", b"4", entries), lanes[0])
        await writes.submit(put("/e", b"5", None, entries), None)
        assert owners(tree, "=e") == owners(tree, "^,|e") == {0}
        assert not client.broken


async def test_a_cancelled_write_of_a_session_takes_no_other_along() -> None:
    tree = fresh_tree()
    lane = FakeSession(tree)

    def refuse(request: Request, done: Done) -> None:
        raise AssertionError("it went through the session")

    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        cancelled = writes.submit(lane.put("/e", b"1"), lane)
        other = writes.submit(put("/p", b"0"), None)
        cancelled.cancel()
        lane.connection.submit = refuse  # type: ignore[method-assign]
        await other
        assert stored(tree) == {"/p": (b"0", 0)}


async def test_a_lost_session_puts_nothing() -> None:
    tree = fresh_tree()
    lane = FakeSession(tree)
    async with asyncio.timeout(TIMEOUT_S), pipeline(tree, 1) as (writes, _):
        waiting = writes.submit(lane.put("/e", b"1"), lane)
        lane.lost = True
        with pytest.raises(SessionLost):
            await waiting
        assert stored(tree) == {}
