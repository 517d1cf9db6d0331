"""The end of a job by Ctrl-C or by SIGTERM.

Both are exceptions of the job's main thread, so that the job aborts its open transactions and ends
Spark's session and processes.  The exit status is 130 for SIGINT and 143 for SIGTERM, as in shells.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import typer

from magnetar.cli.common import INTERRUPTED, ending_well

__all__ = ["TERMINATED", "Terminated", "ending_on_signals"]

TERMINATED: Final = 143
"""The exit status of a program that SIGTERM ended, as in shells."""


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM; code that handles Ctrl-C handles it too."""


@contextmanager
def ending_on_signals(job: str, then: str) -> Iterator[None]:
    """End a command as `ending_well` does; after a signal print `then`, the next step.

    `job` is its name.  On a thread other than the main one, which no signal reaches, the handler of
    SIGTERM is not changed.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if on_main_thread else None
    try:
        with ending_well():
            try:
                yield
            except KeyboardInterrupt as interrupt:
                terminated = isinstance(interrupt, Terminated)
                by = "SIGTERM" if terminated else "Ctrl-C"
                typer.echo(f"magnetar: The {job} was ended by {by}. {then}", err=True)
                raise typer.Exit(TERMINATED if terminated else INTERRUPTED) from None
    finally:
        if on_main_thread:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
