"""The page of metrics as text: made in parts, kept for a while, shared by those who ask."""

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from broker.app.service import Broker
from broker.metrics.exposition import make_broker_registry, topic_families
from broker.metrics.scalable import values_of
from config.bounds import METRICS_KEPT_FACTOR, METRICS_PART_SAMPLES


class MetricsPage:
    """The text for Prometheus of one broker.

    All who ask while it is made get the same page.  It is kept for METRICS_KEPT_FACTOR times as
    long as its parts took the event loop, so that any number of scrapes takes a bounded share.
    """

    def __init__(self, broker: Broker, *, now: Callable[[], float] = time.perf_counter) -> None:
        """`now` is a monotonic clock in seconds."""
        self._broker = broker
        self._registry = make_broker_registry(broker)
        self._now = now
        self._making: asyncio.Task[bytes] | None = None
        self._page = b""
        self._kept_until = now()

    async def text(self) -> bytes:
        """The page: the kept one, or a new one."""
        if self._making is None:
            if self._page and self._now() < self._kept_until:
                return self._page
            self._making = asyncio.get_running_loop().create_task(self._make())
            self._making.add_done_callback(self._made)
        # Whoever leaves does not end it for the others.
        return await asyncio.shield(self._making)

    def _made(self, making: asyncio.Task[bytes]) -> None:
        self._making = None
        if not making.cancelled():
            # Retrieved here too: all who asked may have left.
            making.exception()

    async def _make(self) -> bytes:
        parts: list[bytes] = []
        spent_s, begun = 0.0, self._now()
        for part in self._parts():
            if part:
                parts.append(part.encode())
            spent_s += self._now() - begun
            await asyncio.sleep(0)
            begun = self._now()
        page = b"".join(parts)
        now = self._now()
        self._page = page
        self._kept_until = now + METRICS_KEPT_FACTOR * (spent_s + now - begun)
        return page

    def _parts(self) -> Iterator[str]:
        """The page in parts that take the event loop a few milliseconds each."""
        families = topic_families(self._broker)
        topics = list(self._broker.topics.loaded().values())
        scalable = values_of(self._broker, self._broker.scalable.in_memory())
        non_persistent = list(self._broker.topics.non_persistent.loaded().values())
        unloaded = self._broker.topics.unloaded.by_topic
        for _ in families.collect(topics, non_persistent, unloaded, scalable):
            yield ""
        yield from _bundled(families.text())
        yield from _bundled(_text_of(metric) for metric in self._registry.collect())


def _bundled(texts: Iterator[str]) -> Iterator[str]:
    """Join short texts, so that each is about as long as METRICS_PART_SAMPLES lines."""
    bundle: list[str] = []
    lines = 0
    for text in texts:
        bundle.append(text)
        lines += text.count("\n")
        if lines >= METRICS_PART_SAMPLES:
            yield "".join(bundle)
            bundle, lines = [], 0
    yield "".join(bundle)


class _One(Collector):
    """A collector of one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _text_of(metric: Metric) -> str:
    registry = CollectorRegistry()
    registry.register(_One(metric))
    return generate_latest(registry).decode()
