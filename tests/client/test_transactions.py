"""Transactions and their keys, over raw producers and consumers: what a broker makes of them."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest

import magnetar
import magnetar.sync
from magnetar.errors import (
    AlreadyClosed,
    InvalidArgument,
    InvalidTransactionStatus,
    TransactionConflict,
    TransactionKeyFenced,
    TransactionNotFound,
    TransactionTimedOut,
    error_of,
)
from magnetar.layout_watch import LayoutWatch
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import payload_of
from magnetar.protocol.txn_id import TxnId
from magnetar.transactions.coordinators import Coordinators
from magnetar.transactions.states import TransactionState
from magnetar.transactions.transaction import Transaction
from tests.client.conftest import MakeTopic, Service
from tests.support.broker_process import running
from tests.support.child_process import HOST
from tests.support.raw_client import BrokerError, Delivery, RawClient, RawConsumer, RawProducer

SUBSCRIPTION = "sub"


@dataclass
class Raw:
    """A segment, written to and read without the client."""

    segment: str
    client: RawClient
    producer: RawProducer
    consumer: RawConsumer

    async def write(self, payload: bytes, txn: Transaction | None = None) -> None:
        if txn is None:
            await self.producer.send(payload)
            return
        told = txn.writing_to(self.segment)
        if told is not None:
            await told
        sent = asyncio.ensure_future(self._send_in(payload, txn.id))
        txn.track(sent)
        await sent

    async def _send_in(self, payload: bytes, txn: TxnId) -> None:
        metadata = pb.MessageMetadata(txnid_most_bits=txn.most, txnid_least_bits=txn.least)
        send = pb.CommandSend(txnid_most_bits=txn.most, txnid_least_bits=txn.least)
        await self.producer.send(payload, metadata=metadata, send=send)

    async def acknowledge(self, delivery: Delivery, txn: Transaction) -> None:
        told = txn.acknowledging_on(self.segment, SUBSCRIPTION)
        if told is not None:
            await told
        acknowledged = asyncio.ensure_future(self._acknowledge_in(delivery, txn.id))
        txn.track(acknowledged)
        await acknowledged

    async def _acknowledge_in(self, delivery: Delivery, txn: TxnId) -> None:
        ack = pb.CommandAck(
            consumer_id=self.consumer.consumer_id,
            ack_type=pb.CommandAck.Individual,
            message_id=[delivery.message_id],
            txnid_most_bits=txn.most,
            txnid_least_bits=txn.least,
        )
        try:
            await self.client.request(pb.BaseCommand.ACK, ack)
        except BrokerError as error:
            raise error_of(error.code, error.message) from error

    async def read(self, count: int) -> list[bytes]:
        return [bytes(payload_of((await self.consumer.receive()).entry)) for _ in range(count)]


@asynccontextmanager
async def raw_segment(url: str, client: magnetar.Client, topic: str) -> AsyncIterator[Raw]:
    watch = LayoutWatch(client.context, topic)
    await watch.open(20)
    segment = watch.layout.active[0].topic
    await watch.close()
    address = urlsplit(url)
    raw = await RawClient.open(str(address.hostname), int(address.port or 0))
    shared = pb.CommandSubscribe(
        sub_type=pb.CommandSubscribe.Shared, initial_position=pb.CommandSubscribe.Earliest
    )
    await raw.lookup(segment)
    consumer = await raw.subscribe(segment, SUBSCRIPTION, shared, permits=100)
    producer = await raw.create_producer(segment, pb.CommandProducer(txn_enabled=True))
    try:
        yield Raw(segment, raw, producer, consumer)
    finally:
        await raw.close()


@pytest.fixture
async def raw(service: Service, client: magnetar.Client, topic: MakeTopic) -> AsyncIterator[Raw]:
    """A segment of a new topic."""
    async with raw_segment(service.url, client, (await topic()).name) as raw:
        yield raw


async def test_commit_lets_it_be_seen(client: magnetar.Client, raw: Raw) -> None:
    async with client.transaction(timeout_s=30) as txn:
        await raw.write(b"inside", txn)
        await raw.write(b"after")
        await raw.client.ping()
        assert raw.consumer.messages.empty()
    assert txn.state is TransactionState.COMMITTED
    assert await raw.read(2) == [b"inside", b"after"]


async def test_an_error_leaves_nothing(client: magnetar.Client, raw: Raw) -> None:
    with pytest.raises(KeyError):  # noqa: PT012
        async with client.transaction(timeout_s=30) as txn:
            await raw.write(b"inside", txn)
            raise KeyError("mine")
    assert txn.state is TransactionState.ABORTED
    await raw.write(b"after")
    assert await raw.read(1) == [b"after"]


async def test_acknowledgements_come_back_after_an_abort(client: magnetar.Client, raw: Raw) -> None:
    await raw.write(b"once")
    delivery = await raw.consumer.receive()
    async with client.transaction(timeout_s=30) as txn:
        await raw.acknowledge(delivery, txn)
        await txn.abort()
    again = await raw.consumer.receive()
    assert again.message_id == delivery.message_id


async def test_a_conflict(client: magnetar.Client, raw: Raw) -> None:
    await raw.write(b"wanted")
    delivery = await raw.consumer.receive()
    async with client.transaction(timeout_s=30) as first:
        await raw.acknowledge(delivery, first)
        second = await client.transaction(timeout_s=30)
        with pytest.raises(TransactionConflict):
            await raw.acknowledge(delivery, second)
        with pytest.raises(TransactionConflict):
            await second.commit()
        assert second.state is TransactionState.ABORTED
    assert first.state is TransactionState.COMMITTED


async def test_ends_that_are_asked_for_again(client: magnetar.Client) -> None:
    coordinators = Coordinators(client.context)
    txn = await client.transaction(timeout_s=30)
    await txn.commit()
    await coordinators.end(txn.id, commit=True)
    with pytest.raises(InvalidTransactionStatus):
        await coordinators.end(txn.id, commit=False)
    with pytest.raises(TransactionNotFound):
        await coordinators.end(TxnId(txn.id.most, 1 << 40), commit=True)
    await coordinators.close()


async def test_coordinators_take_turns(client: magnetar.Client) -> None:
    begun = [await client.transaction(timeout_s=30) for _ in range(4)]
    numbers = [txn.id.most for txn in begun]
    assert numbers[0] == 1
    assert len(set(numbers)) > 1
    for txn in begun:
        await txn.abort()


async def test_an_aborted_elsewhere_cannot_commit(client: magnetar.Client, raw: Raw) -> None:
    coordinators = Coordinators(client.context)
    txn = await client.transaction(timeout_s=30)
    await raw.write(b"inside", txn)
    await coordinators.end(txn.id, commit=False)
    with pytest.raises(InvalidTransactionStatus):
        await txn.commit()
    assert txn.state is TransactionState.FAILED
    await coordinators.close()


@pytest.mark.magnetar_only("deadlines are looked at every 60 s")
async def test_time_is_up(client: magnetar.Client, raw: Raw) -> None:
    with pytest.raises(TransactionTimedOut):  # noqa: PT012
        async with client.transaction(timeout_s=0.3) as txn:
            await raw.write(b"inside", txn)
            # Behind it, and so seen when the broker has aborted it by its own clock.
            await raw.write(b"after")
            assert await raw.read(1) == [b"after"]
    assert txn.state is TransactionState.TIMED_OUT


@pytest.mark.magnetar_only("it has no transaction keys")
async def test_a_key_fences_who_held_it(client: magnetar.Client, service: Service) -> None:
    name = f"billing-{uuid.uuid4().hex[:8]}"  # others have keys on this broker, too
    async with magnetar.connect(service.url) as other:
        first = await client.transaction_key(name)
        assert first.last_transaction is None
        async with client.transaction(timeout_s=30, key=first) as done:
            pass
        left_open = await client.transaction(timeout_s=30, key=first)
        second = await other.transaction_key(name, epoch=first.epoch)
        assert second.epoch > first.epoch
        assert second.last_transaction is not None
        assert second.last_transaction.id == left_open.id
        assert second.last_transaction.committed is False
        assert done.state is TransactionState.COMMITTED
        with pytest.raises(TransactionKeyFenced):
            await left_open.commit()
        with pytest.raises(TransactionKeyFenced):
            await client.transaction(timeout_s=30, key=first)
        assert first.is_fenced
        with pytest.raises(TransactionKeyFenced):
            await client.transaction_key(name, epoch=first.epoch)
        with pytest.raises(TransactionKeyFenced):
            await client.attach_transaction_key(name, first.epoch)
        async with other.transaction(timeout_s=30, key=second):
            pass


@pytest.mark.magnetar_only("it has no transaction keys")
async def test_several_share_an_epoch(client: magnetar.Client, service: Service) -> None:
    async with magnetar.connect(service.url) as other:
        driver = await client.transaction_key("driver")
        worker = await other.attach_transaction_key("driver", driver.epoch)
        async with other.transaction(timeout_s=30, key=worker):
            with pytest.raises(InvalidTransactionStatus):
                # One at a time.
                await client.transaction(timeout_s=30, key=driver)
        async with client.transaction(timeout_s=30, key=driver):
            pass
        assert not driver.is_fenced


@pytest.mark.magnetar_only("its broker is started and killed here, and is Magnetar")
async def test_a_broker_that_dies_in_the_middle(tmp_path: Path) -> None:
    topic = "persistent://public/default/outage"
    async with (
        running(tmp_path) as broker,
        magnetar.connect(url := f"pulsar://{HOST}:{broker.port}") as client,
    ):
        async with raw_segment(url, client, topic) as raw:
            txn = await client.transaction(timeout_s=60)
            await raw.write(b"inside", txn)
        broker.kill()
        commit = asyncio.ensure_future(txn.commit())
        await broker.start()
        await commit
        async with raw_segment(url, client, topic) as raw:
            assert await raw.read(1) == [b"inside"]


async def test_a_transaction_is_begun_used_and_ended_by_three(
    service: Service, topic: MakeTopic
) -> None:
    name = str(await topic())
    async with (
        magnetar.connect(service.url) as first,
        magnetar.connect(service.url) as second,
        magnetar.connect(service.url) as third,
        second.producer(name) as producer,
        third.checkpoint_consumer(name) as reader,
    ):
        for commit in (False, True):
            txn = await first.begin_transaction(timeout_s=60)
            async with second.attach_transaction(txn) as attached:
                await producer.send(b"%d" % commit, transaction=attached)
                await attached.settled()
            with pytest.raises(AlreadyClosed):
                await producer.send(b"late", transaction=attached)
            await first.close() if commit else None
            with pytest.raises(InvalidArgument, match="commit is 'no'; give it True or False"):
                await third.end_transaction(txn, commit=cast("bool", "no"))
            for _ in range(2):
                await third.end_transaction(txn, commit=commit)
            with pytest.raises(InvalidTransactionStatus):
                await third.end_transaction(txn, commit=not commit)
        assert (await reader.receive(timeout_s=20)).value == b"1"
        with pytest.raises(TransactionNotFound):
            await third.end_transaction(TxnId(txn.most, txn.least + 10_000), commit=True)


async def test_threads_begin_use_and_end_one(service: Service, topic: MakeTopic) -> None:
    name = str(await topic())

    def work() -> bytes:
        with magnetar.sync.connect(service.url) as client, client.producer(name) as producer:
            txn = client.begin_transaction()
            with client.attach_transaction(txn) as attached:
                producer.send_nowait(b"one", transaction=attached)
                attached.settled()
            client.end_transaction(txn, commit=True)
            with client.checkpoint_consumer(name) as reader:
                return reader.receive(timeout_s=20).value

    assert await asyncio.to_thread(work) == b"one"
