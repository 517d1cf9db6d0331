"""`JsonSchema`: JSON of dataclasses, pydantic models and typed dicts, as of the Java client."""

import base64
import datetime
import decimal
import json
import types
from collections.abc import Mapping
from typing import Final, TypeVar

import pydantic
import pydantic_core

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.avro_definition import DECIMAL, compact, definition_of
from magnetar.schema.avro_values import Leaf, converter
from magnetar.schema.schema import Schema

__all__ = ["JsonSchema", "json_of"]

T = TypeVar("T")

INT_LIMIT: Final = 2**31


def properties_of(always_allow_null: bool) -> list[pb.KeyValue]:
    """The properties that the Java client sets for definitions of its classes."""
    return [
        pb.KeyValue(key="__alwaysAllowNull", value=str(always_allow_null).lower()),
        pb.KeyValue(key="__jsr310ConversionEnabled", value="false"),
    ]


def adapter_of(kind: type[T]) -> pydantic.TypeAdapter[T]:
    """The object that validates and serializes values of a type.  Raises `InvalidArgument`."""
    try:
        return pydantic.TypeAdapter(kind)
    except pydantic.errors.PydanticUserError as error:
        raise InvalidArgument(
            f"{kind.__name__} cannot be checked ({error}); correct the type, or use another one."
        ) from error


def check_int(value: object) -> object:
    """Raises `ValueError` unless a Java `int` can hold it."""
    if isinstance(value, int) and not -INT_LIMIT <= value < INT_LIMIT:
        raise ValueError(f"{value} is out of the range of an int of 32 bits")
    return value


def _to_base64(value: object) -> object:
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


def _from_base64(value: object) -> object:
    return base64.b64decode(value, validate=True) if isinstance(value, str) else value


def _same(value: object) -> object:
    return value


def _to_float(value: object) -> object:
    return float(value) if isinstance(value, decimal.Decimal) else value


def _date(value: object) -> object:
    return datetime.date(*value) if isinstance(value, list) else value


def _time(value: object) -> object:
    if not isinstance(value, list):
        return value
    hour, minute, second, nanosecond = [*value, 0, 0, 0][:4]
    return datetime.time(hour, minute, second, nanosecond // 1000)


def _moment(value: object) -> object:
    if not isinstance(value, list):
        return value
    year, month, day, hour, minute, second, nanosecond = [*value, 0, 0, 0, 0][:7]
    return datetime.datetime(year, month, day, hour, minute, second, nanosecond // 1000)


_WRITTEN: Final[Mapping[str, Leaf]] = types.MappingProxyType(
    {"bytes": _to_base64, "int": check_int}
)
_READ: Final[Mapping[str, Leaf]] = types.MappingProxyType(
    {
        "bytes": _from_base64,
        "date": _date,
        "time-millis": _time,
        "timestamp-micros": _moment,
        "local-timestamp-millis": _moment,
    }
)

_READ_EXACTLY: Final[Mapping[str, Leaf]] = types.MappingProxyType(
    {**_READ, DECIMAL: _same, "float": _to_float, "double": _to_float}
)
"""The conversions for types with decimal numbers: all numbers are parsed as decimals first."""


class JsonSchema(Schema[T]):
    """Encodes dataclasses, pydantic models and typed dicts as the Java client does.

    Bytes are base64 (standard alphabet).  Datetimes are written as ISO 8601, and also read as the
    numbers and lists that Java writes.  A field that is left out takes its default, or None if Java
    leaves it out for null; unknown fields are ignored.
    """

    def __init__(
        self, kind: type[T], *, namespace: str | None = None, always_allow_null: bool = True
    ) -> None:
        definition = definition_of(kind, namespace=namespace, always_allow_null=always_allow_null)
        self._name = kind.__name__
        self._adapter = adapter_of(kind)
        self._info = pb.Schema(
            name="",
            schema_data=compact(definition.tree),
            type=pb.Schema.Type.Json,
            properties=properties_of(always_allow_null),
        )
        self._written = converter(definition, _WRITTEN, shaped=False)
        exactly = DECIMAL.encode() in self._info.schema_data
        leaves = _READ_EXACTLY if exactly else _READ
        self._read = converter(definition, leaves, shaped=True)
        self._parse_float = decimal.Decimal if exactly else float
        # Only fields that Java leaves out need a conversion, so decoding first tries without it.
        self._read_plainly = converter(definition, leaves, shaped=False) is None

    @property
    def info(self) -> pb.Schema:
        """The Avro definition by which brokers compare schemas."""
        return self._info

    def encode(self, value: T) -> bytes:
        """Encode a value.  Raises `InvalidArgument` if a field does not have its declared type."""
        try:
            if self._written is None:
                return self._adapter.dump_json(value, by_alias=True, warnings="error")
            plain = self._adapter.dump_python(value, by_alias=True, warnings="error")
            return pydantic_core.to_json(self._written(plain))
        except (pydantic_core.PydanticSerializationError, ValueError, TypeError) as error:
            raise InvalidArgument(
                f"The value is no {self._name} ({error}); "
                "give one whose fields are of the types that it declares."
            ) from error

    def decode(self, data: bytes, version: bytes | None = None) -> T:
        """Decode a payload.  Raises `InvalidMessage`."""
        try:
            if self._read is None:
                return self._adapter.validate_json(data)
            if self._read_plainly:
                try:
                    return self._adapter.validate_json(data)
                except pydantic.ValidationError:
                    pass  # The decoding below raises, unless only fields were left out.
            plain = self._read(json.loads(data, parse_float=self._parse_float))
            return self._adapter.validate_python(plain)
        except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise InvalidMessage(
                f"A message is no JSON of {self._name} ({error}); "
                "read the topic with a type that is compatible with the written messages."
            ) from error


def json_of(
    kind: type[T], *, namespace: str | None = None, always_allow_null: bool = True
) -> JsonSchema[T]:
    """The JSON schema of a dataclass, a pydantic model or a typed dict.

    `namespace` is that of the definition (a Java package, or an outer class).  `always_allow_null`
    is Java's: texts and structures may be null in the definition, whatever the type says.  Raises
    `InvalidArgument` for other types, and for fields that Avro has no type for.
    """
    return JsonSchema(kind, namespace=namespace, always_allow_null=always_allow_null)
