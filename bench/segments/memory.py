"""Many topics of one broker: the memory of each, and the costs of all at rest."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final

from bench.processes import processor_s, resident_mib
from tests.support.broker_process import BrokerProcess, running
from tests.support.child_process import HOST
from tests.support.raw_client import RawClient

AT_ONCE: Final = 32
KIB_OF_MIB: Final = 1024
TIMEOUT_S: Final = 120.0


async def topic_kib(segments: int, total_segments: int, directory: Path) -> float:
    """KiB of one topic with `segments`, measured on topics with `total_segments` together.

    Each topic is watched by a session and has an ordered consumer.  The broker is started again
    first, so that memory taken by their creation does not count.
    """
    count = max(1, total_segments // segments)
    async with running(directory) as broker:
        await _each(count, lambda number: broker.create_scalable(f"t{number}", segments))
        await broker.terminate()
        await broker.start()
        client = await RawClient.open(HOST, broker.port, timeout_s=TIMEOUT_S)
        before_mib = resident_mib(broker.pid)

        async def use(number: int) -> None:
            topic = f"topic://public/default/t{number}"
            await client.watch_dag(topic)
            await client.subscribe_scalable(topic, "ordered", f"c{number}")

        await _each(count, use)
        return (resident_mib(broker.pid) - before_mib) * KIB_OF_MIB / count


class TopicsAtRest:
    """A broker with many scalable topics of one segment, each watched by one session."""

    def __init__(self, directory: Path, count: int) -> None:
        self.broker = BrokerProcess(directory)
        self.figures: dict[str, float] = {"topics": count}
        self._count = count

    async def start(self) -> None:
        """Create the topics, start the broker again, and have all topics watched."""
        began_s = time.perf_counter()
        await self.broker.start()
        self.figures["empty_start_ms"] = (time.perf_counter() - began_s) * 1000
        client = await RawClient.open(HOST, self.broker.port, timeout_s=TIMEOUT_S)
        before_mib = resident_mib(self.broker.pid)

        async def create(number: int) -> None:
            topic = f"topic://public/default/t{number}"
            await client.watch_dag(topic, create_if_missing=True)

        await _each(self._count, create)
        self.figures["created_topic_kib"] = self._topic_kib(before_mib)
        await self.broker.terminate()
        began_s = time.perf_counter()
        await self.broker.start()
        self.figures["start_ms"] = (time.perf_counter() - began_s) * 1000
        self._client = await RawClient.open(HOST, self.broker.port, timeout_s=TIMEOUT_S)
        before_mib = resident_mib(self.broker.pid)
        self.figures["restart_resident_mib"] = before_mib
        began_s = time.perf_counter()
        await self._watch(self._count - 1)
        self.figures["first_lookup_ms"] = (time.perf_counter() - began_s) * 1000
        await _each(self._count - 1, self._watch)
        self.figures["topic_kib"] = self._topic_kib(before_mib)
        self.figures["resident_mib"] = resident_mib(self.broker.pid)

    async def _watch(self, number: int) -> None:
        await self._client.watch_dag(f"topic://public/default/t{number}")

    def _topic_kib(self, before_mib: float) -> float:
        grown_mib = resident_mib(self.broker.pid) - before_mib
        return grown_mib * KIB_OF_MIB / self._count


async def idle_cpu_ms(brokers: list[BrokerProcess], seconds: float) -> list[float]:
    """Milliseconds of processor time per minute of each broker without requests."""
    before = [processor_s(each.pid) for each in brokers]
    await asyncio.sleep(seconds)
    after = [processor_s(each.pid) for each in brokers]
    return [(b - a) * 1000 * 60 / seconds for a, b in zip(before, after, strict=True)]


async def _each(count: int, work: Callable[[int], Coroutine[object, object, object]]) -> None:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with places:
            await work(number)

    await asyncio.gather(*(one(number) for number in range(count)))
