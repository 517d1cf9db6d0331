"""The official client's driver: one Java process that runs many cases, spoken to in JSON lines.

Rules: Maven builds it into `tests/java/target`, and only when a source file changed; the process
keeps its standard error in `target/driver.log`; every wait has a limit; a case that fails raises
with the driver's own stack trace.  Cases of the v4 API run in a process with a v4 client's jars.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from queue import Empty, Queue

from tests.support.json_line_process import Facts, JsonLineProcess
from tests.support.tools import built_once, copy_jars, digest_of, missing_java, run_build

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
JAR = TARGET / "stock-driver.jar"
LIB = TARGET / "lib"
STAMP = TARGET / "sources.sha256"
V4_POM = HERE / "v4" / "pom.xml"
V4_DIR = HERE.parents[1] / "build" / "stock-v4"
CASE_TIMEOUT_S = 90
REPORT_S = 10
"""Seconds that a case has beyond its own deadline, to report how far it got."""


class CaseFailed(AssertionError):
    """The case threw; the message is the driver's stack trace and the facts it had by then."""


def missing_tools() -> str | None:
    """What keeps the stock cases from running here, or None."""
    return missing_java()


def build() -> None:
    """Build the driver unless its sources are those of the last build."""
    sources = [HERE / "pom.xml", *sorted((HERE / "src").rglob("*.*"))]
    command = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "clean", "package"]
    built_once(STAMP, digest_of(sources, HERE), lambda: run_build("the stock driver", command))


def v4_jars() -> Path:
    """Directory with the jars of the v4 client, which Maven fills unless they are there."""
    lib = V4_DIR / "lib"
    digest = digest_of([V4_POM], HERE)
    built_once(V4_DIR / "lib.sha256", digest, lambda: copy_jars(V4_POM, lib))
    return lib


class StartedCase:
    """A case that runs in the driver while the test does something else."""

    def __init__(self, driver: StockDriver, case_id: int, lines: Queue[Facts]) -> None:
        self._driver = driver
        self._id = case_id
        self._lines = lines

    def wait_event(self, name: str, timeout_s: float = CASE_TIMEOUT_S) -> Facts:
        """Facts at the next event, which must be `name`."""
        line = self._next(timeout_s)
        if "event" not in line:
            raise CaseFailed(f"ended while {name!r} was awaited: {_sentence(line)}")
        assert line["event"] == name
        return dict(line["facts"])

    def signal(self, word: str) -> None:
        """Wake a case that waits for this word."""
        self._driver.write({"id": self._id, "signal": word})

    def order(self, timeout_s: float = CASE_TIMEOUT_S, /, **order: object) -> Facts:
        """Have a case that takes orders do something; what came of it."""
        self._driver.write({"id": self._id, "order": order})
        return self.wait_event("answer", timeout_s)

    def order_last(self, **order: object) -> Facts:
        """An order after which the case ends; its facts."""
        self._driver.write({"id": self._id, "order": order})
        return self.result()

    def result(self, timeout_s: float = CASE_TIMEOUT_S) -> Facts:
        """Facts at the end of the case."""
        line = self._next(timeout_s)
        if not line.get("ok"):
            raise CaseFailed(_sentence(line))
        return dict(line["facts"])

    def _next(self, timeout_s: float) -> Facts:
        try:
            return self._lines.get(timeout=timeout_s + REPORT_S)
        except Empty:
            raise CaseFailed(f"the driver said nothing for {timeout_s + REPORT_S} s") from None


def _sentence(line: Facts) -> str:
    return f"{line.get('error', line)}\nfacts: {json.dumps(line.get('facts'), indent=1)}"


class StockDriver:
    """The running Java process, with the v5 client's jars or those of `v4_jars`.

    With `optimized` it is compiled for speed, which takes a third more processor time in tests.
    """

    def __init__(self, *, heap: str = "512m", v4: bool = False, optimized: bool = False) -> None:
        lib = v4_jars() if v4 else LIB
        command = [
            "java",
            f"-Xmx{heap}",
            "-XX:+UseSerialGC",
            f"-XX:TieredStopAtLevel={4 if optimized else 1}",
            "-Dio.netty.tryReflectionSetAccessible=true",
            *("--add-opens", "java.base/java.nio=ALL-UNNAMED"),
            *("--add-opens", "java.base/jdk.internal.misc=ALL-UNNAMED"),
            *("-cp", os.pathsep.join([str(JAR), str(lib / "*")])),
            *(f"magnetar.stock.{'V4Driver' if v4 else 'Driver'}", "--serve"),
        ]
        self._ids = itertools.count(1)
        self._queues: dict[int, Queue[Facts]] = {}
        log = TARGET / ("driver-v4.log" if v4 else "driver.log")
        self._process = JsonLineProcess(
            "stock-driver", command, log, on_line=self._take, on_end=self._ended
        )

    @property
    def pid(self) -> int:
        """Of the Java process."""
        return self._process.pid

    def start(self, case: str, url: str, admin_url: str, **args: object) -> StartedCase:
        """Begin a case; `args` are what its Java source asks for."""
        case_id = next(self._ids)
        lines: Queue[Facts] = Queue()
        self._queues[case_id] = lines
        self.write({"id": case_id, "case": case, "url": url, "admin": admin_url, "args": args})
        return StartedCase(self, case_id, lines)

    def write(self, request: Facts) -> None:
        """Send one protocol line."""
        self._process.write(request)

    def close(self) -> None:
        """End the process."""
        self._process.close()

    def _take(self, line: Facts) -> None:
        self._queues[line["id"]].put(line)

    def _ended(self) -> None:
        for lines in list(self._queues.values()):
            lines.put({"ok": False, "error": "the driver process has ended"})
