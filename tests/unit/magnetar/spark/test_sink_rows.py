"""From Arrow to messages."""

from base64 import b64encode
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from magnetar.spark.errors import InvalidRows
from magnetar.spark.row_hash import hash_sum, row_hash
from magnetar.spark.sink_rows import RowColumns

WHOLE = (
    ("id", "bigint"),
    ("Key", "string"),
    ("value", "binary"),
    ("properties", "map<string,string>"),
    ("event_time", "timestamp"),
)


def test_row_has_all_columns() -> None:
    at = datetime(2030, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)
    batch = pa.record_batch(
        {
            "id": pa.array([1, 2], pa.int64()),
            "Key": pa.array(["ä", None]),
            "value": pa.array([b"one", None], pa.binary()),
            "properties": pa.array(
                [[("a", "b"), ("c", "")], None], pa.map_(pa.string(), pa.string())
            ),
            "event_time": pa.array([at, None], pa.timestamp("us", tz="UTC")),
        }
    )
    rows = RowColumns.of(WHOLE).rows(batch)
    assert len(rows) == 2
    assert rows.values == [b"one", None]
    assert rows.keys == ["ä", None]
    assert rows.properties == [{"a": "b", "c": ""}, None]
    assert rows.event_times_ms == [int(at.timestamp() * 1000), None]
    assert rows.hashes == [row_hash("ä".encode(), b"one"), row_hash(None, None)]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.large_binary()])
def test_values_of_every_arrow_type_and_their_slices_are_sent(kind: pa.DataType) -> None:
    whole = pa.record_batch({"value": pa.array(["a", "bb", "ccc"]).cast(kind)})
    rows = RowColumns.of([("value", "string")]).rows(whole.slice(1, 2))
    assert rows.values == [b"bb", b"ccc"]
    assert (rows.keys, rows.properties, rows.event_times_ms) == (None, None, None)


def test_binary_keys_are_stored_and_counted_as_base64() -> None:
    batch = pa.record_batch(
        {"key": pa.array([b"\xff", None], pa.binary()), "value": pa.array(["x", "y"])}
    )
    rows = RowColumns.of([("key", "binary"), ("value", "string")]).rows(batch)
    assert rows.keys == [b"\xff", None]
    assert rows.hashes[0] == row_hash(b64encode(b"\xff"), b"x")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ([("key", "string")], "no column value"),
        ([("value", "bigint")], "cast it to binary or string"),
        ([("value", "string"), ("key", "int")], "column key is of type int"),
        ([("value", "string"), ("properties", "map<string,int>")], "map<string,string>"),
        ([("value", "string"), ("event_time", "timestamp_ntz")], "cast it to timestamp"),
        ([("value", "string"), ("VALUE", "string")], "two columns value"),
    ],
)
def test_columns_of_a_wrong_type_are_refused(schema: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(InvalidRows, match=words):
        RowColumns.of(schema)


def test_a_property_that_is_null_is_refused() -> None:
    batch = pa.record_batch(
        {
            "value": pa.array(["x"]),
            "properties": pa.array([[("a", None)]], pa.map_(pa.string(), pa.string())),
        }
    )
    columns = RowColumns.of([("value", "string"), ("properties", "map<string,string>")])
    with pytest.raises(InvalidRows, match=r"\['a'\] of a row are null"):
        columns.rows(batch)


def test_different_rows_have_different_hashes() -> None:
    rows = [(None, None), (None, b""), (b"", None), (b"", b""), (b"a", b"b"), (b"b", b"a")]
    hashes = [row_hash(*row) for row in [*rows, (b"ab", b""), (None, b"ab")]]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= one < 1 << 64 for one in hashes)
    assert hash_sum(hashes) == hash_sum(reversed(hashes)) < 1 << 64


def test_hash_of_a_row_is_stable() -> None:
    """Counts are kept with what was committed, and compared years later."""
    assert row_hash(b"key", b"value") == HASH_OF_KEY_VALUE
    assert row_hash(None, b"value") == HASH_OF_VALUE


HASH_OF_KEY_VALUE = 12799176785381101966
HASH_OF_VALUE = 9787868069444317424
