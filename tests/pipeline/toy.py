"""A source that counts and a sink of files: what the tests of the harness themselves run on.

Rules: row `n` is ("k<n mod 10>", n); a batch has `rows` of them, in two partitions, until there
were `total`.  The sink is exactly-once: an attempt writes a file of its own, a commit names the
files of the winners in one rename, and a batch that is committed stays what it is.
"""

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

KEYS: Final = 10
SCHEMA: Final = pa.schema([("key", pa.string()), ("number", pa.int64())])


@dataclass
class Range(InputPartition):
    """Numbers from `first` up to, not including, `end`."""

    first: int
    end: int


@dataclass
class Written(WriterCommitMessage):
    """The file of an attempt."""

    name: str


class ToyReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._rows = int(options["rows"])
        self._total = int(options["total"])

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        pass  # what there is does not change

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadMaxRows(self._rows)

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"next": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        most = self._total if isinstance(limit, ReadAllAvailable) else start["next"] + self._rows
        return {"next": min(self._total, most)}

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 - Spark's name
        return {"next": self._total}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = start["next"], end["next"]
        middle = (first + last) // 2
        return [Range(first, middle), Range(middle, last)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Range)
        numbers = range(partition.first, partition.end)
        columns = [[f"k{number % KEYS}" for number in numbers], list(numbers)]
        yield pa.RecordBatch.from_arrays(
            [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)],
            schema=SCHEMA,
        )

    def commit(self, end: dict[str, int]) -> None:
        pass  # nothing is kept for a batch

    def stop(self) -> None:
        pass  # nothing is open


class ToyWriter(DataSourceStreamArrowWriter):
    """The sink."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._directory = Path(options["path"])

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        name = f"attempt-{uuid.UUID(bytes=os.urandom(16)).hex}"
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / name).open("w") as file:
            for batch in iterator:
                for number in batch.column("number").to_pylist():
                    file.write(f"{number}\n")
                file.flush()
        return Written(name)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        decided = self._directory / f"batch-{batchId}"
        if decided.exists():
            return
        winners = [each.name for each in messages if isinstance(each, Written)]
        draft = decided.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(winners))
        draft.rename(decided)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        pass  # what no batch names is not there


class Toy(DataSource):
    """`toy`: options `rows` and `total` of the source, `path` of the sink."""

    @classmethod
    def name(cls) -> str:
        return "toy"

    def schema(self) -> str:
        return "key string, number bigint"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return ToyReader(self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        return ToyWriter(self.options)


def committed(directory: Path) -> list[int]:
    """The numbers that are in the sink, in order of batches."""
    found: list[int] = []
    batches = [each for each in directory.glob("batch-*") if not each.suffix]
    for batch in sorted(batches, key=lambda path: int(path.name.removeprefix("batch-"))):
        names: list[Any] = json.loads(batch.read_text())
        for name in names:
            found.extend(int(line) for line in (directory / name).read_text().splitlines())
    return found


def attempts(directory: Path) -> int:
    """How many attempts have written, winners or not."""
    return len([*directory.glob("attempt-*")])
