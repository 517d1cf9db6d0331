"""The versions that another cluster gives to the schemas of messages."""

from pathlib import Path

import pytest

from broker.replication.remote_schemas import RemoteSchemas
from broker.topics.schemas import SchemaNotFound
from magnetar.protocol.pulsar_pb2 import Schema
from tests.support.embedded_broker import running


class NoTaker:
    """Another cluster that is not to be asked."""

    async def schema_version(self, schema: Schema) -> bytes:
        raise AssertionError("there is no such schema")


@pytest.mark.parametrize("version", [b"\0" * 9, b"\1" * 7, b"\1" * 5000])
async def test_bytes_of_a_message_that_are_no_version_are_unknown(
    tmp_path: Path, version: bytes
) -> None:
    async with running(tmp_path) as broker:
        schemas = RemoteSchemas(broker.schemas, "public/default/t")
        with pytest.raises(SchemaNotFound, match="8 bytes"):
            await schemas.learn(version, NoTaker())
