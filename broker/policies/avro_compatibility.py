"""Avro's schema resolution: whether a reader's schema reads what a writer's schema wrote.  Pure.

Each pair of types is compared once.  Branches of a union are found by type and name, so a union
costs as many comparisons as it has branches.  The number of comparisons is bounded.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from avro.schema import (
    ArraySchema,
    EnumSchema,
    Field,
    FixedSchema,
    MapSchema,
    NamedSchema,
    RecordSchema,
    Schema,
    UnionSchema,
)

from config.bounds import MAX_SCHEMA_COMPARISONS, MAX_SCHEMA_DEPTH

SHOWN = 10
"""Mismatches that are reported."""
SHOWN_SYMBOLS = 5
"""Symbols of an enum that are named in a mismatch."""
PROMOTED_TO: Mapping[str, tuple[str, ...]] = {
    "int": ("long", "float", "double"),
    "long": ("float", "double"),
    "float": ("double",),
    "string": ("bytes",),
    "bytes": ("string",),
}
"""The types, other than itself, with which a primitive type can be read."""
_PRIMITIVE = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


class SchemaTooComplex(Exception):
    """A comparison needs more work than it may."""


class Mismatch(NamedTuple):
    """A part of the reader's schema that cannot read what the writer's schema wrote."""

    place: str
    """Path within the reader's schema, as `/fields/0/type`."""
    reason: str


class _Path(NamedTuple):
    """A path within a schema, from its end."""

    parent: "_Path | None"
    token: str
    depth: int

    def under(self, *tokens: str) -> "_Path":
        path = self
        for token in tokens:
            path = _Path(path, token, self.depth + 1)
        return path

    def __str__(self) -> str:
        tokens: list[str] = []
        path: _Path | None = self
        while path is not None:
            tokens.append(path.token)
            path = path.parent
        return "/".join(reversed(tokens)) or "/"


_ROOT = _Path(None, "", 0)
_NONE: tuple[Mismatch, ...] = ()


def mismatches(
    reader: Schema, writer: Schema, most: int = MAX_SCHEMA_COMPARISONS
) -> tuple[Mismatch, ...]:
    """Return why `reader` cannot read data of `writer`: at most `SHOWN` mismatches, none if it can.

    The outer record may have another name than the writer's.  Raises `SchemaTooComplex` above
    `most` comparisons, and for types nested deeper than MAX_SCHEMA_DEPTH.
    """
    return _Comparison(reader, writer, most).compare(reader, writer, _ROOT)


class _Comparison:
    """One comparison of two schemas, with the results of all pairs of types so far."""

    def __init__(self, reader: Schema, writer: Schema, most: int) -> None:
        self._root = reader
        self._root_alias = writer.fullname if isinstance(writer, RecordSchema) else None
        self._left = most
        self._results: dict[tuple[int, int], tuple[Mismatch, ...]] = {}
        self._branches: dict[int, Mapping[str, Sequence[Schema]]] = {}
        self._fields: dict[int, Mapping[str, Field]] = {}
        self._symbols: dict[int, frozenset[str]] = {}
        self._aliases: dict[int, frozenset[str]] = {}

    def compare(self, reader: Schema, writer: Schema, path: _Path) -> tuple[Mismatch, ...]:
        pair = id(reader), id(writer)
        known = self._results.get(pair)
        if known is not None:
            return known
        self._count(1)
        if path.depth > MAX_SCHEMA_DEPTH:
            raise SchemaTooComplex(f"its types are nested deeper than {MAX_SCHEMA_DEPTH}")
        # A recursive type reads itself if the rest of it does.
        self._results[pair] = _NONE
        result = self._results[pair] = self._compare_new(reader, writer, path)
        return result

    def _count(self, comparisons: int) -> None:
        self._left -= comparisons
        if self._left < 0:
            raise SchemaTooComplex("it needs too many comparisons of types")

    def _compare_new(self, reader: Schema, writer: Schema, path: _Path) -> tuple[Mismatch, ...]:
        if isinstance(writer, UnionSchema):
            return self._compare_written_union(reader, writer, path)
        if isinstance(reader, UnionSchema):
            return self._find_branch(reader, writer, path)
        if reader.type != writer.type:
            if reader.type in PROMOTED_TO.get(writer.type, ()):
                return _NONE
            reason = f"reader type: {reader.type} not compatible with writer type: {writer.type}"
            return (Mismatch(str(path), reason),)
        return self._compare_same_type(reader, writer, path)

    def _compare_same_type(
        self, reader: Schema, writer: Schema, path: _Path
    ) -> tuple[Mismatch, ...]:
        if reader.type in _PRIMITIVE:
            return _NONE
        if isinstance(reader, ArraySchema):
            items = cast("ArraySchema", writer).items
            return self.compare(reader.items, items, path.under("items"))
        if isinstance(reader, MapSchema):
            values = cast("MapSchema", writer).values
            return self.compare(reader.values, values, path.under("values"))
        return self._compare_named(reader, writer, path)

    def _compare_named(self, reader: Schema, writer: Schema, path: _Path) -> tuple[Mismatch, ...]:
        if not isinstance(reader, NamedSchema) or not isinstance(writer, NamedSchema):
            return (Mismatch(str(path), f"unknown type {reader.type}"),)
        found = _NONE
        if not self._same_name(reader, writer):
            found = (Mismatch(str(path.under("name")), f"expected: {writer.fullname}"),)
        if isinstance(reader, RecordSchema) and isinstance(writer, RecordSchema):
            return (found + self._compare_records(reader, writer, path))[:SHOWN]
        if isinstance(reader, FixedSchema) and isinstance(writer, FixedSchema):
            if reader.size != writer.size:
                reason = f"expected: {writer.size}, found: {reader.size}"
                found += (Mismatch(str(path.under("size")), reason),)
        elif isinstance(reader, EnumSchema) and isinstance(writer, EnumSchema):
            found += self._compare_enums(reader, writer, path)
        return found

    def _compare_written_union(
        self, reader: Schema, writer: UnionSchema, path: _Path
    ) -> tuple[Mismatch, ...]:
        """Every branch that may be written must be readable."""
        found = _NONE
        for branch in writer.schemas:
            found = (found + self.compare(reader, branch, path))[:SHOWN]
        return found

    def _find_branch(
        self, reader: UnionSchema, writer: Schema, path: _Path
    ) -> tuple[Mismatch, ...]:
        """One branch of the reader's union must read the type."""
        for branch in self._candidates(reader, writer):
            if not self.compare(branch, writer, path):
                return _NONE
        return (Mismatch(str(path), f"reader union lacking writer type: {writer.type.upper()}"),)

    def _candidates(self, reader: UnionSchema, writer: Schema) -> Sequence[Schema]:
        """The branches that can read the type, as far as type and name say."""
        branches = self._branches.get(id(reader))
        if branches is None:
            branches = self._branches[id(reader)] = self._index(reader)
        if isinstance(writer, NamedSchema):
            found = list(branches.get(f"{writer.type} {writer.name}", ()))
            # Keys with a colon are full names that are aliases.
            found += branches.get(f"{writer.type}: {writer.fullname}", ())
            return found
        kinds = (writer.type, *PROMOTED_TO.get(writer.type, ()))
        return [branch for kind in kinds for branch in branches.get(kind, ())]

    def _index(self, union: UnionSchema) -> Mapping[str, Sequence[Schema]]:
        index: dict[str, list[Schema]] = {}
        for branch in union.schemas:
            self._count(1)
            if isinstance(branch, NamedSchema):
                keys = [f"{branch.type} {branch.name}"]
                keys += [f"{branch.type}: {alias}" for alias in self._aliases_of(branch)]
            else:
                keys = [branch.type]
            for key in keys:
                index.setdefault(key, []).append(branch)
        return index

    def _compare_records(
        self, reader: RecordSchema, writer: RecordSchema, path: _Path
    ) -> tuple[Mismatch, ...]:
        written = self._fields.get(id(writer))
        if written is None:
            written = self._fields[id(writer)] = {each.name: each for each in writer.fields}
        found = _NONE
        for index, each in enumerate(reader.fields):
            self._count(1)
            field = written.get(each.name) or _by_alias(each, written)
            if field is not None:
                place = path.under("fields", str(index), "type")
                found += self.compare(each.type, field.type, place)
            elif not each.has_default:
                found += (Mismatch(str(path.under("fields", str(index))), each.name),)
            if len(found) >= SHOWN:
                break
        return found[:SHOWN]

    def _compare_enums(
        self, reader: EnumSchema, writer: EnumSchema, path: _Path
    ) -> tuple[Mismatch, ...]:
        known, written = self._symbols_of(reader), self._symbols_of(writer)
        missing = written - known
        if not missing or reader.props.get("default") in known:
            return _NONE
        shown = ", ".join(sorted(missing)[:SHOWN_SYMBOLS])
        return (Mismatch(str(path.under("symbols")), f"missing symbols: {shown}"),)

    def _symbols_of(self, enum: EnumSchema) -> frozenset[str]:
        self._count(1 + len(enum.symbols) // 100)
        symbols = self._symbols.get(id(enum))
        if symbols is None:
            symbols = self._symbols[id(enum)] = frozenset(enum.symbols)
        return symbols

    def _same_name(self, reader: NamedSchema, writer: NamedSchema) -> bool:
        return reader.name == writer.name or writer.fullname in self._aliases_of(reader)

    def _aliases_of(self, schema: NamedSchema) -> frozenset[str]:
        aliases = self._aliases.get(id(schema))
        if aliases is None:
            texts = _texts(schema.props.get("aliases"))
            # As in Pulsar, the outer record may change its name.
            if schema is self._root and self._root_alias is not None:
                texts.append(self._root_alias)
            aliases = self._aliases[id(schema)] = frozenset(texts)
        return aliases


def _by_alias(field: Field, written: Mapping[str, Field]) -> Field | None:
    for alias in _texts(field.props.get("aliases")):
        if alias in written:
            return written[alias]
    return None


def _texts(value: object) -> list[str]:
    items = value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, str)]
