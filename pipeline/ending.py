"""How a job ends that is told to: by Ctrl-C, or by SIGTERM, as those send it who manage processes.

Rules:

- Both go through the job as exceptions of its main thread: what it has open is aborted, Spark's
  session and processes end.
- The last line is a sentence.  The status is 130 for SIGINT and 143 for SIGTERM, as in shells.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import typer

from magnetar.cli.common import INTERRUPTED, ending_well

__all__ = ["TERMINATED", "Terminated", "ending_as_told"]

TERMINATED: Final = 143
"""As shells report a program that SIGTERM ended."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come.  Whatever minds Ctrl-C minds it."""


@contextmanager
def ending_as_told(job: str, then: str) -> Iterator[None]:
    """Ends a command as `ending_well` does; one that is told to end says `then`: what to do next.

    `job` is what it is called.  On another thread than the main one, which no signal reaches,
    SIGTERM stays what it was.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if on_main_thread else None
    try:
        with ending_well():
            try:
                yield
            except KeyboardInterrupt as told:
                terminated = isinstance(told, Terminated)
                by = "SIGTERM" if terminated else "Ctrl-C"
                typer.echo(f"magnetar: The {job} was ended by {by}. {then}", err=True)
                raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
