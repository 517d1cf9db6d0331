"""The harness itself, on a source that counts and a sink of files.

What the tests of the pipeline rely on: a hook that is said to act does, a kill leaves no process, a
pause stops all of them, a batch is tried again under the same id, and readers see all.
"""

from pathlib import Path
from typing import Final

import pytest
from pyspark.sql import SparkSession

import magnetar
from tests.pipeline import rows, spark_session, toy
from tests.pipeline.conftest import MakeDriver, MakeTopic
from tests.pipeline.driver_process import Hooks, session, state_of, workers_of
from tests.pipeline.hooks import Action, Point
from tests.pipeline.toy_driver import start
from tests.support.child_process import ChildFailed

TOY: Final = "tests.pipeline.toy_driver"
TOTAL: Final = 100
ROWS: Final = 40
SIDE_BY_SIDE: Final = ((3, 1), (1, 0), (4, 1), (2, 0))
"""Rows by number, and their segments, the first of which was split."""


def test_the_session_of_the_tests_runs_a_query(spark: SparkSession, tmp_path: Path) -> None:
    given = {"rows": 7, "total": 20, "checkpoint": str(tmp_path / "c"), "sink": str(tmp_path / "s")}
    query = start(spark, given)
    assert query.awaitTermination(60)
    assert sorted(toy.committed(tmp_path / "s")) == [*range(20)]


@pytest.mark.usefixtures("_spark_is_ready")
def test_failed_start_of_spark_shows_what_the_jvm_printed(tmp_path: Path) -> None:
    with (
        pytest.raises(ChildFailed, match="MaxHeapFreeRatio=200 is outside the allowed range"),
        spark_session.running(tmp_path, ["-XX:MaxHeapFreeRatio=200"]),
    ):
        pass


def test_harness_reads_rows_in_the_order_of_the_topic() -> None:
    found = [rows.Row("k", b"%d" % number, (), segment) for number, segment in SIDE_BY_SIDE]
    assert rows.of_key(rows.in_order(found)) == {"k": [b"1", b"2", b"3", b"4"]}


@pytest.mark.nightly
async def test_a_driver_that_is_killed_leaves_nothing_and_does_the_batch_again(
    driver: MakeDriver, tmp_path: Path
) -> None:
    sink = tmp_path / "sink"
    first = driver("first", TOY, rows=ROWS, total=TOTAL, sink=str(sink))
    before = first.hooks.at(Point.COMMIT_BEGINS, Action.WAIT, batch=1)
    first.spawn()
    where = await first.until(before)
    assert where.batch == 1
    leader = first.pid
    everything = session(leader)
    assert leader in everything
    assert where.pid in workers_of(leader)
    assert len(everything) > 3
    first.kill()
    assert all(state_of(pid) == "Z" for pid in everything)
    assert sorted(toy.committed(sink)) == [*range(ROWS)]

    second = driver("second", TOY, rows=ROWS, total=TOTAL, sink=str(sink))
    again = second.hooks.at(Point.COMMIT_BEGINS, batch=1)
    await second.run_to_end()
    assert await second.until(again)
    assert sorted(toy.committed(sink)) == [*range(TOTAL)]
    assert toy.attempts(sink) == 8, "two for each of three batches, and two of the first driver's"


async def test_tasks_fail_and_are_tried_again_and_a_paused_driver_goes_on(
    driver: MakeDriver, tmp_path: Path
) -> None:
    sink = tmp_path / "sink"
    one = driver("one", TOY, rows=ROWS, total=TOTAL, sink=str(sink))
    failing = one.hooks.at(Point.WRITE_UNDER_WAY, Action.FAIL, batch=0, partition=1, attempt=0)
    dying = one.hooks.at(Point.WRITE_RETURNED, Action.DIE, batch=1, partition=0, attempt=0)
    held = one.hooks.at(Point.COMMIT_RETURNED, Action.WAIT, batch=2)
    one.spawn()
    await one.until(held)
    one.pause()
    assert {state_of(pid) for pid in session(one.pid)} == {"T"}
    one.hooks.release(held)
    one.resume()
    assert await one.finished() == 0
    assert sorted(toy.committed(sink)) == [*range(TOTAL)]
    assert toy.attempts(sink) == 8
    for rule, partition in ((failing, 1), (dying, 0)):
        (where,) = one.hooks.reached(rule)
        assert (where.partition, where.attempt) == (partition, 0)


@pytest.mark.nightly
async def test_a_driver_killed_without_its_workers(driver: MakeDriver, tmp_path: Path) -> None:
    """A worker that waits does not see that its driver is gone, and works on when it may."""
    one = driver("one", TOY, rows=ROWS, total=TOTAL, sink=str(tmp_path / "sink"))
    held = one.hooks.at(Point.WRITE_UNDER_WAY, Action.WAIT, batch=0, partition=0)
    one.spawn()
    where = await one.until(held)
    one.kill_driver()
    assert await one.finished_alone() != 0
    assert state_of(where.pid) not in "Z"
    one.hooks.release(held)


def test_a_rule_that_never_acted_is_told(tmp_path: Path) -> None:
    hooks = Hooks(tmp_path / "hooks")
    rule = hooks.at(Point.ABORT_BEGINS)
    assert hooks.silent() == [rule]


async def test_readers_see_everything_over_splits_and_merges(
    client: magnetar.Client, topic: MakeTopic
) -> None:
    made = await topic(1)
    given = rows.pairs(600)
    await rows.publish(client, made.name, given[:200])
    await made.split(0)
    await rows.publish(client, made.name, given[200:400])
    await made.merge(*await made.active_by_range())
    await rows.publish(client, made.name, given[400:])
    async with client.transaction(timeout_s=30) as transaction, client.producer(made.name) as late:
        await late.send(b"hidden", key="k1", transaction=transaction)
        await transaction.abort()
    found = await rows.committed(client, made.name)
    expected: dict[str, list[bytes]] = {}
    for key, value in given:
        expected.setdefault(key, []).append(value)
    assert rows.of_key(found) == expected
    assert await rows.committed(client, made.name) == found


async def test_an_open_transaction_hides_the_end(client: magnetar.Client, topic: MakeTopic) -> None:
    made = await topic(2)
    transaction = await client.transaction(timeout_s=60)
    async with client.producer(made.name) as producer:
        await producer.send(b"held", key="k1", transaction=transaction)
    with pytest.raises(ChildFailed, match="the horizon did not come to hold"):
        await rows.committed(client, made.name, patience_s=1)
    await transaction.commit()
    assert [row.value for row in await rows.committed(client, made.name)] == [b"held"]
