"""Converters of values that follow an Avro definition.  Pure.

A value is a dict for a record or a map, a list for an array, and None for null, as in JSON and Avro
libraries.
"""

from collections.abc import Callable, Mapping
from typing import Final

from magnetar.schema.avro_definition import AvroDefinition, Json, RecordShape

__all__ = ["Leaf", "converter"]

Leaf = Callable[[object], object]
"""A function that changes one value.  Raises `ValueError` or `TypeError` if it does not fit."""

_ASIS: Final[Leaf] = lambda value: value  # noqa: E731


def converter(
    definition: AvroDefinition, leaves: Mapping[str, Leaf], *, shaped: bool
) -> Leaf | None:
    """Make the function that changes values of a definition; None if there is nothing to change.

    `leaves` are by logical type, Java class, or type; the first one found is used.  With `shaped`,
    fields of records are filled and dropped by their `RecordShape`.
    """
    shapes = definition.shapes if shaped else {}
    builder = _Builder(leaves, shapes)
    changes = builder.node(definition.tree)
    return changes if builder.changes_something else None


class _Builder:
    def __init__(self, leaves: Mapping[str, Leaf], shapes: Mapping[str, RecordShape]) -> None:
        self._leaves = leaves
        self._shapes = shapes
        self._named: dict[str, Leaf] = {}
        self.changes_something = any(shape.fill or shape.drop for shape in shapes.values())

    def node(self, node: Json) -> Leaf:
        """The function that changes a value of this type."""
        if isinstance(node, list):
            branches = [branch for branch in node if branch != "null"]
            return _nullable(self.node(branches[0])) if len(branches) == 1 else _ASIS
        if isinstance(node, str):
            return self._name_or_leaf(node)
        return self._complex(node) if isinstance(node, dict) else _ASIS

    def _complex(self, node: dict[str, Json]) -> Leaf:
        kind = node.get("type")
        if kind == "record":
            change = self._record(node)
        elif kind == "array":
            change = self._array(node.get("items"))
        elif kind == "map":
            change = _each_value(self.node(node.get("values")))
        elif isinstance(kind, str):
            change = self._marked(kind, node)
        else:
            change = self.node(kind)
        return change

    def _marked(self, kind: str, node: dict[str, Json]) -> Leaf:
        """The function for a type with a logical type or a Java class."""
        for key in (node.get("logicalType"), node.get("java-class")):
            if isinstance(key, str) and key in self._leaves:
                return self._leaf(key)
        if "logicalType" in node:
            return _ASIS
        leaf = self._leaf(kind)
        if kind in ("enum", "fixed"):
            self._named[str(node.get("name"))] = leaf
        return leaf

    def _leaf(self, kind: str) -> Leaf:
        leaf = self._leaves.get(kind)
        if leaf is None:
            return _ASIS
        self.changes_something = True
        return leaf

    def _name_or_leaf(self, name: str) -> Leaf:
        named = self._named
        if name in named:

            def later(value: object) -> object:
                # Looked up when it is used, as a record may contain itself.
                return named[name](value)

            return later
        return self._leaf(name)

    def _array(self, items: Json) -> Leaf:
        item = self.node(items)
        whole = self._leaf("array")
        if item is _ASIS:
            return whole
        return lambda value: whole([item(each) for each in _listed(value)])

    def _record(self, node: dict[str, Json]) -> Leaf:
        name = str(node.get("name"))
        self._named[name] = _ASIS
        fields: list[tuple[str, Leaf]] = []
        listed = node.get("fields")
        for each in listed if isinstance(listed, list) else ():
            if isinstance(each, dict):
                change = self.node(each.get("type"))
                if change is not _ASIS:
                    fields.append((str(each.get("name")), change))
        shape = self._shapes.get(name)
        record = _record(tuple(fields), shape)
        self._named[name] = record
        return record


def _nullable(change: Leaf) -> Leaf:
    if change is _ASIS:
        return _ASIS
    return lambda value: None if value is None else change(value)


def _each_value(change: Leaf) -> Leaf:
    if change is _ASIS:
        return _ASIS

    def each(value: object) -> object:
        return {key: change(inner) for key, inner in _mapped(value).items()}

    return each


def _record(fields: tuple[tuple[str, Leaf], ...], shape: RecordShape | None) -> Leaf:
    fill = () if shape is None else tuple(shape.fill)
    drop = () if shape is None else tuple(shape.drop)

    def record(value: object) -> object:
        given = dict(_mapped(value))
        for name in drop:
            if name in given and given[name] is None:
                del given[name]
        for name, change in fields:
            if name in given:
                given[name] = change(given[name])
        for name in fill:
            given.setdefault(name, None)
        return given

    return record


def _mapped(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} instead of a record or map")
    return value


def _listed(value: object) -> list[object]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return list(value)
