"""Dead letters: acknowledged when they are stored, asked for again when they are not."""

import asyncio
from collections.abc import Mapping
from typing import cast

import pytest

from magnetar.bounds import DEAD_LETTERS_IN_FLIGHT
from magnetar.consume.dead_letters import DeadLetters, dead_letter_topic
from magnetar.consume.message import Entry, RawMessage
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import DeadLetterPolicy
from magnetar.context import ClientContext
from magnetar.errors import AuthorizationFailed, BrokerFailed, MagnetarError, TopicNotFound
from magnetar.message_id import EntryId, MessageId
from magnetar.produce.producer import Producer
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from magnetar.wire.pool import ConnectionPool

TOPIC = "topic://public/default/orders"


class Segment:
    """What a letter came from."""

    def __init__(self) -> None:
        self.taken_of = 0
        self.acknowledged: list[EntryId] = []
        self.again: list[tuple[EntryId, int]] = []

    def taken(self, received: object) -> None:
        self.taken_of += 1

    def acknowledge(self, message_id: EntryId) -> None:
        self.acknowledged.append(message_id)

    def nack(self, message_id: EntryId, redelivery_count: int) -> None:
        self.again.append((message_id, redelivery_count))


class Letters:
    """A producer; `stored` says when, or why not."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0
        self.refuses_to_open = False
        self.failure: MagnetarError | None = None
        self.sent: list[Mapping[str, str]] = []
        self.values: list[bytes | None] = []
        self.keys: list[tuple[str | bytes | None, bytes | None]] = []
        self.stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> None:
        self.opened += 1
        if self.refuses_to_open:
            raise BrokerFailed("No such topic; create it.")

    async def send(
        self,
        value: bytes | None,
        *,
        key: str | bytes | None = None,
        ordering_key: bytes | None = None,
        properties: Mapping[str, str] | None = None,
        event_time_ms: int | None = None,
    ) -> MessageId:
        self.sent.append(properties or {})
        self.values.append(value)
        self.keys.append((key, ordering_key))
        await asyncio.shield(self.stored)
        return MessageId(EntryId(1, 1), 0)

    async def close(self) -> None:
        self.closed += 1


class Setting:
    def __init__(self) -> None:
        self.producer = Letters()
        self.segment = Segment()
        self.letters = DeadLetters(
            ClientContext(cast("ConnectionPool", None)),
            TOPIC,
            "s",
            DeadLetterPolicy(max_redelivery_count=2),
            lambda topic: self.producer,
        )

    def messages(self, count: int, redeliveries: int = 3) -> list[RawMessage[SegmentConsumer]]:
        segment = cast("SegmentConsumer", self.segment)
        return [
            RawMessage(
                segment, Entry((1, at), -1, redeliveries, MessageMetadata(), 0), -1, None, b""
            )
            for at in range(count)
        ]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def setting() -> Setting:
    return Setting()


@pytest.mark.parametrize(("redeliveries", "dead"), [(0, False), (2, False), (3, True)])
async def test_messages_are_dead_letters_above_the_redelivery_bound(
    setting: Setting, redeliveries: int, dead: bool
) -> None:
    assert setting.letters.are(setting.messages(1, redeliveries)) is dead


async def test_acknowledged_only_when_it_is_stored(setting: Setting) -> None:
    setting.letters.take(setting.messages(2))
    await turns()
    assert setting.segment.taken_of == 2
    assert [each["ORIGIN_MESSAGE_ID"] for each in setting.producer.sent] == ["1:0:-1", "1:1:-1"]
    assert setting.segment.acknowledged == []
    setting.producer.stored.set_result(None)
    await turns()
    assert setting.segment.acknowledged == [EntryId(1, 0), EntryId(1, 1)]
    assert setting.segment.again == []
    assert setting.producer.opened == 1
    await setting.letters.close()
    assert setting.producer.closed == 1


async def test_message_whose_dead_letter_fails_comes_again(setting: Setting) -> None:
    setting.producer.stored.set_exception(BrokerFailed("The disk is full; make room."))
    setting.letters.take(setting.messages(1))
    await turns()
    assert setting.segment.acknowledged == []
    assert setting.segment.again == [(EntryId(1, 0), 3)]


async def test_a_producer_that_does_not_open_is_tried_again_for_the_next(setting: Setting) -> None:
    setting.producer.refuses_to_open = True
    setting.letters.take(setting.messages(1))
    await turns()
    assert setting.segment.again == [(EntryId(1, 0), 3)]
    setting.producer.refuses_to_open = False
    setting.producer.stored.set_result(None)
    setting.letters.take(setting.messages(1))
    await turns()
    assert setting.segment.acknowledged == [EntryId(1, 0)]
    assert setting.producer.opened == 2


async def test_producer_without_permission_is_opened_again_for_the_next(setting: Setting) -> None:
    """A grant may come back while the consumer lives; a producer that lost it does not."""
    lost, producer = setting.producer, Letters()
    setting.letters.take(setting.messages(2))
    await turns()
    setting.producer = producer
    lost.stored.set_exception(AuthorizationFailed("Its role lacks a permission; ask for a grant."))
    await turns()
    assert (len(setting.segment.again), lost.closed, producer.opened) == (2, 1, 0)
    producer.stored.set_result(None)
    setting.letters.take(setting.messages(1))
    await turns()
    assert (len(setting.segment.acknowledged), producer.opened) == (1, 1)
    await setting.letters.close()
    assert (lost.closed, producer.closed) == (1, 1)


async def test_producer_that_failed_for_good_is_replaced(setting: Setting) -> None:
    """So it is when the topic of dead letters was deleted."""
    lost, producer = setting.producer, Letters()
    setting.letters.take(setting.messages(2))
    await turns()
    setting.producer = producer
    lost.failure = TopicNotFound("No such topic; create it.")
    lost.stored.set_exception(lost.failure)
    await turns()
    assert (len(setting.segment.again), lost.closed, producer.opened) == (2, 1, 0)
    producer.stored.set_result(None)
    setting.letters.take(setting.messages(1))
    await turns()
    assert (len(setting.segment.acknowledged), producer.opened) == (1, 1)
    await setting.letters.close()


async def test_dead_letters_beyond_the_bound_come_again(setting: Setting) -> None:
    setting.letters.take(setting.messages(DEAD_LETTERS_IN_FLIGHT + 2))
    assert len(setting.segment.again) == 2
    await setting.letters.close()
    assert setting.segment.acknowledged == []


async def test_dead_letter_of_a_message_without_value_has_none(setting: Setting) -> None:
    gone, empty = MessageMetadata(null_value=True), MessageMetadata()
    segment = cast("SegmentConsumer", setting.segment)
    setting.letters.take(
        [
            RawMessage(segment, Entry((1, at), -1, 3, each, 0), -1, None, b"")
            for at, each in enumerate((gone, empty))
        ]
    )
    await turns()
    assert setting.producer.values == [None, b""]
    await setting.letters.close()


async def test_keys_stay_what_they_were(setting: Setting) -> None:
    said = [
        MessageMetadata(partition_key="text", ordering_key=b"o"),
        MessageMetadata(partition_key="AP8=", partition_key_b64_encoded=True),
        MessageMetadata(partition_key="no base64", partition_key_b64_encoded=True),
        MessageMetadata(),
    ]
    segment = cast("SegmentConsumer", setting.segment)
    setting.letters.take(
        [
            RawMessage(segment, Entry((1, at), -1, 3, each, 0), -1, None, b"")
            for at, each in enumerate(said)
        ]
    )
    await turns()
    assert setting.producer.keys == [
        ("text", b"o"),
        (b"\x00\xff", None),
        ("no base64", None),
        (None, None),
    ]
    await setting.letters.close()


async def test_dead_letters_may_be_as_large_as_what_was_sent(setting: Setting) -> None:
    producer = setting.letters._producer_of(TOPIC)
    assert isinstance(producer, Producer)
    assert producer.settings.chunking


def test_where_dead_letters_go() -> None:
    policy = DeadLetterPolicy(max_redelivery_count=1)
    assert dead_letter_topic(TOPIC, policy) == f"{TOPIC}-DLQ"
    given = DeadLetterPolicy(max_redelivery_count=1, topic="topic://a/b/c")
    assert dead_letter_topic(TOPIC, given) == "topic://a/b/c"
