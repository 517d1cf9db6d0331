"""What waits of one producer while a transaction is joined: SENDs in their order.

Rules:

- The first one waits for the answer; all that its producer sends meanwhile, in a transaction or
  not, waits behind it, refusals too: what a producer sends is stored and answered in order.
- Held SENDs count as in flight: against the bounds of publishing in bytes, and above
  TXN_HELD_SENDS the connection is not read until half of them are gone.
- When nothing may be stored behind a SEND any more (`broken`), or nobody listens, those behind it
  are dropped: the client sends again what has no receipt, so storing them would double them.
"""

from collections import deque
from typing import NamedTuple

from broker.topics.client_connection import ClientConnection
from config.bounds import TXN_HELD_SENDS
from magnetar.protocol.received import Send
from magnetar.protocol.server_error import MagnetarError


class HeldSend(NamedTuple):
    """A SEND, the bytes that it counts for, and why it is to be refused, if that is known."""

    send: Send
    size: int
    refusal: MagnetarError | None


class HeldSends:
    """The SENDs of one producer that wait until their transaction is joined, in order.

    Without the one at the front, which has its own callback.
    """

    __slots__ = ("_connection", "_queue", "_why", "broken")

    def __init__(self, connection: ClientConnection, producer_id: int) -> None:
        self.broken = False
        self._connection = connection
        self._queue: deque[HeldSend] = deque()
        self._why = f"transaction-of-producer-{producer_id}"

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, held: HeldSend) -> None:
        """It came last."""
        self._queue.append(held)
        if len(self._queue) == TXN_HELD_SENDS:
            self._connection.pause_reading(self._why)

    def pop(self) -> HeldSend:
        """The next one."""
        held = self._queue.popleft()
        if len(self._queue) == TXN_HELD_SENDS // 2:
            self._connection.resume_reading(self._why)
        return held
