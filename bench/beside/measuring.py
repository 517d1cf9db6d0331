"""What is measured of every side, each on a broker of its own that starts on an empty directory.

Rules: a warm-up before each measurement; one broker at a time; what a broker wrote is deleted when
the measurement is over, whatever became of it.  A measurement that fails is told and left out; one
that failed twice on a side is not tried there again.
"""

import math
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bench.__main__ import running, say
from bench.beside.comparison import order
from bench.measures import (
    Effort,
    Results,
    awaited_sends,
    batched_sends,
    connects,
    idle_memory,
    pypi_sends,
    raw_sends,
    single_sends,
    start_ms,
)
from bench.processes import peak_resident_mib
from bench.report import Row
from bench.transactions import CASES
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver

FAILURES: Final = (AssertionError, RuntimeError, OSError, subprocess.SubprocessError)
"""Errors of brokers, the official client, requests and the generator, timeouts included."""
TRIES: Final = 2
BUSY: Final = 0.5
PEER_START_S: Final = 15
LINE: Final = 200
DEFAULT: Final = Effort(
    starts=3,
    runs=2,
    messages_batched=60_000,
    messages_single=24_000,
    sends=1_000,
    raw_s=3.0,
    raw_warmup_s=2.0,
    connects=500,
    transactions_s=4,
    case_timeout_s=180,
)
"""A broker has ten of these measurements in the time that `python -m bench` takes for three."""
QUICK: Final = replace(Effort.quick(), transactions_s=2, case_timeout_s=120)

Make = Callable[[], BrokerUnderTest]
Take = Callable[[Make, Effort], Results]
OnBroker = Callable[[BrokerUnderTest, Effort], Results]
WithDriver = Callable[[BrokerUnderTest, StockDriver, Effort], Results]


@dataclass(frozen=True)
class Side:
    """One side of the comparison: its name, how its broker is made, how its code is checked."""

    name: str
    make: Callable[[Path], BrokerUnderTest]
    check: Callable[[Path], None] = lambda _: None
    """Called when a broker of that directory has ended by itself."""


@dataclass(frozen=True)
class Measure:
    """One measurement, and the rows that it fills."""

    take: Take
    rows: tuple[Row, ...]
    seconds: float
    """Time for one broker at the default effort, start and end included."""
    java: bool = True
    ends: bool = True
    """Whether its brokers end by themselves; else they are killed."""


def on_broker(take: OnBroker) -> Take:
    """Measure on a broker that is started before and stopped after."""

    def taken(make: Make, effort: Effort) -> Results:
        with running(make()) as broker:
            return take(broker, effort)

    return taken


def with_driver(take: WithDriver) -> Take:
    """Measure on a started broker, with a official client of its own."""

    def taken(broker: BrokerUnderTest, effort: Effort) -> Results:
        driver = StockDriver(heap="1g", optimized=True)
        try:
            return take(broker, driver, effort)
        finally:
            driver.close()

    return on_broker(taken)


def memory(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Measure resident memory when idle, and its peak after the same load for every broker."""
    results = idle_memory(broker)
    once = replace(effort, runs=1)
    batched_sends(broker, driver, once)
    single_sends(broker, driver, once)
    return results | {"peak_rss_mib": peak_resident_mib(broker.pid)}


def start(make: Make, effort: Effort) -> Results:
    """Measure the median of some starts, each on an empty directory."""
    return start_ms(make, effort.starts)


def _processor(key: str, of: str) -> Row:
    return Row(key, "  broker's processor time", f"ms/{of}", 2)


def _transactions(form: str, label: str) -> tuple[Row, ...]:
    return (
        Row(f"{form}_transactions_per_s", label, "transactions/s"),
        _processor(f"{form}_transactions_processor_ms", "transaction"),
        Row(f"{form}_commit_p50_ms", "  commit under it, p50", "ms", 2),
        Row(f"{form}_commit_p99_ms", "  commit under it, p99", "ms", 2),
    )


def _sends(form: str, label: str) -> tuple[Row, ...]:
    return (
        Row(f"{form}_messages_per_s", label, "messages/s"),
        _processor(f"{form}_processor_ms", "1,000"),
        # Clients and broker share the machine, so a costlier client slows both.
        Row(f"{form}_client_processor_ms", "  client's processor time", "ms/1,000", 2),
    )


MEASURES: Final[Mapping[str, Measure]] = {
    "start": Measure(
        start,
        (
            Row("start_ms", "start to first served lookup", "ms"),
            Row("start_processor_ms", "  broker's processor time", "ms"),
        ),
        seconds=4,
        java=False,
        ends=False,
    ),
    "batched": Measure(
        with_driver(batched_sends), _sends("batched", "publish + consume 1 KB, batched"), 14
    ),
    "single": Measure(
        with_driver(single_sends), _sends("single", "publish + consume 1 KB, not batched"), 14
    ),
    "pypi": Measure(
        on_broker(pypi_sends),
        _sends("pypi", "publish + consume 1 KB, batched, by PyPI's client"),
        16,
        java=False,
    ),
    "awaited": Measure(
        with_driver(awaited_sends),
        (
            Row("send_p50_us", "awaited send, p50", "us"),
            Row("send_p99_us", "awaited send, p99", "us"),
            _processor("send_processor_ms", "1,000"),
        ),
        8,
    ),
    "raw": Measure(
        on_broker(raw_sends),
        (
            Row("raw_sends_per_s", "raw unbatched 1 KB sends", "sends/s"),
            _processor("raw_processor_ms", "1,000"),
        ),
        11,
        java=False,
    ),
    "transactions-batched": Measure(
        with_driver(CASES["transactions, batched"]),
        _transactions("batched", "10 sends batched, 1 segment"),
        18,
    ),
    "transactions-single": Measure(
        with_driver(CASES["transactions, single"]),
        _transactions("single", "10 sends single, 4 segments"),
        18,
    ),
    "connect": Measure(
        on_broker(connects),
        (
            Row("connect_p50_us", "new connection, p50", "us"),
            _processor("connect_processor_ms", "1,000"),
        ),
        4,
        java=False,
    ),
    "memory": Measure(
        with_driver(memory),
        (
            Row("idle_rss_mib", "idle memory (RSS)", "MiB", 1),
            Row("peak_rss_mib", "peak memory after sends in both forms", "MiB", 1),
        ),
        25,
    ),
}
"""They are taken in this order."""
ROWS: Final = tuple(row for measure in MEASURES.values() for row in measure.rows)


@dataclass
class Round:
    """The figures of one round: each side once in each measurement."""

    order: list[str]
    figures: dict[str, Results]


@dataclass
class Taken:
    """All rounds so far, and notes about them."""

    rounds: list[Round] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def expected_minutes(measures: Sequence[str], pairs: int, *, peers: int) -> int:
    """Estimate how long a run takes on two processors, at the default effort."""
    both = 2 * sum(MEASURES[name].seconds for name in measures)
    each_peer = sum(MEASURES[name].seconds + PEER_START_S for name in measures)
    return math.ceil((both + peers * each_peer) * pairs / 60)


def load_warning(load: float) -> str | None:
    """Return a sentence if the machine is busy with something else."""
    if load <= BUSY:
        return None
    return (
        f"The machine was busy before the run (load average {load:.2f}): "
        "figures are worth little unless the pairs agree."
    )


def take_rounds(
    taken: Taken,
    sides: Mapping[str, Side],
    measures: Sequence[str],
    pairs: int,
    effort: Effort,
    directory: Path,
) -> None:
    """Fill in round after round.  Of one measurement all sides come right after each other."""
    failed: Counter[tuple[str, str]] = Counter()
    for number in range(pairs):
        this = Round(order(list(sides), number), {name: {} for name in sides})
        taken.rounds.append(this)
        for measure in measures:
            for name in this.order:
                if failed[name, measure] == TRIES:
                    continue
                say(f"pair {number + 1} of {pairs}: {measure}: {name}")
                try:
                    this.figures[name] |= take_one(sides[name], measure, effort, directory, taken)
                except FAILURES as error:
                    if was_interrupted(error):
                        raise KeyboardInterrupt from error
                    failed[name, measure] += 1
                    note = f"Pair {number + 1}, {measure}, {name}: {first_line(error)}"
                    taken.notes.append(note)
                    say(note)


def take_one(side: Side, name: str, effort: Effort, directory: Path, taken: Taken) -> Results:
    """Measure one side once, and delete its data."""
    measure = MEASURES[name]
    place = Path(tempfile.mkdtemp(prefix="run-", dir=directory))
    made: list[BrokerUnderTest] = []

    def make() -> BrokerUnderTest:
        made.append(side.make(Path(tempfile.mkdtemp(dir=place))))
        return made[-1]

    try:
        results = measure.take(make, effort)
        if measure.ends:
            for each in place.iterdir():
                side.check(each)
        if any(broker.faults() for broker in made):
            taken.notes.append(f"{name}: a broker of {side.name} logged a fault of its own.")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    # What disks still have to write of this broker is not to slow down the next one.
    os.sync()
    return {row.key: results[row.key] for row in measure.rows}


def was_interrupted(error: BaseException) -> bool:
    """Tell whether an interrupt caused it: a wait for a lock may hide that by its own error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            return True
        cause = cause.__context__
    return False


def first_line(error: BaseException) -> str:
    """Return the error as one line."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    # Java names the class of each cause, with its package, before it says what happened.
    return textwrap.shorten(re.sub(r"\b([a-z]\w*\.)+(?=[A-Z])", "", text), LINE, placeholder=" ...")
