"""The consumers for threads.

Rules: any thread may use a consumer.  A message that arrives while its caller is interrupted is
kept and handed out next, so none is lost on the way.  Iterating ends when the consumer is closed.
"""

from collections import deque
from collections.abc import Awaitable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from magnetar.checkpoint import Checkpoint
from magnetar.consume.acknowledgements import AckTransaction
from magnetar.consume.message import Message
from magnetar.consume.queue_consumer import QueueConsumer as AsyncQueueConsumer
from magnetar.errors import AlreadyClosed, NotSupported
from magnetar.sync.bridge import Bridge, ClosedAfterwards
from magnetar.sync.transaction import Work

T = TypeVar("T")


class Receiving(Protocol[T]):
    """What all consumers of the core have."""

    async def receive(self, timeout_s: float | None = None) -> Message[T]:
        """The next message."""

    async def receive_batch(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[Message[T]]:
        """The next messages."""

    async def close(self) -> None:
        """End it."""


class InOrder(Receiving[T], Protocol[T]):
    """What stream consumers have."""

    def ack(
        self,
        message: Message[T],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge up to it."""
        ...

    def redeliver_unacknowledged(self) -> None:
        """Hand out again what is not acknowledged."""


class Shared(Receiving[T], Protocol[T]):
    """What queue consumers have."""

    def ack(
        self,
        message: Message[T] | Iterable[Message[T]],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge."""
        ...

    def nack(self, message: Message[T]) -> None:
        """Have it again later."""


class Reading(Receiving[T], Protocol[T]):
    """What checkpoint consumers have."""

    def checkpoint(self) -> Checkpoint:
        """The place after what was handed out."""
        ...


class _Consumer(ClosedAfterwards, Generic[T]):
    """What all of them do."""

    def __init__(self, bridge: Bridge, receiving: Receiving[T]) -> None:
        self._bridge = bridge
        self._receiving = receiving
        self._kept: deque[Message[T]] = deque()

    def receive(self, timeout_s: float | None = None) -> Message[T]:
        """The next message.  Raises OperationTimedOut, and AlreadyClosed."""
        try:
            return self._kept.popleft()
        except IndexError:
            return self._bridge.run_or_hand(self._kept.append, self._receiving.receive, timeout_s)

    def receive_batch(self, max_messages: int, timeout_s: float | None = None) -> list[Message[T]]:
        """The messages that are there, at most so many; waits for the first.

        None came in time: an empty list.
        """
        kept = self._take_kept(max_messages)
        return kept or self._bridge.run_or_hand(
            self._kept.extend, self._receiving.receive_batch, max_messages, timeout_s
        )

    def close(self) -> None:
        """End it; what is not acknowledged is delivered again to others.  Idempotent."""
        try:
            self._bridge.run(self._receiving.close)
        except AlreadyClosed:
            return

    def __iter__(self) -> Iterator[Message[T]]:
        while True:
            try:
                message = self.receive()
            except AlreadyClosed:
                return
            yield message

    def _take_kept(self, max_messages: int) -> list[Message[T]]:
        taken: list[Message[T]] = []
        while len(taken) < max_messages:
            try:
                taken.append(self._kept.popleft())
            except IndexError:
                break
        return taken


class StreamConsumer(_Consumer[T]):
    """In order, acknowledged up to a message; see `magnetar.StreamConsumer`."""

    def __init__(self, bridge: Bridge, core: InOrder[T]) -> None:
        super().__init__(bridge, core)
        self._core = core

    def ack(
        self,
        message: Message[T],
        *,
        transaction: Work | None = None,
        wait: bool = False,
    ) -> None:
        """Acknowledge everything up to this message; `wait`: until the broker has confirmed it."""
        self._bridge.run(self._core.ack, message, transaction=_core_of(transaction), wait=wait)

    def redeliver_unacknowledged(self) -> None:
        """Have everything again that was handed out and is not acknowledged, in order."""
        self._bridge.call(self._go_back)

    def _go_back(self) -> None:
        self._kept.clear()
        self._core.redeliver_unacknowledged()


class QueueConsumer(_Consumer[T]):
    """Shared work, acknowledged one by one; see `magnetar.QueueConsumer`."""

    def __init__(self, bridge: Bridge, core: Shared[T]) -> None:
        super().__init__(bridge, core)
        self._core = core

    def ack(
        self,
        message: Message[T] | Iterable[Message[T]],
        *,
        transaction: Work | None = None,
        wait: bool = False,
    ) -> None:
        """Acknowledge one message or several; `wait`: until the broker has confirmed it."""
        self._bridge.run(self._core.ack, message, transaction=_core_of(transaction), wait=wait)

    def nack(self, message: Message[T]) -> None:
        """Have this message delivered again after a pause."""
        self._bridge.call(self._core.nack, message)

    def unsubscribe(self, *, force: bool = False) -> None:
        """End the subscription, and close; `ConsumerBusy` while others share it, unless `force`.

        Raises `NotSupported` of a namespace.
        """
        if not isinstance(self._core, AsyncQueueConsumer):
            raise NotSupported("A namespace has no subscription of its own: end it topic by topic.")
        self._bridge.run(self._core.unsubscribe, force=force)


class CheckpointConsumer(_Consumer[T]):
    """Reads without a subscription; see `magnetar.CheckpointConsumer`.

    `checkpoint()` covers nothing that was not returned.  After a caller was interrupted it may, for
    as long as messages are kept from then, cover less than what was.
    """

    def __init__(self, bridge: Bridge, core: Reading[T]) -> None:
        super().__init__(bridge, core)
        self._core = core
        self._before_kept: Checkpoint | None = None

    def receive(self, timeout_s: float | None = None) -> Message[T]:
        """The next message.  Raises OperationTimedOut, and AlreadyClosed."""
        kept = self._take_kept(1)
        return (
            kept[0]
            if kept
            else self._bridge.run_or_hand(self._keep, self._received, timeout_s)[1][0]
        )

    def receive_batch(self, max_messages: int, timeout_s: float | None = None) -> list[Message[T]]:
        """The messages that are there, at most so many; waits for the first.

        None came in time: an empty list.
        """
        kept = self._take_kept(max_messages)
        return (
            kept
            or self._bridge.run_or_hand(self._keep, self._received_batch, max_messages, timeout_s)[
                1
            ]
        )

    def checkpoint(self) -> Checkpoint:
        """The place after everything that was returned."""
        return self._bridge.call(self._place)

    def _place(self) -> Checkpoint:
        if self._before_kept is not None and self._kept:
            return self._before_kept
        return self._core.checkpoint()

    async def _received(self, timeout_s: float | None) -> tuple[Checkpoint, list[Message[T]]]:
        before = self._place()
        return before, [await self._core.receive(timeout_s)]

    async def _received_batch(
        self, max_messages: int, timeout_s: float | None
    ) -> tuple[Checkpoint, list[Message[T]]]:
        before = self._place()
        return before, await self._core.receive_batch(max_messages, timeout_s)

    def _keep(self, came: tuple[Checkpoint, list[Message[T]]]) -> None:
        """What came while its caller was interrupted: the next caller gets it."""
        self._before_kept, messages = came
        self._kept.extend(messages)


def _core_of(transaction: Work | None) -> AckTransaction | None:
    return None if transaction is None else transaction.core
