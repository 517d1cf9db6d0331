"""The kill matrix where it is the answer that is lost: what was decided stays decided.

A relay between the driver and the broker lets COMMIT_GROUP of a batch through and loses what the
broker says to it; it must have lost an answer that says that the batch is committed.
"""

import asyncio

import pytest

from magnetar.protocol import pulsar_pb2 as pb
from tests.java.broker_under_test import MagnetarProcess
from tests.pipeline.driver import FAILED
from tests.pipeline.driver_process import DriverProcess
from tests.pipeline.hooks import Point
from tests.pipeline.kill.conftest import IN_A_BATCH, ROWS, Copying
from tests.support.child_process import once_it_is
from tests.support.losing_relay import LosingRelay, Loss, losing

PATIENCE_S = 60
BATCH = 1
SHORT_MS = 10_000


def commits_the_batch(asked: pb.BaseCommand) -> bool:
    """Whether it is that COMMIT_GROUP."""
    return asked.type == pb.BaseCommand.COMMIT_GROUP and asked.commit_group.batch == BATCH


def group_of(answers: list[pb.BaseCommand]) -> int:
    """The one group that all of them say has been committed."""
    told = [each.commit_group_response for each in answers]
    assert told
    for each in told:
        assert not each.HasField("error"), each
        assert not each.done, "by this group, not by an earlier one"
    (group,) = {each.group_least_bits for each in told}
    return group


def nonce_of(relay: LosingRelay) -> str:
    """Under which the batch was asked to be committed, each time."""
    (nonce,) = {each.commit_group.nonce for each in relay.asked}
    return nonce


def has_aborted(driver: DriverProcess) -> bool:
    """Whether Spark has called the sink's abort."""
    return any(each.point is Point.ABORT_BEGINS for each in driver.hooks.reached())


async def test_an_answer_that_is_lost_is_asked_for_again(copying: Copying) -> None:
    """K6: the connection is cut instead of the answer; the query does not notice."""
    async with losing(copying.service.url) as relay:
        relay.lose(commits_the_batch)
        driver = copying.driver("driver", url=relay.url)
        driver.hooks.at(Point.COMMIT_RETURNED, batch=BATCH)
        await driver.run_to_end()
        assert len(relay.lost) == 1
        assert group_of(relay.lost) == group_of(relay.told)
        assert len(relay.asked) == 2
        assert nonce_of(relay)
    assert not has_aborted(driver)
    assert await copying.audit(whole=True) == ROWS


@pytest.mark.nightly
async def test_answers_are_lost_until_the_commit_gives_up(copying: Copying) -> None:
    """K6 and K15: it raises, whatever has happened; Spark aborts what is committed, and repeats."""
    async with losing(copying.service.url) as relay:
        relay.lose(commits_the_batch, times=None)
        first = copying.driver("first", url=relay.url, operation_timeout_ms=SHORT_MS)
        aborted = first.hooks.at(Point.ABORT_RETURNED, batch=BATCH)
        first.spawn()
        assert await first.finished() == FAILED
        assert f"did not say in time whether batch {BATCH}" in first.logs()
        assert first.hooks.reached(aborted)
        assert len(relay.lost) > 1, "it was asked again"
        assert group_of(relay.lost)
        assert nonce_of(relay)
    assert await copying.audit(whole=False) > IN_A_BATCH, "the abort has undone nothing"

    second = copying.driver("second")
    again = second.hooks.at(Point.COMMIT_RETURNED, batch=BATCH)
    await second.run_to_end()
    assert second.hooks.reached(again)
    assert await copying.audit(whole=True) == ROWS


@pytest.mark.nightly
async def test_the_broker_is_killed_when_it_has_decided(
    copying_alone: Copying, own_broker: MagnetarProcess
) -> None:
    """K6 and K10: nobody has heard of the decision when the broker dies; its successor knows it."""
    copying = copying_alone
    async with losing(own_broker.url) as relay:
        relay.lose(commits_the_batch, loss=Loss.SILENCE)
        driver = copying.driver("driver", url=relay.url)
        commits = driver.hooks.at(Point.COMMIT_BEGINS, batch=BATCH)
        driver.spawn()
        await driver.until(commits)

        async def decided() -> bool:
            return bool(relay.lost)

        await once_it_is(decided, "an answer that is lost", PATIENCE_S)
        own_broker.kill()
        await asyncio.to_thread(own_broker.start)
        assert await driver.finished() == 0
        assert group_of(relay.lost) == group_of(relay.told)
        assert nonce_of(relay)
    assert not has_aborted(driver)
    assert await copying.audit(whole=True) == ROWS
