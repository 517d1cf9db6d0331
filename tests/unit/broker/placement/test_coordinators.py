"""Transaction coordinators on several brokers: shared evenly, and followed by who watches."""

import asyncio

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.txn_id import CoordinatorId
from tests.support.raw_client import BrokerError, RawClient, Session
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.transactions.conftest import TransactionClient
from txn.decisions import Decisions
from txn.records import TxnState

COORDINATORS = 4


def led(node: Node) -> set[CoordinatorId]:
    return {
        coordinator.coordinator_id for coordinator in node.broker.transactions.coordinators.led()
    }


async def shared_by(*nodes: Node) -> None:
    """Return when these lead everything, as evenly as can be, and all of them know."""
    most = -(-COORDINATORS // len(nodes))

    def even() -> bool:
        shares = [led(node) for node in nodes]
        known = [node.broker.transactions.coordinators.assignments() for node in nodes]
        return (
            set().union(*shares) == set(range(COORDINATORS))
            and sum(map(len, shares)) == COORDINATORS
            and max(map(len, shares)) <= most
            and all(
                one[number].broker_id == node.id
                for one in known
                for node in nodes
                for number in led(node)
                if number in one
            )
            and all(len(one) == COORDINATORS for one in known)
        )

    await until(even)


async def assignments(session: Session) -> dict[int, str]:
    snapshot = (await session.next()).watch_tc_assignments_update.snapshot
    return {one.tc_id: one.broker_service_url for one in snapshot.assignments}


async def watched(client: RawClient) -> Session:
    return TransactionClient(client).watch(1)


async def test_brokers_share_them_and_few_move(cluster: Cluster) -> None:
    first = await cluster.add()
    await shared_by(first)
    second = await cluster.add()
    await shared_by(first, second)
    before = led(first), led(second)
    third = await cluster.add()
    nodes = (first, second, third)
    await until(lambda: sum(len(led(node)) for node in nodes) == COORDINATORS)
    await shared_by(*nodes)
    assert (led(first), led(second)) == before, "two each are no more than a third, rounded up"


async def test_after_a_crash_others_lead_and_watchers_hear_of_it(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    client = TransactionClient(await second.client())
    session = client.watch(1)
    urls = set((await assignments(session)).values())
    assert urls == {first.placement.broker_url, second.placement.broker_url}
    theirs = min(led(first))
    begun = TransactionClient(await first.client())
    txn = await begun.begin(theirs)
    await first.kill()
    await shared_by(second)
    while set((await assignments(session)).values()) != {second.placement.broker_url}:
        pass
    await client.attach(theirs)
    await client.end(txn)
    number = (await client.begin(theirs))[1]
    assert number > txn[1], "a number is never given twice"


@pytest.mark.parametrize(
    ("scalable", "code"), [(True, pb.TransactionCoordinatorNotFound), (False, pb.ServiceNotReady)]
)
async def test_only_the_leader_is_connected_to(
    cluster: Cluster, scalable: bool, code: "pb.ServerError"
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    refused = []
    for node in (first, second):
        client = TransactionClient(await node.client(), scalable=scalable)
        for number in range(COORDINATORS):
            try:
                await client.attach(number)
            except BrokerError as error:
                refused.append((node.id, number, error.code))
    assert {(one, number) for one, number, _ in refused} == {
        *((first.id, number) for number in led(second)),
        *((second.id, number) for number in led(first)),
    }
    assert {each for *_, each in refused} == {code}


async def test_a_drained_broker_leads_nothing_and_its_transactions_go_on(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    theirs = min(led(first))
    txn = await TransactionClient(await first.client()).begin(theirs)
    await first.broker.drain()
    await first.stop()
    await shared_by(second)
    await TransactionClient(await second.client()).end(txn)


async def test_a_broker_that_stops_is_found_by_nobody_any_more(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock client never asks again if the connection is lost just after it was told yes."""
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    theirs = min(led(first))
    client = TransactionClient(await first.client())
    stopping, go_on = asyncio.Event(), asyncio.Event()
    hand_over = first.broker.topics.hand_over

    async def later() -> None:
        stopping.set()
        await go_on.wait()
        await hand_over()

    monkeypatch.setattr(first.broker.topics, "hand_over", later)
    drained = asyncio.ensure_future(first.broker.drain())
    await stopping.wait()
    try:
        with pytest.raises(BrokerError) as refused:
            await client.attach(theirs)
        assert refused.value.code == pb.TransactionCoordinatorNotFound
        with pytest.raises((BrokerError, ConnectionError), match=r"stops|closed"):
            await RawClient.open(
                "127.0.0.1",
                first.broker.port,
                pb.CommandConnect(
                    client_version="x",
                    proxy_to_broker_url=second.placement.broker_url.removeprefix("pulsar://"),
                ),
            )
    finally:
        go_on.set()
        await drained


async def test_a_transaction_spans_topics_of_several_brokers(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    topics = [f"persistent://public/default/{number}" for number in range(2)]
    producers = [
        await (await node.client()).create_producer(topic)
        for node, topic in zip((first, second), topics, strict=True)
    ]
    number = min(led(first))
    client = TransactionClient(await first.client())
    txn = await client.begin(number)
    await client.add_partitions(txn, *topics)
    for producer in producers:
        metadata = pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
        send = pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
        await producer.send(b"m", metadata=metadata, send=send)
    await client.end(txn)
    earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    for producer, topic in zip(producers, topics, strict=True):
        consumer = await producer.client.subscribe(topic, "s", earliest, permits=1)
        assert (await consumer.receive()).payload == b"m"


async def test_end_of_a_v4_client_is_answered_when_other_brokers_have_carried_it_out(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    topic = "persistent://public/default/t"
    producer = await (await second.client()).create_producer(topic)
    earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
    consumer = await producer.client.subscribe(topic, "s", earliest, permits=1)
    number = min(led(first))
    assigned = "persistent://pulsar/system/transaction_coordinator_assign"
    for node in (first, second):
        found = await (await node.client()).lookup(f"{assigned}-partition-{number}")
        assert found.broker_service_url == first.broker.placement.broker_url
    elsewhere = TransactionClient(await second.client(), scalable=False)
    with pytest.raises(BrokerError) as refused:
        await elsewhere.attach(number)
    assert refused.value.code == pb.ServiceNotReady
    client = TransactionClient(await first.client(), scalable=False)
    # Owners never learn of the end by their watch of headers.
    monkeypatch.setattr(Decisions, "follow", lambda *_: None)
    txn = await client.begin(number)
    await client.add_partitions(txn, topic)
    metadata = pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
    send = pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
    await producer.send(b"m", metadata=metadata, send=send)
    await client.end(txn)
    last = (await consumer.last_message_id()).last_message_id
    assert last.entry_id == 0
    assert (await consumer.receive()).payload == b"m"


@pytest.mark.parametrize("version", ["Pulsar-Go-v0.19.0", "Pulsar-Java-v4.0.9"])
async def test_go_client_is_made_to_look_a_coordinator_up_again(
    cluster: Cluster, version: str
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    connect = pb.CommandConnect(client_version=version)
    raw = await RawClient.open("127.0.0.1", second.broker.port, connect)
    client = TransactionClient(raw, scalable=False)
    number = min(led(first))
    with pytest.raises(BrokerError) as refused:
        await client.begin(number)
    assert refused.value.code == pb.TransactionCoordinatorNotFound
    if version.startswith("Pulsar-Go"):
        # It looks a coordinator up again only after it lost its connection.
        await raw.wait(raw.closed)
    else:
        await raw.ping()
    await raw.close()


async def test_another_broker_cleans_up_where_nobody_owns_the_topic_any_more(
    cluster: Cluster,
) -> None:
    """W11: what a crash left of an ended transaction is looked at by whoever would be chosen."""
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    topic = "persistent://public/default/t"
    producer = await (await first.client()).create_producer(topic)
    client = TransactionClient(await second.client())
    txn = await client.begin(min(led(second)))
    metadata = pb.MessageMetadata(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
    send = pb.CommandSend(txnid_most_bits=txn[0], txnid_least_bits=txn[1])
    await producer.send(b"m", metadata=metadata, send=send)
    await first.kill()
    await cluster.all_know(second)
    await shared_by(second)
    await client.end(txn)
    transactions = second.broker.transactions
    assert topic not in second.broker.topics.loaded()
    transactions.collector._retention_ms = -1000
    await transactions.collector.collect()
    assert topic in second.broker.topics.loaded()
    left = 1
    while left:
        await transactions.collector.collect()
        left = len(
            [page async for page in transactions.store.ended_headers(TxnState.COMMITTED, 2**60)]
        )


async def test_any_broker_lists_the_open_transactions_of_all_coordinators(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    await shared_by(first, second)
    begun = [
        await TransactionClient(await node.client()).begin(min(led(node)))
        for node in (second, first)
    ]
    in_pulsars_form = {f"({most},{least})" for most, least in begun}

    async def asked(node: Node, path: str) -> dict[str, object]:
        found = await cluster.rest(node, "GET", f"/admin/v3/transactions/{path}")
        assert isinstance(found, dict)
        return found

    for node in (first, second):
        assert (await asked(node, "slowTransactions/0")).keys() == in_pulsars_form
        oldest = await asked(node, "open?limit=1")
        assert oldest["open"] == 2
        assert isinstance(rows := oldest["transactions"], list)
        assert len(rows) == 1
        stats = await asked(node, "coordinatorStats")
        assert list(stats) == [str(number) for number in range(COORDINATORS)]
        assert str(stats).count("'ongoingTxnSize': 1") == 2
