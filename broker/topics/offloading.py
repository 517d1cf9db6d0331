"""Which topics are being offloaded: asked for by operators, or because a namespace wants it.

Rules:

- One run for each topic, OFFLOADS_AT_ONCE for the broker; more wait.  What a run is to do is in the
  topic's record before it begins (`StreamOffload.request`), so a restart only delays it: looks at
  the loaded topics begin again what is not finished, after a failure with a growing pause.
- A topic that is being offloaded is not unloaded for idleness.
- Copies go below `offload_url` and nowhere else: who may speak REST may not choose any place.
"""

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
    """There is no place for copies, or this is not below it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.PRECONDITION_FAILED


class OffloadState(enum.Enum):
    """Where the offload of a topic stands, since this broker started: Pulsar's words."""

    NOT_RUN = "NOT_RUN"
    RUNNING = "RUNNING"
    SUCCESS = "SUCCESS"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the last run of a topic went.  `retry_s`: not by itself before this, of the loop's clock.

    `failures`: in a row.
    """

    state: OffloadState
    error: str = ""
    failures: int = 0
    retry_s: float = 0.0


NOT_RUN = Outcome(OffloadState.NOT_RUN)


def location_of(settings: Settings, url: str | None = None) -> Location:
    """Where copies go, or the place below it that was asked for.

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
    below = not base.prefix or f"{wanted.prefix}/".startswith(f"{base.prefix}/")
    return (wanted.scheme, wanted.bucket) == (base.scheme, base.bucket) and below


class OffloadsHost(Protocol):
    """What is needed of the broker."""

    settings: Settings
    namespaces: Namespaces
    managed_ledgers: ManagedLedgerFactory
    topics: TopicRegistry


class Offloads:
    """Runs offloads of topics, by request or by policy, a bounded number at once.

    `now_s` is monotonic.
    """

    def __init__(self, broker: OffloadsHost, now_s: Callable[[], float]) -> None:
        self._broker = broker
        self._now_s = now_s
        self._runs: dict[TopicName, asyncio.Task[None]] = {}
        self._outcomes: dict[TopicName, Outcome] = {}
        self._places = asyncio.Semaphore(OFFLOADS_AT_ONCE)
        self._tasks = BackgroundTasks(log)
        if broker.settings.offload_url:
            location_of(broker.settings)

    def start(self) -> None:
        """Look from time to time."""
        self._tasks.keep("offloads", self._keep_looking)

    async def stop(self) -> None:
        """No more looks; what runs is cut off."""
        await self._tasks.stop()
        for run in (runs := list(self._runs.values())):
            run.cancel()
        if runs:
            await asyncio.wait(runs)

    @property
    def running(self) -> int:
        """Topics that are being offloaded, or wait for it."""
        return len(self._runs)

    def is_running(self, topic: Topic) -> bool:
        """Whether one is being offloaded, or waits for it."""
        return topic.name in self._runs

    def outcome(self, topic: Topic) -> Outcome:
        """How it stands with a topic."""
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
        """Have what has ended before `up_to` copied, and return when that is noted.

        `alone` refuses if a run is under way (`OffloadRunning`); else it does this too.  Raises
        `OffloadNotConfigured`, `InvalidOffloadUrl`, `MetadataError`, `ManagedLedgerFenced`.
        """
        if alone and self.is_running(topic):
            raise OffloadRunning(
                f"{topic.name} is being offloaded: wait until its status is not RUNNING."
            )
        location = location_of(self._broker.settings, url)
        pending = await topic.ledger.offload.request(location, up_to)
        if pending or not self.is_running(topic):
            self._begin(topic)

    async def drop_hot(self, topic: Topic, ledger_ids: Collection[int] | None = None) -> list[int]:
        """Delete now the ledgers (these, or all) whose copy is whole; which they were."""
        return await topic.ledger.offload.drop_hot(ledger_ids)

    def _begin(self, topic: Topic) -> None:
        if topic.name not in self._runs:
            run = asyncio.get_running_loop().create_task(self._run(topic))
            self._runs[topic.name] = run
            run.add_done_callback(lambda done: self._ended(topic, done))

    async def _run(self, topic: Topic) -> None:
        async with self._places:
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
            log.info("offload_cut_off", topic=str(topic.name))
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
        """How long a ledger of that stream stays beside its copy; -1: until it is asked for."""
        namespace = parse_ledger_path(ledger_path).namespace_name
        policy = self._broker.namespaces.known(namespace).offload_deletion_lag_ms
        usual = self._broker.managed_ledgers.limits.offload_deletion_lag_ms
        return usual if policy is None else policy

    # By itself

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(OFFLOAD_LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Begin what is noted and not finished, and what a namespace wants offloaded."""
        for topic in list(self._broker.topics.loaded().values()):
            ready = topic.state in (TopicState.OPEN, TopicState.SEALED)
            if not ready or self.is_running(topic):
                continue
            outcome = self._outcomes.get(topic.name, NOT_RUN)
            if self._now_s() < outcome.retry_s:
                continue
            try:
                await self._look_at(topic)
            except MagnetarError as error:
                log.warning("offload_not_begun", topic=str(topic.name), error=str(error))

    async def _look_at(self, topic: Topic) -> None:
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
