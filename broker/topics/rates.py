"""Rates of topics and subscriptions: how much their counters grew, by the second."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from broker.topics.topic import Topic
from config.bounds import RATE_SAMPLE_S, RATE_SAMPLE_TOPICS
from magnetar.background_tasks import BackgroundTasks

log = structlog.get_logger(__name__)


class RateSampler:
    """Reads the counters of all loaded topics every RATE_SAMPLE_S, for `Topic.rates`.

    Producing and consuming pay nothing for it.  `now_s` is monotonic.
    """

    def __init__(
        self, loaded: Callable[[], Mapping[str, Topic]], now_s: Callable[[], float]
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
        for number, topic in enumerate(list(self._loaded().values()), start=1):
            self._sample(topic)
            if number % RATE_SAMPLE_TOPICS == 0:
                await asyncio.sleep(0)

    def _sample(self, topic: Topic) -> None:
        now_s = self._now_s()
        topic.rates.observe(
            now_s,
            topic.messages_in_total,
            topic.bytes_in_total,
            topic.messages_out_total,
            topic.bytes_out_total,
        )
        for subscription in list(topic.subscriptions.values()):
            subscription.rates.observe(
                now_s, 0, 0, subscription.messages_out_total, subscription.bytes_out_total
            )
