"""`python -m bench.replication`: geo-replication beside a client that copies, and Apache Pulsar's.

Each route brings a topic of a first broker to a second one, which is a Magnetar in all of them:
this broker's replicator, one of Apache Pulsar, and a process that consumes and produces with the
client from PyPI.  Two more routes bring a scalable topic: to a layout of the same segments, where
entries go as they are, and to another one, where batches are divided.

- Catching up: messages are published while the second broker is away; once the first ones have
  arrived there, the rest is timed.
- Delay: from the call that publishes a message until a consumer there has it, without load and
  under some.
- Memory of the first broker, before and after the backlog.

Rules: the routes run one after the other; the second broker does not deduplicate.  There is no pass
mark.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console
from rich.table import Table

from bench.__main__ import OUTPUT, peer, say
from bench.processes import resident_mib
from bench.replication.ordinary_topics import OrdinaryTopics, copy_for_ever
from bench.replication.scalable_topics import ScalableTopics
from bench.replication.topics import NAMESPACE, Topics, until
from tests.java.broker_under_test import BrokerUnderTest, MagnetarProcess
from tests.java.peer_process import resolve_jars
from tests.java.two_clusters import register, rest

MESSAGES: Final = 100_000
BATCHED_TIMES: Final = 10
"""How many times as many messages are published in batches."""
RATES: Final = {"idle": 50, "loaded": 2_000}
"""Messages a second while delays are measured."""
FIRST: Final = "standalone"
"""The name of the first cluster, as Apache Pulsar's standalone broker has it."""
SECOND: Final = "second"
WIDTH: Final = 120
SCALABLE: Final[Mapping[str, ScalableTopics]] = {
    "scalable": ScalableTopics(2, 2),
    "divided": ScalableTopics(2, 3),
}
"""Routes of scalable topics."""


@dataclass
class Figures:
    """What one route did."""

    route: str
    single_per_s: float = 0.0
    batched_per_s: float = 0.0
    idle_p50_ms: float = 0.0
    idle_p99_ms: float = 0.0
    loaded_p50_ms: float = 0.0
    loaded_p99_ms: float = 0.0
    before_mib: float = 0.0
    backlog_mib: float = 0.0


class Route(Protocol):
    """A way from the first broker to the second one."""

    @property
    def first(self) -> BrokerUnderTest:
        """The first broker."""
        ...

    @property
    def second(self) -> BrokerUnderTest:
        """The second broker."""
        ...

    @property
    def topics(self) -> Topics:
        """The topics that it brings."""
        ...

    def begin(self, topic: str) -> None:
        """Have what is published to the topic from now on brought over."""
        ...

    def copy(self, topic: str) -> None:
        """Begin to bring it, as the second broker serves."""
        ...


class Replicated:
    """The first broker replicates to the second one."""

    def __init__(self, first: BrokerUnderTest, second: BrokerUnderTest, topics: Topics) -> None:
        self.first = first
        self.second = second
        self.topics = topics
        names = [FIRST, SECOND]
        register(first, SECOND, second)
        rest(first, "PUT", "tenants/geo", {"allowedClusters": names})
        rest(first, "PUT", f"namespaces/{NAMESPACE}", {"replication_clusters": names})
        rest(second, "PUT", "tenants/geo", {"allowedClusters": [SECOND]})
        rest(second, "PUT", f"namespaces/{NAMESPACE}", {})

    def begin(self, topic: str) -> None:
        """A first message makes the replicator attach."""
        self.topics.make(self.first, self.second, topic)
        self.topics.publish(self.first, topic, 1, batched=False)
        until(lambda: self.topics.stored(self.second, topic) >= 1)

    def copy(self, topic: str) -> None:
        """The replicator comes back by itself."""


class Copied:
    """A process consumes from the first broker, and produces to the second one."""

    def __init__(self, first: BrokerUnderTest, second: BrokerUnderTest) -> None:
        self.first = first
        self.second = second
        self.topics = OrdinaryTopics()
        self._copiers: list[subprocess.Popen[bytes]] = []
        for broker, name in ((first, FIRST), (second, SECOND)):
            rest(broker, "PUT", "tenants/geo", {"allowedClusters": [name]})
            rest(broker, "PUT", f"namespaces/{NAMESPACE}", {})

    def begin(self, topic: str) -> None:
        """Make the subscription."""
        rest(self.first, "PUT", f"persistent/{topic}")
        rest(self.first, "PUT", f"persistent/{topic}/subscription/copier", "earliest")
        self.topics.publish(self.first, topic, 1, batched=False)

    def copy(self, topic: str) -> None:
        """Start the process."""
        command = [sys.executable, "-m", "bench.replication", "--copy", topic]
        urls = ["--from", self.first.url, "--to", self.second.url]
        self._copiers.append(subprocess.Popen([*command, *urls]))

    def close(self) -> None:
        """End the processes."""
        for each in self._copiers:
            each.kill()
            each.wait()


def catch_up(route: Route, topic: str, count: int, *, batched: bool) -> float:
    """Messages a second, once the first ones have arrived."""
    route.begin(topic)
    route.second.stop()
    route.topics.publish(route.first, topic, count, batched=batched)
    route.second.start()
    route.copy(topic)
    until(lambda: route.topics.stored(route.second, topic) > 0)
    first, began_s = route.topics.stored(route.second, topic), time.monotonic()
    most = first

    def arrived() -> bool:
        nonlocal most
        most = max(most, route.topics.stored(route.second, topic))
        return most >= count

    until(arrived)
    return (most - first) / (time.monotonic() - began_s)


def delays_ms(route: Route, topic: str, rate: int) -> Sequence[float]:
    """How long each message took, in order of size, without the first ones."""
    route.begin(topic)
    route.copy(topic)
    until(lambda: route.topics.stored(route.second, topic) >= 1)
    taken = route.topics.delays_ms(route.first, route.second, topic, rate)
    return sorted(taken[len(taken) // 10 :])


def measure(name: str, route: Route, count: int) -> Figures:
    """All figures of one route."""
    figures, numbers = Figures(name), itertools.count()

    def topic() -> str:
        return f"{NAMESPACE}/t{next(numbers)}"

    figures.before_mib = resident_mib(route.first.pid)
    say(f"{name}: catching up")
    figures.single_per_s = catch_up(route, topic(), count, batched=False)
    figures.batched_per_s = catch_up(route, topic(), BATCHED_TIMES * count, batched=True)
    figures.backlog_mib = resident_mib(route.first.pid)
    for kind, rate in RATES.items():
        say(f"{name}: delay at {rate} messages a second")
        taken = delays_ms(route, topic(), rate)
        setattr(figures, f"{kind}_p50_ms", taken[len(taken) // 2])
        setattr(figures, f"{kind}_p99_ms", taken[len(taken) * 99 // 100])
    return figures


@contextmanager
def serving(broker: BrokerUnderTest) -> Iterator[BrokerUnderTest]:
    """The broker, which runs until the end."""
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def magnetar(directory: Path, name: str) -> BrokerUnderTest:
    """A Magnetar without data, as the broker of this cluster."""
    place = Path(tempfile.mkdtemp(dir=directory))
    return MagnetarProcess(place, {"cluster_name": name, "deduplication": False})


def all_figures(directory: Path, count: int, routes: Sequence[str]) -> Iterator[Figures]:
    """The figures of each route."""
    for name in routes:
        if name == "peer":
            resolve_jars()
            first = peer(directory)
        else:
            first = magnetar(directory, FIRST)
        with serving(first), serving(magnetar(directory, SECOND)) as second:
            if name != "client":
                topics = SCALABLE.get(name, OrdinaryTopics())
                yield measure(name, Replicated(first, second, topics), count)
                continue
            copied = Copied(first, second)
            try:
                yield measure(name, copied, count)
            finally:
                copied.close()


def show(found: Sequence[Figures]) -> None:
    """Print a row for each route."""
    table = Table(
        "route",
        "single/s",
        "batched/s",
        "idle p50 ms",
        "p99",
        "loaded p50 ms",
        "p99",
        "MiB before",
        "after",
    )
    for each in found:
        _, *figures = asdict(each).values()
        table.add_row(
            each.route,
            *(f"{figure:,.0f}" for figure in figures[:2]),
            *(f"{figure:.1f}" for figure in figures[2:6]),
            *(f"{figure:.0f}" for figure in figures[6:]),
        )
    Console(width=WIDTH).print(table)


def main() -> None:
    """Run the bench, or be the process that copies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=MESSAGES)
    parser.add_argument("--routes", nargs="*", default=["magnetar", *SCALABLE, "client", "peer"])
    parser.add_argument("--output", type=Path, default=OUTPUT.with_name("replication.json"))
    parser.add_argument("--copy", metavar="TOPIC", help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="first", help=argparse.SUPPRESS)
    parser.add_argument("--to", dest="second", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.copy:
        copy_for_ever(given.copy, given.first, given.second)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    found: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="replication-", dir=OUTPUT.parent) as directory:
        for each in all_figures(Path(directory), given.messages, given.routes):
            found.append(each)
            show(found)
    given.output.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
