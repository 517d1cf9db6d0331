"""The timer that reads the counters of loaded topics, for the rates in statistics."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import structlog

from config.bounds import RATE_SAMPLE_S, RATE_SAMPLE_TOPICS
from magnetar.background_tasks import BackgroundTasks

log = structlog.get_logger(__name__)


class SampledTopic(Protocol):
    """A topic with counters."""

    @property
    def traffic(self) -> tuple[int, int, int, int]:
        """The counters of which rates are taken, in the order of `Traffic`."""
        ...

    def sample_rates(self, now_s: float) -> Iterator[None]:
        """Read the counters of the topic, its subscriptions and its clients, one in each step."""
        ...


class RateTimer:
    """Samples the counters of loaded topics, and of their clients, every RATE_SAMPLE_S.

    Producing and consuming pay nothing for it.  `now_s` is the clock of the event loop, which the
    samplers of topics begin with.
    """

    def __init__(
        self, loaded: Callable[[], Iterable[SampledTopic]], now_s: Callable[[], float]
    ) -> None:
        self._loaded = loaded
        self._now_s = now_s
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Sample until `stop`."""
        self._tasks.keep("topic_rates", self._keep_sampling)

    async def stop(self) -> None:
        """Sample no more.  May be called again."""
        await self._tasks.stop()

    async def _keep_sampling(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(RATE_SAMPLE_S)

    async def sample(self) -> None:
        """Read all counters once, in parts."""
        number = 0
        for topic in list(self._loaded()):
            for _ in topic.sample_rates(self._now_s()):
                number += 1
                if number % RATE_SAMPLE_TOPICS == 0:
                    await asyncio.sleep(0)
