"""PLAN_RANGE and READ_ENTRIES for a test, on one connection."""

from typing import NamedTuple

from broker.app.service import Broker
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position, from_wire, to_wire
from magnetar.protocol.message import parse_metadata, payload_of
from magnetar.protocol.names import parse_topic_name
from tests.support.raw_client import RawClient

Kind = pb.BaseCommand
TOPIC = "persistent://public/default/t"


def wire(position: Position) -> pb.MessageIdData:
    return pb.MessageIdData(
        ledger_id=to_wire(position.ledger_id), entry_id=to_wire(position.entry_id)
    )


def place(message_id: pb.MessageIdData) -> Position:
    return Position(from_wire(message_id.ledger_id), from_wire(message_id.entry_id))


class Stored(NamedTuple):
    position: Position
    payload: bytes
    visibility: int


class Reads:
    """PLAN_RANGE and READ_ENTRIES on one connection."""

    def __init__(self, raw: RawClient, topic: str = TOPIC) -> None:
        self.raw = raw
        self.topic = topic

    async def plan(
        self, start: Position | None = None, end: Position | None = None, **bounds: int
    ) -> pb.CommandPlanRangeResponse:
        command = pb.CommandPlanRange(topic=self.topic, **bounds)  # type: ignore[arg-type]
        if start is not None:
            command.start.CopyFrom(wire(start))
        if end is not None:
            command.end.CopyFrom(wire(end))
        return (await self.raw.request(Kind.PLAN_RANGE, command)).plan_range_response

    async def read(
        self, start: Position, end: Position, *, max_bytes: int = 0, raw: bool = False
    ) -> pb.CommandReadEntriesResponse:
        command = pb.CommandReadEntries(
            topic=self.topic, start=wire(start), end=wire(end), max_bytes=max_bytes, raw=raw
        )
        return (await self.raw.request(Kind.READ_ENTRIES, command)).read_entries_response

    async def read_all(
        self, start: Position, end: Position, *, max_bytes: int = 0, raw: bool = False
    ) -> list[Stored]:
        """Answer after answer, until the end."""
        found: list[Stored] = []
        while True:
            answer = await self.read(start, end, max_bytes=max_bytes, raw=raw)
            for each in answer.entries:
                assert parse_metadata(each.data)
                payload = bytes(payload_of(each.data))
                position = Position(each.ledger_id, each.entry_id)
                found.append(Stored(position, payload, each.visibility))
            if answer.at_end:
                return found
            assert place(answer.next) > start
            start = place(answer.next)


async def topic_of(broker: Broker, name: str = TOPIC) -> Topic:
    return await broker.topics.get(parse_topic_name(name), create=False)
