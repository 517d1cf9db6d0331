"""The consumers for threads."""

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


class AsyncConsumer(Protocol[T]):
    """Any asyncio consumer."""

    async def receive(self, timeout_s: float | None = None) -> Message[T]:
        """Receive the next message."""

    async def receive_batch(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[Message[T]]:
        """Receive the next messages."""

    async def close(self) -> None:
        """Close it."""


class AsyncOrderedConsumer(AsyncConsumer[T], Protocol[T]):
    """An asyncio stream consumer, of a topic or a namespace."""

    def ack(
        self,
        message: Message[T],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge everything up to a message."""
        ...

    def redeliver_unacknowledged(self) -> None:
        """Hand out unacknowledged messages again."""


class AsyncSharedConsumer(AsyncConsumer[T], Protocol[T]):
    """An asyncio queue consumer, of a topic or a namespace."""

    def ack(
        self,
        message: Message[T] | Iterable[Message[T]],
        *,
        transaction: AckTransaction | None = None,
        wait: bool = False,
    ) -> Awaitable[None]:
        """Acknowledge one message or several."""
        ...

    def nack(self, message: Message[T]) -> None:
        """Have a message delivered again later."""


class AsyncReader(AsyncConsumer[T], Protocol[T]):
    """An asyncio checkpoint consumer."""

    def checkpoint(self) -> Checkpoint:
        """The position after the messages handed out."""
        ...


class _Consumer(ClosedAfterwards, Generic[T]):
    """A consumer of any kind; any thread may use it.

    A message that arrives while its caller is interrupted is kept, and returned by the next call.
    Iteration ends when the consumer is closed.
    """

    def __init__(self, bridge: Bridge, receiving: AsyncConsumer[T]) -> None:
        self._bridge = bridge
        self._receiving = receiving
        self._kept: deque[Message[T]] = deque()

    def receive(self, timeout_s: float | None = None) -> Message[T]:
        """Receive the next message.  Raises `OperationTimedOut` and `AlreadyClosed`."""
        try:
            return self._kept.popleft()
        except IndexError:
            return self._bridge.run_or_hand(self._kept.append, self._receiving.receive, timeout_s)

    def receive_batch(self, max_messages: int, timeout_s: float | None = None) -> list[Message[T]]:
        """Receive the messages that have arrived, at most so many; waits for the first one.

        Returns an empty list if none came in time.
        """
        kept = self._take_kept(max_messages)
        return kept or self._bridge.run_or_hand(
            self._kept.extend, self._receiving.receive_batch, max_messages, timeout_s
        )

    def close(self) -> None:
        """Close it; other consumers get messages that are not acknowledged.  Idempotent."""
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
    """A `magnetar.StreamConsumer` for threads: in order, acknowledged up to a message."""

    def __init__(self, bridge: Bridge, core: AsyncOrderedConsumer[T]) -> None:
        super().__init__(bridge, core)
        self._core = core

    def ack(
        self,
        message: Message[T],
        *,
        transaction: Work | None = None,
        wait: bool = False,
    ) -> None:
        """Acknowledge everything up to this message; with `wait`, await the broker's answer."""
        self._bridge.run(self._core.ack, message, transaction=_core_of(transaction), wait=wait)

    def redeliver_unacknowledged(self) -> None:
        """Hand out everything that is not acknowledged again, in order."""
        self._bridge.call(self._redeliver)

    def _redeliver(self) -> None:
        self._kept.clear()
        self._core.redeliver_unacknowledged()


class QueueConsumer(_Consumer[T]):
    """A `magnetar.QueueConsumer` for threads: shared work, acknowledged one by one."""

    def __init__(self, bridge: Bridge, core: AsyncSharedConsumer[T]) -> None:
        super().__init__(bridge, core)
        self._core = core

    def ack(
        self,
        message: Message[T] | Iterable[Message[T]],
        *,
        transaction: Work | None = None,
        wait: bool = False,
    ) -> None:
        """Acknowledge one message or several; with `wait`, await the broker's answer."""
        self._bridge.run(self._core.ack, message, transaction=_core_of(transaction), wait=wait)

    def nack(self, message: Message[T]) -> None:
        """Have this message delivered again after a pause."""
        self._bridge.call(self._core.nack, message)

    def unsubscribe(self, *, force: bool = False) -> None:
        """End the subscription, and close; `ConsumerBusy` while others share it, unless `force`.

        Raises `NotSupported` for a consumer of a namespace.
        """
        if not isinstance(self._core, AsyncQueueConsumer):
            raise NotSupported("A namespace has no subscription of its own: end it topic by topic.")
        self._bridge.run(self._core.unsubscribe, force=force)


class CheckpointConsumer(_Consumer[T]):
    """A `magnetar.CheckpointConsumer` for threads: reads without a subscription.

    `checkpoint()` covers only messages that were returned.  After a caller was interrupted it may
    cover fewer, while messages are kept for the next call.
    """

    def __init__(self, bridge: Bridge, core: AsyncReader[T]) -> None:
        super().__init__(bridge, core)
        self._core = core
        self._before_kept: Checkpoint | None = None

    def receive(self, timeout_s: float | None = None) -> Message[T]:
        """Receive the next message.  Raises `OperationTimedOut` and `AlreadyClosed`."""
        kept = self._take_kept(1)
        return (
            kept[0]
            if kept
            else self._bridge.run_or_hand(self._keep, self._received, timeout_s)[1][0]
        )

    def receive_batch(self, max_messages: int, timeout_s: float | None = None) -> list[Message[T]]:
        """Receive the messages that have arrived, at most so many; waits for the first one.

        Returns an empty list if none came in time.
        """
        kept = self._take_kept(max_messages)
        return (
            kept
            or self._bridge.run_or_hand(self._keep, self._received_batch, max_messages, timeout_s)[
                1
            ]
        )

    def checkpoint(self) -> Checkpoint:
        """The position after the returned messages."""
        return self._bridge.call(self._checkpoint)

    def _checkpoint(self) -> Checkpoint:
        if self._before_kept is not None and self._kept:
            return self._before_kept
        return self._core.checkpoint()

    async def _received(self, timeout_s: float | None) -> tuple[Checkpoint, list[Message[T]]]:
        before = self._checkpoint()
        return before, [await self._core.receive(timeout_s)]

    async def _received_batch(
        self, max_messages: int, timeout_s: float | None
    ) -> tuple[Checkpoint, list[Message[T]]]:
        before = self._checkpoint()
        return before, await self._core.receive_batch(max_messages, timeout_s)

    def _keep(self, came: tuple[Checkpoint, list[Message[T]]]) -> None:
        """Keep messages that came while their caller was interrupted for the next caller."""
        self._before_kept, messages = came
        self._kept.extend(messages)


def _core_of(transaction: Work | None) -> AckTransaction | None:
    return None if transaction is None else transaction.core
