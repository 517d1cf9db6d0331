"""The session of an ordered consumer against a controller made of calls."""

import asyncio

import pytest

from magnetar.consume.assignments import Assignment
from magnetar.consume.ordered_segments import ControllerSession, supports_unsubscribe
from magnetar.errors import MagnetarError, NotAllowed, error_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.server_error import ServerError
from magnetar.wire.connection import PeerKind
from tests.support.waiting import TIMEOUT_S
from tests.unit.magnetar.layout.fakes import (
    FakeConnection,
    FakePool,
    context_of,
    layout_update,
)

Kind = pb.BaseCommand
TOPIC = "topic://public/default/orders"


def assignment(*ids: int, epoch: int = 0) -> pb.ScalableConsumerAssignment:
    told = pb.ScalableConsumerAssignment(layout_epoch=epoch)
    for number in ids:
        told.segments.add(
            segment_id=number, hash_start=0, hash_end=9, segment_topic=f"segment://x/{number}"
        )
    return told


class Controller:
    """Answers a session's lookups, and its registration when it is told to."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.seen: list[pb.CommandScalableTopicSubscribe] = []

    @property
    def connection(self) -> FakeConnection:
        return self.pool.connection

    async def registration(self) -> pb.CommandScalableTopicSubscribe:
        lookup = (await self.connection.next(Kind.SCALABLE_TOPIC_LOOKUP)).scalable_topic_lookup
        update = layout_update(lookup.session_id, (0, 0, 0xFFFF))
        self.connection.say(PeerKind.LAYOUT, lookup.session_id, update)
        await self.connection.next(Kind.SCALABLE_TOPIC_CLOSE)
        subscribe = await self.connection.next(Kind.SCALABLE_TOPIC_SUBSCRIBE)
        self.seen.append(subscribe.scalable_topic_subscribe)
        return self.seen[-1]

    def answer(self, told: pb.ScalableConsumerAssignment) -> None:
        request_id = self.seen[-1].request_id
        response = pb.CommandScalableTopicSubscribeResponse(request_id=request_id, assignment=told)
        self.connection.asked[request_id](
            pb.BaseCommand(
                type=Kind.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE,
                scalable_topic_subscribe_response=response,
            )
        )

    def refuse(self, error: MagnetarError) -> None:
        self.connection.asked[self.seen[-1].request_id](error)

    def push(self, told: pb.ScalableConsumerAssignment) -> None:
        number = self.seen[-1].consumer_id
        update = pb.CommandScalableTopicAssignmentUpdate(consumer_id=number, assignment=told)
        self.connection.say(
            PeerKind.CONSUMER,
            number,
            pb.BaseCommand(
                type=Kind.SCALABLE_TOPIC_ASSIGNMENT_UPDATE, scalable_topic_assignment_update=update
            ),
        )


class Opening:
    """A session that is being opened, and what it was assigned."""

    def __init__(self, pool: FakePool, operation_timeout_s: float = TIMEOUT_S) -> None:
        context = context_of(pool, operation_timeout_s)
        self.session = ControllerSession(context, "orders", "billing", "one")
        self.told: list[set[int]] = []
        self.failures: asyncio.Queue[MagnetarError] = asyncio.Queue()
        self.session.on_assignment(self._assigned)
        self.session.on_failure(self.failures.put_nowait)
        self.task = asyncio.create_task(self.session.open(TIMEOUT_S))

    def _assigned(self, told: Assignment) -> None:
        self.told.append({segment.segment_id for segment in told.segments})


async def test_session_registers_under_the_resolved_name() -> None:
    pool = FakePool()
    controller, opening = Controller(pool), Opening(pool)
    asked = await controller.registration()
    assert pool.asked == ["orders", "pulsar://leader:6650"]
    assert asked.topic == opening.session.topic == TOPIC
    assert (asked.subscription, asked.consumer_name) == ("billing", "one")
    controller.answer(assignment(1, 2))
    await opening.task
    assert opening.told == [{1, 2}]
    await opening.session.close()
    left = await pool.connection.next(Kind.SCALABLE_TOPIC_UNSUBSCRIBE)
    assert left.scalable_topic_unsubscribe.consumer_id == asked.consumer_id


async def test_the_last_that_arrives_counts_whether_answer_or_push() -> None:
    pool = FakePool()
    controller, opening = Controller(pool), Opening(pool)
    await controller.registration()
    controller.push(assignment(1))
    controller.answer(assignment(1, 2))
    controller.push(assignment(2))
    await opening.task
    assert opening.told == [{1}, {1, 2}, {2}]
    await opening.session.close()


async def test_an_older_layout_is_ignored_within_a_registration() -> None:
    pool = FakePool()
    controller, opening = Controller(pool), Opening(pool)
    await controller.registration()
    controller.push(assignment(3, epoch=4))
    controller.answer(assignment(1, epoch=3))
    await opening.task
    assert opening.told == [{3}]
    lost, pool.connection = pool.connection, FakeConnection()
    lost.lose()
    asked = await controller.registration()
    assert asked.consumer_name == "one"
    controller.answer(assignment(0, epoch=0))
    assert opening.told == [{3}, {0}]
    await opening.session.close()


async def test_unanswered_registration_is_withdrawn_and_retried() -> None:
    pool = FakePool()
    controller, opening = Controller(pool), Opening(pool, operation_timeout_s=0.5)
    await controller.registration()
    await pool.connection.next(Kind.SCALABLE_TOPIC_UNSUBSCRIBE)
    await controller.registration()
    controller.answer(assignment(1))
    await opening.task
    await opening.session.close()


async def test_a_controller_that_is_none_now_is_looked_for_again() -> None:
    pool = FakePool()
    controller, opening = Controller(pool), Opening(pool)
    await controller.registration()
    controller.refuse(error_of(ServerError.UNKNOWN_ERROR, "Not the leader."))
    await controller.registration()
    controller.answer(assignment(1))
    await opening.task
    await opening.session.close()


async def test_a_refusal_for_good_fails_the_opening() -> None:
    pool = FakePool()
    controller, opening = Controller(pool), Opening(pool)
    await controller.registration()
    controller.refuse(NotAllowed("Another kind of consumer is there."))
    with pytest.raises(NotAllowed):
        await opening.task


@pytest.mark.parametrize("version", ["Pulsar Server5.0.0-M1", "Pulsar Server5.0.0-M1-SNAPSHOT"])
async def test_pulsar_5_m1_gets_no_unsubscribe_at_close(version: str) -> None:
    pool = FakePool()
    pool.connection.server_version = version
    controller, opening = Controller(pool), Opening(pool)
    await controller.registration()
    controller.answer(assignment(1))
    await opening.task
    await opening.session.close()
    assert pool.connection.sent.empty()


@pytest.mark.parametrize(
    "version",
    ["Magnetar 0.1", "Pulsar Server5.0.0", "Pulsar Server5.0.0-M2", "Pulsar Server5.0.0-M10"],
)
def test_other_versions_get_an_unsubscribe_at_close(version: str) -> None:
    assert supports_unsubscribe(version)
