"""The tasks of a batch: what is begun at, and what must be missed."""

import datetime
from dataclasses import dataclass
from typing import cast

import pytest
from pyspark.sql.datasource import GreaterThanOrEqual

from magnetar.spark.batch_reader import FilteringBatchReader
from magnetar.spark.cut import Place
from magnetar.spark.cut_json import text_of
from magnetar.spark.options import Options
from magnetar.spark.range_planning import Ordering, Planner
from magnetar.spark.source import ReadTask, Source
from magnetar.spark.source_options import SourceOptions
from magnetar.spark.starting import Bound, BoundKind, start_cut
from magnetar.spark.tasks import SegmentRange, ranges_between
from tests.unit.magnetar.spark.fake_topic import FakeTopic, Row
from tests.unit.magnetar.spark.query import NOTHING, UNBOUNDED, read

EVERY = [0, 20_000, 40_000, 60_000]


@dataclass
class FakeSource:
    """A `Source` as far as planning goes."""

    options: SourceOptions
    reading: FakeTopic


def reader(topic: FakeTopic, **options: str) -> FilteringBatchReader:
    given = {"serviceUrl": "pulsar://host:6650", "topic": "topic://public/default/t", **options}
    source = FakeSource(SourceOptions.of(Options(given)), topic)
    return FilteringBatchReader(cast("Source", source))


def planned(found: FilteringBatchReader) -> list[SegmentRange]:
    return [each for task in found.partitions() for each in cast("ReadTask", task).ranges]


def is_lost(topic: FakeTopic, each: SegmentRange) -> bool:
    """What the task that reads it looks at."""
    return bool(topic.plan(each.topic, each.start.position, end=each.end.entries_end).lost)


def rows(topic: FakeTopic, ranges: list[SegmentRange]) -> list[Row]:
    return sorted(row for each in ranges for row in read(topic, each))


def topic_of_two() -> FakeTopic:
    """A segment and its two children; of the first child the first entry is trimmed."""
    topic = FakeTopic()
    topic.send(EVERY)
    topic.split(topic.active[0])
    topic.send(EVERY)
    topic.send(EVERY)
    topic.segments[1].trimmed = 1
    return topic


@pytest.mark.parametrize("parent_is_gone", [False, True])
def test_batch_from_earliest_ignores_data_trimmed_before(parent_is_gone: bool) -> None:
    topic = topic_of_two()
    topic.segments[0].trimmed = int(parent_is_gone)
    ranges = planned(reader(topic))
    assert not any(is_lost(topic, each) for each in ranges)
    left = [s.entries[s.trimmed :] for s in topic.segments.values()]
    assert rows(topic, ranges) == sorted(r for entries in left for e in entries for r in e.rows)


def test_stream_from_earliest_ignores_a_trimmed_parent() -> None:
    topic = topic_of_two()
    topic.segments[0].trimmed = 1
    layout = topic.layout()
    cut = start_cut(Bound(BoundKind.EARLIEST), topic, layout, NOTHING)
    left = topic.segments[1].at(1)
    assert cut.pos == {1: Place.at(left), 2: Place.at(topic.segments[2].at(0))}
    found = Planner(topic, Ordering.KEY).next_cut(cut, layout, UNBOUNDED)
    ranges = ranges_between(cut, found, layout)
    assert [each.segment_id for each in ranges] == [1, 2]
    assert not any(is_lost(topic, each) for each in ranges)


@pytest.mark.parametrize("filtered", [False, True])
def test_data_trimmed_after_a_cut_is_lost(filtered: bool) -> None:
    topic = FakeTopic()
    for _ in range(3):
        topic.send(EVERY)
    name = "topic://public/default/t"
    cut = text_of(type(NOTHING)(name, "", {0: Place.at(topic.segments[0].at(0))}))
    found = reader(topic, start=cut)
    if filtered:
        early = datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
        found.pushFilters([GreaterThanOrEqual(("publish_time",), early)])
    topic.segments[0].trimmed = 1
    assert any(is_lost(topic, each) for each in planned(found))
