"""Internal statistics: ledgers and cursors, with the types that Pulsar's admin library reads."""

from typing import cast

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

PERSISTENT = "/admin/v2/persistent/public/default"
NAME = "persistent://public/default/x"
Members = dict[str, object]


async def stats_of(rest: Rest, path: str) -> Members:
    return cast("Members", await rest.get(f"{PERSISTENT}/{path}"))


def cursor_of(stats: Members, name: str) -> Members:
    return cast("dict[str, Members]", stats["cursors"])[name]


async def test_properties_of_a_cursor_are_numbers_alone(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    made = {"ledgerId": -1, "entryId": -1, "properties": {"team": "billing"}}
    await rest.done("PUT", f"{PERSISTENT}/x/subscription/s", made)
    # The library would wait for ever for an answer with a text there.
    assert cursor_of(await stats_of(rest, "x/internalStats"), "s")["properties"] == {}
    shown = cast("dict[str, Members]", (await stats_of(rest, "x/stats"))["subscriptions"])["s"]
    assert shown["subscriptionProperties"] == {"team": "billing"}


async def test_internal_statistics_show_ledgers_and_cursors(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    empty = await stats_of(rest, "x/internalStats")
    assert (empty["state"], empty["lastLedgerCreatedTimestamp"]) == ("ClosedLedger", None)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    options = pb.CommandSubscribe(sub_type=pb.CommandSubscribe.Shared)
    consumer = await client.subscribe(NAME, "s", options, permits=10)
    producer = await client.create_producer(NAME)
    for _ in range(5):
        await producer.send(b"x")
    messages = [await consumer.receive() for _ in range(5)]
    for index in (0, 2, 3):
        consumer.ack(messages[index].command.message_id)
    await client.ping()
    stats = await stats_of(rest, "x/internalStats")
    (ledger,) = cast("list[Members]", stats["ledgers"])
    ledger_id = ledger["ledgerId"]
    assert (stats["entriesAddedCounter"], stats["numberOfEntries"]) == (5, 5)
    assert (stats["currentLedgerEntries"], stats["currentLedgerSize"]) == (5, stats["totalSize"])
    assert stats["state"] == "LedgerOpened"
    assert "T" in str(stats["lastLedgerCreatedTimestamp"])
    assert stats["lastConfirmedEntry"] == f"{ledger_id}:4"
    assert (stats["waitingCursorsCount"], stats["pendingAddEntriesCount"]) == (1, 0)
    assert stats["schemaLedgers"] == []
    assert cast("Members", stats["compactedLedger"])["ledgerId"] == -1
    cursor = cursor_of(stats, "s")
    assert cursor["markDeletePosition"] == f"{ledger_id}:0"
    assert cursor["readPosition"] == f"{ledger_id}:5"
    assert cursor["individuallyDeletedMessages"] == f"[({ledger_id}:1..{ledger_id}:3]]"
    assert cursor["totalNonContiguousDeletedMessagesRange"] == 1
    assert cursor["messagesConsumedCounter"] == 3
    assert cursor["numberOfEntriesSinceFirstNotAckedMessage"] == 4
    assert cursor["active"] is cursor["waitingReadOp"] is True
    await client.close()


async def test_internal_statistics_of_each_partition(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/p/partitions", 2)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    producer = await client.create_producer("persistent://public/default/p-partition-1")
    await producer.send(b"x")
    await client.close()
    stats = await stats_of(rest, "p/partitioned-internalStats")
    assert cast("Members", stats["metadata"])["partitions"] == 2
    partitions = cast("dict[str, Members]", stats["partitions"])
    assert {name: each["numberOfEntries"] for name, each in partitions.items()} == {
        "persistent://public/default/p-partition-0": 0,
        "persistent://public/default/p-partition-1": 1,
    }
    await rest.done("PUT", f"{PERSISTENT}/x")
    assert "not partitioned" in await rest.refused(
        404, "GET", f"{PERSISTENT}/x/partitioned-internalStats"
    )


async def test_records_of_ledgers_are_shown_where_they_are_asked_for(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/p/partitions", 1)
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    producer = await client.create_producer("persistent://public/default/p-partition-0")
    await producer.send(b"x")
    await rest.done("PUT", f"{PERSISTENT}/p-partition-0/unload")
    await client.close()
    of_one = await stats_of(rest, "p-partition-0/internalStats?metadata=true")
    of_all = await stats_of(rest, "p/partitioned-internalStats?metadata=true")
    partitions = cast("dict[str, Members]", of_all["partitions"])
    for stats in (of_one, *partitions.values()):
        (ledger,) = cast("list[Members]", stats["ledgers"])
        record = str(ledger["metadata"])
        assert record.startswith("LedgerMetadata{ensembleSize=1, state=CLOSED, length=")
        assert "lastEntryId=0, customMetadata={" in record
    (plain,) = cast(
        "list[Members]", (await stats_of(rest, "p-partition-0/internalStats"))["ledgers"]
    )
    assert "metadata" not in plain


async def test_stored_records_of_a_topic_are_shown_without_loading_it(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x", {"team": "billing"})
    client = await RawClient.open("127.0.0.1", rest.binary_port)
    consumer = await client.subscribe(NAME, "s", permits=9)
    producer = await client.create_producer(NAME)
    for _ in range(4):
        await producer.send(b"x")
    messages = [(await consumer.receive()).message_id for _ in range(4)]
    for index in (0, 2):
        await consumer.ack_answered(messages[index])
    await client.close()
    size = (await stats_of(rest, "x/stats"))["storageSize"]
    await rest.done("PUT", f"{PERSISTENT}/x/unload")
    found = await stats_of(rest, "x/internal-info")
    assert "x" not in str(await rest.get("/admin/v2/broker-stats/topics")), "it is not loaded"
    (ledger,) = cast("list[Members]", found["ledgers"])
    assert (ledger["entries"], ledger["size"], ledger["isOffloaded"]) == (4, size, False)
    cursor = cursor_of(found, "s")
    ledger_id = ledger["ledgerId"]
    assert cursor["markDelete"] == {"ledgerId": ledger_id, "entryId": 0}
    assert cursor["individualDeletedMessages"] == [
        {
            "from": {"ledgerId": ledger_id, "entryId": 1},
            "to": {"ledgerId": ledger_id, "entryId": 2},
        }
    ]
    assert (found["properties"], found["terminatedPosition"]) == ({"team": "billing"}, None)
    assert "T" in str(found["creationDate"])
    await rest.done("PUT", f"{PERSISTENT}/p/partitions", 2)
    of_partitions = cast("Members", (await stats_of(rest, "p/internal-info"))["partitions"])
    names = [f"persistent://public/default/p-partition-{index}" for index in range(2)]
    assert list(of_partitions) == names
    assert "no topic" in await rest.refused(404, "GET", f"{PERSISTENT}/none/internal-info")
