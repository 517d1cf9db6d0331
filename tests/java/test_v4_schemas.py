"""Schemas of every kind with the official v4 client: evolution, AUTO_CONSUME, and bytes."""

import pytest

from tests.java.conftest import RunCase


def test_values_of_simple_schemas_come_back_typed_and_by_auto_consume(
    run_v4_case: RunCase,
) -> None:
    facts = run_v4_case("v4_simple_schemas")
    assert facts["failures"] == {}
    assert facts["bytes"] == "raw"
    assert facts["other_producer"] == "IncompatibleSchemaException"
    assert facts["other_consumer"] == "IncompatibleSchemaException"


@pytest.mark.parametrize("kind", ["AVRO", "JSON"])
def test_readers_of_all_versions_read_all_messages(run_v4_case: RunCase, kind: str) -> None:
    facts = run_v4_case("v4_schema_evolution", type=kind)
    assert facts["incompatible"] == facts["incompatible_consumer"] == "IncompatibleSchemaException"
    assert facts["versions"] == 2
    assert facts["read"]["auto"] == ["1:-:0", "2:two:1", "3:-:0"]
    assert facts["read"]["second"] == ["1:null:0", "2:two:1", "3:null:0"]
    assert facts["read"]["first"] == ["1:-:0", "2:-:1", "3:-:0"]
    assert facts["type"] == kind
    assert facts["newest_is_second"]


def test_keys_and_values_have_schemas_of_their_own(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_key_value_schemas")
    assert facts["INLINE"] == ["one=1 one=1 false", "two=2 two=2 false"]
    assert facts["SEPARATED"] == ["one=1 one=1 true", "two=2 two=2 true"]
    for encoding in ("INLINE", "SEPARATED"):
        assert facts[f"{encoding}_shown"]
        assert facts[f"{encoding}_versions"] == 1


def test_schemas_of_keys_and_values_follow_each_other(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_pair_evolution")
    assert facts["first"] == facts["optional"] == facts["old_consumer"] == "ok"
    assert facts["required"] == facts["other_key"] == "IncompatibleSchemaException"


def test_protobuf_messages_have_schemas(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_protobuf_schemas")
    assert facts["protobuf"] is facts["native"] is True
    assert facts["auto"] == "PROTOBUF_NATIVE n 7"
    assert facts["other_message"] == "IncompatibleSchemaException"


def test_bytes_are_sent_if_they_fit_the_schema_of_the_topic(run_v4_case: RunCase) -> None:
    facts = run_v4_case("v4_auto_produce")
    assert facts["row"] == "7:seven"
    assert facts["other_bytes"] == "SchemaSerializationException"
