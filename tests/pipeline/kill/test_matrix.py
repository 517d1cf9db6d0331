"""The rest of the kill matrix, by `make pipeline-kill`; rules as in `test_core.py`."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import pytest

from magnetar.protocol.ids import Position
from tests.client.conftest import rest
from tests.java.broker_under_test import MagnetarProcess
from tests.pipeline import rows
from tests.pipeline.driver import FAILED
from tests.pipeline.hooked import HALF
from tests.pipeline.hooks import Action, Point
from tests.pipeline.kill.auditing import commits_to, copies_of
from tests.pipeline.kill.conftest import ROWS, Copying
from tests.support.child_process import once_it_is

pytestmark = pytest.mark.nightly
PATIENCE_S = 60


def noted(checkpoint: Path, log: str) -> list[int]:
    """The batches in the checkpoint's log `offsets` or `commits`."""
    return sorted(int(each.name) for each in (checkpoint / log).iterdir() if each.name.isdigit())


@pytest.mark.parametrize(
    ("point", "planned"), [(Point.OFFSET_CHOSEN, [0]), (Point.PARTITIONS, [0, 1])]
)
async def test_killed_before_and_after_the_batch_is_in_the_checkpoint(
    copying: Copying, tmp_path: Path, point: Point, planned: list[int]
) -> None:
    """K1, K2."""
    first = copying.driver("first")
    held = first.hooks.at(point, Action.WAIT, skip=1)
    first.spawn()
    await first.until(held)
    first.kill()
    assert noted(tmp_path / "checkpoint", "offsets") == planned
    assert noted(tmp_path / "checkpoint", "commits") == [0]
    assert 0 < await copying.audit(whole=False) < ROWS
    await copying.driver("second").run_to_end()
    assert await copying.audit(whole=True) == ROWS


async def test_a_task_fails_in_its_write_and_a_driver_is_killed_in_it(copying: Copying) -> None:
    """K3."""
    first = copying.driver("first")
    failed = first.hooks.at(Point.WRITE_UNDER_WAY, Action.FAIL, batch=0, partition=0, attempt=0)
    died = first.hooks.at(Point.WRITE_RETURNED, Action.DIE, batch=0, partition=1, attempt=0)
    held = first.hooks.at(Point.WRITE_UNDER_WAY, Action.WAIT, batch=1, partition=0)
    first.spawn()
    await first.until(held)
    assert first.hooks.reached(failed)
    assert first.hooks.reached(died)
    assert 0 < await copying.audit(whole=False, at_rest=False) < ROWS
    first.kill()
    await copying.driver("second").run_to_end()
    assert await copying.audit(whole=True) == ROWS


async def test_workers_outlive_their_driver(copying: Copying) -> None:
    """K3: a write goes on when its driver is dead, and its successor has taken over."""
    first = copying.driver("first")
    held = first.hooks.at(Point.WRITE_UNDER_WAY, Action.WAIT, batch=1, partition=0)
    first.spawn()
    await first.until(held)
    first.kill_driver()
    second = copying.driver("second")
    begun = second.hooks.at(Point.WRITE_UNDER_WAY, Action.WAIT, batch=1, partition=0)
    second.spawn()
    await second.until(begun)
    first.hooks.release(held)
    second.hooks.release(begun)
    assert await second.finished() == 0
    assert await copying.audit(whole=True) == ROWS


async def test_a_loser_goes_on_when_the_batch_is_decided(copying: Copying) -> None:
    """K4: the first try of a task writes half, another try wins, the rest comes too late."""
    first = copying.driver("first")
    lingering = first.hooks.at(Point.WRITE_BEGINS, Action.LINGER, batch=1, partition=0, attempt=0)
    decided = first.hooks.at(Point.COMMIT_RETURNED, Action.WAIT, batch=1)
    first.spawn()
    await first.until(decided)
    assert first.hooks.outcome(lingering) == HALF
    seen = await copying.audit(whole=False)
    first.hooks.release(lingering)

    async def ended() -> bool:
        return first.hooks.outcome(lingering) != HALF

    await once_it_is(ended, "the end of the one that lingers", PATIENCE_S)
    assert "has ended and takes no writes" in str(first.hooks.outcome(lingering))
    assert await copying.audit(whole=False) == seen
    first.hooks.release(decided)
    assert await first.finished() == 0
    assert await copying.audit(whole=True) == ROWS


async def test_the_last_batch_comes_again(copying: Copying, tmp_path: Path) -> None:
    """K7, the cheap way: Spark forgets that the last batch was done."""
    await copying.driver("first").run_to_end()
    last = forget_the_last_commit(tmp_path / "checkpoint")
    second = copying.driver("second")
    again = second.hooks.at(Point.COMMIT_RETURNED, batch=last)
    await second.run_to_end()
    assert second.hooks.reached(again)
    assert await copying.audit(whole=True) == ROWS
    assert await copying.last_batch() == last


def forget_the_last_commit(checkpoint: Path) -> int:
    """As if the driver had died before Spark noted that the last batch was done; which it is."""
    last = noted(checkpoint, "commits")[-1]
    for name in (f"{last}", f".{last}.crc"):
        (checkpoint / "commits" / name).unlink()
    return last


@pytest.mark.parametrize("point", [Point.WRITE_UNDER_WAY, Point.COMMIT_BEGINS])
async def test_a_straggler_outlasts_its_group(copying: Copying, point: Point) -> None:
    """K9: nobody extends the group, so it is aborted at its deadline, and stays so.

    Whoever commits it then is refused; that is not taken for what was done before.
    """
    first = copying.driver("first", timeout_ms=15_000)
    held = first.hooks.at(point, Action.WAIT, batch=1)
    first.spawn()
    straggler = (await first.until(held)).pid
    os.kill(straggler, signal.SIGSTOP)

    async def aborted() -> bool:
        path = f"/transactions/transaction-keys/{copying.key}"
        _, answer = await rest(copying.service, "GET", path)
        return "ABORTED" in str(answer)

    await once_it_is(aborted, "the abort of the group", PATIENCE_S)
    os.kill(straggler, signal.SIGCONT)
    first.hooks.release(held)
    assert await first.finished() == FAILED
    assert "InvalidTransactionStatus" in first.logs()
    assert 0 < await copying.audit(whole=False) < ROWS
    await copying.driver("second").run_to_end()
    assert await copying.audit(whole=True) == ROWS


@pytest.mark.parametrize("point", [Point.WRITE_UNDER_WAY, Point.COMMIT_BEGINS])
async def test_the_broker_is_killed(
    copying_alone: Copying, own_broker: MagnetarProcess, point: Point
) -> None:
    """K10: with the coordinator of the key, the segments, everything."""
    copying = copying_alone
    first = copying.driver("first")
    held = first.hooks.at(point, Action.WAIT, batch=1)
    first.spawn()
    await first.until(held)
    own_broker.kill()
    await asyncio.to_thread(own_broker.start)
    first.hooks.release(held)
    assert await first.finished() == 0
    assert await copying.audit(whole=True) == ROWS


async def test_topics_are_split_and_merged_meanwhile(copying: Copying) -> None:
    """K11: the source between plan and read, first split, then merged; the sink in a write."""
    first = copying.driver("first")
    planned = first.hooks.at(Point.PARTITIONS, Action.WAIT, skip=1)
    writing = first.hooks.at(Point.WRITE_UNDER_WAY, Action.WAIT, batch=1, partition=0)
    first.spawn()
    await first.until(planned)
    left, right = await copying.source.active_by_range()
    await copying.source.split(left)
    await copying.publish(100)
    first.hooks.release(planned)
    await first.until(writing)
    before = await copying.sink.active()
    await copying.sink.merge(*await copying.sink.active_by_range())
    (merged,) = await copying.sink.active()
    await copying.sink.split(merged)
    first.hooks.release(writing)
    assert await first.finished() == 0
    seen = await copying.audit(whole=False)
    after = await copying.sink.active()
    assert await of_one_attempt(copying, seen, before) & await of_one_attempt(copying, seen, after)

    second = copying.driver("second")
    planned = second.hooks.at(Point.PARTITIONS, Action.WAIT)
    second.spawn()
    await second.until(planned)
    await copying.source.merge(*(await copying.source.active_by_range())[:2])
    assert right in await copying.source.active()
    await copying.publish(100)
    second.hooks.release(planned)
    assert await second.finished() == 0
    await copying.audit(whole=False)
    await copying.driver("third").run_to_end()
    assert await copying.audit(whole=True) == ROWS + 200


async def of_one_attempt(copying: Copying, seen: int, segments: list[int]) -> set[int]:
    """The winners of batch 1 that have rows in one of these segments of the sink."""
    report = await copying.report(seen, whole=False)
    topics = {report.snapshot.segments[each].topic for each in segments}
    (commit,) = [each for each in commits_to(report) if each.batch == 1]
    return {index for index, counts in commit.winners.items() if topics & set(counts)}


async def test_a_new_checkpoint_under_the_same_key(copying: Copying, tmp_path: Path) -> None:
    """K12: its batches begin at 0 and are not taken for done; the old query's last one is."""
    await copying.driver("first").run_to_end()
    last = await copying.last_batch()
    assert last
    await copying.publish(100)
    second = copying.driver("second", start="last", checkpoint=str(tmp_path / "new"))
    anew = second.hooks.at(Point.COMMIT_RETURNED, batch=0)
    await second.run_to_end()
    assert second.hooks.reached(anew)
    assert await copying.audit(whole=True) == ROWS + 100

    assert forget_the_last_commit(tmp_path / "checkpoint") == last
    old = copying.driver("old")
    again = old.hooks.at(Point.COMMIT_RETURNED, batch=last)
    beyond = old.hooks.at(Point.OFFSET_CHOSEN, Action.WAIT)
    old.spawn()
    await old.until(beyond)
    assert old.hooks.reached(again)
    old.kill()
    assert await copying.audit(whole=True) == ROWS + 100


async def test_the_checkpoint_is_lost(copying: Copying, tmp_path: Path) -> None:
    """K13, in the worst moment: the positions under the key tell where to go on."""
    first = copying.driver("first")
    decided = first.hooks.at(Point.COMMIT_RETURNED, Action.WAIT, batch=1)
    first.spawn()
    await first.until(decided)
    first.kill()
    assert 0 < await copying.audit(whole=False) < ROWS
    shutil.rmtree(tmp_path / "checkpoint")
    second = copying.driver("second", start="last")
    anew = second.hooks.at(Point.COMMIT_RETURNED, batch=0)
    await second.run_to_end()
    assert second.hooks.reached(anew)
    assert await copying.audit(whole=True) == ROWS


async def test_source_fails_when_its_range_is_trimmed(copying_alone: Copying) -> None:
    """K14: the query fails before it writes, until it is told to go on at what is left."""
    copying = copying_alone
    first = copying.driver("first")
    held = first.hooks.at(Point.COMMIT_BEGINS, Action.WAIT, batch=1)
    first.spawn()
    await first.until(held)
    first.kill()
    seen = await copying.audit(whole=False, at_rest=False)
    await acknowledge_everything(copying)

    second = copying.driver("second")
    second.spawn()
    assert await second.finished() == FAILED
    assert "DataLost" in second.logs()
    assert await copying.audit(whole=False) == seen

    await copying.publish(100)
    await copying.driver("third", fail_on_data_loss="false").run_to_end()
    found = rows.of_key(await rows.committed(copying.client, copying.sink.name))
    expected = copies_of(copying.published)
    for key, values in found.items():
        left = iter(expected[key])
        assert all(value in left for value in values), f"of {key}: {values}"
        assert values[-5:] == expected[key][-5:], "what was published last"
    total = sum(map(len, found.values()))
    assert seen + 100 <= total < len(copying.published)
    await copying.report(total)


async def acknowledge_everything(copying: Copying) -> None:
    """So that nothing keeps it, and wait until a ledger of each segment is gone."""
    segments = (await copying.client.layout(copying.source.name)).segments.values()

    async def beginnings() -> list[Position]:
        return [(await copying.client.plan_range(each.topic)).earliest for each in segments]

    before = await beginnings()
    async with copying.client.stream_consumer(
        copying.source.name, "elsewhere", initial_position="earliest"
    ) as consumer:
        taken = 0
        while taken < len(copying.published):
            batch = await consumer.receive_batch(100, timeout_s=PATIENCE_S)
            taken += len(batch)
            await consumer.ack(batch[-1])

    async def trimmed() -> bool:
        return all(now > was for now, was in zip(await beginnings(), before, strict=True))

    await once_it_is(trimmed, "the end of a ledger of each segment", PATIENCE_S)
