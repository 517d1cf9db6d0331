"""A shared segment: individual acknowledgements, in the order in which messages were handed out."""

import asyncio

import pytest

from magnetar.consume.assignments import (
    AssignedSegment,
    Holdings,
    LeaveSegment,
    OpenSegment,
    assignment_of,
)
from magnetar.consume.commands import subscribe_of
from magnetar.consume.delivery_log import DeliveryLog
from magnetar.consume.message import RawMessage
from magnetar.consume.ordered_segments import OrderedInbox
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import StreamSettings
from magnetar.consume.shared_segment import SharedSegment
from magnetar.errors import TransactionConflict
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.protocol.message import build_batch, build_entry
from magnetar.wire.connection import PeerKind
from tests.support.waiting import TIMEOUT_S, until
from tests.unit.magnetar.consume.setting import (
    FakeTransaction,
    Place,
    single,
    turns,
)
from tests.unit.magnetar.layout.fakes import FakePool, context_of

HALVES = ((0, 32767), (32768, 65535))


class FakeReader:
    """A stream consumer that asks the log of its one segment."""

    times_back = 0
    in_doubt = False
    log: DeliveryLog

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        return self.log.is_settled(entry)

    def start_attachment(self, segment_id: int) -> None:
        raise AssertionError

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        raise AssertionError

    def restart_from_earlier(self, segment_id: int) -> None:
        raise AssertionError


class Setting:
    """A shared segment, and what comes of it."""

    def __init__(self) -> None:
        reader = FakeReader()
        reader.log = self.log = DeliveryLog()
        self.pool = FakePool()
        self.inbox = OrderedInbox(100, 1_000_000, reader)
        how = StreamSettings(ack_grouping_ms=0).of_segment("s", "c", 0, None, HALVES)
        context = context_of(self.pool)
        self.segment = SharedSegment(context, Place(), how, self.inbox, reader, self.log)

    def send(self, entry_id: int, entry: bytes | None = None, *, epoch: int | None = None) -> None:
        """Let a message come."""
        where = pb.MessageIdData(ledger_id=1, entry_id=entry_id)
        message = pb.CommandMessage(consumer_id=self.segment.consumer_id, message_id=where)
        if epoch is not None:
            message.consumer_epoch = epoch
        command = pb.BaseCommand(type=pb.BaseCommand.MESSAGE, message=message)
        handler = self.pool.connection.handlers[PeerKind.CONSUMER, self.segment.consumer_id]
        handler.received(Frame(command, entry or single()))

    def take(self) -> list[RawMessage[SegmentConsumer]]:
        """Hand out all that there is."""
        found: list[RawMessage[SegmentConsumer]] = []
        while (received := self.inbox.take_nowait()) is not None:
            found.append(received)
        return found

    def deliver(self, *entry_ids: int) -> list[RawMessage[SegmentConsumer]]:
        for entry_id in entry_ids:
            self.send(entry_id)
        return self.take()

    def acks(self) -> list[tuple[int, list[int], int]]:
        """Entry, ack set and kind of all that was acknowledged since the last time."""
        found: list[tuple[int, list[int], int]] = []
        while not self.pool.connection.sent.empty():
            ack = self.pool.connection.sent.get_nowait().ack
            found += [(each.entry_id, list(each.ack_set), ack.ack_type) for each in ack.message_id]
        return found


def numbers(received: list[RawMessage[SegmentConsumer]]) -> list[int]:
    return [each.entry.key[1] for each in received]


def entry(entry_id: int) -> EntryId:
    return EntryId(1, entry_id)


INDIVIDUAL = pb.CommandAck.Individual


def test_an_assignment_has_the_buckets_of_shared_segments() -> None:
    message = pb.ScalableConsumerAssignment(layout_epoch=3)
    for number in range(2):
        segment = message.segments.add(segment_id=number, hash_start=0, hash_end=5)
        segment.segment_topic = f"segment {number}"
    for first, last in HALVES:
        message.segments[1].bucket_ranges.add(start=first, end=last)
    alone, shared = assignment_of(message).segments
    assert (alone.bucket_ranges, shared.bucket_ranges) == ((), HALVES)


def test_a_segment_is_left_and_opened_again_when_it_becomes_shared() -> None:
    holdings = Holdings()
    alone = AssignedSegment(1, "segment")
    shared = AssignedSegment(1, "segment", HALVES)
    assert holdings.assign([alone]) == [OpenSegment(alone)]
    assert holdings.assign([shared]) == [LeaveSegment(alone)]
    assert holdings.closed(alone) == [OpenSegment(shared)]
    assert holdings.assign([shared]) == []
    assert holdings.assign([alone]) == [LeaveSegment(shared)]


def test_subscribe_names_all_buckets() -> None:
    how = StreamSettings().of_segment("s", "c", 0, None, HALVES)
    command = subscribe_of("segment", 1, 0, how, None).subscribe
    meta = command.key_shared_meta
    assert command.sub_type == pb.CommandSubscribe.Key_Shared
    assert (meta.key_shared_mode, meta.entryBucketDispatch) == (pb.STICKY, True)
    assert [(each.start, each.end) for each in meta.hash_ranges] == list(HALVES)


async def test_messages_up_to_one_are_those_that_were_handed_out_before_it() -> None:
    setting = Setting()
    await setting.segment.open(TIMEOUT_S)
    assert numbers(setting.deliver(9, 12, 5, 13)) == [9, 12, 5, 13]
    setting.segment.acknowledge_up_to(entry(5))
    assert sorted(setting.acks()) == [(n, [], INDIVIDUAL) for n in (5, 9, 12)]
    setting.segment.acknowledge_up_to(entry(9))
    await setting.segment.close()
    assert setting.acks() == []
    assert setting.log.is_open(entry(13))


async def test_a_batch_is_acknowledged_in_one_entry_of_the_transaction() -> None:
    setting, transaction = Setting(), FakeTransaction()
    await setting.segment.open(TIMEOUT_S)
    part = pb.SingleMessageMetadata(payload_size=0)
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=3
    )
    setting.send(4, build_entry(metadata, build_batch([(part, b"m")] * 3)))
    setting.send(2)
    first, second, third, alone = setting.take()
    await setting.segment.acknowledge_up_to(second.entry_id, transaction)
    assert setting.acks() == [(4, [0b100], INDIVIDUAL)]
    await setting.segment.acknowledge_up_to(alone.entry_id, transaction)
    assert setting.acks() == [(4, [0b011], INDIVIDUAL), (2, [], INDIVIDUAL)]
    assert len(setting.log) == 0
    await setting.segment.acknowledge_up_to(third.entry_id, transaction)
    await setting.segment.acknowledge_up_to(first.entry_id, transaction)
    assert setting.acks() == []
    await setting.segment.close()


async def test_a_refused_acknowledgement_fails_the_transaction() -> None:
    setting, transaction = Setting(), FakeTransaction()
    await setting.segment.open(TIMEOUT_S)
    setting.deliver(1)

    async def refuse(command: pb.BaseCommand, timeout_s: float | None = None) -> None:
        raise TransactionConflict("Another consumer has acknowledged it.")

    setting.pool.connection.request = refuse  # type: ignore[method-assign]
    with pytest.raises(TransactionConflict):
        await setting.segment.acknowledge_up_to(entry(1), transaction)
    setting.segment.redeliver_all()
    assert setting.log.comes_again(entry(1))


async def test_all_comes_again_after_the_connection_is_lost() -> None:
    setting = Setting()
    await setting.segment.open(TIMEOUT_S)
    setting.deliver(3, 1, 2)
    close = pb.BaseCommand(type=pb.BaseCommand.CLOSE_CONSUMER)
    close.close_consumer.consumer_id = setting.segment.consumer_id
    close.close_consumer.request_id = 0
    setting.pool.connection.say(PeerKind.CONSUMER, setting.segment.consumer_id, close)
    await until(lambda: setting.segment.connection is not None, poll_s=0)
    setting.send(1)
    setting.send(2)
    setting.segment.acknowledge_up_to(entry(1))
    assert numbers(setting.take()) == [2], "1 was acknowledged by its earlier copy"
    setting.segment.acknowledge_up_to(entry(2))
    assert sorted(number for number, _, _ in setting.acks()) == [1, 2, 3]
    assert setting.log.is_empty


async def test_messages_given_up_have_to_come_again() -> None:
    setting = Setting()
    await setting.segment.open(TIMEOUT_S)
    setting.deliver(1, 2)
    setting.segment.redeliver_all()
    assert setting.log.is_open(entry(1))
    assert setting.log.comes_again(entry(1))
    setting.send(1, epoch=0)
    assert setting.take() == [], "sent before the broker was asked"
    setting.send(1, epoch=1)
    setting.send(2)  # A broker that puts no epoch into messages of Key_Shared.
    assert numbers(setting.take()) == [1, 2]
    assert not setting.log.comes_again(entry(1))
    await setting.segment.close()


async def test_leaving_waits_for_all_that_was_handed_out() -> None:
    setting, transaction = Setting(), FakeTransaction()
    await setting.segment.open(TIMEOUT_S)
    setting.deliver(2, 1)
    setting.segment.joined(transaction.id)
    leaving = asyncio.create_task(setting.segment.leave_in_order())
    await setting.segment.acknowledge_up_to(entry(1), transaction)
    await turns()
    assert not leaving.done()
    setting.segment.over(transaction.id, entry(1))
    await leaving
    assert setting.log.is_empty
