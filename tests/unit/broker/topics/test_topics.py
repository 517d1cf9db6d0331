"""Names: lookups, creation, partitions, lists, unloading, deleting."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from broker.app.service import Broker
from broker.topics.dispatch.errors import ConsumerBusy
from broker.topics.producer_access import ProducerBusy
from broker.topics.registry import TopicExists
from broker.topics.reserved_names import ReservedTopicName
from broker.topics.topic import SubscriptionNotFound, Topic, TopicNotFound, TopicState
from broker.topics.topic_listing import TopicListing, topics_hash
from config.bounds import METADATA_KEY_BYTES
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName, parse_topic_name
from storage.managed_ledger.records import ledger_key
from storage.managed_ledger.types import AppendOutcomeUnknown, ManagedLedgerFenced
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.raw_client import RawClient
from tests.support.waiting import until
from tests.unit.broker.topics.test_produce import code_of

Kind = pb.BaseCommand
Connect = Callable[[], Awaitable[RawClient]]
DEFAULT = NamespaceName("public", "default")
TOPIC = "persistent://public/default/t"


def name_of(text: str) -> TopicName:
    return parse_topic_name(text)


async def partitions(client: RawClient, topic: str, *, create: bool = True) -> int:
    command = pb.CommandPartitionedTopicMetadata(topic=topic, metadata_auto_creation_enabled=create)
    answer = await client.request(Kind.PARTITIONED_METADATA, command)
    return answer.partitioned_metadata_response.partitions


async def test_a_v4_client_finds_its_coordinators_by_a_name(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    assigned = "persistent://pulsar/system/transaction_coordinator_assign"
    for create in (False, True):
        assert await partitions(client, assigned, create=create) == 16
    for name in (assigned, f"{assigned}-partition-0", f"{assigned}-partition-15"):
        answer = await client.lookup(name)
        assert answer.response == pb.CommandLookupTopicResponse.Connect
        assert answer.broker_service_url == f"pulsar://127.0.0.1:{broker.port}"
    assert await code_of(client.lookup(f"{assigned}-partition-16")) == "TopicNotFound"
    monkeypatch.setattr(broker.transactions.coordinators, "assignments", dict)
    assert await code_of(client.lookup(f"{assigned}-partition-4")) == "ServiceNotReady"


async def test_of_operators_that_create_a_topic_at_once_one_does(broker: Broker) -> None:
    name = name_of(TOPIC)
    made = await asyncio.gather(
        *(broker.topics.create(name, {"of": str(number)}) for number in range(3)),
        return_exceptions=True,
    )
    assert [type(each) for each in made] == [Topic, TopicExists, TopicExists]
    topic = broker.topics.loaded()[TOPIC]
    assert topic is made[0]
    assert topic.ledger.properties["of"] == "0"
    assert broker.placement.owns(name)


@pytest.mark.parametrize("listener", ["", "internal"])
async def test_a_lookup_for_the_only_listener_is_answered(connect: Connect, listener: str) -> None:
    lookup = pb.CommandLookupTopic(topic=TOPIC, advertised_listener_name=listener)
    answer = (await (await connect()).request(Kind.LOOKUP, lookup)).lookup_response
    assert answer.response == pb.CommandLookupTopicResponse.Connect


async def test_a_lookup_for_another_listener_is_refused(connect: Connect) -> None:
    lookup = pb.CommandLookupTopic(topic=TOPIC, advertised_listener_name="external")
    assert await code_of((await connect()).request(Kind.LOOKUP, lookup)) == "NotAllowedError"


async def test_a_consumer_that_forbids_it_creates_no_topic(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    options = pb.CommandSubscribe(force_topic_creation=False)
    assert await code_of(client.subscribe(TOPIC, "s", options)) == "TopicNotFound"
    assert TOPIC not in broker.topics.loaded()
    await client.subscribe(TOPIC, "s", pb.CommandSubscribe(force_topic_creation=True))
    assert list(broker.topics.loaded()[TOPIC].subscriptions) == ["s"]


async def test_a_v4_client_finds_no_coordinators_where_they_are_off(tmp_path: Path) -> None:
    assigned = "persistent://pulsar/system/transaction_coordinator_assign"
    async with running(tmp_path, transaction_coordinator_enabled=False) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        assert await partitions(client, assigned) == 0
        assert await code_of(client.lookup(f"{assigned}-partition-0")) == "NotAllowedError"
        await client.close()


@pytest.mark.parametrize(
    "topic",
    [
        "persistent://pulsar/system/transaction_coordinator_assign",
        "persistent://pulsar/system/transaction_coordinator_assign-partition-3",
        "persistent://pulsar/system/__transaction_log_3",
        "persistent://public/default/t-s__transaction_pending_ack",
        "persistent://public/default/t-s__transaction_pending_ack-partition-0",
    ],
)
async def test_names_of_coordinators_and_their_logs_are_no_topics(
    broker: Broker, connect: Connect, topic: str
) -> None:
    client = await connect()
    assert await code_of(client.create_producer(topic)) == "NotAllowedError"
    assert await code_of(client.subscribe(topic, "s")) == "NotAllowedError"
    for create in (broker.topics.create, broker.topics.create_partition):
        with pytest.raises(ReservedTopicName):
            await create(name_of(topic))
    for namespace in (NamespaceName("pulsar", "system"), DEFAULT):
        assert await broker.topics.list_names(namespace) == []


@pytest.mark.parametrize(
    "topic",
    [
        "persistent://public/default/nowhere",
        "nowhere",
        "topic://public/default/a/b",
        "segment://public/default/t/0000-ffff-0",
    ],
)
async def test_a_lookup_answers_for_every_domain_and_makes_nothing(
    broker: Broker, connect: Connect, topic: str
) -> None:
    answer = await (await connect()).lookup(topic)
    assert answer.response == pb.CommandLookupTopicResponse.Connect
    assert answer.broker_service_url == f"pulsar://127.0.0.1:{broker.port}"
    assert answer.authoritative
    assert not answer.proxy_through_service_url
    assert not broker.topics.loaded()
    assert await broker.topics.list_names(DEFAULT) == []


async def test_name_of_an_unknown_domain_cannot_be_looked_up(connect: Connect) -> None:
    lookup = (await connect()).lookup("nonsense://public/default/t")
    assert await code_of(lookup) == "InvalidTopicName"


async def test_producer_name_that_is_too_long_is_refused(connect: Connect) -> None:
    client = await connect()
    named = pb.CommandProducer(producer_name="n" * (METADATA_KEY_BYTES + 1))
    assert await code_of(client.create_producer(TOPIC, named)) == "NotAllowedError"
    named.producer_name = "n" * METADATA_KEY_BYTES
    await client.create_producer(TOPIC, named)


async def test_scalable_names_are_refused_when_the_feature_is_off(tmp_path: Path) -> None:
    async with running(tmp_path, scalable_topics_enabled=False) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        assert not client.connected.feature_flags.supports_scalable_topics
        topic = "segment://public/default/t/0000-ffff-0"
        assert await code_of(client.lookup(topic)) == "InvalidTopicName"
        assert await code_of(client.create_producer(topic)) == "InvalidTopicName"
        await client.create_producer(TOPIC)


async def test_topics_are_made_on_first_use_only_where_that_is_allowed(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    unknown = "persistent://public/nowhere/t"
    assert await code_of(client.create_producer(unknown)) == "TopicNotFound"
    await broker.namespaces.change(
        DEFAULT,
        lambda record: record.update(
            {"autoTopicCreationOverride": {"allowAutoTopicCreation": False}}
        ),
    )
    assert await code_of(client.create_producer(TOPIC)) == "TopicNotFound"
    assert not await broker.topics.exists(name_of(TOPIC))
    await broker.topics.partitioned.create(name_of(TOPIC), 2)
    await client.create_producer(TOPIC + "-partition-1")
    assert await code_of(client.create_producer(TOPIC + "-partition-2")) == "TopicNotFound"


async def test_segments_exist_by_the_word_of_their_layout(broker: Broker, connect: Connect) -> None:
    client = await connect()
    segment = "segment://public/default/s/0000-ffff-0"
    assert await code_of(client.create_producer(segment)) == "TopicNotFound"
    assert not await broker.managed_ledgers.exists(name_of(segment).ledger_path)
    topic = TopicName(TopicDomain.TOPIC, "public", "default", "s")
    await broker.scalable.create(topic, segments=1, properties={})
    await (await client.create_producer(segment)).send(b"x")
    twin = "persistent://public/default/s"
    assert await code_of(client.create_producer(twin)) == "TopicNotFound"
    assert await code_of(client.create_producer(str(topic))) == "NotAllowedError"


async def test_concurrent_requests_share_one_load(broker: Broker) -> None:
    name = name_of(TOPIC)
    loaded = await asyncio.gather(*(broker.topics.get(name, create=True) for _ in range(20)))
    assert len(set(map(id, loaded))) == 1


async def test_a_caller_that_may_create_succeeds_beside_one_that_may_not(broker: Broker) -> None:
    name = name_of(TOPIC)
    refused, made = await asyncio.gather(
        broker.topics.get(name, create=False),
        broker.topics.get(name, create=True),
        return_exceptions=True,
    )
    assert isinstance(refused, TopicNotFound)
    assert not isinstance(made, BaseException)


async def test_a_load_continues_when_its_caller_is_cancelled(broker: Broker) -> None:
    name = name_of(TOPIC)
    asked = asyncio.create_task(broker.topics.get(name, create=True))
    await asyncio.sleep(0)
    asked.cancel()
    assert (await broker.topics.get(name, create=False)).state is TopicState.OPEN


async def test_partition_counts(broker: Broker, connect: Connect) -> None:
    client = await connect()
    assert await partitions(client, TOPIC) == 0
    assert await code_of(partitions(client, TOPIC, create=False)) == "TopicNotFound"
    await broker.topics.partitioned.create(name_of(TOPIC), 3)
    assert await partitions(client, TOPIC, create=False) == 3
    assert await partitions(client, TOPIC + "-partition-0") == 0
    await broker.topics.partitioned.grow(name_of(TOPIC), 5)
    assert await partitions(client, TOPIC) == 5
    assert await broker.topics.list_names(DEFAULT) == [f"{TOPIC}-partition-{k}" for k in range(5)]
    await broker.namespaces.change(
        DEFAULT,
        lambda record: record.update(
            {
                "autoTopicCreationOverride": {
                    "allowAutoTopicCreation": True,
                    "topicType": "partitioned",
                    "defaultNumPartitions": 4,
                }
            }
        ),
    )
    assert await partitions(client, "auto") == 4


async def test_settings_decide_the_type_of_new_topics_where_a_namespace_does_not(
    tmp_path: Path,
) -> None:
    async with running(
        tmp_path, auto_topic_creation_type="partitioned", default_num_partitions=3
    ) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        assert await partitions(client, "auto") == 3
        await broker.namespaces.change(
            DEFAULT,
            lambda record: record.update(
                autoTopicCreationOverride={"allowAutoTopicCreation": True}
            ),
        )
        assert await partitions(client, "auto-2") == 3
        await broker.namespaces.change(
            DEFAULT,
            lambda record: record.update(
                autoTopicCreationOverride={
                    "allowAutoTopicCreation": True,
                    "topicType": "non-partitioned",
                }
            ),
        )
        assert await partitions(client, "auto-3") == 0
        await client.close()


async def test_deleting_a_partitioned_topic_deletes_its_partitions(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    await broker.topics.partitioned.create(name_of(TOPIC), 2)
    producer = await client.create_producer(TOPIC + "-partition-1")
    with pytest.raises(ProducerBusy):
        await broker.topics.delete_partitioned(name_of(TOPIC), force=False)
    await producer.close()
    await broker.topics.delete_partitioned(name_of(TOPIC), force=False)
    assert await broker.topics.list_names(DEFAULT) == []


async def test_unloading_keeps_everything(broker: Broker, connect: Connect) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    topic = broker.topics.loaded()[TOPIC]
    await topic.create_subscription("s", EARLIEST, properties={"k": "v"})
    await broker.topics.unload(topic.name)
    assert (await client.wait(producer.events.get())).HasField("close_producer")
    again = await broker.topics.get(topic.name, create=False)
    assert again is not topic
    assert again.ledger.entry_count == 1
    assert again.subscriptions["s"].cursor.properties == {"k": "v"}


async def test_deleting_needs_force_while_clients_are_connected(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    with pytest.raises(ProducerBusy):
        await broker.topics.delete(name_of(TOPIC), force=False)
    await producer.close()
    consumer = await client.subscribe(TOPIC, "s")
    with pytest.raises(ConsumerBusy):
        await broker.topics.delete(name_of(TOPIC), force=False)
    await broker.topics.delete(name_of(TOPIC), force=True)
    assert (await client.wait(consumer.events.get())).HasField("close_consumer")
    assert not await broker.topics.exists(name_of(TOPIC))
    with pytest.raises(TopicNotFound):
        await broker.topics.delete(name_of(TOPIC), force=True)


async def test_a_ledger_that_does_not_know_its_end_is_opened_anew(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    topic = broker.topics.loaded()[TOPIC]

    def fails(entries: object, done: object) -> int:
        raise AppendOutcomeUnknown("The disk does not answer: mend it.")

    topic._publishing._append_all = fails
    assert await code_of(producer.send(b"y")) == "PersistenceError"
    client.write(producer.frame(b"z")[1])
    await client.ping()
    await until(lambda: topic.state is TopicState.CLOSED)
    options = pb.CommandProducer(producer_name=producer.name, epoch=1)
    options.user_provided_producer_name = False
    again = await client.create_producer(TOPIC, options)
    await again.send(b"y", sequence_id=1)
    assert broker.topics.loaded()[TOPIC].ledger.entry_count == 2


async def test_a_topic_whose_ledger_was_taken_over_lets_its_consumers_go(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    consumer = await client.subscribe(TOPIC, "s")
    topic = broker.topics.loaded()[TOPIC]
    key = ledger_key(topic.ledger.name)
    record = await broker.metadata.get(key)
    assert record is not None
    await broker.metadata.put(key, record.value)
    with pytest.raises(ManagedLedgerFenced):
        await topic.ledger.set_properties({"a": "b"})
    await until(lambda: topic.state is TopicState.CLOSED)
    told = await client.wait(consumer.events.get())
    assert told.type == Kind.CLOSE_CONSUMER
    producer = await client.create_producer(TOPIC)
    await producer.send(b"x")
    assert broker.topics.loaded()[TOPIC] is not topic


async def test_a_subscription_that_could_not_be_deleted_is_still_there(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await (await connect()).create_producer(TOPIC)
    topic = broker.topics.loaded()[TOPIC]
    await topic.create_subscription("s", EARLIEST)
    await producer.send(b"x")

    async def fails(*_: object, **__: object) -> None:
        raise MetadataError("The disk is full: make room.")

    monkeypatch.setattr(broker.metadata, "delete", fails)
    with pytest.raises(MetadataError):
        await topic.unsubscribe("s", force=False)
    monkeypatch.undo()
    assert topic.subscriptions["s"].backlog == 1
    client = await connect()
    consumer = await client.subscribe(TOPIC, "s", permits=1)
    assert (await consumer.receive()).payload == b"x"
    await consumer.close()
    await topic.unsubscribe("s", force=False)
    assert not topic.ledger.cursors
    with pytest.raises(SubscriptionNotFound):
        await topic.unsubscribe("s", force=False)


async def test_messages_of_a_closed_reader_stay_in_the_topics_totals(
    broker: Broker, connect: Connect
) -> None:
    client = await connect()
    await (await client.create_producer(TOPIC)).send(b"x")
    options = pb.CommandSubscribe(durable=False, initial_position=pb.CommandSubscribe.Earliest)
    reader = await client.subscribe(TOPIC, "r", options, permits=1)
    await reader.receive()
    topic = broker.topics.loaded()[TOPIC]
    *_, messages, sent = topic.traffic
    assert (messages, sent > 0) == (1, True)
    await reader.close()
    await until(lambda: not topic.subscriptions)
    assert topic.traffic[-2:] == (1, sent)


@pytest.mark.parametrize("pattern", ["", "(?!secret).*"], ids=["none", "not supported"])
async def test_a_client_gets_no_topics_when_its_list_is_current(
    broker: Broker, connect: Connect, pattern: str
) -> None:
    client = await connect()
    await client.create_producer(TOPIC)
    request = pb.CommandGetTopicsOfNamespace(namespace="public/default", topics_pattern=pattern)
    listed = await listing(client, request)
    assert list(listed.topics) == [TOPIC]
    assert not listed.filtered
    request.topics_hash = listed.topics_hash
    again = await listing(client, request)
    assert not again.changed
    assert not again.topics


@pytest.mark.parametrize("domain", ["", "persistent://"])
async def test_lists_have_the_topics_that_match_a_pattern(
    broker: Broker, connect: Connect, domain: str
) -> None:
    client = await connect()
    await broker.topics.partitioned.create(name_of(f"{TOPIC}-parts"), 2)
    await client.create_producer(TOPIC)
    await client.create_producer("persistent://public/default/other")
    request = pb.CommandGetTopicsOfNamespace(
        namespace="public/default", topics_pattern=f"{domain}{TOPIC.partition('://')[2]}(-parts)?"
    )
    listed = await listing(client, request)
    parts = [f"{TOPIC}-parts-partition-{index}" for index in range(2)]
    assert list(listed.topics) == [TOPIC, *parts]
    assert (listed.filtered, listed.changed) == (True, True)
    assert listed.topics_hash == topics_hash(listed.topics)
    request.topics_hash = listed.topics_hash
    again = await listing(client, request)
    assert (list(again.topics), again.filtered, again.changed) == ([], True, False)
    await client.create_producer("persistent://public/default/more")
    assert not (await listing(client, request)).changed


async def listing(
    client: RawClient, request: pb.CommandGetTopicsOfNamespace
) -> pb.CommandGetTopicsOfNamespaceResponse:
    answer = await client.request(Kind.GET_TOPICS_OF_NAMESPACE, request)
    return answer.get_topics_of_namespace_response


async def test_a_watch_gets_created_and_deleted_topics(broker: Broker, connect: Connect) -> None:
    client = await connect()
    first = "persistent://public/default/a-1"
    await client.create_producer(first)
    watch = pb.CommandWatchTopicList(
        watcher_id=7, namespace="public/default", topics_pattern="persistent://public/default/a-.*"
    )
    answer = (await client.request(Kind.WATCH_TOPIC_LIST, watch)).watch_topic_list_success
    assert list(answer.topic) == [first]
    await client.create_producer("persistent://public/default/b-1")
    second = "persistent://public/default/a-2"
    await client.create_producer(second)
    update = (await client.wait(client.events.get())).watch_topic_update
    assert (update.watcher_id, list(update.new_topics)) == (7, [second])
    await broker.topics.delete(name_of(first), force=True)
    gone = await next_update(client)
    assert list(gone.deleted_topics) == [first]
    assert gone.topics_hash != update.topics_hash
    watch.topics_hash = gone.topics_hash
    unchanged = (await client.request(Kind.WATCH_TOPIC_LIST, watch)).watch_topic_list_success
    assert not unchanged.topic
    await client.request(Kind.WATCH_TOPIC_LIST_CLOSE, pb.CommandWatchTopicListClose(watcher_id=7))
    assert not broker.topics._listeners


async def test_a_watch_whose_update_fails_gets_it_later(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await connect()
    watch = pb.CommandWatchTopicList(
        watcher_id=7, namespace="public/default", topics_pattern="persistent://public/default/a-.*"
    )
    await client.request(Kind.WATCH_TOPIC_LIST, watch)
    listings = broker.topics.listings
    get, failures = listings.get, 2

    async def failing(name: NamespaceName) -> TopicListing:
        nonlocal failures
        if failures:
            failures -= 1
            raise MetadataError("The store is away.")
        return await get(name)

    monkeypatch.setattr(listings, "get", failing)
    # More changes than are kept: all names are listed anew.
    set_bound(monkeypatch, "TOPIC_CHANGES_KEPT", 1)
    names = [f"persistent://public/default/a-{number}" for number in range(3)]
    for each in names:
        await broker.topics.create(name_of(each))
    assert list((await next_update(client)).new_topics) == names
    assert not failures


async def next_update(client: RawClient) -> pb.CommandWatchTopicUpdate:
    while True:
        event = await client.wait(client.events.get())
        if event.HasField("watch_topic_update"):
            return event.watch_topic_update


@pytest.mark.parametrize("inactive", [False, True], ids=["requested", "inactive"])
async def test_a_deletion_is_reported_though_its_schemas_cannot_be_deleted(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, inactive: bool
) -> None:
    topic = await broker.topics.create(name_of(TOPIC))
    heard: list[tuple[str, bool]] = []
    broker.topics.on_change(lambda name, exists: heard.append((str(name), exists)))

    async def fails(schema_id: str) -> None:
        raise MetadataError("The store is away.")

    monkeypatch.setattr(broker.schemas, "forget", fails)
    topics, name = broker.topics, name_of(TOPIC)
    deletion = (
        topics.delete_if(topic, lambda: True) if inactive else topics.delete(name, force=True)
    )
    with pytest.raises(MetadataError):
        await deletion
    assert heard == [(TOPIC, False)]
    assert not await broker.topics.exists(name_of(TOPIC))


async def test_a_creation_is_reported_though_the_topic_cannot_be_loaded_or_released(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    broker.topics.on_change(lambda name, exists: heard.append(str(name)))
    await broker.topics.partitioned.create(name_of(f"{TOPIC}-p"), 1)
    partition = name_of(f"{TOPIC}-p-partition-0")

    async def fails(*_: object, **__: object) -> None:
        raise MetadataError("The store is away.")

    monkeypatch.setattr(broker.topics, "get", fails)
    monkeypatch.setattr(broker.placement, "release", fails)
    for creation in (
        broker.topics.create(name_of(TOPIC)),
        broker.topics.create_partition(partition),
    ):
        with pytest.raises(MetadataError):
            await creation
    assert heard == [TOPIC, str(partition)]


async def test_a_watch_with_a_bad_pattern_is_refused(broker: Broker, connect: Connect) -> None:
    client = await connect()
    watch = pb.CommandWatchTopicList(
        watcher_id=7, namespace="public/default", topics_pattern=r"(a)\1"
    )
    assert await code_of(client.request(Kind.WATCH_TOPIC_LIST, watch)) == "NotAllowedError"
    assert not broker.topics._listeners


async def test_a_name_too_long_to_be_stored_is_refused_for_good(
    connect: Callable[[], Awaitable[RawClient]],
) -> None:
    """With a code that the official client does not try again."""
    client = await connect()
    assert await code_of(client.subscribe(TOPIC, "s" * 5000)) == "NotAllowedError"
    await client.subscribe(TOPIC, "s" * 500)
