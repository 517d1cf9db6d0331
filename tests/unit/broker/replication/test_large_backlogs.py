"""A backlog of large messages is sent in parts, between which the broker serves others."""

import pytest

from broker.replication.replicator import Replicator
from config.bounds import REPLICATED_BYTES_AT_ONCE
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster

Pair = tuple[Cluster, Cluster]
SIZE = 100_000


async def test_one_turn_sends_few_large_messages(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await west.stop()
    sent = [bytes(SIZE) for _ in range(50)]
    await east.publish(*sent)
    run, turns = Replicator.run, list[int]()

    def measured(replicator: Replicator) -> None:
        before = replicator.counts.bytes
        run(replicator)
        turns.append(replicator.counts.bytes - before)

    monkeypatch.setattr(Replicator, "run", measured)
    await west.start()
    await until(east.is_done)
    assert max(turns) < REPLICATED_BYTES_AT_ONCE + 2 * SIZE
    assert await west.payloads(len(sent)) == sent
