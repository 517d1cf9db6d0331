"""Brokers that have lost their sessions together, as when the metadata store was away for long."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from broker.placement import PlacementNotReady
from magnetar.protocol.names import parse_topic_name
from storage.metadata.store import Session
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node

TOPICS = [f"t{number}" for number in range(6)]


async def two_without_session(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Node], Callable[[], None]]:
    """And what gives them one again."""
    nodes = [await cluster.add() for _ in range(2)]
    await cluster.all_know(*nodes)
    again = asyncio.Event()
    for node in nodes:
        opened = node.view.open_session

        async def held_back(
            *, timeout_ms: int, identity: str, opened: Callable[..., Awaitable[Session]] = opened
        ) -> Session:
            await again.wait()
            return await opened(timeout_ms=timeout_ms, identity=identity)

        monkeypatch.setattr(node.view, "open_session", held_back)
        await node.view.expire()
    await until(lambda: all(node.placement._session is None for node in nodes))
    return nodes, again.set


async def test_requests_wait_for_the_next_session_and_are_not_sent_around(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), again = await two_without_session(cluster, monkeypatch)
    waiting: list[str] = []
    live_session = first.placement.live_session

    async def waited_for() -> Session:
        waiting.append("")
        return await live_session()

    monkeypatch.setattr(first.placement, "live_session", waited_for)

    async def create(topic: str) -> int:
        url = f"{first.placement.web_url}/admin/v2/persistent/public/default/{topic}"
        async with cluster.http.put(url) as answer:
            return answer.status

    requests = [asyncio.ensure_future(create(topic)) for topic in TOPICS]
    await until(lambda: len(waiting) >= len(TOPICS) or any(one.done() for one in requests))
    again()
    assert await asyncio.gather(*requests) == [204] * len(TOPICS)


async def test_broker_without_session_takes_no_topic_chosen_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second), again = await two_without_session(cluster, monkeypatch)
    for topic in TOPICS:
        name = parse_topic_name(f"persistent://public/default/{topic}")
        for node in (first, second):
            with pytest.raises(PlacementNotReady, match="no session"):
                node.placement.place(name, authoritative=True)
    again()
