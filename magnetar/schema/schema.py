"""`Schema[T]`: how values of T become the bytes of messages, and what the broker is told of it.

Rules:

- `encode` raises `InvalidArgument` for a value that does not fit, `decode` raises `InvalidMessage`
  for bytes that are none of T.  Neither waits.
- A schema holds nothing of a topic, so one may serve many.  A consumer asks it for its own of one
  topic (`of_topic`) and decodes with that.
- What was written with another version of a schema may need that version to be read.  Before it
  decodes, a consumer asks `knows(version)`, and awaits `learn(version)` if it does not.
- `info` is what PRODUCER and SUBSCRIBE carry: None where brokers are told nothing.
"""

from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from magnetar.protocol import pulsar_pb2 as pb

__all__ = ["Schema", "WriterSchemas"]

T = TypeVar("T")


class WriterSchemas(Protocol):
    """The schemas that a topic had and has."""

    async def of_version(self, version: bytes) -> pb.Schema:
        """The schema of that version (8 bytes, as messages carry it).

        Raises `InvalidMessage` if the broker has no such version, and what a request may raise.
        """


class Schema(ABC, Generic[T]):
    """Encodes and decodes values of a type, and describes the type to the broker."""

    @property
    @abstractmethod
    def info(self) -> pb.Schema | None:
        """What the broker is told."""

    @abstractmethod
    def encode(self, value: T) -> bytes:
        """The payload of a message.  Raises `InvalidArgument`."""

    @abstractmethod
    def decode(self, data: bytes, version: bytes | None = None) -> T:
        """The value of a payload that was written with that version of the topic's schema.

        Raises `InvalidMessage`.
        """

    def of_topic(self, writers: WriterSchemas) -> "Schema[T]":
        """This schema for the messages of one topic; itself if it reads all versions alike."""
        return self

    def knows(self, version: bytes | None) -> bool:
        """Whether messages of that version can be decoded now."""
        return True

    async def learn(self, version: bytes) -> None:
        """Until it is known how to decode messages of that version, or why they cannot be.

        Raises what a request may raise.
        """
