"""The event loop of the project's own processes and threads: uvloop's, or asyncio's without it."""

import asyncio
import signal
from collections.abc import Callable

try:
    import uvloop
except ImportError:  # There is none for Windows and for PyPy.
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

__all__ = ["call_at_interrupt", "new_event_loop"]


def call_at_interrupt(callback: Callable[[], None]) -> None:
    """Call `callback` on the running loop at each SIGINT."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, callback)
    except NotImplementedError:  # asyncio's loops on Windows.
        signal.signal(signal.SIGINT, lambda _number, _frame: loop.call_soon_threadsafe(callback))
