"""A pause in the SENDs of a client, in which it gets a new layout.

Pulsar's client closes the producer of a sealed segment at once when it gets the layout.  Messages
of a batch that is still open then fail, and the client sends them again 100 ms later, behind newer
ones of the same keys.  So a layout is pushed when no batch is likely to be open.
"""

import asyncio
from collections.abc import Callable, Collection
from functools import partial

from broker.topics.producer import Producer
from config.bounds import LAYOUT_PUSH_WAIT_S, NEW_BATCH_S, SEND_PAUSE_S


class SendPause:
    """Waits for a pause in the SENDs of one connection's producers, then calls `then` once.

    `closing` are the producers that the client will close, at sealed segments; `others` are its
    other ones at the topic.  The receipts of all wait with it: a program that keeps a number of
    messages in flight then stops sending by itself, and its client sends the batch that is open.
    The receipts follow what `then` sends.

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
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._last_sent_s = now_s = self._loop.time()
        self._overdue_s = now_s + LAYOUT_PUSH_WAIT_S
        self._latest_s = now_s + 2 * LAYOUT_PUSH_WAIT_S
        self._sent_s: dict[Producer, float] = {}
        """Time of the last SEND of each producer in `closing`."""
        self._holding = [
            *(each for each in closing if each.hold_receipts(partial(self._sent, each))),
            *(each for each in others if each.hold_receipts(self._other_sent)),
        ]
        self._then = then
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
        for producer in self._holding:
            producer.release_receipts()
        self._holding.clear()
        self._sent_s.clear()
