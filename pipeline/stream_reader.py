"""`spark.readStream` of the format `pulsar5`.

Rules:

- One object per query plans, in a process of the driver; others of it, pickled, read in tasks.
- Offsets are cuts (`cut_json.py`).  Spark has written one down before its batch is read, and hands
  the recorded pair back after a restart; so `partitions` has no memory and no side effects.
- Of the first batch Spark writes down the end alone, and asks `initialOffset` again when it plans
  the batch and when it runs it once more, which may have another answer by then: `latest`, most of
  all.  So offsets say where that batch begins, and what they say counts.
- `latestOffset` gives back its start if there is nothing new, to the letter, which for
  Trigger.AvailableNow is the end of the run: then `_limits` say how far every segment may be read.
- Without a trigger Spark asks again at once when nothing is new: it is answered every IDLE_PAUSE_S.
- With an `end` nothing behind that cut is read, under any trigger.
- `maxRowsPerSecond`: a batch is planned when the rows of those before it have had their time.
- A batch without rows has one task all the same, by which a sink knows of it.
- Offsets need no commit: no subscription is moved, and data is kept by the topic's retention.
"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from pipeline.cut import Cut, entered
from pipeline.cut_json import Json, begun_of, cut_of, object_of
from pipeline.pace import Pace
from pipeline.range_planning import (
    Budget,
    Limits,
    Ordering,
    Planner,
    frozen,
    limits_of,
    lower,
    raw_ends,
)
from pipeline.source import ReadTask, Source
from pipeline.source_options import TASK_BYTES
from pipeline.starting import Bound, BoundKind, start_cut
from pipeline.tasks import between, cut_large, refuse_gone, tasks_of

if TYPE_CHECKING:
    from magnetar.layout import Layout

__all__ = ["StreamReader"]

IDLE_PAUSE_S: Final = 0.1
"""Between two plans that find nothing; what comes meanwhile waits for so long."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module's rules."""

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
        """Where a query without checkpoint begins."""
        options, reading = self._source.options, self._source.reading
        start = options.start or Bound(BoundKind.EARLIEST)
        layout = reading.layout()
        cut = entered(start_cut(start, reading, layout, options.nowhere), layout)
        return object_of(cut, begun=cut)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options say; the other one of two is remembered."""
        budget = self._source.options.budget
        if budget.rows is not None:
            return ReadMaxRows(budget.rows)
        if self._pace is not None:
            return ReadMaxRows(self._pace.rows_at_once)
        return ReadAllAvailable() if budget.bytes is None else ReadMaxBytes(budget.bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """What is there now is what the run reads."""
        reading = self._source.reading
        self._limits = frozen(reading, reading.layout())

    def latestOffset(  # noqa: N802
        self, start: dict[str, Json], limit: ReadLimit
    ) -> dict[str, Json]:
        """The end of the batch that begins at `start`."""
        cut = self._cut(start)
        if self._idle_until is not None:
            time.sleep(max(self._idle_until - time.monotonic(), 0))
        layout = self._layout(cut)
        limits = self._limits
        if self._end is not None:
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
        """The end of what is stored, so that what an open transaction holds back is seen."""
        options, reading = self._source.options, self._source.reading
        return object_of(raw_ends(reading, reading.layout(), options.topic, options.name))

    def partitions(self, start: dict[str, Json], end: dict[str, Json]) -> Sequence[InputPartition]:
        """The tasks of a batch."""
        options, reading = self._source.options, self._source.reading
        first, last = self._cut(start), self._cut(end)
        if start != end:
            first = begun_of(end, last) or first
        layout = self._layout(last)
        if options.fail_on_data_loss:
            refuse_gone(first, last, layout)
        ranges = between(first, last, layout)
        if self._ordering is Ordering.NONE:
            tasks = [[each] for each in cut_large(reading, ranges, TASK_BYTES)]
        else:
            tasks = tasks_of(ranges, layout, chain=options.chain)
        return [ReadTask(tuple(task)) for task in tasks] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        assert isinstance(partition, ReadTask)
        return self._source.rows(partition)

    def commit(self, end: dict[str, Json]) -> None:
        """Nothing: see the module's rules."""

    def stop(self) -> None:
        """Nothing: the client is of the process."""

    def _cut(self, offset: dict[str, Json]) -> Cut:
        options = self._source.options
        return cut_of(offset, options.topic, options.name)

    def _layout(self, cut: Cut) -> "Layout":
        return self._source.reading.layout_with(max(cut.pos))

    def _budget(self, limit: ReadLimit) -> Budget:
        known = self._source.options.budget
        if isinstance(limit, ReadMaxRows):
            return Budget(limit.max_rows, known.bytes)
        if isinstance(limit, ReadMaxBytes):
            return Budget(known.rows, limit.max_bytes)
        return Budget()
