"""When a topic saves the ids of its producers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from storage.managed_ledger.ledger import ManagedLedger
from storage.metadata.store import MetadataError
from tests.support.bounds import set_bound
from tests.support.embedded_broker import running
from tests.support.lone_topics import lone_topics
from tests.support.raw_client import RawClient
from tests.support.waiting import until


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


async def test_a_snapshot_that_failed_is_taken_again_though_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "SEQUENCE_SNAPSHOT_S", 0.01)
    set_bound(monkeypatch, "SEQUENCE_WRITERS_S", 0.01)
    tries: list[str] = []
    write = ManagedLedger.set_properties

    async def written_the_third_time(ledger: ManagedLedger, changes: dict[str, str | None]) -> None:
        tries.extend(changes)
        if len(tries) < 3:
            raise MetadataError("The store is away.")
        await write(ledger, changes)

    async with running(tmp_path) as broker:
        client = await RawClient.open("127.0.0.1", broker.port)
        producer = await client.create_producer("persistent://public/default/t")
        (topic,) = broker.topics.loaded().values()
        store = topic.sequence_store
        monkeypatch.setattr(ManagedLedger, "set_properties", written_the_third_time)
        await producer.send(b"x")
        await until(lambda: not store.unsaved_entries)
        assert len(tries) == 3
        del tries[:]
        store.writers_changed()
        await until(lambda: len(tries) == 3)
        await client.close()
