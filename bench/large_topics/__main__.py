"""`python -m bench.large_topics`: costs of one large topic, and the exponents of their growth.

Unacknowledged messages of a shared subscription, delayed messages, holes in the position of a
subscription, subscriptions.  Each size has an embedded broker of its own, with default settings but
without maxima of unacknowledged messages.  A client beside it, in a process of its own, asks for
PINGs and runs transactions all the while (`bench.bystander`).

Rules: each message is an entry; the client speaks frames, and its own work counts in the seconds.
A restart is SIGKILL, a start, and the first message, or the first producer, of the topic.
Exponents are fitted as those of `bench.segments`.  The result is a table for each load, as
Markdown and JSON in `build/bench`.  There is no pass mark.  Compactions are `bench.compaction`'s.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.__main__ import OUTPUT, machine, say
from bench.growth_figures import Row, exponents, growth_table, report
from bench.large_topics.loads import delayed, holes, subscriptions, unacknowledged
from bench.large_topics.observed import Observed
from tests.support.broker_process import running

SETTINGS: Final = {
    "max_unacked_messages_per_consumer": 0,
    "max_unacked_messages_per_subscription": 0,
}
SHARES: Final = (0.1, 0.3, 1.0)
"""Fractions of the largest size."""
QUICK_SHARES: Final = (0.01, 0.1)


@dataclass(frozen=True)
class Load:
    """A load: its unit, its largest size, what runs it, and its phases with what is done there."""

    unit: str
    largest: int
    run: Callable[[Observed, int], Awaitable[None]]
    phases: dict[str, str]
    more: tuple[Row, ...] = ()

    def rows(self) -> list[Row]:
        """The rows of its table."""
        found: list[Row] = []
        for name, what in self.phases.items():
            found += [
                Row(f"{name}_s", f"{what}, s", 2),
                Row(f"{name}_cpu_s", f"{what}: processor time of the broker, s", 2),
                Row(f"{name}_ping_ms", f"{what}: longest PING of another client, ms"),
            ]
        return [
            *found,
            *self.more,
            Row("stats_ms", "statistics of the topic, ms"),
            Row("held_bytes", f"memory of the broker more, bytes for each of the {self.unit}", 0),
            Row("peak_kib", "most memory of the broker after the restart, KiB", 0),
            Row("disk_kib", "files, KiB", 0),
        ]


LOADS: Final = {
    "unacknowledged": Load(
        "unacknowledged messages",
        1_000_000,
        unacknowledged,
        {
            "deliver": "delivery to a consumer that keeps them",
            "redeliver": "it leaves, and another one gets them",
            "restart": "restart, until the first message",
            "acknowledge": "acknowledgement of each",
        },
        (Row("redelivered_first_ms", "it leaves: until the other one has the first, ms"),),
    ),
    "delayed": Load(
        "delayed messages",
        1_000_000,
        delayed,
        {
            "delay": "sends of messages that are due tomorrow",
            "restart": "restart, until a message that is due",
            "release": "the policy ends the delays, until all are there",
        },
    ),
    "holes": Load(
        "holes",
        100_000,
        holes,
        {
            "acknowledge": "acknowledgement of every second message",
            "restart": "restart, until the first message",
        },
        (Row("behind_ms", "a message behind them, sent, received and acknowledged, ms", 2),),
    ),
    "subscriptions": Load(
        "subscriptions",
        10_000,
        subscriptions,
        {
            "create": "creation, 100 at once",
            "restart": "restart, until the topic has a producer",
            "delete": "deletion of the topic",
        },
        (
            Row("send_alone_ms", "a send before there are any, ms", 2),
            Row("send_ms", "a send with all of them idle, ms", 2),
        ),
    ),
}


async def measure(load: Load, size: int, directory: Path) -> dict[str, float]:
    """The figures of one size."""
    async with running(directory, SETTINGS) as broker:
        observed = Observed(broker, directory)
        observed.start()
        try:
            await load.run(observed, size)
        finally:
            observed.end()
        return observed.figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.large_topics", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundredth and a tenth of the sizes")
    parser.add_argument("--measure", choices=LOADS, nargs="+", default=[*LOADS])
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("large-topics.json"))
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    where = machine()
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name in options.measure:
        load = LOADS[name]
        found[name] = {}
        for share in QUICK_SHARES if options.quick else SHARES:
            size = int(share * load.largest)
            say(f"{size:,} {load.unit}")
            directory = Path(tempfile.mkdtemp(prefix="large-", dir=options.output.parent))
            try:
                found[name][size] = asyncio.run(measure(load, size, directory))
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    where["load_after"] = os.getloadavg()[0]
    powers = {name: exponents(LOADS[name].rows(), found[name]) for name in found}
    document = {"machine": where, "figures": found, "exponents": powers}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    tables = [growth_table(LOADS[name].rows(), found[name]) for name in found]
    for name, table in zip(found, tables, strict=True):
        table[0][0] = LOADS[name].unit
    page = report("Large topics", where, tables)
    options.output.with_suffix(".md").write_text(page)
    print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
