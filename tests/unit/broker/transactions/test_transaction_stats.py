"""Pulsar's statistics of transactions on ordinary topics and subscriptions, over REST."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawClient
from tests.unit.broker.admin.conftest import Rest, asking
from tests.unit.broker.transactions.conftest import TransactionClient
from tests.unit.broker.transactions.test_v4_clients import acknowledge, published, shared
from tests.unit.broker.transactions.test_writes import TOPIC, reader, send

BASE = "/admin/v3/transactions"
PLACE = "public/default/t"


@pytest.fixture
async def rest(tmp_path: Path) -> AsyncIterator[Rest]:
    async with asking(tmp_path, transaction_coordinators=4) as rest:
        yield rest


@pytest.fixture
async def v4(rest: Rest) -> AsyncIterator[TransactionClient]:
    client = TransactionClient(await RawClient.open("127.0.0.1", rest.binary_port), scalable=False)
    yield client
    await client.raw.close()


async def test_buffer_shows_open_and_aborted_transactions(
    rest: Rest, v4: TransactionClient
) -> None:
    producer = await v4.raw.create_producer(TOPIC)
    await send(producer, None, b"before")
    last = (await (await reader(v4.raw)).last_message_id()).last_message_id
    before = f"{last.ledger_id}:{last.entry_id}"
    aborted, still_open = await v4.begin(), await v4.begin()
    for txn in (aborted, still_open):
        await v4.add_partitions(txn, TOPIC)
        await send(producer, txn, b"inside")
    stats = await rest.get(f"{BASE}/transactionBufferStats/{PLACE}")
    assert stats == {
        "state": "Ready",
        "maxReadPosition": before,
        "lastSnapshotTimestamps": 0,
        "ongoingTxnSize": 2,
        "totalAbortedTransactions": 0,
    }
    metadata = await rest.get(f"{BASE}/transactionMetadata/0/{aborted[1]}")
    assert isinstance(metadata, dict)
    assert metadata["producedPartitions"] == {TOPIC: {"startPosition": before, "aborted": False}}
    await rest.done("POST", f"{BASE}/abortTransaction/0/{aborted[1]}")
    ended: object = stats
    while ended == stats:  # the owner learns of the end a moment later
        ended = await rest.get(f"{BASE}/transactionBufferStats/{PLACE}")
    assert isinstance(ended, dict)
    assert (ended["ongoingTxnSize"], ended["totalAbortedTransactions"]) == (1, 1)
    in_buffer = f"{BASE}/transactionInBufferStats/{PLACE}/0"
    found = await rest.get(f"{in_buffer}/{still_open[1]}")
    first = f"{last.ledger_id}:{last.entry_id + 2}"
    assert found == {"startPosition": first, "aborted": False}
    assert await rest.get(f"{in_buffer}/4711") == {"startPosition": None, "aborted": False}
    found = await rest.get(f"{in_buffer}/{aborted[1]}")
    assert isinstance(found, dict)
    assert found["aborted"]


async def test_pending_acknowledgements_of_a_subscription(
    rest: Rest, v4: TransactionClient
) -> None:
    await published(v4, 3)
    consumer, exclusive = await shared(v4.raw), await reader(v4.raw)
    ids = [(await consumer.receive()).message_id for _ in range(3)]
    txn, other = await v4.begin(), await v4.begin()
    await acknowledge(consumer, txn, ids[1])
    await acknowledge(exclusive, other, ids[2], cumulative=True)
    consumer.ack(ids[0])
    await v4.raw.ping()
    stats = await rest.get(f"{BASE}/pendingAckStats/{PLACE}/shared")
    assert stats == {"state": "Ready", "ongoingTxnSize": 1}
    in_ack = f"{BASE}/transactionInPendingAckStats/{PLACE}"
    reached = f"{ids[2].ledger_id}:{ids[2].entry_id}"
    assert await rest.get(f"{in_ack}/s/0/{other[1]}") == {"cumulativeAckPosition": reached}
    assert await rest.get(f"{in_ack}/shared/0/{txn[1]}") == {"cumulativeAckPosition": None}
    path = f"{BASE}/positionStatsInPendingAck/{PLACE}/shared"
    states = [
        await rest.get(f"{path}/{each.ledger_id}/{entry}")
        for each, entry in zip((*ids, ids[0]), (*(each.entry_id for each in ids), 99), strict=True)
    ]
    assert states == [
        {"state": state}
        for state in ("MarkDelete", "PendingAck", "NotInPendingAck", "InvalidPosition")
    ]
    slow = await rest.get(f"{BASE}/slowTransactions/0")
    assert isinstance(slow, dict)
    assert set(slow) == {f"(0,{txn[1]})", f"(0,{other[1]})"}
    await rest.refused(404, "GET", f"{BASE}/pendingAckStats/{PLACE}/missing")
    await rest.refused(412, "GET", f"{path}/1/1?batchIndex=-2")


async def test_positions_in_a_batch(rest: Rest, v4: TransactionClient) -> None:
    consumer = await shared(v4.raw)
    producer = await v4.raw.create_producer(TOPIC)
    await producer.send(
        b"batch",
        metadata=pb.MessageMetadata(num_messages_in_batch=3),
        send=pb.CommandSend(num_messages=3),
    )
    batch = (await consumer.receive()).message_id
    held, acknowledged = pb.MessageIdData(), pb.MessageIdData()
    for part, words in ((held, [0b101]), (acknowledged, [0b110])):
        part.CopyFrom(batch)
        part.batch_size = 3
        part.ack_set.extend(words)
    await consumer.ack_answered(acknowledged)
    await acknowledge(consumer, await v4.begin(), held)
    path = f"{BASE}/positionStatsInPendingAck/{PLACE}/shared/{batch.ledger_id}/{batch.entry_id}"
    states = [await rest.get(f"{path}?batchIndex={index}") for index in range(3)]
    assert states == [{"state": state} for state in ("MarkDelete", "PendingAck", "NotInPendingAck")]
    assert await rest.get(path) == {"state": "PendingAck"}


async def test_logs_and_further_coordinators_are_refused(rest: Rest, v4: TransactionClient) -> None:
    await published(v4, 0)
    for path in (
        "coordinatorInternalStats/0",
        f"transactionBufferInternalStats/{PLACE}",
        f"pendingAckInternalStats/{PLACE}/s",
    ):
        assert "no logs here" in await rest.refused(405, "GET", f"{BASE}/{path}")
    replicas = f"{BASE}/transactionCoordinator/replicas"
    assert "cannot change" in await rest.refused(406, "POST", replicas, 8)
    await rest.refused(412, "POST", replicas, "many")
    await rest.refused(404, "GET", f"{BASE}/transactionBufferStats/public/default/missing")
