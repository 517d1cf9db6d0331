"""Magnetar replicates to Apache Pulsar: what arrives is what was sent.

The destination is Apache Pulsar itself, so this runs with the peer (`make stock-peer`).
"""

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import pulsar
import pytest
from pulsar.schema import AvroSchema

from config.bounds import REPLICATOR_WINDOW_ENTRIES as WINDOW
from magnetar.protocol import pulsar_pb2 as pb
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.fresh_topic import run_on_fresh_topic
from tests.java.stock_driver import StockDriver
from tests.java.two_clusters import (
    POSITION,
    beside_peer,
    number_of_entries,
    register,
    replication,
    rest,
    stored,
    until,
)

PULSAR: Final = "standalone"
MAGNETAR: Final = "magnetar"
OUT: Final = "pair/out"
"""From Magnetar to Pulsar, which deduplicates."""
PLAIN: Final = "pair/plain"
"""The same without deduplication."""
IN_FLIGHT: Final = 200
"""Messages without receipt of a publisher."""
BOTH: Final = "pair/both"
"""Both ways, with deduplication in both."""


class Pair(NamedTuple):
    """The two clusters, and the driver of the official client."""

    magnetar: MagnetarProcess
    pulsar: BrokerUnderTest
    driver: StockDriver
    driver_v4: StockDriver

    def run(
        self,
        case: str,
        driver: StockDriver | None = None,
        *,
        source: str = MAGNETAR,
        **arguments: object,
    ) -> dict[str, Any]:
        """Run a case, from Magnetar to Pulsar unless the source is the other one."""
        brokers: list[BrokerUnderTest] = [self.magnetar, self.pulsar]
        here, there = brokers if source == MAGNETAR else brokers[::-1]
        other = PULSAR if source == MAGNETAR else MAGNETAR
        given = {"namespace": OUT, "remote": there.url, "remoteCluster": other}
        return run_on_fresh_topic(driver or self.driver, here, case, **{**given, **arguments})

    def sent(self, topic: str) -> dict[str, Any]:
        """What Magnetar shows of the replication of a topic to Pulsar."""
        return replication(self.magnetar, topic, PULSAR)

    def is_done(self, topic: str) -> bool:
        """Whether Pulsar has all of a topic that Magnetar has."""
        return self.sent(topic).get("replicationBacklog") == 0

    def stands(self, topic: str, reason: str) -> bool:
        """Whether Magnetar says that it does not send a topic for this reason."""
        return reason in self.sent(topic).get("lastFailure", "")


@pytest.fixture(scope="module")
def magnetar_process(
    on_peer: bool, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerUnderTest]:
    yield from beside_peer(on_peer, tmp_path_factory, MAGNETAR)


@pytest.fixture(scope="module")
def pair(
    broker: BrokerUnderTest,
    magnetar_process: MagnetarProcess,
    stock_driver_process: StockDriver,
    v4_driver_process: StockDriver,
) -> Pair:
    register(broker, MAGNETAR, magnetar_process)
    register(magnetar_process, PULSAR, broker)
    both = [MAGNETAR, PULSAR]
    for cluster, name in ((broker, PULSAR), (magnetar_process, MAGNETAR)):
        rest(cluster, "PUT", "tenants/pair", {"allowedClusters": both})
        for namespace in (OUT, PLAIN, BOTH):
            clusters = both if namespace == BOTH or cluster is magnetar_process else [name]
            policies = {"replication_clusters": clusters}
            rest(cluster, "PUT", f"namespaces/{namespace}", policies)
            # A topic without subscriptions keeps nothing in Pulsar once a ledger is closed.
            retention = {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
            rest(cluster, "POST", f"namespaces/{namespace}/retention", retention)
            if namespace != PLAIN:
                rest(cluster, "POST", f"namespaces/{namespace}/deduplication", True)
    return Pair(magnetar_process, broker, stock_driver_process, v4_driver_process)


def fresh(namespace: str) -> str:
    """A new topic, as `tenant/namespace/name`."""
    return f"{namespace}/t-{uuid.uuid4().hex[:8]}"


# What arrives


@pytest.mark.parametrize("namespace", [OUT, PLAIN])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "plain"),
        ("batches", "batches"),
        ("batches_of_keys", "batches"),
        ("compressed", "compressed"),
        ("chunks", "chunks"),
        ("largest_chunks", "chunks"),
        ("schemas", "avro"),
        ("schemas", "json"),
        ("key_values", "inline"),
        ("key_values", "separated"),
    ],
)
def test_applications_read_in_pulsar_what_was_sent(
    pair: Pair, kind: str, name: str, namespace: str
) -> None:
    topic = f"{name}-{uuid.uuid4().hex[:8]}"
    facts = pair.run(f"replicated_{kind}", topic=topic, namespace=namespace)
    assert facts["received"] == from_magnetar(facts["sent"])


def test_applications_decrypt_in_pulsar_what_was_sent(pair: Pair) -> None:
    facts = pair.run("replicated_encrypted", pair.driver_v4)
    assert all(each["encrypted"] for each in facts["sent"])
    assert facts["received"] == from_magnetar(facts["sent"])


def from_magnetar(sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that were read in Magnetar, as they are to be read in Pulsar."""
    return [{**each, "origin": MAGNETAR} for each in sent]


@pytest.mark.parametrize("source", [MAGNETAR, PULSAR])
@pytest.mark.parametrize("kind", ["plain", "batches", "chunks"])
def test_either_replicator_adds_the_origin_and_the_position_alone(
    pair: Pair, kind: str, source: str
) -> None:
    name = f"{kind}-{uuid.uuid4().hex[:8]}"
    topic = f"{BOTH}/{name}"
    pair.run(f"replicated_{kind}", topic=name, namespace=BOTH, source=source)
    clusters = [pair.magnetar, pair.pulsar]
    here, there = clusters if source == MAGNETAR else clusters[::-1]
    count = number_of_entries(here, topic)
    for before, after in zip(stored(here, topic, count), stored(there, topic, count), strict=True):
        position = f"{before.message_id.ledger_id}:{before.message_id.entry_id}"
        wanted = pb.MessageMetadata()
        wanted.CopyFrom(before.metadata)
        wanted.replicated_from = source
        wanted.properties.add(key=POSITION, value=position)
        assert after.metadata == wanted
        assert after.payload == before.payload


def test_messages_go_to_the_clusters_that_they_name(pair: Pair) -> None:
    facts = pair.run("replicated_selection")
    assert facts["sent"] == ["for all", "for none", "for a third", "for the other", "last"]
    assert facts["received"] == ["for all", "for the other", "last"]


def test_a_delayed_message_is_delivered_in_its_time(pair: Pair) -> None:
    facts = pair.run("replicated_delays")
    assert facts["received"] == ["at once", "later"]
    assert facts["in_time"]


def test_committed_messages_arrive_and_aborted_ones_do_not(pair: Pair) -> None:
    facts = pair.run("replicated_transactions")
    wanted = ["in 0", "behind 0", "behind 1", "in 2", "behind 2", "behind 3"]
    assert facts["received"] == facts["sent"] == wanted


@pytest.mark.parametrize("source", [MAGNETAR, PULSAR])
def test_consumers_of_a_non_persistent_topic_get_what_is_published_in_either_cluster(
    pair: Pair, source: str
) -> None:
    facts = pair.run("replicated_non_persistent", namespace=BOTH, source=source)
    other = PULSAR if source == MAGNETAR else MAGNETAR
    *sent, alone = facts["sent"]
    assert alone["value"] == "for none"
    assert len(sent) == 40
    assert facts["received"] == [{**each, "origin": source} for each in sent]
    assert [each["origin"] for each in facts["back"]] == [other] * 40


def test_the_admin_library_shows_both_ends(pair: Pair) -> None:
    name = f"stats-{uuid.uuid4().hex[:8]}"
    topic = f"{BOTH}/{name}"
    write(pair.magnetar, topic, range(20))
    write(pair.pulsar, topic, range(20, 30))
    until(lambda: pair.is_done(topic))
    until(lambda: replication(pair.pulsar, topic, MAGNETAR).get("replicationBacklog") == 0)
    ours = pair.run("replicator_stats", topic=name, namespace=BOTH)
    theirs = pair.run("replicator_stats", topic=name, namespace=BOTH, source=PULSAR)
    for facts in (ours, theirs):
        assert facts["connected"]
        assert (facts["backlog"], facts["expired"], facts["delay_s"]) == (0, 0, 0)
        for shown in ("outbound", "outbound_since", "inbound", "inbound_since"):
            assert facts[shown], shown
    # The library shows no counts, of either: it has no setters for them.
    for found, sent, received in (
        (pair.sent(topic), 20, 10),
        (replication(pair.pulsar, topic, MAGNETAR), 10, 20),
    ):
        assert (found["msgOutCount"], found["msgInCount"]) == (sent, received)
        # Of what it sends, Apache Pulsar counts the payloads alone.
        assert min(found["bytesOutCount"], found["bytesInCount"]) > 0


# Topics


def test_partitions_are_made_in_pulsar(pair: Pair) -> None:
    topic = fresh(OUT)
    rest(pair.magnetar, "PUT", f"persistent/{topic}/partitions", 3)
    for partition in range(3):
        write(pair.magnetar, f"{topic}-partition-{partition}", range(partition, 10))
        until(partial(pair.is_done, f"{topic}-partition-{partition}"))
    assert rest(pair.pulsar, "GET", f"persistent/{topic}/partitions")["partitions"] == 3
    for partition in range(3):
        found = numbers(pair.pulsar, f"{topic}-partition-{partition}", 10 - partition)
        assert found == list(range(partition, 10))
    rest(pair.magnetar, "POST", f"persistent/{topic}/partitions", 4)
    write(pair.magnetar, f"{topic}-partition-3", range(5))
    assert numbers(pair.pulsar, f"{topic}-partition-3", 5) == list(range(5))


def test_a_topic_with_more_partitions_in_pulsar_waits_for_the_same_number(pair: Pair) -> None:
    topic = fresh(OUT)
    rest(pair.pulsar, "PUT", f"persistent/{topic}/partitions", 4)
    rest(pair.magnetar, "PUT", f"persistent/{topic}/partitions", 2)
    write(pair.magnetar, f"{topic}-partition-1", range(10))
    until(lambda: pair.stands(f"{topic}-partition-1", "2 partitions here and 4 in cluster"))
    assert number_of_entries(pair.pulsar, f"{topic}-partition-1") == 0
    rest(pair.magnetar, "POST", f"persistent/{topic}/partitions", 4)
    assert numbers(pair.pulsar, f"{topic}-partition-1", 10) == list(range(10))


def test_a_topic_is_made_in_pulsar_where_topics_are_not_auto_created(pair: Pair) -> None:
    topic = fresh(OUT)
    path = f"namespaces/{OUT}/autoTopicCreation"
    rest(pair.pulsar, "POST", path, {"allowAutoTopicCreation": False})
    try:
        write(pair.magnetar, topic, range(10))
        until(lambda: pair.is_done(topic), str(pair.sent(topic)))
    finally:
        rest(pair.pulsar, "DELETE", path)
    assert numbers(pair.pulsar, topic, 10) == list(range(10))


def test_a_topic_that_was_terminated_in_pulsar_keeps_its_backlog_here(pair: Pair) -> None:
    topic = fresh(OUT)
    write(pair.magnetar, topic, range(5))
    until(lambda: pair.is_done(topic))
    rest(pair.pulsar, "POST", f"persistent/{topic}/terminate")
    write(pair.magnetar, topic, range(5, 10))
    until(lambda: pair.stands(topic, "terminated"), str(pair.sent(topic)))
    assert pair.sent(topic)["replicationBacklog"] == 5
    rest(pair.pulsar, "DELETE", f"persistent/{topic}?force=true")
    until(lambda: pair.is_done(topic), str(pair.sent(topic)))
    assert numbers(pair.pulsar, topic, 5) == list(range(5, 10))


def test_a_topic_that_was_deleted_in_pulsar_is_made_anew(pair: Pair) -> None:
    topic = fresh(OUT)
    write(pair.magnetar, topic, range(5))
    until(lambda: pair.is_done(topic))
    rest(pair.pulsar, "DELETE", f"persistent/{topic}?force=true")
    write(pair.magnetar, topic, range(5, 10))
    until(lambda: pair.is_done(topic), str(pair.sent(topic)))
    assert numbers(pair.pulsar, topic, 5) == list(range(5, 10))


# Refusals


def test_an_incompatible_schema_is_sent_once_pulsar_takes_it(pair: Pair) -> None:
    topic = fresh(OUT)
    strategy = f"namespaces/{OUT}/schemaCompatibilityStrategy"
    rest(pair.magnetar, "PUT", strategy, "ALWAYS_COMPATIBLE")
    client = pulsar.Client(pair.magnetar.url)
    for number, kind in enumerate(("string", "int", "string")):
        definition = {
            "type": "record",
            "name": "R",
            "fields": [{"name": "value", "type": kind}],
        }
        schema = AvroSchema(None, schema_definition=definition)
        producer = client.create_producer(f"persistent://{topic}", schema=schema)
        producer.send({"value": number if kind == "int" else str(number)})
    client.close()
    until(lambda: pair.stands(topic, "chema"), str(pair.sent(topic)))
    assert number_of_entries(pair.pulsar, topic) == 1
    rest(pair.pulsar, "PUT", strategy, "ALWAYS_COMPATIBLE")
    until(lambda: pair.is_done(topic), str(pair.sent(topic)))
    rest(pair.pulsar, "PUT", strategy, "UNDEFINED")
    assert number_of_entries(pair.pulsar, topic) == 3
    versions = [each.metadata.schema_version for each in stored(pair.pulsar, topic, 3)]
    assert [int.from_bytes(each, "big") for each in versions] == [0, 1, 0]


@pytest.mark.parametrize("namespace", [OUT, PLAIN])
def test_refused_entries_stand_with_their_reason_and_nothing_is_lost_or_doubled(
    pair: Pair, namespace: str
) -> None:
    topic = fresh(namespace)
    large = (3, 5)
    write(pair.magnetar, topic, range(1))
    until(lambda: pair.is_done(topic))
    limit = f"persistent/{topic}/maxMessageSize"
    rest(pair.pulsar, "POST", limit, 1000)
    until(lambda: rest(pair.pulsar, "GET", f"{limit}?applied=true") == 1000)
    client = pulsar.Client(pair.magnetar.url)
    producer = client.create_producer(f"persistent://{topic}", batching_enabled=False)
    for number in range(1, 50):
        size = 2000 if number in large else 10
        producer.send_async(b"%d".ljust(size) % number, lambda *_: None)
    producer.flush()
    client.close()
    until(lambda: pair.stands(topic, "Exceed maximum message size"), str(pair.sent(topic)))
    rest(pair.pulsar, "DELETE", limit)
    if namespace == OUT:
        until(lambda: pair.stands(topic, "takes this one for a duplicate"), str(pair.sent(topic)))
        rest(pair.pulsar, "POST", f"namespaces/{OUT}/deduplication", False)
    until(lambda: pair.is_done(topic), str(pair.sent(topic)))
    rest(pair.pulsar, "POST", f"namespaces/{OUT}/deduplication", True)
    assert number_of_entries(pair.pulsar, topic) == 50
    found = numbers(pair.pulsar, topic, 50)
    assert sorted(found) == list(range(50))
    assert "lastFailure" not in pair.sent(topic)


# Kills, and both ways at once


def test_no_message_is_lost_or_doubled_when_magnetar_is_killed(pair: Pair) -> None:
    topic = fresh(OUT)
    with publishing(pair.magnetar, topic) as sent:
        for _ in range(3):
            numbers(pair.pulsar, topic, len(sent) + 100)
            pair.magnetar.kill()
            pair.magnetar.start()
    until(lambda: pair.is_done(topic))
    count = number_of_entries(pair.pulsar, topic)
    found = numbers(pair.pulsar, topic, count)
    assert found == list(dict.fromkeys(found)), "doubled"
    # What had no receipt when Magnetar was killed is published again, and may be stored twice.
    assert found == numbers(pair.magnetar, topic, number_of_entries(pair.magnetar, topic))
    assert set(sent) <= set(found), "lost"


@pytest.mark.timeout(300, func_only=True)
def test_no_message_is_lost_when_pulsar_is_killed(pair: Pair) -> None:
    topic = fresh(OUT)
    with publishing(pair.magnetar, topic) as sent:
        numbers(pair.pulsar, topic, len(sent) + 100)
        pair.pulsar.kill()
        pair.pulsar.start()
    until(lambda: pair.is_done(topic), str(pair.sent(topic)))
    found = numbers(pair.pulsar, topic, number_of_entries(pair.pulsar, topic))
    doubled = len(found) - len(set(found))
    print(f"{len(sent)} sent, {doubled} doubled by kills of Pulsar")
    assert list(dict.fromkeys(found)) == sent, "lost, or out of order"
    # Those that had no receipt when it was killed, and no others.
    assert doubled <= WINDOW


def test_each_cluster_has_the_messages_of_both_once(pair: Pair) -> None:
    topic = fresh(BOTH)
    with publishing(pair.magnetar, topic) as ours, publishing(pair.pulsar, topic, 10**6) as theirs:
        numbers(pair.pulsar, topic, 300)
        pair.magnetar.kill()
        pair.magnetar.start()
        numbers(pair.magnetar, topic, len(ours) + len(theirs) + 100)
    until(lambda: pair.is_done(topic))
    until(lambda: replication(pair.pulsar, topic, MAGNETAR).get("replicationBacklog") == 0)
    wanted = sorted([*ours, *theirs])
    for cluster in (pair.magnetar, pair.pulsar):
        found = numbers(cluster, topic, number_of_entries(cluster, topic))
        assert sorted(found) == wanted
        for part in (ours, theirs):
            assert [each for each in found if each in set(part)] == part


def test_partitions_are_made_on_either_side_of_both_ways(pair: Pair) -> None:
    for here, there in ((pair.magnetar, pair.pulsar), (pair.pulsar, pair.magnetar)):
        topic = fresh(BOTH)
        rest(here, "PUT", f"persistent/{topic}/partitions", 2)
        write(here, f"{topic}-partition-1", range(10))
        assert numbers(there, f"{topic}-partition-1", 10) == list(range(10))
        write(there, f"{topic}-partition-0", range(10))
        assert numbers(here, f"{topic}-partition-0", 10) == list(range(10))


# Clients


def write(broker: BrokerUnderTest, topic: str, values: range) -> None:
    """Publish numbers, each in an entry."""
    client = pulsar.Client(broker.url)
    try:
        producer = client.create_producer(f"persistent://{topic}", batching_enabled=False)
        for number in values:
            producer.send(b"%d" % number)
    finally:
        client.close()


def numbers(broker: BrokerUnderTest, topic: str, count: int) -> list[int]:
    """The first numbers of a topic, read once they are there."""
    until(lambda: number_of_entries(broker, topic) >= count, f"{count} entries of {topic}")
    client = pulsar.Client(broker.url)
    try:
        reader = client.create_reader(f"persistent://{topic}", pulsar.MessageId.earliest)
        return [int(reader.read_next(30_000).data()) for _ in range(count)]
    finally:
        client.close()


@contextmanager
def publishing(broker: BrokerUnderTest, topic: str, first: int = 0) -> Iterator[list[int]]:
    """Publish numbers all the while; those that have a receipt, in order."""
    sent: list[int] = []
    stopping = threading.Event()

    def publish() -> None:
        client = pulsar.Client(broker.url)
        producer = client.create_producer(
            f"persistent://{topic}",
            batching_enabled=False,
            send_timeout_millis=0,
            block_if_queue_full=True,
            max_pending_messages=IN_FLIGHT,
        )
        number = first
        while not stopping.is_set():
            producer.send_async(b"%d" % number, partial(acknowledged, number))
            number += 1
            time.sleep(0.001)
        producer.flush()
        client.close()

    def acknowledged(number: int, result: object, message_id: object) -> None:
        assert result == pulsar.Result.Ok
        sent.append(number)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield sent
    finally:
        stopping.set()
        thread.join()
