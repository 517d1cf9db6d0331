"""The same rows, read as other connectors' tasks do it, with our client beneath.

Rules: a task has one segment and reads it from its beginning without a cursor, as a reader does,
and yields tuples.  `message` waits for each message by itself; `poll` takes as many as there are,
up to `POLLED`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import magnetar.sync

FORMAT: Final = "bench-readers"
POLLED: Final = 1000
PATIENCE_S: Final = 60
Row = tuple[str | None, bytes]


@dataclass(frozen=True)
class Share(InputPartition):
    """One segment, and how many messages it has."""

    topic: str
    messages: int


class Reader(DataSourceReader):
    """`shape` is `message` or `poll`; `shares` is what `Share`s there are."""

    def __init__(self, url: str, shape: str, shares: Sequence[Share]) -> None:
        self._url, self._shape, self._shares = url, shape, shares

    def partitions(self) -> Sequence[InputPartition]:
        return self._shares

    def read(self, partition: InputPartition) -> Iterator[Row]:
        assert isinstance(partition, Share)
        with (
            magnetar.sync.connect(self._url) as client,
            client.checkpoint_consumer(partition.topic) as consumer,
        ):
            taken = 0
            while taken < partition.messages:
                if self._shape == "message":
                    messages = [consumer.receive(timeout_s=PATIENCE_S)]
                else:
                    messages = consumer.receive_batch(POLLED, timeout_s=PATIENCE_S)
                for message in messages:
                    yield message.key, message.value
                taken += len(messages)


class BenchReaders(DataSource):
    """Options `serviceUrl`, `shape`, and `shares`: `topic messages` lines."""

    @classmethod
    def name(cls) -> str:
        return FORMAT

    def schema(self) -> str:
        return "key string, value binary"

    def reader(self, schema: StructType) -> DataSourceReader:
        lines = self.options["shares"].splitlines()
        shares = [Share(topic, int(count)) for topic, _, count in (s.partition(" ") for s in lines)]
        return Reader(self.options["serviceUrl"], self.options["shape"], shares)
