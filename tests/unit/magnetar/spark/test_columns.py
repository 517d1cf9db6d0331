"""Arrow batches of the source: types equal to what Spark was told, values as they were sent."""

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from magnetar.message_id import MessageId
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.reads.entries import StoredEntry
from magnetar.reads.messages import MessageColumns, take_apart
from magnetar.spark.columns import BASE_SCHEMA, arrow_schema, check_schema, record_batch
from magnetar.spark.errors import InvalidOption
from magnetar.spark.order_key import order_key
from tests.unit.magnetar.spark.stored import batch, single

NEW_YEAR = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
NEW_YEAR_MS = int(NEW_YEAR.timestamp() * 1000)


def columns_of(*entries: bytes) -> MessageColumns:
    columns = MessageColumns()
    for number, data in enumerate(entries):
        take_apart(StoredEntry(7, number, data), columns)
    return columns


def test_record_batch_has_every_column() -> None:
    entry = single(
        5,
        b"value",
        publish_time=NEW_YEAR_MS,
        event_time=NEW_YEAR_MS + 1,
        partition_key="/w==",
        partition_key_b64_encoded=True,
        properties=[pb.KeyValue(key="b", value="2"), pb.KeyValue(key="a", value="1")],
        txnid_most_bits=3,
        txnid_least_bits=9,
        schema_version=b"\0" * 8,
    )
    schema = arrow_schema(BASE_SCHEMA)
    found = record_batch(columns_of(entry, batch(10, [b"x", b"y"])), 4, schema)
    found.validate(full=True)
    assert found.schema.equals(schema)
    rows = found.to_pylist()
    identity = rows[0].pop("message_id")
    assert rows[0] == {
        "key": "/w==",
        "value": b"value",
        "properties": [("b", "2"), ("a", "1")],
        "publish_time": NEW_YEAR,
        "event_time": NEW_YEAR + datetime.timedelta(milliseconds=1),
        "segment_id": 4,
        "txn_id": "3_9",
        "order_key": order_key(4, 7, 0, -1),
        "schema_version": b"\0" * 8,
        "producer": "p",
        "sequence_id": 5,
    }
    assert MessageId.from_bytes(identity).segment_id == 4
    assert rows[2]["properties"] == []
    assert rows[2]["order_key"] == order_key(4, 7, 1, 1)
    assert (rows[2]["key"], rows[2]["event_time"], rows[2]["txn_id"]) == (None, None, None)
    assert rows[2]["sequence_id"] == 11


def test_record_batch_has_chosen_columns_in_their_order() -> None:
    declared = StructType([BASE_SCHEMA["sequence_id"], BASE_SCHEMA["value"]])
    check_schema(declared, BASE_SCHEMA)
    found = record_batch(columns_of(single(1, b"a")), 0, arrow_schema(declared))
    assert found.to_pylist() == [{"sequence_id": 1, "value": b"a"}]


@pytest.mark.parametrize(
    ("field", "why"),
    [
        (StructField("values", StringType()), "no column values"),
        (StructField("key", IntegerType()), "of type string, not int"),
        (StructField("value", LongType()), "of type binary, not bigint"),
    ],
)
def test_unknown_columns_are_refused(field: StructField, why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        check_schema(StructType([field]), BASE_SCHEMA)


ORDER = StructType([StructField("a", IntegerType()), StructField("b", StringType())])


def test_struct_column_may_have_some_of_its_fields() -> None:
    """So a query goes on when the topic's schema gets another field."""
    known = StructType([StructField("data", ORDER)])
    for chosen in (ORDER, StructType([ORDER["b"]]), StructType([ORDER["b"], ORDER["a"]])):
        check_schema(StructType([StructField("data", chosen)]), known)
    for wrong in (StructField("a", StringType()), StructField("c", IntegerType())):
        with pytest.raises(InvalidOption, match="of type struct<a:int,b:string>, not struct"):
            check_schema(StructType([StructField("data", StructType([wrong]))]), known)


@pytest.mark.parametrize("time_ms", [2**53, 2**62, 2**64 - 1])
def test_time_beyond_sparks_range_is_null(time_ms: int) -> None:
    entry = single(1, b"a", publish_time=time_ms, event_time=time_ms)
    names = StructType([BASE_SCHEMA["publish_time"], BASE_SCHEMA["event_time"]])
    found = record_batch(columns_of(entry, single(2, b"b")), 0, arrow_schema(names))
    expected = time_ms * 1000 if time_ms < 2**63 // 1000 else None
    for column in found.columns:
        assert column.cast(pa.int64()).to_pylist()[0] == expected
    assert found.column(0).cast(pa.int64()).to_pylist()[1] == 1_002_000


PLACES = st.tuples(
    st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(-1, 2**20)
)


@given(one=PLACES, other=PLACES)
def test_order_keys_sort_like_places(
    one: tuple[int, int, int, int], other: tuple[int, int, int, int]
) -> None:
    def place(each: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        return (*each[:3], max(each[3], 0))

    assert (order_key(*one) < order_key(*other)) == (place(one) < place(other))
