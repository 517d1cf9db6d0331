"""Plans and reads ranges of segments, at whichever broker owns them.

Rules:

- The owner of a segment is looked up when it is first needed, and anew after anything has failed
  there.  What may succeed later is asked again for the operation timeout; reading goes on where it
  was.
- The next request of a range is under way before the entries of the last answer are handed out;
  not more than one.  So two answers are held at most.
- Brokers that do not offer reads of segments are read as every reader reads (`stock_reads.py`).
"""

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
from magnetar.reads.stock_reads import plan_on_stock, read_on_stock
from magnetar.retries import retried
from magnetar.wire.connection import Connection

__all__ = ["SegmentReads"]

R = TypeVar("R")


class SegmentReads:
    """Plans and reads ranges of segments at the brokers that own them. One for each client."""

    def __init__(self, context: ClientContext) -> None:
        self._context: Final = context
        self._owners: OrderedDict[str, Connection] = OrderedDict()

    async def plan(
        self, topic: str, start: Position | None, end: Position | None, limits: PlanLimits
    ) -> RangePlan:
        """See `Client.plan_range`."""
        if not await self._offered(topic):
            return await plan_on_stock(self._context, topic, start, end, limits)
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
            reading = read_on_stock(self._context, topic, start, end, max_bytes)
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
                    ahead = loop.create_task(self._answer(topic, answer.next, end, max_bytes, raw))
                if answer.entries:
                    yield answer.entries
                if not more:
                    return
        finally:
            ahead.cancel()
            await asyncio.wait((ahead,))
            if not ahead.cancelled():
                ahead.exception()  # seen, though nobody reads on

    async def _answer(
        self, topic: str, start: Position, end: Position, max_bytes: int, raw: bool
    ) -> Answer:
        async def ask(connection: Connection) -> Answer:
            most = min(max_bytes, connection.max_message_size)
            request = read_request(topic, start, end, most, raw=raw)
            answer = await connection.request(request)
            return answer_of(answer.read_entries_response, start)

        return await self._at_owner(topic, ask, f"The reading of {topic}")

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
