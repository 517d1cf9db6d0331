"""PLAN_RANGE and READ_ENTRIES on a whole broker, over the wire."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.app.service import Broker
from config.bounds import MAX_MESSAGE_SIZE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.message import parse_metadata
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient
from tests.unit.broker.topics.reads import TOPIC, Reads, place, topic_of
from tests.unit.broker.transactions.conftest import TransactionClient
from tests.unit.broker.transactions.test_writes import send

Connect = Callable[[], Awaitable[RawClient]]


async def test_connected_command_announces_segment_reads(reads: Reads) -> None:
    assert reads.raw.connected.segment_reads


async def test_a_range_is_planned_and_read(reads: Reads) -> None:
    producer = await reads.raw.create_producer(TOPIC)
    receipts = [await producer.send(b"%d" % number) for number in range(10)]
    first = place(receipts[0].message_id)
    plan = await reads.plan(max_messages=4)
    assert place(plan.start) == place(plan.earliest) == first
    assert (plan.entries, plan.messages, plan.backlog_messages) == (4, 4, 10)
    assert not plan.lost
    assert not plan.sealed
    end = Position(first.ledger_id, 10)
    assert place(plan.end) == Position(first.ledger_id, 4)
    assert place(plan.horizon) == place(plan.raw_end) == end
    found = await reads.read_all(place(plan.start), place(plan.end))
    assert [each.payload for each in found] == [b"0", b"1", b"2", b"3"]
    rest = await reads.plan(place(plan.end))
    assert (rest.entries, place(rest.end)) == (6, end)
    assert rest.bytes == rest.backlog_bytes == plan.backlog_bytes - plan.bytes
    done = await reads.plan(end)
    assert (done.entries, place(done.start), place(done.end)) == (0, end, end)
    assert (await reads.read(end, LATEST)).at_end


async def test_bulk_reads_are_in_the_metrics(reads: Reads, broker: Broker) -> None:
    """No consumer counts what bulk readers take, so the topic does."""
    producer = await reads.raw.create_producer(TOPIC)
    for number in range(3):
        await producer.send(b"%d" % number)
    plan = await reads.plan()
    answer = await reads.read(place(plan.start), place(plan.end))
    await reads.read(place(plan.start), Position(place(plan.start).ledger_id, 1))
    size = sum(len(each.data) for each in answer.entries)
    labels = f'{{cluster="standalone",namespace="public/default",topic="{TOPIC}"}}'
    lines = (await metrics_text(broker)).splitlines()
    assert f"magnetar_segment_read_entries_total{labels} 4.0" in lines
    expected_bytes = size + len(answer.entries[0].data)
    assert f"magnetar_segment_read_bytes_total{labels} {expected_bytes}.0" in lines


async def test_an_empty_topic_has_an_empty_range(reads: Reads) -> None:
    await reads.raw.create_producer(TOPIC)
    plan = await reads.plan()
    for position in (plan.start, plan.end, plan.earliest, plan.horizon, plan.raw_end):
        assert place(position) == EARLIEST
    answer = await reads.read(EARLIEST, LATEST)
    assert answer.at_end
    assert not answer.entries


async def test_plan_and_read_create_no_topic(reads: Reads, broker: Broker) -> None:
    for call in (reads.plan(), reads.read(EARLIEST, LATEST)):
        with pytest.raises(BrokerError) as refusal:
            await call
        assert refusal.value.code == pb.TopicNotFound
    assert not broker.topics.loaded()


async def test_reads_are_bounded_and_answered_in_order(reads: Reads) -> None:
    producer = await reads.raw.create_producer(TOPIC)
    for number in range(20):
        await producer.send(b"%02d" % number * 500)
    plan = await reads.plan()
    start, end = place(plan.start), place(plan.end)
    answer = await reads.read(start, end, max_bytes=3500)
    assert len(answer.entries) == 3
    assert not answer.at_end
    assert place(answer.next) == Position(start.ledger_id, 3)
    assert len((await reads.read(start, end, max_bytes=1)).entries) == 1
    answers = await asyncio.gather(
        *(reads.read(Position(start.ledger_id, at), end, max_bytes=1) for at in range(20))
    )
    assert [each.entries[0].entry_id for each in answers] == list(range(20))
    assert answers[-1].at_end or place(answers[-1].next) == end


async def test_the_largest_message_is_read_whole(reads: Reads) -> None:
    producer = await reads.raw.create_producer(TOPIC)
    payload = bytes(MAX_MESSAGE_SIZE)
    await producer.send(payload)
    await producer.send(b"small")
    found = await reads.read_all(EARLIEST, LATEST)
    assert [len(each.payload) for each in found] == [MAX_MESSAGE_SIZE, 5]


async def test_open_transactions_hold_the_horizon_and_aborted_ones_are_left_out(
    reads: Reads, connect: Connect
) -> None:
    client = TransactionClient(await connect())
    producer = await client.raw.create_producer(TOPIC)
    await send(producer, None, b"before")
    aborted, opened = await client.begin(), await client.begin()
    await send(producer, aborted, b"aborted")
    await send(producer, None, b"between")
    await send(producer, opened, b"open")
    await send(producer, None, b"behind")
    await client.end(aborted, pb.ABORT)
    plan = await reads.plan()
    ledger_id = place(plan.start).ledger_id
    while place(plan.horizon).entry_id < 3:
        await asyncio.sleep(0.01)
        plan = await reads.plan()
    assert place(plan.horizon) == place(plan.end) == Position(ledger_id, 3)
    assert place(plan.raw_end) == Position(ledger_id, 5)
    assert (plan.messages, plan.hidden_messages) == (3, 2)
    found = await reads.read_all(place(plan.start), LATEST)
    assert [each.payload for each in found] == [b"before", b"between"]
    whole = await reads.read_all(place(plan.start), LATEST, raw=True)
    entry = pb.ReadEntry
    assert [(each.payload, each.visibility) for each in whole] == [
        (b"before", entry.READABLE),
        (b"aborted", entry.ABORTED),
        (b"between", entry.READABLE),
        (b"open", entry.OPEN),
        (b"behind", entry.OPEN),
    ]
    answer = await reads.read(place(plan.start), LATEST)
    assert answer.at_end
    assert place(answer.next) == place(plan.horizon)
    await client.end(opened)
    while (plan := await reads.plan()).hidden_messages:
        await asyncio.sleep(0.01)
    found = await reads.read_all(place(answer.next), place(plan.end))
    assert [each.payload for each in found] == [b"open", b"behind"]


async def test_a_range_outlives_a_restart_and_a_roll_over(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        reads = Reads(client)
        producer = await client.create_producer(TOPIC)
        for number in range(5):
            await producer.send(b"%d" % number)
        before = await reads.plan()
        end = place(before.end)
        await client.close()
    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        reads = Reads(client)
        again = await reads.plan(end)
        assert (place(again.end), again.entries, again.lost) == (end, 0, False)
        producer = await client.create_producer(TOPIC)
        await producer.send(b"new")
        plan = await reads.plan(end)
        assert plan.entries == 1
        assert place(plan.end).ledger_id > end.ledger_id
        found = await reads.read_all(end, place(plan.end))
        assert [each.payload for each in found] == [b"new"]
        whole = await reads.plan()
        assert (whole.entries, whole.messages) == (6, 6)
        assert whole.first_publish_time_ms == before.first_publish_time_ms
        topic = await topic_of(broker)
        times = [
            parse_metadata(entry.data).publish_time
            for entry in await topic.ledger.read(EARLIEST, max_entries=10, max_bytes=10**6)
        ]
        assert whole.last_publish_time_ms == max(times)
        await client.close()
