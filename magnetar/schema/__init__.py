"""Schemas: how values become messages, in the forms that brokers check and Java clients read."""

from magnetar.schema.auto import AUTO
from magnetar.schema.avro import avro_of
from magnetar.schema.avro_definition import AvroType, Float32, Int32
from magnetar.schema.choose import schema_for
from magnetar.schema.json import json_of
from magnetar.schema.plain import (
    BOOL,
    BYTES,
    DOUBLE,
    FLOAT,
    INT8,
    INT16,
    INT32,
    INT64,
    STRING,
)
from magnetar.schema.protobuf import protobuf_of
from magnetar.schema.schema import Schema, WriterSchemas
from magnetar.schema.schema_reader import SchemaReader

__all__ = [
    "AUTO",
    "BOOL",
    "BYTES",
    "DOUBLE",
    "FLOAT",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "STRING",
    "AvroType",
    "Float32",
    "Int32",
    "Schema",
    "SchemaReader",
    "WriterSchemas",
    "avro_of",
    "json_of",
    "protobuf_of",
    "schema_for",
]
