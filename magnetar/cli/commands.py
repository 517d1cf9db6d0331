"""The client's sub-commands of `magnetar` and their options.

Each command imports the module that does its work when it runs, so that others start fast.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from magnetar.cli.common import (
    INTERRUPTED,
    Compression,
    Kind,
    Start,
    TopicArgument,
    ending_well,
    properties_of,
    topic_named,
)
from magnetar.cli.connecting import Where, connecting

DEFAULT_PERF_TOPIC: Final = "perf"
PerfTopic = Annotated[
    str, typer.Argument(help="A topic of its own: consumers of the topic get these messages")
]
Subscription = Annotated[str, typer.Option("--subscription", "-s", help="Created if it is missing")]
KindOption = Annotated[
    Kind, typer.Option("--type", help="queue: shared work, in any order; stream: in order")
]
StartOption = Annotated[Start, typer.Option("--from", help="Where a new subscription begins")]
Count = Annotated[int | None, typer.Option("-n", "--count", min=1, help="End after this many")]
Idle = Annotated[
    float | None, typer.Option("--idle-s", min=0.001, help="End after this long without a message")
]
InJson = Annotated[bool, typer.Option("--json", help="One JSON object a line, with everything")]
SummaryInJson = Annotated[bool, typer.Option("--json", help="The summary as one JSON object")]
Seconds = Annotated[
    float | None, typer.Option(min=0.01, help="End after this time [10, unless -n is given]")
]


@connecting
def produce(
    topic: TopicArgument,
    message: Annotated[
        list[str] | None, typer.Option("--message", "-m", help="A message; may be repeated")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", exists=True, dir_okay=False, help="One message for each line"),
    ] = None,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Key of the messages")] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="NAME=VALUE", help="May be repeated"),
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Times to send all")] = 1,
    *,
    where: Where,
) -> None:
    """Send messages: those given with -m, else each line of a file or of standard input."""
    if message and file:
        raise typer.BadParameter("give messages with -m or a file, not both.")
    topic, named = topic_named(topic), properties_of(properties or [])
    with ending_well():
        from magnetar.cli.messages import send_all, values_of

        sent = send_all(
            where,
            topic,
            values_of(message or [], file, count),
            {"key": key, "properties": named},
        )
        typer.echo(f"Sent {sent:,} message(s) to {topic}.")


@connecting
def consume(
    topic: TopicArgument,
    subscription: Subscription,
    count: Count = None,
    kind: KindOption = Kind.QUEUE,
    start: StartOption = Start.EARLIEST,
    idle_s: Idle = None,
    in_json: InJson = False,
    *,
    where: Where,
) -> None:
    """Print the messages of a subscription and acknowledge them; Ctrl-C ends."""
    topic = topic_named(topic)
    with ending_well(interrupted=_interrupted(count)):
        from magnetar.cli.messages import Printing, print_subscription
        from magnetar.cli.rendering import as_json, as_value

        print_subscription(
            where,
            topic,
            subscription,
            kind,
            start,
            Printing(as_json if in_json else as_value, count, idle_s),
        )


@connecting
def peek(
    topic: TopicArgument,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="At most this many")] = 10,
    idle_s: Idle = 1.0,
    in_json: InJson = False,
    *,
    where: Where,
) -> None:
    """Show the first messages of a topic without a subscription: nothing is acknowledged."""
    _read(where, topic, Start.EARLIEST, count, idle_s, in_json)


@connecting
def tail(
    topic: TopicArgument,
    count: Count = None,
    idle_s: Idle = None,
    in_json: InJson = False,
    *,
    where: Where,
) -> None:
    """Show messages as they come, from now on, without a subscription; Ctrl-C ends."""
    _read(where, topic, Start.LATEST, count, idle_s, in_json)


def _read(
    where: Where,
    topic: str,
    start: Start,
    count: int | None,
    idle_s: float | None,
    in_json: bool,
) -> None:
    topic = topic_named(topic)
    with ending_well(interrupted=_interrupted(count)):
        from magnetar.cli.messages import Printing, print_topic
        from magnetar.cli.rendering import as_json, as_line

        print_topic(where, topic, start, Printing(as_json if in_json else as_line, count, idle_s))


def _interrupted(count: int | None) -> int:
    """The exit status after Ctrl-C: 0 for a command that only Ctrl-C ends."""
    return 0 if count is None else INTERRUPTED


@connecting
def perf_produce(
    topic: PerfTopic = DEFAULT_PERF_TOPIC,
    count: Count = None,
    seconds: Seconds = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Messages a second; without it as fast as possible"),
    ] = None,
    size: Annotated[int, typer.Option(min=0, help="Bytes of a message")] = 1024,
    keys: Annotated[int, typer.Option(min=0, help="Different keys; 0: no key")] = 0,
    batching: Annotated[bool, typer.Option(help="Send messages in batches")] = True,
    compression: Annotated[Compression, typer.Option(help="How to compress")] = Compression.NONE,
    in_flight: Annotated[int, typer.Option(min=1, help="Messages without receipt")] = 10_000,
    in_json: SummaryInJson = False,
    *,
    where: Where,
) -> None:
    """Send messages of random letters and measure the time to their receipts."""
    topic = topic_named(topic)
    with ending_well():
        from magnetar.cli.perf import Limits, Load, measure_producing, measured

        limits = Limits.of(count, seconds)
        load = Load(size, rate, keys, batching, compression, in_flight)
        well = measured(
            lambda tally, stop: measure_producing(where, topic, load, limits, tally, stop),
            "Sent",
            limits,
            in_json,
            "no receipt has come yet; check whether the broker is well, or end it by Ctrl-C.",
        )
    if not well:
        raise typer.Exit(1)


@connecting
def perf_consume(
    topic: PerfTopic = DEFAULT_PERF_TOPIC,
    subscription: Subscription = "perf",
    count: Count = None,
    seconds: Seconds = None,
    kind: KindOption = Kind.QUEUE,
    start: StartOption = Start.LATEST,
    in_json: SummaryInJson = False,
    *,
    where: Where,
) -> None:
    """Receive and acknowledge messages, and measure the time since they were sent."""
    topic = topic_named(topic)
    with ending_well():
        from magnetar.cli.perf import Limits, measure_consuming, measured

        limits = Limits.of(count, seconds)
        well = measured(
            lambda tally, stop: measure_consuming(
                where, topic, subscription, kind, start, limits, tally, stop
            ),
            "Received",
            limits,
            in_json,
            "no message has come yet; send some (magnetar perf produce), read those that are there "
            "(--from earliest, and a new --subscription), or end it by Ctrl-C.",
        )
    if not well:
        raise typer.Exit(1)


def demo(
    orders: Annotated[int, typer.Option(min=300, help="How many orders are billed")] = 1000,
    keep: Annotated[bool, typer.Option("--keep", help="Keep data and logs")] = False,
) -> None:
    """See a pipeline survive: crashes in the middle of transactions, nothing lost or doubled."""
    with ending_well():
        from magnetar.cli.demo.stage import perform

        whole = perform(orders, keep)
    if not whole:
        raise typer.Exit(1)


def demo_worker(
    orders: str,
    bills: str,
    url: Annotated[str, typer.Option()],
    batch: Annotated[int, typer.Option()],
    hold_at: Annotated[str, typer.Option()] = "",
) -> None:
    """The worker of the demo."""
    with ending_well():
        from magnetar.cli.demo.worker import Work, run_worker

        holds = [int(each) for each in hold_at.split(",") if each]
        status = run_worker(Work(url, orders, bills, batch, holds))
    raise typer.Exit(status)


def register(app: typer.Typer) -> None:
    """Add the client's commands: an entry point of the group `magnetar.commands`."""
    app.command("produce")(produce)
    app.command("consume")(consume)
    app.command("peek")(peek)
    app.command("tail")(tail)
    app.command("demo")(demo)
    app.command("demo-worker", hidden=True)(demo_worker)
    perf = typer.Typer(help="Measure throughput and latency of a topic.", no_args_is_help=True)
    perf.command("produce")(perf_produce)
    perf.command("consume")(perf_consume)
    app.add_typer(perf, name="perf")
