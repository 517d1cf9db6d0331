"""What a reader knows of the schemas that a topic's messages were written with.

Rules: a version is learnt once, and what was made of it is kept, for a bounded number of versions.
One that cannot be used is known, too: its messages raise why when they are decoded, so that they
can be handed out, looked at and acknowledged.  A failed request is no knowledge, and is raised.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from magnetar.bounds import MAX_WRITER_SCHEMAS
from magnetar.errors import InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.schema import WriterSchemas

__all__ = ["Versions"]

R = TypeVar("R")


class Versions(Generic[R]):
    """The decoders of a reader, one for each version of the schema.

    R is what decodes messages of a version.
    """

    __slots__ = ("_known", "_make", "_writers")

    def __init__(self, writers: WriterSchemas, make: Callable[[pb.Schema], R]) -> None:
        """`make` may raise `InvalidMessage` for a schema that cannot be used."""
        self._writers = writers
        self._make = make
        self._known: dict[bytes, R | InvalidMessage] = {}

    def knows(self, version: bytes | None) -> bool:
        """Whether it was learnt; messages without a version need nothing."""
        return not version or version in self._known

    async def learn(self, version: bytes) -> None:
        """Fetch it, unless it is known.  Raises what a request may raise."""
        if self.knows(version):
            return
        known: R | InvalidMessage
        try:
            known = self._make(await self._writers.of_version(version))
        except InvalidMessage as error:
            known = error
        while len(self._known) >= MAX_WRITER_SCHEMAS:
            del self._known[next(iter(self._known))]
        self._known[version] = known

    def of(self, version: bytes) -> R:
        """What decodes messages of it.  Raises `InvalidMessage` if nothing does."""
        known = self._known.get(version)
        if known is None:
            raise InvalidMessage(
                "The schema that a message was written with is not known yet; learn it first."
            )
        if isinstance(known, InvalidMessage):
            raise InvalidMessage(*known.args) from known
        return known
