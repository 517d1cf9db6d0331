"""Each measurement, taken on one broker that this run has to itself.

Rules: the same calls for every broker; a warm-up before each measurement, then several runs of
which the median counts; brokers run one after the other, never side by side.
"""

import asyncio
import json
import ssl
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bench.client.work import Work, run_client
from bench.processes import peak_resident_mib, processor_s, resident_mib
from bench.secured import ClientAccess, access_to, rest
from tests.java.broker_under_test import BrokerUnderTest
from tests.java.stock_driver import StockDriver
from tests.support.broker_process import ROOT
from tests.support.child_process import HOST
from tests.support.json_line_process import Facts
from tests.support.raw_client import BrokerError, RawClient

Results = dict[str, float]
"""Names of figures, and figures.  `..._processor_ms` is processor time of the broker: for
1,000 messages, for one transaction, or for one start; warm-ups count too."""
SERVED_TIMEOUT_S: Final = 120
IDLE_S: Final = 5.0
CASE_TIMEOUT_S: Final = 900
GENERATOR_TIMEOUT_S: Final = 300
NO_SECURITY: Final = ClientAccess()


@dataclass(frozen=True)
class Effort:
    """How long to measure: `quick` shows that it works, the default gives figures."""

    starts: int = 3
    runs: int = 3
    messages_batched: int = 100_000
    messages_single: int = 30_000
    sends: int = 1_000
    raw_s: float = 5.0
    raw_warmup_s: float = 5.0
    transactions_s: int = 8
    commits: int = 300
    connects: int = 500
    case_timeout_s: int = CASE_TIMEOUT_S

    @classmethod
    def quick(cls) -> "Effort":
        """A minute for everything."""
        return cls(1, 1, 10_000, 3_000, 200, 2.0, 1.0, 3, 50, 200)


def start_ms(make: Callable[[], BrokerUnderTest], starts: int) -> Results:
    """From the start of the process, on an empty directory, to the first answered lookup."""
    took, used = [], []
    for _ in range(starts):
        broker = make()
        begin = time.perf_counter()
        broker.spawn()
        try:
            asyncio.run(first_served(broker))
            took.append((time.perf_counter() - begin) * 1000)
            used.append(processor_s(broker.pid) * 1000)
        finally:
            broker.kill()
    return {"start_ms": statistics.median(took), "start_processor_ms": statistics.median(used)}


async def first_served(broker: BrokerUnderTest) -> None:
    """Returns when a connection is made and a topic's lookup on it is answered."""
    deadline = time.monotonic() + SERVED_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            client = await connection(broker)
            try:
                if (await client.lookup("persistent://public/default/first")).broker_service_url:
                    return
            finally:
                await client.close()
        except (OSError, BrokerError, TimeoutError):
            pass
        await asyncio.sleep(0.005)
    raise TimeoutError(f"{broker.url} served no connection in {SERVED_TIMEOUT_S} s")


async def connection(broker: BrokerUnderTest, tls: ssl.SSLContext | None = None) -> RawClient:
    """A connection that has shaken hands; the TLS context is made anew if none is given."""
    access = access_to(broker)
    return await RawClient.open(
        HOST,
        int(broker.url.rpartition(":")[2]),
        access.connect_command(),
        timeout_s=5,
        tls=tls or access.context(),
    )


def connects(broker: BrokerUnderTest, effort: Effort) -> Results:
    """How long a new connection takes, up to CONNECTED, one after the other."""
    return asyncio.run(_connects(broker, effort.connects))


async def _connects(broker: BrokerUnderTest, wanted: int) -> Results:
    tls = access_to(broker).context()
    took: list[float] = []
    await first_served(broker)
    used = processor_s(broker.pid)
    for _ in range(wanted):
        begin = time.perf_counter()
        client = await connection(broker, tls)
        took.append((time.perf_counter() - begin) * 1_000_000)
        await client.close()
    used = processor_s(broker.pid) - used
    return {
        "connect_p50_us": statistics.median(took),
        "connect_processor_ms": used * 1_000_000 / wanted,
    }


def idle_memory(broker: BrokerUnderTest) -> Results:
    """Resident memory of a broker that nobody has talked to."""
    time.sleep(IDLE_S)
    return {"idle_rss_mib": resident_mib(broker.pid)}


def run_case(
    broker: BrokerUnderTest, driver: StockDriver, effort: Effort, name: str, **args: object
) -> Facts:
    """What a case of the official client measured."""
    timeout_s = effort.case_timeout_s
    started = driver.start(
        name,
        broker.url,
        broker.admin_url,
        timeoutS=timeout_s,
        runs=effort.runs,
        **access_to(broker).java_arguments(),
        **args,
    )
    return started.result(timeout_s)


def stock_client(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Publish and consume, and awaited sends, through the official Java client."""
    return (
        batched_sends(broker, driver, effort)
        | single_sends(broker, driver, effort)
        | awaited_sends(broker, driver, effort)
    )


def batched_sends(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Publish and consume, many messages in an entry."""
    return _throughput("batched", True, effort.messages_batched, broker, driver, effort)


def single_sends(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """Publish and consume, each message an entry."""
    return _throughput("single", False, effort.messages_single, broker, driver, effort)


def pypi_sends(broker: BrokerUnderTest, effort: Effort) -> Results:
    """`batched_sends` by `pulsar-client` from PyPI, on a `persistent://` topic."""
    access = access_to(broker)
    work = Work(
        "throughput",
        broker.url,
        f"persistent://public/default/pypi-{uuid.uuid4().hex[:8]}",
        effort.messages_batched,
        effort.runs,
        trust=str(access.trust or ""),
        token=access.token,
    )
    used = processor_s(broker.pid)
    figures = run_client("bench.client.pypi", work)
    used = processor_s(broker.pid) - used
    messages = work.count * (work.runs + 1)
    return {
        "pypi_messages_per_s": statistics.median(figures["messages_per_s"]),
        "pypi_processor_ms": used * 1_000_000 / messages,
        "pypi_client_processor_ms": figures["processor_s"][0] * 1_000_000 / messages,
    }


def awaited_sends(broker: BrokerUnderTest, driver: StockDriver, effort: Effort) -> Results:
    """How long a send takes when nothing else is under way."""
    used = processor_s(broker.pid)
    facts = run_case(broker, driver, effort, "bench_latency", sends=effort.sends)
    used = processor_s(broker.pid) - used
    return {
        "send_p50_us": statistics.median(facts["p50_us"]),
        "send_p99_us": statistics.median(facts["p99_us"]),
        "send_processor_ms": used * 1_000_000 / facts["sends"],
    }


def _throughput(
    form: str,
    batching: bool,
    messages: int,
    broker: BrokerUnderTest,
    driver: StockDriver,
    effort: Effort,
) -> Results:
    begin, used = time.perf_counter(), processor_s(broker.pid)
    used_by_client = processor_s(driver.pid)
    facts = run_case(
        broker, driver, effort, "bench_throughput", batching=batching, messages=messages
    )
    took, used = time.perf_counter() - begin, processor_s(broker.pid) - used
    used_by_client = processor_s(driver.pid) - used_by_client
    return {
        f"{form}_messages_per_s": statistics.median(facts["messages_per_s"]),
        f"{form}_broker_cores": used / took,
        f"{form}_processor_ms": used * 1_000_000 / facts["messages"],
        f"{form}_client_processor_ms": used_by_client * 1_000_000 / facts["messages"],
    }


def create_topic(broker: BrokerUnderTest, local: str, segments: int = 1) -> None:
    """A scalable topic."""
    path = f"/admin/v2/scalable/public/default/{local}?numInitialSegments={segments}"
    rest(broker, "PUT", path, {})


def raw_sends(broker: BrokerUnderTest, effort: Effort) -> Results:
    """Unbatched 1 KB sends from the raw generator, window 1,000, one segment."""
    local = f"raw-{uuid.uuid4().hex[:8]}"
    create_topic(broker, local)
    port = int(broker.url.rpartition(":")[2])
    begin, used = time.perf_counter(), processor_s(broker.pid)
    topic = f"segment://public/default/{local}/0000-ffff-0"
    done = run_generator(port, topic, effort, access_to(broker))
    took, used = time.perf_counter() - begin, processor_s(broker.pid) - used
    return {
        "raw_sends_per_s": statistics.median(done.rates),
        "raw_broker_cores": used / took,
        "raw_processor_ms": used * 1_000_000 / done.sends,
        "peak_rss_mib": peak_resident_mib(broker.pid),
    }


def generator_limit(effort: Effort) -> float:
    """Sends per second of the generator when nothing keeps the messages."""
    sink = subprocess.Popen(
        [sys.executable, "-m", "bench.sink"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sink.stdout is not None
    assert sink.stdin is not None
    try:
        return statistics.median(run_generator(int(sink.stdout.readline()), "any", effort).rates)
    finally:
        sink.stdin.close()
        sink.wait(10)


@dataclass(frozen=True)
class Generated:
    """What a generator did: sends per second of each run, and all its sends, warm-up too."""

    rates: list[float]
    sends: int


def run_generator(
    port: int, topic: str, effort: Effort, access: ClientAccess = NO_SECURITY
) -> Generated:
    """A generator in its own process."""
    connect = access.connect_command()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bench.raw_generator"),
            *("--port", str(port), "--topic", topic, "--runs", str(effort.runs)),
            *("--seconds", str(effort.raw_s), "--warmup-s", str(effort.raw_warmup_s)),
            *(() if access.trust is None else ("--trust", str(access.trust))),
            *(() if connect is None else ("--token", connect.auth_data.decode())),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GENERATOR_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the raw generator failed:\n{done.stderr}")
    facts = json.loads(done.stdout)
    return Generated(facts["sends_per_s"], facts["sends"])
