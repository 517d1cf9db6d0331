"""Segments planned and read without a subscription, in bulk and as every reader reads."""

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

import magnetar
from magnetar.compression import CompressionType
from magnetar.errors import AlreadyClosed, InvalidArgument, NotSupported, TopicNotFound
from magnetar.layout import Segment
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.reads import (
    MessageColumns,
    StoredEntry,
    Visibility,
    message_ids,
    take_apart,
    take_pieces,
)
from magnetar.reads.plan import PlanLimits
from magnetar.reads.reader_fallback import plan_by_reader, read_by_reader
from tests.client.conftest import MakeTopic
from tests.support.child_process import once_it_is

bulk = pytest.mark.magnetar_only("Apache Pulsar has no reads of segments")
Reading = AsyncGenerator[list[StoredEntry], None]
Read = Callable[[magnetar.Client, str, Position, Position], Reading]


def in_bulk(client: magnetar.Client, topic: str, start: Position, end: Position) -> Reading:
    return client.read_range(topic, start, end)


def as_readers_do(client: magnetar.Client, topic: str, start: Position, end: Position) -> Reading:
    return read_by_reader(client.context, topic, start, end, 1024 * 1024)


both = pytest.mark.parametrize("read", [in_bulk, as_readers_do])


async def only_segment(client: magnetar.Client, topic: object) -> Segment:
    layout = await client.layout(str(topic))
    (segment,) = layout.active
    return segment


async def all_of(reading: Reading) -> list[StoredEntry]:
    async with asyncio.timeout(20):
        return [entry async for entries in reading for entry in entries]


def columns_of(entries: list[StoredEntry]) -> MessageColumns:
    columns = MessageColumns()
    for entry in entries:
        take_apart(entry, columns)
    return columns


async def test_a_layout_is_told(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(2)
    layout = await client.layout(made.name)
    assert [each.segment_id for each in layout.active] == [0, 1]
    await made.split(0)
    layout = await client.layout(made.name)
    assert {each.segment_id for each in layout.sealed} == {0}
    assert {each.segment_id for each in layout.active} == {1, 2, 3}


async def test_a_layout_makes_no_topic(client: magnetar.Client) -> None:
    for _ in range(2):
        with pytest.raises(TopicNotFound):
            await client.layout("topic://public/default/nobody-made-this")


@both
async def test_sent_messages_are_read(
    client: magnetar.Client, topic: MakeTopic, read: Read
) -> None:
    name = str(await topic())
    async with client.producer(name, compression=CompressionType.ZSTD) as producer:
        sent = [
            producer.send_nowait(
                b"%d" % n,
                key=f"k{n % 7}",
                properties={"n": str(n)} if n % 2 else None,
                event_time_ms=1_700_000_000_000 + n,
            )
            for n in range(500)
        ]
        ids = [await each for each in sent]
    segment = await only_segment(client, name)
    plan = await client.plan_range(segment.topic)
    entries = await all_of(read(client, segment.topic, plan.start, plan.horizon))
    columns = columns_of(entries)
    # Each key has its order; keys of other entry buckets come in other batches.
    stored = [int(value or b"") for value in columns.values]
    assert [[n for n in stored if n % 7 == key] for key in range(7)] == [
        list(range(key, 500, 7)) for key in range(7)
    ]
    assert columns.keys == [f"k{n % 7}" for n in stored]
    assert columns.event_times_ms == [1_700_000_000_000 + n for n in stored]
    assert columns.properties == {at: (("n", str(n)),) for at, n in enumerate(stored) if n % 2}
    read_ids = [
        magnetar.MessageId.from_bytes(each) for each in message_ids(columns, segment.segment_id)
    ]
    places = [(ids[n].entry.key, ids[n].entry.batch_index) for n in stored]
    assert [(each.entry.key, each.entry.batch_index) for each in read_ids] == places
    assert all(each.visibility is Visibility.READABLE for each in entries)


@both
async def test_a_part_is_read_and_then_the_rest(
    client: magnetar.Client, topic: MakeTopic, read: Read
) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        for n in range(10):
            await producer.send(b"%d" % n)
    segment = await only_segment(client, name)
    plan = await client.plan_range(segment.topic)
    begin = plan.start
    middle = Position(begin.ledger_id, begin.entry_id + 4)
    first = await all_of(read(client, segment.topic, begin, middle))
    assert columns_of(first).values == [b"0", b"1", b"2", b"3"]
    assert first[-1].next_position == middle
    rest = await all_of(read(client, segment.topic, middle, LATEST))
    assert columns_of(rest).values == [b"%d" % n for n in range(4, 10)]
    assert await all_of(read(client, segment.topic, middle, middle)) == []
    assert await all_of(read(client, segment.topic, plan.horizon, LATEST)) == []


@both
async def test_an_empty_segment(client: magnetar.Client, topic: MakeTopic, read: Read) -> None:
    segment = await only_segment(client, await topic())
    plan = await client.plan_range(segment.topic)
    assert plan.start == plan.end == plan.horizon == plan.raw_end
    assert await all_of(read(client, segment.topic, EARLIEST, LATEST)) == []


@both
async def test_more_than_one_answer(client: magnetar.Client, topic: MakeTopic, read: Read) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        await asyncio.gather(*(producer.send(bytes([n]) * 100_000) for n in range(60)))
    segment = await only_segment(client, name)
    entries = await all_of(read(client, segment.topic, EARLIEST, LATEST))
    assert sorted(value[0] for value in columns_of(entries).values if value) == list(range(60))
    if read is in_bulk:
        lists = [each async for each in client.read_range(segment.topic, EARLIEST, LATEST)]
        assert len(lists) > 1
        assert [each for part in lists for each in part] == entries
        small = client.read_range(segment.topic, EARLIEST, LATEST, max_bytes=1)
        assert [len(part) async for part in small] == [1] * 60


@both
async def test_pieces_are_put_together(
    client: magnetar.Client, topic: MakeTopic, read: Read
) -> None:
    name = str(await topic())
    large = bytes(range(256)) * 50_000
    async with client.producer(name, chunking=True) as producer:
        where = await producer.send(large, key="k")
    segment = await only_segment(client, name)
    columns = columns_of(await all_of(read(client, segment.topic, EARLIEST, LATEST)))
    assert len(columns) == 0
    assert len(columns.pieces) > 1
    take_pieces(columns.pieces, columns)
    assert columns.values == [large]
    (id,) = message_ids(columns, segment.segment_id)
    assert magnetar.MessageId.from_bytes(id) == where


@both
async def test_read_that_is_abandoned_ends(
    client: magnetar.Client, topic: MakeTopic, read: Read
) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        for n in range(5):
            await producer.send(b"%d" % n * 1000)
    segment = await only_segment(client, name)
    reading = read(client, segment.topic, EARLIEST, LATEST)
    assert await anext(reading)
    await reading.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(reading)


@both
async def test_a_segment_that_is_gone(
    client: magnetar.Client, topic: MakeTopic, read: Read
) -> None:
    made = await topic()
    segment = await only_segment(client, made)
    await made.delete()
    with pytest.raises(TopicNotFound):
        await client.plan_range(segment.topic)
    with pytest.raises(TopicNotFound):
        await plan_by_reader(client.context, segment.topic, None, None, PlanLimits())
    with pytest.raises(TopicNotFound):
        await all_of(read(client, segment.topic, EARLIEST, LATEST))


async def test_a_plan_as_readers_make_it(client: magnetar.Client, topic: MakeTopic) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        ids = [await producer.send(b"%d" % n) for n in range(4)]
    first, last = Position(*ids[0].entry.key), Position(*ids[-1].entry.key)
    behind = Position(last.ledger_id, last.entry_id + 1)
    segment = await only_segment(client, name)
    plan = await plan_by_reader(client.context, segment.topic, None, None, PlanLimits())
    assert (plan.start, plan.end, plan.horizon, plan.raw_end) == (first, behind, behind, behind)
    assert plan.earliest == first
    assert plan.messages is None
    assert plan.sealed is None
    plan = await plan_by_reader(client.context, segment.topic, last, None, PlanLimits(1, 1))
    assert (plan.start, plan.end) == (last, behind)
    limits = PlanLimits(from_publish_time_ms=1)
    with pytest.raises(NotSupported):
        await plan_by_reader(client.context, segment.topic, None, None, limits)


@bulk
async def test_a_plan_in_bulk_counts(client: magnetar.Client, topic: MakeTopic) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        ids = [await producer.send(b"%d" % n) for n in range(10)]
    segment = await only_segment(client, name)
    plan = await client.plan_range(segment.topic)
    assert (plan.entries, plan.messages, plan.backlog_messages) == (10, 10, 10)
    assert plan.bytes
    assert plan.backlog_bytes == plan.bytes
    assert plan.hidden_messages == 0
    assert (plan.sealed, plan.lost) == (False, False)
    assert plan.first_publish_time_ms is not None
    assert plan.last_publish_time_ms is not None
    part = await client.plan_range(segment.topic, plan.start, max_messages=3)
    assert (part.entries, part.messages) == (3, 3)
    assert part.end == Position(*ids[3].entry.key)
    assert part.backlog_messages == 10
    assert part.horizon == plan.horizon
    bounded = await client.plan_range(segment.topic, part.end, end=Position(*ids[5].entry.key))
    assert bounded.messages == 2
    late = await client.plan_range(
        segment.topic, from_publish_time_ms=plan.last_publish_time_ms + 1
    )
    assert late.start == late.end == plan.horizon
    early = await client.plan_range(segment.topic, before_publish_time_ms=1)
    assert early.start == early.end == plan.start


@bulk
async def test_a_plan_says_that_a_segment_is_sealed(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic()
    async with client.producer(made.name) as producer:
        await producer.send(b"last")
    segment = await only_segment(client, made)
    await made.split(0)
    async with asyncio.timeout(20):
        while not (plan := await client.plan_range(segment.topic)).sealed:
            await asyncio.sleep(0.02)
    assert plan.end == plan.raw_end
    entries = await all_of(client.read_range(segment.topic, plan.start, plan.end))
    assert columns_of(entries).values == [b"last"]


@bulk
async def test_transactions_hide_and_show(client: magnetar.Client, topic: MakeTopic) -> None:
    name = str(await topic())
    async with client.producer(name, batching=False) as producer:
        async with client.transaction() as aborted:
            await producer.send(b"aborted", transaction=aborted)
            await aborted.abort()
        async with client.transaction() as committed:
            await producer.send(b"committed", transaction=committed)
        opened = await client.transaction()
        await producer.send(b"open", transaction=opened)
        await producer.send(b"behind")
        segment = await only_segment(client, name)
        plan = await client.plan_range(segment.topic)
        assert plan.horizon < plan.raw_end
        assert plan.hidden_messages == 2
        readable = await all_of(client.read_range(segment.topic, EARLIEST, LATEST))
        columns = columns_of(readable)
        assert columns.values == [b"committed"]
        assert columns.runs[0].txn_id == committed.id
        raw = await all_of(client.read_range(segment.topic, EARLIEST, LATEST, raw=True))
        shown = {
            value: entry.visibility
            for entry in raw
            for value in columns_of([entry]).values
            if value is not None
        }
        assert shown == {
            b"aborted": Visibility.ABORTED,
            b"committed": Visibility.READABLE,
            b"open": Visibility.OPEN,
            b"behind": Visibility.OPEN,
        }
        await opened.commit()
        after = await client.plan_range(segment.topic, plan.horizon)
        assert after.horizon == after.raw_end
        rest = await all_of(client.read_range(segment.topic, plan.horizon, after.end))
        assert columns_of(rest).values == [b"open", b"behind"]


async def test_invalid_read_is_refused(client: magnetar.Client) -> None:
    with pytest.raises(InvalidArgument):
        await client.plan_range("persistent://public/default/t", max_messages=-1)
    with pytest.raises(InvalidArgument):
        client.read_range("persistent://public/default/t", EARLIEST, LATEST, max_bytes=0)


async def test_a_closed_client_reads_nothing(client: magnetar.Client, topic: MakeTopic) -> None:
    segment = await only_segment(client, await topic())
    reading = client.read_range(segment.topic, EARLIEST, LATEST)
    await client.close()
    with pytest.raises(AlreadyClosed):
        await anext(reading)
    with pytest.raises(AlreadyClosed):
        await client.plan_range(segment.topic)
    with pytest.raises(AlreadyClosed):
        await client.layout("topic://public/default/t")


async def test_end_of_a_plan_follows_transactions(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    """Apache Pulsar 5.0.0-M1 tells the end that a segment had when it was first asked for it."""
    name = str(await topic())
    segment = await only_segment(client, name)

    async def read() -> tuple[list[bytes | None], bool]:
        plan = await plan_by_reader(client.context, segment.topic, None, None, PlanLimits())
        entries = await all_of(as_readers_do(client, segment.topic, plan.start, LATEST))
        return columns_of(entries).values, plan.horizon == plan.raw_end

    async with client.producer(name, batching=False) as producer:
        assert await read() == ([], True)
        await producer.send(b"before")
        assert await read() == ([b"before"], True)
        async with client.transaction() as transaction:
            await producer.send(b"within", transaction=transaction)
            await producer.send(b"behind")
            assert (await read())[0] == [b"before"]
        async with client.transaction() as transaction:
            await producer.send(b"never", transaction=transaction)
            await transaction.abort()

        async def all_seen() -> bool:
            return await read() == ([b"before", b"within", b"behind"], True)

        await once_it_is(all_seen, "the end of what may be read", 20)
