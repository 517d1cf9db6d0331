"""Offloading of topics: requested by operators, or begun by a namespace's policy."""

import asyncio
import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar, Protocol

import structlog

from broker.policies.namespaces import Namespaces
from broker.topics.registry import TopicRegistry
from broker.topics.topic import Topic, TopicState
from config.bounds import (
    OFFLOAD_BACKOFF_MAX_S,
    OFFLOAD_LOOK_S,
    OFFLOAD_OUTCOMES,
    OFFLOADS_AT_ONCE,
)
from config.settings import Settings
from magnetar.background_tasks import BackgroundTasks
from magnetar.protocol.ids import LATEST, Position
from magnetar.protocol.names import TopicName, parse_ledger_path
from magnetar.protocol.server_error import MagnetarError, PeerError, ServerError
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.managed_ledger.trimming import offload_end
from storage.managed_ledger.types import ManagedLedgerClosed
from storage.offload.context import FILE, Location, parse_location

log = structlog.get_logger(__name__)


class OffloadRunning(PeerError):
    """The topic is being offloaded: ask for its status."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class OffloadNotConfigured(PeerError):
    """No `offload_url` is set, or the requested URL is not below it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class OffloadState(enum.Enum):
    """State of a topic's offload since this broker started (names are Pulsar's)."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the last run of a topic, and its number of failures in a row.

    A policy begins no run before `retry_s`, in seconds of the monotonic clock.
    """

    state: OffloadState
    error: str = ""
    failures: int = 0
    retry_s: float = 0.0


NOT_RUN = Outcome(OffloadState.NOT_RUN)


def location_of(settings: Settings, url: str | None = None) -> Location:
    """The location of copies: `offload_url`, or the requested one below it.

    Raises `OffloadNotConfigured`, `InvalidOffloadUrl`.
    """
    if not settings.offload_url:
        raise OffloadNotConfigured(
            "There is no place for offloaded ledgers: set offload_url to s3://BUCKET/PREFIX or "
            "file:///PATH."
        )
    region, endpoint = settings.offload_region, settings.offload_endpoint
    base = parse_location(settings.offload_url, region=region, endpoint=endpoint)
    if url is None:
        return base
    wanted = parse_location(url, region=region, endpoint=endpoint)
    # A user of the REST API must not make the broker write to just any place.
    if not _is_below(wanted, base):
        raise OffloadNotConfigured(
            f"{wanted.url} is not below {base.url}, where this broker may put copies: name a place "
            "there, or change offload_url."
        )
    return wanted


def _is_below(wanted: Location, base: Location) -> bool:
    if wanted.scheme == base.scheme == FILE:
        parts = wanted.bucket.split("/")
        return f"{wanted.bucket}/".startswith(f"{base.bucket}/") and ".." not in parts
    if ".." in wanted.prefix.split("/"):
        # A client of the object store may take it for the level above, as URLs have it.
        return False
    below = not base.prefix or f"{wanted.prefix}/".startswith(f"{base.prefix}/")
    return (wanted.scheme, wanted.bucket) == (base.scheme, base.bucket) and below


class OffloadsHost(Protocol):
    """The parts of a broker that `Offloads` uses."""

    settings: Settings
    namespaces: Namespaces
    managed_ledgers: ManagedLedgerFactory
    topics: TopicRegistry


class Offloads:
    """Runs offloads of topics, by request or by policy.

    There is one run for each topic, and OFFLOADS_AT_ONCE for the broker; more wait.  A topic with a
    run is not unloaded as idle.  `now_s` is monotonic.
    """

    def __init__(self, broker: OffloadsHost, now_s: Callable[[], float]) -> None:
        self._broker = broker
        self._now_s = now_s
        self._runs: dict[TopicName, asyncio.Task[None]] = {}
        self._outcomes: dict[TopicName, Outcome] = {}
        self._slots = asyncio.Semaphore(OFFLOADS_AT_ONCE)
        self._tasks = BackgroundTasks(log)
        if broker.settings.offload_url:
            location_of(broker.settings)

    def start(self) -> None:
        """Begin due runs from time to time."""
        self._tasks.keep("offloads", self._keep_starting)

    async def stop(self) -> None:
        """Begin no more runs, and cancel those in progress."""
        await self._tasks.stop()
        for run in (runs := list(self._runs.values())):
            run.cancel()
        if runs:
            await asyncio.wait(runs)

    @property
    def running(self) -> int:
        """Number of topics that are being offloaded, or wait for it."""
        return len(self._runs)

    def is_running(self, topic: Topic) -> bool:
        """Whether a topic is being offloaded, or waits for it."""
        return topic.name in self._runs

    def outcome(self, topic: Topic) -> Outcome:
        """The state of a topic's offload."""
        if self.is_running(topic):
            return Outcome(OffloadState.RUNNING)
        return self._outcomes.get(topic.name, NOT_RUN)

    async def offload(
        self,
        topic: Topic,
        *,
        url: str | None = None,
        up_to: Position = LATEST,
        alone: bool = False,
    ) -> None:
        """Have ledgers that end before `up_to` copied; returns when the request is stored.

        With `alone` a topic with a run is refused (`OffloadRunning`); otherwise that run does this
        too.  Raises `OffloadNotConfigured`, `InvalidOffloadUrl`, `MetadataError`,
        `ManagedLedgerFenced`.
        """
        if alone and self.is_running(topic):
            raise OffloadRunning(
                f"{topic.name} is being offloaded: wait until its status is not RUNNING."
            )
        location = location_of(self._broker.settings, url)
        # Stored in the topic's record before it begins, so a restart only delays it.
        pending = await topic.ledger.offload.request(location, up_to)
        if pending or not self.is_running(topic):
            self._begin(topic)

    async def drop_hot(self, topic: Topic, ledger_ids: Collection[int] | None = None) -> list[int]:
        """Delete now the ledgers (these, or all) whose copy is complete; returns their ids."""
        return await topic.ledger.offload.drop_hot(ledger_ids)

    def _begin(self, topic: Topic) -> None:
        if topic.name not in self._runs:
            run = asyncio.get_running_loop().create_task(self._run(topic))
            self._runs[topic.name] = run
            run.add_done_callback(lambda done: self._ended(topic, done))

    async def _run(self, topic: Topic) -> None:
        async with self._slots:
            while topic.ledger.offload.pending():
                await topic.ledger.offload.run()

    def _ended(self, topic: Topic, run: "asyncio.Task[None]") -> None:
        del self._runs[topic.name]
        failures = self._outcomes.pop(topic.name, NOT_RUN).failures
        if run.cancelled():
            return
        error = run.exception()
        if error is None:
            self._keep(topic.name, Outcome(OffloadState.SUCCESS))
            return
        if isinstance(error, ManagedLedgerClosed):
            log.info("offload_interrupted", topic=str(topic.name))
            return
        reason = str(error)
        if isinstance(error, MagnetarError):
            log.warning("offload_failed", topic=str(topic.name), error=reason)
        else:
            log.error("offload_failed", topic=str(topic.name), exc_info=error)
        # No Backoff: outcomes are values, and the count of failures is all that is kept of a topic.
        pause_s = min(OFFLOAD_LOOK_S * 2**failures, OFFLOAD_BACKOFF_MAX_S)
        retry_s = self._now_s() + pause_s
        self._keep(topic.name, Outcome(OffloadState.ERROR, reason, failures + 1, retry_s))

    def _keep(self, name: TopicName, outcome: Outcome) -> None:
        self._outcomes[name] = outcome
        if len(self._outcomes) > OFFLOAD_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]

    def lag_ms(self, ledger_path: str) -> int:
        """How long a ledger of a stream is kept beside its copy; -1: until a request deletes it."""
        namespace = parse_ledger_path(ledger_path).namespace_name
        policy = self._broker.namespaces.known(namespace).offload_deletion_lag_ms
        usual = self._broker.managed_ledgers.limits.offload_deletion_lag_ms
        return usual if policy is None else policy

    # By policy

    async def _keep_starting(self) -> None:
        while True:
            await asyncio.sleep(OFFLOAD_LOOK_S)
            await self.start_due_runs()

    async def start_due_runs(self) -> None:
        """Begin runs of requests that are stored and not finished, and runs by policy."""
        for topic in list(self._broker.topics.loaded().values()):
            ready = topic.state in (TopicState.OPEN, TopicState.SEALED)
            if not ready or self.is_running(topic):
                continue
            outcome = self._outcomes.get(topic.name, NOT_RUN)
            if self._now_s() < outcome.retry_s:
                continue
            try:
                await self._start_if_due(topic)
            except MagnetarError as error:
                log.warning("offload_not_begun", topic=str(topic.name), error=str(error))

    async def _start_if_due(self, topic: Topic) -> None:
        settings = self._broker.settings
        policies = self._broker.namespaces.known(topic.name.namespace_name)
        threshold = policies.offload_threshold_bytes
        if threshold is None:
            threshold = settings.offload_threshold_bytes
        up_to = offload_end(topic.ledger.ledgers, threshold) if settings.offload_url else None
        if up_to is not None:
            await self.offload(topic, up_to=up_to)
        elif topic.ledger.offload.pending():
            self._begin(topic)
