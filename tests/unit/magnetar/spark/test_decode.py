"""Values as the column `data`: every type of Avro and JSON, later versions, and what is none."""

import asyncio
import datetime
import decimal
import io
import json
from collections.abc import Mapping

import fastavro
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from magnetar.errors import InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.reads.entries import StoredEntry
from magnetar.reads.messages import MessageColumns, take_apart
from magnetar.spark.avro_types import form_of
from magnetar.spark.columns import CORRUPT, DATA, arrow_schema, record_batch
from magnetar.spark.decode import Definition, PlainWriters, ValueDecoder, definition_of
from magnetar.spark.errors import InvalidOption
from magnetar.spark.options import Options
from magnetar.spark.source import Source, definition_for
from magnetar.spark.source_options import Decoding, SourceOptions
from tests.unit.magnetar.spark.stored import single

EVERY = {
    "type": "record",
    "name": "Every",
    "namespace": "a.b",
    "fields": [
        {"name": "truth", "type": "boolean"},
        {"name": "small", "type": "int"},
        {"name": "large", "type": ["null", "long"]},
        {"name": "single", "type": "float"},
        {"name": "double", "type": "double"},
        {"name": "text", "type": "string"},
        {"name": "raw", "type": "bytes"},
        {"name": "four", "type": {"type": "fixed", "name": "Four", "size": 4}},
        {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED", "BLUE"]}},
        {"name": "other", "type": ["null", "a.b.Color"]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "ms", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "us", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "here", "type": {"type": "long", "logicalType": "local-timestamp-micros"}},
        {"name": "clock", "type": {"type": "int", "logicalType": "time-millis"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        },
        {"name": "numbers", "type": ["int", "long", "null"]},
        {
            "name": "days",
            "type": {"type": "array", "items": ["null", {"type": "int", "logicalType": "date"}]},
        },
        {"name": "scores", "type": {"type": "map", "values": "double"}},
        {
            "name": "times",
            "type": {"type": "map", "values": {"type": "long", "logicalType": "timestamp-millis"}},
        },
        {
            "name": "inner",
            "type": [
                "null",
                {"type": "record", "name": "Inner", "fields": [{"name": "x", "type": "Color"}]},
            ],
        },
        {"name": "nothing", "type": "null"},
    ],
}
NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
VALUE = {
    "truth": True,
    "small": -5,
    "large": 2**50,
    "single": 0.5,
    "double": 1e300,
    "text": "ä",
    "raw": b"\xff",
    "four": b"four",
    "color": "RED",
    "other": "BLUE",
    "day": datetime.date(2026, 1, 1),
    "ms": NOON,
    "us": NOON.replace(microsecond=7),
    "here": datetime.datetime(2026, 1, 1, 12),
    "clock": 1000,
    "id": "6ba7b810-9dad-11d1-80b4-00c04fd430c8",
    "price": decimal.Decimal("12.30"),
    "numbers": 2**40,
    "days": [datetime.date(2026, 1, 1), None],
    "scores": {"a": 1.5},
    "times": {"a": NOON},
    "inner": {"x": "BLUE"},
    "nothing": None,
}
EXPECTED = VALUE | {"scores": [("a", 1.5)], "times": [("a", NOON)]}
WRITTEN = VALUE | {"clock": datetime.time(0, 0, 1)}


def avro(tree: Mapping[str, object], value: object) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(dict(tree), named_schemas={}), value)
    return out.getvalue()


def columns_of(*values: bytes | None, version: bytes | None = None) -> MessageColumns:
    columns = MessageColumns()
    about = {} if version is None else {"schema_version": version}
    for number, value in enumerate(values):
        entry = single(number, value or b"", null_value=value is None, **about)
        take_apart(StoredEntry(1, number, entry), columns)
    return columns


def decoder(tree: object, decoding: Decoding = Decoding.AVRO, **how: object) -> ValueDecoder:
    definition = Definition(decoding, json.dumps(tree))
    kind = arrow_schema(StructType().add(DATA, definition.form.kind)).field(DATA).type
    return ValueDecoder(definition, kind, **how)  # type: ignore[arg-type]


def data_of(found: Mapping[str, pa.Array]) -> list[object]:
    data: list[object] = found[DATA].to_pylist()
    return data


def test_decoder_reads_every_type_of_avro() -> None:
    found = decoder(EVERY)(columns_of(avro(EVERY, WRITTEN), None))
    assert data_of(found) == [EXPECTED, None]
    assert found[CORRUPT].to_pylist() == [None, None]


def test_decoder_reads_every_type_of_json() -> None:
    value = VALUE | {
        "raw": "/w==",
        "four": "Zm91cg==",
        "day": "2026-01-01",
        "ms": int(NOON.timestamp() * 1000),
        "us": "2026-01-01T12:00:00.000007Z",
        "here": "2026-01-01T12:00:00",
        "price": 12.3,
        "days": ["2026-01-01", None],
        "times": {"a": int(NOON.timestamp() * 1000)},
    }
    left_out = {name: each for name, each in value.items() if name not in ("nothing", "large")}
    found = decoder(EVERY, Decoding.JSON)(
        columns_of(json.dumps(value).encode(), json.dumps(left_out).encode())
    )
    assert data_of(found) == [EXPECTED, EXPECTED | {"large": None}]


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ("string", "not a record"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["null", "R"]}]},
            "contains itself",
        ),
        ({"type": "record", "name": "R", "fields": [{"name": "r", "type": "Q"}]}, "no type Q"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "r", "type": ["int", "string"]}]},
            "union",
        ),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [
                    {
                        "name": "d",
                        "type": {"type": "bytes", "logicalType": "decimal", "precision": 39},
                    }
                ],
            },
            "39 digits",
        ),
    ],
)
def test_decoder_refuses_types_that_spark_lacks(tree: object, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        form_of(tree)  # type: ignore[arg-type]


V1 = {"type": "record", "name": "Order", "fields": [{"name": "a", "type": "int"}]}
V2 = V1 | {
    "name": "Order2",
    "fields": [
        {"name": "new", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 0},
        {"name": "a", "type": "int"},
    ],
}
V3 = V1 | {"fields": [{"name": "a", "type": "string"}]}
VERSIONS = {b"\1": V1, b"\2": V2, b"\3": V3}


class Writers:
    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def of_version(self, version: bytes) -> pb.Schema:
        self.asked.append(version)
        data = json.dumps(VERSIONS[version]).encode()
        return pb.Schema(name="", schema_data=data, type=pb.Schema.Type.Avro)


def versioned(tree: object, writers: Writers, **how: object) -> ValueDecoder:
    schema = Definition(Decoding.AVRO, json.dumps(tree)).avro().of_topic(PlainWriters(writers))
    return decoder(tree, avro=schema, learn=lambda v: asyncio.run(schema.learn(v)), **how)  # type: ignore[arg-type]


def test_decoder_resolves_values_of_other_versions() -> None:
    writers = Writers()
    reading = versioned(V1, writers)
    for _ in range(2):
        assert data_of(reading(columns_of(avro(V1, {"a": 1}), version=b"\1"))) == [{"a": 1}]
        newer = avro(V2, {"a": 2, "new": NOON})
        assert data_of(reading(columns_of(newer, version=b"\2"))) == [{"a": 2}]
    assert writers.asked == [b"\1", b"\2"]
    now = versioned(V2, Writers())(columns_of(avro(V2, {"a": 3, "new": NOON}), version=b"\2"))
    assert data_of(now) == [{"a": 3, "new": NOON}]
    older = versioned(V2, Writers())(columns_of(avro(V1, {"a": 1}), version=b"\1"))
    assert data_of(older) == [{"a": 1, "new": datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)}]


def test_value_of_an_incompatible_version_fails_or_is_corrupt() -> None:
    columns = columns_of(avro(V3, {"a": "x"}), version=b"\3")
    with pytest.raises(InvalidMessage, match="onCorrupt"):
        versioned(V1, Writers())(columns)
    found = versioned(V1, Writers(), fail=False)(columns)
    assert data_of(found) == [None]
    assert "cannot be read by its Avro schema" in found[CORRUPT].to_pylist()[0]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"{", "none of its schema"),
        (b"[]", "instead of a record"),
        (b'{"a":"x"}', "whole number"),
        (b'{"a":true}', "whole number"),
        (b'{"a":2147483648}', "whole number"),
        (b"[" * 100_000, "none of its schema"),
    ],
)
def test_invalid_json_is_corrupt_and_other_rows_are_read(value: bytes, why: str) -> None:
    reading = decoder(V1, Decoding.JSON, fail=False)
    found = reading(columns_of(b'{"a":1}', value, b'{"a":3,"b":4}'))
    assert data_of(found) == [{"a": 1}, None, {"a": 3}]
    assert why in found[CORRUPT].to_pylist()[1]


def test_value_that_arrow_refuses_makes_only_its_row_corrupt() -> None:
    tree = {
        "type": "record",
        "name": "R",
        "fields": [
            {
                "name": "d",
                "type": {"type": "bytes", "logicalType": "decimal", "precision": 3, "scale": 0},
            }
        ],
    }
    wide = json.loads(json.dumps(tree).replace('"precision": 3', '"precision": 9'))
    reading = decoder(tree, fail=False)
    one, two = decimal.Decimal(7), decimal.Decimal(12345)
    found = reading(columns_of(avro(wide, {"d": one}), avro(wide, {"d": two})))
    assert data_of(found) == [{"d": one}, None]
    assert isinstance(found[DATA], pa.StructArray)


WIDE = V1 | {"fields": [{"name": "b", "type": "string"}, *V1["fields"]]}


@pytest.mark.parametrize("names", [("data",), ("data", "_corrupt"), ("_corrupt",), ("value",)])
def test_decoder_makes_only_declared_columns(names: tuple[str, ...]) -> None:
    given = {
        "serviceUrl": "pulsar://nowhere:1",
        "topic": "t",
        "decode": "json",
        "decodeSchema": json.dumps(WIDE),
        "onCorrupt": "column",
    }
    options = SourceOptions.of(Options(given))
    types = {
        "data": StructType().add("a", IntegerType()),
        "_corrupt": StringType(),
        "value": BinaryType(),
    }
    declared = StructType([StructField(name, types[name]) for name in names])
    source = Source(options, definition_for(options), declared)
    schema = arrow_schema(declared)
    values = source.decoder(schema)
    rows = record_batch(columns_of(b'{"a":1,"b":"x"}', b"{"), 0, schema, values).to_pylist()
    if "data" in names:
        assert [row["data"] for row in rows] == [{"a": 1}, None]
    if "_corrupt" in names:
        assert [row["_corrupt"] is None for row in rows] == [True, False]


def test_topic_with_another_kind_of_schema_is_refused() -> None:
    text = pb.Schema(name="", schema_data=b"{}", type=pb.Schema.Type.Json)
    assert definition_of(Decoding.JSON, text, "t").text == "{}"
    with pytest.raises(InvalidOption, match="decodeSchema"):
        definition_of(Decoding.AVRO, text, "t")
    with pytest.raises(InvalidOption, match="no JSON"):
        _ = Definition(Decoding.JSON, "{").form
