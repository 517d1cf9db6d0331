"""Avro definitions as types of Spark, and the conversion of their values.  Pure.

| Avro | Spark |
|---|---|
| boolean, int, long, float, double | boolean, int, bigint, float, double |
| string, enum, uuid | string |
| bytes, fixed | binary |
| date | date |
| timestamp-millis, -micros | timestamp |
| local-timestamp-millis, -micros | timestamp_ntz |
| decimal, of 38 digits at most | decimal |
| time-millis, time-micros | int, bigint: since midnight |
| record, array, map | struct, array, map |
| null and one other | that one, nullable |
| int and long; float and double; with null or not | bigint; double |

Every type is nullable, as Spark makes of all that it reads.  Other unions, and records that contain
themselves, raise `InvalidOption`.
"""

import datetime
import decimal
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from magnetar.spark.errors import InvalidOption

__all__ = ["Form", "Json", "form_of", "plain"]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Fit = Callable[[object], object]

MAX_DIGITS: Final = 38
"""The most digits of a decimal of Spark."""
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_US: Final = datetime.timedelta(microseconds=1)
_LONG: Final = 2**63
_INT: Final = 2**31


@dataclass(frozen=True, slots=True)
class Form:
    """A type of Spark, and the functions that make decoded values fit for Arrow.

    `of_avro` is None if values of Avro fit as they are.  `of_json` takes the JSON of Java and
    Python: bytes in base64, moments as numbers or in ISO 8601.  The functions raise `ValueError` or
    `TypeError` for a value that does not fit.
    """

    kind: DataType
    of_avro: Fit | None
    of_json: Fit


def plain(tree: Json) -> Json:
    """A definition without its logical types, except decimals."""
    # fastavro reads plain numbers faster than dates and times.
    if isinstance(tree, list):
        return [plain(each) for each in tree]
    if not isinstance(tree, dict):
        return tree
    drop = tree.get("logicalType") != "decimal"
    return {
        name: plain(each) if name in ("type", "items", "values", "fields") else each
        for name, each in tree.items()
        if not (drop and name == "logicalType")
    }


def form_of(tree: Json) -> Form:
    """The form of a definition, whose outermost type is a record.  Raises `InvalidOption`."""
    form = _Builder().node(tree)
    if not isinstance(form.kind, StructType):
        raise _refused("its outermost type is not a record")
    return form


class _Builder:
    """Walks one definition."""

    def __init__(self) -> None:
        self._named: dict[str, Form | None] = {}
        """Forms by name; None while the fields of that record are being read."""

    def node(self, tree: Json) -> Form:
        if isinstance(tree, list):
            return self._union(tree)
        if isinstance(tree, str):
            return self._name(tree)
        if isinstance(tree, dict):
            return self._complex(tree)
        raise _refused(f"{tree!r} is no type")

    def _complex(self, tree: Mapping[str, Json]) -> Form:
        kind = tree.get("type")
        if kind in ("record", "error"):
            return self._record(tree)
        if kind == "array":
            return _array(self.node(tree.get("items")))
        if kind == "map":
            return _map(self.node(tree.get("values")))
        if kind in ("enum", "fixed"):
            form = _logical(tree) or (_STRING if kind == "enum" else _BYTES)
            return self._known(tree, form)
        return _logical(tree) or self.node(kind)

    def _name(self, name: str) -> Form:
        if name in _PRIMITIVES:
            return _PRIMITIVES[name]
        short = name.rpartition(".")[2]
        if short not in self._named:
            raise _refused(f"there is no type {name}")
        found = self._named[short]
        if found is None:
            raise _refused(f"the record {name} contains itself")
        return found

    def _known(self, tree: Mapping[str, Json], form: Form) -> Form:
        self._named[str(tree.get("name")).rpartition(".")[2]] = form
        return form

    def _union(self, branches: list[Json]) -> Form:
        forms = [self.node(each) for each in branches if each != "null"]
        if not forms:
            return _NULL
        if len(forms) == 1:
            return forms[0]
        kinds = {type(form.kind) for form in forms}
        if kinds == {IntegerType, LongType}:
            return _PRIMITIVES["long"]
        if kinds == {FloatType, DoubleType}:
            return _PRIMITIVES["double"]
        raise _refused(f"a union of {len(forms)} types beside null")

    def _record(self, tree: Mapping[str, Json]) -> Form:
        name = str(tree.get("name")).rpartition(".")[2]
        self._named[name] = None
        listed = tree.get("fields")
        given = listed if isinstance(listed, list) else []
        fields = [each for each in given if isinstance(each, dict)]
        form = _struct([(str(each.get("name")), self.node(each.get("type"))) for each in fields])
        self._named[name] = form
        return form


def _refused(why: str) -> InvalidOption:
    return InvalidOption(
        f"The topic's schema has no type in Spark: {why}. Leave the option decode out, and decode "
        "the column value yourself."
    )


def _struct(fields: list[tuple[str, Form]]) -> Form:
    changed = [(name, form.of_avro) for name, form in fields if form.of_avro is not None]

    def of_avro(value: object) -> object:
        given = dict(_mapping(value))
        for name, fit in changed:
            inner = given.get(name)
            if inner is not None:
                given[name] = fit(inner)
        return given

    def of_json(value: object) -> object:
        given = _mapping(value)
        return {name: form.of_json(given.get(name)) for name, form in fields}

    kind = StructType([StructField(name, form.kind) for name, form in fields])
    return Form(kind, of_avro if changed else None, _nullable(of_json))


def _array(item: Form) -> Form:
    fit = item.of_avro

    def of_avro(value: object) -> object:
        assert fit is not None
        return [None if each is None else fit(each) for each in _list(value)]

    def of_json(value: object) -> object:
        return [item.of_json(each) for each in _list(value)]

    return Form(ArrayType(item.kind), of_avro if fit else None, _nullable(of_json))


def _map(item: Form) -> Form:
    fit = item.of_avro

    def of_avro(value: object) -> object:
        assert fit is not None
        pairs = _mapping(value).items()
        return [(key, None if each is None else fit(each)) for key, each in pairs]

    def of_json(value: object) -> object:
        return [(key, item.of_json(each)) for key, each in _mapping(value).items()]

    kind = MapType(StringType(), item.kind)
    return Form(kind, of_avro if fit else _pairs, _nullable(of_json))


def _pairs(value: object) -> object:
    return list(_mapping(value).items())


def _nullable(fit: Fit) -> Fit:
    return lambda value: None if value is None else fit(value)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} instead of a record or map")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{type(value).__name__} instead of an array")
    return value


def _whole(limit: int) -> Fit:
    def fit(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not -limit <= value < limit:
            raise TypeError(f"{value!r:.50} instead of a whole number")
        return value

    return fit


_long: Final = _whole(_LONG)


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.50} instead of a number")
    return float(value)


def _text(value: object) -> object:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.50} instead of a text")
    return value


def _json_text(value: object) -> object:
    # Java writes a text that is a big decimal as a number.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else _text(value)


def _truth(value: object) -> object:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.50} instead of true or false")
    return value


def _from_base64(value: object) -> object:
    return b64decode(str(_text(value)), validate=True)


def _simple(kind: DataType, of_json: Fit, of_avro: Fit | None = None) -> Form:
    return Form(kind, of_avro, _nullable(of_json))


def _none(_: object) -> object:
    return None


_STRING: Final = _simple(StringType(), _json_text)
_BYTES: Final = _simple(BinaryType(), _from_base64)
_NULL: Final = Form(StringType(), _none, _none)
_PRIMITIVES: Final[Mapping[str, Form]] = MappingProxyType(
    {
        "null": _NULL,
        "boolean": _simple(BooleanType(), _truth),
        "int": _simple(IntegerType(), _whole(_INT)),
        "long": _simple(LongType(), _long),
        "float": _simple(FloatType(), _number),
        "double": _simple(DoubleType(), _number),
        "string": _STRING,
        "bytes": _BYTES,
    }
)


def _moment(unit_us: int) -> Form:
    def of_avro(value: object) -> object:
        micros = int(str(_long(value))) * unit_us
        return _long(micros)

    def of_json(value: object) -> object:
        if isinstance(value, str):
            moment = datetime.datetime.fromisoformat(value)
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=datetime.UTC)
            return (moment - _EPOCH) // _US
        return of_avro(value)

    return _simple(TimestampType(), of_json, of_avro)


def _local(form: Form) -> Form:
    return Form(TimestampNTZType(), form.of_avro, form.of_json)


def _date_of_json(value: object) -> object:
    if isinstance(value, str):
        return (datetime.date.fromisoformat(value) - _EPOCH.date()).days
    return _whole(_INT)(value)


def _decimal(tree: Mapping[str, Json]) -> Form:
    digits, scale = tree.get("precision"), tree.get("scale", 0)
    if not isinstance(digits, int) or not isinstance(scale, int) or not 0 <= scale <= digits:
        raise _refused(f"a decimal of precision {digits!r} and scale {scale!r}")
    if digits > MAX_DIGITS:
        raise _refused(f"a decimal of {digits} digits")

    def of_json(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float | str | decimal.Decimal):
            raise TypeError(f"{value!r:.50} instead of a decimal number")
        try:
            return decimal.Decimal(str(value)).quantize(unit, context=wide)
        except decimal.InvalidOperation as error:
            raise ValueError(f"{value!r:.50} has too many digits") from error

    unit, wide = decimal.Decimal(1).scaleb(-scale), decimal.Context(prec=MAX_DIGITS)
    return _simple(DecimalType(digits, scale), of_json)


_MILLIS: Final = _moment(1000)
_MICROS: Final = _moment(1)
_LOGICAL: Final[Mapping[tuple[str, str], Form]] = MappingProxyType(
    {
        ("long", "timestamp-millis"): _MILLIS,
        ("long", "timestamp-micros"): _MICROS,
        ("long", "local-timestamp-millis"): _local(_MILLIS),
        ("long", "local-timestamp-micros"): _local(_MICROS),
        ("int", "date"): _simple(DateType(), _date_of_json),
    }
)


def _logical(tree: Mapping[str, Json]) -> Form | None:
    kind, logical = tree.get("type"), tree.get("logicalType")
    if logical == "decimal" and kind in ("bytes", "fixed"):
        return _decimal(tree)
    return _LOGICAL.get((str(kind), str(logical)))
