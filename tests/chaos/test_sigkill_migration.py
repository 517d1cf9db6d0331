"""SIGKILL at the steps of migrations: done wholly or not at all, and nothing is lost.

A migration whose record was not written is undone at the next start, and the ordinary topic is as
before; any other one is finished.
"""

import asyncio
import random
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from broker.scalable.steps import StepKind
from tests.chaos import audit
from tests.chaos.routing_producer import RoutingProducer
from tests.chaos.test_sigkill_reshape import (
    all_keys_get_on,
    covers_everything,
    everything_is_there,
)
from tests.support.broker_process import BrokerProcess
from tests.support.dying_broker import DyingBroker, until_one_dies
from tests.support.effort import by_effort, draw_seed
from tests.support.layout_steps import DiesAfter
from tests.support.waiting import end

ROUNDS: Final = by_effort(quick=2, whole=4, nightly=40)
KEYS: Final = 8
DIES_S: Final = 60
NAMESPACE: Final = "public/default"


@pytest.mark.timeout(240 + 30 * ROUNDS)
async def test_sigkill_in_migrations(tmp_path: Path) -> None:
    rng = random.Random(draw_seed())
    broker = DyingBroker(tmp_path)
    try:
        await broker.start()
        for turn in range(ROUNDS):
            local_name, partitions = f"moving-{turn}", rng.choice((0, 3))
            # By turns it has to be undone and finished.
            at = rng.choice([each for each in DiesAfter if each.undone == (turn % 2 == 0)])
            print(f"{local_name}, of {partitions} partitions: dies after {at.value}")
            await make_ordinary(broker, local_name, partitions)
            producer = RoutingProducer(f"persistent://{NAMESPACE}/{local_name}", KEYS)
            stop = asyncio.Event()
            producing = asyncio.create_task(producer.run(broker, stop))
            try:
                await all_keys_get_on(producer, producing)
                await migrate_and_die(broker, local_name, partitions, at)
                await all_keys_get_on(producer, producing)
                if at.undone:
                    status, answer = await broker.rest("POST", migration(local_name))
                    assert status == 204, answer
                    await all_keys_get_on(producer, producing)
                stop.set()
                await producing
            finally:
                await end(producing)
            await everything_is_there(broker, producer)
        assert not broker.faults()
    finally:
        broker.kill()


def migration(local_name: str) -> str:
    return f"/scalable/{NAMESPACE}/{local_name}/migrate"


async def make_ordinary(broker: BrokerProcess, local_name: str, partitions: int) -> None:
    path = f"/persistent/{NAMESPACE}/{local_name}"
    body, target = (partitions, f"{path}/partitions") if partitions else ({}, path)
    status, answer = await broker.rest("PUT", target, body=body)
    assert status == 204, answer
    subscription = f"{path}/subscription/{audit.SUBSCRIPTION}"
    start = {"ledgerId": -1, "entryId": -1}
    status, answer = await broker.rest("PUT", subscription, body=start)
    assert status == 204, answer


async def migrate_and_die(
    broker: DyingBroker, local_name: str, partitions: int, at: DiesAfter
) -> None:
    """Have the broker die at a step of a migration; after a start it is undone or finished."""
    parents = max(partitions, 1)
    broker.die_at(at.patterns(local_name, StepKind.MIGRATE, parents, audit.SUBSCRIPTION))
    request = asyncio.create_task(broker.rest("POST", migration(local_name)))
    await until_one_dies([broker], DIES_S)
    try:
        status, answer = await request
        assert status == 204, answer
        assert not at.undone, "a migration was confirmed before it was stored"
    except aiohttp.ClientError:
        pass
    await broker.start()
    status, record = await broker.rest("GET", f"/scalable/{NAMESPACE}/{local_name}")
    assert status == (404 if at.undone else 200), record
    if not at.undone:
        assert isinstance(record, dict)
        covers_everything(record["segments"])
        assert len(record["segments"]) == 2 * parents
