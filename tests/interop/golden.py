"""What the official Java client writes, kept as files that unit tests of the client read.

`python -m tests.interop.golden` makes `tests/unit/magnetar/golden/*.json` again (needs Java 17 and
Maven): schemas as they are registered and the bytes of values, entries as they are sent, message
ids and checkpoints with what the Java client itself reads out of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import uuid
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from google.protobuf.json_format import MessageToDict

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.message import parse_metadata
from tests.interop.java_client import JavaClient, JavaTransaction, told
from tests.interop.records import KINDS, as_told
from tests.interop.relay import Relay, relaying
from tests.java import stock_driver
from tests.java.stock_driver import StockDriver
from tests.support.broker_process import BrokerProcess, running
from tests.support.json_line_process import Facts

GOLDEN: Final = Path(__file__).resolve().parents[1] / "unit" / "magnetar" / "golden"
SOURCE: Final = (
    "the Java client 5.0.0-M1 wrote this; `python -m tests.interop.golden` makes it again"
)
COMPRESSIONS: Final = ("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY")
TEXT: Final = b"what is said again and again is said again; "
LONG: Final = TEXT * 120
"""The Java client compresses from 4 KiB on."""
CHUNKED: Final = TEXT * 3
SPLIT_SEGMENTS: Final = 2
GROWN: Final[list[object]] = [{"name": "p", "x": 1, "unit": "K"}]
SAMPLES: Final[Mapping[str, list[object]]] = {
    **{kind: [as_told(value) for value in values] for kind, (_, values) in KINDS.items()},
    "json_point_with_unit": GROWN,
    "avro_point_with_unit": GROWN,
    "json_oddments": [{"small": -3, "tiny": 3, "amount": 12.5}],
}


class Recorder:
    """A broker, the relay in front of it and a Java client behind that."""

    def __init__(self, broker: BrokerProcess, relay: Relay, java: JavaClient) -> None:
        self.broker = broker
        self.relay = relay
        self.java = java

    async def topic(self, segments: int = 1) -> str:
        """A fresh scalable topic."""
        name = f"golden-{uuid.uuid4().hex[:8]}"
        await self.broker.create_scalable(name, segments)
        return f"topic://public/default/{name}"

    # Schemas

    async def schemas(self) -> list[Facts]:
        return [await self._schema(kind, values) for kind, values in SAMPLES.items()]

    async def _schema(self, kind: str, values: Sequence[object]) -> Facts:
        facts = await self.java.schema(kind, values)
        topic = await self.topic()
        del self.relay.commands[:]
        producer = await self.java.producer(topic, kind)
        await producer.send(values[:1])  # nothing is said to the segment before that
        consumer = await self.java.queue(topic, "golden", kind)
        await producer.close()
        await consumer.close()
        registered = self._registered(pb.BaseCommand.PRODUCER)
        assert registered == self._registered(pb.BaseCommand.SUBSCRIBE)
        return {
            "kind": kind,
            "java_type": facts["info"]["type"],
            "registered": registered,
            "samples": [
                {"value": told(value), "bytes": encoded}
                for value, encoded in zip(values, facts["encoded"], strict=True)
            ],
        }

    def _registered(self, kind: pb.BaseCommand.Type) -> Facts | None:
        """The schema in the last such command, as on the wire."""
        command = next(c for c in reversed(self.relay.commands) if c.type == kind)
        asks: pb.CommandProducer | pb.CommandSubscribe = (
            command.producer if kind == pb.BaseCommand.PRODUCER else command.subscribe
        )
        if not asks.HasField("schema"):
            return None
        return {
            "name": asks.schema.name,
            "type": pb.Schema.Type.Name(asks.schema.type),
            "data": asks.schema.schema_data.decode(),
            "properties": {each.key: each.value for each in asks.schema.properties},
        }

    # Entries

    async def entries(self) -> list[Facts]:
        found: list[Facts] = []
        for compression in COMPRESSIONS:
            for batching in (False, True):
                found += await self._sent(
                    f"{compression}, {'batched' if batching else 'single'}",
                    compression=compression,
                    batching=batching,
                )
        found += await self._sent("chunks of 50 bytes", values=[CHUNKED], chunk_size=50)
        found += await self._sent("compressed, then in chunks", compression="ZLIB", chunk_size=50)
        transaction = await self.java.begin()
        found += await self._sent("in a transaction", values=[b"t"], transaction=transaction)
        await transaction.abort()
        found += await self._sent("of a json schema", schema="json_point", values=[{"x": 1}])
        return found

    async def _sent(
        self,
        what: str,
        *,
        values: list[object] | None = None,
        schema: str = "bytes",
        transaction: JavaTransaction | None = None,
        **how: object,
    ) -> list[Facts]:
        if values is None:
            values = [LONG, b"", b"\x00\x01\xff"] if how.get("batching") else [LONG]
        producer = await self.java.producer(await self.topic(), schema, **how)
        del self.relay.entries[:]
        await producer.send(
            values,
            keys=["key", "", "größer"],
            properties={"a": "1", "ü": ""},
            event_time_ms=1_700_000_000_123,
            transaction=transaction,
        )
        await producer.close()
        return [
            {
                "what": what,
                "values": [kept(value) for value in values],
                "metadata": readable(parse_metadata(entry)),
                "entry": b64encode(entry).decode(),
            }
            for entry in self.relay.entries
        ]

    # Positions

    async def message_ids(self) -> list[Facts]:
        found = [await self._id(word, word) for word in ("earliest", "latest")]
        topic = await self.topic(SPLIT_SEGMENTS)
        keys = [f"k{number}" for number in range(8)]
        single = await self.java.producer(topic)
        batched = await self.java.producer(topic, batching=True)
        chunked = await self.java.producer(topic, chunk_size=50)
        for what, producer in (("a single message", single), ("in a batch", batched)):
            ids = await producer.send([b"v"] * len(keys), keys=keys)
            found += [await self._id(f"of a send, {what}", told(one)) for one in ids[:3]]
        ids = await chunked.send([CHUNKED], keys=["k0"])
        found.append(await self._id("of a send, chunked", told(ids[0])))
        total = 2 * len(keys) + 1
        for kind, consumer in (
            ("queue", await self.java.queue(topic, "queue")),
            ("stream", await self.java.stream(topic, "stream")),
            ("checkpoint", await self.java.checkpoint_consumer(topic)),
        ):
            messages = await consumer.receive(total)
            for number in (0, len(messages) // 2, len(messages) - 1):
                one = messages[number]
                found.append(await self._id(f"received by a {kind} consumer", told(one.id)))
            await consumer.close()
        return found + await self._of_namespace()

    async def _of_namespace(self) -> list[Facts]:
        found: list[Facts] = []
        namespace = f"public/golden-{uuid.uuid4().hex[:8]}"
        await self.broker.rest("PUT", f"/namespaces/{namespace}", body={})
        for number in range(2):
            path = f"/scalable/{namespace}/topic-{number}"
            await self.broker.rest("PUT", path, numInitialSegments=SPLIT_SEGMENTS)
            producer = await self.java.producer(f"topic://{namespace}/topic-{number}")
            await producer.send([b"v"] * 4, keys=[f"k{key}" for key in range(4)])
            await producer.close()
        for kind in ("queue", "stream"):
            consumer = await self.java.of_namespace(kind, namespace, kind)
            messages = await consumer.receive(8)
            for one in (messages[0], messages[-1]):
                what = f"received by a {kind} consumer of a namespace"
                found.append(await self._id(what, told(one.id)))
            await consumer.close()
        return found

    async def _id(self, what: str, id_text: object) -> Facts:
        facts = await self.java.order("explain", id=id_text)
        return {"what": what, "bytes": facts["bytes"], "meaning": facts["meaning"]}

    async def checkpoints(self) -> list[Facts]:
        found = [await self._checkpoint(word, word) for word in ("earliest", "latest")]
        topic = await self.topic(SPLIT_SEGMENTS)
        consumer = await self.java.checkpoint_consumer(topic)
        found.append(await self._checkpoint("nothing received", told(await consumer.checkpoint())))
        producer = await self.java.producer(topic, batching=True)
        for count, what in ((1, "one segment"), (8, "two segments")):
            await producer.send([b"v"] * count, keys=[f"k{number}" for number in range(count)])
            assert len(await consumer.receive(count)) == count
            found.append(await self._checkpoint(what, told(await consumer.checkpoint())))
        return found

    async def _checkpoint(self, what: str, checkpoint_text: object) -> Facts:
        facts = await self.java.order("explain", checkpoint=checkpoint_text)
        return {"what": what, "bytes": facts["bytes"], "meaning": facts["meaning"]}


def kept(value: object) -> object:
    """A value as the file has it."""
    if value in (LONG, CHUNKED):
        return {"times": len(value) // len(TEXT), "of": told(TEXT)}
    return told(value)


def readable(metadata: pb.MessageMetadata) -> Facts:
    """Metadata by the names of its fields."""
    return MessageToDict(metadata, preserving_proto_field_name=True)


async def record(driver: StockDriver) -> Mapping[str, list[Facts]]:
    """What goes into each file."""
    with tempfile.TemporaryDirectory() as directory:
        async with running(Path(directory)) as broker, relaying(broker.port) as relay:
            admin_url = f"http://127.0.0.1:{broker.http_port}"
            java = await asyncio.to_thread(JavaClient.start, driver, relay.url, admin_url)
            recorder = Recorder(broker, relay, java)
            files = {
                "schemas": await recorder.schemas(),
                "entries": await recorder.entries(),
                "message_ids": await recorder.message_ids(),
                "checkpoints": await recorder.checkpoints(),
            }
            await asyncio.to_thread(java.end)
            return files


def main() -> int:
    stock_driver.build()
    driver = StockDriver()
    try:
        files = asyncio.run(record(driver))
    finally:
        driver.close()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, items in files.items():
        path = GOLDEN / f"{name}.json"
        text = json.dumps({"source": SOURCE, "items": items}, indent=1, ensure_ascii=False)
        path.write_text(text + "\n", "utf-8")
        print(f"{path}: {len(items)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
