"""`python -m bench.segments`: what grows with the segments of a topic, and by which exponent.

Topics of 10 to 1,000 segments, each on a broker of its own: creation, lookup, split, merge, push of
the layout, load after a restart, an ordered consumer that attaches everywhere, memory, evaluation
of the scaling policy, processor time at rest.  Then 10,000 topics of one segment at rest.

Figures are medians; the first round does not count.  Brokers have default settings except for
`growth.SETTINGS`.  Processor time at rest is taken of all brokers in the same minute.  Times are
those of a client in Python, its decoding of layouts included.  Exponents are fitted by least
squares on logarithms, over all sizes and over the two largest, as small sizes show fixed costs.
The result is two tables, as Markdown and JSON in `build/bench`.  There is no pass mark.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import structlog

from bench.__main__ import OUTPUT, machine, say
from bench.growth_figures import exponents, growth_table, report, value_table
from bench.segments.growth import SETTINGS, LargeTopic, evaluation_ms
from bench.segments.memory import TopicsAtRest, idle_cpu_ms, topic_kib
from bench.segments.rows import AT_REST, BY_SEGMENTS
from tests.support.broker_process import BrokerProcess, running

SIZES: Final = (10, 30, 100, 300, 1000)
TOPICS: Final = 10_000
ROUNDS: Final = 5
IDLE_S: Final = 60.0
MEMORY_SEGMENTS: Final = 10_000
"""Segments in all topics of one size together, when their memory is measured."""


async def measure(
    options: argparse.Namespace, directory: Path
) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """Return the figures of each size, and those of many topics at rest."""
    by_segments: dict[int, dict[str, float]] = {}
    async with AsyncExitStack() as stack:
        brokers: list[BrokerProcess] = []
        for size in options.sizes:
            say(f"{size} segments")
            place = directory / f"{size}"
            broker = await stack.enter_async_context(running(place, SETTINGS))
            topic = LargeTopic(broker, size, options.rounds)
            # Its ordered consumer stays connected while the broker rests.
            client = await topic.measure()
            stack.push_async_callback(client.close)
            brokers.append(broker)
            by_segments[size] = topic.figures
        say(f"{options.topics} topics")
        many = TopicsAtRest(directory / "many", options.topics)
        stack.callback(many.broker.kill)
        await many.start()
        empty = await stack.enter_async_context(running(directory / "empty"))
        say("at rest")
        *used, many_ms, empty_ms = await idle_cpu_ms([*brokers, many.broker, empty], options.idle_s)
        for size, used_ms in zip(options.sizes, used, strict=True):
            by_segments[size]["idle_cpu_ms"] = used_ms
        at_rest = {**many.figures, "idle_cpu_ms": many_ms, "empty_cpu_ms": empty_ms}
    for size in options.sizes:
        say(f"{size} segments: memory, evaluation")
        figures = by_segments[size]
        place = directory / f"memory-{size}"
        figures["memory_kib"] = await topic_kib(size, options.memory_segments, place)
        place = directory / f"evaluation-{size}"
        figures["evaluation_ms"] = await evaluation_ms(size, place, options.rounds)
    return by_segments, at_rest


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.segments", description=__doc__)
    # The broker in this process logs to standard output.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser.add_argument("--quick", action="store_true", help="short runs: shows that it works")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--topics", type=int, default=TOPICS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--idle-s", type=float, default=IDLE_S)
    parser.add_argument("--memory-segments", type=int, default=MEMORY_SEGMENTS)
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("segments.json"))
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.topics, options.rounds = (10, 30, 100), 200, 1
        options.idle_s, options.memory_segments = 5.0, 1000
    options.output.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="segments-", dir=options.output.parent))
    where = machine()
    try:
        by_segments, at_rest = asyncio.run(measure(options, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    where["load_after"] = os.getloadavg()[0]
    document = {
        "machine": where,
        "by_segments": by_segments,
        "exponents": exponents(BY_SEGMENTS, by_segments),
        "at_rest": at_rest,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    tables = [growth_table(BY_SEGMENTS, by_segments), value_table(AT_REST, at_rest)]
    page = report("Segments", where, tables)
    options.output.with_suffix(".md").write_text(page)
    print(page, end="")
    print(f"as JSON: {options.output}; as Markdown: {options.output.with_suffix('.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
