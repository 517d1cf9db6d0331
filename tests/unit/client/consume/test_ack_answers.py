"""Who waits for the broker's word on acknowledgements."""

import asyncio

import pytest

from magnetar.bounds import MAX_UNANSWERED_ACKS
from magnetar.consume.ack_answers import AckAnswers, Answer
from magnetar.errors import BrokerFailed, ConnectionLost, OperationTimedOut
from protocol import pulsar_pb2 as pb

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


async def test_what_was_sent_before_counts_and_nothing_later(setting: Setting) -> None:
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


async def test_what_waits_to_be_sent_is_waited_for(setting: Setting) -> None:
    outcome = setting.wait(for_next=True)
    setting.answers.lost(GONE)
    assert not outcome.done()
    answered = setting.send()
    assert not outcome.done()
    answered(YES)
    assert outcome.result() is None


async def test_a_refusal_is_told_to_all_who_wait_for_it(setting: Setting) -> None:
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


async def test_what_was_sent_and_is_lost_is_not_known(setting: Setting) -> None:
    one = setting.send()
    sent, unsent = setting.wait(), setting.wait(for_next=True)
    setting.answers.lost(GONE)
    one(YES)
    assert sent.exception() is GONE
    assert not unsent.done()
    assert setting.forgotten == 1
    setting.answers.over(GONE)
    assert unsent.exception() is GONE


async def test_who_was_cancelled_is_no_hindrance(setting: Setting) -> None:
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
