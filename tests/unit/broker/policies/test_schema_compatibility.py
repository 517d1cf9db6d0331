"""Which schema may follow which, under each strategy."""

import base64
import json
import struct
from collections.abc import Mapping

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from broker.policies.schema_compatibility import (
    CompatibilityStrategy,
    IncompatibleSchema,
    SchemaDefinition,
    SchemaType,
    data_of_pair,
    reader_parts,
    successor_parts,
    text_of_pair,
)
from broker.topics.schemas import is_large
from tests.support.schema_checks import run_parts


def record(*fields: Mapping[str, object], kind: SchemaType = SchemaType.JSON) -> SchemaDefinition:
    definition = {"type": "record", "name": "Thing", "fields": list(fields)}
    return SchemaDefinition(kind, json.dumps(definition).encode())


X = {"name": "x", "type": "int"}
Y = {"name": "y", "type": "string"}
Y_OPTIONAL = {"name": "y", "type": ["null", "string"], "default": None}
ONLY_X, WITH_Y, WITH_OPTIONAL_Y = record(X), record(X, Y), record(X, Y_OPTIONAL)
S = CompatibilityStrategy
PROTOBUF = SchemaType.PROTOBUF
STRING, BYTES = SchemaDefinition(SchemaType.STRING, b""), SchemaDefinition(SchemaType.NONE, b"")


def pair(key: SchemaDefinition, value: SchemaDefinition, empty: int = 0) -> SchemaDefinition:
    """The schema of pairs, as Java's client writes it; with `empty` -1, as C++'s does."""
    data, properties = b"", {"kv.encoding.type": "INLINE"}
    for name, part in (("key", key), ("value", value)):
        data += struct.pack(">i", len(part.data) or empty) + part.data
        properties[f"{name}.schema.type"] = (
            "BYTES" if part.kind is SchemaType.NONE else part.kind.name
        )
        properties[f"{name}.schema.properties"] = json.dumps(part.properties)
    return SchemaDefinition(SchemaType.KEY_VALUE, data, "KeyValue", properties)


def native(root: str, *fields: str) -> SchemaDefinition:
    """The schema of a message of the package `shop`, which has an order with lines."""
    order = DescriptorProto(
        name="Order",
        field=[
            FieldDescriptorProto(name=name, number=number)
            for number, name in enumerate(fields, start=1)
        ],
        nested_type=[DescriptorProto(name="Line")],
    )
    files = FileDescriptorSet(
        file=[FileDescriptorProto(name="shop.proto", package="shop", message_type=[order])]
    )
    definition = {
        "fileDescriptorSet": base64.b64encode(files.SerializeToString()).decode(),
        "rootMessageTypeName": root,
        "rootFileDescriptorName": "shop.proto",
    }
    return SchemaDefinition(SchemaType.PROTOBUF_NATIVE, json.dumps(definition).encode())


def native_of(file: FileDescriptorProto, root: str) -> SchemaDefinition:
    files = base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()
    definition = {"fileDescriptorSet": files, "rootMessageTypeName": root}
    return SchemaDefinition(SchemaType.PROTOBUF_NATIVE, json.dumps(definition).encode())


@pytest.mark.parametrize(
    ("strategy", "old", "new", "allowed"),
    [
        (S.FULL, ONLY_X, WITH_OPTIONAL_Y, True),
        (S.FULL, ONLY_X, WITH_Y, False),
        (S.FULL, WITH_Y, ONLY_X, False),
        (S.BACKWARD, ONLY_X, WITH_Y, False),
        (S.BACKWARD, WITH_Y, ONLY_X, True),
        (S.FORWARD, ONLY_X, WITH_Y, True),
        (S.FORWARD, WITH_Y, ONLY_X, False),
        (S.ALWAYS_COMPATIBLE, ONLY_X, SchemaDefinition(SchemaType.STRING, b""), True),
        (S.ALWAYS_INCOMPATIBLE, ONLY_X, WITH_OPTIONAL_Y, False),
        (S.FULL, ONLY_X, SchemaDefinition(SchemaType.STRING, b""), False),
        (S.FULL, ONLY_X, record(X, kind=SchemaType.AVRO), False),
        (
            S.FULL,
            SchemaDefinition(SchemaType.INT32, b""),
            SchemaDefinition(SchemaType.INT32, b"x"),
            True,
        ),
        (S.FULL, record(X, kind=PROTOBUF), record(X, Y_OPTIONAL, kind=PROTOBUF), True),
        (S.FULL, record(X, kind=PROTOBUF), record(X, Y, kind=PROTOBUF), False),
        (S.FULL, pair(ONLY_X, WITH_Y), pair(WITH_OPTIONAL_Y, WITH_Y), True),
        (S.FULL, pair(ONLY_X, ONLY_X), pair(ONLY_X, WITH_Y), False),
        (S.FORWARD, pair(ONLY_X, ONLY_X), pair(WITH_Y, WITH_Y), True),
        (S.BACKWARD, pair(ONLY_X, ONLY_X), pair(WITH_Y, ONLY_X), False),
        (S.FULL, pair(STRING, ONLY_X), pair(STRING, WITH_OPTIONAL_Y), True),
        (S.FULL, pair(STRING, ONLY_X), pair(BYTES, ONLY_X), False),
        (S.FULL, pair(STRING, STRING), pair(STRING, BYTES), False),
        (S.ALWAYS_COMPATIBLE, pair(STRING, STRING), pair(STRING, BYTES), True),
        (S.FULL, pair(STRING, STRING), pair(STRING, STRING, empty=-1), True),
        (S.FULL, pair(STRING, pair(BYTES, ONLY_X)), pair(BYTES, pair(BYTES, ONLY_X)), False),
        (S.FULL, pair(STRING, pair(BYTES, ONLY_X)), pair(STRING, pair(BYTES, WITH_Y)), False),
        (S.FULL, native("shop.Order", "a"), native("shop.Order", "a", "b"), True),
        (S.FULL, native("shop.Order", "a"), native("shop.Order.Line", "a"), False),
        (S.ALWAYS_COMPATIBLE, native("shop.Order"), native("shop.Order.Line"), True),
    ],
)
def test_successors(
    strategy: S, old: SchemaDefinition, new: SchemaDefinition, allowed: bool
) -> None:
    if allowed:
        run_parts(successor_parts(new, [old], strategy))
    else:
        with pytest.raises(IncompatibleSchema):
            run_parts(successor_parts(new, [old], strategy))


def test_only_transitive_strategies_look_past_the_newest() -> None:
    history = [WITH_Y, record(X, Y_OPTIONAL), ONLY_X]
    renamed = record(X, {"name": "y", "type": "int", "default": 0})
    run_parts(successor_parts(renamed, history, S.BACKWARD))
    with pytest.raises(IncompatibleSchema):
        run_parts(successor_parts(renamed, history, S.BACKWARD_TRANSITIVE))


def test_the_first_schema_is_free_but_must_be_one() -> None:
    run_parts(successor_parts(ONLY_X, [], S.FULL))
    with pytest.raises(IncompatibleSchema, match="not an Avro definition"):
        run_parts(successor_parts(SchemaDefinition(SchemaType.JSON, b"{}"), [], S.FULL))
    with pytest.raises(IncompatibleSchema, match="not an Avro definition"):
        run_parts(
            successor_parts(SchemaDefinition(SchemaType.AVRO, b"\xff\x00"), [], S.ALWAYS_COMPATIBLE)
        )


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (SchemaDefinition(PROTOBUF, b"{}"), "not an Avro definition"),
        (pair(STRING, SchemaDefinition(SchemaType.AVRO, b"{}")), "not an Avro definition"),
        (pair(native("shop.Bill"), STRING), "has no message shop.Bill"),
        (SchemaDefinition(SchemaType.KEY_VALUE, b""), "each behind its length"),
        (SchemaDefinition(SchemaType.KEY_VALUE, bytes([0, 0, 0, 1])), "were announced"),
        (SchemaDefinition(SchemaType.KEY_VALUE, bytes(9)), "1 bytes follow"),
        (
            SchemaDefinition(
                SchemaType.KEY_VALUE, bytes(8), properties={"key.schema.properties": "[]"}
            ),
            "are no object",
        ),
        (
            SchemaDefinition(SchemaType.KEY_VALUE, bytes(8), properties={"key.schema.type": "A"}),
            "no schema type 'A'",
        ),
        (SchemaDefinition(SchemaType.PROTOBUF_NATIVE, b"{}"), "file descriptors"),
        (SchemaDefinition(SchemaType.PROTOBUF_NATIVE, b"[" * 100_000), "file descriptors"),
        (native("Order"), "has no message Order"),
    ],
)
def test_a_definition_must_be_one_of_its_type(schema: SchemaDefinition, why: str) -> None:
    with pytest.raises(IncompatibleSchema, match=why):
        run_parts(successor_parts(schema, [], S.FULL))


def test_a_long_name_of_a_package_costs_no_more_than_its_length() -> None:
    """Making the full name of each message would take minutes."""
    messages = [DescriptorProto(name="x")] * 400_000
    file = FileDescriptorProto(package="p" * 2_000_000, message_type=messages)
    with pytest.raises(IncompatibleSchema, match="has no message"):
        run_parts(successor_parts(native_of(file, f"{file.package}.y"), [], S.FULL))


@pytest.mark.parametrize("root", ["x", "pp", "p", "", "p.", "p.x.", "p.x.y.z", "p..x", ".p.x"])
def test_a_part_of_a_message_name_names_no_message(root: str) -> None:
    file = FileDescriptorProto(
        package="p",
        message_type=[DescriptorProto(name="x", nested_type=[DescriptorProto(name="y")])],
    )
    for there in ("p.x", "p.x.y"):
        run_parts(successor_parts(native_of(file, there), [], S.FULL))
    with pytest.raises(IncompatibleSchema, match="has no message"):
        run_parts(successor_parts(native_of(file, root), [], S.FULL))


def test_messages_without_a_package_are_found() -> None:
    file = FileDescriptorProto(message_type=[DescriptorProto(name="x")])
    run_parts(successor_parts(native_of(file, "x"), [], S.FULL))


def test_properties_of_the_schemas_of_a_pair_count_as_parsed() -> None:
    properties = {"key.schema.properties": json.dumps({"a": "x" * 10_000})}
    schema = SchemaDefinition(SchemaType.KEY_VALUE, bytes(8), properties=properties)
    for parts in (
        successor_parts(schema, [schema], S.FULL),
        reader_parts(schema, [schema], S.FULL),
    ):
        assert all(each.parsed_bytes > 10_000 for each in parts)
    assert is_large(schema)


def test_an_unknown_type_of_a_key_is_not_repeated_whole() -> None:
    properties = {"key.schema.type": "A" * 100_000}
    schema = SchemaDefinition(SchemaType.KEY_VALUE, bytes(8), properties=properties)
    with pytest.raises(IncompatibleSchema) as refused:
        run_parts(successor_parts(schema, [], S.FULL))
    assert len(str(refused.value)) < 1000


def test_types_of_keys_and_values_tell_pairs_apart() -> None:
    """The definitions of simple types are empty."""
    assert not pair(STRING, BYTES).same_as(pair(BYTES, STRING))
    assert pair(STRING, BYTES).same_as(pair(STRING, BYTES))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            STRING,
            SchemaDefinition(SchemaType.JSON, b'{"z":1,"a":[]}'),
            '{"key":"","value":{"z":1,"a":[]}}',
        ),
        (
            SchemaDefinition(SchemaType.AVRO, '{"é":"ß"}'.encode()),
            BYTES,
            '{"key":{"é":"ß"},"value":""}',
        ),
        (
            pair(BYTES, SchemaDefinition(SchemaType.JSON, b"{}")),
            STRING,
            '{"key":{"key":"","value":{}},"value":""}',
        ),
    ],
)
def test_text_of_a_pair_and_its_definition_say_the_same(
    key: SchemaDefinition, value: SchemaDefinition, text: str
) -> None:
    schema = pair(key, value)
    assert text_of_pair(schema) == text
    assert data_of_pair(text, schema.properties) == schema.data


@pytest.mark.parametrize(
    "text", ["", "\0\0\0\0", "[]", '{"key": ""}', '{"key": "", "value": "", "x": 1}', "[" * 9999]
)
def test_text_that_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(IncompatibleSchema, match=r'send the text of {"key"'):
        data_of_pair(text, {})


def test_names_of_nested_classes_may_have_a_dollar() -> None:
    """Older Java clients write them so."""
    definition = {"type": "record", "name": "Inner", "namespace": "shop.Outer$", "fields": [X]}
    nested = SchemaDefinition(SchemaType.AVRO, json.dumps(definition).encode())
    run_parts(successor_parts(nested, [record(X, kind=SchemaType.AVRO)], S.FULL))


def test_a_reader_needs_only_to_read() -> None:
    run_parts(reader_parts(ONLY_X, [WITH_Y], S.FULL))
    with pytest.raises(IncompatibleSchema, match="consumer's schema"):
        run_parts(reader_parts(WITH_Y, [ONLY_X], S.FULL))
    run_parts(reader_parts(WITH_Y, [ONLY_X], S.ALWAYS_COMPATIBLE))


@pytest.mark.parametrize("other", [ONLY_X, WITH_OPTIONAL_Y, STRING])
def test_consumer_needs_the_newest_schema_where_the_strategy_allows_no_other(
    other: SchemaDefinition,
) -> None:
    history = [ONLY_X, WITH_Y]
    run_parts(reader_parts(WITH_Y, history, S.ALWAYS_INCOMPATIBLE))
    run_parts(reader_parts(other, [], S.ALWAYS_INCOMPATIBLE))
    with pytest.raises(IncompatibleSchema, match="newest schema only"):
        run_parts(reader_parts(other, history, S.ALWAYS_INCOMPATIBLE))


def test_a_record_may_change_its_name() -> None:
    renamed = SchemaDefinition(
        SchemaType.JSON,
        json.dumps({"type": "record", "name": "Other", "namespace": "n", "fields": [X]}).encode(),
    )
    run_parts(successor_parts(renamed, [ONLY_X], S.FULL_TRANSITIVE))
    run_parts(reader_parts(renamed, [ONLY_X], S.FULL))
