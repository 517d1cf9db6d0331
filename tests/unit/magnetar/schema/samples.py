"""The Python types that stand beside the Java classes of the golden bytes."""

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Sequence
from typing import Annotated, NotRequired

import pydantic
from typing_extensions import TypedDict

from magnetar.schema.avro_definition import AvroType, Float32, Int32

Int16 = Annotated[int, AvroType({"type": "int", "java-class": "java.lang.Short"})]
Int8 = Annotated[int, AvroType({"type": "int", "java-class": "java.lang.Byte"})]
LocalMoment = Annotated[
    datetime.datetime, AvroType({"type": "long", "logicalType": "local-timestamp-millis"})
]


class Color(enum.Enum):
    RED = "RED"
    GREEN = "GREEN"


@dataclasses.dataclass
class Inner:
    name: str
    x: float


@dataclasses.dataclass
class All:
    b: bool
    i8: Int8
    i16: Int16
    i32: Int32
    i64: int
    f: Float32
    d: float
    ob: bool | None
    oi: Int32 | None
    ol: int | None
    od: float | None
    of: Float32 | None
    s: str
    raw: bytes
    color: Color
    inner: Inner
    inner2: Inner | None
    names: list[str]
    inners: Sequence[Inner]
    counts: dict[str, Int32]
    byName: dict[str, Inner]  # noqa: N815 - the field's name
    ints: list[Int32]
    set: set[str] | None


@dataclasses.dataclass
class Times:
    money: decimal.Decimal | None
    id: uuid.UUID
    at: datetime.datetime
    day: datetime.date
    time: datetime.time
    dt: LocalMoment


@dataclasses.dataclass
class Small:
    sensor: str
    value: Int32


@dataclasses.dataclass
class Node:
    v: Int32
    next: "Node | None"


class SmallModel(pydantic.BaseModel):
    sensor: str
    value: Int32


class SmallDict(TypedDict):
    sensor: str
    value: Int32
    unit: NotRequired[str]


INNER = Inner("n", 2.0)


def everything(a_set: "set[str] | None" = frozenset({"z"})) -> All:  # type: ignore[assignment]
    return All(
        b=True,
        i8=-1,
        i16=300,
        i32=-7,
        i64=1 << 40,
        f=1.5,
        d=0.1,
        ob=None,
        oi=5,
        ol=None,
        od=None,
        of=None,
        s="größe",
        raw=b"\x00\x01\xff",
        color=Color.GREEN,
        inner=INNER,
        inner2=None,
        names=["a", "b"],
        inners=[INNER],
        counts={"k": 1},
        byName={"i": INNER},
        ints=[1, 2],
        set=None if a_set is None else set(a_set),
    )


def moments(money: decimal.Decimal | None = None) -> Times:
    return Times(
        money=money,
        id=uuid.UUID(int=(1 << 64) + 2),
        at=datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, tzinfo=datetime.UTC),
        day=datetime.date(2024, 2, 29),
        time=datetime.time(1, 2, 3, 4000),
        dt=datetime.datetime(2024, 2, 29, 1, 2, 3),
    )
