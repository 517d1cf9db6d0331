"""Topics that nobody uses leave memory; the next one who asks loads them again.

Rules:

- A topic goes when it was idle at every look for `idle_topic_unload_s`, and nobody asked for it.
  Idle is: no producer, no consumer, no reader, nothing under way.  Whether it still is so is asked
  again in the very turn in which closing begins; who comes later waits for that and loads it anew.
- What time alone will free of an unloaded topic is not forgotten: it is loaded again when that is
  due, so that retention holds for topics that nobody uses.
- Looks read counters and a monotonic clock; producing and consuming pay nothing for them.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

import structlog

from broker.topics.offloading import Offloads
from broker.topics.registry import TopicRegistry
from broker.topics.topic import Topic
from config.bounds import IDLE_LOOK_S, IDLE_TOPICS_TO_TRIM
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock

T = TypeVar("T", bound=Hashable)
log = structlog.get_logger(__name__)


class IdleWatch(Generic[T]):
    """Pure: who has been idle for `idle_s`, from what is seen at each look."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[T, tuple[int, float]] = {}

    def look(self, seen: Iterable[tuple[T, int, bool]], now_s: float) -> list[T]:
        """Of all (thing, how often it was asked for, whether it is idle): those to let go."""
        since: dict[T, tuple[int, float]] = {}
        expired: list[T] = []
        for thing, uses, idle in seen:
            if not idle:
                continue
            before = self._since.get(thing)
            noted = before if before is not None and before[0] == uses else (uses, now_s)
            if now_s - noted[1] >= self._idle_s:
                expired.append(thing)
            else:
                since[thing] = noted
        self._since = since
        return expired


class ScalableInUse(Protocol):
    """Scalable topics, as they keep segments loaded."""

    def needs(self, topic: Topic) -> bool:
        """Whether a segment has to stay loaded though nobody is attached to it."""
        ...

    async def let_go_of_idle(self, now_s: float) -> None:
        """Forget scalable topics that nobody has used for long enough."""
        ...


class IdleTopicsHost(Protocol):
    """What is needed of the broker."""

    settings: Settings
    clock: Clock
    topics: TopicRegistry
    offloads: Offloads

    @property
    def scalable(self) -> ScalableInUse:
        """Scalable topics."""
        ...


class IdleTopics:
    """Closes topics that nobody has used for a while. `now_s` is monotonic."""

    def __init__(self, broker: IdleTopicsHost, now_s: Callable[[], float]) -> None:
        self._broker = broker
        self._now_s = now_s
        self._idle_s = broker.settings.idle_topic_unload_s
        self._topics: IdleWatch[Topic] = IdleWatch(self._idle_s)
        self._to_trim: dict[TopicName, int] = {}
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Look from time to time, unless topics stay loaded for ever."""
        if self._idle_s:
            self._tasks.keep("idle_topics", self._keep_looking)

    async def stop(self) -> None:
        """No more looks.  May be called again."""
        await self._tasks.stop()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(min(IDLE_LOOK_S, self._idle_s))
            try:
                await self.look()
            except MagnetarError as error:
                log.warning("idle_topics_not_unloaded", error=str(error))

    async def look(self) -> None:
        """One look: load what is due, unload what has been idle for long enough."""
        await self._trim_what_is_due()
        loaded = self._broker.topics.loaded().values()
        seen = ((topic, topic.uses, self._is_idle(topic)) for topic in loaded)
        for topic in self._topics.look(seen, self._now_s()):
            await self._unload(topic, topic.uses)
        await self._broker.scalable.let_go_of_idle(self._now_s())

    def _is_idle(self, topic: Topic) -> bool:
        broker = self._broker
        used = broker.scalable.needs(topic) or broker.offloads.is_running(topic)
        return topic.idle and not used

    async def _unload(self, topic: Topic, uses: int) -> None:
        def still() -> bool:
            return topic.uses == uses and self._is_idle(topic)

        if await self._broker.topics.unload_if(topic, still):
            log.debug("idle_topic_unloaded", topic=str(topic.name))
            due_ms = topic.ledger.next_trim_ms()
            if due_ms is not None and len(self._to_trim) < IDLE_TOPICS_TO_TRIM:
                self._to_trim[topic.name] = due_ms

    async def _trim_what_is_due(self) -> None:
        """Load topics of which something may go by now: loading drops it."""
        now_ms = self._broker.clock.now_ms()
        for name in [name for name, due_ms in self._to_trim.items() if due_ms <= now_ms]:
            del self._to_trim[name]
            try:
                await self._broker.topics.get(name, create=False)
            except MagnetarError as error:
                log.debug("idle_topic_not_trimmed", topic=str(name), error=str(error))
