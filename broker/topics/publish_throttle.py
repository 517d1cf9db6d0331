"""The publish rates of a topic: SENDs wait, and their producers get their receipts later."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, cast

from broker.policies.message_rate import MessageRate
from broker.topics.producer import Producer
from broker.topics.throttle import (
    Level,
    RateLimit,
    Throttle,
    ThrottledCounts,
    changed_limit,
    in_force,
)
from broker.topics.throttled_sends import ThrottledSends
from config.bounds import UNTHROTTLED_AT_ONCE
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.received import Received, Send
from magnetar.protocol.server_error import MagnetarError
from storage.callbacks import ignore

_Held = tuple[Callable[[], None], int, int]
"""A SEND that waits: what publishes or refuses it, its messages and its bytes."""


class Publishing(Protocol):
    """The publish path behind the rates: see `PublishPipeline`."""

    def publish(self, producer: Producer, sends: Sequence[Received], at: int) -> int:
        """Publish the SEND at an index."""
        ...

    def refuse(self, producer: Producer, send: Send, error: MagnetarError) -> None:
        """Answer a SEND with SEND_ERROR, in its turn."""
        ...

    def damaged(self, producer: Producer, send: Send) -> None:
        """Answer a SEND whose checksum is wrong."""
        ...


class PublishThrottle:
    """Publishes the SENDs of one topic at the rates that hold for it.

    What comes too early waits, in order, and producers take turns.  The connection is read on, so
    that its other producers and its consumers go on, within the bounds of `ThrottledSends`.  A SEND
    that waits is in flight for its producer: CLOSE_PRODUCER is answered behind it, and a producer
    that the broker closes loses it, without a receipt.
    """

    def __init__(self, publishing: Publishing, sends: ThrottledSends) -> None:
        self._publishing = publishing
        self._sends = sends
        self._throttle = Throttle((), self._run, ThrottledCounts())
        self._held: dict[Producer, deque[_Held]] = {}
        """Producers with SENDs that wait, the next one first."""
        self._scheduled: asyncio.Handle | None = None
        self._on_unlimited: Callable[[], None] = ignore
        self.limits: tuple[RateLimit, ...] = ()
        """The rates in force."""
        self.times = 0
        """How often publishing had to wait for a rate."""

    def limit(self, limits: Sequence[RateLimit], on_unlimited: Callable[[], None]) -> None:
        """Publish at these rates from now on; those of before hold no longer.

        Without any, `on_unlimited` is called once nothing waits: the throttle is not needed then.
        """
        self.limits = tuple(limits)
        self._throttle.close()
        self._throttle = Throttle(self.limits, self._run, ThrottledCounts())
        self._on_unlimited = ignore if limits else on_unlimited
        self._run()

    def close(self) -> None:
        """Let nothing wait any more: all producers are about to be closed.

        SENDs that wait are dropped, and those behind them; their clients send them again.
        """
        self._on_unlimited = ignore
        for producer in list(self._held):
            producer.drop_waiting()
        self.limit((), ignore)

    def publish(self, producer: Producer, sends: Sequence[Received], at: int) -> int:
        """Publish the SEND at an index, now or later; returns the index behind it."""
        send = cast("Send", sends[at])
        if producer.stopped:
            # It is dropped: it waits for nothing, and takes no tokens.
            self._publishing.publish(producer, (send,), 0)
            return at + 1
        size, claimed = len(send.entry or b""), send.num_messages
        # As for delivery, a number that no batch has is one message.
        messages = claimed if 0 < claimed <= MAX_BATCH_SIZE else 1
        if self._held or not self._throttle.allows():
            self._hold(
                producer, partial(self._publishing.publish, producer, (send,), 0), messages, size
            )
        else:
            self._throttle.take(messages, size)
            self._publishing.publish(producer, (send,), 0)
        return at + 1

    def refuse(self, producer: Producer, send: Send, error: MagnetarError) -> None:
        """Answer a SEND with SEND_ERROR, in its turn."""
        if producer in self._held:
            self._hold(producer, partial(self._publishing.refuse, producer, send, error), 0, 0)
        else:
            self._publishing.refuse(producer, send, error)

    def damaged(self, producer: Producer, send: Send) -> None:
        """Answer a SEND whose checksum is wrong, in its turn."""
        if producer in self._held:
            self._hold(producer, partial(self._publishing.damaged, producer, send), 0, 0)
        else:
            self._publishing.damaged(producer, send)

    def _hold(
        self, producer: Producer, publish: Callable[[], object], messages: int, size: int
    ) -> None:
        if not self._held:
            self.times += 1
        producer.arrived()
        producer.pending += 1
        self._sends.started(producer.connection, size)
        held = self._held.get(producer)
        if held is None:
            held = self._held[producer] = deque()
            producer.forget_waiting = self._drop
        held.append((cast("Callable[[], None]", publish), messages, size))

    def _run(self) -> None:
        """Publish what the rates allow, in turns, and the rest later."""
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._scheduled = None
        left = UNTHROTTLED_AT_ONCE
        while self._held and left and self._throttle.allows():
            left -= 1
            producer = next(iter(self._held))
            held = self._held.pop(producer)
            publish, messages, size = held.popleft()
            if held:
                self._held[producer] = held
            else:
                producer.forget_waiting = ignore
            self._throttle.take(messages, size)
            self._let_go(producer, size)
            try:
                publish()
            except Exception as error:  # noqa: BLE001 - reported to the loop; the others go on
                asyncio.get_running_loop().call_exception_handler(
                    {"message": "a SEND that waited failed", "exception": error}
                )
                producer.connection.abort("the broker failed on SEND")
            if not producer.pending:
                producer.now_idle()
        if not self._held:
            self._on_unlimited()
        elif not left:
            self._scheduled = asyncio.get_running_loop().call_soon(self._run)

    def _drop(self, producer: Producer) -> None:
        """Forget the SENDs of a producer that takes no more: its client has no receipt of them."""
        producer.forget_waiting = ignore
        for _, _, size in self._held.pop(producer, ()):
            self._let_go(producer, size)
        if not self._held and not self.limits:
            self._run()

    def _let_go(self, producer: Producer, size: int) -> None:
        producer.pending -= 1
        self._sends.finished(producer.connection, size)


class PublishRates:
    """The publish path of a topic: behind a throttle as long as a rate holds, else without one.

    Without a rate there is no throttle, and publishing costs nothing more.
    """

    def __init__(
        self,
        publishing: Publishing,
        sends: ThrottledSends,
        of_broker: RateLimit | None,
        use: Callable[[Publishing], None],
    ) -> None:
        """`of_broker` is the rate of all topics together; `use` gets the path of all SENDs."""
        self._publishing = publishing
        self._sends = sends
        self._of_broker = of_broker
        self._use = use
        self._of_topic: RateLimit | None = None
        self._throttle: PublishThrottle | None = None
        self._past_times = 0
        use(publishing)

    @property
    def times_limited(self) -> int:
        """How often publishing had to wait for a rate."""
        return self._past_times + (0 if self._throttle is None else self._throttle.times)

    def apply(self, rate: MessageRate | None) -> None:
        """Publish at this rate from now on; None: without limit of the topic."""
        self._of_topic = changed_limit(self._of_topic, rate, Level.TOPIC)
        limits = in_force(self._of_topic, self._of_broker)
        throttle = self._throttle
        if throttle is None:
            if not limits:
                return
            throttle = self._throttle = PublishThrottle(self._publishing, self._sends)
            self._use(throttle)
        if limits != throttle.limits:
            throttle.limit(limits, self._end_throttle)

    def close(self) -> None:
        """Let nothing wait any more: all producers are about to be closed."""
        self._use = ignore
        if self._throttle is not None:
            self._throttle.close()

    def _end_throttle(self) -> None:
        if self._throttle is not None:
            self._past_times += self._throttle.times
            self._throttle = None
            self._use(self._publishing)
