"""Who is told: from acknowledgements, notifications and reads, in whatever order they come."""

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.keys import level_of
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.records import PROOF, SEQUENCES, SERVERS_PREFIX, ShardRecord
from storage.metadata.oxia.watch_router import WatchRouter
from storage.metadata.oxia.writes import Write
from storage.metadata.store import Event, EventKind, MetadataError
from storage.metadata.watches import WatchQueue
from tests.unit.storage.metadata.oxia.writes_of import SHARD, found, put

UPSERT, REMOVED, RESYNC = EventKind.UPSERT, EventKind.REMOVED, EventKind.RESYNC


class Shard:
    """Records that change by writes, with the notifications of each."""

    def __init__(self, *, retry_s: float = 1, max_changed: int = 100) -> None:
        self.records: dict[str, ShardRecord] = {}
        self.reads: list[str] = []
        self.failures = 0
        self.version = 0
        self.markers: list[tuple[int, str | None]] = []
        self.router = WatchRouter(
            self.read,
            lambda *each: self.markers.append(each),
            retry_s=retry_s,
            max_changed=max_changed,
        )

    def read(self, shard_id: int, key: str) -> "asyncio.Future[ShardRecord | None]":
        assert shard_id == SHARD
        self.reads.append(key)
        done: asyncio.Future[ShardRecord | None] = asyncio.get_running_loop().create_future()
        if self.failures:
            self.failures -= 1
            done.set_exception(MetadataError("not now"))
        else:
            done.set_result(self.records.get(key))
        return done

    def put(self, key: str, value: bytes = b"") -> tuple[ShardRecord, pb.NotificationBatch]:
        self.version += 1
        made = found(self.version, key=key, value=value)
        self.records[key] = made
        batch = pb.NotificationBatch(shard=SHARD, offset=self.version)
        batch.notifications[key].type = pb.KEY_MODIFIED
        batch.notifications[key].version_id = self.version
        return made, batch

    def remove(self, key: str) -> pb.NotificationBatch:
        self.records.pop(key, None)
        batch = pb.NotificationBatch(shard=SHARD)
        batch.notifications[key].type = pb.KEY_DELETED
        return batch

    def issued(self, key: str) -> Write:
        write = put(key)
        write.removals_seen = self.router.removal_count()
        return write


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def told(queue: WatchQueue) -> list[tuple[EventKind, str]]:
    events: list[Event] = []
    while queue._pending:
        events.append(queue._pending.popitem(last=False)[1])
    queue._bytes = 0
    return [(event.kind, event.key) for event in events]


async def test_own_put_is_reported_once_and_not_read() -> None:
    shard = Shard()
    watch = shard.router.watch_key("/a", None)
    write = shard.issued("/a")
    made, batch = shard.put("/a")
    shard.router.stored(write, made)
    assert told(watch) == [(UPSERT, "/a")]
    shard.router.notified(SHARD, batch)
    await settle()
    assert told(watch) == []
    assert shard.reads == []


async def test_a_put_of_others_is_read() -> None:
    shard = Shard()
    watch = shard.router.watch_level("/d/")
    _, first = shard.put("/d/a")
    _, second = shard.put("/d/a")
    _, beside = shard.put("/other")
    for batch in (first, second, beside):
        shard.router.notified(SHARD, batch)
    await settle()
    assert shard.reads == ["/d/a"]
    assert told(watch) == [(UPSERT, "/d/a")]


async def test_of_a_level_what_nobody_wants_is_not_read() -> None:
    shard, wanted = Shard(), {"/d/a"}
    watch = shard.router.watch_level("/d/", lambda key: key in wanted)
    for key in ("/d/a", "/d/b", "/other"):
        shard.router.notified(SHARD, shard.put(key)[1])
    await settle()
    assert shard.reads == ["/d/a"]
    assert told(watch) == [(UPSERT, "/d/a")]
    wanted.add("/d/b")
    for batch in (shard.put("/d/b")[1], shard.remove("/d/a")):
        shard.router.notified(SHARD, batch)
    await settle()
    assert sorted(shard.reads) == ["/d/a", "/d/a", "/d/b"]
    assert sorted(told(watch), key=str) == [(REMOVED, "/d/a"), (UPSERT, "/d/b")]


async def test_an_answer_that_comes_after_the_removal_is_not_believed() -> None:
    """Put by us, removed by another; the answer of the put is the last to arrive."""
    shard = Shard()
    watch = shard.router.watch_key("/a", None)
    write = shard.issued("/a")
    made, put_batch = shard.put("/a")
    removed = shard.remove("/a")
    shard.router.notified(SHARD, put_batch)
    shard.router.notified(SHARD, removed)
    shard.router.stored(write, made)
    await settle()
    assert told(watch) == [(REMOVED, "/a")]


async def test_removal_before_an_own_put_is_not_reported() -> None:
    shard = Shard()
    watch = shard.router.watch_key("/a", None)
    removed = shard.remove("/a")
    write = shard.issued("/a")
    made, batch = shard.put("/a")
    shard.router.stored(write, made)
    shard.router.notified(SHARD, removed)
    shard.router.notified(SHARD, batch)
    await settle()
    assert told(watch) == [(UPSERT, "/a")]


async def test_newer_read_record_hides_older_notifications() -> None:
    shard = Shard()
    watch = shard.router.watch_key("/a", None)
    _, first = shard.put("/a", b"1")
    newest, second = shard.put("/a", b"2")
    shard.router.observe(newest)
    shard.router.notified(SHARD, first)
    shard.router.notified(SHARD, second)
    await settle()
    assert told(watch) == [(UPSERT, "/a")]
    assert shard.reads == []
    shard.router.missing(SHARD, "/a", shard.router.change_count())
    assert told(watch) == [(REMOVED, "/a")]
    shard.router.missing(SHARD, "/never", shard.router.change_count())


async def test_a_read_of_before_the_put_removes_nothing() -> None:
    """It found nothing, and its answer is seen after that of the put: the key is read again."""
    shard = Shard()
    watch = shard.router.watch_key("/a", None)
    since = shard.router.change_count()
    write = shard.issued("/a")
    made, batch = shard.put("/a", b"1")
    shard.router.stored(write, made)
    shard.router.missing(SHARD, "/a", since)
    assert told(watch) == [(UPSERT, "/a")]
    await settle()
    assert shard.reads == ["/a"]
    shard.router.notified(SHARD, batch)
    await settle()
    assert told(watch) == []
    shard.remove("/a")
    shard.router.missing(SHARD, "/a", since)
    await settle()
    assert told(watch) == [(REMOVED, "/a")]


async def test_gap_resyncs_watchers_and_later_changes_arrive() -> None:
    """Whatever was known of it before, also if versions count anew."""
    shard = Shard()
    level, key = shard.router.watch_level("/"), shard.router.watch_key("/a", None)
    shard.router.observe(shard.put("/a")[0])
    shard.router.gap(SHARD)
    assert told(level) == told(key) == [(RESYNC, "")]
    shard.version = 0
    shard.router.notified(SHARD, shard.put("/a")[1])
    await settle()
    assert told(level) == told(key) == [(UPSERT, "/a")]
    shard.router.notified(SHARD, shard.remove("/a"))
    await settle()
    assert told(level) == told(key) == [(REMOVED, "/a")]
    assert shard.markers == [(SHARD, None)]


async def test_a_failed_read_is_tried_again() -> None:
    shard = Shard(retry_s=0.001)
    watch = shard.router.watch_key("/a", None)
    shard.failures = 2
    shard.router.notified(SHARD, shard.put("/a")[1])
    event = await asyncio.wait_for(anext(watch), 10)
    assert (event.kind, len(shard.reads)) == (UPSERT, 3)


async def test_too_many_changes_become_a_gap() -> None:
    shard = Shard(max_changed=5)
    watch = shard.router.watch_level("/d/")
    for n in range(7):
        shard.router.notified(SHARD, shard.put(f"/d/{n}")[1])
    await settle()
    assert told(watch) == [(RESYNC, "")]


async def test_markers_and_proofs_are_nobodys_records() -> None:
    shard = Shard()
    keys = (PROOF, f"{SEQUENCES}x", f"{SERVERS_PREFIX}session/7")
    watches = [shard.router.watch_level(level_of(key)) for key in keys]
    for key in keys:
        shard.router.notified(SHARD, shard.put(key)[1])
    await settle()
    assert shard.reads == []
    assert [told(watch) for watch in watches] == [[], [], []]
    assert shard.markers == [(SHARD, f"{SEQUENCES}x")]


async def test_a_range_that_was_deleted_is_a_gap() -> None:
    shard = Shard()
    watch = shard.router.watch_key("/a", None)
    batch = pb.NotificationBatch(shard=SHARD)
    batch.notifications["/"].type = pb.KEY_RANGE_DELETED
    shard.router.notified(SHARD, batch)
    assert told(watch) == [(RESYNC, "")]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "remove", "answer", "notify", "read", "ask", "hear", "turn"]),
        st.sampled_from(["/d/a", "/d/b"]),
    ),
    max_size=40,
)


class Replay:
    """What watchers have made of what they were told, and what is still on its way to them."""

    def __init__(self) -> None:
        self.shard = Shard()
        self.level: dict[str, int] = {}
        self.record: dict[str, int] = {}
        self._children = self.shard.router.watch_level("/d/")
        self._record = self.shard.router.watch_key("/d/a", None)
        self._answers: list[Callable[[], None]] = []
        self._notices: list[pb.NotificationBatch] = []
        self._asked: list[tuple[str, int]] = []

    def mirror(self) -> None:
        for queue, state in ((self._children, self.level), (self._record, self.record)):
            while queue._pending:
                event = queue._pending.popitem(last=False)[1]
                if event.record is not None:
                    state[event.key] = event.record.version
                else:
                    state.pop(event.key, None)

    def step(self, kind: str, key: str) -> None:
        shard, router = self.shard, self.shard.router
        if kind == "put":
            write = shard.issued(key)
            made, batch = shard.put(key)
            self._answers.append(lambda: router.stored(write, made))
            self._notices.append(batch)
        elif kind == "remove" and key in shard.records:
            self._notices.append(shard.remove(key))
        elif kind == "answer" and self._answers:
            self._answers.pop(0)()
        elif kind == "notify" and self._notices:
            router.notified(SHARD, self._notices.pop(0))
        elif kind == "read":
            record = shard.records.get(key)
            if record is None:
                router.missing(SHARD, key, router.change_count())
            else:
                router.observe(record)
        elif kind == "ask" and key not in shard.records:
            self._asked.append((key, router.change_count()))
        elif kind == "hear" and self._asked:
            router.missing(SHARD, *self._asked.pop(0))

    def finish(self) -> None:
        for kind, waiting in (
            ("answer", self._answers),
            ("notify", self._notices),
            ("hear", self._asked),
        ):
            while waiting:
                self.step(kind, "")


@given(STEPS)
def test_watchers_end_with_what_is_stored(steps: list[tuple[str, str]]) -> None:
    """Answers, notifications (in order) and reads come whenever they like."""

    async def run() -> None:
        replay = Replay()
        for kind, key in steps:
            replay.step(kind, key)
            if kind == "turn":
                await settle()
            replay.mirror()
        replay.finish()
        await settle()
        replay.mirror()
        records = replay.shard.records
        wanted = {key: each.record.version for key, each in records.items()}
        assert replay.level == wanted
        assert replay.record == {key: wanted[key] for key in wanted if key == "/d/a"}
        replay.shard.router.close()

    asyncio.run(run())
