"""`OnDemandProducer`: the producer of a replicator, attached while there is something to send."""

import asyncio
from collections.abc import Callable

import structlog

from broker.replication.remote_producer import RemoteProducer
from broker.replication.sent_counts import Unsent
from config.bounds import REPLICATOR_IDLE_S
from magnetar.wire.attachment import AttachmentState
from storage.callbacks import ignore

log = structlog.get_logger(__name__)


class OnDemandProducer:
    """Leaves the other cluster when nothing was sent for REPLICATOR_IDLE_S, and attaches again.

    An inactive topic can be deleted there only while it has no producer, as in Apache Pulsar.
    """

    def __init__(
        self,
        first: RemoteProducer,
        make_next: Callable[[], RemoteProducer],
        unsent: Unsent,
        left: Callable[[], None],
    ) -> None:
        """`left` is called whenever a producer has left."""
        self.current = first
        """It is closed once it has left; `make_next` makes another one then."""
        self._make_next = make_next
        self._unsent = unsent
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._used_s = self._loop.time()
        """When there was last something to send, by the loop's time."""
        self._idle_check: asyncio.TimerHandle | None = None
        self._opening: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    @property
    def is_attached(self) -> bool:
        """Whether entries can be sent."""
        return self.current.state is AttachmentState.ATTACHED and self._leaving is None

    @property
    def has_left(self) -> bool:
        """Whether it has left the other cluster, as there was nothing to send."""
        return self.current.state is AttachmentState.CLOSED and self._leaving is None

    def open(self) -> None:
        """Begin to attach."""
        self._open()
        self._idle_check = self._loop.call_later(REPLICATOR_IDLE_S, self._leave_if_idle)

    def used(self) -> None:
        """Note that something was sent."""
        self._used_s = self._loop.time()

    def return_if_needed(self) -> None:
        """Attach again, if it has left and there is something to send."""
        if self.has_left and self._unsent.backlog:
            self.current = self._make_next()
            self._open()

    async def close(self) -> None:
        """Leave for good; bounded in time."""
        if self._idle_check is not None:
            self._idle_check.cancel()
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        closed = self.current
        await closed.close()
        # The owner has this object: a circle would keep both until a garbage collection.
        self._make_next, self._left = lambda: closed, ignore

    def _open(self) -> None:
        self._opening = self._loop.create_task(self.current.open(None))
        self._opening.add_done_callback(self._opened)

    def _opened(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            producer = self.current
            log.error(
                "replicator_failed",
                topic=producer.topic,
                cluster=producer.cluster,
                error=str(error),
            )

    def _leave_if_idle(self) -> None:
        if self._unsent.backlog or not self.is_attached:
            self.used()
        wait_s = self._used_s + REPLICATOR_IDLE_S - self._loop.time()
        if wait_s <= 0:
            log.info("replicator_idle", topic=self.current.topic, cluster=self.current.cluster)
            self._leaving = self._loop.create_task(self.current.close())
            self._leaving.add_done_callback(self._leaving_ended)
            wait_s = REPLICATOR_IDLE_S
        self._idle_check = self._loop.call_later(wait_s, self._leave_if_idle)

    def _leaving_ended(self, task: "asyncio.Task[None]") -> None:
        self._leaving = None
        if not task.cancelled():
            self._left()
