"""`AUTO`, which reads messages by the schemas of their topic."""

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.plain import (
    BOOL,
    BYTES,
    DOUBLE,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
)
from magnetar.schema.schema import Schema, WriterSchemas
from magnetar.schema.versions import Versions

__all__ = ["AUTO", "AutoSchema"]

_Decode = Callable[[bytes], object]

_PLAIN: Final[Mapping[int, _Decode]] = MappingProxyType(
    {
        pb.Schema.Type.String: STRING.decode,
        pb.Schema.Type.Bool: BOOL.decode,
        pb.Schema.Type.Int8: INT8.decode,
        pb.Schema.Type.Int16: INT16.decode,
        pb.Schema.Type.Int32: INT32.decode,
        pb.Schema.Type.Int64: INT64.decode,
        pb.Schema.Type.Float: FLOAT.decode,
        pb.Schema.Type.Double: DOUBLE.decode,
    }
)


class AutoSchema(Schema[object]):
    """Decodes each message by the schema that it was written with.

    Text, booleans and numbers are decoded to Python's own types, JSON and Avro to dicts, and all
    others to bytes.  A message without a version is bytes.  It encodes only bytes.
    """

    def __init__(self, writers: WriterSchemas | None = None) -> None:
        self._versions = None if writers is None else Versions(writers, _decoder)

    @property
    def info(self) -> pb.Schema | None:
        """None, as it is compatible with every schema."""
        return None

    def of_topic(self, writers: WriterSchemas) -> "AutoSchema":
        """This schema with the versions of one topic."""
        return AutoSchema(writers)

    def knows(self, version: bytes | None) -> bool:
        """Whether messages of this version, or without one, can be decoded now."""
        return self._versions is None or self._versions.knows(version)

    async def learn(self, version: bytes) -> None:
        """Fetch the writer's schema."""
        if self._versions is not None:
            await self._versions.learn(version)

    def encode(self, value: object) -> bytes:
        """Return the bytes.  Raises `InvalidArgument` for any other value."""
        if isinstance(value, bytes | bytearray | memoryview):
            return BYTES.encode(value)
        raise InvalidArgument("AUTO is for reading; open the producer with the topic's schema.")

    def decode(self, data: bytes, version: bytes | None = None) -> object:
        """Decode a payload.  Raises `InvalidMessage`, also for a version not fetched by `learn`."""
        if not version or self._versions is None:
            return data
        return self._versions.of(version)(data)


def _decoder(schema: pb.Schema) -> _Decode:
    if schema.type == pb.Schema.Type.Json:
        return _from_json
    if schema.type == pb.Schema.Type.Avro:
        from magnetar.schema.avro import avro_of  # Most readers do not need fastavro.

        try:
            return avro_of(schema.schema_data).decode
        except InvalidArgument as error:
            raise InvalidMessage(
                f"The schema of a message is no Avro definition ({error})"
            ) from error
    return _PLAIN.get(schema.type, BYTES.decode)


def _from_json(data: bytes) -> object:
    try:
        value: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(
            f"A message of a JSON schema is no JSON ({error}); read it as bytes."
        ) from error
    return value


AUTO: Final = AutoSchema()
"""The schema that decodes messages by the schemas of their topic."""
