"""`magnetar perf produce` and `perf consume`: throughput, and the latency of each message."""

import asyncio
import json
import math
import random
import string
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import magnetar
from magnetar.bounds import CLI_BATCH, PERF_QUIET_S, PERF_SHOWN_EVERY_S, PERF_TURN
from magnetar.cli.common import Compression, Kind, Start
from magnetar.cli.connecting import Where
from magnetar.cli.tally import Tally
from magnetar.compression import CompressionType
from magnetar.consume.message import Message
from magnetar.consume.settings import InitialPosition
from magnetar.errors import MagnetarError, ProducerQueueFull
from magnetar.event_loop import call_at_interrupt, new_event_loop
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer

DEFAULT_SECONDS: Final = 10.0
VALUE_MARK: Final = "magnetar perf "
Receive = Callable[[int, float], Awaitable[list[Message[bytes]]]]
Acknowledge = Callable[[list[Message[bytes]]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: after so many messages, after so many seconds; at least one is given."""

    messages: int | None
    seconds: float | None

    @classmethod
    def of(cls, messages: int | None, seconds: float | None) -> "Limits":
        """These limits, or `DEFAULT_SECONDS` if both are None."""
        return cls(messages, DEFAULT_SECONDS if messages is None and seconds is None else seconds)


@dataclass(frozen=True, slots=True)
class Load:
    """The messages of a run.  Without `rate` they are sent as fast as possible."""

    size: int
    rate: float | None
    keys: int
    batching: bool
    compression: Compression
    in_flight: int


def load_value(size: int) -> bytes:
    """The value of each message: a mark, by which readers of the topic know it, and random letters.

    It is text, so that `magnetar consume` and consumers of text can read it.
    """
    letters = random.Random(1).choices(string.ascii_letters + string.digits, k=size)
    return (VALUE_MARK + "".join(letters))[:size].encode()


async def produce_load(
    producer: Producer[bytes],
    load: Load,
    limits: Limits,
    tally: Tally,
    stop: asyncio.Event,
) -> None:
    """Send until a limit is reached or `stop` is set, then wait for the receipts."""
    now = time.perf_counter
    payload = load_value(load.size)
    keys = [f"key-{number}" for number in range(load.keys)]
    began_s = now()
    given = 0
    while not stop.is_set() and given != limits.messages:
        passed_s = now() - began_s
        if limits.seconds is not None and passed_s >= limits.seconds:
            break
        turn = PERF_TURN if load.rate is None else int(passed_s * load.rate) + 1 - given
        if limits.messages is not None:
            turn = min(turn, limits.messages - given)
        for _ in range(min(turn, PERF_TURN)):
            key = keys[given % load.keys] if keys else None
            try:
                sending = producer.send_nowait(payload, key=key)
            except ProducerQueueFull:
                await producer.room()
                break
            # With a rate, a message that waits behind a slow answer is late: its latency begins
            # when it was due.
            due_s = now() if load.rate is None else began_s + given / load.rate
            sending.add_done_callback(partial(_count_receipt, tally, load.size, due_s))
            given += 1
        ahead_s = 0.0 if load.rate is None else began_s + given / load.rate - now()
        await asyncio.sleep(max(ahead_s, 0.0))
    try:
        await producer.flush()
    except MagnetarError:
        pass  # Counted by its message.


def _count_receipt(
    tally: Tally, size: int, due_s: float, sending: "asyncio.Future[MessageId]"
) -> None:
    failure = None if sending.cancelled() else sending.exception()
    if sending.cancelled() or failure is not None:
        tally.fail(failure)
        return
    now_s = time.perf_counter()
    tally.done(size, int((now_s - due_s) * 1_000_000), now_s)


async def consume_load(
    receive: Receive, acknowledge: Acknowledge, limits: Limits, tally: Tally, stop: asyncio.Event
) -> None:
    """Receive and acknowledge until a limit is reached or `stop` is set.

    Time runs from the first message on.  Latencies are from the producer's clock, which counts
    milliseconds, to this one.
    """
    deadline_s: float | None = None
    while not stop.is_set() and tally.messages != limits.messages:
        most = CLI_BATCH
        if limits.messages is not None:
            most = min(most, limits.messages - tally.messages)
        came = await receive(most, PERF_SHOWN_EVERY_S)
        now_s, now_ms = time.perf_counter(), time.time() * 1000
        if came and deadline_s is None:
            tally.started_s = now_s
            deadline_s = now_s + (limits.seconds or float("inf"))
        for message in came:
            tally.done(len(message.data), int((now_ms - message.publish_time_ms) * 1000), now_s)
        if came:
            await acknowledge(came)
        if deadline_s is not None and now_s > deadline_s:
            return


async def measure_producing(
    where: Where, topic: str, load: Load, limits: Limits, tally: Tally, stop: asyncio.Event
) -> None:
    """Connect and send a load."""
    async with (
        magnetar.connect(where.url, **where.options) as client,
        client.producer(
            topic,
            batching=load.batching,
            compression=CompressionType[load.compression.name],
            max_pending_messages=load.in_flight,
        ) as producer,
    ):
        tally.started_s = time.perf_counter()
        await produce_load(producer, load, limits, tally, stop)


async def measure_consuming(
    where: Where,
    topic: str,
    subscription: str,
    kind: Kind,
    start: Start,
    limits: Limits,
    tally: Tally,
    stop: asyncio.Event,
) -> None:
    """Connect and read."""
    begin = InitialPosition[start.name]
    async with magnetar.connect(where.url, **where.options) as client:
        if kind is Kind.STREAM:
            async with client.stream_consumer(
                topic, subscription, initial_position=begin
            ) as stream:
                await consume_load(
                    stream.receive_batch,
                    lambda came: stream.ack(came[-1]),
                    limits,
                    tally,
                    stop,
                )
            return
        async with client.queue_consumer(topic, subscription, initial_position=begin) as queue:
            await consume_load(queue.receive_batch, queue.ack, limits, tally, stop)


Run = Callable[[Tally, asyncio.Event], Awaitable[None]]


def measured(run: Run, verb: str, limits: Limits, as_json: bool, quiet: str) -> bool:
    """Do a run, show its progress and print its summary.

    Returns whether messages went through and none failed.  The first Ctrl-C ends the run early,
    with its summary.  Prints `quiet` if no message went through for a while.  Raises
    KeyboardInterrupt for a second Ctrl-C, after the summary.
    """
    tally = Tally(time.perf_counter())
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        whole = runner.run(_run_with_progress(run, tally, limits, quiet))
    if as_json:
        typer.echo(json.dumps(tally.as_mapping()))
    else:
        for line in tally.summary(verb):
            typer.echo(line)
    if (failed := tally.why_failed()) is not None:
        typer.echo(f"magnetar: {failed}", err=True)
    if not whole:
        raise KeyboardInterrupt
    return bool(tally.messages) and not tally.failed


async def _run_with_progress(run: Run, tally: Tally, limits: Limits, quiet: str) -> bool:
    """Do a run with a progress line on standard error, if that is a terminal.

    Returns False if a second Ctrl-C cancelled the run.
    """
    stop = asyncio.Event()
    running = asyncio.ensure_future(run(tally, stop))

    def interrupt() -> None:
        if stop.is_set():
            running.cancel()
        stop.set()

    call_at_interrupt(interrupt)
    quiet_at_s = time.perf_counter() + PERF_QUIET_S
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=4,
    ) as progress:
        shown = progress.add_task("", total=limits.messages or limits.seconds)
        while not running.done():
            await asyncio.wait((running,), timeout=PERF_SHOWN_EVERY_S)
            now_s = time.perf_counter()
            if now_s > quiet_at_s and not tally.messages and not running.done():
                quiet_at_s = math.inf
                console.print(f"magnetar: {quiet}", markup=False, highlight=False, soft_wrap=True)
            done = tally.messages if limits.messages is not None else now_s - tally.started_s
            progress.update(shown, completed=done, description=tally.line(now_s))
    if running.cancelled():
        return False
    await running
    return True
