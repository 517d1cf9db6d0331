"""A pause in the SENDs of a client, in which it gets a new layout.

Pulsar's client closes the producer of a sealed segment at once when it gets the layout.  Messages
of a batch that is still open then fail, and the client sends them again 100 ms later, behind newer
ones of the same keys.  So a layout is pushed when no batch is likely to be open.

The broker that pushes the layout need not have the segment: then it asks the segment's owner for
the pause (`PausedSends`).
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from functools import partial

from broker.topics.client_connection import ClientConnection
from broker.topics.producer import Producer
from config.bounds import LAYOUT_PUSH_WAIT_S, NEW_BATCH_S, RECEIPTS_HELD_S, SEND_PAUSE_S
from magnetar.protocol.names import SegmentName
from storage.callbacks import ignore

ProducersOf = Callable[[SegmentName], Collection[Producer]]
"""The producers at a segment, if it runs here."""


class SendPause:
    """Waits for a pause in the SENDs of one connection's producers, then calls `then` once.

    `closing` are the producers that the client will close, at sealed segments; `others` are its
    other ones at the topic.  The receipts of all wait with it: a program that keeps a number of
    messages in flight then stops sending by itself, and its client sends the batch that is open.
    The receipts follow what `then` sends, or `release` sends them if it `keeps_receipts`.

    A client that is only slow has not paused: it has sent nothing before it answers a PING.  A
    program that goes on sending makes no pause.  After LAYOUT_PUSH_WAIT_S `then` is called right
    behind a SEND of each producer in `closing`, when their next batches have hardly begun.  After
    twice that time it is called as soon as the client has answered a PING, and ECHO_WAIT_S later in
    any case.
    """

    def __init__(
        self,
        closing: Collection[Producer],
        others: Collection[Producer],
        then: Callable[[], None],
        *,
        keeps_receipts: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._last_sent_s = now_s = self._loop.time()
        self._overdue_s = now_s + LAYOUT_PUSH_WAIT_S
        self._latest_s = now_s + 2 * LAYOUT_PUSH_WAIT_S
        self._sent_s: dict[Producer, float] = {}
        """Time of the last SEND of each producer in `closing`."""
        self._holding = [*closing, *others]
        for each in closing:
            each.hold_receipts(self, partial(self._sent, each))
        for each in others:
            each.hold_receipts(self, self._other_sent)
        self._then = then
        self._keeps_receipts = keeps_receipts
        self._connection = next(iter(closing)).connection
        self._confirming: asyncio.Task[None] | None = None
        self._ended = False
        self._ending: asyncio.Handle = self._loop.call_later(SEND_PAUSE_S, self._check)

    def _other_sent(self) -> None:
        self._last_sent_s = self._loop.time()

    def _sent(self, producer: Producer) -> None:
        now_s = self._last_sent_s = self._sent_s[producer] = self._loop.time()
        if now_s < self._overdue_s:
            return
        ages_s = [now_s - each for each in self._sent_s.values()]
        if all(age_s <= NEW_BATCH_S or age_s > SEND_PAUSE_S for age_s in ages_s):
            # Behind the SENDs that came in the same turn of the loop.
            self._ending.cancel()
            self._ending = self._loop.call_soon(self.end)

    def _check(self) -> None:
        rest_s = min(self._last_sent_s + SEND_PAUSE_S, self._latest_s) - self._loop.time()
        if rest_s > 0:
            self._ending = self._loop.call_later(rest_s, self._check)
        else:
            self._confirming = self._loop.create_task(self._confirm())

    async def _confirm(self) -> None:
        """End the wait if nothing was sent before the client answers a PING."""
        before_s = self._last_sent_s
        try:
            await self._connection.echo()
        finally:
            if self._last_sent_s == before_s or self._loop.time() >= self._latest_s:
                self.end()
            elif not self._ended:
                self._ending = self._loop.call_later(SEND_PAUSE_S, self._check)

    def end(self) -> None:
        """Call `then`, and let the receipts follow.  Later calls do nothing."""
        if self._ended:
            return
        self._ended = True
        self._ending.cancel()
        self._then()
        self._sent_s.clear()
        if not self._keeps_receipts:
            self.release()

    def release(self) -> None:
        """Send the receipts that this pause holds back."""
        for producer in self._holding:
            producer.let_go_of_receipts(self)
        self._holding.clear()


class PausedSends:
    """Pauses in the SENDs to segments here, for brokers that push layouts to the senders.

    Such a broker is the `holder` of a pause, by a name of its own for each layout.
    """

    def __init__(self, producers_of: ProducersOf) -> None:
        self._producers_of = producers_of
        self._held: dict[str, HeldReceipts] = {}

    async def pause(
        self, closing: Collection[SegmentName], others: Collection[SegmentName], holder: str
    ) -> bool:
        """Return once the senders to the segments `closing` have paused; whether there are any.

        `others` are active segments of the topic.  Receipts of all these segments' producers are
        held back until `resume`, and for RECEIPTS_HELD_S at most: a program may get them on one
        connection, and go on sending on another.  A holder that asks again, as the first request
        was lost with its connection, has this pause alone.
        """
        self.resume(holder)
        closed = by_connection(self._producers_of, closing)
        publishing = by_connection(self._producers_of, others)
        if not closed and not publishing:
            return False
        loop = asyncio.get_running_loop()
        resumed = loop.call_later(RECEIPTS_HELD_S, self.resume, holder)
        held = self._held[holder] = HeldReceipts(resumed)
        for connection, producers in publishing.items():
            if connection not in closed:
                held.hold(producers)
        paused = []
        for connection, producers in closed.items():
            paused.append(future := loop.create_future())
            then = partial(_resolve, future)
            others_there = publishing.get(connection, ())
            held.pauses.append(SendPause(producers, others_there, then, keeps_receipts=True))
        await asyncio.gather(*paused)
        return True

    def resume(self, holder: str) -> None:
        """Send the receipts that were held back for a holder.  An unknown one is ignored."""
        held = self._held.pop(holder, None)
        if held is not None:
            held.release()


class HeldReceipts:
    """What one holder holds back."""

    def __init__(self, ending: asyncio.TimerHandle) -> None:
        """`ending` is the call that ends it."""
        self.pauses: list[SendPause] = []
        self._ending = ending
        self._producers: list[Producer] = []

    def hold(self, producers: Iterable[Producer]) -> None:
        """Hold back the receipts of producers whose SENDs nobody waits for."""
        for producer in producers:
            producer.hold_receipts(self, ignore)
            self._producers.append(producer)

    def release(self) -> None:
        """Send the receipts."""
        self._ending.cancel()
        for pause in self.pauses:
            pause.release()
        for producer in self._producers:
            producer.let_go_of_receipts(self)


def by_connection(
    producers_of: ProducersOf, segments: Iterable[SegmentName]
) -> dict[ClientConnection, list[Producer]]:
    """The producers of each connection at those of the segments that run here."""
    found: dict[ClientConnection, list[Producer]] = {}
    for segment in segments:
        for producer in producers_of(segment):
            found.setdefault(producer.connection, []).append(producer)
    return found


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
