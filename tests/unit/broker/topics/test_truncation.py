"""Truncation beside transactions, resent messages and reloads of the topic."""

from typing import Any

import pytest

from broker.topics.subscription import Subscription
from broker.topics.topic_requests import SkipBacklog
from broker.topics.truncation import TruncationRefused, truncate
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from tests.support.waiting import until
from tests.unit.broker.topics.test_end_to_end import SHARED
from tests.unit.broker.topics.test_resend import deduplicate
from tests.unit.broker.topics.test_transactional_acks import TOPIC, Stage, got, payloads, stage

__all__ = ["stage"]

FIRST = pb.MessageIdData(ledger_id=2**64 - 1, entry_id=2**64 - 1)


async def test_messages_of_an_open_transaction_stay_and_come_with_its_commit(stage: Stage) -> None:
    await stage.subscribe(SHARED, permits=0)
    topic, txn = await stage.topic(), await stage.begin()
    await stage.send(txn, b"in the transaction")
    await truncate(topic)
    assert (await stage.subscription()).backlog == 1
    await stage.commit(txn)
    consumer = await stage.subscribe(SHARED)
    assert payloads(await got(consumer, 1)) == ["in the transaction"]
    await truncate(topic)
    assert topic.ledger.entry_count == 0


async def test_messages_of_an_open_transaction_stay_in_a_topic_without_subscriptions(
    stage: Stage,
) -> None:
    topic, txn = await stage.topic(), await stage.begin()
    await truncate(topic)
    await stage.send(txn, b"in the transaction")
    await truncate(topic)
    await stage.commit(txn)
    consumer = await stage.subscribe(SHARED)
    assert payloads(await got(consumer, 1)) == ["in the transaction"]


async def test_messages_that_are_published_meanwhile_stay_and_keep_no_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await stage.topic()
    producer = await stage.client.create_producer(TOPIC)
    await producer.send(b"before")
    save = topic.sequence_store.save

    async def sending() -> None:
        await producer.send(b"meanwhile")
        await save()

    monkeypatch.setattr(topic.sequence_store, "save", sending)
    await truncate(topic)
    assert topic.ledger.entry_count == 1
    consumer = await stage.subscribe(SHARED)
    assert payloads(await got(consumer, 1)) == ["meanwhile"]


async def test_a_compaction_that_begins_meanwhile_ends_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = await stage.topic()
    entries, save = topic.ledger.entry_count, topic.sequence_store.save

    async def compacting() -> None:
        await topic.create_subscription(COMPACTION_CURSOR, EARLIEST)
        await save()

    monkeypatch.setattr(topic.sequence_store, "save", compacting)
    with pytest.raises(TruncationRefused, match="when its compaction has ended"):
        await truncate(topic)
    assert topic.ledger.entry_count == entries


async def test_an_acknowledgement_in_a_transaction_ends_after_its_message_went(
    stage: Stage,
) -> None:
    consumer = await stage.subscribe(SHARED)
    message, *_ = await got(consumer, 5)
    txn = await stage.begin()
    await stage.ack(consumer, txn, message)
    await truncate(await stage.topic())
    await stage.commit(txn)
    await stage.nothing_left()
    assert (await stage.subscription()).backlog == 0


@pytest.mark.parametrize("truncates", [True, False], ids=["truncate", "skip-backlog"])
async def test_a_reader_that_leaves_meanwhile_does_not_stop_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    await stage.subscribe(SHARED, permits=0)
    topic = await stage.topic()
    reader = await stage.client.subscribe(
        TOPIC, "z", pb.CommandSubscribe(durable=False, start_message_id=FIRST)
    )
    seek = Subscription.seek

    async def leaving(subscription: Subscription, *to: Any) -> None:  # noqa: ANN401
        if subscription.name == "z":
            await reader.close()
        await seek(subscription, *to)

    monkeypatch.setattr(Subscription, "seek", leaving)
    if truncates:
        await truncate(topic)
        assert topic.ledger.entry_count == 0
    else:
        await stage.broker.topics.cluster.ask(SkipBacklog(topic.name, ""))
    assert (await stage.subscription()).backlog == 0
    await until(lambda: "z" not in topic.subscriptions)


async def test_a_producer_continues_its_sequence_after_a_truncation(stage: Stage) -> None:
    await deduplicate(stage.broker)
    topic = await stage.topic()
    named = pb.CommandProducer(producer_name="p")
    producer = await stage.client.create_producer(TOPIC, named)
    await producer.send(b"x")
    await producer.close()
    await truncate(topic)
    await stage.reload()
    assert (await stage.topic()).ledger.entry_count == 0
    again = await stage.client.create_producer(TOPIC, named)
    assert again.success.last_sequence_id == 0


async def test_a_topic_that_is_being_compacted_is_not_truncated(stage: Stage) -> None:
    topic = await stage.topic()
    entries = topic.ledger.entry_count
    topic.compaction.started(1)
    with pytest.raises(TruncationRefused, match="when its compaction has ended"):
        await truncate(topic)
    assert topic.ledger.entry_count == entries
