"""One segment of a stream consumer, and what transactions do to its acknowledgements."""

import asyncio

from magnetar.consume.message import RawMessage
from magnetar.consume.ordered_segments import OrderedInbox, OrderedSegment
from magnetar.consume.segment_consumer import SegmentConsumer
from magnetar.consume.settings import SubscribeSettings, SubscriptionKind
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame
from magnetar.wire.connection import PeerKind
from tests.support.waiting import TIMEOUT_S
from tests.unit.magnetar.consume.setting import (
    FakeTransaction,
    Place,
    pieces,
    single,
    turns,
)
from tests.unit.magnetar.layout.fakes import FakePool, context_of


class FakeReader:
    """A stream consumer that has nothing to say."""

    times_back = 0
    in_doubt = False

    def is_settled(self, segment_id: int, entry: EntryId) -> bool:
        return False

    def start_attachment(self, segment_id: int) -> None:
        pass

    def record_first_arrival(self, segment_id: int, entry: EntryId) -> None:
        pass

    def restart_from_earlier(self, segment_id: int) -> None:
        raise AssertionError


class Setting:
    """A segment, and what comes of it."""

    def __init__(self) -> None:
        reader = FakeReader()
        self.pool = FakePool()
        self.inbox = OrderedInbox(100, 1_000_000, reader)
        how = SubscribeSettings(
            subscription="s", kind=SubscriptionKind.EXCLUSIVE, ack_grouping_ms=60_000
        )
        self.segment = OrderedSegment(context_of(self.pool), Place(), how, self.inbox, reader)

    def deliver(self, entry_id: int, entry: bytes) -> RawMessage[SegmentConsumer] | None:
        """It comes; the message that there is then is taken."""
        where = pb.MessageIdData(ledger_id=1, entry_id=entry_id)
        message = pb.CommandMessage(consumer_id=self.segment.consumer_id, message_id=where)
        command = pb.BaseCommand(type=pb.BaseCommand.MESSAGE, message=message)
        handler = self.pool.connection.handlers[PeerKind.CONSUMER, self.segment.consumer_id]
        handler.received(Frame(command, entry))
        return self.inbox.take_nowait()

    def acknowledged(self) -> list[int]:
        """The entries that were named in acknowledgements since the last time."""
        found: list[int] = []
        while not self.pool.connection.sent.empty():
            command = self.pool.connection.sent.get_nowait()
            found += [each.entry_id for each in command.ack.message_id]
        return found


async def test_a_commit_takes_no_acknowledgement_that_waits_behind_the_first_piece() -> None:
    setting = Setting()
    segment, transaction = setting.segment, FakeTransaction()
    await segment.open(TIMEOUT_S)
    setting.deliver(1, pieces(b"XXYY")[0])
    plain, inside = setting.deliver(2, single()), setting.deliver(3, single())
    assert plain is not None
    assert inside is not None
    segment.acknowledge_up_to(plain.entry_id)
    segment.joined(transaction.id)
    await segment.acknowledge_up_to(inside.entry_id, transaction)
    assert setting.acknowledged() == [3]
    segment.over(transaction.id, inside.entry_id)
    await segment.close()
    assert setting.acknowledged() == [2]


async def test_a_commit_forgets_the_messages_in_pieces_up_to_it() -> None:
    setting = Setting()
    segment, transaction = setting.segment, FakeTransaction()
    await segment.open(TIMEOUT_S)
    for entry_id in range(1, 7, 2):
        first, last = pieces(b"XXYY")
        setting.deliver(entry_id, first)
        whole = setting.deliver(entry_id + 1, last)
        assert whole is not None
        segment.joined(transaction.id)
        await segment.acknowledge_up_to(whole.entry_id, transaction)
        segment.over(transaction.id, whole.entry_id)
        assert not segment._chunks._complete
    await segment.close()


async def test_messages_come_after_all_was_asked_for_while_it_was_being_attached() -> None:
    setting = Setting()
    segment, connection = setting.segment, setting.pool.connection
    answer, answered = connection.request, asyncio.Event()

    async def hold_back(command: pb.BaseCommand, timeout_s: float | None = None) -> None:
        await answered.wait()
        await answer(command, timeout_s)

    connection.request = hold_back  # type: ignore[method-assign]
    opening = asyncio.create_task(segment.open(TIMEOUT_S))
    await turns()
    segment.redeliver_all()  # a transaction did not commit that acknowledged on another segment
    answered.set()
    await opening
    assert setting.deliver(0, single()) is not None, "the broker knows of no later epoch"
    segment.redeliver_all()
    assert setting.deliver(1, single()) is None, "sent before the broker was asked"
    await segment.close()
