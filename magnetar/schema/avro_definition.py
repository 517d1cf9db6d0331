"""Avro definitions of Python types, byte for byte those of such classes in Java.  Pure."""

import dataclasses
import datetime
import decimal
import enum
import json
import re
import types
import typing
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, NewType, TypeAlias

import pydantic
from typing_extensions import is_typeddict

from magnetar.errors import InvalidArgument
from magnetar.settings import check_flag

__all__ = [
    "AvroDefinition",
    "AvroType",
    "Float32",
    "Int32",
    "Json",
    "RecordShape",
    "compact",
    "definition_of",
    "is_record_type",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

DECIMAL: Final = "java.math.BigDecimal"
"""The `java-class` of a decimal number, which Java writes as text."""


@dataclass(frozen=True)
class AvroType:
    """An annotation, in `Annotated[...]`, with the Avro type of a field."""

    definition: Json


Int32 = Annotated[int, pydantic.Field(ge=-(2**31), lt=2**31), AvroType("int")]
"""An `int` of Java."""
Float32 = Annotated[float, AvroType("float")]
"""A `float` of Java."""


@dataclass(frozen=True)
class RecordShape:
    """The fields of a record that Java may leave out or write as null."""

    fill: frozenset[str]
    """Fields that are None if they are left out."""
    drop: frozenset[str]
    """Fields that take their Python default if they are null."""


@dataclass(frozen=True)
class AvroDefinition:
    """A definition, and the shapes of its records by name."""

    tree: Json
    shapes: Mapping[str, RecordShape] = field(default_factory=dict)

    @property
    def text(self) -> bytes:
        """The text for brokers."""
        return compact(self.tree)


class _NoDefault(enum.Enum):
    """A marker in place of a default value."""

    MISSING = enum.auto()
    UNKNOWN = enum.auto()
    """There is a default that no definition can express."""


@dataclass(frozen=True)
class _Field:
    name: str
    hint: object
    default: object


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBERS: Final = frozenset({"boolean", "int", "long", "float", "double"})
_UNIONS: Final = _NUMBERS | {"null", "string"}
_SIMPLE: Final[Mapping[type, Json]] = types.MappingProxyType(
    {
        bool: "boolean",
        int: "long",
        float: "double",
        str: "string",
        bytes: "bytes",
        datetime.datetime: {"type": "long", "logicalType": "timestamp-micros"},
        datetime.date: {"type": "int", "logicalType": "date"},
        datetime.time: {"type": "int", "logicalType": "time-millis"},
        uuid.UUID: {"type": "string", "logicalType": "uuid"},
        decimal.Decimal: {"type": "string", "java-class": DECIMAL},
    }
)
_ARRAYS: Final = (list, tuple, set, frozenset)


def compact(tree: Json) -> bytes:
    """The text of a definition for brokers, without white space."""
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


def is_record_type(kind: object) -> bool:
    """Whether it is a dataclass, a pydantic model, or a typed dict."""
    return (
        isinstance(kind, type)
        and (
            dataclasses.is_dataclass(kind)
            or (issubclass(kind, pydantic.BaseModel) and not issubclass(kind, pydantic.RootModel))
        )
    ) or is_typeddict(kind)


def definition_of(
    kind: type[object], *, namespace: str | None = None, always_allow_null: bool = True
) -> AvroDefinition:
    """The definition of a dataclass, a pydantic model or a typed dict.

    An `int` is a long and a `float` a double, unless `Annotated[..., AvroType(...)]` (as `Int32`
    and `Float32`) says otherwise.  A field is nullable if its type has None, and with
    `always_allow_null`, as in Java, also if its type is neither a number nor a boolean.  A constant
    default, or an empty container, becomes the default in the definition.

    Raises `InvalidArgument` for anything else, and for fields that Avro has no type for.
    """
    if not is_record_type(kind):
        raise InvalidArgument(
            f"{kind!r} is no dataclass, pydantic model or typed dict; make it one, "
            "or use another schema."
        )
    check_flag("always_allow_null", always_allow_null)
    builder = _Builder(always_allow_null)
    tree = builder.record(kind)
    if namespace:
        # After the name, as Java writes it.
        tree = {"type": tree.pop("type"), "name": tree.pop("name"), "namespace": namespace} | tree
    return AvroDefinition(tree, builder.shapes)


class _Builder:
    """Builds one definition from types."""

    def __init__(self, always_allow_null: bool) -> None:
        self._always_allow_null = always_allow_null
        self._seen: dict[str, type[object]] = {}
        self.shapes: dict[str, RecordShape] = {}

    def record(self, kind: type[object]) -> dict[str, Json]:
        name = self._name(kind)
        fill: set[str] = set()
        drop: set[str] = set()
        fields: list[Json] = []
        for each in sorted(_fields(kind), key=lambda each: each.name):
            if _NAME.fullmatch(each.name) is None:
                raise InvalidArgument(
                    f"Avro has no field named {each.name!r}; "
                    f"name the field of {kind.__name__} with letters, digits and underscores."
                )
            try:
                built, optional = self._field(each)
            except InvalidArgument as error:
                raise InvalidArgument(f"{kind.__name__}.{each.name}: {error}") from None
            fields.append(built)
            nullable = isinstance(built["type"], list) and "null" in built["type"]
            if nullable and each.default is _NoDefault.MISSING:
                fill.add(each.name)
            elif nullable and not optional:
                drop.add(each.name)
        self.shapes[name] = RecordShape(frozenset(fill), frozenset(drop))
        return {"type": "record", "name": name, "fields": fields}

    def _field(self, each: _Field) -> tuple[dict[str, Json], bool]:
        inner, optional = _without_none(each.hint)
        node = self.node(inner)
        branches = node if isinstance(node, list) else [node]
        bare = all(_is_number(branch) for branch in branches)
        nullable = optional or (self._always_allow_null and not bare)
        default = _avro_default(each.default, node)
        if isinstance(default, _NoDefault):
            if not nullable:
                return {"name": each.name, "type": node}, optional
            return {"name": each.name, "type": ["null", *branches], "default": None}, optional
        # The default of a union must have the type of its first branch.
        if default is None:
            node = ["null", *branches]
        elif nullable:
            node = [*branches, "null"]
        return {"name": each.name, "type": node, "default": default}, optional

    def node(self, hint: object) -> Json:
        """The Avro type of a Python type."""
        origin = typing.get_origin(hint)
        node: Json = None
        if origin is Annotated:
            extras = [each for each in hint.__metadata__ if isinstance(each, AvroType)]  # type: ignore[attr-defined]
            node = extras[0].definition if extras else self.node(typing.get_args(hint)[0])
        elif origin is Literal:
            node = self._union(type(value) for value in typing.get_args(hint))
        elif origin in (typing.Union, types.UnionType):
            node = self._union(typing.get_args(hint))
        elif isinstance(hint, NewType):
            node = self.node(hint.__supertype__)
        elif isinstance(origin, type):
            node = self._container(origin, typing.get_args(hint), hint)
        elif isinstance(hint, type):
            node = self._named_or_simple(hint)
        if node is None:
            raise _unknown(hint)
        return node

    def _union(self, hints: "Iterator[object] | Collection[object]") -> Json:
        nodes: list[Json] = []
        for hint in hints:
            node = "null" if hint is type(None) else self.node(hint)
            if node not in nodes:
                nodes.append(node)
        if len(nodes) == 1:
            return nodes[0]
        if not all(isinstance(node, str) and node in _UNIONS for node in nodes):
            raise InvalidArgument(
                "only texts and numbers may be one or the other; use one type, or give avro_of "
                "the text of a definition."
            )
        return nodes

    def _container(self, origin: type, arguments: tuple[object, ...], hint: object) -> Json:
        if issubclass(origin, _ARRAYS) or origin in _ABSTRACT_ARRAYS:
            items = [item for item in arguments if item is not Ellipsis]
            if not items or any(item != items[0] for item in items):
                raise _unknown(hint)
            return {"type": "array", "items": self.node(items[0])}
        if issubclass(origin, Mapping):
            if len(arguments) != 2 or arguments[0] is not str:
                raise _unknown(hint)
            return {"type": "map", "values": self.node(arguments[1])}
        if is_record_type(origin):
            raise InvalidArgument("a generic type needs a pydantic model; use one.")
        raise _unknown(hint)

    def _named_or_simple(self, kind: type[object]) -> Json:
        if is_record_type(kind):
            name = _record_name(kind)
            return name if self._seen.get(name) is kind else self.record(kind)
        if issubclass(kind, enum.Enum):
            return self._enum(kind)
        for base in kind.__mro__:
            if base in _SIMPLE:
                return _SIMPLE[base]
        raise _unknown(kind)

    def _enum(self, kind: type[enum.Enum]) -> Json:
        values = [member.value for member in kind]
        if all(isinstance(value, str) and _NAME.fullmatch(value) for value in values):
            if self._seen.get(kind.__name__) is kind:
                return kind.__name__
            return {"type": "enum", "name": self._name(kind), "symbols": values}
        return self._union({type(value): None for value in values})

    def _name(self, kind: type[object]) -> str:
        name = _record_name(kind)
        if self._seen.setdefault(name, kind) is not kind:
            raise InvalidArgument(
                f"Two types of one definition are named {name}; give one of them another name."
            )
        return name


_ABSTRACT_ARRAYS: Final = frozenset(
    typing.get_origin(hint)
    for hint in (
        typing.Sequence[int],
        typing.Collection[int],
        typing.Iterable[int],
        typing.AbstractSet[int],
    )
)


def _record_name(kind: type[object]) -> str:
    return re.sub(r"[^A-Za-z0-9_]+", "_", kind.__name__).strip("_")


def _is_number(node: Json) -> bool:
    """Whether it is a primitive in Java, which cannot be null."""
    if isinstance(node, dict) and "logicalType" not in node:
        node = node.get("type")
    return isinstance(node, str) and node in _NUMBERS


def _unknown(hint: object) -> InvalidArgument:
    return InvalidArgument(
        f"Avro has no type for {hint!r}; use another one, or say which by "
        "Annotated[..., AvroType(...)]."
    )


def _without_none(hint: object) -> tuple[object, bool]:
    """The type without None, and whether it had it."""
    if typing.get_origin(hint) is Annotated:
        inner, optional = _without_none(typing.get_args(hint)[0])
        if not optional:
            return hint, False
        return Annotated.__class_getitem__((inner, *hint.__metadata__)), True  # type: ignore[attr-defined]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arguments = typing.get_args(hint)
        others = tuple(each for each in arguments if each is not type(None))
        if others and len(others) < len(arguments):
            return typing.Union[others], True  # noqa: UP007  (of a tuple)
    return hint, False


def _fields(kind: type[object]) -> Iterator[_Field]:
    if issubclass(kind, pydantic.BaseModel):
        yield from _model_fields(kind)
        return
    try:
        hints = typing.get_type_hints(kind, include_extras=True)
    except NameError as error:
        raise InvalidArgument(
            f"The types of {kind.__name__} cannot be resolved ({error}); "
            "define them at the top of a module."
        ) from error
    if dataclasses.is_dataclass(kind):
        for each in dataclasses.fields(kind):
            default: object = _NoDefault.MISSING
            if each.default is not dataclasses.MISSING:
                default = each.default
            elif each.default_factory is not dataclasses.MISSING:
                default = _empty(each.default_factory)
            yield _Field(each.name, hints[each.name], default)
        return
    required = kind.__required_keys__  # type: ignore[attr-defined]
    for name, hint in hints.items():
        if typing.get_origin(hint) in (typing.Required, typing.NotRequired):
            hint = typing.get_args(hint)[0]
        missing = _NoDefault.MISSING if name in required else _NoDefault.UNKNOWN
        yield _Field(name, hint, missing)


def _model_fields(kind: type[pydantic.BaseModel]) -> Iterator[_Field]:
    for name, info in kind.model_fields.items():
        hint: object = info.annotation
        for extra in info.metadata:
            if isinstance(extra, AvroType):
                hint = Annotated[hint, extra]
        default: object = _NoDefault.MISSING
        if info.default_factory is not None:
            default = _empty(info.default_factory)
        elif not info.is_required():
            default = info.default
        yield _Field(info.serialization_alias or name, hint, default)


def _empty(factory: object) -> object:
    """The default of a factory, if that always makes an empty container."""
    if factory in (list, dict, set, frozenset, tuple):
        return factory()
    return _NoDefault.UNKNOWN


def _avro_default(value: object, node: Json) -> "Json | _NoDefault":
    """The default in the definition for the default of a field."""
    if value is None or isinstance(value, _NoDefault):
        return value
    if isinstance(value, enum.Enum):
        value = value.value
    kind = node["type"] if isinstance(node, dict) else node
    if isinstance(node, dict) and ("logicalType" in node or "java-class" in node):
        kind = None
    default: Json | _NoDefault = _NoDefault.UNKNOWN
    if kind in ("float", "double") and isinstance(value, int | float):
        default = float(value)
    elif kind == "boolean" and isinstance(value, bool):
        default = value
    elif kind in ("int", "long") and isinstance(value, int) and not isinstance(value, bool):
        default = int(value)
    elif kind in ("string", "enum") and isinstance(value, str):
        default = str(value)
    elif kind == "bytes" and isinstance(value, bytes):
        default = value.decode("latin-1")
    elif kind == "array" and isinstance(value, Collection) and not value:
        default = []
    elif kind == "map" and isinstance(value, Mapping) and not value:
        default = {}
    return default
