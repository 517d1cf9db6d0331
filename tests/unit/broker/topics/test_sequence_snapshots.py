"""When a topic saves the ids of its producers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.support.bounds import set_bound
from tests.support.lone_topics import lone_topics


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_clients_that_attach_when_a_snapshot_is_due_at_once_wait_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    # uvloop gives another handle for a timer that is due within half a millisecond.
    set_bound(monkeypatch, "SEQUENCE_ATTACH_S", 0.0002)

    async def attach() -> None:
        async with lone_topics(tmp_path) as topics:
            store = (await topics.open("persistent://public/default/t")).sequence_store
            for _ in range(5):
                await asyncio.gather(*(store.save_writer() for _ in range(3)))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(attach())
