"""What is refused, or not deleted yet, is not gone: what transactions left there still speaks."""

import asyncio
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.policies.namespaces import NamespaceNotFound
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from storage.managed_ledger.ledger import ManagedLedger
from storage.metadata.store import MetadataError
from tests.support.embedded_broker import running
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.broker.placement.cluster import Cluster
from tests.unit.broker.transactions.conftest import TransactionClient
from tests.unit.broker.transactions.test_joining import collector_of, operations
from tests.unit.broker.transactions.test_writes import clients, read_to, reader, send
from txn.records import AckedPosition, AckRecord, Claim, TxnState

TOPIC = "persistent://public/default/t"
SCALABLE = parse_topic_name("topic://public/default/s")
SEGMENT = "segment://public/default/s/0000-ffff-0"
ROUNDS = 4


async def write_open_transaction(broker: Broker) -> TxnId:
    """On a segment: a row of an open transaction, and one of none behind it."""
    await broker.scalable.create(SCALABLE, segments=1, properties={})
    async with clients(broker) as client:
        producer = await client.raw.create_producer(SEGMENT)
        txn = await client.begin()
        await send(producer, txn, b"aborted")
        await send(producer, None, b"last")
    return TxnId(*txn)


async def abort_and_collect(broker: Broker, txn: TxnId) -> None:
    await broker.transactions.coordinators.end_transaction(txn, TxnState.ABORTED, None)
    for _ in range(ROUNDS):
        await collector_of(broker).collect()


async def read_and_collect(broker: Broker, txn: TxnId) -> None:
    """The aborted row is hidden, and what was kept for that goes now that its segment is served."""
    async with clients(broker) as client:
        assert await read_to(await reader(client.raw, SEGMENT), b"last") == [b"last"]
    async with asyncio.timeout(TIMEOUT_S):
        while await broker.transactions.store.read_header(txn):
            await collector_of(broker).collect()
    assert txn in await broker.transactions.store.aborted_on(SEGMENT)


async def test_w11_rows_stay_aborted_while_scalable_topics_are_off(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        txn = await write_open_transaction(broker)
    async with running(tmp_path, scalable_topics_enabled=False) as broker:
        await abort_and_collect(broker, txn)
        assert len(await operations(broker, txn)) == 1
    async with running(tmp_path) as broker:
        await read_and_collect(broker, txn)


async def test_w11_rows_stay_aborted_where_one_broker_has_scalable_topics_off(
    cluster: Cluster,
) -> None:
    node = await cluster.add()
    txn = await write_open_transaction(node.broker)
    refusing = await cluster.add(scalable_topics_enabled=False)
    await node.stop()
    await cluster.all_know(refusing)
    await until(lambda: refusing.broker.transactions.coordinators.leads(txn.coordinator))
    await abort_and_collect(refusing.broker, txn)
    assert len(await operations(refusing.broker, txn)) == 1
    serving = await cluster.add()
    await refusing.stop()
    await cluster.all_know(serving)
    await read_and_collect(serving.broker, txn)


async def test_w11_a_namespace_that_is_not_found_does_not_make_its_topics_gone(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await txn_client.raw.create_producer(TOPIC)
    name = broker.topics.loaded()[TOPIC].name
    await broker.topics.unload(name)
    txn = await broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
    claim = Claim(txn, TOPIC, 0, Position(1, 2))
    await broker.transactions.store.put_claim(claim)

    async def not_found(_namespace: object) -> None:
        raise NamespaceNotFound("not now")

    monkeypatch.setattr(broker.namespaces, "require", not_found)
    await abort_and_collect(broker, txn)
    assert await operations(broker, txn) == [claim]


async def test_a6_acknowledgements_stay_where_a_subscription_could_not_be_deleted(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await txn_client.raw.create_producer(TOPIC)
    topic = broker.topics.loaded()[TOPIC]
    await topic.create_subscription("s", EARLIEST)
    txn = await broker.transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
    ack = AckRecord(txn, TOPIC, "s", 0, 1, False, (AckedPosition(Position(1, 1)),))
    await broker.transactions.store.put_ack(ack)
    await broker.transactions.coordinators.end_transaction(txn, TxnState.COMMITTED, None)

    async def fail(_ledger: ManagedLedger, _name: str) -> None:
        await broker.transactions._clean_segment(TOPIC, [ack])
        assert await operations(broker, txn) == [ack]
        raise MetadataError("not now")

    monkeypatch.setattr(ManagedLedger, "delete_cursor", fail)
    with pytest.raises(MetadataError, match="not now"):
        await topic.unsubscribe("s", force=False)
