"""What stream and batch readers share: from a task to the rows of its ranges.

Rules: Spark makes readers on the driver and pickles them for the tasks, which know only that and
their `ReadTask`.  Nothing is connected before something is asked.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StringType, StructField, StructType

import magnetar
from magnetar.errors import TopicNotFound
from magnetar.schema.schema import Schema
from magnetar.schema.schema_reader import SchemaReader
from pipeline.columns import BASE_SCHEMA, CORRUPT, DATA, arrow_schema, check_schema, record_batch
from pipeline.connecting import connected
from pipeline.decode import Definition, PlainWriters, ValueDecoder, definition_of
from pipeline.errors import InvalidOption
from pipeline.segment_rows import SegmentRows
from pipeline.source_options import Decoding, SourceOptions
from pipeline.tasks import SegmentRange
from pipeline.topic_reading import TopicReading
from protocol import pulsar_pb2 as pb

__all__ = ["ReadTask", "Source", "definition_for", "schema_with"]


@dataclass(frozen=True)
class ReadTask(InputPartition):
    """Ranges that one task reads, one after the other; none: a batch without rows."""

    ranges: tuple[SegmentRange, ...]


def definition_for(options: SourceOptions) -> Definition | None:
    """How values are decoded; asks the broker unless the options say it.

    Raises `InvalidOption`, and what a request may raise.
    """
    if options.decoding is Decoding.NONE:
        return None
    if options.definition is not None:
        return Definition(options.decoding, options.definition)

    async def newest(client: magnetar.Client) -> pb.Schema:
        return await SchemaReader(client.context, options.topic).newest()

    try:
        schema = connected(options.connection).run(newest)
    except TopicNotFound as error:
        raise InvalidOption(
            f"The topic {options.topic} has no schema to decode by; give its Avro definition as "
            "the option decodeSchema."
        ) from error
    return definition_of(options.decoding, schema, options.topic)


def schema_with(options: SourceOptions, definition: Definition | None) -> StructType:
    """Every column that there is."""
    if definition is None:
        return BASE_SCHEMA
    added = [StructField(DATA, definition.form.kind)]
    if options.corrupt_column:
        added.append(StructField(CORRUPT, StringType()))
    return StructType([*BASE_SCHEMA.fields, *added])


class Source:
    """Of one topic.  See the module's rules."""

    def __init__(
        self, options: SourceOptions, definition: Definition | None, declared: StructType
    ) -> None:
        """Raises `InvalidOption` for columns that are not there."""
        check_schema(declared, schema_with(options, definition))
        self.options = options
        self.reading = TopicReading(options.connection, options.topic)
        self._definition = definition
        self._declared = declared

    def rows(self, task: ReadTask) -> Iterator[pa.RecordBatch]:
        """The rows of a task, in order.  Raises `DataLost`, `InvalidMessage`, what reading does."""
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
        """What makes the columns that come of values, if one of them is in the schema."""
        definition = self._definition
        if definition is None or not {DATA, CORRUPT} & set(schema.names):
            return None
        whole = arrow_schema(schema_with(self.options, definition))
        kind = (schema if DATA in schema.names else whole).field(DATA).type
        if definition.decoding is not Decoding.AVRO:
            return ValueDecoder(definition, kind, fail=not self.options.corrupt_column)
        client = connected(self.options.connection)

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
