"""What requests of one connection cost others: turns, costly requests, shared answers."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import cast

import pytest

from broker.app.service import Broker
from broker.topics import topic_listing
from broker.topics.topic_changes import TopicChanges
from broker.wire.connection import Connection
from broker.wire.handlers.produce import send
from broker.wire.server import BinaryServer
from broker.wire.topic_watch import TopicListWatch
from config.bounds import (
    COSTLY_REQUESTS_AT_ONCE,
    COSTLY_REQUESTS_WAITING,
    MAX_AVRO_SCHEMA_BYTES,
    TOPIC_LIST_WATCHERS,
    TXN_JOINS_AT_ONCE,
    TXN_PARTITIONS_OF_REQUEST,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame, FrameDecoder, encode_command
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from magnetar.protocol.txn_id import TxnId
from tests.support.bounds import set_bound
from tests.support.raw_client import BrokerError, RawClient, basecommand
from tests.support.waiting import until
from tests.unit.broker.wire.test_connection import answering

Kind = pb.BaseCommand
Connect = Callable[..., Awaitable[RawClient]]
NAMESPACE = "public/default"


def listing(request_id: int) -> pb.BaseCommand:
    return basecommand(
        Kind.GET_TOPICS_OF_NAMESPACE,
        pb.CommandGetTopicsOfNamespace(
            request_id=request_id,
            namespace=NAMESPACE,
            mode=pb.CommandGetTopicsOfNamespace.PERSISTENT,
        ),
    )


def listings(count: int) -> bytes:
    return b"".join(encode_command(listing(number)) for number in range(count))


class Listings:
    """Counts the listings that are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = 0
        make = topic_listing.listing_of

        def counted(names: list[str]) -> topic_listing.TopicListing:
            self.made += 1
            return make(names)

        monkeypatch.setattr(topic_listing, "listing_of", counted)


def answers_in_order(client: RawClient) -> list[int]:
    """Has the client record the request ids of listings, in the order of their answers."""
    found: list[int] = []
    receive = client.data_received
    decoder = FrameDecoder(64 * 1024 * 1024, 64 * 1024 * 1024)

    def data_received(data: bytes) -> None:
        for frame in decoder.feed(data):
            assert isinstance(frame, Frame)
            if frame.command.type == Kind.GET_TOPICS_OF_NAMESPACE_RESPONSE:
                found.append(frame.command.get_topics_of_namespace_response.request_id)
            else:
                receive(encode_command(frame.command))

    client.data_received = data_received  # type: ignore[method-assign]
    return found


async def create_partitioned(broker: Broker, name: str, partitions: int) -> None:
    """Only the record: its partitions are listed."""
    await broker.topics.partitioned.create(
        parse_topic_name(f"persistent://{NAMESPACE}/{name}"), partitions
    )


async def test_connection_above_its_time_lets_others_be_served_in_between(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "TURN_S", 0)
    set_bound(monkeypatch, "TURN_FRAMES", 10)
    turn, served = 0, Counter[int]()
    stopped = False
    loop = asyncio.get_running_loop()

    def next_turn() -> None:
        nonlocal turn
        turn += 1
        if not stopped:
            loop.call_soon(next_turn)

    def handler(connection: Connection, command: pb.BaseCommand, entry: bytes | None) -> None:
        served[turn] += 1
        seen.append(command.lookup.request_id)

    seen: list[int] = []
    server = BinaryServer(broker, answering({Kind.LOOKUP: handler}), send)
    server.bind("127.0.0.1", 0)
    await server.start()
    client = await RawClient.open("127.0.0.1", server.port)
    next_turn()
    client.write(
        b"".join(
            encode_command(basecommand(Kind.LOOKUP, pb.CommandLookupTopic(topic="t", request_id=n)))
            for n in range(1000)
        )
    )
    await until(lambda: len(seen) == 1000)
    stopped = True
    await server.stop()
    await client.close()
    assert seen == list(range(1000))
    # Two slices may fall into one round of the counter, which is no turn of the loop.
    assert max(served.values()) <= 20


async def test_few_commands_are_decoded_in_one_turn(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "DECODED_COMMANDS", 10)
    client = await connect()
    pings = [client.ping() for _ in range(500)]
    await asyncio.gather(*pings)


def test_decoder_stops_at_the_most_commands_and_goes_on_without_bytes() -> None:
    ping = encode_command(basecommand(Kind.PING, pb.CommandPing()))
    decoder = FrameDecoder(1024)
    sizes = [len(decoder.feed(ping * 25 + ping[:3], 10))]
    while decoder.has_more:
        sizes.append(len(decoder.feed(b"", 10)))
    assert sizes == [10, 10, 5]
    assert decoder.buffered_size == 3
    assert len(decoder.feed(ping[3:], 10)) == 1


async def test_answers_of_costly_requests_keep_their_order(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    found = answers_in_order(client)
    client.write(listings(3 * COSTLY_REQUESTS_WAITING))
    await until(lambda: len(found) == 3 * COSTLY_REQUESTS_WAITING)
    assert found == list(range(3 * COSTLY_REQUESTS_WAITING))


async def test_single_listing_does_not_wait_behind_those_of_another_connection(
    broker: Broker, connect: Connect
) -> None:
    many, one = await connect(), await connect()
    found = answers_in_order(many)
    many.write(listings(1000))
    await until(lambda: len(found) > 0)
    before = len(found)
    await one.request(Kind.GET_TOPICS_OF_NAMESPACE, listing(0).get_topics_of_namespace)
    assert len(found) - before < 200
    await until(lambda: len(found) == 1000)


async def test_listing_is_made_once_per_change(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Listings(monkeypatch)
    client = await connect()
    found = answers_in_order(client)
    client.write(listings(50))
    await until(lambda: len(found) == 50)
    assert counted.made == 1
    await client.create_producer(f"persistent://{NAMESPACE}/new")
    names = await broker.topics.list_names(NamespaceName("public", "default"))
    assert names == [f"persistent://{NAMESPACE}/new"]
    assert counted.made == 2
    await create_partitioned(broker, "p", 2)
    assert len(await broker.topics.list_names(NamespaceName("public", "default"))) == 3
    assert counted.made == 3


async def test_listing_is_made_in_parts(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    set_bound(monkeypatch, "TOPIC_LISTING_PART", 10)
    await create_partitioned(broker, "p", 500)
    sizes: list[int] = []
    parts = topic_listing.parts_of

    def recorded(items: Sequence[object]) -> Iterable[Sequence[object]]:
        for part in parts(items):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(topic_listing, "parts_of", recorded)
    assert len(await broker.topics.list_names(NamespaceName("public", "default"))) == 500
    assert sum(sizes) == 500
    assert max(sizes) == 10


async def test_no_answer_is_queued_for_a_peer_that_does_not_read(
    broker: Broker, connect: Connect
) -> None:
    await create_partitioned(broker, "p", 10_000)
    slow = await connect()
    (connection,) = broker.connections
    assert slow.transport is not None
    slow.transport.pause_reading()
    slow.write(listings(200))
    await until(lambda: not connection.writable)
    other = await connect()
    answer = await other.request(Kind.GET_TOPICS_OF_NAMESPACE, listing(0).get_topics_of_namespace)
    assert len(answer.get_topics_of_namespace_response.topics) == 10_000
    queued = broker.costly_requests.waiting(connection)
    assert queued > 100, "the kernel took more than it has buffers for"
    slow.transport.abort()
    await until(lambda: connection.closing)
    assert broker.costly_requests.waiting(connection) == 0


async def test_connection_with_many_waiting_requests_is_not_read(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    (connection,) = broker.connections
    async with connection.costly():
        client.write(listings(2 * COSTLY_REQUESTS_WAITING))
        await until(lambda: "costly requests" in connection.paused)
        waiting = broker.costly_requests.waiting(connection)
        client.write(listings(10))
        await asyncio.sleep(0.1)
        assert broker.costly_requests.waiting(connection) == waiting
    await until(lambda: not connection.paused)


async def test_connection_is_read_again_when_waiting_requests_are_cancelled(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    (connection,) = broker.connections

    async def request() -> None:
        async with connection.costly():
            pass

    async with connection.costly():
        waiting = [asyncio.ensure_future(request()) for _ in range(COSTLY_REQUESTS_WAITING)]
        await until(lambda: "costly requests" in connection.paused)
        for each in waiting:
            each.cancel()
        await client.ping()
    assert broker.costly_requests.waiting(connection) == 0


async def test_watch_that_waits_for_the_store_keeps_nobody_waiting(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[NamespaceName] = []

    async def follow(namespace: NamespaceName, listener: object) -> Callable[[], None]:
        begun.append(namespace)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(broker.topics, "changes", TopicChanges(follow))
    for number in range(2 * COSTLY_REQUESTS_AT_ONCE):
        client = await connect()
        watch = pb.CommandWatchTopicList(
            request_id=number, watcher_id=1, namespace=NAMESPACE, topics_pattern=".*"
        )
        client.send(Kind.WATCH_TOPIC_LIST, watch)
    await until(lambda: bool(begun))
    other = await connect()
    await other.request(Kind.GET_TOPICS_OF_NAMESPACE, listing(0).get_topics_of_namespace)


async def test_requests_that_wait_for_a_store_keep_nobody_waiting(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "COSTLY_REQUEST_S", 0.05)
    loading: set[str] = set()

    async def get(name: TopicName, *, create: bool) -> None:
        loading.add(str(name))
        await asyncio.Event().wait()

    for number in range(COSTLY_REQUESTS_AT_ONCE):
        client = await connect()
        begun = await client.request(Kind.NEW_TXN, pb.CommandNewTxn(scalable=True))
        monkeypatch.setattr(broker.topics, "get", get)
        command = pb.CommandAddPartitionToTxn(
            request_id=1_000,
            txnid_most_bits=begun.new_txn_response.txnid_most_bits,
            txnid_least_bits=begun.new_txn_response.txnid_least_bits,
            scalable=True,
            partitions=[f"persistent://{NAMESPACE}/t{number}-{n}" for n in range(100)],
        )
        client.send(Kind.ADD_PARTITION_TO_TXN, command)
        await until(lambda: any(f"/t{number}-" in name for name in loading))  # noqa: B023
    other = await connect()
    await other.request(Kind.GET_TOPICS_OF_NAMESPACE, listing(0).get_topics_of_namespace)


async def test_change_that_many_costly_patterns_are_matched_with_stands_nothing_still(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    for number in range(TOPIC_LIST_WATCHERS):
        watch = pb.CommandWatchTopicList(
            watcher_id=number, namespace=NAMESPACE, topics_pattern=f".*[ab].{{{200 + number}}}.*"
        )
        await client.request(Kind.WATCH_TOPIC_LIST, watch)
    loop = asyncio.get_running_loop()
    longest_s = 0.0

    async def measure() -> None:
        nonlocal longest_s
        while True:
            began_s = loop.time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, loop.time() - began_s)

    measuring = asyncio.create_task(measure())
    name = f"persistent://{NAMESPACE}/{'ab' * 200}"
    await broker.topics.get(parse_topic_name(name), create=True)
    for _ in range(TOPIC_LIST_WATCHERS):
        event = await client.wait(asyncio.ensure_future(client.events.get()))
        assert event.watch_topic_update.new_topics == [name]
    measuring.cancel()
    # All patterns take more than a second.
    assert longest_s < 0.25


async def test_watches_of_one_pattern_share_their_names(broker: Broker, connect: Connect) -> None:
    client = await connect()
    pattern = f"persistent://{NAMESPACE}/t.*"
    for number in range(2):
        watch = pb.CommandWatchTopicList(
            watcher_id=number, namespace=NAMESPACE, topics_pattern=pattern
        )
        await client.request(Kind.WATCH_TOPIC_LIST, watch)
    await client.create_producer(f"persistent://{NAMESPACE}/t1")
    for _ in range(2):
        event = await client.wait(asyncio.ensure_future(client.events.get()))
        assert event.watch_topic_update.new_topics == [f"persistent://{NAMESPACE}/t1"]
    (connection,) = broker.connections
    first, second = (cast("TopicListWatch", each) for each in connection.topic_watches.values())
    assert first.known is second.known
    assert first.known.names == (f"persistent://{NAMESPACE}/t1",)


async def test_partitions_of_a_request_are_bounded_and_join_in_parts(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    begun = await client.request(Kind.NEW_TXN, pb.CommandNewTxn(tc_id=0, scalable=True))
    txn = begun.new_txn_response
    joining, most, joined = 0, 0, 0

    async def join(txn: TxnId, name: TopicName) -> None:
        nonlocal joining, most, joined
        joining += 1
        most = max(most, joining)
        await asyncio.sleep(0)
        joining -= 1
        joined += 1

    monkeypatch.setattr(broker.transactions, "join", join)

    def add(count: int) -> pb.CommandAddPartitionToTxn:
        return pb.CommandAddPartitionToTxn(
            txnid_most_bits=txn.txnid_most_bits,
            txnid_least_bits=txn.txnid_least_bits,
            partitions=[f"persistent://{NAMESPACE}/t{n}" for n in range(count)],
            scalable=True,
        )

    await client.request(Kind.ADD_PARTITION_TO_TXN, add(TXN_PARTITIONS_OF_REQUEST))
    assert joined == TXN_PARTITIONS_OF_REQUEST
    assert most == TXN_JOINS_AT_ONCE
    with pytest.raises(BrokerError, match="split it into several requests"):
        await client.request(Kind.ADD_PARTITION_TO_TXN, add(TXN_PARTITIONS_OF_REQUEST + 1))


async def test_large_schema_is_refused_and_a_large_one_is_checked_off_the_loop(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    await client.create_producer(f"persistent://{NAMESPACE}/t")
    fields = [{"name": f"f{n}", "type": "int", "default": 0} for n in range(500)]

    async def upload(names: list[dict[str, object]]) -> pb.CommandGetOrCreateSchemaResponse:
        command = pb.CommandGetOrCreateSchema(topic=f"persistent://{NAMESPACE}/t")
        command.schema.name = "R"
        command.schema.type = pb.Schema.Avro
        record = {"type": "record", "name": "R", "fields": names}
        command.schema.schema_data = json.dumps(record).encode()
        answer = await client.request(Kind.GET_OR_CREATE_SCHEMA, command)
        return answer.get_or_create_schema_response

    assert not (await upload(fields)).error_message
    assert not (await upload(fields[1:])).error_message
    with pytest.raises(BrokerError, match=f"{MAX_AVRO_SCHEMA_BYTES} is the most"):
        await upload([{"name": "f", "type": "int", "doc": "x" * MAX_AVRO_SCHEMA_BYTES}])
