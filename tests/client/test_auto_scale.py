"""A topic whose load rises tenfold and falls again, while consumers of every kind read it.

It goes from one segment to several and back by itself, with cooldowns of seconds.  No message is
lost or read twice, and messages of one key stay in order.
"""

import asyncio
from pathlib import Path

import pytest

from tests.client.scaling_load import LOW, SETTINGS, ScalingLoad
from tests.conftest import Report
from tests.support.broker_process import running
from tests.support.waiting import until_awaited

HIGH = 10 * LOW
CHANGE_S = 60
"""Time in which the topic has to have grown, or shrunk, on a busy machine."""


@pytest.mark.magnetar_only("what its policy decides is tested, by the history")
async def test_topic_grows_and_shrinks_with_its_load(tmp_path: Path, report: Report) -> None:
    async with running(tmp_path, SETTINGS) as broker, ScalingLoad.on(broker) as load:

        async def has_grown() -> bool:
            return await load.active() >= 3

        async def has_shrunk() -> bool:
            return await load.active() == 1

        await asyncio.sleep(4)
        assert await load.active() == 1
        load.rate = HIGH
        await until_awaited(has_grown, timeout_s=CHANGE_S)
        largest = await load.active()
        load.rate = LOW
        await until_awaited(has_shrunk, timeout_s=CHANGE_S)
        await load.stop()
        changes = await load.changes()
    load.check()
    assert {kind for kind, _ in changes} == {"split", "merge"}
    assert all(cause.startswith(("rate: ", "merge: ")) for _, cause in changes)
    report(
        f"automatic splits: {LOW} to {HIGH} to {LOW} msg/s, 1 to {largest} to 1 segments, "
        f"{len(changes)} changes, {load.sent.total()} messages, 0 order breaks"
    )
