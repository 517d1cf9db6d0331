"""Compactions of this broker's topics: by request, and by a threshold of their backlog."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Protocol

import structlog

from broker.topics.compaction.run import compact
from broker.topics.topic import Topic, TopicState
from config.bounds import (
    COMPACTION_BACKOFF_MAX_S,
    COMPACTION_CHECKED_TOPICS,
    COMPACTIONS_AT_ONCE,
)
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import EARLIEST
from magnetar.protocol.names import TopicDomain, TopicName
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.clock import Clock
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.types import ManagedLedgerClosed

log = structlog.get_logger(__name__)


class CompactionRunning(PeerError):
    """The topic is being compacted: ask for its status."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class NotCompacted(PeerError):
    """Topics of this kind are not compacted."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.METHOD_NOT_ALLOWED


class CompactableTopics(Protocol):
    """The topics of this broker."""

    def loaded(self) -> Mapping[str, Topic]:
        """The loaded topics by full name."""
        ...

    async def is_migrated(self, name: TopicName) -> bool:
        """Whether a topic or partition is, or was, a segment of a scalable topic."""
        ...


class CompactionHost(Protocol):
    """The parts of a broker that `Compactions` uses."""

    settings: Settings
    clock: Clock

    @property
    def topics(self) -> CompactableTopics:
        """The topics of this broker."""
        ...


class Compactions:
    """Compacts topics, COMPACTIONS_AT_ONCE at the same time."""

    def __init__(self, broker: CompactionHost) -> None:
        self._broker = broker
        self._slots = asyncio.Semaphore(COMPACTIONS_AT_ONCE)
        self._tasks = BackgroundTasks(log, failure_event="compaction_failed")

    def start(self) -> None:
        """Check thresholds from time to time."""
        self._tasks.keep_every(
            self._broker.settings.broker_service_compaction_monitor_interval_s,
            "compactions",
            self.begin_due,
        )

    async def stop(self) -> None:
        """Begin no more runs, and cancel those in progress."""
        await self._tasks.stop()

    async def begin(self, topic: Topic) -> bool:
        """Begin to compact a topic; False if it is being compacted.

        Raises `NotCompacted`, `MetadataError`, `ManagedLedgerFenced`, `TopicUnavailable`.
        """
        await self._require_compactable(topic)
        history = topic.compaction
        if history.running:
            return False
        history.started(self._now_ms())
        try:
            await topic.create_subscription(COMPACTION_CURSOR, EARLIEST)
        except BaseException as error:
            history.failed(self._now_ms(), str(error))
            raise
        self._tasks.start(self._run(topic), f"compaction of {topic.name}")
        return True

    async def _require_compactable(self, topic: Topic) -> None:
        name = topic.name
        if name.domain is not TopicDomain.PERSISTENT:
            raise NotCompacted(
                f"{name} is not compacted: compaction is for persistent:// topics, and a scalable "
                "topic's newest values come from `magnetar pipeline compact`."
            )
        if await self._broker.topics.is_migrated(name):
            raise NotCompacted(
                f"{name} is a segment of {name.partitioned.in_domain(TopicDomain.TOPIC)} and is "
                "not compacted: scalable topics are not."
            )

    async def _run(self, topic: Topic) -> None:
        history, directory = topic.compaction, self._broker.settings.data_dir
        try:
            async with self._slots:
                scratch: Path | None = directory if directory.is_dir() else None
                counts = await compact(topic, scratch)
        except (MagnetarError, OSError) as error:
            history.failed(self._now_ms(), str(error))
            if isinstance(error, ManagedLedgerClosed):
                log.info("compaction_interrupted", topic=str(topic.name))
            else:
                log.warning("compaction_failed", topic=str(topic.name), error=str(error))
        except BaseException as error:
            history.failed(self._now_ms(), str(error) or "the broker stops")
            raise
        else:
            history.succeeded(self._now_ms(), counts.removed)
            log.info(
                "topic_compacted",
                topic=str(topic.name),
                messages=counts.read,
                removed=counts.removed,
                duration_ms=history.duration_ms,
            )

    def _now_ms(self) -> int:
        return self._broker.clock.now_ms()

    # By threshold

    async def begin_due(self) -> None:
        """Begin to compact the loaded topics that have more after the horizon than they may."""
        for number, topic in enumerate(list(self._broker.topics.loaded().values())):
            if number % COMPACTION_CHECKED_TOPICS == 0:
                await asyncio.sleep(0)
            if not self._is_due(topic):
                continue
            try:
                await self.begin(topic)
            except NotCompacted:
                continue
            except MagnetarError as error:
                log.warning("compaction_not_begun", topic=str(topic.name), error=str(error))

    def _is_due(self, topic: Topic) -> bool:
        history = topic.compaction
        ready = topic.state in (TopicState.OPEN, TopicState.SEALED) and not history.running
        if not ready or topic.name.domain is not TopicDomain.PERSISTENT:
            return False
        threshold = topic.policies.compaction_threshold_bytes
        if threshold <= 0 or uncompacted_bytes(topic) <= threshold:
            return False
        # After failures it is tried again later each time.
        interval_s = self._broker.settings.broker_service_compaction_monitor_interval_s
        pause_s = min(interval_s * 2**history.failures, COMPACTION_BACKOFF_MAX_S)
        return not history.failures or self._now_ms() >= history.failed_ms + 1000 * pause_s


def uncompacted_bytes(topic: Topic) -> int:
    """About the size of a topic's entries after its horizon."""
    horizon, total = topic.ledger.compaction.horizon, 0
    for info in topic.ledger.ledgers:
        if horizon is None or info.ledger_id > horizon.ledger_id:
            total += info.size_bytes
        elif info.ledger_id == horizon.ledger_id and info.entries:
            after = info.entries - 1 - horizon.entry_id
            total += info.size_bytes * max(after, 0) // info.entries
    return total
