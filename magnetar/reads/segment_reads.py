"""`SegmentReads`, which plans and reads ranges of segments at the brokers that own them."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeVar

from magnetar.bounds import READ_OWNERS
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError
from magnetar.protocol.ids import Position
from magnetar.reads.entries import StoredEntry
from magnetar.reads.plan import (
    Answer,
    PlanLimits,
    RangePlan,
    answer_of,
    plan_of,
    plan_request,
    read_request,
)
from magnetar.reads.reader_fallback import plan_by_reader, read_by_reader
from magnetar.retries import retried
from magnetar.wire.connection import Connection

__all__ = ["SegmentReads"]

R = TypeVar("R")


class SegmentReads:
    """Plans and reads ranges of segments at the brokers that own them.  One for each client.

    The owner of a segment is looked up when it is first needed, and again after an error there.
    Retriable errors are retried for the operation timeout, and reading goes on where it was.
    Brokers without segment reads are read by a reader (`reader_fallback`).
    """

    def __init__(self, context: ClientContext) -> None:
        self._context: Final = context
        self._owners: OrderedDict[str, Connection] = OrderedDict()

    async def plan(
        self, topic: str, start: Position | None, end: Position | None, limits: PlanLimits
    ) -> RangePlan:
        """See `Client.plan_range`."""
        if not await self._offered(topic):
            return await plan_by_reader(self._context, topic, start, end, limits)
        command = plan_request(topic, start, end, limits)

        async def ask(connection: Connection) -> RangePlan:
            answer = await connection.request(command)
            return plan_of(answer.plan_range_response)

        return await self._at_owner(topic, ask, f"The plan of {topic}")

    async def read(
        self, topic: str, start: Position, end: Position, *, raw: bool, max_bytes: int
    ) -> AsyncGenerator[list[StoredEntry], None]:
        """See `Client.read_range`."""
        if start >= end:
            return
        if not await self._offered(topic):
            reading = read_by_reader(self._context, topic, start, end, max_bytes)
            async with aclosing(reading):
                async for entries in reading:
                    yield entries
            return
        loop = self._context.loop
        ahead = loop.create_task(self._answer(topic, start, end, max_bytes, raw))
        try:
            while True:
                answer = await ahead
                more = not answer.at_end and answer.next < end
                if more:
                    # One request ahead of the caller, so at most two answers are in memory.
                    ahead = loop.create_task(self._answer(topic, answer.next, end, max_bytes, raw))
                if answer.entries:
                    yield answer.entries
                if not more:
                    return
        finally:
            ahead.cancel()
            await asyncio.wait((ahead,))
            if not ahead.cancelled():
                ahead.exception()  # Retrieved, so that asyncio does not report it.

    async def _answer(
        self, topic: str, start: Position, end: Position, max_bytes: int, raw: bool
    ) -> Answer:
        async def ask(connection: Connection) -> Answer:
            most = min(max_bytes, connection.max_message_size)
            request = read_request(topic, start, end, most, raw=raw)
            answer = await connection.request(request)
            return answer_of(answer.read_entries_response, start)

        return await self._at_owner(topic, ask, f"The read of {topic}")

    async def _offered(self, topic: str) -> bool:
        async def ask(connection: Connection) -> bool:
            return connection.segment_reads

        return await self._at_owner(topic, ask, f"The lookup of {topic}")

    async def _at_owner(
        self, topic: str, ask: Callable[[Connection], Awaitable[R]], what: str
    ) -> R:
        async def once() -> R:
            connection = await self._owner(topic)
            try:
                return await ask(connection)
            except MagnetarError:
                if self._owners.get(topic) is connection:
                    del self._owners[topic]
                raise

        return await retried(self._context, once, what)

    async def _owner(self, topic: str) -> Connection:
        known = self._owners.get(topic)
        if known is not None and not known.is_lost:
            self._owners.move_to_end(topic)
            return known
        connection = await self._context.pool.of_topic(topic)
        self._owners[topic] = connection
        if len(self._owners) > READ_OWNERS:
            self._owners.popitem(last=False)
        return connection
