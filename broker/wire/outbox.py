"""Output queue and back pressure in front of one transport."""

import asyncio
from collections.abc import Callable

JOIN_BELOW_BYTES = 256 * 1024
"""Up to this size one copy is cheaper than many buffers."""
REPORTED_OUTPUT_BYTES = 16 * 1024
"""Less is mostly on its way already: the transport writes at the end of a turn of the loop."""


class Outbox:
    """Output queue of one transport; all of one turn of the loop leaves in one write.

    `writable` is False while more than the high water is queued, here or in the transport.  After
    `close` nothing is queued any more.
    """

    __slots__ = (
        "_buffers",
        "_bytes",
        "_bytes_left",
        "_bytes_out",
        "_callbacks",
        "_closed",
        "_give_up",
        "_high_water",
        "_limit",
        "_loop",
        "_on_change",
        "_on_queued",
        "_transport",
        "_transport_full",
        "writable",
    )

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        *,
        high_water: int,
        limit: int,
        on_change: Callable[[bool], None],
        on_queued: Callable[[], None],
        give_up: Callable[[], None],
    ) -> None:
        """Call `on_change(writable)` at each change, and `give_up()` above `limit` bytes.

        A peer that is above the limit has stopped reading while it gets what it did not request.
        `on_queued()` is called after writes that leave more than REPORTED_OUTPUT_BYTES queued.
        """
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._high_water = high_water
        self._limit = limit
        self._on_change = on_change
        self._on_queued = on_queued
        self._give_up = give_up
        self._closed = False
        self._buffers: list[bytes] = []
        self._bytes = 0
        self._bytes_left = high_water
        self._transport_full = False
        self._callbacks: list[Callable[[], None]] = []
        self.writable = True
        self._bytes_out = 0
        transport.set_write_buffer_limits(high=high_water)

    def put(self, buffer: bytes) -> None:
        """Queue one buffer."""
        if not self._buffers:
            self._loop.call_soon(self.flush)
        self._buffers.append(buffer)
        self._bytes += len(buffer)
        if self._bytes > self._bytes_left or not self.writable:
            self._check_bounds()

    def flush(self) -> None:
        """Pass everything queued to the transport."""
        buffers = self._buffers
        if not buffers:
            return
        queued = self._bytes
        self._buffers = []
        self._bytes = 0
        self._bytes_out += queued
        if len(buffers) == 1:
            self._transport.write(buffers[0])
        elif queued <= JOIN_BELOW_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)
        self._update()
        left = self._transport.get_write_buffer_size()
        self._bytes_left = self._high_water - left
        if left > REPORTED_OUTPUT_BYTES:
            self._on_queued()

    @property
    def drained_bytes(self) -> int:
        """Bytes that the operating system has taken so far."""
        return self._bytes_out - self._transport.get_write_buffer_size()

    @property
    def queued_bytes(self) -> int:
        """Bytes that are queued, here or in the transport."""
        return 0 if self._closed else self._bytes + self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Drop the queue, the waiting callbacks and those of the connection, as it has ended."""
        self._closed = True
        self._drop()
        self._bytes_left = -1  # Makes each `put` check the bounds, which drops it.
        self._on_change = _ignore_change
        self._on_queued = self._give_up = _ignore

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Run `callback` once, as soon as it is writable."""
        if self.writable:
            self._loop.call_soon(callback)
        elif not self._closed:
            self._callbacks.append(callback)

    def transport_full(self, full: bool) -> None:
        """Note whether the transport's own buffer is full."""
        self._transport_full = full
        self._update()

    def _drop(self) -> None:
        self._buffers = []
        self._bytes = 0
        self._callbacks = []

    def _check_bounds(self) -> None:
        if self._closed:
            self._drop()
            return
        self._update()
        if self._bytes + self._transport.get_write_buffer_size() > self._limit:
            self._give_up()
        self._on_queued()

    def _update(self) -> None:
        queued = self._bytes + self._transport.get_write_buffer_size()
        writable = not self._transport_full and queued <= self._high_water
        if writable is self.writable:
            return
        self.writable = writable
        self._on_change(writable)
        if writable:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                self._loop.call_soon(callback)


def _ignore() -> None:
    pass


def _ignore_change(_: bool) -> None:
    pass
