"""Transactions of clients before version 5 on ordinary topics, on a whole broker."""

import asyncio
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.policies.policy_kinds import TRANSACTION_COORDINATOR
from broker.policies.topic_policies import UNSET, PoliciesOfTopic, TopicPolicies
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from magnetar.protocol.txn_id import TxnId
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import BrokerError, Delivery, RawClient
from tests.support.raw_handles import RawConsumer
from tests.unit.broker.transactions.conftest import Connect, Kind, TransactionClient
from tests.unit.broker.transactions.test_writes import OTHER, TOPIC, read_to, reader, send
from txn.decisions import Decisions
from txn.records import TxnState

COORDINATORS = "persistent://pulsar/system/transaction_coordinator_assign"
NO_ENTRY = 2**64 - 1
Txn = tuple[int, int]


@pytest.fixture
def late_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners never learn of an end by their watch of headers."""
    monkeypatch.setattr(Decisions, "follow", lambda *_: None)


async def acknowledge(
    consumer: RawConsumer,
    txn: Txn,
    *messages: pb.MessageIdData,
    cumulative: bool = False,
) -> None:
    """ACK in a transaction, answered by its request id."""
    command = consumer.ack_command(messages, cumulative, None)
    command.txnid_most_bits, command.txnid_least_bits = txn
    await consumer.client.request(Kind.ACK, command)


async def quiet(consumer: RawConsumer) -> bool:
    """Whether nothing more is on its way: PING is answered after what was sent before."""
    await consumer.client.ping()
    return consumer.messages.empty()


async def shared(client: RawClient, topic: str = TOPIC) -> RawConsumer:
    options = pb.CommandSubscribe(
        initial_position=pb.CommandSubscribe.Earliest, sub_type=pb.CommandSubscribe.Shared
    )
    return await client.subscribe(topic, "shared", options, permits=1000)


async def published(client: TransactionClient, count: int, topic: str = TOPIC) -> None:
    producer = await client.raw.create_producer(topic)
    for number in range(count):
        await send(producer, None, b"%d" % number)
    await producer.close()


def payloads(messages: list[Delivery]) -> list[bytes]:
    return [each.payload for each in messages]


@pytest.mark.usefixtures("late_watch")
async def test_transaction_on_two_topics_is_seen_right_after_its_end(
    broker: Broker, v4_client: TransactionClient
) -> None:
    raw = v4_client.raw
    await broker.topics.partitioned.create(parse_topic_name(OTHER), 1)
    topics = (TOPIC, f"{OTHER}-partition-0")
    producers = [await raw.create_producer(topic) for topic in topics]
    consumers = [await reader(raw, topic) for topic in topics]
    await v4_client.attach(1)
    for end, seen in ((pb.ABORT, 0), (pb.COMMIT, 1)):
        txn = await v4_client.begin(1)
        await v4_client.add_partitions(txn, *topics)
        for producer in producers:
            await send(producer, txn, b"inside")
        for consumer in consumers:
            assert await quiet(consumer)
            assert (await consumer.last_message_id()).last_message_id.entry_id == NO_ENTRY
        await v4_client.end(txn, end)
        for consumer in consumers:
            # `hasMessageAvailable` of a client is this request.
            last = (await consumer.last_message_id()).last_message_id
            assert (last.entry_id != NO_ENTRY) == bool(seen)
            assert payloads([await consumer.receive()] if seen else []) == [b"inside"] * seen
            assert await quiet(consumer)


@pytest.mark.usefixtures("late_watch")
async def test_end_is_answered_when_subscriptions_have_carried_it_out(
    broker: Broker, v4_client: TransactionClient
) -> None:
    await published(v4_client, 4)
    consumer = await shared(v4_client.raw)
    messages = [await consumer.receive() for _ in range(4)]
    topic = broker.topics.loaded()[TOPIC]
    cursor = topic.subscriptions["shared"].cursor
    committed, aborted = await v4_client.begin(), await v4_client.begin()
    for txn, part in ((committed, messages[:2]), (aborted, messages[2:])):
        await v4_client.add_subscription(txn, TOPIC, "shared")
        await acknowledge(consumer, txn, *(each.message_id for each in part))
    before = cursor.mark_delete
    await v4_client.end(committed)
    assert cursor.mark_delete > before
    await v4_client.end(aborted, pb.ABORT)
    again = [await consumer.receive() for _ in range(2)]
    assert payloads(again) == [b"2", b"3"]
    assert await quiet(consumer)


async def test_cumulative_and_batch_index_acknowledgements(v4_client: TransactionClient) -> None:
    await published(v4_client, 3)
    consumer = await reader(v4_client.raw)
    for end in (pb.ABORT, pb.COMMIT):
        messages = [await consumer.receive() for _ in range(3)]
        assert payloads(messages) == [b"0", b"1", b"2"]
        txn = await v4_client.begin()
        await v4_client.add_subscription(txn, TOPIC, "s")
        await acknowledge(consumer, txn, messages[1].message_id, cumulative=True)
        await v4_client.end(txn, end)
    assert await quiet(consumer)
    await consumer.close()
    consumer = await reader(v4_client.raw)
    assert payloads([await consumer.receive()]) == [b"2"]
    producer = await v4_client.raw.create_producer(TOPIC)
    await producer.send(
        b"batch",
        metadata=pb.MessageMetadata(num_messages_in_batch=2),
        send=pb.CommandSend(num_messages=2),
    )
    batch = (await consumer.receive()).message_id
    first, both = pb.MessageIdData(), pb.MessageIdData()
    for part, words in ((first, [0b10]), (both, [0b00])):
        part.CopyFrom(batch)
        part.batch_size = 2
        part.ack_set.extend(words)
    txn, other = await v4_client.begin(), await v4_client.begin()
    await acknowledge(consumer, txn, first)
    with pytest.raises(BrokerError) as conflict:
        await acknowledge(consumer, other, both)
    assert conflict.value.code == pb.TransactionConflict
    await v4_client.end(txn)
    await v4_client.end(other, pb.ABORT)


async def test_conflicts_and_requests_after_the_end(v4_client: TransactionClient) -> None:
    await published(v4_client, 1)
    consumer = await shared(v4_client.raw)
    message = (await consumer.receive()).message_id
    txn, other = await v4_client.begin(), await v4_client.begin()
    await acknowledge(consumer, txn, message)
    for again in (txn, other):
        with pytest.raises(BrokerError) as conflict:
            await acknowledge(consumer, again, message)
        assert conflict.value.code == pb.TransactionConflict
    await v4_client.end(txn)
    for late, code in (
        (v4_client.end(txn, pb.ABORT), pb.InvalidTxnStatus),
        (v4_client.add_partitions(txn, TOPIC), pb.InvalidTxnStatus),
        (v4_client.add_subscription(txn, TOPIC, "shared"), pb.InvalidTxnStatus),
        (v4_client.end((0, 4711)), pb.TransactionNotFound),
    ):
        with pytest.raises(BrokerError) as refused:
            await late
        assert refused.value.code == code


async def test_requests_that_arrive_twice_are_answered_alike(
    connect: Connect, v4_client: TransactionClient
) -> None:
    """After a reconnect clients send ADD_* and END_TXN again."""
    await published(v4_client, 0)
    consumer = await reader(v4_client.raw)
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin()
    again = TransactionClient(await connect(), scalable=False)
    for client in (v4_client, again):
        await client.add_partitions(txn, TOPIC)
        await client.add_subscription(txn, TOPIC, "s")
    await send(producer, txn, b"once")
    await again.add_partitions(txn, TOPIC)
    await asyncio.gather(v4_client.end(txn), again.end(txn))
    await again.end(txn)
    assert payloads([await consumer.receive()]) == [b"once"]
    assert await quiet(consumer)


@pytest.mark.parametrize(
    "topic",
    [
        "persistent://public/default/missing",
        "non-persistent://public/default/t",
        "topic://public/default/t",
        "segment://public/default/t/0000-ffff-0",
        COORDINATORS,
    ],
)
async def test_topics_that_take_no_part_are_refused(
    v4_client: TransactionClient, topic: str
) -> None:
    txn = await v4_client.begin()
    for request in (
        v4_client.add_partitions(txn, topic),
        v4_client.add_subscription(txn, topic, "s"),
    ):
        with pytest.raises(BrokerError) as refused:
            await request
        assert refused.value.code == pb.NotAllowedError
        assert "takes no part" in refused.value.message
    await v4_client.end(txn)


async def test_transactions_of_both_kinds_meet_on_one_topic(
    v4_client: TransactionClient, txn_client: TransactionClient
) -> None:
    consumer = await reader(v4_client.raw)
    producer = await txn_client.raw.create_producer(TOPIC)
    older, newer = await v4_client.begin(), await txn_client.begin()
    assert (older, newer) == ((0, 0), (0, 1))
    for client, txn in ((v4_client, older), (txn_client, newer)):
        await client.add_partitions(txn, TOPIC)
        await send(producer, txn, b"%d" % txn[1])
    await send(producer, None, b"plain")
    await txn_client.end(newer)
    assert await quiet(consumer)
    await v4_client.end(older, pb.ABORT)
    assert payloads([await consumer.receive(), await consumer.receive()]) == [b"1", b"plain"]


async def test_deleting_a_topic_releases_its_part_of_a_transaction(
    broker: Broker, v4_client: TransactionClient
) -> None:
    await published(v4_client, 1)
    await published(v4_client, 0, OTHER)
    consumer, other = await shared(v4_client.raw), await reader(v4_client.raw, OTHER)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC, OTHER)
    for topic in (TOPIC, OTHER):
        await send(await v4_client.raw.create_producer(topic), txn, b"inside")
    await acknowledge(consumer, txn, (await consumer.receive()).message_id)
    await broker.topics.delete(parse_topic_name(TOPIC), force=True)
    found = await broker.transactions.store.operations_of(TxnId(*txn))
    assert [each.segment for each in found] == [OTHER]
    await v4_client.end(txn)
    assert await read_to(other, b"inside") == [b"inside"]


async def test_a_namespace_refuses_transactions_of_v4_clients(
    broker: Broker, v4_client: TransactionClient, txn_client: TransactionClient
) -> None:
    elsewhere = "persistent://public/other/t"
    await broker.namespaces.create(NamespaceName("public", "other"))
    for topic in (TOPIC, elsewhere):
        await published(v4_client, 1, topic)
    consumer = await reader(v4_client.raw)
    producer = await v4_client.raw.create_producer(TOPIC)
    joined = await v4_client.begin()
    await v4_client.add_partitions(joined, TOPIC)
    await send(producer, joined, b"joined")
    member, namespace = TRANSACTION_COORDINATOR.member, NamespaceName("public", "default")
    await broker.namespaces.change(namespace, lambda raw: raw.update({member: False}))
    txn = await v4_client.begin()
    for request in (
        v4_client.add_partitions(txn, elsewhere, TOPIC),
        v4_client.add_subscription(txn, TOPIC, "s"),
    ):
        with pytest.raises(BrokerError, match="transactionCoordinatorEnabled") as refused:
            await request
        assert refused.value.code == pb.NotAllowedError
        assert "public/default" in refused.value.message
    await v4_client.add_partitions(txn, elsewhere)
    later = await txn_client.begin()
    await txn_client.add_partitions(later, TOPIC)
    for each in (joined, txn):
        await v4_client.end(each)
    await txn_client.end(later)
    assert await read_to(consumer, b"joined") == [b"0", b"joined"]
    await broker.namespaces.change(namespace, lambda raw: raw.pop(member))
    again = await v4_client.begin()
    await v4_client.add_partitions(again, TOPIC)
    await v4_client.end(again)


async def test_adding_a_topic_to_a_transaction_reads_no_policies_of_topics(
    v4_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the namespace are in memory."""
    await published(v4_client, 1)
    read: list[TopicName] = []

    async def get(_: TopicPolicies, name: TopicName) -> PoliciesOfTopic:
        read.append(name)
        return UNSET

    monkeypatch.setattr(TopicPolicies, "get", get)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    await v4_client.end(txn)
    assert read == []


async def test_answers_have_both_numbers_of_the_transaction(v4_client: TransactionClient) -> None:
    """Pulsar's Go client ends its process otherwise."""
    for tc in (0, 99):
        answer = await v4_client.raw_answer(Kind.NEW_TXN, pb.CommandNewTxn(request_id=1, tc_id=tc))
        assert answer.new_txn_response.HasField("txnid_most_bits")
        assert answer.new_txn_response.HasField("txnid_least_bits")


async def test_requests_between_brokers_are_refused_in_their_own_answers(
    v4_client: TransactionClient,
) -> None:
    on_partition = await v4_client.raw_answer(
        Kind.END_TXN_ON_PARTITION, pb.CommandEndTxnOnPartition(request_id=1, txnid_most_bits=3)
    )
    on_subscription = await v4_client.raw_answer(
        Kind.END_TXN_ON_SUBSCRIPTION,
        pb.CommandEndTxnOnSubscription(request_id=1, txnid_most_bits=3),
    )
    for response in (
        on_partition.end_txn_on_partition_response,
        on_subscription.end_txn_on_subscription_response,
    ):
        assert (response.request_id, response.txnid_most_bits) == (1, 3)
        assert response.error == pb.NotAllowedError
        assert "END_TXN" in response.message


async def test_timeout_ends_a_transaction_that_nobody_ends(
    broker: Broker, v4_client: TransactionClient
) -> None:
    consumer = await reader(v4_client.raw)
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin(ttl_ms=2000)
    await v4_client.add_partitions(txn, TOPIC)
    await send(producer, txn, b"late")
    await send(producer, None, b"after")
    assert payloads([await consumer.receive()]) == [b"after"]
    stored = await broker.transactions.store.read_header(TxnId(*txn))
    assert stored is not None
    assert stored.header.state is TxnState.ABORTED


async def test_end_is_answered_though_an_owner_does_not_carry_it_out(
    broker: Broker, v4_client: TransactionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Topic, "carry_out_end", never)
    set_bound(monkeypatch, "TXN_END_CARRIED_OUT_S", 0.05)
    producer = await v4_client.raw.create_producer(TOPIC)
    txn = await v4_client.begin()
    await v4_client.add_partitions(txn, TOPIC)
    await send(producer, txn, b"inside")
    await v4_client.end(txn)
    assert not broker.transactions.coordinators.open_transactions()
    assert payloads([await (await reader(v4_client.raw)).receive()]) == [b"inside"]


async def test_switched_off_for_v4_clients_alone(tmp_path: Path) -> None:
    async with running(tmp_path, transaction_coordinator_enabled=False) as broker:
        raw = await RawClient.open("127.0.0.1", broker.port)
        for request in (
            TransactionClient(raw, scalable=False).attach(),
            TransactionClient(raw, scalable=False).begin(),
        ):
            with pytest.raises(BrokerError, match="transaction_coordinator_enabled") as refused:
                await request
            assert refused.value.code == pb.NotAllowedError
        await TransactionClient(raw).begin()
        await raw.close()
