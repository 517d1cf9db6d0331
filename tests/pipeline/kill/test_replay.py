"""A replay whose drivers are killed, at points of its life and at any moment, until one is done.

Rules: the topic is split and merged in the range; readers of the target see what the filter and the
projection make of the range, each row once and those of a key in order.
"""

import asyncio
import random

import pytest
from pyspark.sql import SparkSession

import magnetar
from tests.client.conftest import Topic
from tests.conftest import Report
from tests.java.broker_under_test import BrokerUnderTest
from tests.pipeline import rows
from tests.pipeline.conftest import MakeDriver, MakeTopic
from tests.pipeline.driver_process import DriverProcess
from tests.pipeline.hooks import Action, Point
from tests.pipeline.kill.auditing import audit_topic
from tests.pipeline.rows import Pair
from tests.support.effort import draw_seed

REPLAY = "tests.pipeline.kill.replay_driver"
ROWS_OF_A_GENERATION = 240
AT_ONCE = 5
IN_A_BATCH = 100
KILLS = 6
LATEST_KILL_S = 8.0
LATEST_KILL_AFTER_A_BATCH_S = 2.0
WHERE = "cast(decode(value, 'utf-8') AS int) % 4 > 0"
SELECT = "concat('again-', decode(value, 'utf-8')) AS value"


class Replaying:
    """Two topics, the first one filled and reshaped, and drivers of one replay."""

    def __init__(
        self, service: BrokerUnderTest, source: Topic, target: Topic, make: MakeDriver
    ) -> None:
        self.service = service
        self.source, self.target = source, target
        self.sent: list[Pair] = []
        self._make = make

    async def fill(self, client: magnetar.Client) -> None:
        """Rows in three generations of segments."""
        await self._publish(client)
        await self.source.split((await self.source.active())[0])
        await self._publish(client)
        first, second = (await self.source.active_by_range())[:2]
        await self.source.merge(first, second)
        await self._publish(client)

    async def _publish(self, client: magnetar.Client) -> None:
        given = rows.pairs(ROWS_OF_A_GENERATION, first=len(self.sent))
        await rows.publish(client, self.source.name, given, at_once=AT_ONCE)
        self.sent += given

    def driver(self, name: str, **given: object) -> DriverProcess:
        """Not started yet; all have one checkpoint."""
        told = {"rows": IN_A_BATCH} | given
        return self._make(
            name,
            REPLAY,
            url=self.service.url,
            source=self.source.name,
            sink=self.target.name,
            where=WHERE,
            select=SELECT,
            **told,
        )

    async def check(self, client: magnetar.Client, spark: SparkSession) -> None:
        """What readers see is what the replay makes of the range; the audit finds nothing."""
        expected: dict[str, list[bytes]] = {}
        for key, value in self.sent:
            if int(value) % 4:
                expected.setdefault(key, []).append(b"again-" + value)
        found = rows.of_key(await rows.committed(client, self.target.name))
        assert found == expected
        seen, name = sum(map(len, found.values())), self.target.name
        service = self.service
        audit_topic(spark, service.url, service.admin_url, name, seen=seen, whole=True)

    async def seen(self, client: magnetar.Client) -> int:
        """How many rows of the target readers see."""
        return len(await rows.committed(client, self.target.name, at_rest=False))


@pytest.fixture
async def replaying(
    service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic, driver: MakeDriver
) -> Replaying:
    made = Replaying(service, await topic(), await topic(2), driver)
    await made.fill(client)
    return made


@pytest.mark.nightly
async def test_a_replay_killed_before_and_after_a_decision_goes_on(
    replaying: Replaying, client: magnetar.Client, spark: SparkSession
) -> None:
    """The third run finishes.  Rows that came later are not read."""
    for name, point, batch in (
        ("before", Point.COMMIT_BEGINS, 1),
        ("after", Point.COMMIT_RETURNED, 1),
    ):
        killed = replaying.driver(name)
        here = killed.hooks.at(point, Action.WAIT, batch=batch)
        killed.spawn()
        await killed.until(here)
        killed.kill()
    await rows.publish(client, replaying.source.name, [("k1", b"1")])
    last = replaying.driver("last")
    await last.run_to_end()
    assert "The replay is finished" in last.log()
    await replaying.check(client, spark)


@pytest.mark.nightly
@pytest.mark.timeout(900, func_only=True)
async def test_a_replay_killed_at_any_moment_is_exact(
    replaying: Replaying, client: magnetar.Client, spark: SparkSession, report: Report
) -> None:
    """Batches are so small that all that are killed do not come to the end together.

    Every other one commits something first: on a busy machine none need come as far by itself.
    """
    chance = random.Random(draw_seed())
    killed_at: list[str] = []
    for number in range(KILLS):
        run, latest_s = replaying.driver(f"run-{number}", rows=AT_ONCE), LATEST_KILL_S
        await run.start()
        if number % 2:
            await run.until(run.hooks.at(Point.COMMIT_RETURNED))
            latest_s = LATEST_KILL_AFTER_A_BATCH_S
        await asyncio.sleep(chance.uniform(0, latest_s))
        assert run.running, "it is killed when it has ended"
        run.kill()
        reached = run.hooks.reached()
        killed_at.append(reached[-1].point.value if reached else "before the first batch")
    report(f"a replay, killed {KILLS} times, at last after: {', '.join(killed_at)}")
    before = await replaying.seen(client)
    await replaying.driver("last").run_to_end()
    await replaying.check(client, spark)
    assert 0 < before < await replaying.seen(client)
