"""What a failed test shows of a cluster: its scalable topics, open transactions and warnings.

A test that waits for messages in vain tells by this which segment, subscription or transaction did
not move, and whether the brokers or the client had the messages.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import aiohttp

from tests.support.broker_cluster import BrokerCluster
from tests.support.broker_process import BrokerProcess

ANSWER_S: Final = 5
"""How long a broker may take to answer a request."""
LINE_CHARACTERS: Final = 300

Json = dict[str, object]


@contextmanager
def state_on_failure(cluster: BrokerCluster, topics: Sequence[str]) -> Iterator[None]:
    """Add the state of the cluster, and of these topics (`topic://...`), to a failure inside."""
    try:
        yield
    except Exception as failure:
        failure.add_note(asyncio.run(state_of(cluster, topics)))
        raise


async def state_of(cluster: BrokerCluster, topics: Sequence[str]) -> str:
    """Lines about each topic, each broker's open transactions, and each broker's last warnings."""
    running = [each for each in cluster.brokers if each.running]
    lines: list[str] = []
    for topic in topics:
        lines += await _topic_lines(running, topic)
    for number, broker in enumerate(cluster.brokers):
        lines += await _broker_lines(number, broker)
    return "\n".join(line[:LINE_CHARACTERS] for line in lines)


async def _topic_lines(running: Sequence[BrokerProcess], topic: str) -> list[str]:
    local = topic.partition("://")[2]
    layout = await _first_answer(running, f"/scalable/{local}")
    if layout is None:
        return [f"{topic}: no broker tells its layout"]
    lines = [f"{topic}: epoch {layout.get('epoch')}"]
    segments = layout.get("segments")
    for segment in segments.values() if isinstance(segments, dict) else ():
        hashes = segment["hashRange"]
        name = f"{hashes['start']:04x}-{hashes['end']:04x}-{segment['segmentId']}"
        lines.append(f"  {name} {segment['state']}")
        stats = await _first_answer(running, f"/segments/{local}/{name}/stats")
        lines += _subscription_lines(stats)
    for broker in running:
        lines += await _read_position_lines(broker, topic)
    return lines


def _subscription_lines(stats: Json | None) -> list[str]:
    found = None if stats is None else stats.get("subscriptions")
    if not isinstance(found, dict):
        return ["    no broker tells its statistics"]
    return [
        f"    {name}: backlog {each['msgBacklog']}, unacknowledged {each['unackedMessages']}, "
        f"permits of consumers {[one['availablePermits'] for one in each['consumers']]}"
        for name, each in found.items()
    ]


async def _read_position_lines(broker: BrokerProcess, topic: str) -> list[str]:
    """How far readers get on each segment that the broker has loaded, and what holds them back."""
    domain, _, local = topic.partition("://")
    answer = await _answer(broker, f"/why/{domain}/{local}", transactions=True)
    segments = None if answer is None else answer.get("segments")
    return [
        f"  {each['segment']}: {each['state']}, readable up to {each['horizon']} of "
        f"{each['lastConfirmed']}, transactions {json.dumps(each['transactions'])}"
        for each in (segments if isinstance(segments, list) else ())
        if each["loaded"]
    ]


async def _broker_lines(number: int, broker: BrokerProcess) -> list[str]:
    if not broker.running:
        return [f"broker {number} does not run"]
    answer = await _answer(broker, "/open", transactions=True)
    count = "an unknown number of" if answer is None else answer.get("open")
    lines = [f"broker {number}: {count} open transactions; the last warning of each kind:"]
    return lines + [f"  {times} x {line}" for line, times in _warnings(broker.log())]


def _warnings(log: str) -> list[tuple[str, int]]:
    """The last warning of each event, and how many there are of it, in the order of the log."""
    counts: Counter[str] = Counter()
    last: dict[str, str] = {}
    for line in log.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and record.get("level") in ("warning", "error", "critical"):
            event = str(record.get("event"))
            counts[event] += 1
            last.pop(event, None)
            last[event] = line
    return [(line, counts[event]) for event, line in last.items()]


async def _first_answer(brokers: Sequence[BrokerProcess], path: str) -> Json | None:
    """The first answer of any broker: others may redirect, or be about to end."""
    for broker in brokers:
        answer = await _answer(broker, path)
        if answer is not None:
            return answer
    return None


async def _answer(broker: BrokerProcess, path: str, *, transactions: bool = False) -> Json | None:
    """The JSON object with which a broker answers a GET; None if it does not."""
    ask = broker.transactions if transactions else broker.rest
    try:
        async with asyncio.timeout(ANSWER_S):
            status, answer = await ask("GET", path)
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None
    return answer if status == 200 and isinstance(answer, dict) else None
