"""Replicated subscriptions while clusters restart, are away, or hold something back."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.topics.subscription_markers import (
    MARKER_RECEIPT,
    SubscriptionUpdate,
    marker_entry,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import payload_of
from tests.support.bounds import set_bound
from tests.support.raw_client import RawClient
from tests.support.raw_replicator import BY_POSITION, RawReplicator
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import TOPIC, Cluster, replicating
from tests.unit.broker.replication.test_replicated_subscriptions import (
    PATH,
    SOON,
    attach,
    consume,
    is_past,
    is_settled,
    newest,
    options,
    published,
    receive,
    rest_of,
    subscription,
    take,
)
from tests.unit.broker.topics.test_replicators import marker

Pair = tuple[Cluster, Cluster]
SELDOM: dict[str, object] = {"replicated_subscriptions_snapshot_frequency_ms": 600_000}
AWAY_S = 60.0
"""How long a cluster that comes back may take to be reached again."""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """East and west, which take snapshots often."""
    east, west = Cluster(tmp_path, "east", **SOON), Cluster(tmp_path, "west", **SOON)
    async with replicating(east, west):
        yield east, west


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[tuple[Cluster, Cluster, Cluster]]:
    """East, west and north."""
    east, west, north = (Cluster(tmp_path, name, **SOON) for name in ("east", "west", "north"))
    async with replicating(east, west, north):
        yield east, west, north


async def load(*clusters: Cluster) -> None:
    """Have the topic and its replicators in all clusters."""
    for each in clusters:
        await each.publish()
    await until(lambda: all(is_attached(each) for each in clusters))


def is_attached(cluster: Cluster) -> bool:
    """Whether all replicators of the topic are."""
    replicators = cluster.replicators()
    return bool(replicators) and all(each.connected for each in replicators.values())


async def test_consumer_goes_on_in_each_of_three_clusters(
    three: tuple[Cluster, Cluster, Cluster],
) -> None:
    east, west, north = three
    await load(*three)
    client, consumer = await attach(east)
    for number, cluster in enumerate(three):
        await published(cluster, 4, 4 * number)
    copied = [await newest(west), await newest(north)]
    await take(consumer, 12)
    await until(lambda: is_past(west, copied[0]) and is_past(north, copied[1]))
    await client.close()
    assert await rest_of(north) == []


async def test_no_message_is_missed_whenever_a_consumer_changes_the_cluster(
    three: tuple[Cluster, Cluster, Cluster],
) -> None:
    await load(*three)
    stored: set[bytes] = set()
    consumed: set[bytes] = set()
    for turn, cluster in enumerate((*three, *three)):
        for each in three:
            payloads = [b"%d-%d-%s" % (turn, number, each.name.encode()) for number in range(10)]
            stored.update(payloads)
            await each.publish(*payloads)
        client, consumer = await attach(cluster)
        # It has received more than it acknowledges.
        for received in (await receive(consumer, 20))[:15]:
            consumed.add(received.payload)
            consumer.ack(received.message_id)
        await client.ping()
        counts = cluster.broker.replications.snapshots
        before = counts.completed
        await until(lambda: counts.completed > before or is_settled(*three))  # noqa: B023
        await client.close()
    await until(lambda: all(each.is_done() for each in three) and is_settled(*three))
    consumed.update(await rest_of(three[1]))
    assert consumed >= stored


async def test_no_subscription_moves_while_one_cluster_is_away(
    three: tuple[Cluster, Cluster, Cluster],
) -> None:
    east, west, north = three
    await load(*three)
    client, consumer = await attach(east)
    await published(east, 3)
    await take(consumer, 3)
    first = await newest(west)
    await until(lambda: is_past(west, first) and is_settled(*three))
    await north.stop()
    await until(lambda: not is_attached(east) and not is_attached(west))
    await east.publish(b"3", b"4")
    await until(lambda: east.replicators()["west"].subscription.backlog == 0)
    completed = east.broker.replications.snapshots.completed
    received = await receive(consumer, 2)
    await consumer.ack_answered(received[-1].message_id, cumulative=True)
    copied = await newest(west)
    assert not is_past(west, copied)
    assert east.broker.replications.snapshots.completed == completed
    await north.start()
    await until(lambda: is_past(west, copied), AWAY_S)
    await client.close()


async def test_cluster_that_was_away_learns_what_was_consumed_meanwhile(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await published(east, 3)
    await take(consumer, 3)
    first = await newest(west)
    await until(lambda: is_past(west, first))
    await west.stop()
    await east.publish(b"3", b"4")
    await take(consumer, 2)
    await west.start()
    await until(east.is_done, AWAY_S)
    copied = await newest(west)
    await until(lambda: is_past(west, copied), AWAY_S)
    await client.close()
    assert await rest_of(west) == []


async def test_what_was_consumed_before_a_restart_is_told_after_it(pair: Pair) -> None:
    east, west = pair
    await east.stop()
    east.settings |= SELDOM
    await east.start()
    client, _ = await attach(east)
    await client.close()
    await published(east, 3)
    await consume(east, 3)
    copied = await newest(west)
    assert not is_past(west, copied)
    await east.stop()
    east.settings |= SOON
    await east.start()
    client, _ = await attach(east)
    await until(lambda: is_past(west, copied), AWAY_S)
    await client.close()


async def test_position_in_the_other_cluster_outlasts_its_restart_without_the_first_one(
    pair: Pair,
) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await published(east, 3)
    await take(consumer, 3)
    copied = await newest(west)
    await until(lambda: is_past(west, copied))
    await client.close()
    await east.stop()
    await west.stop()
    await west.start()
    assert await rest_of(west) == []
    await east.start()


async def test_cluster_where_it_is_off_answers_nothing_and_moves_nothing(pair: Pair) -> None:
    east, west = pair
    await west.stop()
    west.settings |= {"enable_replicated_subscriptions": False}
    await west.start()
    await east.stop()
    east.settings |= {"replicated_subscriptions_snapshot_timeout_s": 1}
    await east.start()
    client, consumer = await attach(east)
    await published(east, 3)
    copied = await newest(west)
    await take(consumer, 3)
    await until(lambda: east.broker.replications.snapshots.timed_out == 2)
    assert east.broker.replications.snapshots.completed == 0
    assert subscription(west) is None
    await west.stop()
    west.settings |= {"enable_replicated_subscriptions": True}
    await west.start()
    await until(lambda: is_past(west, copied), AWAY_S)
    await client.close()


async def begin(client: RawClient) -> tuple[int, int]:
    """A new transaction."""
    command = pb.CommandNewTxn(txn_ttl_millis=600_000, scalable=True)
    begun = (await client.request(pb.BaseCommand.NEW_TXN, command)).new_txn_response
    return begun.txnid_most_bits, begun.txnid_least_bits


async def commit(client: RawClient, txn: tuple[int, int]) -> None:
    """Commit a transaction."""
    most, least = txn
    command = pb.CommandEndTxn(
        txnid_most_bits=most, txnid_least_bits=least, txn_action=pb.COMMIT, scalable=True
    )
    await client.request(pb.BaseCommand.END_TXN, command)


@pytest.mark.parametrize("where", ["east", "west"])
async def test_open_transaction_in_either_cluster_holds_a_snapshot_back(
    pair: Pair, where: str
) -> None:
    east, west = pair
    await load(east, west)
    client, consumer = await attach(east)
    await published(east, 3)
    first = await newest(west)
    await take(consumer, 3)
    await until(lambda: is_past(west, first) and is_settled(east, west))
    writer = await (east if where == "east" else west).client()
    producer = await writer.create_producer(TOPIC)
    most, least = txn = await begin(writer)
    await producer.send(
        b"in a transaction",
        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
    )
    completed = east.broker.replications.snapshots.completed
    if where == "west":
        await published(east, 3, 3)
        received = await receive(consumer, 3)
        await consumer.ack_answered(received[-1].message_id, cumulative=True)
        # The request is there, and not read before the end of the transaction.
        await until(lambda: east.broker.replications.pending_snapshots and east.is_done())
    else:
        await east.publish(b"3", b"4", b"5")
    assert east.broker.replications.snapshots.completed == completed
    await commit(writer, txn)
    await writer.close()
    await until(lambda: east.is_done() and west.is_done())
    received = await receive(consumer, 1 if where == "west" else 4)
    consumer.ack(received[-1].message_id, cumulative=True)
    copied = await newest(west)
    await until(lambda: is_past(west, copied))
    await client.close()
    assert await rest_of(west) == []


async def test_acknowledgement_in_a_transaction_is_told_when_it_commits(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await published(east, 3)
    copied = await newest(west)
    received = await receive(consumer, 3)
    await until(lambda: is_settled(east, west))
    most, least = txn = await begin(client)
    ack = pb.CommandAck(
        consumer_id=consumer.consumer_id,
        ack_type=pb.CommandAck.Cumulative,
        message_id=[received[-1].message_id],
        txnid_most_bits=most,
        txnid_least_bits=least,
    )
    await client.request(pb.BaseCommand.ACK, ack)
    await published(east, 1, 3)
    await until(lambda: is_settled(east, west))
    assert not is_past(west, copied)
    await commit(client, txn)
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_reader_of_the_compacted_topic_moves_its_subscription_elsewhere(pair: Pair) -> None:
    east, west = pair
    await load(east, west)
    producer_client = await east.client()
    producer = await producer_client.create_producer(TOPIC)
    for number in range(6):
        metadata = pb.MessageMetadata(partition_key=f"k{number % 2}")
        await producer.send(b"%d" % number, metadata=metadata)
    await producer_client.close()
    await until(east.is_done)
    await east.ask("PUT", f"{PATH}/compaction")
    topic = east.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.compaction.succeeded_total)
    settings = options()
    settings.read_compacted = True
    client, consumer = await attach(east, settings)
    received = await receive(consumer, 2)
    assert [each.payload for each in received] == [b"4", b"5"]
    consumer.ack(received[-1].message_id, cumulative=True)
    copied = await newest(west)
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_what_is_consumed_of_an_ended_topic_is_not_told_any_more(pair: Pair) -> None:
    east, west = pair
    client, consumer = await attach(east)
    await published(east, 3)
    first = await newest(west)
    await take(consumer, 3)
    await until(lambda: is_past(west, first))
    behind = await published(east, 3, 3)
    await until(lambda: is_settled(east, west))
    await east.rest.call("POST", f"{PATH}/terminate")
    assert east.broker.topics.loaded()[TOPIC].sealed
    received = await receive(consumer, 3)
    await consumer.ack_answered(received[-1].message_id, cumulative=True)
    await until(lambda: is_settled(east, west))
    await client.close()
    assert await rest_of(west) == behind


async def test_subscription_moves_although_replicators_have_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.05)
    east, west = pair
    await published(east, 3)
    copied = await newest(west)
    await until(lambda: not is_attached(east) and not is_attached(west))
    client, consumer = await attach(east)
    await take(consumer, 3)
    await until(lambda: is_past(west, copied))
    await client.close()


async def test_update_that_a_lost_cluster_wrote_last_is_obeyed(pair: Pair) -> None:
    east, west = pair
    await published(east, 3)
    # Once before it was away, and came back.
    await east.stop()
    await until(lambda: not is_attached(west))
    await west.publish(b"3")
    await east.start()
    await until(west.is_done, AWAY_S)
    copied = await newest(west)
    await east.stop()
    await until(lambda: not is_attached(west))
    client = await RawClient.open("127.0.0.1", west.broker.port, BY_POSITION)
    replicator = await RawReplicator.open(client, TOPIC)
    metadata, send = marker(replicator, pb.REPLICATED_SUBSCRIPTION_UPDATE)
    update = SubscriptionUpdate("s", {"west": copied})
    payload = bytes(payload_of(marker_entry(update, 0)))
    assert await replicator.send(metadata, MARKER_RECEIPT, send=send, payload=payload)
    await client.close()
    await until(lambda: is_past(west, copied))
    assert await rest_of(west) == []
    await east.start()
