"""A data source whose reader and writer pass the points of `hooks`; else it is what it was.

Rules: `class HookedThis(Hooked, This)` is registered instead of `This`, under its own name.  What
Spark finds out about a reader by looking at its class (limits, AvailableNow) stays true.
"""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tests.pipeline.hooks import Action, HookFailure, Point, Rule, here, told, wait_for

if TYPE_CHECKING:
    from pyarrow import RecordBatch


HALF: Final = "half is written"
"""What one that lingers tells when it waits."""


class HookedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Beside the reader that does the work."""

    def __init__(self, inner: DataSourceStreamReader) -> None:
        assert isinstance(inner, SupportsTriggerAvailableNow), "AvailableNow would seem to be there"
        self._inner = inner

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._inner.prepareForTriggerAvailableNow()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return self._inner.getDefaultReadLimit()

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return self._inner.initialOffset()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        end = self._inner.latestOffset(start, limit)
        if end != start:
            here(Point.OFFSET_CHOSEN)
        return end

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        return self._inner.reportLatestOffset()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found = self._inner.partitions(start, end)
        if end != start:
            here(Point.PARTITIONS)
        return found

    def read(self, partition: InputPartition) -> Iterator["RecordBatch"]:
        here(Point.READ_BEGINS)
        return self._inner.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._inner.commit(end)

    def stop(self) -> None:
        self._inner.stop()


class HookedWriter(DataSourceStreamArrowWriter):
    """Beside the writer that does the work."""

    def __init__(self, inner: DataSourceStreamArrowWriter) -> None:
        self._inner = inner

    def write(self, iterator: Iterator["RecordBatch"]) -> WriterCommitMessage:
        rule = here(Point.WRITE_BEGINS)
        if rule is not None and rule.action is Action.LINGER:
            _linger(self._inner, iterator, rule)
        message = self._inner.write(_passing(iterator))
        here(Point.WRITE_RETURNED)
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        here(Point.COMMIT_BEGINS, batchId)
        self._inner.commit(messages, batchId)
        here(Point.COMMIT_RETURNED, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        here(Point.ABORT_BEGINS, batchId)
        self._inner.abort(messages, batchId)
        here(Point.ABORT_RETURNED, batchId)


def _linger(
    inner: DataSourceStreamArrowWriter, iterator: Iterator["RecordBatch"], rule: Rule
) -> NoReturn:
    """Fail, while a child of this process writes half of the rows now and half when released."""
    given = list(iterator)
    if os.fork() == 0:
        try:
            inner.write(_halves(given, rule))
            told(rule, "written")
        except Exception as error:  # noqa: BLE001 - the test judges it
            told(rule, f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    raise HookFailure(f"{rule.point}: given up by the rule {rule.name}, while it goes on")


def _halves(batches: list["RecordBatch"], rule: Rule) -> Iterator["RecordBatch"]:
    half = batches[0].num_rows // 2
    assert half, "there is nothing to write later"
    yield batches[0].slice(0, half)
    told(rule, HALF)
    wait_for(rule)
    yield batches[0].slice(half)
    yield from batches[1:]


def _passing(batches: Iterator["RecordBatch"]) -> Iterator["RecordBatch"]:
    """The same rows, the first half of each batch first: writers ask for more when they have it."""
    for batch in batches:
        half = batch.num_rows // 2
        if half == 0:
            yield batch
            continue
        yield batch.slice(0, half)
        here(Point.WRITE_UNDER_WAY)
        yield batch.slice(half)


class Hooked(DataSource):
    """Goes before the data source that it hooks among the bases of a class."""

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return HookedReader(super().streamReader(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        inner = super().streamWriter(schema, overwrite)
        assert isinstance(inner, DataSourceStreamArrowWriter)
        return HookedWriter(inner)
