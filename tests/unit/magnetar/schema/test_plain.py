"""Single values: the bytes are the official Java client's."""

import pytest

from magnetar.errors import InvalidArgument, InvalidMessage
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
    PlainSchema,
)

GOLDEN = [
    (STRING, "größe", "6772c3b6c39f65"),
    (BOOL, True, "01"),
    (INT8, -2, "fe"),
    (INT16, -2, "fffe"),
    (INT32, -2, "fffffffe"),
    (INT64, -2, "fffffffffffffffe"),
    (FLOAT, 1.100000023841858, "3f8ccccd"),
    (DOUBLE, 1.1, "3ff199999999999a"),
]


@pytest.mark.parametrize(("schema", "value", "data"), GOLDEN)
def test_bytes_as_java_has_them(schema: PlainSchema[object], value: object, data: str) -> None:
    assert schema.encode(value).hex() == data
    assert schema.decode(bytes.fromhex(data)) == value


@pytest.mark.parametrize(
    ("schema", "name", "kind"),
    [
        (STRING, "String", 1),
        (BOOL, "Boolean", 5),
        (INT8, "INT8", 6),
        (INT16, "INT16", 7),
        (INT32, "INT32", 8),
        (INT64, "INT64", 9),
        (FLOAT, "Float", 10),
        (DOUBLE, "Double", 11),
    ],
)
def test_plain_schema_info_is_pulsars(schema: PlainSchema[object], name: str, kind: int) -> None:
    assert (schema.info.name, schema.info.type, schema.info.schema_data) == (name, kind, b"")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (STRING, b"text"),
        (STRING, "\ud800"),
        (BOOL, 1),
        (INT8, 128),
        (INT16, -(2**15) - 1),
        (INT32, 2**31),
        (INT64, 2**63),
        (INT64, "7"),
        (FLOAT, 1e39),
        (DOUBLE, None),
    ],
)
def test_values_that_do_not_fit(schema: PlainSchema[object], value: object) -> None:
    with pytest.raises(InvalidArgument):
        schema.encode(value)


@pytest.mark.parametrize(
    ("schema", "data"), [(STRING, b"\xff"), (INT32, b"\0\0\0"), (INT8, b""), (BOOL, b"\0\0")]
)
def test_bytes_that_are_no_value(schema: PlainSchema[object], data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        schema.decode(data)


def test_bytes_are_themselves() -> None:
    assert BYTES.info is None
    assert BYTES.encode(bytearray(b"ab")) == b"ab"
    assert BYTES.encode(memoryview(b"ab")) == b"ab"
    assert BYTES.decode(b"ab") == b"ab"
    assert BYTES.knows(b"any version")
    with pytest.raises(InvalidArgument):
        BYTES.encode("ab")  # type: ignore[arg-type]
