"""Ranges of segments, at brokers that do what a test says."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import magnetar
from magnetar.errors import BrokerFailed, ServiceNotReady, TopicNotFound
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST, Position
from magnetar.reads.plan import PlanLimits, answer_of, plan_of, plan_request
from tests.support.waiting import until
from tests.unit.magnetar.wire.fake_broker import FakeBroker, Peer, serving
from tests.unit.magnetar.wire.shells import Kind

SEGMENT = "segment://public/default/t/0000-ffff-0"
NOT_READY = pb.ServiceNotReady
GONE = pb.TopicNotFound


class Owner:
    """Has a segment of so many entries, each `per_answer` of them an answer; `refusals` first."""

    def __init__(self, entries: int = 0, per_answer: int = 1) -> None:
        self.entries = entries
        self.per_answer = per_answer
        self.refusals: list[pb.ServerError | None] = []
        """None: the connection is lost instead."""
        self.asked: list[pb.CommandReadEntries] = []
        self.lookups = 0
        self.broker: FakeBroker | None = None

    def greet(self, peer: Peer, received: pb.BaseCommand) -> None:
        peer.say(Kind.CONNECTED, server_version="fake", segment_reads=True)

    def answer(self, peer: Peer, received: pb.BaseCommand) -> None:
        if received.type == Kind.LOOKUP:
            self.lookups += 1
            assert self.broker is not None
            peer.say(
                Kind.LOOKUP_RESPONSE,
                request_id=received.lookup.request_id,
                response=pb.CommandLookupTopicResponse.Connect,
                broker_service_url=self.broker.url,
                authoritative=True,
            )
        elif received.type == Kind.READ_ENTRIES:
            self._read(peer, received.read_entries)
        elif received.type == Kind.PLAN_RANGE and not self._refuses(
            peer, Kind.PLAN_RANGE_RESPONSE, received.plan_range.request_id
        ):
            told = plan_told(received.plan_range.request_id)
            peer.send(pb.BaseCommand(type=Kind.PLAN_RANGE_RESPONSE, plan_range_response=told))

    def _read(self, peer: Peer, asked: pb.CommandReadEntries) -> None:
        self.asked.append(asked)
        if self._refuses(peer, Kind.READ_ENTRIES_RESPONSE, asked.request_id):
            return
        told = pb.CommandReadEntriesResponse(request_id=asked.request_id)
        first = max(asked.start.entry_id, 0) if asked.start.ledger_id == 1 else 0
        last = min(first + self.per_answer, self.entries)
        for entry_id in range(first, last):
            told.entries.add(ledger_id=1, entry_id=entry_id, data=b"%d" % entry_id)
        told.next.ledger_id, told.next.entry_id = 1, last
        told.at_end = last == self.entries
        peer.send(pb.BaseCommand(type=Kind.READ_ENTRIES_RESPONSE, read_entries_response=told))

    def _refuses(self, peer: Peer, kind: pb.BaseCommand.Type, request_id: int) -> bool:
        if not self.refusals:
            return False
        refusal = self.refusals.pop(0)
        if refusal is None:
            assert peer.transport is not None
            peer.transport.abort()
        else:
            peer.say(kind, request_id=request_id, error=refusal, message="Not now.")
        return True


def plan_told(request_id: int = 0) -> pb.CommandPlanRangeResponse:
    told = pb.CommandPlanRangeResponse(request_id=request_id, entries=2, messages=9, sealed=True)
    for name, entry_id in (("start", 0), ("end", 2), ("earliest", 0), ("horizon", 3)):
        getattr(told, name).ledger_id, getattr(told, name).entry_id = 1, entry_id
    told.raw_end.ledger_id, told.raw_end.entry_id = 1, 4
    return told


@pytest.fixture
async def owner() -> Owner:
    return Owner(entries=10)


@pytest.fixture
async def client(owner: Owner) -> AsyncIterator[magnetar.Client]:
    async with serving(owner.answer, owner.greet) as broker:
        owner.broker = broker
        async with magnetar.connect(broker.url, operation_timeout_s=2) as client:
            yield client


async def numbers(client: magnetar.Client, start: Position = EARLIEST) -> list[int]:
    async with asyncio.timeout(10):
        return [
            int(each.data)
            async for entries in client.read_range(SEGMENT, start, LATEST)
            for each in entries
        ]


async def test_everything_is_read_once(client: magnetar.Client, owner: Owner) -> None:
    owner.per_answer = 3
    assert await numbers(client) == list(range(10))
    assert len(owner.asked) == 4
    assert owner.lookups == 1
    assert await numbers(client, Position(1, 7)) == [7, 8, 9]
    assert owner.lookups == 1


@pytest.mark.parametrize("refusal", [NOT_READY, None])
async def test_reading_goes_on_where_it_was(
    client: magnetar.Client, owner: Owner, refusal: pb.ServerError | None
) -> None:
    reading = client.read_range(SEGMENT, EARLIEST, LATEST)
    came = [int(each.data) for each in await anext(reading)]
    await until(lambda: len(owner.asked) == 2)
    owner.refusals = [refusal, refusal]
    async with asyncio.timeout(10):
        came += [int(each.data) async for entries in reading for each in entries]
    assert came == list(range(10))
    assert not owner.refusals
    assert owner.lookups > 1


async def test_the_next_answer_is_under_way_and_no_more_than_that(
    client: magnetar.Client, owner: Owner
) -> None:
    reading = client.read_range(SEGMENT, EARLIEST, LATEST)
    for handed_out in range(1, 5):
        await anext(reading)
        await until(lambda: len(owner.asked) == handed_out + 1)  # noqa: B023 - awaited here
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(owner.asked) == 5
    await reading.aclose()


async def test_permanently_refused_read_raises(client: magnetar.Client, owner: Owner) -> None:
    owner.refusals = [GONE]
    with pytest.raises(TopicNotFound):
        await numbers(client)
    owner.refusals = [GONE]
    with pytest.raises(TopicNotFound):
        await client.plan_range(SEGMENT)
    owner.refusals = [NOT_READY] * 100
    with pytest.raises(ServiceNotReady):
        await client.plan_range(SEGMENT)


async def test_abandoned_read_sends_no_more_requests(client: magnetar.Client, owner: Owner) -> None:
    async for _ in client.read_range(SEGMENT, EARLIEST, LATEST):
        break
    assert len(owner.asked) <= 2


async def test_an_answer_is_asked_for_in_the_size_that_fits(
    client: magnetar.Client, owner: Owner
) -> None:
    reading = client.read_range(SEGMENT, EARLIEST, LATEST, max_bytes=10**9, raw=True)
    await anext(reading)
    await reading.aclose()
    assert owner.asked[0].max_bytes == 5 * 1024 * 1024
    assert owner.asked[0].raw


async def test_a_plan_is_asked_again(client: magnetar.Client, owner: Owner) -> None:
    owner.refusals = [NOT_READY, None]
    plan = await client.plan_range(SEGMENT, Position(1, 0), max_messages=9)
    assert (plan.start, plan.end, plan.horizon) == (Position(1, 0), Position(1, 2), Position(1, 3))
    assert (plan.raw_end, plan.sealed, plan.lost) == (Position(1, 4), True, False)
    assert (plan.messages, plan.backlog_messages) == (9, None)


def test_only_what_was_given_is_asked_for() -> None:
    command = plan_request(SEGMENT, None, Position(-1, -1), PlanLimits(max_bytes=0)).plan_range
    assert not command.HasField("start")
    assert command.end.ledger_id == command.end.entry_id == 2**64 - 1
    assert command.HasField("max_bytes")
    assert not command.HasField("max_messages")
    assert not command.HasField("from_publish_time_ms")


def test_answers_that_lead_nowhere_are_refused() -> None:
    told = plan_told()
    told.ClearField("horizon")
    with pytest.raises(BrokerFailed, match="horizon"):
        plan_of(told)
    answer = pb.CommandReadEntriesResponse(request_id=0)
    answer.next.ledger_id, answer.next.entry_id = 1, 5
    with pytest.raises(BrokerFailed, match="nothing"):
        answer_of(answer, Position(1, 5))
    answer.at_end = True
    assert answer_of(answer, Position(1, 5)).at_end
