"""Avro's schema resolution: as the reference implementation has it, and with bounded work."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import cast

import pytest
from avro.compatibility import ReaderWriterCompatibilityChecker, SchemaCompatibilityType
from avro.errors import AvroException
from avro.schema import RecordSchema, Schema, UnionSchema, make_avsc_object

from broker.policies.avro_compatibility import SchemaTooComplex, mismatches
from broker.policies.schema_compatibility import (
    CompatibilityStrategy,
    IncompatibleSchema,
    SchemaDefinition,
    SchemaType,
    successor_parts,
)
from config.bounds import MAX_AVRO_SCHEMA_BYTES
from tests.support.effort import by_effort, draw_seed
from tests.support.schema_checks import run_parts

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


class RandomSchemas:
    """Makes schemas of few names, so that many pairs of them are compatible."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._defined: set[str] = set()

    def make(self, depth: int = 3) -> object:
        self._defined = set()
        return self._type(depth)

    def _type(self, depth: int, *, in_union: bool = False) -> object:
        kinds = ["primitive"] * 3 + ["enum", "fixed"]
        if depth:
            kinds += ["record", "record", "array", "map"] + ([] if in_union else ["union"])
        if self._defined:
            kinds.append("reference")
        kind = self._rng.choice(kinds)
        if kind == "primitive":
            return self._rng.choice(PRIMITIVES)
        if kind == "reference":
            return self._rng.choice(sorted(self._defined))
        if kind == "array":
            return {"type": "array", "items": self._type(depth - 1)}
        if kind == "map":
            return {"type": "map", "values": self._type(depth - 1)}
        if kind == "union":
            return [self._type(depth - 1, in_union=True) for _ in range(self._rng.randint(1, 4))]
        return self._named(kind, depth)

    def _named(self, kind: str, depth: int) -> object:
        name = self._rng.choice([f"{kind}{n}" for n in range(3)])
        if name in self._defined:
            return name
        self._defined.add(name)
        schema: dict[str, object] = {"type": kind, "name": name}
        if self._rng.random() < 0.3:
            schema["aliases"] = [self._rng.choice([f"{kind}{n}" for n in range(3)])]
        if kind == "enum":
            schema["symbols"] = self._rng.sample(["A", "B", "C"], self._rng.randint(1, 3))
        elif kind == "fixed":
            schema["size"] = self._rng.randint(1, 2)
        else:
            schema["fields"] = [self._field(name, depth) for name in self._rng.sample("xyz", 2)]
        return schema

    def _field(self, name: str, depth: int) -> object:
        field: dict[str, object] = {"name": name, "type": self._type(depth - 1)}
        if self._rng.random() < 0.3:
            field["aliases"] = [self._rng.choice("xyz")]
        if field["type"] == "string" and self._rng.random() < 0.7:
            field["default"] = ""
        return field


def parsed(schemas: RandomSchemas) -> Schema:
    while True:
        with suppress(AvroException):  # a union may have a type twice
            return make_avsc_object(schemas.make())


def test_result_is_that_of_the_reference_implementation() -> None:
    rng = random.Random(draw_seed())
    schemas = RandomSchemas(rng)
    compatible = 0
    for _ in range(by_effort(quick=2_000, whole=5_000, nightly=50_000)):
        reader, writer = parsed(schemas), parsed(schemas)
        if rng.random() < 0.5:
            with suppress(AvroException):
                reader = make_avsc_object(changed(rng, writer.to_json()))
        checker = ReaderWriterCompatibilityChecker()  # type: ignore[no-untyped-call]
        expected = checker.get_compatibility(reader, with_other_name(writer, reader)).compatibility
        found = mismatches(reader, writer)
        assert (not found) is (expected is SchemaCompatibilityType.compatible), (
            json.dumps(reader.to_json()),
            json.dumps(writer.to_json()),
            found,
        )
        compatible += not found
    assert compatible > 100


def changed(rng: random.Random, definition: object) -> object:
    """The definition with one primitive type replaced."""
    text = json.dumps(definition)
    old, new = rng.choice(PRIMITIVES), rng.choice(PRIMITIVES)
    return json.loads(text.replace(f'"{old}"', f'"{new}"', 1))


def with_other_name(writer: Schema, reader: Schema) -> Schema:
    """The outer record may change its name: the reference needs an alias for that."""
    if isinstance(reader, RecordSchema) and isinstance(writer, RecordSchema):
        aliases = reader.props.get("aliases")
        known = aliases if isinstance(aliases, list) else []
        reader.props["aliases"] = [*known, writer.fullname]
    return writer


def union(types: int) -> Mapping[str, object]:
    branches = [{"type": "fixed", "name": f"f{n}", "size": n + 1} for n in range(types)]
    return {"type": "record", "name": "R", "fields": [{"name": "u", "type": branches}]}


def chain(links: int) -> Sequence[Mapping[str, object]]:
    """Records that are nested by reference only."""
    fields: list[Sequence[Mapping[str, object]]] = [[{"name": "a", "type": "int"}]]
    fields += [[{"name": "a", "type": f"r{n}"}] for n in range(links)]
    return [{"type": "record", "name": f"r{n}", "fields": each} for n, each in enumerate(fields)]


def test_large_union_costs_as_many_comparisons_as_it_has_branches() -> None:
    reader, writer = make_avsc_object(union(500)), make_avsc_object(union(500))
    assert not mismatches(reader, writer, most=3_000)


def test_comparisons_above_the_bound_are_refused() -> None:
    definitions = [
        {
            "type": "record",
            "name": "R",
            "namespace": f"n{n}",
            "fields": [{"name": f"x{n}", "type": "int"}],
        }
        for n in range(200)
    ]
    reader, writer = make_avsc_object(definitions), make_avsc_object(definitions)
    with pytest.raises(SchemaTooComplex, match="comparisons"):
        mismatches(reader, writer, most=3_000)


def test_chain_of_references_is_refused_before_it_exhausts_the_stack() -> None:
    unions = [cast("UnionSchema", make_avsc_object(chain(2_000))) for _ in range(2)]
    reader, writer = (each.schemas[-1] for each in unions)
    with pytest.raises(SchemaTooComplex, match="nested deeper"):
        mismatches(reader, writer)


def avro(definition: object) -> SchemaDefinition:
    return SchemaDefinition(SchemaType.AVRO, json.dumps(definition).encode())


def test_large_definition_is_refused_before_it_is_parsed() -> None:
    large = SchemaDefinition(SchemaType.JSON, b"[" * (MAX_AVRO_SCHEMA_BYTES + 1))
    with pytest.raises(IncompatibleSchema, match=f"{MAX_AVRO_SCHEMA_BYTES} is the most"):
        run_parts(successor_parts(large, [], CompatibilityStrategy.ALWAYS_COMPATIBLE))


def test_error_of_the_parser_is_shortened() -> None:
    bad = avro({"type": "record", "name": "R", "fields": [{"name": "a" * 10_000, "type": "what"}]})
    with pytest.raises(IncompatibleSchema, match="not an Avro definition") as caught:
        run_parts(successor_parts(bad, [], CompatibilityStrategy.FULL))
    assert len(str(caught.value)) < 500


def test_each_old_version_is_a_part_of_its_own() -> None:
    versions = [avro(union(n)) for n in range(1, 6)]
    parts = list(
        successor_parts(versions[-1], versions[:-1], CompatibilityStrategy.FULL_TRANSITIVE)
    )
    assert [part.parsed_bytes for part in parts] == [
        len(versions[-1].data),
        *(len(version.data) for version in versions[:-1]),
    ]
