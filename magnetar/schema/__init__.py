"""Schemas, which encode values in the forms that brokers check and Java clients read."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from magnetar.schema.auto import AUTO
from magnetar.schema.choose import schema_for
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
from magnetar.schema.schema import Schema, WriterSchemas
from magnetar.schema.schema_reader import SchemaReader

if TYPE_CHECKING:
    from magnetar.schema.avro import avro_of
    from magnetar.schema.avro_definition import AvroType, Float32, Int32
    from magnetar.schema.json import json_of
    from magnetar.schema.protobuf import protobuf_of
else:
    # Most of a client's import time would be pydantic, fastavro and descriptors, so the modules
    # that need them are imported at their first use.
    _LATER = MappingProxyType(
        {
            "AvroType": "avro_definition",
            "Float32": "avro_definition",
            "Int32": "avro_definition",
            "avro_of": "avro",
            "json_of": "json",
            "protobuf_of": "protobuf",
        }
    )

    def __getattr__(name: str) -> object:
        module = _LATER.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{module}"), name)


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
