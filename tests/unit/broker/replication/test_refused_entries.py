"""Entries that the other cluster refuses, and those that are larger with their origin."""

import pytest

from broker.policies.schema_compatibility import IncompatibleSchema
from broker.replication.errors import RemoteRefused
from broker.replication.remote_producer import RemoteProducer
from broker.topics.weak_references import TopicGone
from config.bounds import MAX_MESSAGE_SIZE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.server_error import PeerError
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import NAMESPACE, TOPIC, Cluster, send_at_most

Pair = tuple[Cluster, Cluster]
LIMIT = "/admin/v2/persistent/public/default/t/maxMessageSize"
MESSAGES = [b"%d" % number for number in range(50)]


def failure_of(cluster: Cluster) -> str:
    return cluster.replicators()["west"].failure or ""


@pytest.mark.parametrize("deduplicates", [True, False])
async def test_a_refused_entry_is_sent_before_those_behind_it_once_it_is_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, *, deduplicates: bool
) -> None:
    set_bound(monkeypatch, "REFUSAL_DRAIN_S", 0.1)
    east, west = pair
    await west.ask("POST", f"{NAMESPACE}/deduplication", deduplicates)
    await west.messages(0)
    await west.ask("POST", LIMIT, 100)
    sent = [*MESSAGES[:20], b"large".ljust(200), *MESSAGES[20:]]
    await east.publish(*sent)
    await until(lambda: "are the most" in failure_of(east))
    assert failure_of(east).startswith("At cluster 'west': ")
    topic = west.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.ledger.entry_count == 20)
    assert (await east.stats())["replication"]["west"]["replicationBacklog"] == 31
    await west.ask("DELETE", LIMIT)
    await until(east.is_done)
    assert await west.payloads(51) == sent
    assert topic.ledger.entry_count == 51
    assert not failure_of(east)


@pytest.mark.parametrize("refusal", [IncompatibleSchema, TopicGone])
async def test_a_refused_schema_is_named_with_the_cluster_that_refuses_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, refusal: type[PeerError]
) -> None:
    async def refuse(*_: object, **__: object) -> int:
        raise refusal("Not now.")

    east, west = pair
    client = await east.client()
    schema = pb.Schema(name="s", type=pb.Schema.String, schema_data=b"")
    producer = await client.create_producer(TOPIC, pb.CommandProducer(schema=schema))
    with monkeypatch.context() as patch:
        patch.setattr(west.broker.schemas, "add", refuse)
        metadata = pb.MessageMetadata(schema_version=(0).to_bytes(8, "big"))
        await producer.send(b"text", metadata=metadata)
        await until(lambda: failure_of(east) == "At cluster 'west': Not now.")
    await until(east.is_done)
    assert await west.payloads(1) == [b"text"]
    await client.close()


@pytest.mark.parametrize("request_", ["skip/1", "expireMessages/1"])
async def test_a_refused_entry_that_is_skipped_here_is_not_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    set_bound(monkeypatch, "REFUSAL_DRAIN_S", 0.1)
    east, west = pair
    await west.messages(0)
    await west.ask("POST", LIMIT, 100)
    await east.publish(b"large".ljust(200))
    published_ms = east.broker.clock.now_ms()
    await until(lambda: "are the most" in failure_of(east))
    position = "/admin/v2/persistent/public/default/t/subscription/pulsar.repl.west"
    await until(lambda: east.broker.clock.now_ms() > published_ms + 1000)
    await east.ask("POST", f"{position}/{request_}")
    await until(lambda: "are the most" not in failure_of(east))
    await east.publish(b"behind")
    await until(east.is_done)
    assert await west.payloads(1) == [b"behind"]


async def test_a_refused_entry_that_is_too_old_by_then_does_not_slow_down_those_behind_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATION_RETRY_MAX_S", 0.2)
    east, west = pair
    await west.messages(0)
    send_at_most(monkeypatch, west, 1000)
    client = await east.client()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x" * 2000, metadata=pb.MessageMetadata(publish_time=1))
    await until(lambda: "let it take more" in failure_of(east))
    await east.ask("POST", f"{NAMESPACE}/messageTTL", 60)
    await until(east.is_done)
    monkeypatch.setattr(RemoteProducer, "take_receipt", lambda *_: None)
    now_ms = east.broker.clock.now_ms()
    for payload in MESSAGES[:5]:
        await producer.send(payload, metadata=pb.MessageMetadata(publish_time=now_ms))
    # Its statistics were not asked for meanwhile.
    await until(lambda: len(east.replicators()["west"].producer.window) == 5)
    await client.close()


async def test_an_entry_as_large_as_may_be_arrives_with_its_origin(pair: Pair) -> None:
    east, west = pair
    largest = bytes(MAX_MESSAGE_SIZE)
    await east.publish(largest, b"behind")
    await until(east.is_done)
    assert await west.payloads(2) == [largest, b"behind"]


async def test_an_entry_that_is_too_large_there_waits_until_the_cluster_takes_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    send_at_most(monkeypatch, west, 1000)
    set_bound(monkeypatch, "REFUSAL_DRAIN_S", 0.1)
    set_bound(monkeypatch, "REPLICATION_RETRY_MAX_S", 0.2)
    sent = [b"1", b"2" * 2000, b"3"]
    await east.publish(*sent)
    await until(lambda: "cluster 'west' takes 1000: let it take more" in failure_of(east))
    send_at_most(monkeypatch, west, west.broker.max_message_size + 9000)
    await until(east.is_done)
    assert await west.payloads(3) == sent


async def test_refused_entries_that_count_as_stored_there_are_kept_over_a_restart(
    pair: Pair,
) -> None:
    east, west = pair
    await west.stop()
    await east.publish(b"1", b"2", b"3")
    await until(lambda: "west" in east.replicators())
    replicator = east.replicators()["west"]
    first = replicator.subscription.cursor.first_unacknowledged(EARLIEST)
    second, third = (Position(first.ledger_id, first.entry_id + each) for each in (1, 2))
    for position in (first, second):
        replicator.not_stored(position, RemoteRefused("Too large.", final=True))
    # It was in flight when those before it were refused.
    replicator.stored(third, before=False)
    noted = f"{first.text},{second.text}"
    await until(lambda: replicator.subscription.cursor.properties.get("refused.positions") == noted)
    await east.stop()
    await east.start()
    await east.messages(1)
    await until(lambda: "west" in east.replicators())
    replicator = east.replicators()["west"]
    assert failure_of(east) == "Too large."
    for backlog, position in ((2, first), (1, second)):
        replicator.stored(position, before=True)
        assert "takes this one for a duplicate" in failure_of(east)
        assert replicator.subscription.backlog == backlog
        replicator.stored(position, before=False)
    assert replicator.subscription.backlog == 0
    assert "Too large" not in failure_of(east)
