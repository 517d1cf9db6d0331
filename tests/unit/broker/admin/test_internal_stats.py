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


async def test_metadata_of_ledgers_is_refused(rest: Rest) -> None:
    await rest.done("PUT", f"{PERSISTENT}/x")
    for path in ("x/internalStats", "p/partitioned-internalStats"):
        assert "metadata" in await rest.refused(501, "GET", f"{PERSISTENT}/{path}?metadata=true")
