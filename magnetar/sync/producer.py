"""The producer for threads."""

import asyncio
import concurrent.futures
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Generic, TypedDict, TypeVar, Unpack

from magnetar.bounds import SYNC_NOTICE_S, SYNC_TURN, UNREAD_FAILURES
from magnetar.errors import AlreadyClosed, MagnetarError, OperationTimedOut, ProducerQueueFull
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer as AsyncProducer
from magnetar.produce.receipts import Receipts as AsyncReceipts
from magnetar.sync.bridge import Bridge, ClosedAfterwards, outcome_of
from magnetar.sync.transaction import Work
from magnetar.transactions.work import Work as AsyncWork

T = TypeVar("T")


class SendFuture(concurrent.futures.Future[MessageId]):
    """The outcome of one message; `flush` raises errors that were not retrieved from it.

    An error of a message in a transaction counts as retrieved: the commit raises it.
    """

    looked_at = False

    def result(self, timeout: float | None = None) -> MessageId:
        """Wait for the id, and return it or raise the error."""
        self.looked_at = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome, and return the error or None."""
        self.looked_at = True
        return super().exception(timeout)


class Receipts:
    """A `magnetar.Receipts` for threads: the receipts of messages sent together."""

    def __init__(self, bridge: Bridge, core: AsyncReceipts) -> None:
        self._bridge = bridge
        self._core = core

    @property
    def segment_ids(self) -> Sequence[int]:
        """The segment of each message; -1 for one without receipt."""
        return self._core.segment_ids

    def stored(self) -> None:
        """Wait until all are stored.  Raises the first failure."""
        self._bridge.run(self._core.stored)

    def ids(self) -> list[MessageId]:
        """The id of each message; call it after `stored`."""
        return self._core.ids()


class SendOptions(TypedDict, total=False):
    """The options of a message; see `magnetar.Producer.send`."""

    key: str | bytes | None
    ordering_key: bytes | None
    properties: Mapping[str, str] | None
    event_time_ms: int | None
    sequence_id: int | None
    deliver_after_s: float | None
    deliver_at_ms: int | None
    transaction: Work | None


class Producer(ClosedAfterwards, Generic[T]):
    """A `magnetar.Producer` for threads; any thread may use it.

    Messages of all threads form one queue, so those of one thread stay in order.  At most
    `max_pending_messages` messages are without receipt; then `send` waits and `send_nowait` raises
    `ProducerQueueFull`.  Cancelling the future of a message that has not gone to the loop takes the
    message back; later it cannot be cancelled.
    """

    def __init__(self, bridge: Bridge, core: AsyncProducer[T]) -> None:
        self._bridge = bridge
        self._core = core
        self._messages_max = core.settings.max_pending_messages
        self._giving = threading.Lock()
        """Held by threads that send; the loop never takes it."""
        self._receipt = threading.Condition()
        self._waiting = 0
        """Threads that wait in `room`; the loop notifies only them."""
        self._taken = 0
        """The number of messages ever taken; `_settled` of them have an outcome."""
        self._settled = 0
        self._given: deque[Callable[[], bool]] = deque()
        self._passing_on = False
        """Whether the loop is awake: it is woken once for all steps that have gathered."""
        self._capacity_wait: asyncio.Task[None] | None = None
        self._failed: deque[SendFuture] = deque(maxlen=UNREAD_FAILURES)

    @property
    def topic(self) -> str:
        """The topic's name, as the broker resolved it."""
        return self._core.topic

    @property
    def name(self) -> str:
        """The producer's name."""
        return self._core.name

    @property
    def last_sequence_id(self) -> int:
        """See `magnetar.Producer.last_sequence_id`."""
        return self._core.last_sequence_id

    def send(self, value: T, **options: Unpack[SendOptions]) -> MessageId:
        """Send a message and wait for its receipt; waits before that while too many are pending.

        If the caller is interrupted, a message that was not sent yet is taken back.  Raises the
        errors of `magnetar.Producer.send`.
        """
        while True:
            try:
                future = self.send_nowait(value, **options)
            except ProducerQueueFull:
                self.room()
            else:
                break
        try:
            return outcome_of(future)
        except BaseException:
            future.cancel()
            raise

    def send_nowait(self, value: T, **options: Unpack[SendOptions]) -> SendFuture:
        """Send a message without waiting; the future gets the id or the error.

        Callbacks of the future run on the client's thread and must not wait.  Raises
        `ProducerQueueFull` while too many messages are pending (wait in `room`), and
        `AlreadyClosed`.
        """
        self._bridge.check_process()
        future = SendFuture()
        transaction = options.get("transaction")
        if transaction is not None:
            future.looked_at = True
            transaction.after(self._passed_on)
        with self._giving:
            if not self._has_capacity():
                raise ProducerQueueFull(
                    f"{self._messages_max} messages for {self.topic} wait for their receipts: "
                    "call room() before sending more, or use send()."
                )
            self._give(partial(self._send, future, value, options))
            self._taken += 1
        return future

    def send_many(
        self,
        values: Sequence[T],
        *,
        keys: Sequence[str | bytes | None] | None = None,
        properties: Sequence[Mapping[str, str] | None] | None = None,
        event_times_ms: Sequence[int | None] | None = None,
        transaction: Work | None = None,
    ) -> Receipts:
        """Send messages together, after those given before; see `magnetar.Producer.send_many`."""
        core = None if transaction is None else transaction.core
        sent = self._bridge.run(self._send_many, values, keys, properties, event_times_ms, core)
        return Receipts(self._bridge, sent)

    def room(self, timeout_s: float | None = None) -> None:
        """Wait until `send_nowait` can send.  Raises `OperationTimedOut`."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._receipt:
            self._waiting += 1  # Before the check, or the loop might settle one in between.
            try:
                self._wait_for_capacity(until_s, timeout_s)
            finally:
                self._waiting -= 1

    def _wait_for_capacity(self, until_s: float, timeout_s: float | None) -> None:
        """The caller holds the condition."""
        while not self._has_capacity():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise OperationTimedOut(
                    f"No message for {self.topic} got its receipt within {timeout_s} s: check "
                    "whether the broker is well, or wait longer."
                )
            self._receipt.wait(min(left_s, SYNC_NOTICE_S))

    def flush(self) -> None:
        """Wait until every message given before has its receipt or its error.

        Raises the first error that was not retrieved from its future.
        """
        self._bridge.run(self._flush)

    def close(self) -> None:
        """Send the messages given before, then close the producer.  Idempotent."""
        try:
            self._bridge.run(self._close)
        except AlreadyClosed:
            return

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flush, unless the block has failed, and close."""
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def _has_capacity(self) -> bool:
        return self._taken - self._settled < self._messages_max

    def _give(self, step: Callable[[], bool]) -> None:
        """Queue a step for the loop, and wake it unless it is awake."""
        self._given.append(step)
        if not self._passing_on:
            self._passing_on = True
            self._bridge.soon(self._pass_on)

    # On the loop

    def _pass_on(self) -> None:
        """Run the given steps in order, until the core is full, or SYNC_TURN of them."""
        given = self._given
        for _ in range(SYNC_TURN):
            if not given:
                self._passing_on = False
                if not given:  # A step given before the flag fell has not woken the loop.
                    return
                self._passing_on = True
            if not given[0]():
                self._capacity_wait = asyncio.ensure_future(self._pass_on_when_free())
                return
            given.popleft()
        asyncio.get_running_loop().call_soon(self._pass_on)

    async def _pass_on_when_free(self) -> None:
        try:
            await self._core.room()
        except MagnetarError:
            pass  # The next step gets the same error, and fails its future.
        finally:  # Also when the loop ends: the steps then fail, as the producer is closed.
            self._pass_on()

    def _send(self, future: SendFuture, value: T, options: SendOptions) -> bool:
        """Send one message to the core; returns False if the core is full, to be called again."""
        if future.cancelled():
            self._count_settled()
            return True
        transaction = options.get("transaction")
        try:
            sending = self._core.send_nowait(
                value,
                key=options.get("key"),
                ordering_key=options.get("ordering_key"),
                properties=options.get("properties"),
                event_time_ms=options.get("event_time_ms"),
                sequence_id=options.get("sequence_id"),
                deliver_after_s=options.get("deliver_after_s"),
                deliver_at_ms=options.get("deliver_at_ms"),
                transaction=None if transaction is None else transaction.core,
            )
        except ProducerQueueFull:
            return False
        except Exception as error:  # noqa: BLE001 - the sender gets it, by the future
            if future.set_running_or_notify_cancel():
                self._fail(future, error)
            self._count_settled()
            return True
        if not future.set_running_or_notify_cancel():
            sending.cancel()
        sending.add_done_callback(partial(self._settle, future))
        return True

    def _settle(self, future: SendFuture, sending: asyncio.Future[MessageId]) -> None:
        if not future.cancelled():
            if sending.cancelled():
                self._fail(future, AlreadyClosed("The producer was closed: open a new one."))
            elif (error := sending.exception()) is not None:
                self._fail(future, error)
            else:
                future.set_result(sending.result())
        self._count_settled()

    def _fail(self, future: SendFuture, error: BaseException) -> None:
        self._failed.append(future)
        future.set_exception(error)

    def _count_settled(self) -> None:
        self._settled += 1
        if self._waiting:
            with self._receipt:
                self._receipt.notify_all()

    async def _send_many(
        self,
        values: Sequence[T],
        keys: Sequence[str | bytes | None] | None,
        properties: Sequence[Mapping[str, str] | None] | None,
        event_times_ms: Sequence[int | None] | None,
        transaction: AsyncWork | None,
    ) -> AsyncReceipts:
        await self._passed_on()
        return await self._core.send_many(
            values,
            keys=keys,
            properties=properties,
            event_times_ms=event_times_ms,
            transaction=transaction,
        )

    async def _flush(self) -> None:
        await self._passed_on()
        await self._core.flush()
        failed = list(self._failed)
        self._failed.clear()
        for future in failed:
            if not future.looked_at and (error := future.exception()) is not None:
                raise error

    async def _close(self) -> None:
        await self._passed_on()
        await self._core.close()

    async def _passed_on(self) -> None:
        """Wait until everything given before has reached the core."""
        reached = asyncio.Event()

        def reach() -> bool:
            reached.set()
            return True

        self._give(reach)
        await reached.wait()
