"""What another broker is asked about a topic: typed requests, and what their owner does."""

import asyncio

import pytest

from broker.placement import OwnedElsewhere, PlacementNotReady
from broker.placement.peer_failed import PeerFailed
from broker.placement.typed_request import MalformedRequest, PositionOfOneBroker, Request, encode
from broker.scalable.feed import FEED_REQUESTS
from broker.scalable.segment_requests import SEGMENT_REQUESTS
from broker.topics.local_topics import LocalTopics
from broker.topics.producer_access import ProducerBusy
from broker.topics.topic import SubscriptionNotFound, TopicNotFound
from broker.topics.topic_requests import (
    OWNER_ERRORS,
    TOPIC_REQUESTS,
    CompactTopic,
    CreateTopicSubscription,
    DeleteTopic,
    DeleteTopicSubscription,
    EndOnTopic,
    ExpireMessages,
    ExpireUpTo,
    ListTopicSubscriptions,
    ListUnmanagedClients,
    LoadTopic,
    RemoveSubscription,
    ReplaceSubscriptionProperties,
    RequireUnused,
    SealTopic,
    SeekTopicSubscription,
    SeekTopicSubscriptionToTime,
    SetReplicated,
    SkipBacklog,
    SkipEntries,
    TopicRequest,
    TrimTopic,
    TruncateTopic,
    UnloadTopic,
    ViewCompaction,
    ViewInternalStats,
    ViewReplicated,
    ViewSubscriptionProperties,
    ViewTopicProperties,
    ViewTopicStats,
)
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.server_error import MagnetarError, ServerError
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node

NAME = "persistent://public/default/t"
TOPIC = parse_topic_name(NAME)
SCALABLE = parse_topic_name("topic://public/default/s")
REQUESTS: list[Request[LocalTopics, object]] = [
    LoadTopic(TOPIC),
    UnloadTopic(TOPIC),
    UnloadTopic(TOPIC, "b:1"),
    DeleteTopic(TOPIC, force=False),
    DeleteTopic(SCALABLE, force=True),
    RequireUnused(TOPIC),
    ListUnmanagedClients(TOPIC),
    EndOnTopic(TOPIC, "3_42", True, []),
    EndOnTopic(TOPIC, "3_42", False, ["a b/c", "s"]),
    ViewTopicProperties(TOPIC),
    ViewTopicStats(TOPIC),
    ViewInternalStats(TOPIC),
    ViewInternalStats(TOPIC, with_records=True),
    SealTopic(TOPIC),
    TrimTopic(TOPIC),
    TruncateTopic(TOPIC),
    CompactTopic(TOPIC),
    ViewCompaction(TOPIC),
    ListTopicSubscriptions(TOPIC),
    CreateTopicSubscription(TOPIC, "s", EARLIEST),
    CreateTopicSubscription(TOPIC, "s", EARLIEST, replicated=True),
    ViewReplicated(TOPIC, "s"),
    SetReplicated(TOPIC, "s", True),
    RemoveSubscription(SCALABLE, "s"),
    SkipBacklog(TOPIC, ""),
    CreateTopicSubscription(TOPIC, "a b/c", LATEST, {"k": "v"}, batch_index=2, excluded=True),
    DeleteTopicSubscription(TOPIC, "s", force=True),
    ViewSubscriptionProperties(TOPIC, "s"),
    ReplaceSubscriptionProperties(TOPIC, "s", {"k": "v"}),
    SeekTopicSubscription(TOPIC, "s", LATEST),
    SeekTopicSubscription(TOPIC, "s", EARLIEST, batch_index=0, excluded=True),
    SeekTopicSubscriptionToTime(TOPIC, "s", 7),
    ExpireMessages(TOPIC, "s", 7),
    SkipEntries(TOPIC, "s", 7),
    ExpireUpTo(TOPIC, "s", LATEST, excluded=True),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: type(each).__name__)
def test_request_arrives_as_it_was_sent(request_: Request[LocalTopics, object]) -> None:
    assert TOPIC_REQUESTS[request_.KIND].from_json(request_.to_json()) == request_


def test_every_kind_of_request_is_tried_here() -> None:
    assert {each.KIND for each in REQUESTS} == TOPIC_REQUESTS.keys()
    assert len(TOPIC_REQUESTS) == 28


def test_no_kind_is_in_two_tables() -> None:
    tables = (TOPIC_REQUESTS, SEGMENT_REQUESTS, FEED_REQUESTS)
    assert len({kind for table in tables for kind in table}) == sum(map(len, tables))


def test_request_goes_to_the_owner_of_its_topic() -> None:
    owned = [each.owned for each in REQUESTS if isinstance(each, TopicRequest)]
    assert len(owned) == len(REQUESTS) - 1, "all but LoadTopic"
    assert set(owned) == {TOPIC, SCALABLE}


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (UnloadTopic(TOPIC), None),
        (ViewTopicStats(TOPIC), {"storageSize": 3, "publishers": []}),
        (CompactTopic(TOPIC), True),
        (ListTopicSubscriptions(TOPIC), ["s", "a b/c"]),
        (ListUnmanagedClients(TOPIC), ["consumer 'c' of subscription 's'"]),
        (ViewTopicProperties(TOPIC), {"k": "v"}),
        (ViewReplicated(TOPIC, "s"), {NAME: True}),
        (CreateTopicSubscription(TOPIC, "s", LATEST), False),
    ],
    ids=lambda each: type(each).__name__,
)
def test_answer_arrives_as_it_was_given(
    request_: Request[LocalTopics, object], answer: object
) -> None:
    assert request_.answer_from_json(encode(answer)) == answer


@pytest.mark.parametrize("answer", [0, None, "true", {}])
def test_malformed_answer_is_refused(answer: object) -> None:
    with pytest.raises(MalformedRequest, match=r"answer to topic\.create-subscription"):
        CreateTopicSubscription(TOPIC, "s", LATEST).answer_from_json(answer)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"topic": NAME, "force": 1},
        {"topic": NAME, "force": None},
        {"topic": "persistent://x", "force": True},
        {"topic": NAME, "force": True, "more": 1},
    ],
)
def test_malformed_request_is_refused(fields: object) -> None:
    with pytest.raises(MalformedRequest):
        DeleteTopic.from_json(fields)


def test_position_of_one_broker_is_not_sent() -> None:
    for request in (
        SeekTopicSubscription(TOPIC, "s", Position(7, 3)),
        CreateTopicSubscription(TOPIC, "s", Position(7, 3)),
    ):
        with pytest.raises(PositionOfOneBroker, match="give EARLIEST or LATEST"):
            request.to_json()


@pytest.mark.parametrize(
    "code",
    [
        ServerError.TOPIC_NOT_FOUND,
        ServerError.SUBSCRIPTION_NOT_FOUND,
        ServerError.CONSUMER_BUSY,
        ServerError.PRODUCER_BUSY,
    ],
)
def test_error_has_its_code_and_its_sentence_once_at_both_brokers(code: ServerError) -> None:
    error = OWNER_ERRORS[code]("The test refuses.")
    assert OWNER_ERRORS[code](str(error)).code is code
    assert str(OWNER_ERRORS[code](str(error))) == str(error)


# Over the channel


async def pair(cluster: Cluster) -> tuple[Node, Node]:
    """A broker, and one that owns the topic."""
    a, b = await cluster.add(), await cluster.add()
    await b.broker.topics.create(TOPIC)
    await until(lambda: a.owner_of(NAME) == b.id)
    return a, b


async def test_owner_carries_out_what_another_broker_asks(cluster: Cluster) -> None:
    a, b = await pair(cluster)
    ask = a.broker.topics.cluster.ask
    assert await ask(CreateTopicSubscription(TOPIC, "s", EARLIEST, {"k": "v"}))
    assert not await ask(CreateTopicSubscription(TOPIC, "s", EARLIEST)), "it exists"
    assert await ask(ListTopicSubscriptions(TOPIC)) == ["s"]
    await ask(SeekTopicSubscription(TOPIC, "s", LATEST))
    await ask(SeekTopicSubscriptionToTime(TOPIC, "s", 0))
    stats = await a.broker.topics.cluster.stats(TOPIC)
    assert stats["ownerBroker"] == b.id
    await ask(DeleteTopicSubscription(TOPIC, "s", force=False))
    assert not b.broker.topics.loaded()[NAME].subscriptions
    assert not a.broker.topics.loaded()
    await ask(DeleteTopic(TOPIC, force=False))
    assert not b.broker.topics.loaded()
    assert not await a.broker.topics.exists(TOPIC)
    assert await a.broker.topics.cluster.stats(TOPIC) == {}


async def test_of_subscriptions_made_at_once_the_first_stays_as_it_is(cluster: Cluster) -> None:
    a, b = await pair(cluster)
    ask = a.broker.topics.cluster.ask
    made = await asyncio.gather(
        ask(CreateTopicSubscription(TOPIC, "s", EARLIEST, {"k": "v"}, replicated=True)),
        *(ask(CreateTopicSubscription(TOPIC, "s", LATEST, {"k": str(n)})) for n in range(3)),
    )
    assert sorted(made) == [False, False, False, True]
    cursor = b.broker.topics.loaded()[NAME].subscriptions["s"].cursor
    first = made.index(True)
    assert cursor.replicated is (first == 0)
    assert cursor.properties == {"k": "v" if first == 0 else str(first - 1)}


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (RequireUnused(TOPIC), ProducerBusy),
        (DeleteTopic(TOPIC, force=False), ProducerBusy),
        (DeleteTopicSubscription(TOPIC, "s", force=False), SubscriptionNotFound),
        (SeekTopicSubscription(TOPIC, "s", LATEST), SubscriptionNotFound),
        (ListTopicSubscriptions(parse_topic_name(f"{NAME}-partition-7")), TopicNotFound),
    ],
    ids=lambda each: type(each).__name__,
)
async def test_error_of_the_owner_is_the_same_at_the_broker_that_asks(
    cluster: Cluster, request_: TopicRequest[object], error: type[MagnetarError]
) -> None:
    a, b = await pair(cluster)
    await (await b.client()).create_producer(NAME)
    with pytest.raises(error) as here:
        await a.broker.topics.cluster.ask(request_)
    with pytest.raises(error) as there:
        await request_.run(b.broker.topics.cluster.local)
    assert str(here.value) == str(there.value)


async def test_topic_is_unloaded_for_another_broker_that_loads_it(cluster: Cluster) -> None:
    a, _ = await pair(cluster)
    c = await cluster.add()
    await a.broker.topics.cluster.unload(TOPIC, c.id)
    assert cluster.owners(NAME) == [c]
    assert NAME in c.broker.topics.loaded()


async def test_broker_that_does_not_own_a_topic_names_the_owner(cluster: Cluster) -> None:
    a, b = await pair(cluster)
    with pytest.raises(PeerFailed, match=f"not served by {a.id}: ask {b.id}") as failed:
        await b.placement.ask(a.placement.me, UnloadTopic(TOPIC))
    assert failed.value.owner_id == b.id
    assert NAME in b.broker.topics.loaded()


async def test_unloading_what_nobody_owns_loads_nothing(cluster: Cluster) -> None:
    a, b = await pair(cluster)
    await b.broker.topics.unload(TOPIC)
    await a.placement.ask(b.placement.me, UnloadTopic(TOPIC, a.id))
    assert cluster.owners(NAME) == []


async def test_owned_topic_is_not_loaded_by_another_broker(cluster: Cluster) -> None:
    a, b = await pair(cluster)
    with pytest.raises(OwnedElsewhere):
        await LoadTopic(TOPIC).run(a.broker.topics.cluster.local)
    assert cluster.owners(NAME) == [b]


async def test_draining_broker_answers_for_what_it_owns_and_takes_nothing(
    cluster: Cluster,
) -> None:
    a, b = await pair(cluster)
    other = parse_topic_name("persistent://public/default/other")
    await a.broker.topics.create(other)
    await a.broker.topics.unload(other)
    await b.placement.begin_drain()
    assert await a.placement.ask(b.placement.me, ListTopicSubscriptions(TOPIC)) == []
    with pytest.raises(PeerFailed, match=f"ask {a.id}"):
        await a.placement.ask(b.placement.me, ListTopicSubscriptions(other))
    with pytest.raises(PlacementNotReady):
        await LoadTopic(other).run(b.broker.topics.cluster.local)
    # Asked again, as it gives the topic up meanwhile: another broker loads it.
    await b.broker.topics.hand_over()
    assert await a.broker.topics.cluster.ask(ListTopicSubscriptions(TOPIC)) == []
    assert cluster.owners(NAME) == [a]
