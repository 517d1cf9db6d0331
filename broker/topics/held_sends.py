"""SENDs of one producer that wait, in order, while a transaction is joined."""

from collections import deque
from typing import NamedTuple

from broker.topics.client_connection import ClientConnection
from config.bounds import TXN_HELD_SENDS
from magnetar.protocol.received import Send
from magnetar.protocol.server_error import MagnetarError


class HeldSend(NamedTuple):
    """A SEND, its size in bytes as it counts in flight, and its refusal, if that is known."""

    send: Send
    size: int
    refusal: MagnetarError | None


class HeldSends:
    """The SENDs of one producer behind one whose transaction is being joined, in order.

    That first SEND is not in the queue: it has its own callback.  All that its producer sends
    meanwhile waits here, in a transaction or not, refusals too, because SENDs are stored and
    answered in order.  They count as in flight.
    """

    __slots__ = ("_connection", "_queue", "_why", "broken")

    def __init__(self, connection: ClientConnection, producer_id: int) -> None:
        self.broken = False
        """Whether a SEND was not stored, so that those behind it are dropped.

        The client sends again what has no receipt: storing them would double them.
        """
        self._connection = connection
        self._queue: deque[HeldSend] = deque()
        self._why = f"transaction-of-producer-{producer_id}"

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, held: HeldSend) -> None:
        """Append a SEND."""
        self._queue.append(held)
        # Bytes are bounded with all that is in flight; this bounds the number.
        if len(self._queue) == TXN_HELD_SENDS:
            self._connection.pause_reading(self._why)

    def pop(self) -> HeldSend:
        """Take the next SEND out."""
        held = self._queue.popleft()
        if len(self._queue) == TXN_HELD_SENDS // 2:
            self._connection.resume_reading(self._why)
        return held
