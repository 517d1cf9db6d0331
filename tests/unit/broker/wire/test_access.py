"""Commands against their access rules, on a broker with authorization."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from broker.app.service import Broker
from broker.wire.handlers.access import RULES
from broker.wire.handlers.guard import AccessGuard
from broker.wire.handlers.table import handler_table
from config.bounds import (
    ACCESSES_OF_ID,
    AUDIT_LINES_OF_CALLER_PER_S,
    TXN_PARTITIONS_OF_REQUEST,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.names import NamespaceName, parse_topic_name
from security.access import Access, Need, on_topic
from storage.metadata.store import MetadataError
from tests.support.embedded_broker import running
from tests.support.metrics_text import metrics_text
from tests.support.raw_client import BrokerError, RawClient
from tests.support.roles import TOKENS, connect_as
from tests.support.waiting import TIMEOUT_S, until

Kind = pb.BaseCommand
NAMESPACE = NamespaceName("public", "default")
TOPIC = "persistent://public/default/t"
SCALABLE = "topic://public/default/s"


class Secured:
    """A broker with authorization, and its clients."""

    def __init__(self, broker: Broker, stack: AsyncExitStack) -> None:
        self.broker = broker
        self._stack = stack

    async def client(self, role: str, proxy: str | None = None) -> RawClient:
        """A client with that role, behind a proxy of that role if there is one."""
        connect = connect_as(proxy or role)
        if proxy is not None:
            connect.original_principal = role
        client = await RawClient.open("127.0.0.1", self.broker.port, connect)
        self._stack.push_async_callback(client.close)
        return client

    async def grant(self, **actions: list[str]) -> None:
        """Replace the grants of the namespace."""
        await self.broker.namespaces.change(
            NAMESPACE,
            lambda record: record.update(auth_policies={"namespace_auth": dict(actions)}),
        )


@pytest.fixture(params=["on"])
async def secured(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Secured]:
    async with (
        running(
            tmp_path,
            **TOKENS,
            authorization=request.param,
            superuser_roles=("root", "gate"),
            proxy_roles=("gate", "weak-gate"),
        ) as broker,
        AsyncExitStack() as stack,
    ):
        yield Secured(broker, stack)


def lookup(topic: str = TOPIC) -> pb.CommandLookupTopic:
    return pb.CommandLookupTopic(topic=topic)


def producer(topic: str = TOPIC, producer_id: int = 1) -> pb.CommandProducer:
    return pb.CommandProducer(topic=topic, producer_id=producer_id)


def subscriber(subscription: str = "s") -> pb.CommandSubscribe:
    return pb.CommandSubscribe(
        topic=TOPIC, subscription=subscription, sub_type=pb.CommandSubscribe.Shared, consumer_id=1
    )


async def outcome(client: RawClient, kind: pb.BaseCommand.Type, body: Message) -> int | None:
    """The error code in the answer to a request; None if it has none."""
    try:
        answer = await client.request(kind, body)
    except BrokerError as refused:
        return refused.code
    fields = getattr(answer, FIELD_OF_TYPE[answer.type])
    for name in ("error", "error_code"):
        if name in fields.DESCRIPTOR.fields_by_name and fields.HasField(name):
            return int(getattr(fields, name))
    return None


def test_every_command_has_a_rule_and_every_rule_a_command() -> None:
    served = set(handler_table())
    assert served - RULES.keys() == set()
    assert RULES.keys() - served <= {Kind.AUTH_RESPONSE}


async def test_a_table_of_handlers_without_a_rule_is_refused(secured: Secured) -> None:
    assert secured.broker.authorizer is not None
    guard = AccessGuard(secured.broker.authorizer, {}, secured.broker.audit, dry_run=False)
    with pytest.raises(ValueError, match="No access rule"):
        guard.guarded(handler_table())


async def test_every_role_finds_the_coordinators_of_v4_clients(secured: Secured) -> None:
    assigned = "persistent://pulsar/system/transaction_coordinator_assign"
    partitions = pb.CommandPartitionedTopicMetadata(topic=assigned)
    for role in ("root", "stranger"):
        client = await secured.client(role)
        assert await outcome(client, Kind.PARTITIONED_METADATA, partitions) is None
        assert await outcome(client, Kind.LOOKUP, lookup(f"{assigned}-partition-0")) is None
        begun = await outcome(client, Kind.NEW_TXN, pb.CommandNewTxn(tc_id=0))
        assert begun is None
    refused = await outcome(client, Kind.PRODUCER, producer(assigned))
    assert refused == pb.AuthorizationError


async def test_a_superuser_may_all_and_a_stranger_nothing(secured: Secured) -> None:
    root, stranger = await secured.client("root"), await secured.client("stranger")
    for kind, body in (
        (Kind.LOOKUP, lookup()),
        (Kind.PRODUCER, producer()),
        (Kind.SUBSCRIBE, subscriber()),
    ):
        assert await outcome(stranger, kind, body) == pb.AuthorizationError
        assert await outcome(root, kind, body) is None


async def test_a_replicator_needs_the_right_to_produce(secured: Secured) -> None:
    await secured.grant(east=["produce"], west=["consume"])
    command = pb.CommandProducer(topic=TOPIC, producer_id=1, producer_name="pulsar.repl.x-->y")
    outcomes = [
        await outcome(await secured.client(role), Kind.PRODUCER, command)
        for role in ("stranger", "west", "east")
    ]
    assert outcomes == [pb.AuthorizationError, pb.AuthorizationError, None]


async def test_a_stranger_is_refused_before_it_is_looked_whether_the_topic_exists(
    secured: Secured,
) -> None:
    root, stranger = await secured.client("root"), await secured.client("stranger")
    await root.request(Kind.PRODUCER, producer())
    messages = set()
    for name in ("public/default/t", "public/default/none", "public/none/t", "none/none/t"):
        with pytest.raises(BrokerError) as refused:
            await stranger.request(Kind.LOOKUP, lookup(f"persistent://{name}"))
        assert refused.value.code == pb.AuthorizationError
        messages.add(refused.value.message.replace(name, "NAME"))
    assert len(messages) == 1


ON_A_TOPIC = (
    (Kind.LOOKUP, lookup()),
    (Kind.PARTITIONED_METADATA, pb.CommandPartitionedTopicMetadata(topic=TOPIC)),
    (Kind.PRODUCER, producer()),
    (Kind.SUBSCRIBE, subscriber()),
    (Kind.GET_SCHEMA, pb.CommandGetSchema(topic=TOPIC)),
    (
        Kind.GET_OR_CREATE_SCHEMA,
        pb.CommandGetOrCreateSchema(
            topic=TOPIC,
            schema=pb.Schema(name="s", schema_data=b"", type=pb.Schema.String),
        ),
    ),
    (Kind.PLAN_RANGE, pb.CommandPlanRange(topic=TOPIC)),
    (
        Kind.READ_ENTRIES,
        pb.CommandReadEntries(
            topic=TOPIC,
            start=pb.MessageIdData(ledger_id=0, entry_id=0),
            end=pb.MessageIdData(ledger_id=0, entry_id=1),
            max_bytes=10,
        ),
    ),
    (
        Kind.SCALABLE_TOPIC_SUBSCRIBE,
        pb.CommandScalableTopicSubscribe(
            topic=SCALABLE,
            subscription="s",
            consumer_name="c",
            consumer_id=2,
            consumer_type=pb.STREAM,
        ),
    ),
    (
        Kind.GET_TOPICS_OF_NAMESPACE,
        pb.CommandGetTopicsOfNamespace(namespace=str(NAMESPACE)),
    ),
    (
        Kind.WATCH_TOPIC_LIST,
        pb.CommandWatchTopicList(namespace=str(NAMESPACE), watcher_id=1, topics_pattern=".*"),
    ),
    (
        Kind.ADD_PARTITION_TO_TXN,
        pb.CommandAddPartitionToTxn(partitions=[TOPIC], scalable=True),
    ),
    (
        Kind.ADD_SUBSCRIPTION_TO_TXN,
        pb.CommandAddSubscriptionToTxn(
            subscription=[pb.Subscription(topic=TOPIC, subscription="s")], scalable=True
        ),
    ),
)
PRODUCE_ALONE = {Kind.PRODUCER, Kind.GET_OR_CREATE_SCHEMA, Kind.ADD_PARTITION_TO_TXN}
CONSUME_ALONE = {
    Kind.SUBSCRIBE,
    Kind.PLAN_RANGE,
    Kind.READ_ENTRIES,
    Kind.SCALABLE_TOPIC_SUBSCRIBE,
    Kind.ADD_SUBSCRIPTION_TO_TXN,
}


@pytest.mark.parametrize("action", ["produce", "consume"])
async def test_a_grant_opens_its_commands_and_no_others(secured: Secured, action: str) -> None:
    await secured.grant(user=[action])
    client = await secured.client("user")
    other = CONSUME_ALONE if action == "produce" else PRODUCE_ALONE
    for kind, body in ON_A_TOPIC:
        denied = await outcome(client, kind, body) == pb.AuthorizationError
        assert denied is (kind in other), Kind.Type.Name(kind)


async def test_another_cluster_needs_produce_and_consume_to_tell_of_subscriptions(
    secured: Secured,
) -> None:
    told = pb.CommandSubscriptionPositions(
        topic=SCALABLE, cluster="east", incarnation=1, layout_epoch=0
    )
    told.subscriptions.add(subscription="s")
    client = await secured.client("user")
    for granted in (["produce"], ["consume"], ["produce", "consume"]):
        await secured.grant(user=granted)
        denied = await outcome(client, Kind.SUBSCRIPTION_POSITIONS, told) == pb.AuthorizationError
        assert denied is (len(granted) == 1), granted


async def test_commands_between_brokers_are_for_superusers(secured: Secured) -> None:
    await secured.grant(user=["produce", "consume"])
    client = await secured.client("user")
    asked = pb.CommandEndTxnOnPartition(topic=TOPIC)
    assert await outcome(client, Kind.END_TXN_ON_PARTITION, asked) == pb.AuthorizationError


async def test_streams_of_a_scalable_topic_are_refused_in_their_own_answers(
    secured: Secured,
) -> None:
    client = await secured.client("stranger")
    client.send(Kind.SCALABLE_TOPIC_LOOKUP, pb.CommandScalableTopicLookup(
        session_id=5, topic=SCALABLE, create_if_missing=True
    ))  # fmt: skip
    update = (await client.wait(client.events.get())).scalable_topic_update
    assert (update.session_id, update.error) == (5, pb.AuthorizationError)
    client.send(
        Kind.WATCH_SCALABLE_TOPICS,
        pb.CommandWatchScalableTopics(watch_id=6, namespace=str(NAMESPACE)),
    )
    watch = (await client.wait(client.events.get())).watch_scalable_topics_update
    assert (watch.watch_id, watch.error) == (6, pb.AuthorizationError)


async def test_commands_keep_their_order_while_a_decision_waits_for_the_store(
    secured: Secured,
) -> None:
    await secured.grant(user=["produce"])
    client = await secured.client("user")
    held = asyncio.Event()
    read = secured.broker.namespaces.require_tenant_admins

    async def slow(tenant: str) -> frozenset[str]:
        await held.wait()
        return await read(tenant)

    secured.broker.namespaces.require_tenant_admins = slow  # type: ignore[method-assign]
    opened = asyncio.ensure_future(outcome(client, Kind.PRODUCER, producer()))
    looked_up = asyncio.ensure_future(outcome(client, Kind.LOOKUP, lookup()))
    (connection,) = secured.broker.connections
    await until(lambda: bool(connection.paused))
    assert not opened.done()
    assert not looked_up.done()
    held.set()
    assert await opened is None
    assert await looked_up is None


async def test_a_withdrawn_grant_closes_what_the_role_has_open(secured: Secured) -> None:
    await secured.grant(user=["produce"], other=["produce"])
    user, other = await secured.client("user"), await secured.client("other")
    for client in (user, other):
        assert await outcome(client, Kind.PRODUCER, producer()) is None
    await secured.grant(other=["produce"])
    await asyncio.wait_for(user.closed, TIMEOUT_S)
    assert not other.closed.done()
    again = await secured.client("user")
    assert await outcome(again, Kind.PRODUCER, producer()) == pb.AuthorizationError


async def test_behind_a_proxy_both_roles_are_asked(secured: Secured) -> None:
    await secured.grant(user=["produce"])
    through = await secured.client("user", "gate")
    assert await outcome(through, Kind.LOOKUP, lookup()) is None
    stranger = await secured.client("stranger", "gate")
    assert await outcome(stranger, Kind.LOOKUP, lookup()) == pb.AuthorizationError
    weak = await secured.client("user", "weak-gate")
    assert await outcome(weak, Kind.LOOKUP, lookup()) == pb.AuthorizationError


async def test_a_name_that_is_none_is_refused_as_one(secured: Secured) -> None:
    client = await secured.client("root")
    assert await outcome(client, Kind.LOOKUP, lookup("persistent://x")) == pb.InvalidTopicName


@pytest.mark.parametrize("secured", ["dry_run"], indirect=True)
async def test_a_dry_run_refuses_nothing_and_logs_what_it_would_refuse(secured: Secured) -> None:
    client = await secured.client("stranger")
    with capture_logs() as logs:
        assert await outcome(client, Kind.PRODUCER, producer()) is None
    (entry,) = [each for each in logs if each["event"] == "access_would_be_denied"]
    assert entry["role"] == "stranger"
    assert entry["operation"] == "PRODUCER"
    assert entry["access"] == [f"produce on {TOPIC}"]


def test_a_rule_without_questions_is_of_a_command_that_names_no_topic() -> None:
    names = {"topic", "namespace", "partitions", "subscription"}
    for kind, rule in RULES.items():
        if rule.questions is None:
            fields = pb.BaseCommand.DESCRIPTOR.fields_by_name[FIELD_OF_TYPE[kind]].message_type
            assert fields is not None
            assert not names & set(fields.fields_by_name), FIELD_OF_TYPE[kind]


async def test_logins_and_denials_are_in_the_metrics(secured: Secured) -> None:
    client = await secured.client("stranger")
    await outcome(client, Kind.LOOKUP, lookup())
    with pytest.raises(BrokerError):
        await RawClient.open("127.0.0.1", secured.broker.port)
    text = await metrics_text(secured.broker)
    for line in (
        'pulsar_authentication_success_total{auth_method="token",cluster="standalone",'
        'provider_name="AuthenticationProviderToken"} 1.0',
        'magnetar_access_denied_total{cluster="standalone",operation="LOOKUP"} 1.0',
        'pulsar_expiring_token_minutes_bucket{cluster="standalone",le="60.0"} 1.0',
    ):
        assert line in text
    assert "pulsar_authentication_failures_total{" in text


async def test_denials_that_are_not_logged_are_counted(secured: Secured) -> None:
    client, other = await secured.client("stranger"), await secured.client("other")
    with capture_logs() as logs:
        for _ in range(AUDIT_LINES_OF_CALLER_PER_S + 30):
            await outcome(client, Kind.LOOKUP, lookup())
        await outcome(other, Kind.LOOKUP, lookup())
    denied = [each["role"] for each in logs if each["event"] == "access_denied"]
    assert denied[-1] == "other"
    left_out = AUDIT_LINES_OF_CALLER_PER_S + 31 - len(denied)
    assert left_out == secured.broker.audit.dropped
    text = await metrics_text(secured.broker)
    assert f'magnetar_audit_lines_dropped_total{{cluster="standalone"}} {left_out}.0' in text


async def test_a_request_with_too_many_names_is_refused_before_they_are_read(
    secured: Secured,
) -> None:
    client = await secured.client("stranger")
    names = ["no name"] * (TXN_PARTITIONS_OF_REQUEST + 1)
    asked = pb.CommandAddPartitionToTxn(partitions=names, scalable=True)
    assert await outcome(client, Kind.ADD_PARTITION_TO_TXN, asked) == pb.NotAllowedError
    subscriptions = [pb.Subscription(topic="no name", subscription="s")] * len(names)
    wanted = pb.CommandAddSubscriptionToTxn(subscription=subscriptions, scalable=True)
    assert await outcome(client, Kind.ADD_SUBSCRIPTION_TO_TXN, wanted) == pb.NotAllowedError


async def test_an_id_that_is_named_twice_stays_with_what_it_has_open(secured: Secured) -> None:
    other = "persistent://public/default/other"
    await secured.broker.namespaces.change(
        NAMESPACE,
        lambda record: record.update(
            auth_policies={
                "destination_auth": {
                    TOPIC: {"user": ["produce"]},
                    other: {"user": ["produce"]},
                }
            }
        ),
    )
    client = await secured.client("user")
    for topic in (TOPIC, other):
        await client.request(Kind.PRODUCER, producer(topic))
    await secured.broker.namespaces.change(
        NAMESPACE,
        lambda record: record.update(
            auth_policies={"destination_auth": {other: {"user": ["produce"]}}}
        ),
    )
    await asyncio.wait_for(client.closed, TIMEOUT_S)


async def test_what_was_closed_is_not_checked_again(secured: Secured) -> None:
    await secured.grant(user=["produce", "consume"])
    client = await secured.client("user")
    await client.request(Kind.PRODUCER, producer())
    await client.request(Kind.CLOSE_PRODUCER, pb.CommandCloseProducer(producer_id=1))
    await client.request(Kind.SUBSCRIBE, subscriber())
    await secured.grant(user=["consume"])
    await client.ping()
    guard = secured.broker.access_guard
    assert guard is not None
    await until(lambda: not guard.checking)
    assert not client.closed.done()


async def test_acknowledgement_behind_the_close_is_refused_after_grants_changed(
    secured: Secured,
) -> None:
    await secured.grant(user=["produce", "consume"])
    client = await secured.client("user")
    await client.request(Kind.SUBSCRIBE, subscriber())
    close = pb.CommandCloseConsumer(consumer_id=1)
    ack = pb.CommandAck(
        consumer_id=1,
        ack_type=pb.CommandAck.Individual,
        message_id=[pb.MessageIdData(ledger_id=0, entry_id=0)],
    )
    await client.request(Kind.CLOSE_CONSUMER, close)
    await client.request(Kind.ACK, ack)
    await secured.grant(user=["produce"])
    assert await outcome(client, Kind.ACK, ack) == pb.ConsumerNotFound
    assert not client.closed.done()


async def test_a_watch_that_fails_leaves_the_later_one_of_its_id(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that one could not be closed, and would outlive a grant that is withdrawn."""
    listings = secured.broker.topics.listings
    get, asked, release = listings.get, asyncio.Event(), asyncio.Event()

    async def fail_first(*args: object) -> object:
        if asked.is_set():
            return await get(*args)  # type: ignore[arg-type]
        asked.set()
        await release.wait()
        raise MetadataError("The store is away.")

    monkeypatch.setattr(listings, "get", fail_first)
    client = await secured.client("root")
    watch = pb.CommandWatchTopicList(
        namespace="public/default", topics_pattern=".*", watcher_id=1, request_id=990
    )
    client.send(Kind.WATCH_TOPIC_LIST, watch)
    await client.wait(asked.wait())
    later = pb.CommandWatchTopicList(namespace="public/default", topics_pattern=".*", watcher_id=1)
    answer = asyncio.ensure_future(client.request(Kind.WATCH_TOPIC_LIST, later))
    await client.ping()
    release.set()
    await answer
    (connection,) = secured.broker.connections
    assert list(connection.topic_watches) == [1]


async def test_a_connection_whose_rights_cannot_be_read_is_closed(secured: Secured) -> None:
    await secured.grant(user=["produce"])
    client = await secured.client("user")
    await client.request(Kind.PRODUCER, producer())
    authorizer = secured.broker.authorizer
    assert authorizer is not None

    async def failing(*_: object) -> bool:
        raise MetadataError("The store does not answer: try again.")

    authorizer.decide_now = lambda *_: None  # type: ignore[method-assign]
    authorizer.decide = failing  # type: ignore[method-assign, assignment]
    await secured.grant(user=["produce", "consume"])
    await asyncio.wait_for(client.closed, TIMEOUT_S)


async def test_more_topics_under_one_id_than_are_remembered_end_the_connection(
    secured: Secured,
) -> None:
    await secured.grant(user=["produce"])
    client = await secured.client("user")
    for number in range(ACCESSES_OF_ID):
        await client.request(Kind.PRODUCER, producer(f"{TOPIC}-{number}"))
    assert not client.closed.done()
    with pytest.raises(ConnectionError):
        await client.request(Kind.PRODUCER, producer(f"{TOPIC}-last"))
    await asyncio.wait_for(client.closed, TIMEOUT_S)


@pytest.mark.parametrize("superusers", [(), ("root",)])
async def test_broker_without_superusers_says_so_at_its_start(
    tmp_path: Path, superusers: tuple[str, ...]
) -> None:
    settings = {**TOKENS, "authorization": "on", "superuser_roles": superusers}
    with capture_logs() as logs:
        async with running(tmp_path, **settings):
            pass
    warned = [each for each in logs if each["event"] == "no_superuser_roles"]
    assert len(warned) == (0 if superusers else 1)


async def test_more_ids_than_are_remembered_end_the_connection(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.wire.handlers.guard.ACCESSES_OF_CONNECTION", 5)
    await secured.grant(user=["produce", "consume"])
    client = await secured.client("user")
    for number in range(1, 6):
        await client.request(Kind.PRODUCER, producer(producer_id=number))
    await client.request(Kind.CLOSE_PRODUCER, pb.CommandCloseProducer(producer_id=5))
    await client.request(Kind.PRODUCER, producer(producer_id=6))
    assert not client.closed.done()
    with pytest.raises(ConnectionError):
        await client.request(Kind.SUBSCRIBE, subscriber())
    await asyncio.wait_for(client.closed, TIMEOUT_S)


async def test_a_grant_that_is_withdrawn_while_records_are_read_does_not_count(
    secured: Secured,
) -> None:
    await secured.grant(user=["produce"])
    authorizer = secured.broker.authorizer
    assert authorizer is not None
    decided, go_on = asyncio.Event(), asyncio.Event()
    decide = authorizer.decide

    async def slow(roles: Sequence[str], questions: Sequence[Access]) -> bool:
        allowed = await decide(roles, questions)
        decided.set()
        await go_on.wait()
        return allowed

    authorizer.decide = slow  # type: ignore[method-assign]
    client = await secured.client("user")
    opening = asyncio.ensure_future(outcome(client, Kind.PRODUCER, producer()))
    await asyncio.wait_for(decided.wait(), TIMEOUT_S)
    await secured.grant()
    questions = (on_topic(Need.PRODUCE, parse_topic_name(TOPIC)),)
    await until(lambda: authorizer.decide_now(("user",), questions) is False)
    go_on.set()
    assert await opening == pb.AuthorizationError
