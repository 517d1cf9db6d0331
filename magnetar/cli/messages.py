"""Messages from and to the command line: `magnetar produce`, `consume`, `peek` and `tail`."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

import typer

import magnetar.sync
from magnetar.bounds import CLI_BATCH
from magnetar.checkpoint import Checkpoint
from magnetar.cli.common import Kind, Start, finishing
from magnetar.cli.connecting import Where
from magnetar.cli.rendering import Rendering, as_json, is_plain_text
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition
from magnetar.errors import ProducerQueueFull
from magnetar.message_id import MessageId
from magnetar.sync.producer import Producer, SendOptions

ESCAPED_HINT: Final = (
    "magnetar: some values are not plain text and printed with escapes such as \\x00; --json has "
    "them unchanged (in base64 where they are not UTF-8)."
)


@dataclass(frozen=True, slots=True)
class Printing:
    """How messages are printed, and when that ends: after `count`, or a silence of `idle_s`."""

    show: Rendering
    count: int | None
    idle_s: float | None


class Batches(Protocol):
    """Any consumer."""

    def receive_batch(
        self, max_messages: int, timeout_s: float | None = None
    ) -> list[Message[bytes]]:
        """The messages that have arrived; waits for the first one."""
        ...


# Sending


def send_all(where: Where, topic: str, values: Iterable[bytes], options: SendOptions) -> int:
    """Send the values in order, and return how many.

    Raises the first failure, and sends nothing after it.
    """
    with (
        _connected(where) as client,
        client.producer(topic) as producer,
    ):
        sender = _Sender(producer, options)
        for value in values:
            sender.send(value)
        sender.finish()
        return sender.count


class _Sender:
    """Sends messages as fast as receipts come, until the first failure."""

    def __init__(self, producer: Producer[bytes], options: SendOptions) -> None:
        self._producer = producer
        self._options = options
        self._failure: BaseException | None = None
        self.count = 0

    def send(self, value: bytes) -> None:
        """Send one message.  Raises the failure of an earlier one."""
        if self._failure is not None:
            raise self._failure
        while True:
            try:
                future = self._producer.send_nowait(value, **self._options)
                break
            except ProducerQueueFull:
                self._producer.room()
        future.add_done_callback(self._keep_failure)
        self.count += 1

    def finish(self) -> None:
        """Wait for all receipts.  Raises the first failure."""
        self._producer.flush()
        if self._failure is not None:
            raise self._failure

    def _keep_failure(self, future: "Future[MessageId]") -> None:
        if self._failure is None and not future.cancelled():
            self._failure = future.exception()


def values_of(messages: Sequence[str], file: Path | None, times: int) -> Iterator[bytes]:
    """The given messages, else the lines of the file, else of standard input; `times` times."""
    if messages:
        for _ in range(times):
            yield from (each.encode() for each in messages)
    elif file is not None:
        for _ in range(times):
            with file.open("rb") as lines:
                yield from _lines(lines)
    elif times == 1:
        yield from _lines(sys.stdin.buffer)
    else:
        read = list(_lines(sys.stdin.buffer))
        for _ in range(times):
            yield from read


def _lines(lines: BinaryIO) -> Iterable[bytes]:
    if lines.isatty():
        typer.echo("One message a line; Ctrl-D ends.", err=True)
    return (line.rstrip(b"\r\n") for line in lines)


# Reading


def print_subscription(
    where: Where, topic: str, subscription: str, kind: Kind, start: Start, printing: Printing
) -> None:
    """Print and acknowledge messages of a subscription."""
    begin = InitialPosition[start.name]
    with _connected(where) as client:
        if kind is Kind.STREAM:
            with client.stream_consumer(topic, subscription, initial_position=begin) as stream:
                print_all(stream, printing, lambda came: stream.ack(came[-1]))
            return
        with client.queue_consumer(topic, subscription, initial_position=begin) as queue:
            print_all(queue, printing, queue.ack)


def print_topic(where: Where, topic: str, start: Start, printing: Printing) -> None:
    """Print messages without a subscription."""
    begin = Checkpoint.EARLIEST if start is Start.EARLIEST else Checkpoint.LATEST
    with (
        _connected(where) as client,
        client.checkpoint_consumer(topic, start=begin) as reader,
    ):
        print_all(reader, printing, lambda came: None)


def _connected(where: Where) -> magnetar.sync.Client:
    return magnetar.sync.connect(where.url, **where.options)


def print_all(
    consumer: Batches,
    printing: Printing,
    printed: Callable[[Sequence[Message[bytes]]], None],
) -> None:
    """Print messages and call `printed` with those of each batch, until the printing ends.

    The first batch with a value that is not plain text is followed by a hint on standard error.
    """
    left, hinted = printing.count, printing.show is as_json
    while left is None or left > 0:
        came = consumer.receive_batch(min(left or CLI_BATCH, CLI_BATCH), printing.idle_s)
        if not came:
            return
        # Acknowledged after they were printed: a command that dies prints some twice, and none
        # never.  Ctrl-C must not come in between.
        with finishing():
            sys.stdout.write("".join(f"{printing.show(each)}\n" for each in came))
            sys.stdout.flush()
            printed(came)
        if not hinted and not all(is_plain_text(each.data) for each in came):
            hinted = True
            typer.echo(ESCAPED_HINT, err=True)
        if left is not None:
            left -= len(came)
