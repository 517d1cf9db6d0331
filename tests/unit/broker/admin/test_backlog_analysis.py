"""`POST .../subscription/{subscription}/analyzeBacklog`: a backlog is counted by reading it."""

import pytest

from broker.topics.backlog_analysis import BacklogAnalysis
from magnetar.cli.main import build_app
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_batch, build_entry
from storage.managed_ledger.types import Entry
from tests.support.bounds import set_bound
from tests.support.commands import run_command
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

NAME = "persistent://public/default/t"
TOPIC = "/admin/v2/persistent/public/default/t"
ANALYZE = f"{TOPIC}/subscription/s/analyzeBacklog"
BATCH_SIZE = 3
MARKER = 21


@pytest.fixture
async def client(rest: Rest, client: RawClient) -> RawClient:
    await rest.done("PUT", TOPIC)
    await rest.done("PUT", f"{TOPIC}/subscription/s")
    return client


async def analyzed(rest: Rest, start: object = None) -> dict[str, object]:
    status, found = await rest.call("POST", ANALYZE, start)
    assert status == 200, found
    assert isinstance(found, dict)
    return found


def numbers(found: dict[str, object]) -> tuple[object, ...]:
    assert found["filterAcceptedEntries"] == found["entries"]
    assert found["filterAcceptedMessages"] == found["messages"]
    others = [name for name in found if "Rejected" in name or "Rescheduled" in name]
    assert (len(others), {found[name] for name in others}) == (4, {0})
    return found["entries"], found["messages"], found["aborted"]


async def written(client: RawClient, count: int) -> list[str]:
    """Ids of single messages, and of a batch behind them."""
    producer = await client.create_producer(NAME)
    batch = build_batch([(pb.SingleMessageMetadata(payload_size=1), b"x")] * BATCH_SIZE)
    receipts = [await producer.send(b"x") for _ in range(count)]
    metadata = pb.MessageMetadata(num_messages_in_batch=BATCH_SIZE)
    receipts.append(await producer.send(batch, metadata=metadata))
    return [f"{each.message_id.ledger_id}:{each.message_id.entry_id}" for each in receipts]


def place(text: str, **members: object) -> dict[str, object]:
    ledger_id, entry_id = map(int, text.split(":"))
    return {"ledgerId": ledger_id, "entryId": entry_id, **members}


async def test_entries_and_messages_that_are_not_acknowledged_are_counted(
    rest: Rest, client: RawClient
) -> None:
    nothing = await analyzed(rest)
    assert numbers(nothing) == (0, 0, False)
    assert (nothing["firstMessageId"], nothing["lastMessageId"]) == (None, None)
    ids = await written(client, 4)
    consumer = await client.subscribe(NAME, "s", permits=9)
    messages = [(await consumer.receive()).message_id for _ in range(5)]
    await consumer.ack_answered(messages[0])
    await consumer.ack_answered(messages[2])
    found = await analyzed(rest)
    assert numbers(found) == (3, 2 + BATCH_SIZE, False)
    assert (found["firstMessageId"], found["lastMessageId"]) == (ids[1], ids[4])
    assert found["markerMessages"] == 0
    assert numbers(await analyzed(rest, place(ids[1]))) == (3, 2 + BATCH_SIZE, False)
    assert numbers(await analyzed(rest, place(ids[1], excluded=True))) == (2, 4, False)
    assert numbers(await analyzed(rest, "latest")) == (0, 0, False)


async def test_a_long_backlog_is_counted_in_several_requests(
    rest: Rest, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ANALYZED_ENTRIES", 4)
    ids = await written(client, 9)
    first = await analyzed(rest)
    assert (*numbers(first), first["lastMessageId"]) == (4, 4, True, ids[3])
    second = await analyzed(rest, place(ids[4]))
    assert (*numbers(second), second["lastMessageId"]) == (4, 4, True, ids[7])
    last = await analyzed(rest, place(ids[8]))
    assert (*numbers(last), last["lastMessageId"]) == (2, 1 + BATCH_SIZE, False, ids[9])


async def test_a_backlog_is_counted_for_a_bounded_time(
    rest: Rest, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(client, 2)
    set_bound(monkeypatch, "ANALYSIS_S", 0.0)
    assert numbers(await analyzed(rest)) == (0, 0, True)


def test_markers_of_pulsar_are_counted_apart_too() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=1, marker_type=MARKER
    )
    found = BacklogAnalysis()
    found.add(Entry(Position(1, 0), build_entry(metadata, b"")))
    assert (found.entries, found.messages, found.markers) == (1, 1, 1)


async def test_the_backlog_of_a_partition_is_counted_and_not_that_of_all(rest: Rest) -> None:
    topic = "/admin/v2/persistent/public/default/p"
    await rest.done("PUT", f"{topic}/partitions", 2)
    assert "name the partition" in await rest.refused(
        405, "POST", f"{topic}/subscription/s/analyzeBacklog"
    )
    missing = f"{topic}-partition-1/subscription/s/analyzeBacklog"
    assert "no subscription 's'" in await rest.refused(404, "POST", missing)


async def test_the_command_line_counts_skips_and_truncates(
    rest: Rest, client: RawClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ANALYZED_ENTRIES", 2)
    ids = await written(client, 4)

    async def run(*words: str, exit_code: int = 0) -> str:
        given = ["topics", *words, "--admin-url", rest.base]
        done = await run_command(build_app("topics"), given)
        assert done.exit_code == exit_code, done.output
        return done.output

    assert f"5 entries, 7 messages, from {ids[0]}" in await run("analyze-backlog", NAME, "s")
    await run("skip", "t", "s", "-n", "1")
    assert "4 entries" in await run("analyze-backlog", "t", "s")
    assert (await run("subscription-properties", "t", "s", "--set", "a=b=c")) == "a=b=c\n"
    assert (await run("subscription-properties", "t", "s", "--set", "d=e")) == "d=e\n"
    assert "key=value" in await run("subscription-properties", "t", "s", "--set", "x", exit_code=2)
    await run("skip", "t", "s")
    assert "0 entries, 0 messages, from -" in await run("analyze-backlog", "t", "s")
    await run("truncate", "t")
    stats = await rest.get(f"{TOPIC}/stats")
    assert isinstance(stats, dict)
    assert stats["storageSize"] == 0
    assert "no subscription" in await run("skip", "t", "none", "-n", "1", exit_code=1)
