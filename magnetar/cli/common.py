"""Functions that the client's sub-commands share: names of topics, errors to exit statuses."""

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
"""The exit status that shells report for a program that SIGINT ended."""

TopicArgument = Annotated[
    str,
    typer.Argument(
        help="topic://tenant/namespace/name, persistent://..., or just the name of a topic://"
    ),
]


class Kind(enum.StrEnum):
    """The kind of a subscription."""

    QUEUE = "queue"
    STREAM = "stream"


class Compression(enum.StrEnum):
    """The compression of batches."""

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
    """End a command with an exit status and at most one sentence on standard error.

    An error is one sentence and status 1.  Ctrl-C gives the status `interrupted`: 0 where it is the
    way to end the command, 130 where work is left undone.  A reader that goes away (`| head`) ends
    the command with status 0 and no output.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise typer.Exit(0) from None
    except MagnetarError as error:
        typer.echo(f"magnetar: {one_line(error)}", err=True)
        raise typer.Exit(1) from error
    except OSError as error:
        if error.errno is None:
            raise
        if error.filename is None:
            _discard_output()
        typer.echo(f"magnetar: {_os_error_advice(error)}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(interrupted) from None


def _discard_output() -> None:
    """Send standard output to /dev/null."""
    # Python writes what is still buffered when it exits, and would fail once more.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_error_advice(error: OSError) -> str:
    """The sentence for a file that cannot be used, or for output that cannot be written."""
    if error.filename is None:
        return (
            f"The output cannot be written ({error.strerror}); free some disk, or write it "
            "elsewhere: messages that were not printed are not acknowledged."
        )
    return f"{error.filename!r} cannot be used ({error.strerror}); correct it, or name another."


@contextmanager
def finishing() -> Iterator[None]:
    """Delay Ctrl-C until the block has finished; a second Ctrl-C interrupts it.

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
    """The message of an error on one line, or the name of its class if it has none.

    Control characters, which a broker's text may have, are escaped.
    """
    line = " ".join(str(error).split()) or type(error).__name__
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in line
    )


def topic_named(given: str) -> str:
    """The full name of a topic.

    A name without a domain is that of a scalable topic, in public/default if it has no namespace.
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
    """The properties given as `name=value`.  Raises typer.BadParameter."""
    found: dict[str, str] = {}
    for each in given:
        name, sign, value = each.partition("=")
        if not (name and sign):
            raise typer.BadParameter(f"{each!r} is no property: write NAME=VALUE.")
        found[name] = value
    return found
