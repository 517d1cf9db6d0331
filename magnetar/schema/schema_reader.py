"""`SchemaReader`, which fetches the schemas of a topic by version."""

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
    """Fetches the schemas of a topic by version, each once.  It is a `WriterSchemas`.

    Tasks that need the same version wait for the same request; cancelling one of them does not stop
    it.  A failed request is sent again for the next task.  Versions never change, so up to
    MAX_WRITER_SCHEMAS are kept.
    """

    def __init__(self, context: ClientContext, topic: str) -> None:
        """`topic` is a topic, or any of its segments."""
        self._context = context
        self._topic = topic
        self._fetches: dict[bytes, asyncio.Task[pb.Schema]] = {}

    async def of_version(self, version: bytes) -> pb.Schema:
        """See `WriterSchemas.of_version`."""
        fetch = self._fetches.get(version)
        if fetch is None:
            while len(self._fetches) >= MAX_WRITER_SCHEMAS:
                del self._fetches[next(iter(self._fetches))]
            fetch = self._context.loop.create_task(self._fetch(version))
            self._fetches[version] = fetch
            fetch.add_done_callback(partial(self._fetched, version))
        return await finished(fetch)

    async def newest(self) -> pb.Schema:
        """Fetch the present schema of the topic.

        Raises `TopicNotFound` if it has none, and the errors of a request.
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
                "which its broker does not have; check whether the topic's schemas were deleted."
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
