"""In which order a whole broker loads a segment that others may own (W7, W8, A3)."""

import dataclasses
from collections.abc import Awaitable, Callable

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.unit.broker.transactions.conftest import TransactionClient
from txn.decisions import Decisions

TOPIC = "persistent://public/default/t"
NAME = parse_topic_name(TOPIC)


async def test_a_load_owns_then_fences_then_scans_then_follows_then_reads(
    broker: Broker, txn_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await txn_client.raw.create_producer(TOPIC)
    consumer = await txn_client.raw.subscribe(TOPIC, "s", permits=10)
    await producer.send(b"x")
    message = (await consumer.receive()).message_id
    most, least = await txn_client.begin()
    await txn_client.add_partitions((most, least), TOPIC)
    ack = pb.CommandAck(
        consumer_id=consumer.consumer_id,
        ack_type=pb.CommandAck.Individual,
        message_id=[message],
        txnid_most_bits=most,
        txnid_least_bits=least,
    )
    await txn_client.raw.request(pb.BaseCommand.ACK, ack)
    await txn_client.raw.close()
    await broker.topics.unload(NAME)
    transactions = broker.transactions
    monkeypatch.setattr(
        transactions, "parts", dataclasses.replace(transactions.parts, eager_epochs=True)
    )
    steps: list[str] = []

    def note(owner: object, name: str) -> None:
        call: Callable[..., Awaitable[object]] = getattr(owner, name)

        async def noting(*args: object, **more: object) -> object:
            steps.append(name)
            return await call(*args, **more)

        monkeypatch.setattr(owner, name, noting)

    note(broker.managed_ledgers, "open")
    for name in ("put_owner", "claims_on", "read_header", "aborted_on", "acks_on"):
        note(transactions.store, name)
    follow = Decisions.follow

    def noting_follow(*args: object) -> None:
        steps.append("follow")
        follow(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Decisions, "follow", noting_follow)
    await broker.topics.get(NAME, create=False)
    assert steps == [
        "put_owner",
        "open",
        *("claims_on", "follow", "read_header", "aborted_on"),
        *("acks_on", "follow", "read_header"),
    ]
