"""Schemas of single values: bytes, text, booleans and numbers, in the bytes of the Java client."""

import struct
from collections.abc import Callable
from typing import Final, TypeVar

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.schema import Schema

__all__ = [
    "BOOL",
    "BYTES",
    "DOUBLE",
    "FLOAT",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "STRING",
    "BytesSchema",
    "PlainSchema",
]

N = TypeVar("N", bool, int, float)
P = TypeVar("P")


class BytesSchema(Schema[bytes]):
    """Bytes as they are; compatible with every schema of a topic."""

    @property
    def info(self) -> pb.Schema | None:
        """None, so that brokers check nothing."""
        return None

    def encode(self, value: bytes | bytearray | memoryview) -> bytes:
        """Return the same bytes.  Raises `InvalidArgument` for any other value."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise InvalidArgument(
            f"This is of type {type(value).__name__}, not bytes; "
            "give bytes, or open the producer with a schema."
        )

    def decode(self, data: bytes, version: bytes | None = None) -> bytes:
        """Return the same bytes."""
        return data


class PlainSchema(Schema[P]):
    """A schema that has only a type, no definition."""

    def __init__(
        self,
        name: str,
        kind: "pb.Schema.Type",
        encode: Callable[[P], bytes],
        decode: Callable[[bytes], P],
    ) -> None:
        self._info = pb.Schema(name=name, schema_data=b"", type=kind)
        self._encode = encode
        self._decode = decode

    @property
    def info(self) -> pb.Schema:
        """The name and the type, for the broker."""
        return self._info

    def encode(self, value: P) -> bytes:
        """Encode a value.  Raises `InvalidArgument` for another type or out of range."""
        try:
            return self._encode(value)
        except (TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
            raise InvalidArgument(
                f"{value!r:.100} is no value of the schema {self._info.name} ({error}); "
                "give one that fits, or use another schema."
            ) from error

    def decode(self, data: bytes, version: bytes | None = None) -> P:
        """Decode a payload.  Raises `InvalidMessage` for a wrong length, or text not in UTF-8."""
        try:
            return self._decode(data)
        except (ValueError, struct.error) as error:
            raise InvalidMessage(
                f"A message of {len(data)} bytes is no value of the schema {self._info.name} "
                f"({error}); read the topic with the schema that it was written with."
            ) from error


def _encode_text(value: str) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"it is of type {type(value).__name__}, not str")
    return value.encode()


def _decode_text(data: bytes) -> str:
    return str(data, "utf-8")


def _number(name: str, kind: "pb.Schema.Type", layout: str, of: type[N]) -> PlainSchema[N]:
    packer = struct.Struct(layout)

    def encode(value: N) -> bytes:
        if of is bool and not isinstance(value, bool):
            raise TypeError(f"it is of type {type(value).__name__}, not bool")
        return packer.pack(value)

    def decode(data: bytes) -> N:
        value: N = packer.unpack(data)[0]
        return value

    return PlainSchema(name, kind, encode, decode)


BYTES: Final = BytesSchema()
"""Bytes, unchecked."""
STRING: Final[PlainSchema[str]] = PlainSchema(
    "String", pb.Schema.Type.String, _encode_text, _decode_text
)
"""Text in UTF-8."""
BOOL: Final = _number("Boolean", pb.Schema.Type.Bool, ">?", bool)
"""True or False in one byte."""
INT8: Final = _number("INT8", pb.Schema.Type.Int8, ">b", int)
"""-2^7 to 2^7 - 1."""
INT16: Final = _number("INT16", pb.Schema.Type.Int16, ">h", int)
"""-2^15 to 2^15 - 1."""
INT32: Final = _number("INT32", pb.Schema.Type.Int32, ">i", int)
"""-2^31 to 2^31 - 1."""
INT64: Final = _number("INT64", pb.Schema.Type.Int64, ">q", int)
"""-2^63 to 2^63 - 1."""
FLOAT: Final = _number("Float", pb.Schema.Type.Float, ">f", float)
"""A number of 32 bits (IEEE 754)."""
DOUBLE: Final = _number("Double", pb.Schema.Type.Double, ">d", float)
"""A number of 64 bits (IEEE 754)."""
