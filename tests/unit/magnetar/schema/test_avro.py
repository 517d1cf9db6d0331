"""Avro: bytes of the official Java client, and schemas that change."""

import dataclasses
import datetime
import decimal
import json

import pytest

from magnetar.errors import InvalidArgument, InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.avro import avro_of
from magnetar.schema.avro_definition import Int32
from tests.unit.magnetar.schema.golden import JAVA
from tests.unit.magnetar.schema.samples import All, Node, Small, Times, everything, moments


class Writers:
    """The schemas of a topic."""

    def __init__(self, *definitions: str, kind: int = pb.Schema.Type.Avro) -> None:
        self.asked: list[bytes] = []
        self._schemas = [
            pb.Schema(name="", schema_data=each.encode(), type=kind)  # type: ignore[arg-type]
            for each in definitions
        ]

    async def of_version(self, version: bytes) -> pb.Schema:
        self.asked.append(version)
        return self._schemas[int.from_bytes(version, "big")]


FIRST = (0).to_bytes(8, "big")
SECOND = (1).to_bytes(8, "big")


def test_small_is_as_java_has_it() -> None:
    schema = avro_of(Small, namespace="Gold")
    assert schema.info.schema_data.decode() == JAVA["small_definition"]
    assert schema.info.type == 4
    assert schema.encode(Small("s", 3)).hex() == "02027306"
    assert schema.decode(bytes.fromhex("02027306")) == Small("s", 3)


def test_all_types_are_as_java_has_them() -> None:
    schema = avro_of(All, namespace="Gold")
    java = bytes.fromhex(JAVA["avro_value_without_set"])
    assert schema.encode(everything(a_set=None)) == java
    assert schema.decode(java) == everything(a_set=None)
    assert schema.decode(schema.encode(everything())) == everything()


def test_moments_are_as_java_has_them() -> None:
    schema = avro_of(Times, namespace="Gold")
    assert schema.info.schema_data.decode() == JAVA["times_definition"]
    java = bytes.fromhex(JAVA["times_avro_value"])
    assert schema.encode(moments()) == java
    assert schema.decode(java) == moments()
    with_money = moments(decimal.Decimal("1.50"))
    assert schema.decode(schema.encode(with_money)) == with_money


def test_a_record_inside_of_itself() -> None:
    schema = avro_of(Node)
    nodes = Node(1, Node(2, None))
    assert schema.decode(schema.encode(nodes)) == nodes


def test_a_record_too_deep_inside_of_itself() -> None:
    schema = avro_of(Node)
    with pytest.raises(InvalidMessage):
        schema.decode(b"\x02" * 1_000_000)
    text = '{"type":"record","name":"R","fields":[{"name":"r","type":"R"}]}'
    with pytest.raises(InvalidMessage):
        avro_of(text).decode(b"")
    deep: dict[str, object] = {}
    deep["r"] = deep
    with pytest.raises(InvalidArgument):
        avro_of(text).encode(deep)


async def test_a_writer_too_deep_inside_of_itself() -> None:
    text = '{"type":"record","name":"Small","fields":[{"name":"r","type":"Small"}]}'
    schema = avro_of(Small).of_topic(Writers(text))
    await schema.learn(FIRST)
    with pytest.raises(InvalidMessage):
        schema.decode(b"", FIRST)


async def test_the_writers_schema_reads_it() -> None:
    @dataclasses.dataclass
    class Reading:
        sensor: str
        value: float
        unit: str = "K"
        place: str | None = None

    writers = Writers(JAVA["small_definition"])
    schema = avro_of(Reading).of_topic(writers)
    assert not schema.knows(FIRST)
    with pytest.raises(InvalidMessage, match="learn"):
        schema.decode(bytes.fromhex("02027306"), FIRST)
    await schema.learn(FIRST)
    await schema.learn(FIRST)
    assert writers.asked == [FIRST]
    # Another name, an int that is a double here, and two fields that were not there.
    assert schema.decode(bytes.fromhex("02027306"), FIRST) == Reading("s", 3.0)


async def test_versions_are_of_a_topic() -> None:
    narrow = '{"type":"record","name":"Small","fields":[{"name":"value","type":"int"}]}'
    schema = avro_of(narrow)
    one = schema.of_topic(Writers(JAVA["small_definition"], narrow))
    other = schema.of_topic(Writers(narrow))
    await one.learn(FIRST)
    await one.learn(SECOND)
    await other.learn(FIRST)
    assert one.decode(bytes.fromhex("02027306"), FIRST) == {"value": 3}
    assert one.decode(bytes.fromhex("06"), SECOND) == {"value": 3}
    assert other.decode(bytes.fromhex("06"), FIRST) == {"value": 3}
    assert schema.decode(bytes.fromhex("06"), FIRST) == {"value": 3}
    assert one.knows(None)
    assert one.decode(bytes.fromhex("06")) == {"value": 3}


async def test_null_of_a_writer_is_the_default_of_a_reader_that_has_no_none() -> None:
    @dataclasses.dataclass
    class Small:
        value: Int32
        sensor: str = "none"

    schema = avro_of(Small).of_topic(Writers(JAVA["small_definition"]))
    await schema.learn(FIRST)
    assert schema.decode(bytes.fromhex("0006"), FIRST) == Small(3)


async def test_schemas_that_do_not_go_together() -> None:
    text = '{"type":"record","name":"Small","fields":[{"name":"value","type":"string"}]}'
    schema = avro_of(Small).of_topic(Writers(text))
    await schema.learn(FIRST)
    with pytest.raises(InvalidMessage):
        schema.decode(bytes.fromhex("0273"), FIRST)


@pytest.mark.parametrize(
    "writers",
    [Writers("{"), Writers('{"type":"recor"}'), Writers("3"), Writers("{}", kind=2)],
)
async def test_writers_without_a_definition(writers: Writers) -> None:
    schema = avro_of(Small).of_topic(writers)
    await schema.learn(FIRST)
    assert schema.knows(FIRST)
    for _ in range(2):
        with pytest.raises(InvalidMessage, match="schema"):
            schema.decode(bytes.fromhex("02027306"), FIRST)


@pytest.mark.parametrize("data", ["", "04", "0202", "02ff", "02ffffffffffffffffff01"])
def test_bytes_that_are_no_value(data: str) -> None:
    with pytest.raises(InvalidMessage):
        avro_of(Small).decode(bytes.fromhex(data))


@pytest.mark.parametrize(
    "value",
    [
        Small(1, 2),  # type: ignore[arg-type]
        Small("s", "2"),  # type: ignore[arg-type]
        Small("s", 2**31),
        {"sensor": "s"},
        None,
    ],
)
def test_values_that_do_not_fit(value: object) -> None:
    with pytest.raises(InvalidArgument):
        avro_of(Small).encode(value)  # type: ignore[arg-type]


def test_moments_that_would_lose_something() -> None:
    schema = avro_of(Times)
    with pytest.raises(InvalidArgument, match="time zone"):
        schema.encode(dataclasses.replace(moments(), at=datetime.datetime(2024, 1, 1)))
    with pytest.raises(InvalidArgument, match="millisecond"):
        schema.encode(dataclasses.replace(moments(), time=datetime.time(1, 2, 3, 4001)))


def test_a_definition_by_text() -> None:
    schema = avro_of(json.dumps(json.loads(JAVA["small_definition"]), indent=2))
    assert schema.info.schema_data.decode() == JAVA["small_definition"]
    assert not schema.info.properties
    assert schema.encode({"sensor": "s", "value": 3}).hex() == "02027306"
    assert schema.encode({"value": 3}).hex() == "0006"
    for bad in ({"sensor": "s"}, {"sensor": "s", "value": 2**40}, {"sensor": 1, "value": 3}, 3):
        with pytest.raises(InvalidArgument):
            schema.encode(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["{", "3", "[]x", '{"type":"record"}', '{"type":"nothing"}'])
def test_texts_that_are_no_definition(text: str) -> None:
    with pytest.raises(InvalidArgument):
        avro_of(text)


def test_longs_beyond_64_bits() -> None:
    @dataclasses.dataclass
    class Long:
        v: int

    schema = avro_of(Long)
    assert schema.decode(b"\x02") == Long(1)
    with pytest.raises(InvalidArgument):
        schema.encode(Long(2**63))
