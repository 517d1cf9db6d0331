"""PLAN_RANGE and READ_ENTRIES, Magnetar's own: reads of stored entries, for bulk readers.

The broker that owns a topic serves them, and loads it if need be.  Errors are sent inside the
commands' own responses.
"""

from collections.abc import Awaitable, Mapping
from typing import cast

import structlog

from broker.topics.dispatch.start_position import position_of
from broker.topics.range_plan import RangePlan, RangeRequest, plan_range
from broker.topics.segment_reads import ReadRange
from broker.topics.topic import Topic
from broker.wire.connection import Connection, Handler, UnexpectedFailure
from magnetar.protocol.ids import Position, to_wire
from magnetar.protocol.names import parse_topic_name
from magnetar.protocol.pulsar_pb2 import (
    BaseCommand,
    CommandPlanRange,
    CommandPlanRangeResponse,
    CommandReadEntries,
    CommandReadEntriesResponse,
    MessageIdData,
)
from magnetar.protocol.pulsar_pb2 import ServerError as WireError
from magnetar.protocol.server_error import MagnetarError

log = structlog.get_logger(__name__)


async def plan(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """PLAN_RANGE: choose the range to read next, and count its messages and bytes."""
    request = command.plan_range
    response = CommandPlanRangeResponse(request_id=request.request_id)

    async def work() -> None:
        topic = await _topic(connection, request.topic)
        _fill(response, await plan_range(topic, _range_request(request)))

    error = await _failure(work())
    if error is not None:
        response = CommandPlanRangeResponse(
            request_id=request.request_id,
            error=cast("WireError", int(error.code)),
            message=str(error),
        )
    connection.send(BaseCommand(type=BaseCommand.PLAN_RANGE_RESPONSE, plan_range_response=response))


async def read(connection: Connection, command: BaseCommand, entry: bytes | None) -> None:
    """READ_ENTRIES: entries as they are stored."""
    request = command.read_entries
    reads = connection.broker.segment_reads

    async def work() -> None:
        topic = await _topic(connection, request.topic)
        await reads.read(connection, topic, request.request_id, _range(request))

    async with reads.turn(connection):
        error = await _failure(work())
        if error is not None:
            response = CommandReadEntriesResponse(
                request_id=request.request_id,
                error=cast("WireError", int(error.code)),
                message=str(error),
            )
            connection.send(
                BaseCommand(type=BaseCommand.READ_ENTRIES_RESPONSE, read_entries_response=response)
            )


async def _topic(connection: Connection, name: str) -> Topic:
    # A missing topic is TopicNotFound, even if policies have topics created.
    return await connection.broker.topics.get(parse_topic_name(name), create=False)


async def _failure(work: Awaitable[None]) -> MagnetarError | None:
    """Await the work; returns the error for the peer if it fails."""
    try:
        await work
    except MagnetarError as error:
        return error
    except Exception as error:
        log.error("segment_read_failed", exc_info=error)
        return UnexpectedFailure("The broker failed on this: its log has the cause.")
    return None


def _range_request(request: CommandPlanRange) -> RangeRequest:
    def bound(field: str) -> int | None:
        return int(getattr(request, field)) if request.HasField(field) else None

    return RangeRequest(
        position_of(request.start) if request.HasField("start") else None,
        position_of(request.end) if request.HasField("end") else None,
        bound("max_messages"),
        bound("max_bytes"),
        bound("from_publish_time_ms"),
        bound("before_publish_time_ms"),
    )


def _range(request: CommandReadEntries) -> ReadRange:
    return ReadRange(
        position_of(request.start), position_of(request.end), request.max_bytes, request.raw
    )


def _fill(response: CommandPlanRangeResponse, plan: RangePlan) -> None:
    for field, position in (
        ("start", plan.start),
        ("end", plan.end),
        ("earliest", plan.earliest),
        ("horizon", plan.horizon),
        ("raw_end", plan.raw_end),
    ):
        getattr(response, field).CopyFrom(_message_id(position))
    response.entries = plan.sums.entries
    response.messages = plan.sums.messages
    response.bytes = plan.sums.size_bytes
    if plan.sums.least_ms is not None and plan.sums.greatest_ms is not None:
        response.first_publish_time_ms = plan.sums.least_ms
        response.last_publish_time_ms = plan.sums.greatest_ms
    response.sealed = plan.sealed
    response.lost = plan.lost
    if plan.backlog is not None:
        response.backlog_messages = plan.backlog.messages
        response.backlog_bytes = plan.backlog.size_bytes
    if plan.hidden is not None:
        response.hidden_messages = plan.hidden.messages


def _message_id(position: Position) -> MessageIdData:
    return MessageIdData(ledger_id=to_wire(position.ledger_id), entry_id=to_wire(position.entry_id))


HANDLERS: Mapping[int, Handler] = {
    BaseCommand.PLAN_RANGE: plan,
    BaseCommand.READ_ENTRIES: read,
}
