"""What brokers say of topics where nothing moves any more, for whoever reads a failed run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

import aiohttp

from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess

LOG_LINES: Final = 100
"""Of each broker, the newest."""


async def describe(brokers: BrokerCluster, topics: Iterable[str]) -> str:
    """Each topic's layout, consumers and backlogs, and the end of each broker's log."""
    running = [each for each in brokers.brokers if each.running and not each.paused]
    told = [await _stats(running, topic) for topic in topics]
    for number, broker in enumerate(brokers.brokers):
        lines = broker.log().splitlines()[-LOG_LINES:]
        told += [f"broker {number}, port {broker.port}, its log's end:", *lines]
    return "\n".join(told)


async def _stats(brokers: Iterable[BrokerProcess], topic: str) -> str:
    refused: list[str] = []
    for broker in brokers:
        try:
            status, answer = await broker.rest("GET", f"/scalable/public/default/{topic}/stats")
        except (aiohttp.ClientError, TimeoutError) as error:
            refused.append(f"{topic} at port {broker.port}: {error!r}")
            continue
        if status == 200:
            assert isinstance(answer, dict)
            return "\n".join([topic, *(f"  {name}: {json.dumps(answer[name])}" for name in answer)])
        refused.append(f"{topic} at port {broker.port}: {status} {answer}")
    return "\n".join(refused)
