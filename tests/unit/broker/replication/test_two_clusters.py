"""Ordinary topics between two clusters, as their policies say."""

import asyncio
from pathlib import Path

import pytest

from broker.replication.cluster_producer import PausesUntilStored
from broker.replication.replicator import Replicator
from broker.replication.topic_replication import ReplicatedTopic
from broker.topics.cluster_topics import ClusterTopics
from broker.topics.source_positions import SOURCE_POSITION
from broker.topics.topic import Topic
from broker.topics.topic_producers import TopicProducers
from broker.topics.topic_requests import TopicRequest
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import parse_metadata
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.txn_id import TxnId
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.frame_relay import serving
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError
from tests.support.replicating_clusters import Link
from tests.support.waiting import until, until_awaited
from tests.unit.broker.replication.conftest import NAMESPACE, TOPIC, Cluster
from txn.records import header_key, partition_of

Pair = tuple[Cluster, Cluster]
PARTS = "persistent://public/default/parts"
FIRST = [b"%d" % number for number in range(50)]


async def test_messages_of_each_cluster_are_in_both_once(pair: Pair) -> None:
    east, west = pair
    await east.publish(b"e1", b"e2")
    await west.publish(b"w1", b"w2")
    await until(lambda: east.is_done() and west.is_done())
    for cluster in pair:
        assert sorted(await cluster.payloads(4)) == [b"e1", b"e2", b"w1", b"w2"]
        topic = cluster.broker.topics.loaded()[TOPIC]
        assert topic.ledger.entry_count == 4


async def test_messages_arrive_in_order_and_tell_where_they_are_from(pair: Pair) -> None:
    east, west = pair
    client = await east.client()
    producer = await client.create_producer(TOPIC)
    ids = [(await producer.send(b"%d" % number)).message_id for number in range(300)]
    await until(east.is_done)
    await client.close()
    found = await west.messages(300)
    assert [each.payload for each in found] == [b"%d" % number for number in range(300)]
    for sent, delivery in zip(ids, found, strict=True):
        metadata = parse_metadata(delivery.entry)
        assert metadata.replicated_from == "east"
        place = next(each.value for each in metadata.properties if each.key == SOURCE_POSITION)
        assert place == f"{sent.ledger_id}:{sent.entry_id}"
    assert east.replicators()["west"].counts.messages == 300


async def test_the_largest_message_that_is_taken_is_sent(pair: Pair) -> None:
    east, west = pair
    largest = b"x" * east.broker.max_message_size
    await east.publish(largest, b"next")
    await until(east.is_done)
    assert await west.payloads(2) == [largest, b"next"]


async def test_what_was_published_while_the_other_cluster_is_down_comes_later_in_order(
    pair: Pair,
) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"before")
    await until(east.is_done)
    await west.stop()
    await east.publish(*FIRST)
    assert not east.is_done()
    await west.start()
    await until(east.is_done, 60)
    assert await west.payloads(51) == [b"before", *FIRST]


async def test_a_broker_that_starts_again_goes_on_where_it_was(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"first")
    await until(east.is_done)
    await west.stop()
    await east.publish(*FIRST)
    await east.stop()
    await west.start()
    await east.start()
    await east.publish(b"last")
    await until(east.is_done, 60)
    assert await west.payloads(52) == [b"first", *FIRST, b"last"]


async def test_a_topic_that_nobody_uses_is_sent_after_a_restart(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"1")
    await until(east.is_done)
    await west.stop()
    await east.publish(b"2")
    await east.stop()
    await west.start()
    await east.start()
    await until(east.is_done, 60)
    assert await west.payloads(2) == [b"1", b"2"]


async def test_metrics_show_replication_by_cluster(pair: Pair) -> None:
    east, west = pair
    await east.publish(b"1")
    await until(east.is_done)
    labels = f'cluster="east",namespace="public/default",remote_cluster="west",topic="{TOPIC}"'
    text = await metrics_text(east.broker)
    assert f"pulsar_replication_backlog{{{labels}}} 0.0\n" in text
    assert f"pulsar_replication_connected_count{{{labels}}} 1.0\n" in text
    assert f"pulsar_replication_disconnected_count{{{labels}}} 0.0\n" in text
    received = await metrics_text(west.broker)
    assert 'remote_cluster="east"' in received
    # The client of the test is gone, and the replicator is none of the producers.
    of_topic = f'cluster="west",namespace="public/default",topic="{TOPIC}"'
    assert f"pulsar_producers_count{{{of_topic}}} 0.0\n" in received


async def test_statistics_and_metrics_count_what_was_too_old_to_be_sent(pair: Pair) -> None:
    east, _ = pair
    await east.ask("POST", f"{NAMESPACE}/messageTTL", 60)
    client = await east.client()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"old", metadata=pb.MessageMetadata(publish_time=1))
    await until(east.is_done)
    await client.close()
    shown = (await east.stats())["replication"]["west"]
    assert (shown["msgExpiredCount"], shown["msgOutCount"]) == (1, 0)
    assert shown["msgRateExpired"] > 0
    assert 'pulsar_replication_rate_expired{cluster="east"' in await metrics_text(east.broker)


async def test_statistics_of_a_partitioned_topic_say_why_one_partition_stands(pair: Pair) -> None:
    east, west = pair
    path = "/admin/v2/persistent/public/default/parts"
    await east.ask("PUT", f"{path}/partitions", 2)
    await east.publish(b"1", topic=f"{PARTS}-partition-0")
    await until(lambda: east.is_done(f"{PARTS}-partition-0"))
    await west.stop()
    await east.publish(b"1", topic=f"{PARTS}-partition-1")
    await until(lambda: east.replicators(f"{PARTS}-partition-1"))
    replicator = east.replicators(f"{PARTS}-partition-1")["west"]
    await until(lambda: replicator.failure)
    shown = await east.rest.get(f"{path}/partitioned-stats")
    assert isinstance(shown, dict)
    assert "connection" in shown["replication"]["west"]["lastFailure"].lower()


async def test_a_list_without_the_other_cluster_ends_replication_and_frees_the_entries(
    pair: Pair,
) -> None:
    east, west = pair
    await east.publish(b"1")
    await until(east.is_done)
    await east.replicate("east")
    topic = east.broker.topics.loaded()[TOPIC]
    await until(lambda: not topic.replicator_cursors)
    assert east.replicators() == {}
    await east.publish(b"2")
    await east.replicate("east", "west")
    await until(lambda: "west" in east.replicators())
    await east.publish(b"3")
    await until(east.is_done)
    assert await west.payloads(2) == [b"1", b"3"]


async def test_a_setting_sends_what_was_stored_before_the_cluster_was_in_the_list(
    pair: Pair,
) -> None:
    east, west = pair
    await east.stop()
    east.settings["replication_start_at"] = "earliest"
    await east.start()
    await east.replicate("east")
    # Its messages are kept.
    await east.messages(0)
    await east.publish(*FIRST)
    await east.replicate("east", "west")
    await until(east.is_done)
    assert await west.payloads(50) == FIRST


async def test_a_message_goes_to_the_clusters_that_it_names(pair: Pair) -> None:
    east, west = pair
    client = await east.client()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"here", metadata=pb.MessageMetadata(replicate_to=["__local__"]))
    await producer.send(b"there", metadata=pb.MessageMetadata(replicate_to=["west"]))
    await until(east.is_done)
    await client.close()
    assert await west.payloads(1) == [b"there"]
    assert west.broker.topics.loaded()[TOPIC].ledger.entry_count == 1


async def test_statistics_show_what_is_exchanged_with_the_other_cluster(pair: Pair) -> None:
    east, west = pair
    await east.publish(b"1", b"22")
    await until(east.is_done)
    stats = await east.stats()
    assert stats["subscriptions"] == {}
    shown = stats["replication"]["west"]
    assert (shown["msgOutCount"], shown["replicationBacklog"]) == (2, 0)
    assert shown["connected"] is True
    assert shown["outboundConnection"] == f"127.0.0.1:{west.broker.port}"
    received = (await west.stats())["replication"]["east"]
    assert (received["msgInCount"], received["msgOutCount"]) == (2, 0)


async def test_statistics_say_why_nothing_is_sent(pair: Pair) -> None:
    east, west = pair
    await east.publish(b"1")
    await until(east.is_done)
    await west.stop()
    await east.publish(b"2")
    await until(lambda: "connection" in (east.replicators()["west"].failure or ""))
    shown = (await east.stats())["replication"]["west"]
    assert (shown["connected"], shown["replicationBacklog"]) == (False, 1)
    assert "connection" in shown["lastFailure"]


async def test_pauses_grow_while_the_other_cluster_refuses_what_is_sent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    pauses: list[float] = []
    make_pause = PausesUntilStored.pause_s

    def pause_s(of: PausesUntilStored) -> float:
        pauses.append(make_pause(of))
        return pauses[-1]

    monkeypatch.setattr(PausesUntilStored, "pause_s", pause_s)
    path = "/admin/v2/persistent/public/default/t"
    await east.publish(b"1")
    await until(east.is_done)
    await west.ask("POST", f"{path}/maxMessageSize", 10)
    pauses.clear()
    await east.publish(b"more than ten bytes")
    await until(lambda: len(pauses) >= 5)
    assert pauses == sorted(pauses)
    await until(lambda: "10" in (east.replicators()["west"].failure or ""))
    await west.ask("DELETE", f"{path}/maxMessageSize")
    await until(east.is_done)
    assert await west.payloads(2) == [b"1", b"more than ten bytes"]


async def test_a_partition_that_is_not_loaded_shows_the_backlog_of_its_replicator(
    pair: Pair,
) -> None:
    east, west = pair
    path = "/admin/v2/persistent/public/default/parts"
    await east.ask("PUT", f"{path}/partitions", 1)
    await west.stop()
    await east.publish(b"1", topic=f"{PARTS}-partition-0")
    await east.ask("PUT", f"{path}/unload")
    assert not east.broker.topics.loaded()
    shown = await east.rest.get(f"{path}/partitioned-stats")
    assert isinstance(shown, dict)
    assert shown["subscriptions"] == {}
    assert shown["replication"]["west"]["replicationBacklog"] == 1


async def test_no_client_has_a_subscription_with_the_name_of_a_position(pair: Pair) -> None:
    east, _ = pair
    client = await east.client()
    with pytest.raises(BrokerError, match="replicator's cursor"):
        await client.subscribe(TOPIC, "pulsar.repl.west")
    await client.close()


async def test_a_rate_holds_back_what_is_sent(pair: Pair) -> None:
    east, west = pair
    rate = {"dispatchThrottlingRateInMsg": 1, "ratePeriodInSecond": 3600}
    await east.ask("POST", f"{NAMESPACE}/replicatorDispatchRate", rate)
    await east.publish(*FIRST)
    await until(lambda: "west" in east.replicators() and east.replicators()["west"].counts.messages)
    replicator = east.replicators()["west"]
    assert replicator.counts.messages < 50
    await east.ask("DELETE", f"{NAMESPACE}/replicatorDispatchRate")
    await until(east.is_done)
    assert await west.payloads(50) == FIRST


async def in_transaction(east: Cluster, payload: bytes, action: pb.TxnAction) -> TxnId:
    """Publish a message in a transaction that ends so."""
    client = await east.client()
    producer = await client.create_producer(TOPIC)
    new = pb.CommandNewTxn(txn_ttl_millis=600_000, scalable=True)
    begun = (await client.request(pb.BaseCommand.NEW_TXN, new)).new_txn_response
    most, least = begun.txnid_most_bits, begun.txnid_least_bits
    await producer.send(
        payload,
        send=pb.CommandSend(txnid_most_bits=most, txnid_least_bits=least),
        metadata=pb.MessageMetadata(txnid_most_bits=most, txnid_least_bits=least),
    )
    end = pb.CommandEndTxn(
        txnid_most_bits=most, txnid_least_bits=least, txn_action=action, scalable=True
    )
    await client.request(pb.BaseCommand.END_TXN, end)
    await client.close()
    return TxnId(most, least)


async def test_aborted_messages_are_not_sent_though_the_transaction_is_forgotten(
    tmp_path: Path,
) -> None:
    settings = {"transaction_gc_interval_s": 1, "transaction_gc_retention_s": 1}
    east, west = Cluster(tmp_path, "east", **settings), Cluster(tmp_path, "west")
    await east.start()
    await west.start()
    await east.set_up([west])
    await west.set_up([east])
    await west.messages(0)
    await west.stop()
    aborted = await in_transaction(east, b"aborted", pb.ABORT)
    await in_transaction(east, b"committed", pb.COMMIT)

    async def is_forgotten() -> bool:
        key, partition = header_key(aborted), partition_of(aborted)
        return await east.broker.metadata.get(key, partition=partition) is None

    await until_awaited(is_forgotten)
    await east.stop()
    await east.start()
    await west.start()
    await until(east.is_done)
    assert await west.payloads(1) == [b"committed"]
    assert west.broker.topics.loaded()[TOPIC].ledger.entry_count == 1
    await east.stop()
    await west.stop()


async def test_aborted_messages_are_not_sent_and_committed_ones_are_plain(pair: Pair) -> None:
    east, west = pair
    for action, payload in ((pb.ABORT, b"aborted"), (pb.COMMIT, b"committed")):
        await in_transaction(east, payload, action)
    await until(east.is_done)
    (found,) = await west.messages(1)
    assert found.payload == b"committed"
    assert not found.metadata.HasField("txnid_most_bits")
    assert west.broker.topics.loaded()[TOPIC].ledger.entry_count == 1


async def test_a_schema_is_there_before_the_first_message_that_has_it(pair: Pair) -> None:
    east, west = pair
    schema = pb.Schema(name="s", type=pb.Schema.String, schema_data=b"")
    client = await east.client()
    producer = await client.create_producer(TOPIC, pb.CommandProducer(schema=schema))
    version = (0).to_bytes(8, "big")
    await producer.send(b"text", metadata=pb.MessageMetadata(schema_version=version))
    await until(east.is_done)
    await client.close()
    (found,) = await west.messages(1)
    assert found.metadata.schema_version == version
    history = await west.broker.schemas.history("public/default/t")
    assert [each.definition.kind.name for each in history] == ["STRING"]


async def test_partitions_are_made_in_the_other_cluster(pair: Pair) -> None:
    east, west = pair
    await east.ask("PUT", "/admin/v2/persistent/public/default/parts/partitions", 2)
    await east.publish(b"1", topic=f"{PARTS}-partition-1")
    await until(lambda: east.is_done(f"{PARTS}-partition-1"))
    assert await west.broker.topics.partitioned.count(parse_topic_name(PARTS)) == 2
    assert await west.payloads(1, f"{PARTS}-partition-1") == [b"1"]


async def test_a_topic_is_made_where_clients_make_none(pair: Pair) -> None:
    east, west = pair
    await west.ask("POST", f"{NAMESPACE}/autoTopicCreation", {"allowAutoTopicCreation": False})
    await east.publish(b"first")
    await until(east.is_done)
    assert await west.payloads(1) == [b"first"]


async def test_a_topic_has_a_list_of_its_own(pair: Pair) -> None:
    east, west = pair
    await east.ask("POST", f"{NAMESPACE}/replication", ["east"])
    await east.publish(b"alone")
    await east.ask("POST", "/admin/v2/persistent/public/default/t/replication", ["east", "west"])
    await until(lambda: "west" in east.replicators())
    await east.publish(b"both")
    await until(east.is_done)
    assert await west.payloads(1) == [b"both"]


async def test_the_list_of_a_namespace_does_not_concern_what_a_scalable_topic_was_made_of(
    pair: Pair,
) -> None:
    east, _ = pair
    await east.replicate("east")
    # Its messages are kept, and with them the segment.
    await east.messages(0)
    await east.publish(b"1")
    await east.ask("POST", "/admin/v2/scalable/public/default/t/migrate")
    segment = east.broker.topics.loaded()[TOPIC]
    await east.replicate("east", "west")
    await east.publish(b"1", topic=PARTS)
    await until(lambda: east.is_done(PARTS))
    replication = segment.replication
    assert isinstance(replication, ReplicatedTopic)
    await until(lambda: replication.idle)
    assert (replication.replicators, segment.replicator_cursors) == ({}, {})
    await east.broker.topics.unload(parse_topic_name(TOPIC))
    segment = await east.broker.topics.get(parse_topic_name(TOPIC), create=False)
    await until(lambda: segment.replication.idle)
    assert not segment.replicator_cursors


async def test_what_is_sent_again_by_a_new_replicator_is_stored_once_without_deduplication(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"1")
    await until(east.is_done)
    # As if the broker had ended before the receipt came.
    monkeypatch.setattr(east.replicators()["west"].producer, "received", lambda _: None)
    await east.publish(b"2")
    topic = west.broker.topics.loaded()[TOPIC]
    await until(lambda: topic.ledger.entry_count == 2)
    await east.broker.topics.unload(parse_topic_name(TOPIC))
    await east.publish(b"3")
    await until(east.is_done)
    assert await west.payloads(topic.ledger.entry_count) == [b"1", b"2", b"3"]


async def test_a_topic_that_nobody_uses_is_sent_after_it_was_unloaded(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"1")
    await until(east.is_done)
    await west.stop()
    await east.publish(b"2")
    await east.ask("PUT", "/admin/v2/persistent/public/default/t/unload")
    await west.start()
    await until(east.is_done, 10)
    assert await west.payloads(2) == [b"1", b"2"]


async def test_a_topic_that_could_not_be_loaded_after_a_restart_is_loaded_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    set_bound(monkeypatch, "STORED_BACKLOGS_RETRY_S", 0.1)
    await west.messages(0)
    await east.publish(b"1")
    await until(east.is_done)
    await west.stop()
    await east.publish(b"2")
    await east.stop()
    await west.start()
    failures = iter([MetadataError("The metadata store does not answer.")] * 3)
    ask = ClusterTopics.ask

    async def fail_at_first(topics: ClusterTopics, request: TopicRequest[object]) -> object:
        for error in failures:
            raise error
        return await ask(topics, request)

    monkeypatch.setattr(ClusterTopics, "ask", fail_at_first)
    await east.start()
    await until(east.is_done)
    assert await west.payloads(2) == [b"1", b"2"]


async def partitions_in(cluster: Cluster) -> int:
    return await cluster.broker.topics.partitioned.count(parse_topic_name(PARTS))


async def test_partitions_are_made_in_the_other_cluster_before_anybody_uses_them(
    pair: Pair,
) -> None:
    path = "/admin/v2/persistent/public/default/parts/partitions"
    east, west = pair
    await east.ask("PUT", path, 2)

    async def west_has(count: int) -> bool:
        return await partitions_in(west) == count

    await until_awaited(lambda: west_has(2))
    await west.ask("POST", path, 3)

    async def east_has_three() -> bool:
        return await partitions_in(east) == 3

    await until_awaited(east_has_three)


async def test_partitions_are_made_in_one_cluster_alone_on_request(pair: Pair) -> None:
    path = "/admin/v2/persistent/public/default/parts/partitions"
    east, west = pair
    await east.ask("PUT", f"{path}?createLocalTopicOnly=true", 2)
    await west.ask("PUT", path, 2)
    await east.ask("POST", f"{path}?updateLocalTopicOnly=true", 3)
    await east.ask("PUT", path.replace("parts", "others"), 1)

    async def west_has_others() -> bool:
        name = parse_topic_name(PARTS.replace("parts", "others"))
        return await west.broker.topics.partitioned.count(name) == 1

    await until_awaited(west_has_others)
    assert (await partitions_in(east), await partitions_in(west)) == (3, 2)


async def deduplicate(*clusters: Cluster) -> None:
    for each in clusters:
        await each.ask("POST", f"{NAMESPACE}/deduplication", True)


async def test_messages_of_a_topic_that_was_deleted_and_made_anew_arrive(pair: Pair) -> None:
    east, west = pair
    await deduplicate(east, west)
    await west.messages(0)
    await east.publish(*FIRST)
    await until(east.is_done)
    await east.ask("DELETE", "/admin/v2/persistent/public/default/t?force=true")
    await east.stop()
    await east.start()
    await east.publish(b"anew")
    await until(east.is_done)
    assert await west.payloads(51) == [*FIRST, b"anew"]


async def test_the_other_cluster_has_the_schema_after_its_topic_was_deleted(pair: Pair) -> None:
    east, west = pair
    schema = pb.Schema(name="s", type=pb.Schema.String, schema_data=b"")
    client = await east.client()
    producer = await client.create_producer(TOPIC, pb.CommandProducer(schema=schema))
    version = (0).to_bytes(8, "big")
    metadata = pb.MessageMetadata(schema_version=version)
    await producer.send(b"1", metadata=metadata)
    await until(east.is_done)
    await west.ask("DELETE", "/admin/v2/persistent/public/default/t?force=true")
    await producer.send(b"2", metadata=metadata)
    await until(east.is_done)
    await client.close()
    history = await west.broker.schemas.history("public/default/t")
    assert [each.definition.kind.name for each in history] == ["STRING"]
    (found,) = await west.messages(1)
    assert (found.payload, found.metadata.schema_version) == (b"2", version)


async def test_a_topic_is_closed_though_the_other_cluster_does_not_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    set_bound(monkeypatch, "LEAVE_S", 3600)
    async with serving(Link(west.broker.port)) as link:
        data = {**west.record, "brokerServiceUrl": link.url}
        await east.ask("POST", "/admin/v2/clusters/west", data)
        await east.publish(b"1")
        await until(east.is_done)
        link.hold()
        async with asyncio.timeout(30):
            await east.ask("PUT", "/admin/v2/persistent/public/default/t/unload")
        link.mend()


async def test_what_is_left_of_a_terminated_topic_is_sent(pair: Pair) -> None:
    east, west = pair
    await west.messages(0)
    await east.publish(b"1")
    await until(east.is_done)
    await west.stop()
    await east.publish(b"2", b"3")
    await east.rest.call("POST", "/admin/v2/persistent/public/default/t/terminate")
    await east.stop()
    await west.start()
    await east.start()
    await until(east.is_done)
    assert await west.payloads(3) == [b"1", b"2", b"3"]


async def test_a_topic_that_is_closing_leaves_its_position_to_the_next_owner(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, _ = pair
    await east.publish(b"1")
    await until(east.is_done)
    topic, tries = east.broker.topics.loaded()[TOPIC], list[str]()
    replicator_gone, producers_gone = asyncio.Event(), asyncio.Event()
    close, disconnect_all = Replicator.close, TopicProducers.disconnect_all
    delete = Topic.delete_replicator_cursor

    async def close_late(replicator: Replicator) -> None:
        await replicator_gone.wait()
        await close(replicator)

    async def disconnect_late(producers: TopicProducers) -> None:
        await producers_gone.wait()
        await disconnect_all(producers)

    async def count(topic: Topic, name: str) -> None:
        tries.append(name)
        await delete(topic, name)

    monkeypatch.setattr(Replicator, "close", close_late)
    monkeypatch.setattr(TopicProducers, "disconnect_all", disconnect_late)
    monkeypatch.setattr(Topic, "delete_replicator_cursor", count)
    await east.replicate("east")
    await until(lambda: not east.replicators())
    unloading = asyncio.create_task(east.broker.topics.unload(parse_topic_name(TOPIC)))
    try:
        await until(lambda: topic.closing)
        replicator_gone.set()
        await until(lambda: bool(tries))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(tries) < 10
    finally:
        replicator_gone.set()
        producers_gone.set()
        await unloading
    assert topic.replicator_cursors
    again = await east.broker.topics.get(parse_topic_name(TOPIC), create=False)
    await until(lambda: not again.replicator_cursors)
