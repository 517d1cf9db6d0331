"""What waits for acknowledgements: callers, and segments that are left in order."""

import asyncio
import weakref

import pytest

from magnetar.bounds import MAX_UNANSWERED_ACKS
from magnetar.consume.acknowledgements import AckAnswers, Answer, OutstandingMessages
from magnetar.consume.message import Entry, RawMessage
from magnetar.errors import BrokerFailed, ConnectionLost, OperationTimedOut
from magnetar.message_id import EntryId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.pulsar_pb2 import MessageMetadata
from tests.support.waiting import TIMEOUT_S

YES = pb.BaseCommand(type=pb.BaseCommand.ACK_RESPONSE)
NO = BrokerFailed("The disk is full; make room.")
GONE = ConnectionLost("The connection was lost; wait.")


class Setting:
    def __init__(self) -> None:
        self.answers = AckAnswers()
        self.forgotten = 0

    def send(self, commands: int = 1) -> Answer:
        return self.answers.sent(commands, self.forget)

    def forget(self) -> None:
        self.forgotten += 1

    def wait(self, *, for_next: bool = False) -> asyncio.Future[None]:
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers.wait(outcome, for_next=for_next)
        return outcome


@pytest.fixture
async def setting() -> Setting:
    return Setting()


async def test_waiter_waits_for_earlier_acks_only(setting: Setting) -> None:
    assert setting.wait().done()
    one, two = setting.send(), setting.send(2)
    outcome = setting.wait()
    three = setting.send()
    three(YES)
    two(YES)
    one(YES)
    assert not outcome.done()
    two(YES)
    assert outcome.result() is None
    assert len(setting.answers) == 0
    assert setting.forgotten == 0


async def test_flush_waits_for_acks_not_sent_yet(setting: Setting) -> None:
    outcome = setting.wait(for_next=True)
    setting.answers.lost(GONE)
    assert not outcome.done()
    answered = setting.send()
    assert not outcome.done()
    answered(YES)
    assert outcome.result() is None


async def test_refused_ack_fails_all_its_waiters(setting: Setting) -> None:
    one = setting.send()
    earlier = setting.wait()
    two = setting.send(2)
    outcomes = [setting.wait(), setting.wait()]
    three = setting.send()
    outcomes.append(setting.wait())
    two(NO)
    assert [each.exception() for each in outcomes] == [NO] * 3
    assert setting.forgotten == 1
    two(YES)
    assert not earlier.done()
    one(YES)
    assert earlier.result() is None
    three(YES)
    assert len(setting.answers) == 0


async def test_ack_sent_over_a_lost_connection_has_an_unknown_outcome(setting: Setting) -> None:
    one = setting.send()
    sent, unsent = setting.wait(), setting.wait(for_next=True)
    setting.answers.lost(GONE)
    one(YES)
    assert sent.exception() is GONE
    assert not unsent.done()
    assert setting.forgotten == 1
    setting.answers.over(GONE)
    assert unsent.exception() is GONE


async def test_cancelled_waiter_does_not_block_the_others(setting: Setting) -> None:
    one = setting.send()
    setting.wait().cancel()
    outcome = setting.wait()
    one(YES)
    assert outcome.result() is None


async def test_of_too_many_the_oldest_is_not_known(setting: Setting) -> None:
    setting.send()
    outcome = setting.wait()
    for _ in range(MAX_UNANSWERED_ACKS):
        setting.send()
    assert isinstance(outcome.exception(), OperationTimedOut)
    assert len(setting.answers) == MAX_UNANSWERED_ACKS
    assert setting.forgotten == 1


def message(entry: int, index: int = -1, size: int = 0) -> RawMessage[object]:
    return RawMessage(None, Entry((1, entry), -1, 0, MessageMetadata(), size), index, None, b"")


class Weak(RawMessage[object]):
    """One of which it can be seen whether it is kept."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        super().__init__(None, Entry((1, 1), -1, 0, MessageMetadata(), 0), -1, None, b"")


async def is_over(handed_out: OutstandingMessages) -> bool:
    waiting = asyncio.ensure_future(handed_out.all_acknowledged())
    await asyncio.sleep(0)
    over = waiting.done()
    waiting.cancel()
    return over


async def test_everything_before_an_acknowledged_message_is_done() -> None:
    out = OutstandingMessages()
    for each in (message(1), message(2, 0, 2), message(2, 1, 2), message(3)):
        out.add(each)
    out.acknowledged_up_to(EntryId(1, 2, 0, 2))
    assert len(out) == 2
    out.acknowledged_up_to(EntryId(1, 2))
    assert len(out) == 1
    waiting = asyncio.ensure_future(out.all_acknowledged())
    await asyncio.sleep(0)
    assert not waiting.done()
    out.acknowledged_up_to(EntryId(1, 3))
    await asyncio.wait_for(waiting, TIMEOUT_S)


async def test_one_by_one_in_any_order() -> None:
    out = OutstandingMessages()
    for number in range(3):
        out.add(message(number))
    for number in (2, 0):
        out.acknowledged(EntryId(1, number))
        assert not await is_over(out)
    out.acknowledged(EntryId(1, 1))
    assert await is_over(out)


async def test_message_taken_back_or_redelivered_is_not_outstanding() -> None:
    out = OutstandingMessages()
    last = message(2)
    out.add(message(1))
    out.add(last)
    out.take_back(last)
    out.acknowledged_up_to(EntryId(1, 1))
    assert await is_over(out)
    out.add(last)
    out.attached()
    assert await is_over(out)


def test_messages_are_not_kept() -> None:
    out = OutstandingMessages()
    one = Weak()
    out.add(one)
    kept = weakref.ref(one)
    del one
    assert kept() is None
    assert len(out) == 1


def test_cumulative_acks_in_a_transaction_name_each_message_once() -> None:
    out = OutstandingMessages()
    for number in range(4):
        out.add(message(number))
    first, second, third, last = (message(number).entry_id for number in range(4))
    assert out.said_up_to(second) == [first, second]
    assert out.said_up_to(third) == [third]
    assert len(out) == 4
    out.attached()
    assert out.said_up_to(last) == [last]
    out.add(message(0))
    assert out.said_up_to(last) == [first]


def test_messages_of_an_earlier_attachment_are_still_acknowledged() -> None:
    out = OutstandingMessages()
    for number in range(4):
        out.add(message(number))
    first, second, third, last = (message(number).entry_id for number in range(4))
    out.acknowledged(second)
    out.attached()
    assert not out
    out.add(message(0))
    assert sorted(out.acknowledged_up_to(third)) == [first, third]
    assert out.acknowledged_up_to(last) == [last]
    out.add(message(0))
    out.attached()
    out.give_up()
    assert out.acknowledged_up_to(last) == []
