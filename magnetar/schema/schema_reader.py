"""`SchemaReader`: the schemas that a topic had, fetched by version, once.

Rules:

- Any broker is asked (GET_SCHEMA): a history is the topic's, not a segment's.
- Who asks for a version that is being fetched waits for the same answer; whoever stops waiting
  leaves the others undisturbed.  A fetch that failed is forgotten, and tried anew by the next one.
- What is fetched is kept, for a bounded number of versions: versions never change.
"""

import asyncio
from functools import partial

from magnetar.bounds import MAX_WRITER_SCHEMAS
from magnetar.context import ClientContext
from magnetar.errors import InvalidMessage, TopicNotFound
from magnetar.opening import finished
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.retries import retried

__all__ = ["SchemaReader"]


class SchemaReader:
    """Fetches the schemas of a topic by version, each once. It is a `WriterSchemas`."""

    def __init__(self, context: ClientContext, topic: str) -> None:
        """Of a topic, or of any of its segments."""
        self._context = context
        self._topic = topic
        self._fetches: dict[bytes, asyncio.Task[pb.Schema]] = {}

    async def of_version(self, version: bytes) -> pb.Schema:
        """The schema of a version, as messages carry it.

        Raises `InvalidMessage` if the broker has no such version, and what a request may raise.
        """
        fetch = self._fetches.get(version)
        if fetch is None:
            while len(self._fetches) >= MAX_WRITER_SCHEMAS:
                del self._fetches[next(iter(self._fetches))]
            fetch = self._context.loop.create_task(self._fetch(version))
            self._fetches[version] = fetch
            fetch.add_done_callback(partial(self._fetched, version))
        return await finished(fetch)

    async def newest(self) -> pb.Schema:
        """The schema that the topic has now; asked for each time.

        Raises `TopicNotFound` if it has none, and what a request may raise.
        """
        return await self._answer(None)

    def _fetched(self, version: bytes, fetch: asyncio.Task[pb.Schema]) -> None:
        failed = fetch.cancelled() or fetch.exception() is not None
        if failed and self._fetches.get(version) is fetch:
            del self._fetches[version]

    async def _fetch(self, version: bytes) -> pb.Schema:
        try:
            return await self._answer(version)
        except TopicNotFound as error:
            raise InvalidMessage(
                f"A message of {self._topic} was written with the schema version {version.hex()}, "
                "which its broker does not have; look whether the topic's schemas were deleted."
            ) from error

    async def _answer(self, version: bytes | None) -> pb.Schema:
        answer = await retried(
            self._context, partial(self._ask, version), f"The schemas of {self._topic}"
        )
        return answer.get_schema_response.schema

    async def _ask(self, version: bytes | None) -> pb.BaseCommand:
        connection = await self._context.pool.any()
        request = pb.CommandGetSchema(request_id=0, topic=self._topic)
        if version is not None:
            request.schema_version = version
        return await connection.request(
            pb.BaseCommand(type=pb.BaseCommand.GET_SCHEMA, get_schema=request)
        )
