"""`spark.read` of the format `pulsar5`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from magnetar.spark.cut import Place, enter_children
from magnetar.spark.filters import NO_FILTERS, PushedFilters, push_filters
from magnetar.spark.source import ReadTask, Source
from magnetar.spark.source_options import TASK_BYTES
from magnetar.spark.starting import Bound, BoundKind, end_cut, retained, start_cut
from magnetar.spark.tasks import SegmentRange, ranges_between, refuse_gone, split_large

__all__ = ["BatchReader", "FilteringBatchReader"]


class BatchReader(DataSourceReader):
    """The reader of one batch: from the cut of `start` to that of `end`, across splits and merges.

    Both cuts are fixed when the tasks are made; `latest` is the max read position at that time.
    Rows come in any order, and each has its `order_key`.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pushed: PushedFilters = NO_FILTERS

    def partitions(self) -> Sequence[InputPartition]:
        """Make the tasks.  Raises `DataLost` for what is not retained, unless it may be skipped."""
        options, reading = self._source.options, self._source.reading
        layout = reading.layout()
        begin = options.start or Bound(BoundKind.EARLIEST)
        start = enter_children(start_cut(begin, reading, layout, options.nowhere), layout)
        end = end_cut(options.end, reading, layout, start)
        if options.fail_on_data_loss:
            refuse_gone(start, end, layout)
        ranges = ranges_between(start, end, layout)
        # `earliest` means the entries retained when tasks are made: earlier ones are no loss.
        if begin.kind is BoundKind.EARLIEST:
            ranges = [retained(each, reading) for each in ranges]
        wanted = [
            narrowed
            for each in ranges
            if self._pushed.wants(layout.segments[each.segment_id])
            and (narrowed := self._narrowed(each)) is not None
        ]
        pieces = split_large(reading, wanted, TASK_BYTES)
        return [ReadTask((each,)) for each in pieces] or [ReadTask(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the rows of a task."""
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
        # A lost part must not be skipped silently: reading it raises `DataLost`.
        start = each.start if plan.lost else max(each.start, Place.at(plan.start))
        end = each.end if before_ms is None else min(each.end, Place.at(plan.end))
        return replace(each, start=start, end=end) if start < end else None


class FilteringBatchReader(BatchReader):
    """A `BatchReader` to which Spark offers the filters of the query."""

    def pushFilters(  # noqa: N802 - Spark's name
        self, filters: "list[Filter]"
    ) -> Iterable[Filter]:
        """Take the filters that save reading; return those that Spark has to apply."""
        self._pushed, left = push_filters(filters)
        return left
