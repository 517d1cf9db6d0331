"""The common part of stream and batch readers: from a task to the rows of its ranges.

Spark makes readers on the driver and pickles them for the tasks.  A task knows only its reader and
its `ReadTask`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StringType, StructField, StructType

import magnetar
from magnetar.errors import TopicNotFound
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.schema.schema import Schema
from magnetar.schema.schema_reader import SchemaReader
from magnetar.spark.columns import (
    BASE_SCHEMA,
    CORRUPT,
    DATA,
    arrow_schema,
    check_schema,
    record_batch,
)
from magnetar.spark.connecting import process_client
from magnetar.spark.decode import Definition, PlainWriters, ValueDecoder, definition_of
from magnetar.spark.errors import InvalidOption
from magnetar.spark.segment_rows import SegmentRows
from magnetar.spark.source_options import Decoding, SourceOptions
from magnetar.spark.tasks import SegmentRange
from magnetar.spark.topic_reading import TopicReading

__all__ = ["ReadTask", "Source", "definition_for", "schema_with"]


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """The ranges that one task reads, one after the other; without any, the task has no rows."""

    ranges: tuple[SegmentRange, ...]


def definition_for(options: SourceOptions) -> Definition | None:
    """How the values are decoded; asks the broker unless the options say it.

    Raises `InvalidOption`, and what a request may raise.
    """
    if options.decoding is Decoding.NONE:
        return None
    if options.definition is not None:
        return Definition(options.decoding, options.definition)

    async def newest(client: magnetar.Client) -> pb.Schema:
        return await SchemaReader(client.context, options.topic).newest()

    try:
        schema = process_client(options.connection).run(newest)
    except TopicNotFound as error:
        raise InvalidOption(
            f"The topic {options.topic} has no schema to decode by; give its Avro definition as "
            "the option decodeSchema."
        ) from error
    return definition_of(options.decoding, schema, options.topic)


def schema_with(options: SourceOptions, definition: Definition | None) -> StructType:
    """The columns of the source, those of decoded values included."""
    if definition is None:
        return BASE_SCHEMA
    added = [StructField(DATA, definition.form.kind)]
    if options.corrupt_column:
        added.append(StructField(CORRUPT, StringType()))
    return StructType([*BASE_SCHEMA.fields, *added])


class Source:
    """One topic as a source of rows, made on the driver and pickled for tasks.

    It connects when rows, the layout or a plan are first asked for, by the client of that process.
    """

    def __init__(
        self, options: SourceOptions, definition: Definition | None, declared: StructType
    ) -> None:
        """`declared` names the columns to read.  Raises `InvalidOption` for an unknown one."""
        check_schema(declared, schema_with(options, definition))
        self.options = options
        self.reading = TopicReading(options.connection, options.topic)
        self._definition = definition
        self._declared = declared

    def rows(self, task: ReadTask) -> Iterator[pa.RecordBatch]:
        """Read the rows of a task, in order.

        Raises `DataLost`, `InvalidMessage`, and what the client raises.
        """
        schema = arrow_schema(self._declared)
        values = self.decoder(schema)
        for each in task.ranges:
            rows = SegmentRows(
                self.reading,
                each,
                skip_damaged=not self.options.fail_on_damage,
                skip_lost=not self.options.fail_on_data_loss,
            )
            for columns in rows:
                yield record_batch(columns, each.segment_id, schema, values)

    def decoder(self, schema: pa.Schema) -> ValueDecoder | None:
        """Make the decoder of values; None if `schema` has no decoded column."""
        definition = self._definition
        if definition is None or not {DATA, CORRUPT} & set(schema.names):
            return None
        whole = arrow_schema(schema_with(self.options, definition))
        kind = (schema if DATA in schema.names else whole).field(DATA).type
        if definition.decoding is not Decoding.AVRO:
            return ValueDecoder(definition, kind, fail=not self.options.corrupt_column)
        client = process_client(self.options.connection)

        async def made(core: magnetar.Client) -> Schema[dict[str, object]]:
            writers = SchemaReader(core.context, self.options.topic)
            return definition.avro().of_topic(PlainWriters(writers))

        avro = client.run(made)

        def learn(version: bytes) -> None:
            async def learned(_: magnetar.Client) -> None:
                await avro.learn(version)

            client.run(learned)

        return ValueDecoder(
            definition, kind, avro=avro, learn=learn, fail=not self.options.corrupt_column
        )
