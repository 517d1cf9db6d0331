"""What the client's sub-commands share: names of topics, how they end.

Rules: an error is one sentence on standard error and status 1; Ctrl-C ends cleanly, with status 0
where it is the way to end the command and 130 where it leaves work undone; a reader that goes away
(`| head`) ends the command without a word.
"""

import enum
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Final

import typer

from magnetar.protocol.server_error import MagnetarError

INTERRUPTED: Final = 130
"""As shells report a program that SIGINT ended."""

TopicArgument = Annotated[
    str,
    typer.Argument(
        help="topic://tenant/namespace/name, persistent://..., or just the name of a topic://"
    ),
]


class Kind(enum.StrEnum):
    """Of a subscription."""

    QUEUE = "queue"
    STREAM = "stream"


class Compression(enum.StrEnum):
    """Of batches."""

    NONE = "none"
    LZ4 = "lz4"
    ZLIB = "zlib"
    ZSTD = "zstd"
    SNAPPY = "snappy"


class Start(enum.StrEnum):
    """Where a new subscription begins."""

    EARLIEST = "earliest"
    LATEST = "latest"


@contextmanager
def ending_well(*, interrupted: int = INTERRUPTED) -> Iterator[None]:
    """Turns what ends a command into what a shell understands (see the module's rules)."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _write_nowhere()
        raise typer.Exit(0) from None
    except MagnetarError as error:
        typer.echo(f"magnetar: {one_line(error)}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        if error.errno is None:
            raise
        if error.filename is None:
            _write_nowhere()
        typer.echo(f"magnetar: {_not_usable(error)}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(interrupted) from None


def _write_nowhere() -> None:
    """What is still buffered would be written when Python exits, and fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _not_usable(error: OSError) -> str:
    """The sentence of what the machine refuses: a file, else the output."""
    if error.filename is None:
        return (
            f"The output cannot be written ({error.strerror}); make room, or write it elsewhere: "
            "messages that were not printed are not acknowledged."
        )
    return f"{error.filename!r} cannot be used ({error.strerror}); mend that, or name another one."


@contextmanager
def finishing() -> Iterator[None]:
    """What the block has begun is finished before Ctrl-C takes effect; a second one takes effect.

    On other threads than the main one, which Ctrl-C does not reach, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def one_line(error: Exception) -> str:
    """The sentence of an error."""
    return " ".join(str(error).split()) or type(error).__name__


def topic_named(given: str) -> str:
    """A name without a domain is that of a scalable topic, in public/default unless it says else.

    Raises typer.BadParameter.
    """
    if "://" in given:
        return given
    parts = given.split("/", 2)
    if len(parts) == 1:
        parts = ["public", "default", given]
    if len(parts) != 3 or not all(parts):
        raise typer.BadParameter(f"{given!r} is no topic: write topic://tenant/namespace/name.")
    return "topic://" + "/".join(parts)


def properties_of(given: list[str]) -> dict[str, str]:
    """`name=value` of each `--property`.  Raises typer.BadParameter."""
    found: dict[str, str] = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not (name and sign):
            raise typer.BadParameter(f"{each!r} is no property: write NAME=VALUE.")
        found[name] = value
    return found
