"""ADD_PARTITION_TO_TXN lets owners join; the collector has them look again."""

import asyncio
from collections.abc import Sequence

import pytest

from broker.app.service import Broker
from broker.placement import BrokerAddress
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.txn_id import CoordinatorId, TxnId
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.broker.transactions.conftest import TransactionClient
from txn import records
from txn.cleanup_requests import CleanupRequests
from txn.collector import Collector
from txn.records import AckedPosition, AckRecord, Claim, TxnState

TOPIC = "persistent://public/default/t"


async def operations(broker: Broker, txn: TxnId) -> list[Claim | AckRecord]:
    return await broker.transactions.store.operations_of(txn)


def collector_of(broker: Broker) -> Collector:
    """One that collects at once what has ended."""
    transactions = broker.transactions
    return Collector(
        transactions.parts,
        transactions.coordinators.leads,
        transactions._clean_segment,
        interval_s=300,
        retention_s=0,
    )


async def test_a_topic_that_is_added_has_joined_when_that_is_answered(
    broker: Broker, txn_client: TransactionClient
) -> None:
    await txn_client.raw.create_producer(TOPIC)
    txn = TxnId(*await txn_client.begin())
    await txn_client.add_partitions(txn, TOPIC, "persistent://public/default/not-there")
    (claim,) = await operations(broker, txn)
    assert claim.segment == TOPIC
    await txn_client.add_partitions(txn, TOPIC)
    assert await operations(broker, txn) == [claim]


async def test_leftover_records_of_ended_transactions_are_collected(
    broker: Broker, txn_client: TransactionClient
) -> None:
    """W11, A6: on a topic that is not loaded, one without the subscription, one that is gone."""
    transactions = broker.transactions
    collector = collector_of(broker)
    producer = await txn_client.raw.create_producer(TOPIC)
    await broker.topics.loaded()[TOPIC].create_subscription("s", EARLIEST)
    await producer.close()
    await broker.topics.unload(broker.topics.loaded()[TOPIC].name)
    left: list[TxnId] = []
    for action in (TxnState.COMMITTED, TxnState.ABORTED):
        for segment in (TOPIC, "persistent://public/default/gone", "no topic at all"):
            txn = await transactions.coordinators.begin(CoordinatorId(0), 60_000, None)
            await transactions.coordinators.end_transaction(txn, action, None)
            await transactions.store.put_claim(Claim(txn, segment, 0, Position(1, 2)))
            for subscription in ("s", "other"):
                acked = (AckedPosition(Position(1, 1)),)
                await transactions.store.put_ack(
                    AckRecord(txn, segment, subscription, 0, 1, False, acked)
                )
            left.append(txn)
    for _ in range(50):
        if not any([await transactions.store.read_header(txn) for txn in left]):
            break
        await collector.collect()
    assert [await operations(broker, txn) for txn in left] == [[]] * len(left)
    assert [await transactions.store.read_header(txn) for txn in left] == [None] * len(left)


async def test_late_records_of_a_stale_owner_on_a_loaded_topic_are_collected(
    broker: Broker, txn_client: TransactionClient
) -> None:
    """W11, A6: no load finds it, the owner looks again when it is asked."""
    await txn_client.raw.create_producer(TOPIC)
    await broker.topics.loaded()[TOPIC].create_subscription("s", EARLIEST)
    store, collector = broker.transactions.store, collector_of(broker)
    txns = [TxnId(*await txn_client.begin()) for _ in range(2)]
    for txn in txns:
        await store.put_claim(Claim(txn, TOPIC, 0, Position(1, 2)))
        acked = (AckedPosition(Position(1, 1)),)
        await store.put_ack(AckRecord(txn, TOPIC, "s", 0, 1, False, acked))
    ended, still_open = txns
    await txn_client.end(ended)
    async with asyncio.timeout(TIMEOUT_S):
        while await store.read_header(ended):
            await collector.collect()
    assert await operations(broker, ended) == []
    assert len(await operations(broker, still_open)) == 2


async def test_a_request_of_another_broker_is_answered_by_the_owner(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W11, A6: the collector there found what is left here; what is open stays."""
    store, gone = broker.transactions.store, "persistent://public/default/gone"
    await txn_client.raw.create_producer(TOPIC)
    txns = [TxnId(*await txn_client.begin()) for _ in range(2)]
    for txn in txns:
        for segment in (TOPIC, gone):
            await store.put_claim(Claim(txn, segment, 0, Position(1, 2)))
            acked = (AckedPosition(Position(1, 1)),)
            await store.put_ack(AckRecord(txn, segment, "gone", 0, 1, False, acked))
    ended, still_open = txns
    await txn_client.end(ended)
    cleanup_requests = [records.cleanup_request_key(segment) for segment in (TOPIC, gone)]
    elsewhere = BrokerAddress("pulsar://elsewhere:6650", broker_id="elsewhere:8080")
    monkeypatch.setattr(broker.placement, "owner_of", lambda _: elsewhere)
    await store.request_cleanup(TOPIC, 1)
    await store.request_cleanup(gone, 1)
    await broker.transactions.cleanup_requests._answer_all()
    assert None not in await broker.metadata.get_many(cleanup_requests), (
        "they are for somebody else"
    )
    monkeypatch.undo()
    await store.request_cleanup(TOPIC, 2)
    await store.request_cleanup(gone, 2)
    async with asyncio.timeout(TIMEOUT_S):
        while any(await broker.metadata.get_many(cleanup_requests)) or await operations(
            broker, ended
        ):
            await asyncio.sleep(0.001)
    assert len(await operations(broker, still_open)) == 4


async def test_requests_from_before_the_start_are_answered(broker: Broker) -> None:
    """One that comes while its segment is looked at stays, and is answered too."""
    store, looked = broker.transactions.store, list[str]()
    await broker.transactions.cleanup_requests.stop()

    async def look(segment: str, found: Sequence[Claim | AckRecord]) -> bool:
        if not looked:
            await store.request_cleanup(segment, 2)
        looked.append(segment)
        return True

    await store.request_cleanup(TOPIC, 1)
    cleanup_requests = CleanupRequests(store, look)
    cleanup_requests.start()
    await until(lambda: looked == [TOPIC, TOPIC])
    async with asyncio.timeout(TIMEOUT_S):
        while await broker.metadata.get(records.cleanup_request_key(TOPIC)):
            await asyncio.sleep(0.001)
    await cleanup_requests.stop()
