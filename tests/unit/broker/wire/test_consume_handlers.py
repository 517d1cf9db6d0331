"""Consumer commands against a fake topic: answers, races with closing, places to seek to."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import cast

import pytest
from structlog.testing import capture_logs

from broker.topics.client_metadata import MetadataTooLarge, ReservedProperty
from broker.topics.consumer import Consumer, SubscribeRequest
from broker.topics.dispatch.errors import (
    ConsumerBusy,
    ConsumerNotAllowed,
    ConsumerNotFound,
    SubscriptionUnavailable,
)
from broker.topics.dispatch.start_position import Inherits, start_position
from broker.topics.topic import Topic
from broker.wire.connection import Connection, Deferred, ProtocolViolation
from broker.wire.handlers.consume import HANDLERS
from config.bounds import (
    ACKED_AT_ONCE,
    CONSUMER_METADATA_BYTES,
    DAMAGED_POSITIONS_LOGGED,
    MAX_PROPERTIES_BYTES,
)
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST, Position, to_wire
from magnetar.protocol.pulsar_pb2 import BaseCommand, CommandSubscribe
from magnetar.protocol.server_error import MagnetarError, ServerError
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.waiting import count_turns
from tests.unit.broker.topics.fakes import FakeConnection, FakeTopic, entry_bytes, settle

Field = BaseCommand.Type


class HandlerTopic(FakeTopic):
    """Makes subscriptions as they are asked for; `gate` holds SUBSCRIBE back."""

    def __init__(self, name: str = "persistent://t/n/x") -> None:
        super().__init__(name)
        self.gate: asyncio.Event | None = None
        self.requests: list[SubscribeRequest] = []
        self.inherited: set[str] = set()

    async def start_of(self, request: CommandSubscribe, inherits: Inherits) -> Position:
        return await start_position(cast("Topic", self), request, inherits)

    async def subscribe(self, request: SubscribeRequest) -> Consumer:
        self.requests.append(request)
        if self.gate is not None:
            await self.gate.wait()
        subscription = self.subscriptions.get(request.subscription)
        if subscription is None:
            subscription = self.subscription(request.subscription, durable=request.durable)
        return await subscription.add_consumer(request)


class Peer(FakeConnection):
    """A connection with a broker that has one topic."""

    def __init__(self, topic: HandlerTopic) -> None:
        super().__init__()
        self.topic = topic

        async def serve(name: object, *, create: bool) -> HandlerTopic:
            return topic

        async def inherits(segment: object, subscription: str) -> bool:
            return subscription in topic.inherited

        self.broker = SimpleNamespace(
            topics=SimpleNamespace(serve=serve),
            scalable=SimpleNamespace(inherits_subscription=inherits),
            transactions=SimpleNamespace(enabled=False),
        )

    def call(self, kind: Field, body: object) -> Awaitable[None] | None:
        command = BaseCommand(type=kind)
        field = next(f.name for f in BaseCommand.DESCRIPTOR.fields if f.number == int(kind))
        getattr(command, field).CopyFrom(body)
        return HANDLERS[kind](cast("Connection", self), command, None)

    async def ask(self, kind: Field, body: object) -> BaseCommand:
        """The answer to a request; what the handler raises is raised."""
        seen = len(self.frames)
        work = self.call(kind, body)
        if work is not None:
            await work
        return self.frames[seen:][-1].command

    def reply_error(self, request_id: int, error: MagnetarError) -> None:
        Connection.reply_error(cast("Connection", self), request_id, error)

    async def subscribe(self, **fields: object) -> BaseCommand:
        given = {"topic": str(self.topic.name), "subscription": "s", "consumer_id": 1} | fields
        return await self.ask(
            BaseCommand.SUBSCRIBE,
            pb.CommandSubscribe(request_id=7, **{"sub_type": 0, **given}),  # type: ignore[arg-type]
        )


@pytest.fixture
def topic() -> HandlerTopic:
    return HandlerTopic()


@pytest.fixture
def peer(topic: HandlerTopic) -> Peer:
    return Peer(topic)


async def test_subscribe_flow_and_messages(topic: HandlerTopic, peer: Peer) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    answer = await peer.subscribe(consumer_epoch=4, sub_type=2)
    assert peer.frames[0].command.success.request_id == 7
    assert answer.active_consumer_change.is_active
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=5))
    await settle()
    assert peer.got() == [0, 1]
    assert peer.commands(BaseCommand.MESSAGE)[0].message.consumer_epoch == 4


@pytest.mark.parametrize("permits", [0, 2**31, 2**32 - 1])
async def test_flow_without_permits_or_with_too_many_ends_the_connection(
    topic: HandlerTopic, peer: Peer, permits: int
) -> None:
    topic.ledger.put(entry_bytes(0))
    await peer.subscribe()
    with pytest.raises(ProtocolViolation, match=f"FLOW has {permits} permits"):
        peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=permits))
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=2**31 - 1))
    await settle()
    assert peer.got() == [0]


async def test_redelivery_of_many_messages_is_read_in_slices(
    topic: HandlerTopic, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ACKED_AT_ONCE", 2)
    topic.ledger.put(*(entry_bytes(index) for index in range(7)))
    await peer.subscribe(sub_type=1)
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=100))
    await settle()
    wanted = [pb.MessageIdData(ledger_id=1, entry_id=entry_id) for entry_id in range(7)]
    again = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1, message_ids=wanted)
    with pytest.raises(Deferred) as deferred:
        peer.call(BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES, again)
    turn = count_turns()
    await deferred.value.check()
    assert turn() >= 3
    await settle()
    assert peer.got() == [*range(7), *range(7)]


async def test_the_same_subscribe_again_succeeds_again(topic: HandlerTopic, peer: Peer) -> None:
    await peer.subscribe()
    assert (await peer.subscribe()).success.request_id == 7
    assert len(topic.requests) == 1


async def test_close_in_the_same_read_takes_the_subscribe_back(
    topic: HandlerTopic, peer: Peer
) -> None:
    """Both commands are served in one turn of the loop, before any task of the first one runs."""
    asked = pb.CommandSubscribe(
        topic=str(topic.name),
        subscription="s",
        consumer_id=1,
        request_id=7,
        sub_type=pb.CommandSubscribe.Exclusive,
    )
    opening = peer.call(BaseCommand.SUBSCRIBE, asked)
    peer.call(BaseCommand.CLOSE_CONSUMER, pb.CommandCloseConsumer(consumer_id=1, request_id=8))
    assert opening is not None
    with pytest.raises(SubscriptionUnavailable):
        await opening
    await settle()
    assert peer.consumers == {}
    assert topic.subscriptions == {}


async def test_close_takes_back_a_subscribe_in_progress(topic: HandlerTopic, peer: Peer) -> None:
    topic.gate = asyncio.Event()
    opening = asyncio.create_task(peer.subscribe())
    await settle()
    with pytest.raises(SubscriptionUnavailable):
        await peer.subscribe()
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=5))
    peer.call(BaseCommand.ACK, pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual))
    closing = pb.CommandCloseConsumer(consumer_id=1, request_id=8)
    assert (await peer.ask(BaseCommand.CLOSE_CONSUMER, closing)).success.request_id == 8
    with pytest.raises(SubscriptionUnavailable):
        await opening
    topic.gate = None
    assert peer.consumers == {}
    assert topic.subscriptions == {}
    assert (await peer.subscribe()).success.request_id == 7


async def test_a_lost_connection_takes_back_a_subscribe(topic: HandlerTopic, peer: Peer) -> None:
    topic.gate = asyncio.Event()
    opening = asyncio.create_task(peer.subscribe())
    await settle()
    peer.lose()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert peer.consumers == {}
    topic.gate.set()
    await settle()
    assert topic.subscriptions == {}


async def test_a_failed_subscribe_leaves_the_id_free(topic: HandlerTopic, peer: Peer) -> None:
    await peer.subscribe()
    with pytest.raises(ConsumerBusy):
        await peer.subscribe(consumer_id=2)
    assert set(peer.consumers) == {1}
    with pytest.raises(MagnetarError):
        await peer.subscribe(consumer_id=3, subscription=" ")


async def test_acks_with_a_request_id_are_answered_when_durable(
    topic: HandlerTopic, peer: Peer
) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1), entry_bytes(2))
    await peer.subscribe(sub_type=1)
    subscription = topic.subscriptions["s"]
    ids = [pb.MessageIdData(ledger_id=1, entry_id=entry_id) for entry_id in (0, 2)]
    answer = await peer.ask(
        BaseCommand.ACK,
        pb.CommandAck(
            consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=ids, request_id=9
        ),
    )
    assert (answer.ack_response.request_id, answer.ack_response.HasField("error")) == (9, False)
    assert subscription.cursor.persisted == 1  # type: ignore[attr-defined]
    assert subscription.backlog == 1
    before = len(peer.frames)
    peer.call(
        BaseCommand.ACK,
        pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=ids[:1]),
    )
    await settle()
    assert len(peer.frames) == before


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"ack_type": 1, "message_ids": 1}, ServerError.NOT_ALLOWED_ERROR),
        ({"ack_type": 0, "txnid_least_bits": 0}, ServerError.NOT_ALLOWED_ERROR),
        ({"ack_type": 0, "consumer_id": 5}, ServerError.CONSUMER_NOT_FOUND),
        ({"ack_type": 1, "message_ids": 2}, ServerError.NOT_ALLOWED_ERROR),
    ],
)
async def test_refused_acks(
    topic: HandlerTopic, peer: Peer, fields: dict[str, int], error: ServerError
) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    await peer.subscribe(sub_type=1)
    count = fields.pop("message_ids", 1)
    ids = [pb.MessageIdData(ledger_id=1, entry_id=entry_id) for entry_id in range(count)]
    ack = pb.CommandAck(**{"consumer_id": 1, "message_id": ids, "request_id": 9, **fields})  # type: ignore[arg-type]
    answer = await peer.ask(BaseCommand.ACK, ack)
    assert answer.ack_response.error == int(error)
    assert topic.subscriptions["s"].backlog == 2
    ack.ClearField("request_id")
    before = len(peer.frames)
    assert peer.call(BaseCommand.ACK, ack) is None
    assert len(peer.frames) == before


async def test_ack_with_properties_is_refused_and_acknowledges_nothing(
    topic: HandlerTopic, peer: Peer
) -> None:
    topic.ledger.put(entry_bytes(0))
    await peer.subscribe()
    ack = pb.CommandAck(
        consumer_id=1,
        ack_type=pb.CommandAck.Cumulative,
        message_id=[pb.MessageIdData(ledger_id=1, entry_id=0)],
        properties=[pb.KeyLongValue(key="CompactedTopicLedger", value=3)],
        request_id=9,
    )
    answer = (await peer.ask(BaseCommand.ACK, ack)).ack_response
    assert (answer.request_id, answer.error) == (9, pb.NotAllowedError)
    assert "properties" in answer.message
    ack.consumer_id = 5
    await peer.subscribe(consumer_id=5, subscription="other")
    peer.call(BaseCommand.CLOSE_CONSUMER, pb.CommandCloseConsumer(consumer_id=5, request_id=8))
    late = (await peer.ask(BaseCommand.ACK, ack)).ack_response
    assert late.error == pb.NotAllowedError
    assert [each.backlog for each in topic.subscriptions.values()] == [1, 1]


async def test_ack_of_a_damaged_message_is_taken_and_logged(
    topic: HandlerTopic, peer: Peer
) -> None:
    topic.ledger.put(entry_bytes(0))
    await peer.subscribe()
    ack = pb.CommandAck(
        consumer_id=1,
        ack_type=pb.CommandAck.Individual,
        message_id=[pb.MessageIdData(ledger_id=1, entry_id=0)],
        validation_error=pb.CommandAck.DecompressionError,
    )
    with capture_logs() as logs:
        peer.call(BaseCommand.ACK, ack)
    assert topic.subscriptions["s"].backlog == 0
    (line,) = logs
    assert (line["event"], line["error"]) == ("message_damaged_at_client", "DecompressionError")
    assert (line["topic"], line["subscription"]) == (str(topic.name), "s")
    assert (line["messages"], line["positions"]) == (1, [(1, 0)])
    others = range(1, ACKED_AT_ONCE)
    ack.message_id.extend(pb.MessageIdData(ledger_id=1, entry_id=each) for each in others)
    with capture_logs() as logs:
        peer.call(BaseCommand.ACK, ack)
    (line,) = logs
    assert (line["messages"], len(line["positions"])) == (ACKED_AT_ONCE, DAMAGED_POSITIONS_LOGGED)


async def test_batch_acks_from_the_wire(topic: HandlerTopic, peer: Peer) -> None:
    topic.ledger.put(entry_bytes(0, count=100))
    await peer.subscribe(sub_type=1)
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=5))
    await settle()
    consumer = cast("Consumer", peer.consumers[1])

    def ack(words: list[int], size: int) -> None:
        item = pb.MessageIdData(ledger_id=1, entry_id=0, ack_set=words, batch_size=size)
        peer.call(
            BaseCommand.ACK,
            pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=[item]),
        )

    ack([-1], 100)
    assert consumer.unacked == 64
    ack([-2, (1 << 36) - 1], 0)
    assert consumer.unacked == 63
    ack([1], 2**31 - 1)
    assert (consumer.unacked, topic.subscriptions["s"].backlog) == (0, 0)


async def test_redelivery_from_the_wire(topic: HandlerTopic, peer: Peer) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    await peer.subscribe(sub_type=1)
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=50))
    await settle()
    ids = [pb.MessageIdData(ledger_id=1, entry_id=1)]
    kind = BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES
    peer.call(kind, pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1, message_ids=ids))
    peer.call(kind, pb.CommandRedeliverUnacknowledgedMessages(consumer_id=77))
    await settle()
    assert peer.got() == [0, 1, 1]
    peer.call(kind, pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1))
    await settle()
    assert peer.got() == [0, 1, 1, 0, 1]


async def test_unsubscribe(topic: HandlerTopic, peer: Peer) -> None:
    await peer.subscribe(sub_type=1)
    await peer.subscribe(sub_type=1, consumer_id=2)
    with pytest.raises(ConsumerBusy):
        await peer.ask(BaseCommand.UNSUBSCRIBE, pb.CommandUnsubscribe(consumer_id=1, request_id=3))
    assert set(peer.consumers) == {1, 2}
    answer = await peer.ask(
        BaseCommand.UNSUBSCRIBE, pb.CommandUnsubscribe(consumer_id=1, request_id=3, force=True)
    )
    assert answer.success.request_id == 3
    assert topic.unsubscribed == ["s"]
    with pytest.raises(ConsumerNotFound):
        await peer.ask(BaseCommand.UNSUBSCRIBE, pb.CommandUnsubscribe(consumer_id=1, request_id=3))


async def test_an_unsubscribe_that_fails_lets_the_client_come_back(
    topic: HandlerTopic, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await peer.subscribe()

    async def fails(name: str, *, force: bool) -> None:
        raise MetadataError("The disk is full: make room.")

    monkeypatch.setattr(topic, "unsubscribe", fails)
    command = pb.CommandUnsubscribe(consumer_id=1, request_id=3)
    answer = await peer.ask(BaseCommand.UNSUBSCRIBE, command)
    assert answer.close_consumer.consumer_id == 1
    refusal = peer.frames[-2].command.error
    assert (refusal.request_id, refusal.error) == (3, pb.MetadataError)


async def test_closing_what_is_not_there_succeeds(peer: Peer) -> None:
    closing = pb.CommandCloseConsumer(consumer_id=1, request_id=8)
    assert (await peer.ask(BaseCommand.CLOSE_CONSUMER, closing)).success.request_id == 8


async def test_a_seek_disconnects_then_answers(topic: HandlerTopic, peer: Peer) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1), entry_bytes(2, count=4))
    await peer.subscribe()
    seek = pb.CommandSeek(
        consumer_id=1,
        request_id=5,
        message_id=pb.MessageIdData(ledger_id=1, entry_id=2, ack_set=[0b1100]),
    )
    answer = await peer.ask(BaseCommand.SEEK, seek)
    assert answer.success.request_id == 5
    assert peer.frames[-2].command.close_consumer.consumer_id == 1
    with pytest.raises(ConsumerNotFound):
        await peer.ask(BaseCommand.SEEK, seek)
    await peer.subscribe()
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=9))
    await settle()
    assert peer.got() == [2]
    assert list(peer.commands(BaseCommand.MESSAGE)[0].message.ack_set) == [0b1100]


@pytest.mark.parametrize(
    ("ledger_id", "entry_id", "first"),
    [(-1, -1, 0), (LATEST.ledger_id, LATEST.entry_id, None), (1, 1, 1), (1, -1, 0)],
)
async def test_seek_targets(
    topic: HandlerTopic, peer: Peer, ledger_id: int, entry_id: int, first: int | None
) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    await peer.subscribe()
    target = pb.MessageIdData(ledger_id=to_wire(ledger_id), entry_id=to_wire(entry_id))
    await peer.ask(BaseCommand.SEEK, pb.CommandSeek(consumer_id=1, request_id=5, message_id=target))
    await peer.subscribe()
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=1))
    await settle()
    assert peer.got() == ([] if first is None else [first])


async def test_a_seek_to_no_place_is_refused_and_of_two_places_the_message_id_counts(
    topic: HandlerTopic, peer: Peer
) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    await peer.subscribe()
    seek = pb.CommandSeek(consumer_id=1, request_id=5)
    with pytest.raises(ConsumerNotAllowed, match="give a message id or a publish time"):
        await peer.ask(BaseCommand.SEEK, seek)
    seek.message_id.CopyFrom(pb.MessageIdData(ledger_id=1, entry_id=1))
    seek.message_publish_time = 0
    await peer.ask(BaseCommand.SEEK, seek)
    await peer.subscribe()
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=1))
    await settle()
    assert peer.got() == [1]


async def test_last_message_id(topic: HandlerTopic, peer: Peer) -> None:
    await peer.subscribe()

    async def last() -> pb.CommandGetLastMessageIdResponse:
        request = pb.CommandGetLastMessageId(consumer_id=1, request_id=6)
        answer = await peer.ask(BaseCommand.GET_LAST_MESSAGE_ID, request)
        return answer.get_last_message_id_response

    empty = (await last()).last_message_id
    assert (empty.ledger_id, empty.entry_id) == (to_wire(-1), to_wire(-1))
    topic.ledger.put(entry_bytes(0), entry_bytes(1, count=7))
    topic.subscriptions["s"].cursor.acknowledge(Position(1, 0))
    topic.horizon = Position(1, 0)
    topic.ledger.cached_from = 10
    assert (await last()).last_message_id.batch_index == -1
    topic.horizon = None
    found = await last()
    newest = found.last_message_id
    assert (newest.ledger_id, newest.entry_id, newest.batch_index) == (1, 1, 6)
    assert found.consumer_mark_delete_position.entry_id == 0
    reads = topic.ledger.reads
    assert (await last()).last_message_id == newest
    topic.ledger.put(entry_bytes(2, txnid_least_bits=1), entry_bytes(3, txnid_least_bits=1))
    topic.aborted |= {Position(1, 2), Position(1, 3)}
    for _ in range(2):
        assert (await last()).last_message_id == newest
    assert topic.ledger.reads == reads + 1 + 2 + 1, "what was looked at is not looked at again"


async def test_consumer_stats(topic: HandlerTopic, peer: Peer) -> None:
    topic.ledger.put(entry_bytes(0), entry_bytes(1))
    await peer.subscribe(sub_type=1, consumer_name="me")
    peer.call(BaseCommand.FLOW, pb.CommandFlow(consumer_id=1, message_permits=10))
    await settle()
    last = pb.MessageIdData(ledger_id=1, entry_id=0)
    peer.call(
        BaseCommand.ACK,
        pb.CommandAck(consumer_id=1, ack_type=pb.CommandAck.Individual, message_id=[last]),
    )
    everything = pb.CommandRedeliverUnacknowledgedMessages(consumer_id=1)
    peer.call(BaseCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES, everything)
    await settle()
    request = pb.CommandConsumerStats(consumer_id=1, request_id=6)
    stats = (await peer.ask(BaseCommand.CONSUMER_STATS, request)).consumer_stats_response
    assert (stats.consumer_name, stats.type, stats.unacked_messages) == ("me", "Shared", 1)
    assert (stats.available_permits, stats.msg_backlog) == (7, 1)
    assert stats.connected_since == "1970-01-01T00:00:10.000Z"
    # Rates are taken over one second at least.
    assert (stats.msg_rate_out, stats.message_ack_rate, stats.msg_rate_redeliver) == (3, 1, 1)
    assert stats.msg_throughput_out >= 3 * len(entry_bytes(0))


async def test_statistics_of_a_consumer_that_is_not_there_are_refused_in_their_own_answer(
    peer: Peer,
) -> None:
    request = pb.CommandConsumerStats(consumer_id=1, request_id=6)
    answer = (await peer.ask(BaseCommand.CONSUMER_STATS, request)).consumer_stats_response
    assert (answer.request_id, answer.error_code) == (6, pb.ConsumerNotFound)
    assert "no consumer 1" in answer.error_message


async def test_consumer_with_more_metadata_than_is_kept_is_refused(
    topic: HandlerTopic, peer: Peer
) -> None:
    large = [pb.KeyValue(key="k", value="v" * CONSUMER_METADATA_BYTES)]
    with pytest.raises(MetadataTooLarge, match="1025 bytes of metadata") as refused:
        await peer.subscribe(metadata=large)
    assert refused.value.code == ServerError.METADATA_ERROR
    assert topic.requests == []
    large[0].value = "v" * (CONSUMER_METADATA_BYTES - 1)
    assert (await peer.subscribe(metadata=large)).success.request_id == 7


async def test_larger_properties_of_a_subscription_than_over_rest_are_refused(
    topic: HandlerTopic, peer: Peer
) -> None:
    large = [pb.KeyValue(key="k", value="v" * MAX_PROPERTIES_BYTES)]
    with pytest.raises(MetadataTooLarge, match="16384 bytes as JSON") as refused:
        await peer.subscribe(subscription_properties=large)
    assert refused.value.code == ServerError.METADATA_ERROR
    assert topic.requests == []
    large[0].value = "v" * (MAX_PROPERTIES_BYTES - len('{"k": ""}'))
    assert (await peer.subscribe(subscription_properties=large)).success.request_id == 7


async def test_a_subscribe_whose_property_would_mark_it_replicated_is_refused(
    topic: HandlerTopic, peer: Peer
) -> None:
    reserved = [pb.KeyValue(key="pulsar.replicated.subscription", value="1")]
    with pytest.raises(ReservedProperty, match="is the broker's"):
        await peer.subscribe(subscription_properties=reserved)
    assert topic.requests == []


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({}, LATEST),
        ({"initial_position": 1}, EARLIEST),
        ({"durable": False, "start_message_id": (-1, -1)}, EARLIEST),
        ({"durable": False, "start_message_id": (LATEST.ledger_id, LATEST.entry_id)}, LATEST),
        ({"durable": False, "start_message_id": (1, 5)}, Position(1, 4)),
        ({"durable": False, "start_message_id": (1, -1)}, Position(1, -1)),
        ({"start_message_id": (1, 5)}, LATEST),
        ({"start_message_rollback_duration_sec": 5}, Position(1, 2)),
    ],
)
async def test_where_a_new_subscription_begins(
    topic: HandlerTopic, peer: Peer, fields: dict[str, object], start: Position
) -> None:
    async def find_first(predicate: object) -> Position:
        assert [predicate(e) for e in topic.ledger.entries] == [False, True]  # type: ignore[operator]
        return Position(1, 3)

    topic.ledger.put(entry_bytes(0, publish_time=4999), entry_bytes(1, publish_time=5000))
    topic.ledger.find_first = find_first  # type: ignore[attr-defined]
    if isinstance(place := fields.get("start_message_id"), tuple):
        ledger_id, entry_id = (to_wire(value) for value in place)
        fields["start_message_id"] = pb.MessageIdData(ledger_id=ledger_id, entry_id=entry_id)
    await peer.subscribe(**fields)
    assert topic.requests[0].start == start


async def test_a_segment_inherits_what_its_parents_have() -> None:
    topic = HandlerTopic("segment://t/n/x/0000-7fff-1")
    topic.inherited = {"s"}
    peer = Peer(topic)
    await peer.subscribe()
    await peer.subscribe(subscription="other", consumer_id=2)
    await peer.subscribe(subscription="reader", consumer_id=3, durable=False)
    assert [request.start for request in topic.requests] == [EARLIEST, LATEST, LATEST]
