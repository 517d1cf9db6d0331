"""Operators act on a topic while a transaction of a v4 client is open: it stays whole.

What the client wrote is seen in whole or not at all, and what it acknowledged is acknowledged or
comes again, on every other topic of the transaction too.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.app.service import Broker
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, RawClient
from tests.support.raw_handles import Delivery, RawConsumer
from tests.support.waiting import until, until_awaited
from tests.unit.broker.admin.conftest import Rest, asking_broker
from tests.unit.broker.transactions.conftest import Client, Kind
from tests.unit.broker.transactions.test_v4_clients import (
    acknowledge,
    payloads,
    published,
    quiet,
    shared,
)
from tests.unit.broker.transactions.test_writes import OTHER, TOPIC, reader, send, topic_of

NAMESPACE = "/admin/v2/namespaces/public/default"
PATH = "/admin/v2/persistent/public/default/t"
ENDS = pytest.mark.parametrize("end", [pb.COMMIT, pb.ABORT], ids=["commit", "abort"])


@pytest.fixture
async def rest(broker: Broker) -> AsyncIterator[Rest]:
    async with asking_broker(broker) as found:
        yield found


async def held(client: Client, count: int) -> tuple[RawConsumer, list[Delivery], tuple[int, int]]:
    """Five messages, of which a transaction acknowledges some, and it writes to another topic."""
    await published(client, 5)
    await published(client, 0, OTHER)
    consumer = await shared(client.raw)
    messages = [await consumer.receive() for _ in range(5)]
    txn = await client.begin()
    await client.add_subscription(txn, TOPIC, "shared")
    await acknowledge(consumer, txn, *(each.message_id for each in messages[:count]))
    await client.add_partitions(txn, OTHER)
    await send(await client.raw.create_producer(OTHER), txn, b"out")
    return consumer, messages, txn


async def is_whole_elsewhere(client: Client, end: "pb.TxnAction") -> None:
    """The other topic shows the transaction if it committed."""
    seen = await reader(client.raw, OTHER)
    await send(await client.raw.create_producer(OTHER), None, b"last")
    wanted = [b"out", b"last"] if end == pb.COMMIT else [b"last"]
    assert payloads([await seen.receive() for _ in wanted]) == wanted


async def until_nothing_is_left(broker: Broker) -> None:
    """No claim and no acknowledgement of any transaction is stored."""

    async def is_nothing_left() -> bool:
        return await broker.transactions.store.count_operations() == 0

    await until_awaited(is_nothing_left)


@ENDS
@pytest.mark.parametrize(
    "operation", ["skip/9", "expireMessages/0", "skip_all"], ids=["skip", "expire", "clear"]
)
async def test_skipped_messages_of_a_transaction_are_acknowledged_at_either_end(
    broker: Broker, rest: Rest, v4_client: Client, operation: str, end: "pb.TxnAction"
) -> None:
    consumer, _, txn = await held(v4_client, 2)
    await rest.done("POST", f"{PATH}/subscription/shared/{operation}")
    await v4_client.end(txn, end)
    await published(v4_client, 1)
    consumer = await shared(v4_client.raw) if consumer.events.qsize() else consumer
    assert payloads([await consumer.receive()]) == [b"0"]
    assert await quiet(consumer)
    await is_whole_elsewhere(v4_client, end)
    await until_nothing_is_left(broker)


@ENDS
async def test_reset_cursor_leaves_what_the_transaction_acknowledged(
    broker: Broker, rest: Rest, v4_client: Client, end: "pb.TxnAction"
) -> None:
    _, _, txn = await held(v4_client, 2)
    await rest.done("POST", f"{PATH}/subscription/shared/resetcursor/0")
    again = await shared(v4_client.raw)
    assert payloads([await again.receive() for _ in range(3)]) == [b"2", b"3", b"4"]
    assert await quiet(again)
    await v4_client.end(txn, end)
    if end == pb.ABORT:
        assert payloads([await again.receive() for _ in range(2)]) == [b"0", b"1"]
    assert await quiet(again)
    await is_whole_elsewhere(v4_client, end)
    await until_nothing_is_left(broker)


@ENDS
async def test_unsubscribing_releases_acknowledgements_and_keeps_the_transaction(
    broker: Broker, v4_client: Client, end: "pb.TxnAction"
) -> None:
    consumer, messages, txn = await held(v4_client, 2)
    await consumer.unsubscribe()
    with pytest.raises(BrokerError):
        await acknowledge(consumer, txn, messages[2].message_id)
    anew = await shared(v4_client.raw)
    assert payloads([await anew.receive() for _ in range(5)]) == [b"0", b"1", b"2", b"3", b"4"]
    await v4_client.end(txn, end)
    assert await quiet(anew)
    assert (await topic_of(broker)).subscriptions["shared"].backlog == 5
    await is_whole_elsewhere(v4_client, end)
    await until_nothing_is_left(broker)


@pytest.mark.parametrize(
    "operation",
    [
        "subscription/s/skip/9",
        "subscription/s/expireMessages/0",
        "all_subscription/expireMessages/0",
    ],
    ids=["skip", "expire", "expire all"],
)
async def test_operators_skip_nothing_behind_an_open_transaction(
    rest: Rest, v4_client: Client, operation: str
) -> None:
    consumer = await reader(v4_client.raw)
    producer = await v4_client.raw.create_producer(TOPIC)
    await send(producer, None, b"before")
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    await send(producer, txn, b"one")
    await send(producer, None, b"plain")
    await rest.done("POST", f"{PATH}/{operation}")
    await send(producer, txn, b"two")
    await v4_client.end(txn)
    await consumer.close()
    again = await reader(v4_client.raw)
    found = payloads([await again.receive() for _ in range(3)])
    assert found == [b"one", b"plain", b"two"]
    assert await quiet(again)


@ENDS
@pytest.mark.parametrize(
    "path",
    [f"{PATH}/subscription/s/skip_all", f"{NAMESPACE}/clearBacklog", f"{NAMESPACE}/clearBacklog/s"],
    ids=["skip_all", "clearBacklog", "clearBacklog of one"],
)
async def test_cleared_backlog_leaves_what_an_open_transaction_commits_later(
    rest: Rest, v4_client: Client, path: str, end: "pb.TxnAction"
) -> None:
    await (await reader(v4_client.raw)).close()
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    await send(producer, None, b"cleared")
    await send(producer, txn, b"one")
    await send(producer, None, b"behind")
    await rest.done("POST", path)
    await v4_client.end(txn, end)
    seen = await reader(v4_client.raw)
    wanted = [b"one", b"behind"] if end == pb.COMMIT else [b"behind"]
    assert payloads([await seen.receive() for _ in wanted]) == wanted
    assert await quiet(seen)


async def test_clearing_a_backlog_moves_no_subscription_back(rest: Rest, v4_client: Client) -> None:
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    await send(producer, txn, b"one")
    latest = await v4_client.raw.subscribe(TOPIC, "latest", permits=1000)
    await rest.done("POST", f"{PATH}/subscription/latest/skip_all")
    await send(producer, None, b"last")
    await v4_client.end(txn, pb.COMMIT)
    assert payloads([await latest.receive()]) == [b"last"]


@ENDS
async def test_subscription_at_the_end_begins_behind_what_an_open_transaction_wrote_so_far(
    v4_client: Client, end: "pb.TxnAction"
) -> None:
    """Subscribing at the end chooses a place in the topic, as in Pulsar."""
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    await send(producer, txn, b"one")
    latest = await v4_client.raw.subscribe(TOPIC, "latest", permits=1000)
    await send(producer, txn, b"two")
    await send(producer, None, b"last")
    await v4_client.end(txn, end)
    wanted = [b"two", b"last"] if end == pb.COMMIT else [b"last"]
    assert payloads([await latest.receive() for _ in wanted]) == wanted
    assert await quiet(latest)


async def test_messages_of_an_open_transaction_do_not_expire(
    broker: Broker, rest: Rest, v4_client: Client
) -> None:
    """They are of the year 1970 here, and expire as soon as they can be read."""
    await reader(v4_client.raw)
    producer = await v4_client.raw.create_producer(TOPIC)
    await rest.done("POST", f"{PATH}/messageTTL?messageTTL=1")
    topic = await topic_of(broker)
    subscription = topic.subscriptions["s"]
    await until(lambda: topic.policies.message_ttl_s == 1)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    for payload in (b"one", b"two"):
        await send(producer, txn, payload)
    await broker.message_expiry.check()
    assert subscription.backlog == 2
    await v4_client.end(txn)
    await broker.message_expiry.check()
    assert subscription.backlog == 0


@ENDS
async def test_terminated_topic_shows_an_open_transaction_when_it_commits(
    broker: Broker, rest: Rest, v4_client: Client, end: "pb.TxnAction"
) -> None:
    consumer = await reader(v4_client.raw)
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    for payload in (b"one", b"two"):
        await send(producer, txn, payload)
    status, _ = await rest.call("POST", f"{PATH}/terminate")
    assert status == 200
    with pytest.raises(BrokerError) as refused:
        await v4_client.raw.create_producer(TOPIC)
    assert refused.value.code == pb.TopicTerminatedError
    assert await quiet(consumer)
    assert consumer.events.empty(), "the end is reached when the transaction has ended"
    await v4_client.end(txn, end)
    if end == pb.COMMIT:
        messages = [await consumer.receive() for _ in range(2)]
        assert payloads(messages) == [b"one", b"two"]
        for each in messages:
            await consumer.ack_answered(each.message_id)
    event = await v4_client.raw.wait(consumer.events.get())
    assert event.type == Kind.REACHED_END_OF_TOPIC
    assert await quiet(consumer)
    await until_nothing_is_left(broker)


@ENDS
async def test_ledgers_with_what_a_transaction_acknowledged_stay_until_it_ends(
    tmp_path: Path, end: "pb.TxnAction"
) -> None:
    async with running(tmp_path, ledger_max_entries=5, ledger_min_age_s=0) as broker:
        client = Client(await RawClient.open("127.0.0.1", broker.port), scalable=False)
        consumer, messages, txn = await held(client, 2)
        await acknowledge_plainly(consumer, messages[2:])
        await published(client, 10)
        await acknowledge_plainly(consumer, [await consumer.receive() for _ in range(10)])
        first = messages[0].message_id.ledger_id
        assert await first_ledger_after_a_reload(broker) == first
        consumer = await shared(client.raw)
        assert await quiet(consumer)
        await client.end(txn, end)
        if end == pb.ABORT:
            again = [await consumer.receive() for _ in range(2)]
            assert payloads(again) == [b"0", b"1"]
            await acknowledge_plainly(consumer, again)
        left = await first_ledger_after_a_reload(broker)
        assert left is None or left > first
        await is_whole_elsewhere(client, end)
        await until_nothing_is_left(broker)
        await client.raw.close()


async def acknowledge_plainly(consumer: RawConsumer, messages: list[Delivery]) -> None:
    await consumer.ack_answered(*(each.message_id for each in messages))


async def first_ledger_after_a_reload(broker: Broker) -> int | None:
    """The first ledger that is kept; sequence ids are saved at the unload, and keep none."""
    await broker.topics.unload(parse_topic_name(TOPIC))
    ledger = (await topic_of(broker)).ledger
    await ledger.trim()
    return ledger.ledgers[0].ledger_id if ledger.ledgers else None
