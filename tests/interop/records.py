"""The records of `InteropSchemas.java`, and what the Java client is told of values.

A value is told as JSON: a record as its fields, bytes as base64, a member of an enum as its name, a
message of protobuf as the fields that the driver knows.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.type_pb2 import EnumValue

from magnetar.schema.avro import avro_of
from magnetar.schema.avro_definition import Float32, Int32
from magnetar.schema.json import json_of
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
from magnetar.schema.protobuf import protobuf_of
from magnetar.schema.schema import Schema
from tests.interop.java_client import told

NAMESPACE: Final = "magnetar.stock.InteropSchemas"


class State(enum.Enum):
    IDLE = "IDLE"
    RUNNING = "RUNNING"
    BROKEN = "BROKEN"


@dataclasses.dataclass
class Place:
    city: str | None
    latitude: float
    longitude: float


@dataclasses.dataclass
class Reading:
    sensor: str | None
    value: Int32
    total: int
    ratio: Float32
    exact: float
    valid: bool
    maybe: Int32 | None
    raw: bytes | None
    tags: list[str] | None
    counts: dict[str, int] | None
    state: State | None
    place: Place | None
    route: list[Place] | None


@dataclasses.dataclass
class Point:
    name: str | None
    x: Int32


@dataclasses.dataclass
class PointWithUnit:
    name: str | None
    x: Int32
    unit: str | None = None


READINGS: Final = [
    Reading(
        sensor="größer 日本 😀",
        value=-42,
        total=1 << 60,
        ratio=0.5,
        exact=3.141592653589793,
        valid=True,
        maybe=7,
        raw=b"\x00\x01\xff\x80",
        tags=["a", "", "ü"],
        counts={"one": 1, "two": 1 << 40},
        state=State.RUNNING,
        place=Place("Oslo", 59.9, 10.75),
        route=[Place("Bergen", 60.4, 5.3), Place(None, 0.0, 0.0)],
    ),
    Reading(None, 0, 0, 0.0, 0.0, False, None, None, None, None, None, None, None),
]
POINTS: Final = [Point("p", 1), Point(None, -1)]
NUMBERS: Final = [0, 1, -2]

KINDS: Final[Mapping[str, tuple[Schema[Any], list[Any]]]] = {
    "bytes": (BYTES, [b"", b"\x00\xff"]),
    "string": (STRING, ["", "größer 日本 😀"]),
    "bool": (BOOL, [True, False]),
    "int8": (INT8, [*NUMBERS, 127, -128]),
    "int16": (INT16, [*NUMBERS, 32767]),
    "int32": (INT32, [*NUMBERS, 2**31 - 1]),
    "int64": (INT64, [*NUMBERS, 1 << 60]),
    "float32": (FLOAT, [0.0, 0.5, -1.5]),
    "float64": (DOUBLE, [0.0, 0.1, -1.5]),
    "json_point": (json_of(Point, namespace=NAMESPACE), POINTS),
    "json_reading": (json_of(Reading, namespace=NAMESPACE), READINGS),
    "avro_point": (avro_of(Point, namespace=NAMESPACE), POINTS),
    "avro_reading": (avro_of(Reading, namespace=NAMESPACE), READINGS),
    "protobuf": (protobuf_of(EnumValue), [EnumValue(name="N", number=3), EnumValue()]),
}
"""By the name of the schema in the driver: ours, and values."""


def as_told(value: object) -> object:
    """What an order or an answer has for this value."""
    if isinstance(value, EnumValue):
        return {"name": value.name, "number": value.number}
    assert not isinstance(value, Message)
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value):
        return {each.name: as_told(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, list):
        return [as_told(each) for each in value]
    return told(value)
