"""A replay whose drivers are killed, at points of its life and at any moment, until one is done.

Rules: the topic is split and merged in the range; readers of the target see what the filter and the
projection make of the range, each row once and those of a key in order.
"""

import asyncio
import os
import random
from collections.abc import Sequence

import pytest

import magnetar
from tests.client.conftest import Topic
from tests.pipeline import rows
from tests.pipeline.conftest import MakeDriver, MakeTopic
from tests.pipeline.driver_process import DriverProcess
from tests.pipeline.hooks import Action, Point
from tests.pipeline.rows import Pair
from tests.stock.broker_under_test import BrokerUnderTest

REPLAY = "tests.pipeline.kill.replay_driver"
ROWS_OF_A_GENERATION = 240
AT_ONCE = 20
IN_A_BATCH = 100
KILLS = 6
LATEST_KILL_S = 12.0
ROUNDS_MAX = 20
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

    def driver(self, name: str) -> DriverProcess:
        """Not started yet; all have one checkpoint."""
        return self._make(
            name,
            REPLAY,
            url=self.service.url,
            source=self.source.name,
            sink=self.target.name,
            where=WHERE,
            select=SELECT,
            rows=IN_A_BATCH,
        )

    async def check(self, client: magnetar.Client) -> None:
        """What readers see is what the replay makes of the range."""
        expected = [(key, b"again-" + value) for key, value in self.sent if int(value) % 4]
        check_rows(await rows.committed(client, self.target.name), expected)


def check_rows(found: Sequence[rows.Row], expected: Sequence[Pair]) -> None:
    by_key: dict[str, list[bytes]] = {}
    for key, value in expected:
        by_key.setdefault(key, []).append(value)
    assert rows.of_key(found) == by_key


@pytest.fixture
async def replaying(
    service: BrokerUnderTest, client: magnetar.Client, topic: MakeTopic, driver: MakeDriver
) -> Replaying:
    made = Replaying(service, await topic(), await topic(2), driver)
    await made.fill(client)
    return made


@pytest.mark.kill
async def test_a_replay_killed_before_and_after_a_decision_goes_on(
    replaying: Replaying, client: magnetar.Client
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
    await replaying.check(client)


@pytest.mark.kill
@pytest.mark.timeout(900, func_only=True)
async def test_a_replay_killed_at_any_moment_is_exact(
    replaying: Replaying, client: magnetar.Client
) -> None:
    seed = int(os.environ.get("MAGNETAR_KILL_SEED", "0")) or random.SystemRandom().getrandbits(32)
    chance = random.Random(seed)
    print(f"MAGNETAR_KILL_SEED={seed}")
    for number in range(ROUNDS_MAX):
        run = replaying.driver(f"run-{number}")
        if number >= KILLS:
            await run.run_to_end()
            break
        await run.start()
        await asyncio.sleep(chance.uniform(0, LATEST_KILL_S))
        run.kill()
    await replaying.check(client)
