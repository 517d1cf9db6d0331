"""The share of the event loop and of the disk that background work takes."""

import asyncio
from typing import Final

_DISK_STEP_BYTES: Final = 256 * 1024


class Pace:
    """Divides work into slices, with pauses in which the event loop serves others.

    Call `spend` after each small piece of work, and `resume` after waiting for something else.
    """

    __slots__ = ("_bytes", "_bytes_per_s", "_loop", "_rest", "_since_s", "_slice_s")

    def __init__(self, *, share: float, slice_s: float, bytes_per_s: float) -> None:
        """Work at most `share` (0 to 1) of the time, `slice_s` at once."""
        self._loop = asyncio.get_running_loop()
        self._rest = 1 / share - 1
        self._slice_s = slice_s
        self._bytes_per_s = bytes_per_s
        self._bytes = 0
        self._since_s = self._loop.time()

    def resume(self) -> None:
        """Begin a slice: the time before was not work."""
        self._since_s = self._loop.time()

    async def spend(self, size_bytes: int = 0) -> None:
        """Note that bytes were read or written, and pause if the slice is used up."""
        self._bytes += size_bytes
        worked_s = self._loop.time() - self._since_s
        if worked_s < self._slice_s and self._bytes < _DISK_STEP_BYTES:
            return
        pause_s = max(worked_s * self._rest, self._bytes / self._bytes_per_s)
        self._bytes = 0
        await asyncio.sleep(pause_s)
        self.resume()
