"""`schema_for`: the schema of a Python type."""

import types
from collections.abc import Mapping
from typing import Final, TypeVar, cast

from google.protobuf.message import Message

from magnetar.errors import InvalidArgument
from magnetar.schema.plain import BOOL, BYTES, DOUBLE, INT64, STRING
from magnetar.schema.schema import Schema

__all__ = ["schema_for"]

T = TypeVar("T")

_SIMPLE: Final[Mapping[type, object]] = types.MappingProxyType(
    {bytes: BYTES, str: STRING, bool: BOOL, int: INT64, float: DOUBLE}
)


def schema_for(given: Schema[T] | type[T]) -> Schema[T]:
    """The schema of a type, or the given schema itself.

    Bytes and text are themselves, `int` and `float` numbers of 64 bits.  Dataclasses, pydantic
    models and typed dicts are JSON.  Protobuf messages are PROTOBUF, the form of Java's v5 client.
    Raises `InvalidArgument` for other types.
    """
    if isinstance(given, Schema):
        return given
    if isinstance(given, type):
        simple = _SIMPLE.get(given)
        if simple is not None:
            return cast("Schema[T]", simple)
        if issubclass(given, Message):
            from magnetar.schema.protobuf import protobuf_of

            return cast("Schema[T]", protobuf_of(given))
    from magnetar.schema.avro_definition import is_record_type

    if is_record_type(given):
        from magnetar.schema.json import json_of

        return json_of(given)
    raise InvalidArgument(
        f"No schema stands for {given!r}; give a schema, or bytes, str, a dataclass, "
        "a pydantic model, a typed dict or a protobuf message."
    )
