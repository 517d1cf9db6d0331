"""What every client is asked to do, and how it tells what it measured.

Rules: a client is a process of its own, which gets a `Work` as its only argument and prints one
line of JSON, with lists that have one figure for each run; each does a warm-up first.  The stock
Java client does the same in `BenchCases` and `TransactionBenchCases`; numbers that both must agree
on (window, sizes) are the defaults there.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from tests.support.broker_process import ROOT

Kind = Literal["throughput", "publish", "latency", "transactions"]
Figures = dict[str, list[float]]

SIZE_BYTES: Final = 1024
WINDOW: Final = 1000
SENDS_IN_TRANSACTION: Final = 10
CONCURRENT: Final = 32
PATIENCE_S: Final = 60
WORK_TIMEOUT_S: Final = 600
NANOS_IN_US: Final = 1000.0
NANOS_IN_MS: Final = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Work:
    """One measurement.  `count`: messages, sends, or seconds for transactions.

    `trust` is a file of authorities for a URL with TLS, and `token` is shown if it is not empty.
    """

    kind: Kind
    url: str
    topic: str
    count: int
    runs: int
    batching: bool = True
    trust: str = ""
    token: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def given_work() -> Work:
    """The work in this process's only argument."""
    return Work(**json.loads(sys.argv[1]))


def percentiles(nanos: Sequence[int], unit: float) -> tuple[float, float]:
    """The 50th and the 99th, in nanoseconds by `unit`."""
    ordered = sorted(nanos)
    return ordered[len(ordered) // 2] / unit, ordered[len(ordered) * 99 // 100] / unit


def report(figures: Figures) -> None:
    """Print what was measured, and what it took."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures["peak_rss_mib"] = [usage.ru_maxrss / 1024]
    figures["processor_s"] = [usage.ru_utime + usage.ru_stime]
    print(json.dumps(figures), flush=True)


def run_client(module: str, work: Work) -> Figures:
    """Have a client that is a module of this Python do the work, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, work.to_json()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WORK_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{module} failed:\n{done.stderr[-4000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def timed_s(action: Callable[[], None]) -> float:
    """How long it takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
