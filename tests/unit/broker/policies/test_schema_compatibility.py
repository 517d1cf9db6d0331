"""Which schema may follow which, under each strategy."""

import json
from collections.abc import Mapping

import pytest

from broker.policies.schema_compatibility import (
    CompatibilityStrategy,
    IncompatibleSchema,
    SchemaDefinition,
    SchemaType,
    reader_parts,
    successor_parts,
)
from tests.support.schema_checks import run_parts


def record(*fields: Mapping[str, object], kind: SchemaType = SchemaType.JSON) -> SchemaDefinition:
    definition = {"type": "record", "name": "Thing", "fields": list(fields)}
    return SchemaDefinition(kind, json.dumps(definition).encode())


X = {"name": "x", "type": "int"}
Y = {"name": "y", "type": "string"}
Y_OPTIONAL = {"name": "y", "type": ["null", "string"], "default": None}
ONLY_X, WITH_Y, WITH_OPTIONAL_Y = record(X), record(X, Y), record(X, Y_OPTIONAL)
S = CompatibilityStrategy


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
        (
            S.FULL,
            SchemaDefinition(SchemaType.PROTOBUF, b"a"),
            SchemaDefinition(SchemaType.PROTOBUF, b"b"),
            False,
        ),
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


def test_a_reader_needs_only_to_read() -> None:
    run_parts(reader_parts(ONLY_X, [WITH_Y], S.FULL))
    with pytest.raises(IncompatibleSchema, match="consumer's schema"):
        run_parts(reader_parts(WITH_Y, [ONLY_X], S.FULL))
    run_parts(reader_parts(WITH_Y, [ONLY_X], S.ALWAYS_COMPATIBLE))


def test_a_record_may_change_its_name() -> None:
    renamed = SchemaDefinition(
        SchemaType.JSON,
        json.dumps({"type": "record", "name": "Other", "namespace": "n", "fields": [X]}).encode(),
    )
    run_parts(successor_parts(renamed, [ONLY_X], S.FULL_TRANSITIVE))
    run_parts(reader_parts(renamed, [ONLY_X], S.FULL))
