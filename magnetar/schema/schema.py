"""`Schema[T]`: encodes values of T as payloads, decodes them, and describes T to brokers."""

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from magnetar.protocol import pulsar_pb2 as pb

__all__ = ["Schema", "WriterSchemas"]

T = TypeVar("T")


class WriterSchemas(Protocol):
    """All versions of a topic's schema."""

    async def of_version(self, version: bytes) -> pb.Schema:
        """The schema of a version (8 bytes, as in messages).

        Raises `InvalidMessage` if the broker has no such version, and the errors of a request.
        """


class Schema(ABC, Generic[T]):
    """Encodes and decodes values of a type, and describes the type to the broker.

    A schema has no state of a topic, so it can serve many.  A consumer decodes with the schema that
    `of_topic` returns.  Before it decodes a message it calls `knows` with the message's version,
    and awaits `learn` if the version is not known.
    """

    @property
    @abstractmethod
    def info(self) -> pb.Schema | None:
        """The schema in PRODUCER and SUBSCRIBE; None if the broker gets none."""

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """Encode a value as a payload, without waiting.  Raises `InvalidArgument`."""

    @abstractmethod
    def decode(self, data: bytes, version: bytes | None = None) -> T:
        """Decode a payload that was written with this version of the topic's schema.

        Does not wait.  Raises `InvalidMessage`.
        """

    def of_topic(self, writers: WriterSchemas) -> "Schema[T]":
        """This schema for one topic; itself if it reads all versions alike."""
        return self

    def knows(self, version: bytes | None) -> bool:
        """Whether messages of this version can be decoded now."""
        return True

    async def learn(self, version: bytes) -> None:
        """Fetch what decoding messages of this version needs.

        Raises the errors of a request.  If the version cannot be decoded, `decode` raises that.
        """
