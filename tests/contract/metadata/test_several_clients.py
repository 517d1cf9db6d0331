"""Several clients of the same records: what one did and was told is so for all the others.

Where one process has the records, the clients are one store three times.
"""

import asyncio
from collections.abc import Sequence

from storage.metadata.keys import number
from storage.metadata.store import (
    ABSENT,
    EventKind,
    IndexEntry,
    MetadataStore,
    VersionConflict,
)
from tests.contract.metadata.backends import (
    brief,
    events_until,
    next_event,
)
from tests.support.waiting import TIMEOUT_S

LONG_MS = 120_000
LEVEL = ("/n/", "/n//")
ALL = ("\x02", "\U0010ffff")

Clients = Sequence[MetadataStore]


async def test_w2_a_fresh_read_sees_what_another_client_was_told_is_done(clients: Clients) -> None:
    for n in range(12):
        writer, *readers = *clients[n % 3 :], *clients[: n % 3]
        value = str(n).encode()
        for partition in (None, "p"):
            key = f"/n/{partition}"
            indexes = [IndexEntry("i", f"{partition}-{number(n)}")]
            await writer.put(key, value, partition=partition, indexes=indexes)
            for reader in readers:
                record = await reader.get(key, partition=partition, fresh=True)
                assert record is not None
                assert record.value == value
                hits = await reader.scan_index("i", *ALL, fresh=True)
                assert indexes[0].key in [hit.index_key for hit in hits]
        for reader in readers:
            scanned = await reader.scan(*LEVEL, fresh=True)
            assert [(each.key, each.value) for each in scanned] == [
                ("/n/None", value),
                ("/n/p", value),
            ]
    await clients[0].delete("/n/None")
    for reader in clients:
        assert await reader.get("/n/None", fresh=True) is None
        assert [each.key for each in await reader.scan(*LEVEL, fresh=True)] == ["/n/p"]


async def test_every_count_of_every_client_counts(clients: Clients) -> None:
    """A condition that holds for two clients at once would lose one of their counts."""
    rounds = 15

    async def count(store: MetadataStore, key: str) -> int:
        conflicts = 0
        for _ in range(rounds):
            while True:
                record = await store.get(key, fresh=True)
                value = 0 if record is None else int(record.value)
                expect = ABSENT if record is None else record.version
                try:
                    await store.put(key, str(value + 1).encode(), expect=expect)
                    break
                except VersionConflict:
                    conflicts += 1
        return conflicts

    keys = [f"/c/{n}" for n in range(4)]
    counting = [count(store, key) for store in clients for key in keys]
    conflicts = await asyncio.wait_for(asyncio.gather(*counting), TIMEOUT_S)
    assert sum(conflicts) > 0
    for key in keys:
        record = await clients[0].get(key, fresh=True)
        assert record is not None
        assert int(record.value) == rounds * len(clients)


async def test_one_client_of_several_creates_a_record(clients: Clients) -> None:
    for n in range(20):
        puts = [
            store.put(f"/one/{n}", str(number).encode(), expect=ABSENT)
            for number, store in enumerate(clients)
        ]
        made = await asyncio.gather(*puts, return_exceptions=True)
        (winner,) = [at for at, each in enumerate(made) if not isinstance(each, BaseException)]
        assert all(isinstance(made[at], VersionConflict) for at in range(3) if at != winner)
        record = await clients[n % 3].get(f"/one/{n}", fresh=True)
        assert record is not None
        assert record.value == str(winner).encode()


async def test_scan_finds_records_that_stay_while_others_change(clients: Clients) -> None:
    staying = [f"/n/s{n:02}" for n in range(30)]
    for key in staying:
        await clients[0].put(key, b"")
    over = False

    async def come_and_go(store: MetadataStore, writer: int) -> None:
        while not over:
            await asyncio.gather(*(store.put(f"/n/{n}-{writer}", b"") for n in range(8)))
            await asyncio.gather(*(store.delete(f"/n/{n}-{writer}") for n in range(8)))

    async with asyncio.TaskGroup() as writers:
        for writer, store in enumerate(clients):
            writers.create_task(come_and_go(store, writer))
        try:
            for n in range(20):
                scanned = await clients[n % 3].scan(*LEVEL, fresh=True)
                keys = [each.key for each in scanned]
                assert keys == sorted(set(keys))
                assert [key for key in keys if key in staying] == staying
        finally:
            over = True


async def test_watchers_are_told_what_other_clients_do(clients: Clients) -> None:
    """The newest state of each key, at last; and nothing that is older than what was told."""
    watches = [store.watch_children("/n") for store in clients]
    last = 20

    async def write(store: MetadataStore, writer: int) -> None:
        for n in range(last + 1):
            await store.put(f"/n/{writer}", str(n).encode())

    await asyncio.gather(*(write(store, n) for n, store in enumerate(clients)))
    await clients[0].put("/n/gone", b"")
    await clients[1].delete("/n/gone")
    await clients[2].put("/n/last", b"")
    for watch in watches:
        seen: dict[str, bytes | None] = {}
        wanted = {f"/n/{n}": str(last).encode() for n in range(3)} | {"/n/last": b""}
        while {key: value for key, value in seen.items() if value is not None} != wanted:
            kind, key, value = brief(await next_event(watch))
            if kind is EventKind.RESYNC:
                seen = {each.key: each.value for each in await clients[0].scan(*LEVEL, fresh=True)}
                continue
            before = seen.get(key)
            if value is not None and before:
                assert int(value) >= int(before), "what was told went back"
            seen[key] = value
        watch.close()


async def test_ephemerals_of_another_client_go_with_its_session(clients: Clients) -> None:
    owner, other, third = clients
    session = await owner.open_session(timeout_ms=LONG_MS, identity="one")
    theirs = await other.open_session(timeout_ms=LONG_MS, identity="two")
    await owner.put("/n/a", b"1", session=session, indexes=[IndexEntry("i", "k")])
    await owner.put("/n/b", b"1", session=session)
    await other.put("/n/b", b"2", session=theirs)
    watch = third.watch_key("/n/a")
    assert [each.ephemeral for each in await third.scan(*LEVEL, fresh=True)] == [True, True]
    await session.close()
    await events_until(watch, lambda event: event.kind is EventKind.REMOVED)
    assert [each.key for each in await third.scan(*LEVEL, fresh=True)] == ["/n/b"]
    assert await third.scan_index("i", *ALL, fresh=True) == []
    assert not theirs.lost
    await theirs.close()
    assert await third.scan(*LEVEL, fresh=True) == []
    watch.close()


async def test_clients_number_one_sequence_together(clients: Clients) -> None:
    async def add(store: MetadataStore, writer: int) -> list[str]:
        made = [
            await store.put("/q/", f"{writer}-{n}".encode(), partition="q", sequence=True)
            for n in range(15)
        ]
        return [each.key for each in made]

    keys = await asyncio.gather(*(add(store, n) for n, store in enumerate(clients)))
    assert all(each == sorted(each) for each in keys)
    scanned = await clients[0].scan("/q/", "/q//", partition="q", fresh=True)
    by_key = {each.key: each.value for each in scanned}
    assert len(by_key) == 45
    for writer, of_one in enumerate(keys):
        assert [by_key[key] for key in of_one] == [f"{writer}-{n}".encode() for n in range(15)]
