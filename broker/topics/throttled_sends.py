"""The bound of what is read from clients while publish rates do not allow to publish it."""

from broker.topics.client_connection import ClientConnection
from config.bounds import (
    THROTTLED_BYTES,
    THROTTLED_CONNECTION_BYTES,
    THROTTLED_SEND_BYTES,
)

THROTTLED = "publish rates"
"""Why a connection is not read, as SENDs of it wait for a rate."""


class ThrottledSends:
    """Counts the bytes of SENDs that wait, of each connection and of all.

    A connection above its bound is not read until half of it is free; all that it carries stops
    then, as in Pulsar.  While all together are above the bound of all, no connection is read that
    has any waiting; once half of that is free, all are read that are below their own.
    """

    __slots__ = ("_bytes", "_connection_bytes", "_paused", "_total_bytes", "total")

    def __init__(
        self,
        connection_bytes: int = THROTTLED_CONNECTION_BYTES,
        total_bytes: int = THROTTLED_BYTES,
    ) -> None:
        self._connection_bytes = connection_bytes
        self._total_bytes = total_bytes
        self._bytes: dict[ClientConnection, int] = {}
        self._paused: set[ClientConnection] = set()
        self.total = 0
        """Bytes of all SENDs that wait."""

    def started(self, connection: ClientConnection, entry_bytes: int) -> None:
        """Count a SEND that waits."""
        size = entry_bytes + THROTTLED_SEND_BYTES
        self.total += size
        held = self._bytes[connection] = self._bytes.get(connection, 0) + size
        if held > self._connection_bytes or self.total > self._total_bytes:
            self._paused.add(connection)
            connection.pause_reading(THROTTLED)

    def finished(self, connection: ClientConnection, entry_bytes: int) -> None:
        """Count a SEND that waits no longer."""
        size = entry_bytes + THROTTLED_SEND_BYTES
        self.total -= size
        held = self._bytes[connection] - size
        if held:
            self._bytes[connection] = held
        else:
            del self._bytes[connection]
        # One that has nothing waiting goes on in any case, as nobody else would have it go on.
        few = held <= self._connection_bytes // 2 and self.total <= self._total_bytes
        if connection in self._paused and (few or not held):
            self._resume(connection)
        half = self._total_bytes // 2
        if self._paused and self.total <= half < self.total + size:
            # What waits of theirs may wait for long yet, at a lower rate than that of the others.
            for each in list(self._paused):
                if self._bytes.get(each, 0) <= self._connection_bytes // 2:
                    self._resume(each)

    def _resume(self, connection: ClientConnection) -> None:
        self._paused.discard(connection)
        connection.resume_reading(THROTTLED)
