"""Runs over streams in memory: what is kept, what a crash leaves, and what readers would get."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from broker.topics.compaction.run import EntriesChanged, compact
from magnetar.compression import CompressionType
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.message import parse_metadata
from storage.ledger.store import LedgerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.ledger import ManagedLedger
from storage.managed_ledger.types import Entry
from tests.unit.broker.topics.compaction.made_entries import Message, batch, read_entry, single
from tests.unit.storage.managed_ledger.crashes import crash_at_each_step
from tests.unit.storage.managed_ledger.fakes import World, contents, settle

ABORTED = 7


class Topic:
    """A topic that is nothing but its ledger; transaction ABORTED was aborted."""

    def __init__(self, ledger: ManagedLedger) -> None:
        self.ledger = ledger
        self.horizon: Position | None = None

    def max_read_position(self) -> Position:
        return self.horizon or self.ledger.last_confirmed

    def is_aborted(self, entry: Entry) -> bool:
        return parse_metadata(entry.data).txnid_least_bits == ABORTED


async def store(ledger: ManagedLedger, *entries: bytes) -> None:
    for data in entries:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ledger.append(data, lambda *_, to=done: to.set_result(None))
        await done


async def prepared(world: World) -> Topic:
    ledger = await world.open()
    await ledger.open_cursor(COMPACTION_CURSOR, EARLIEST)
    return Topic(ledger)


async def values(ledger: ManagedLedger) -> dict[str, bytes]:
    """The value of each key, as a reader of the compacted topic finds it."""
    found: dict[str, bytes] = {}
    compacted, start = ledger.compaction.use(), EARLIEST
    if compacted is not None and ledger.compaction.horizon is not None:
        for entry in await compacted.read(EARLIEST, max_entries=999, max_bytes=10**6):
            _take(found, entry)
        compacted_to = ledger.compaction.horizon
        ledger.compaction.leave(compacted)
        start = ledger.next_position(compacted_to)
    for entry in await contents(ledger):
        if entry.position >= start and not _is_aborted(entry):
            _take(found, entry)
    return found


def _is_aborted(entry: Entry) -> bool:
    return parse_metadata(entry.data).txnid_least_bits == ABORTED


def _take(found: dict[str, bytes], entry: Entry) -> None:
    for _, (key, value) in read_entry(entry.data):
        if key is not None:
            found.pop(key, None)
            if value:
                found[key] = value


async def test_a_run_keeps_the_newest_up_to_the_max_read_position() -> None:
    world = World()
    topic = await prepared(world)
    ledger = topic.ledger
    await store(ledger, *(single(Message(f"k{n % 4}", b"v%d" % n)) for n in range(20)))
    await store(ledger, batch([Message("k0", b"b0"), Message(None, b"x"), Message("k1", b"")]))
    await store(ledger, single(Message("k2", b"aborted"), txn=ABORTED))
    end = ledger.last_confirmed
    await store(ledger, single(Message("k3", b"beyond")))
    topic.horizon = end
    counts = await compact(topic, None)
    assert counts.read == 24
    assert counts.removed == 21
    assert ledger.compaction.horizon == end
    compacted = ledger.compaction.use()
    assert compacted is not None
    found = await compacted.read(EARLIEST, max_entries=99, max_bytes=10**6)
    assert [read_entry(entry.data) for entry in found] == [
        [(0, Message("k2", b"v18"))],
        [(0, Message("k3", b"v19"))],
        [(0, Message("k0", b"b0"))],
    ]
    assert [entry.position.entry_id for entry in found] == [8, 9, 0]
    assert await values(ledger) == {"k0": b"b0", "k2": b"v18", "k3": b"beyond"}
    # Nothing new: nothing is done.
    assert (await compact(topic, None)).read == 0


async def test_large_batches_are_compacted_too() -> None:
    world = World()
    topic = await prepared(world)
    for word in (b"old", b"new"):
        many = [Message(f"k{n}", b"%s%d" % (word, n)) for n in range(3000)]
        await store(topic.ledger, batch(many, CompressionType.ZLIB))
    await store(topic.ledger, batch([Message("k7", b"newest")]))
    counts = await compact(topic, None)
    assert counts.removed == 3001
    found = await values(topic.ledger)
    assert len(found) == 3000
    assert (found["k7"], found["k2999"]) == (b"newest", b"new2999")


async def test_a_crash_at_each_step_changes_no_value() -> None:
    expected: dict[str, bytes] = {}

    async def prepare(world: World, ledger: ManagedLedger) -> None:
        await ledger.open_cursor(COMPACTION_CURSOR, EARLIEST)
        await store(ledger, *(single(Message(f"k{n % 3}", b"v%d" % n)) for n in range(12)))
        await compact(Topic(ledger), None)
        await store(ledger, *(single(Message(f"k{n % 2}", b"w%d" % n)) for n in range(12)))
        await store(ledger, single(Message("k2", b"")))
        expected.update(await values(ledger))

    async def check(world: World, ledger: ManagedLedger, finished: bool, step: int) -> None:
        assert await values(ledger) == expected
        # What is left can be compacted.
        await compact(Topic(ledger), None)
        await settle()
        assert await values(ledger) == expected
        assert ledger.cursors[COMPACTION_CURSOR].backlog == 0

    await crash_at_each_step(prepare, lambda ledger: compact(Topic(ledger), None), check)
    assert expected == {"k0": b"w10", "k1": b"w11"}


async def test_a_failed_run_leaves_the_old_ledger_alone() -> None:
    world = World()
    topic = await prepared(world)
    await store(topic.ledger, *(single(Message(f"k{n}", b"v")) for n in range(5)))
    await compact(topic, None)
    before = await world.ledgers.list_ledgers()
    await store(topic.ledger, single(Message("k9", b"v")))
    world.ledgers.fail("close", LedgerError("the test says no"))
    with pytest.raises(LedgerError):
        await compact(topic, None)
    await settle()
    assert set(before) <= set(await world.ledgers.list_ledgers())
    assert len(await world.ledgers.list_ledgers()) == len(before)
    assert set(await values(topic.ledger)) == {"k0", "k1", "k2", "k3", "k4", "k9"}
    await compact(topic, None)
    assert topic.ledger.compaction.horizon == topic.ledger.last_confirmed


async def test_entries_that_vanish_between_the_passes_fail_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    topic = await prepared(world)
    await store(topic.ledger, *(single(Message(f"k{n}", b"v")) for n in range(5)))
    begin = topic.ledger.compaction.begin

    async def lose_some() -> object:
        made = await begin()
        monkeypatch.setattr("broker.topics.compaction.run._Source.parts", lambda _: _nothing())
        return made

    monkeypatch.setattr(type(topic.ledger.compaction), "begin", lambda _: lose_some())
    with pytest.raises(EntriesChanged):
        await compact(topic, None)
    assert topic.ledger.compaction.horizon is None


async def _nothing() -> AsyncIterator[list[Entry]]:
    entries: tuple[list[Entry], ...] = ()
    for each in entries:
        yield each
