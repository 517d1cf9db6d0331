"""`spark.read` of the format `pulsar5`.

Rules: what is read is fixed when the tasks are made: from the cut of `start` (`earliest`) to that
of `end` (`latest`: the horizon of then), across all edges of the DAG.  Rows come in no order; each
has its `order_key`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from pipeline.cut import Place, entered
from pipeline.filters import NO_FILTERS, Pushed, push
from pipeline.source import ReadTask, Source
from pipeline.source_options import TASK_BYTES
from pipeline.starting import Bound, BoundKind, end_cut, retained, start_cut
from pipeline.tasks import SegmentRange, between, cut_large, refuse_gone

__all__ = ["BatchReader", "FilteringBatchReader"]


class BatchReader(DataSourceReader):
    """See the module's rules."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pushed: Pushed = NO_FILTERS

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks."""
        options, reading = self._source.options, self._source.reading
        layout = reading.layout()
        begin = options.start or Bound(BoundKind.EARLIEST)
        start = entered(start_cut(begin, reading, layout, options.nowhere), layout)
        end = end_cut(options.end, reading, layout, start)
        if options.fail_on_data_loss:
            refuse_gone(start, end, layout)
        ranges = between(start, end, layout)
        if begin.kind is BoundKind.EARLIEST:
            ranges = [retained(each, reading) for each in ranges]
        wanted = [
            narrowed
            for each in ranges
            if self._pushed.wants(layout.segments[each.segment_id])
            and (narrowed := self._narrowed(each)) is not None
        ]
        pieces = cut_large(reading, wanted, TASK_BYTES)
        return [ReadTask((each,)) for each in pieces] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task."""
        assert isinstance(partition, ReadTask)
        return self._source.rows(partition)

    def _narrowed(self, each: SegmentRange) -> SegmentRange | None:
        """The part of a range that was published in time; None if there is none."""
        pushed, skew_ms = self._pushed, self._source.options.clock_skew_ms
        before_ms = None
        if pushed.before_ms is not None and skew_ms is not None:
            before_ms = pushed.before_ms + skew_ms
        if pushed.from_ms is None and before_ms is None:
            return each
        plan = self._source.reading.plan(
            each.topic,
            each.start.position,
            end=each.end.entries_end,
            from_publish_time_ms=pushed.from_ms,
            before_publish_time_ms=before_ms,
        )
        # What is gone would be skipped unseen: reading it tells.
        start = each.start if plan.lost else max(each.start, Place.at(plan.start))
        end = each.end if before_ms is None else min(each.end, Place.at(plan.end))
        return replace(each, start=start, end=end) if start < end else None


class FilteringBatchReader(BatchReader):
    """One that Spark offers filters to."""

    def pushFilters(  # noqa: N802 - Spark's name
        self, filters: "list[Filter]"
    ) -> Iterable[Filter]:
        """Those that Spark has to apply."""
        self._pushed, left = push(filters)
        return left
