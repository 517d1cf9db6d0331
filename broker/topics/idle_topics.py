"""Unloading of topics that nobody uses; the next request for such a topic loads it again."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar
from weakref import ref

import structlog

from broker.placement import Placement
from broker.topics.inactive_topics import NOT_OURS, is_deletable
from broker.topics.offloading import Offloads
from broker.topics.registry import TopicRegistry
from broker.topics.subscription_expiry import expires_at_ms
from broker.topics.topic import Topic
from config.bounds import IDLE_LOOK_S, IDLE_TOPICS_TO_TRIM, TRIM_RETRY_MS
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.names import TopicName
from magnetar.protocol.server_error import MagnetarError
from storage.clock import Clock

T = TypeVar("T", bound=Hashable)
log = structlog.get_logger(__name__)


class IdleWatch(Generic[T]):
    """Finds things that were idle at every observation for `idle_s` seconds.

    It has no clock: callers pass the time.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._since: dict[T, tuple[int, float]] = {}

    def observe(self, seen: Iterable[tuple[T, int, bool]], now_s: float) -> list[T]:
        """Take all of (thing, number of its uses, whether it is idle); returns those to unload.

        A use between two observations begins the idle time anew.
        """
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
    """Scalable topics, which keep some idle segments loaded."""

    def needs(self, topic: Topic) -> bool:
        """Whether a segment has to stay loaded though no client is attached to it."""
        ...

    async def let_go_of_idle(self, now_s: float) -> None:
        """Forget scalable topics that were not used for long enough."""
        ...


class IdleTopicsHost(Protocol):
    """The parts of a broker that `IdleTopics` uses."""

    settings: Settings
    clock: Clock
    topics: TopicRegistry
    placement: Placement
    offloads: Offloads

    @property
    def scalable(self) -> ScalableInUse:
        """Scalable topics."""
        ...


class IdleTopics:
    """Closes topics that were idle at every check for `idle_topic_unload_s`.

    Idle is a topic without producers, consumers, readers and work in progress.  A check reads
    counters, so producing and consuming pay nothing for it.  `now_s` is monotonic.
    """

    def __init__(self, broker: IdleTopicsHost, now_s: Callable[[], float]) -> None:
        self._broker = broker
        self._now_s = now_s
        self._idle_s = broker.settings.idle_topic_unload_s
        # Weakly: a topic that is deleted must not stay in memory until the next check.
        self._topics: IdleWatch[ref[Topic]] = IdleWatch(self._idle_s)
        self._to_trim: dict[TopicName, int] = {}
        self._tasks = BackgroundTasks(log)

    def start(self) -> None:
        """Check from time to time, unless topics stay loaded for ever."""
        if self._idle_s:
            self._tasks.keep("idle_topics", self._keep_unloading)

    async def stop(self) -> None:
        """Check no more.  May be called again."""
        await self._tasks.stop()

    async def _keep_unloading(self) -> None:
        while True:
            await asyncio.sleep(min(IDLE_LOOK_S, self._idle_s))
            try:
                await self.unload_idle()
            except MagnetarError as error:
                log.warning("idle_topics_not_unloaded", error=str(error))

    async def unload_idle(self) -> None:
        """Load topics whose retention is due; unload topics that were idle for long enough."""
        await self._trim_due_topics()
        loaded = self._broker.topics.loaded().values()
        seen = ((ref(topic), topic.uses, self._is_idle(topic)) for topic in loaded)
        for reference in self._topics.observe(seen, self._now_s()):
            topic = reference()
            if topic is not None:
                await self._unload(topic, topic.uses)
        await self._broker.scalable.let_go_of_idle(self._now_s())

    def _is_idle(self, topic: Topic) -> bool:
        broker = self._broker
        return topic.idle and not (
            broker.scalable.needs(topic)
            or broker.offloads.is_running(topic)
            or _has_messages_to_expire(topic)
            or self._waits_for_deletion(topic)
        )

    def _waits_for_deletion(self, topic: Topic) -> bool:
        """Whether a check will soon delete it, or a subscription: checks see loaded topics only."""
        # Legacy segments of scalable topics are sealed, and nothing of them is deleted.
        if topic.sealed:
            return False
        due_ms, now_ms = _next_expiry_ms(topic), self._broker.clock.now_ms()
        return is_deletable(topic) or (due_ms is not None and due_ms <= now_ms)

    async def _unload(self, topic: Topic, uses: int) -> None:
        def still_idle() -> bool:
            return topic.uses == uses and self._is_idle(topic)

        # Checked again in the turn of the loop in which closing begins: a request that comes later
        # waits for the end of closing, and loads the topic anew.
        if await self._broker.topics.unload_if(topic, still_idle):
            log.debug("idle_topic_unloaded", topic=str(topic.name))
            if not self._broker.placement.shared:
                # In a cluster the leader reads it (`StoredBacklogs`).
                self._broker.topics.unloaded.remember(topic)
            # Retention and the expiry of subscriptions hold for unloaded topics too: this one is
            # loaded again when one of them is due.
            times_ms = topic.ledger.next_trim_ms(), _next_expiry_ms(topic)
            due_ms = min((each for each in times_ms if each is not None), default=None)
            if due_ms is not None and len(self._to_trim) < IDLE_TOPICS_TO_TRIM:
                self._to_trim[topic.name] = due_ms

    async def _trim_due_topics(self) -> None:
        """Load unloaded topics whose retention is due: loading a topic trims it."""
        now_ms = self._broker.clock.now_ms()
        for name in [name for name, due_ms in self._to_trim.items() if due_ms <= now_ms]:
            del self._to_trim[name]
            try:
                await self._broker.topics.get(name, create=False)
            except NOT_OURS as error:
                log.debug("idle_topic_not_trimmed", topic=str(name), error=str(error))
            except MagnetarError as error:
                # Such as a store that is away: nobody else would load it.
                log.info("idle_topic_not_trimmed_yet", topic=str(name), error=str(error))
                self._to_trim[name] = now_ms + TRIM_RETRY_MS


def _has_messages_to_expire(topic: Topic) -> bool:
    """Whether messages may reach their time to live, which is checked for loaded topics only."""
    return topic.policies.message_ttl_s > 0 and any(
        each.backlog for each in topic.subscriptions.values()
    )


def _next_expiry_ms(topic: Topic) -> int | None:
    """When the next of a topic's subscriptions is to be deleted because nobody uses it."""
    times_ms = (expires_at_ms(topic, each) for each in topic.subscriptions.values())
    return min((each for each in times_ms if each is not None), default=None)
