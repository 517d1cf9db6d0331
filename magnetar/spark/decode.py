"""Values of a topic's schema as the column `data`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import pyarrow as pa

from magnetar.errors import InvalidMessage
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.reads.messages import MessageColumns
from magnetar.schema.schema import Schema, WriterSchemas
from magnetar.spark.avro_types import Form, Json, form_of, plain
from magnetar.spark.columns import CORRUPT, DATA
from magnetar.spark.errors import InvalidOption
from magnetar.spark.source_options import Decoding

__all__ = ["Definition", "PlainWriters", "ValueDecoder", "definition_of"]

_TYPES: Final[Mapping[Decoding, int]] = MappingProxyType(
    {Decoding.AVRO: pb.Schema.Type.Avro, Decoding.JSON: pb.Schema.Type.Json}
)
_NO_FIT: Final = (ValueError, TypeError, ArithmeticError, RecursionError, pa.ArrowException)

_Row = Callable[[bytes, bytes | None], object]
"""Turns a value and the version of its schema into an object for Arrow."""


@dataclass(frozen=True, slots=True)
class Definition:
    """How the values of a query are decoded; `text` is an Avro definition, also for JSON.

    The driver fixes it when the query starts, from the topic's newest schema or the option
    `decodeSchema`.
    """

    decoding: Decoding
    text: str

    @property
    def tree(self) -> Json:
        """The definition.  Raises `InvalidOption` if it is no JSON."""
        try:
            tree: Json = json.loads(self.text)
        except ValueError as error:
            raise InvalidOption(f"The Avro definition is no JSON ({error}); mend it.") from error
        return tree

    @property
    def form(self) -> Form:
        """The type of the values in Spark, and their conversion to it.  Raises `InvalidOption`."""
        return form_of(self.tree)

    def avro(self) -> Schema[dict[str, object]]:
        """The Avro reader, which leaves numbers of logical types as numbers.  Needs fastavro."""
        from magnetar.schema.avro import avro_of

        return avro_of(json.dumps(plain(self.tree)))


def definition_of(decoding: Decoding, schema: pb.Schema, topic: str) -> Definition:
    """The definition of a topic's schema.  Raises `InvalidOption` for a schema of another type."""
    if schema.type != _TYPES[decoding]:
        known = pb.Schema.Type.Name(schema.type)
        raise InvalidOption(
            f"The schema of {topic} is {known}; the option decode has to be avro or json as that "
            "is. For values of which the broker knows no schema, give decodeSchema as well."
        )
    return Definition(decoding, schema.schema_data.decode())


class PlainWriters:
    """Writers' schemas without logical types, as the reader's is: a `WriterSchemas`."""

    def __init__(self, writers: WriterSchemas) -> None:
        self._writers = writers

    async def of_version(self, version: bytes) -> pb.Schema:
        """See `WriterSchemas.of_version`."""
        schema = await self._writers.of_version(version)
        found = pb.Schema()
        found.CopyFrom(schema)
        try:
            found.schema_data = json.dumps(plain(json.loads(schema.schema_data))).encode()
        except ValueError:
            pass  # It is no definition: the Avro reader reports that.
        return found


class ValueDecoder:
    """Makes the columns `data` and `_corrupt`.

    An Avro value is read by the schema of its version and resolved to the definition by Avro's
    rules; without a version it is read by the definition.  JSON needs no version.  A value that
    cannot be read or resolved fails the task, or is null with the reason in `_corrupt`.  `data` of
    a message without a value is null.

    `learn` is called with each version of a schema before values of it are read.
    """

    def __init__(
        self,
        definition: Definition,
        kind: pa.DataType,
        *,
        avro: Schema[dict[str, object]] | None = None,
        learn: Callable[[bytes], None] = lambda _: None,
        fail: bool = True,
    ) -> None:
        """`kind` is the Arrow type of `data`; `avro` reads the Avro values of a topic."""
        form = definition.form
        self._kind = kind
        self._learn = learn
        self._fail = fail
        self._read: _Row
        if definition.decoding is Decoding.JSON:
            self._read = _json_row(form)
        else:
            self._read = _avro_row(form, avro or definition.avro())

    def __call__(self, columns: MessageColumns) -> Mapping[str, pa.Array]:
        """Decode the values of rows.  Raises `InvalidMessage`, unless `_corrupt` has the error."""
        for version in {run.schema_version for run in columns.runs} - {None, b""}:
            assert version is not None
            self._learn(version)
        rows: list[object] = []
        reasons: list[str | None] = []
        versions = (run.schema_version for run in columns.runs for _ in range(run.messages))
        for value, version in zip(columns.values, versions, strict=True):
            row, reason = None, None
            if value is not None:
                try:
                    row = self._read(value, version)
                except InvalidMessage as error:
                    row, reason = None, self._corrupt(str(error))
                except _NO_FIT as error:
                    row, reason = None, self._corrupt(f"It is none of its schema: {error}")
            rows.append(row)
            reasons.append(reason)
        try:
            data = pa.array(rows, self._kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            data = self._one_by_one(rows, reasons)
        return {DATA: data, CORRUPT: pa.array(reasons, pa.string())}

    def _one_by_one(self, rows: list[object], reasons: list[str | None]) -> pa.Array:
        """Convert row by row; a row that does not fit its type becomes null."""
        for number, row in enumerate(rows):
            try:
                pa.array([row], self._kind)
            except _NO_FIT as error:
                rows[number] = None
                reasons[number] = self._corrupt(f"It does not fit its type: {error}")
        return pa.array(rows, self._kind)

    def _corrupt(self, reason: str) -> str:
        if self._fail:
            raise InvalidMessage(
                f"A value cannot be decoded: {reason} To go on without such values, set the option "
                f"onCorrupt to column, which has the reason in {CORRUPT}."
            )
        return reason


def _avro_row(form: Form, avro: Schema[dict[str, object]]) -> _Row:
    fit = form.of_avro
    if fit is None:
        return avro.decode
    return lambda value, version: fit(avro.decode(value, version))


def _json_row(form: Form) -> _Row:
    fit = form.of_json
    return lambda value, _: fit(json.loads(value))
