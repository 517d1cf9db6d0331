"""`Versions`: the decoders of a reader for each version of a topic's schema."""

from collections.abc import Callable
from typing import Generic, TypeVar

from magnetar.bounds import MAX_WRITER_SCHEMAS
from magnetar.errors import InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.schema import WriterSchemas

__all__ = ["Versions"]

R = TypeVar("R")


class Versions(Generic[R]):
    """The decoders of a reader, of type R, one for each version of the schema.

    Up to MAX_WRITER_SCHEMAS are kept.  A version that cannot be used is kept with its error, which
    decoding raises, so that its messages can be handed out and acknowledged.
    """

    __slots__ = ("_known", "_make", "_writers")

    def __init__(self, writers: WriterSchemas, make: Callable[[pb.Schema], R]) -> None:
        """`make` makes a decoder; it raises `InvalidMessage` for a schema that cannot be used."""
        self._writers = writers
        self._make = make
        self._known: dict[bytes, R | InvalidMessage] = {}

    def knows(self, version: bytes | None) -> bool:
        """Whether a version was fetched; messages without one need nothing."""
        return not version or version in self._known

    async def learn(self, version: bytes) -> None:
        """Fetch a version, unless it is known.  Raises the errors of a request."""
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
        """The decoder of a version.  Raises `InvalidMessage` if there is none."""
        known = self._known.get(version)
        if known is None:
            raise InvalidMessage(
                "The schema that a message was written with is not known yet; learn it first."
            )
        if isinstance(known, InvalidMessage):
            raise InvalidMessage(*known.args) from known
        return known
