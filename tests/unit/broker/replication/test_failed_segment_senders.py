"""Errors in the sender of a segment that nobody expected: it begins anew, and says so."""

from collections.abc import Callable

import pytest

import broker.replication.outgoing_entry
import broker.replication.remote_cluster
import broker.replication.remote_sessions
import broker.replication.segment_replicator
from broker.replication.remote_topic import RemoteTopic
from broker.replication.segment_entries import outgoing_part
from broker.replication.segment_sender import SegmentSender
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster
from tests.unit.broker.replication.test_scalable_topics import (
    Written,
    failure_of,
    has,
    make,
    pair,
    segments_of,
    writing,
)

__all__ = ["pair"]

Pair = tuple[Cluster, Cluster]


class Failing:
    """Fails as a defect would, as long as it is told to."""

    def __init__(self, works: Callable[..., object]) -> None:
        self.on = True
        self._works = works

    def __call__(self, *args: object, **named: object) -> object:
        if self.on:
            raise ValueError("a defect")
        return self._works(*args, **named)


async def fails_and_goes_on(east: Cluster, west: Cluster, failing: Failing) -> None:
    """Write while it fails, and have everything there once it works."""
    written: Written = {}
    async with writing(east, written, batching=False) as writer:
        await writer.write(1)
        await until(lambda: bool(failure_of(segments_of(east)[0])))
        failing.on = False
        await writer.write(1)
        await has(west, written)
    await until(lambda: not failure_of(segments_of(east)[0]))


async def test_an_entry_that_cannot_be_built_is_sent_when_it_can(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    module = broker.replication.outgoing_entry
    failing = Failing(outgoing_part)
    monkeypatch.setattr(module, "outgoing_part", failing)
    await fails_and_goes_on(east, west, failing)


async def test_a_layout_that_cannot_be_taken_is_asked_for_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    module = broker.replication.segment_replicator
    failing = Failing(SegmentSender)
    monkeypatch.setattr(module, "SegmentSender", failing)
    await fails_and_goes_on(east, west, failing)


async def test_a_topic_that_cannot_be_made_there_is_made_when_it_can(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east)
    of = broker.replication.remote_cluster.RemoteCluster
    failing = Failing(of.make_scalable_topic)

    def make_there(*args: object) -> object:
        return failing(*args)

    monkeypatch.setattr(of, "make_scalable_topic", make_there)
    await fails_and_goes_on(east, west, failing)


async def test_a_topic_that_cannot_be_followed_is_followed_when_it_can(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await make(east)
    await make(west)
    failing = Failing(RemoteTopic)
    monkeypatch.setattr(broker.replication.remote_sessions, "RemoteTopic", failing)
    await fails_and_goes_on(east, west, failing)
