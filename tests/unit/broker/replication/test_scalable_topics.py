"""Scalable topics between two clusters, whose layouts have nothing to do with each other."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Unpack

import pytest

import magnetar
from broker.replication.replicated_segment import ReplicatedSegment
from broker.scalable.records import segment_of
from broker.topics.topic import Topic
from magnetar.compression import decompress
from magnetar.options import ProducerOptions
from magnetar.produce.producer import Producer
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.key_hash import segment_hash, segment_hash_m1
from magnetar.protocol.message import iter_batch, parse_metadata, partition_key, payload_of
from magnetar.protocol.names import TopicDomain, parse_topic_name, segment_name
from magnetar.transactions.transaction import Transaction
from storage.managed_ledger.types import Entry
from tests.support.bounds import set_bound
from tests.support.waiting import TIMEOUT_S, until, until_awaited
from tests.unit.broker.replication.conftest import NAMESPACE, Cluster, replicating
from tests.unit.broker.topics.test_topic_memory import unreachable_objects

Pair = tuple[Cluster, Cluster]
TOPIC = "topic://public/default/t"
PATH = "/admin/v2/scalable/public/default/t"
KEYS = [f"key-{number}" for number in range(12)]
Written = dict[str, list[bytes]]
"""By key, the messages that were stored, in order."""


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """East and west, which keep all messages."""
    east, west = Cluster(tmp_path, "east"), Cluster(tmp_path, "west")
    async with replicating(east, west):
        for each in (east, west):
            await each.keep_messages()
        yield east, west


async def make(cluster: Cluster, segments: int = 1) -> None:
    await cluster.ask("PUT", f"{PATH}?numInitialSegments={segments}", {})


async def split(cluster: Cluster, segment_id: int) -> None:
    await cluster.broker.scalable.split(parse_topic_name(TOPIC), segment_id)


async def merge(cluster: Cluster, *segment_ids: int) -> None:
    await cluster.broker.scalable.merge(parse_topic_name(TOPIC), segment_ids)


async def active(cluster: Cluster) -> list[int]:
    """The ids of the ACTIVE segments, in the order of hashes."""
    record = await cluster.broker.scalable.get(parse_topic_name(TOPIC))
    return [each.segment_id for each in record.layout.active]


@asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[magnetar.Client]:
    async with magnetar.connect(f"pulsar://127.0.0.1:{cluster.broker.port}") as client:
        yield client


class Writer:
    """Writes messages of its own keys, numbered for each key."""

    def __init__(
        self,
        client: magnetar.Client,
        producer: Producer[bytes],
        name: str,
        written: Written,
    ) -> None:
        self.client = client
        self._producer = producer
        self._keys = [f"{name}-{key}" for key in KEYS]
        self._written = written

    async def write(
        self, rounds: int, *, size: int = 0, transaction: Transaction | None = None
    ) -> None:
        """Write so many messages of each key, many at a time."""
        sent = []
        for _ in range(rounds):
            for key in self._keys:
                numbers = self._written.setdefault(key, [])
                payload = b"%d" % len(numbers) + b"." * size
                numbers.append(payload)
                sent.append(self._producer.send_nowait(payload, key=key, transaction=transaction))
        await asyncio.gather(*sent)


@asynccontextmanager
async def writing(
    cluster: Cluster, written: Written, label: str = "w", **settings: Unpack[ProducerOptions]
) -> AsyncIterator[Writer]:
    async with (
        client_of(cluster) as client,
        client.producer(TOPIC, **settings) as producer,
    ):
        yield Writer(client, producer, f"{cluster.name}-{label}", written)


def segments_of(cluster: Cluster) -> list[Topic]:
    """The loaded segments of the topic."""
    return [
        each
        for each in cluster.broker.topics.loaded().values()
        if each.name.domain is TopicDomain.SEGMENT and str(segment_name(each.name).parent) == TOPIC
    ]


async def shown_by(cluster: Cluster, path: str) -> dict[str, Any]:
    """The object that REST answers."""
    answer = await cluster.rest.get(path)
    assert isinstance(answer, dict)
    return answer


def is_done(cluster: Cluster) -> bool:
    """Whether the other cluster has all that the loaded segments have."""
    segments = segments_of(cluster)
    return bool(segments) and all(
        each.replicator_cursors and all(not c.backlog for c in each.replicator_cursors.values())
        for each in segments
    )


def producers_of(cluster: Cluster) -> list[str]:
    """The producers of the loaded segments."""
    return [name for each in segments_of(cluster) for name in each.producers]


def failure_of(segment: Topic) -> str:
    """Why a segment is not sent to the west; empty if it is."""
    return segment.replication.outbound_stats(0)["west"].failure or ""


def messages_of(entry: Entry) -> Iterator[tuple[str, bytes]]:
    """Key and payload of each message of an entry."""
    metadata = parse_metadata(entry.data)
    payload = decompress(metadata.compression, payload_of(entry.data), metadata.uncompressed_size)
    if not metadata.HasField("num_messages_in_batch"):
        yield (partition_key(metadata) or b"").decode(), bytes(payload)
        return
    for single, body in iter_batch(payload, metadata.num_messages_in_batch):
        yield (partition_key(single) or b"").decode(), bytes(body)


async def entries_of(topic: Topic) -> list[Entry]:
    """All entries of a segment."""
    found: list[Entry] = []
    position = topic.ledger.entry_at(0) if topic.ledger.entry_count else None
    while position is not None:
        entries = await topic.ledger.read(position, max_entries=1000, max_bytes=1 << 30)
        found += entries
        position = topic.ledger.next_position(entries[-1].position) if entries else None
    return found


async def stored(cluster: Cluster) -> Written:
    """All messages of the topic by key; those of a segment come after those of its parents."""
    found: Written = {}
    name = parse_topic_name(TOPIC)
    if not await cluster.broker.scalable.exists(name):
        return found
    layout = (await cluster.broker.scalable.get(name)).layout
    for segment_id in sorted(layout.segments):
        segment = segment_of(name, layout.segments[segment_id])
        topic = await cluster.broker.topics.get(segment.topic_name, create=True)
        for entry in await entries_of(topic):
            if not topic.is_aborted(entry):
                for key, payload in messages_of(entry):
                    found.setdefault(key, []).append(payload)
    return found


async def has(cluster: Cluster, written: Written) -> None:
    """Assert that all that was written arrives, each message once, in the order of its key."""
    count = sum(map(len, written.values()))

    async def is_there() -> bool:
        return sum(map(len, (await stored(cluster)).values())) >= count

    await until_awaited(is_there, 30)
    assert await stored(cluster) == written


async def test_messages_of_several_producers_are_in_the_other_cluster_once_and_in_order(
    pair: Pair,
) -> None:
    east, west = pair
    await make(east, 2)
    written: Written = {}
    async with (
        writing(east, written, "batches", compression="lz4") as batches,
        writing(east, written, "alone", batching=False) as alone,
    ):
        await asyncio.gather(batches.write(20), alone.write(3))
    await has(west, written)
    assert len(await active(west)) == 2
    await until(lambda: is_done(east))


async def test_batches_are_divided_among_the_segments_of_the_other_cluster(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 3)
    written: Written = {}
    async with writing(east, written, compression="zstd") as writer:
        await writer.write(20)
        await writer.write(2, size=20_000)
    await has(west, written)
    assert all(each.ledger.entry_count for each in segments_of(west))
    assert isinstance(replication := segments_of(east)[0].replication, ReplicatedSegment)
    assert replication.outbound_stats(0)["west"].opened_batches > 0


async def test_splits_and_merges_in_both_clusters_lose_and_double_nothing(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    async with writing(east, written) as first, writing(west, written) as second:
        for here, there in (("split", "merge"), ("split", "split"), ("merge", "split")):
            for cluster, change in ((east, here), (west, there)):
                ids = await active(cluster)
                await (split(cluster, ids[0]) if change == "split" else merge(cluster, *ids[:2]))
                await asyncio.gather(first.write(3), second.write(3))
    await has(west, written)
    await has(east, written)


async def test_an_unloaded_segment_goes_on_where_it_was(pair: Pair) -> None:
    east, west = pair
    await make(east, 2)
    written: Written = {}
    async with writing(east, written) as writer:
        for cluster in (east, west, east):
            await writer.write(4)
            for each in segments_of(cluster):
                await cluster.broker.topics.unload(each.name)
        await writer.write(4)
    await has(west, written)


async def test_brokers_that_start_again_go_on_where_they_were(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(4)
        await split(east, 0)
        await writer.write(4)
    await west.stop()
    async with writing(east, written, "later") as writer:
        await writer.write(4)
    await east.stop()
    await west.start()
    await east.start()
    await has(west, written)


async def test_a_cluster_that_is_taken_out_and_added_gets_what_is_stored_then(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    first: Written = {}
    later: Written = {}
    async with writing(east, first, "first") as writer, writing(east, later, "later") as after:
        await writer.write(2)
        await has(west, first)
        await east.replicate("east")
        await until(lambda: not segments_of(east)[0].replicator_cursors)
        await writer.write(2)
        await split(east, 0)
        await east.replicate("east", "west")
        await until(
            lambda: all("pulsar.repl.west" in each.replicator_cursors for each in segments_of(east))
        )
        await after.write(2)
    expected = {key: payloads[:2] for key, payloads in first.items()} | later
    await has(west, expected)


async def test_a_setting_sends_what_was_stored_before_the_cluster_was_in_the_list(
    pair: Pair,
) -> None:
    east, west = pair
    await east.stop()
    east.settings["replication_start_at"] = "earliest"
    await east.start()
    await east.replicate("east")
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(3)
        await split(east, 0)
        await writer.write(3)
        await east.replicate("east", "west")
        await has(west, written)


async def test_topic_that_was_an_ordinary_one_is_sent_from_its_children_on(pair: Pair) -> None:
    east, west = pair
    await east.replicate("east")
    await make(west, 2)
    await east.publish(b"before")
    await east.broker.scalable.migrate(parse_topic_name(TOPIC), force=True)
    await east.replicate("east", "west")
    written: Written = {}
    async with writing(east, written) as writer:
        await until(
            lambda: all("pulsar.repl.west" in each.replicator_cursors for each in segments_of(east))
        )
        await writer.write(3)
        await has(west, written)


async def test_segment_without_new_messages_leaves_the_other_cluster_and_comes_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(1)
        await has(west, written)
        assert producers_of(west)
        await east.broker.topics.unload(segments_of(east)[0].name)
        set_bound(monkeypatch, "REPLICATOR_IDLE_S", 0.05)
        await writer.write(1)
        await has(west, written)
        await until(lambda: is_done(east) and not producers_of(west))
        await writer.write(1)
        await has(west, written)
    assert failure_of(segments_of(east)[0]) == ""


async def test_a_rate_holds_back_what_is_sent(pair: Pair) -> None:
    east, west = pair
    rate = {"dispatchThrottlingRateInMsg": 1, "ratePeriodInSecond": 3600}
    await east.ask("POST", f"{NAMESPACE}/replicatorDispatchRate", rate)
    await make(east)
    await make(west)
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(3)
    await until(lambda: segments_of(east)[0].replication.outbound_stats(0)["west"].messages)
    assert segments_of(east)[0].replication.outbound_stats(0)["west"].messages < 36
    await east.ask("DELETE", f"{NAMESPACE}/replicatorDispatchRate")
    await has(west, written)


async def test_messages_that_are_not_for_the_other_cluster_are_passed_over(pair: Pair) -> None:
    east, west = pair
    await make(east)
    await make(west)
    await east.ask("POST", f"{NAMESPACE}/messageTTL", 60)
    client = await east.client()
    producer = await client.create_producer("segment://public/default/t/0000-ffff-0")
    await producer.send(b"old", metadata=pb.MessageMetadata(publish_time=1))
    now = pb.MessageMetadata(publish_time=east.broker.clock.now_ms())
    here = pb.MessageMetadata(publish_time=now.publish_time, replicate_to=["__local__"])
    await producer.send(b"here", metadata=here)
    await producer.send(b"there", metadata=now)
    await until(lambda: is_done(east))
    await client.close()
    assert await stored(west) == {"": [b"there"]}
    assert segments_of(east)[0].replication.outbound_stats(0)["west"].expired == 1


# A topic that begins anew


async def test_committed_messages_arrive_and_aborted_ones_do_not(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    aborted: Written = {}
    async with (
        writing(east, written, "committed") as committed,
        writing(east, aborted, "aborted") as gone,
    ):
        async with committed.client.transaction() as transaction:
            await committed.write(3, transaction=transaction)
        never = await gone.client.transaction()
        await gone.write(3, transaction=never)
        await committed.write(1)
        assert not aborted.keys() & (await stored(west)).keys()
        await split(east, 0)
        await never.abort()
        await committed.write(1)
    await has(west, written)
    for each in segments_of(west):
        entries = await each.ledger.read(EARLIEST, max_entries=100, max_bytes=1 << 20)
        assert not any(parse_metadata(entry.data).HasField("txnid_most_bits") for entry in entries)


async def test_chunks_of_a_message_go_to_one_segment_one_after_the_other(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 3)
    async with (
        client_of(east) as client,
        client.producer(TOPIC, chunking=True) as producer,
        client_of(west) as reader,
        reader.queue_consumer(TOPIC, "sub", initial_position="earliest") as consumer,
    ):
        large = [bytes([number]) * (east.broker.max_message_size + 100) for number in range(3)]
        await asyncio.gather(
            *(producer.send(each, key=f"k{number}") for number, each in enumerate(large))
        )
        async with asyncio.timeout(TIMEOUT_S):
            found = [await consumer.receive() for _ in large]
    assert sorted(each.value for each in found) == large
    await until(lambda: is_done(east))


async def test_schemas_are_registered_before_their_messages(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    async with (
        client_of(east) as client,
        client.producer(TOPIC, schema=str) as producer,
        client_of(west) as reader,
        reader.queue_consumer(TOPIC, "sub", schema=str, initial_position="earliest") as consumer,
    ):
        await producer.send("text", key="k")
        async with asyncio.timeout(TIMEOUT_S):
            assert (await consumer.receive()).value == "text"
    found = await west.rest.get("/admin/v2/schemas/public/default/t/schema")
    assert isinstance(found, dict)
    assert found["type"] == "STRING"


async def test_a_refused_schema_is_named_with_the_cluster_that_refuses_it(pair: Pair) -> None:
    east, west = pair
    await make(east)
    await make(west)
    added = f"{NAMESPACE}/isAllowAutoUpdateSchema?allowAutoUpdateSchemaWithReplicator=false"
    await west.ask("POST", added, False)
    async with client_of(east) as client, client.producer(TOPIC, schema=str) as producer:
        await producer.send("text", key="k")
    await until(lambda: "isAllowAutoUpdateSchema" in failure_of(segments_of(east)[0]))
    assert failure_of(segments_of(east)[0]).startswith("At cluster 'west': ")
    await west.ask("POST", added, True)
    await has(west, {"k": [b"text"]})


async def test_a_refused_part_is_named_with_the_cluster_that_refuses_it(pair: Pair) -> None:
    east, west = pair
    await make(east)
    await make(west)
    limit = "/admin/v2/persistent/public/default/t/maxMessageSize"
    await west.ask("POST", limit, 100)
    async with client_of(east) as client, client.producer(TOPIC) as producer:
        await producer.send(bytes(200), key="k")
    await until(lambda: "are the most" in failure_of(segments_of(east)[0]))
    assert failure_of(segments_of(east)[0]).startswith("At cluster 'west': ")
    await west.ask("DELETE", limit)
    await until(lambda: is_done(east))


async def test_large_batches_are_opened_in_threads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATED_BATCH_BYTES", 10)
    east, west = pair
    await make(east, 1)
    await make(west, 3)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(10)
    await has(west, written)


async def test_messages_without_key_arrive_once(pair: Pair) -> None:
    east, west = pair
    await make(east, 2)
    await make(west, 3)
    async with client_of(east) as client, client.producer(TOPIC) as producer:
        sent = [b"%d" % number for number in range(100)]
        await asyncio.gather(*(producer.send(each) for each in sent))
    await until(lambda: is_done(east))
    assert sorted((await stored(west))[""]) == sorted(sent)


async def test_sessions_that_end_all_the_time_lose_and_double_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    async with writing(east, written, batch_max_messages=5) as writer:
        await writer.write(1)
        await has(west, written)
        set_bound(monkeypatch, "REPLICATOR_WINDOW_ENTRIES", 4)
        set_bound(monkeypatch, "REPLICATION_RETRY_MIN_S", 0.01)
        set_bound(monkeypatch, "REPLICATION_RETRY_MAX_S", 0.02)
        for number in range(12):
            await writer.write(2)
            if number == 5:
                await split(west, (await active(west))[0])
            for each in segments_of(west):
                await west.broker.topics.unload(each.name)
    await has(west, written)


@pytest.mark.parametrize("half", ["high", "low"])
async def test_a_message_goes_to_the_segment_of_its_key_by_the_half_of_the_hash_that_is_set(
    pair: Pair, half: str
) -> None:
    east, west = pair
    hash_of = {"high": segment_hash, "low": segment_hash_m1}[half]
    alone = "/admin/v2/persistent/public/default/t/replication"
    await make(east, 1)
    await make(west, 2)
    await east.ask("POST", alone, ["east"])
    await east.ask("POST", f"{PATH}/replicationKeyHash", half)
    await east.ask("DELETE", alone)
    written: Written = {}
    async with writing(east, written) as writer:
        await writer.write(1)
        await has(west, written)
    for each in segments_of(west):
        segment = segment_name(each.name)
        found = [key for entry in await entries_of(each) for key, _ in messages_of(entry)]
        assert found
        for key in found:
            assert segment.hash_start <= hash_of(key.encode()) <= segment.hash_end


async def test_closed_segment_that_was_replicated_is_freed_at_once(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await make(west, 2)
    written: Written = {}
    with unreachable_objects() as found:
        for number in range(3):
            async with writing(east, written, f"w{number}") as writer:
                await writer.write(1)
            await has(west, written)
            for name in [each.name for each in segments_of(east)]:
                await east.broker.topics.unload(name)
        await asyncio.sleep(0.1)
    assert found == []


async def test_closed_segment_whose_other_cluster_is_away_is_freed_at_once(pair: Pair) -> None:
    east, west = pair
    await make(east, 1)
    await west.stop()
    written: Written = {}
    with unreachable_objects() as found:
        async with writing(east, written) as writer:
            await writer.write(1)
        await until(
            lambda: bool(segments_of(east)[0].replication.outbound_stats(0)["west"].failure)
        )
        for name in [each.name for each in segments_of(east)]:
            await east.broker.topics.unload(name)
        await asyncio.sleep(0.1)
    assert found == []
