"""Offsets of a stream as Spark handles them, over a driver that dies in the first batch."""

import json
from dataclasses import dataclass
from typing import cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows

from magnetar.spark.cut_json import Json
from magnetar.spark.options import Options
from magnetar.spark.source import ReadTask, Source
from magnetar.spark.source_options import SourceOptions
from magnetar.spark.stream_reader import StreamReader
from tests.unit.magnetar.spark.fake_topic import FakeTopic, Row
from tests.unit.magnetar.spark.query import read

NAME = "topic://public/default/t"
EVERY = [0, 20_000, 40_000, 60_000]
ALL = ReadAllAvailable()


@dataclass
class FakeSource:
    """A `Source` as far as planning goes."""

    options: SourceOptions
    reading: FakeTopic


def reader(topic: FakeTopic, start: str) -> StreamReader:
    given = {"serviceUrl": "pulsar://host:6650", "topic": NAME, "start": start}
    return StreamReader(cast("Source", FakeSource(SourceOptions.of(Options(given)), topic)))


def kept(offset: dict[str, Json]) -> dict[str, Json]:
    """As it comes back from the checkpoint."""
    found: dict[str, Json] = json.loads(json.dumps(offset))
    return found


def rows(
    topic: FakeTopic, found: StreamReader, start: dict[str, Json], end: dict[str, Json]
) -> list[Row]:
    tasks = found.partitions(kept(start), kept(end))
    return sorted(
        row for task in tasks for each in cast("ReadTask", task).ranges for row in read(topic, each)
    )


def begin(topic: FakeTopic, start: str) -> None:
    """Something is there before the query; behind a time as well."""
    topic.now_ms = 1_000_000
    topic.send(EVERY)
    if start.isdecimal():
        topic.now_ms = int(start)


@pytest.mark.parametrize("start", ["latest", "earliest", "2000000"])
@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(2)])
def test_the_first_batch_has_the_same_rows_when_a_new_driver_runs_it_again(
    start: str, limit: ReadLimit
) -> None:
    topic = FakeTopic(2)
    begin(topic, start)
    first = reader(topic, start)
    begun = kept(first.initialOffset())
    sent = topic.send(EVERY)
    end = kept(first.latestOffset(begun, limit))
    topic.send(EVERY)
    expected = rows(topic, first, begun, end)
    assert expected
    if start != "earliest" and limit is ALL:
        assert expected == sorted(sent)
    topic.send(EVERY)
    topic.split(topic.active[0])
    topic.send(EVERY)
    again = reader(topic, start)
    assert rows(topic, again, again.initialOffset(), end) == expected
    # And so when Spark asks twice where one and the same query begins.
    assert rows(topic, first, first.initialOffset(), end) == expected


def test_empty_first_batch_stays_empty() -> None:
    topic = FakeTopic()
    begin(topic, "latest")
    first = reader(topic, "latest")
    begun = kept(first.initialOffset())
    end = kept(first.latestOffset(begun, ALL))
    assert end == begun, "for Trigger.AvailableNow it is over"
    sent = topic.send(EVERY)
    again = reader(topic, "latest")
    assert rows(topic, again, again.initialOffset(), end) == []
    assert rows(topic, again, end, again.latestOffset(end, ALL)) == sorted(sent)


def test_later_batch_begins_at_the_end_of_the_one_before() -> None:
    topic = FakeTopic()
    query = reader(topic, "earliest")
    offset = kept(query.initialOffset())
    first = topic.send(EVERY)
    offset, begun = kept(query.latestOffset(offset, ALL)), offset
    assert rows(topic, query, begun, offset) == sorted(first)
    assert kept(query.latestOffset(offset, ALL)) == offset, "there is nothing new"
    assert rows(topic, query, offset, offset) == []
    second = topic.send(EVERY)
    end = kept(query.latestOffset(offset, ALL))
    assert rows(topic, query, offset, end) == sorted(second)
    assert "from" not in end
