"""A cursor is set to a message id as tools send it: into a batch, or behind the message."""

from collections.abc import Sequence

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import build_batch
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest

NAME = "persistent://public/default/x"
SUBSCRIPTION = "/admin/v2/persistent/public/default/x/subscription"
BATCH_SIZE = 3


async def written(client: RawClient) -> list[dict[str, int]]:
    """Ids of three entries: a message, a batch of three, a message."""
    producer = await client.create_producer(NAME)
    batch = build_batch([(pb.SingleMessageMetadata(payload_size=1), b"x")] * BATCH_SIZE)
    receipts = [
        await producer.send(b"x"),
        await producer.send(batch, metadata=pb.MessageMetadata(num_messages_in_batch=BATCH_SIZE)),
        await producer.send(b"x"),
    ]
    ids = [receipt.message_id for receipt in receipts]
    return [{"ledgerId": each.ledger_id, "entryId": each.entry_id} for each in ids]


async def delivered(client: RawClient, subscription: str, count: int) -> list[tuple[int, int]]:
    """Entry and ack set of what comes first."""
    consumer = await client.subscribe(NAME, subscription, permits=10)
    found = []
    for _ in range(count):
        command = (await consumer.receive()).command
        found.append((command.message_id.entry_id, sum(command.ack_set)))
    await consumer.close()
    return found


@pytest.mark.parametrize(
    ("entry", "members", "wanted"),
    [
        (0, {}, [(0, 0), (1, 0), (2, 0)]),
        (0, {"excluded": True}, [(1, 0), (2, 0)]),
        (0, {"excluded": True, "batchIndex": 0}, [(1, 0), (2, 0)]),
        (1, {"batchIndex": -1}, [(1, 0), (2, 0)]),
        (1, {"batchIndex": 0}, [(1, 0), (2, 0)]),
        (1, {"batchIndex": 0, "excluded": True}, [(1, 0b110), (2, 0)]),
        (1, {"batchIndex": 2}, [(1, 0b100), (2, 0)]),
        (1, {"batchIndex": 2, "excluded": True}, [(2, 0)]),
        (1, {"excluded": True}, [(2, 0)]),
    ],
)
async def test_a_cursor_goes_to_a_message(
    creating: Rest, entry: int, members: dict[str, object], wanted: Sequence[tuple[int, int]]
) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    place = {**(await written(client))[entry], "partitionIndex": -1, **members}
    await creating.done("PUT", f"{SUBSCRIPTION}/s")
    await creating.done("POST", f"{SUBSCRIPTION}/s/resetcursor", place)
    assert await delivered(client, "s", len(wanted)) == wanted
    await creating.done("PUT", f"{SUBSCRIPTION}/t", place)
    assert await delivered(client, "t", len(wanted)) == wanted
    await client.close()


@pytest.mark.parametrize("members", [{"batchIndex": "first"}, {"excluded": 1}])
async def test_reset_to_an_invalid_position_is_refused(
    creating: Rest, members: dict[str, object]
) -> None:
    await creating.done("PUT", "/admin/v2/persistent/public/default/x")
    await creating.done("PUT", f"{SUBSCRIPTION}/s")
    place = {"ledgerId": 0, "entryId": 0, **members}
    reason = await creating.refused(400, "POST", f"{SUBSCRIPTION}/s/resetcursor", place)
    assert next(iter(members)) in reason


async def test_an_id_as_the_admin_library_sends_it_is_taken(creating: Rest) -> None:
    client = await RawClient.open("127.0.0.1", creating.binary_port)
    of_batch = {
        "partitionIndex": -1,
        "batchIndex": 1,
        "batchSize": 3,
        "ackSet": {"empty": True},
        "outstandingAcksInSameBatch": 0,
        "originalBatchSize": 3,
    }
    place = {**(await written(client))[1], **of_batch}
    await creating.done("PUT", f"{SUBSCRIPTION}/s", place)
    assert await delivered(client, "s", 2) == [(1, 0b110), (2, 0)]
    await client.close()


@pytest.mark.parametrize(
    "unknown", [{"isExcluded": True}, {"batch_index": 1}, {"properties": {"a": "b"}}]
)
async def test_an_unknown_member_of_an_id_is_refused(
    creating: Rest, unknown: dict[str, object]
) -> None:
    await creating.done("PUT", "/admin/v2/persistent/public/default/x")
    await creating.done("PUT", f"{SUBSCRIPTION}/s")
    place = {"ledgerId": 0, "entryId": 0, **unknown}
    for path in ("resetcursor", "expireMessages"):
        reason = await creating.refused(400, "POST", f"{SUBSCRIPTION}/s/{path}", place)
        assert f"has no {next(iter(unknown))}: send" in reason
    if "properties" not in unknown:
        await creating.refused(400, "PUT", f"{SUBSCRIPTION}/t", place)


async def test_an_id_of_another_partition_is_refused(creating: Rest) -> None:
    topic = "/admin/v2/persistent/public/default/p"
    await creating.done("PUT", f"{topic}/partitions", 2)
    path = f"{topic}-partition-1/subscription/s"
    await creating.done("PUT", path)
    place = {"ledgerId": 0, "entryId": 0, "partitionIndex": 0}
    reason = await creating.refused(400, "POST", f"{path}/resetcursor", place)
    assert "is of partition 0" in reason
    await creating.done("POST", f"{path}/resetcursor", {**place, "partitionIndex": 1})
