"""`spark.readStream` of the format `pulsar5`.

Offsets are cuts (`cut_json.py`).  Spark writes an offset to the checkpoint before it reads the
batch, and hands the recorded pair back after a restart.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from magnetar.layout import Layout
from magnetar.spark.cut import Cut, enter_children
from magnetar.spark.cut_json import Json, begun_of, cut_of, object_of
from magnetar.spark.pace import Pace
from magnetar.spark.range_planning import (
    Budget,
    Limits,
    Ordering,
    Planner,
    current_limits,
    limits_of,
    lower,
    raw_ends,
)
from magnetar.spark.source import ReadTask, Source
from magnetar.spark.source_options import TASK_BYTES
from magnetar.spark.starting import Bound, BoundKind, start_cut
from magnetar.spark.tasks import ranges_between, refuse_gone, split_large, tasks_of

__all__ = ["StreamReader"]

IDLE_PAUSE_S: Final = 0.1
"""Pause between two plans that find nothing new; a message may wait so long."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of one streaming query.

    One object plans the batches, in a process of the driver, from the start of the query to its
    end.  Pickled copies read in tasks.
    """

    def __init__(self, source: Source) -> None:
        options = source.options
        self._source = source
        self._ordering = options.ordering or Ordering.KEY
        self._planner = Planner(
            source.reading,
            self._ordering,
            chain=options.chain,
            window_ms=options.window_ms,
            fail_on_data_loss=options.fail_on_data_loss,
        )
        self._limits: Limits | None = None
        self._idle_until: float | None = None
        self._end = options.end_cut
        self._pace = None if options.rows_per_second is None else Pace(options.rows_per_second)

    def initialOffset(self) -> dict[str, Json]:  # noqa: N802 - Spark's names
        """The offset at which a query without checkpoint begins."""
        options, reading = self._source.options, self._source.reading
        start = options.start or Bound(BoundKind.EARLIEST)
        layout = reading.layout()
        cut = enter_children(start_cut(start, reading, layout, options.nowhere), layout)
        # Of the first batch Spark records the end alone, and calls this again when it plans the
        # batch and when it repeats it.  `latest` may be another cut by then, so the end of that
        # batch has its begin inside (`begun`), and that one counts.
        return object_of(cut, begun=cut)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit of one batch that the options give.

        Spark takes one limit; if rows and bytes are bounded, `_budget` adds the other one.
        """
        budget = self._source.options.budget
        if budget.rows is not None:
            return ReadMaxRows(budget.rows)
        if self._pace is not None:
            return ReadMaxRows(self._pace.rows_at_once)
        return ReadAllAvailable() if budget.bytes is None else ReadMaxBytes(budget.bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of this run of Trigger.AvailableNow: the entries that may be read now."""
        reading = self._source.reading
        self._limits = current_limits(reading, reading.layout())

    def latestOffset(  # noqa: N802
        self, start: dict[str, Json], limit: ReadLimit
    ) -> dict[str, Json]:
        """The end of the batch that begins at `start`.

        It is exactly `start` if there is nothing new; with Trigger.AvailableNow that ends the run.
        The call waits until `maxRowsPerSecond` allows another batch.
        """
        cut = self._cut(start)
        # Without a trigger Spark asks again at once when nothing is new.
        if self._idle_until is not None:
            time.sleep(max(self._idle_until - time.monotonic(), 0))
        layout = self._layout(cut)
        limits = self._limits
        if self._end is not None:
            # Under any trigger: nothing after the cut `end` is read.
            limits = lower(limits, limits_of(self._end, layout))
        if self._pace is not None:
            time.sleep(self._pace.wait_s(time.monotonic()))
        found = self._planner.next_cut(cut, layout, self._budget(limit), limits)
        if self._pace is not None:
            self._pace.took(self._planner.planned_rows, time.monotonic())
        self._idle_until = time.monotonic() + IDLE_PAUSE_S if found is cut else None
        begun = begun_of(start, cut)
        is_first = begun is not None and begun.pos == cut.pos
        return object_of(found, begun if is_first or found is cut else None)

    def reportLatestOffset(self) -> dict[str, Json]:  # noqa: N802
        """The end of all stored entries, including those that an open transaction holds back."""
        options, reading = self._source.options, self._source.reading
        return object_of(raw_ends(reading, reading.layout(), options.topic, options.name))

    def partitions(self, start: dict[str, Json], end: dict[str, Json]) -> Sequence[InputPartition]:
        """The tasks of a batch.

        Spark calls this again with recorded offsets after a restart, so it depends on nothing else.
        """
        options, reading = self._source.options, self._source.reading
        first, last = self._cut(start), self._cut(end)
        if start != end:
            first = begun_of(end, last) or first
        layout = self._layout(last)
        if options.fail_on_data_loss:
            refuse_gone(first, last, layout)
        ranges = ranges_between(first, last, layout)
        if self._ordering is Ordering.NONE:
            tasks = [[each] for each in split_large(reading, ranges, TASK_BYTES)]
        else:
            tasks = tasks_of(ranges, layout, chain=options.chain)
        # A batch without rows has one task all the same: by its report a sink knows of the batch.
        return [ReadTask(tuple(task)) for task in tasks] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a task."""
        assert isinstance(partition, ReadTask)
        return self._source.rows(partition)

    def commit(self, end: dict[str, Json]) -> None:
        """Do nothing: no subscription is moved, and the topic's retention keeps the data."""

    def stop(self) -> None:
        """Do nothing: the client belongs to the process, and other queries may use it."""

    def _cut(self, offset: dict[str, Json]) -> Cut:
        options = self._source.options
        return cut_of(offset, options.topic, options.name)

    def _layout(self, cut: Cut) -> Layout:
        return self._source.reading.layout_with(max(cut.pos))

    def _budget(self, limit: ReadLimit) -> Budget:
        known = self._source.options.budget
        if isinstance(limit, ReadMaxRows):
            return Budget(limit.max_rows, known.bytes)
        if isinstance(limit, ReadMaxBytes):
            return Budget(known.rows, limit.max_bytes)
        return Budget()
