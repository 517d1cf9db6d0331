"""The persistence policy on bookies: the records of new ledgers have the copies that it says."""

import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

import magnetar
from magnetar.protocol import pulsar_pb2 as pb
from storage.ledger.bookkeeper.store import BookKeeperLedgerStore
from storage.managed_ledger.core import CURSOR, STREAM
from tests.cluster.bookkeeper.ledger_access import record_of, store_at
from tests.servers.bookie_cluster import BookieCluster
from tests.servers.zookeeper_part import ZooKeeperServer
from tests.support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster

SIZES = ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
NAMESPACE = "/namespaces/public/default/persistence"
Sizes = tuple[int, int, int]
OF_BROKER: Sizes = (1, 1, 1)
ACKS = 30
"""More than the record of a cursor is written before the cursor gets a ledger."""


def policy_of(sizes: Sizes) -> Mapping[str, object]:
    return {**dict(zip(SIZES, sizes, strict=True)), "managedLedgerMaxMarkDeleteRate": 0.0}


@pytest.fixture
async def broker(
    bookies: BookieCluster, zookeeper: ZooKeeperServer, tmp_path: Path
) -> AsyncIterator[BrokerProcess]:
    names = ("ledger_ensemble_size", "ledger_write_quorum", "ledger_ack_quorum")
    broker = BrokerProcess(
        tmp_path,
        {
            "metadata_store_url": f"zk:{zookeeper.address}/t{uuid.uuid4().hex[:12]}",
            "bookkeeper_metadata_service_uri": bookies.uri,
            **dict(zip(names, OF_BROKER, strict=True)),
        },
    )
    try:
        await broker.start()
        yield broker
    finally:
        broker.kill()
    assert not broker.faults(), broker.faults()


async def done(broker: BrokerProcess, method: str, path: str, body: object = None) -> None:
    status, answer = await broker.rest(method, path, body=body)
    assert status == 204, (path, answer)


async def sizes_of(store: BookKeeperLedgerStore, local_name: str) -> dict[str, list[Sizes]]:
    """The copies of each ledger of a topic, in the order of creation, by the name of its cursor.

    The data is under the name "".
    """
    found: dict[str, list[Sizes]] = {}
    for ledger_id in await store.list_ledgers():
        record = await record_of(store, ledger_id)
        if local_name in record.custom.get(STREAM, b"").decode():
            sizes = (record.ensemble_size, record.write_quorum, record.ack_quorum)
            found.setdefault(record.custom.get(CURSOR, b"").decode(), []).append(sizes)
    return found


async def test_new_ledgers_of_a_topic_have_the_copies_of_its_policy(
    broker: BrokerProcess, bookies: BookieCluster
) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    topic, path = f"persistent://public/default/{name}", f"/persistent/public/default/{name}"
    client = await broker.connect()

    async def send(count: int) -> None:
        producer = await client.create_producer(topic)
        for number in range(count):
            await producer.send(b"%d" % number)
        await producer.close()

    await client.subscribe(topic, "keeps-all")
    await send(1)
    await done(broker, "POST", f"{path}/persistence", policy_of((3, 2, 2)))
    assert (await broker.rest("GET", f"{path}/persistence", applied="true"))[1] == policy_of(
        (3, 2, 2)
    )
    # The ledger that is written to goes on; a topic that is unloaded ends it.
    await send(1)
    async with store_at(bookies.uri) as store:
        assert await sizes_of(store, name) == {"": [OF_BROKER]}
        await done(broker, "PUT", f"{path}/unload")
        await send(ACKS)
        earliest = pb.CommandSubscribe(initial_position=pb.CommandSubscribe.Earliest)
        consumer = await client.subscribe(topic, "s", earliest, permits=ACKS)
        for _ in range(ACKS):
            message = await consumer.receive()
            await consumer.ack_answered(message.message_id)
        assert await sizes_of(store, name) == {"": [OF_BROKER, (3, 2, 2)], "s": [(3, 2, 2)]}
        await done(broker, "DELETE", f"{path}/persistence")
        await done(broker, "POST", NAMESPACE, policy_of((2, 2, 1)))
        await done(broker, "PUT", f"{path}/unload")
        await send(1)
        assert (await sizes_of(store, name))[""] == [OF_BROKER, (3, 2, 2), (2, 2, 1)]
    await client.close()


async def test_ledgers_of_segments_have_the_copies_of_their_scalable_topic(
    broker: BrokerProcess, bookies: BookieCluster
) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    await broker.create_scalable(name, 2)
    path = f"/persistent/public/default/{name}/persistence"
    await done(broker, "POST", path, policy_of((3, 3, 2)))
    async with (
        magnetar.connect(f"pulsar://127.0.0.1:{broker.port}") as client,
        client.producer(f"topic://public/default/{name}", schema=str) as producer,
    ):
        for number in range(20):
            await producer.send("x", key=str(number))
    async with store_at(bookies.uri) as store:
        assert await sizes_of(store, name) == {"": [(3, 3, 2)] * 2}
