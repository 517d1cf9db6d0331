"""Another cluster that answers the senders of segments what it should not."""

import pytest

from broker.replication.sent_positions import SentPositions
from magnetar.protocol.backoff import Backoff
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster, send_at_most
from tests.unit.broker.replication.test_scalable_topic_backlogs import (
    SEGMENT,
    payloads_of,
    publish,
    replicator_of,
)
from tests.unit.broker.replication.test_scalable_topics import (
    failure_of,
    is_done,
    make,
    pair,
)

__all__ = ["pair"]

Pair = tuple[Cluster, Cluster]


async def test_a_cluster_that_always_has_more_than_was_sent_is_asked_after_growing_pauses(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATION_RETRY_MIN_S", 0.001)
    east, west = pair
    await make(east)
    await make(west)
    asked, pauses, real = list[bool](), list[float](), Backoff.pause_s

    def pause_s(backoff: Backoff) -> float:
        pauses.append(real(backoff))
        return pauses[-1]

    def went_back(*_: object) -> bool:
        asked.append(True)
        return len(asked) < 6

    monkeypatch.setattr(SentPositions, "went_back", went_back)
    monkeypatch.setattr(Backoff, "pause_s", pause_s)
    await publish(east, [b"1"])
    await until(lambda: is_done(east))
    assert await payloads_of(west) == [b"1"]
    assert sorted({round(each / 0.001) for each in pauses}) >= [1, 2, 4, 8, 16]


async def test_an_entry_that_is_too_large_there_waits_until_the_cluster_takes_more(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    send_at_most(monkeypatch, west, 1000)
    await make(east)
    await make(west)
    sent = [b"1", b"2" * 2000, b"3"]
    await publish(east, sent)
    segment = east.broker.topics.loaded()[SEGMENT]
    await until(lambda: "cluster 'west' takes 1000: let it take more" in failure_of(segment))
    # What is before it is sent, and what is behind it waits.
    await until(lambda: replicator_of(east).subscription.backlog == 2)
    assert await payloads_of(west) == sent[:1]
    send_at_most(monkeypatch, west, west.broker.max_message_size + 9000)
    await until(lambda: is_done(east))
    assert await payloads_of(west) == sent
    assert not failure_of(segment)
