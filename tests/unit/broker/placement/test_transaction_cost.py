"""What a transaction costs on the metadata store does not grow with the number of brokers."""

import asyncio

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.support.raw_client import RawProducer
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from txn.records import TxnState

TOPIC = "persistent://public/default/t"
TRANSACTIONS = 20
MOST_GROWTH = 1.2


def operations(cluster: Cluster) -> int:
    """Reads and writes of all brokers, and events that their watches told."""
    counted = [node.broker.metadata for node in cluster.nodes]
    reads = sum(each.reads.gets + each.reads.scans + each.reads.events for each in counted)
    return reads + sum(each.puts.asked + each.deletes.asked for each in counted)


def all_settled(cluster: Cluster) -> bool:
    """Whether every end is known wherever it matters, and what it left is cleaned up."""
    return not any(node.broker.transactions.decisions.followed for node in cluster.nodes) and all(
        topic.buffer.idle
        for node in cluster.nodes
        for topic in node.broker.topics.loaded().values()
    )


async def transact(leader: Node, producers: list[RawProducer]) -> None:
    """A message to each topic in one transaction, which is committed."""
    coordinators = leader.broker.transactions.coordinators
    txn = await coordinators.begin(coordinators.led()[0].coordinator_id, 60_000, None)
    most, least = txn
    metadata = pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least)
    send = pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least)
    await asyncio.gather(
        *(producer.send(b"m", metadata=metadata, send=send) for producer in producers)
    )
    await coordinators.end_transaction(txn, TxnState.COMMITTED, None)


async def cost(brokers: int, topics: int) -> float:
    """Operations per transaction that writes to so many topics, spread over the brokers."""
    cluster = Cluster()
    try:
        for _ in range(brokers):
            await cluster.add()
        producers = []
        for number in range(topics):
            client = await cluster.nodes[number % brokers].client()
            producers.append(await client.create_producer(f"{TOPIC}{number}"))
        leader = cluster.nodes[0]
        await until(leader.broker.transactions.coordinators.led)
        await transact(leader, producers)
        await until(lambda: all_settled(cluster))
        before = operations(cluster)
        for _ in range(TRANSACTIONS):
            await transact(leader, producers)
        await until(lambda: all_settled(cluster))
        return (operations(cluster) - before) / TRANSACTIONS
    finally:
        await cluster.close()


@pytest.mark.parametrize("topics", [1, 2, 6])
async def test_a_transaction_costs_no_more_operations_on_three_brokers(topics: int) -> None:
    one, three = await cost(1, topics), await cost(3, topics)
    assert three <= MOST_GROWTH * one, f"{one} operations on one broker, {three} on three"
