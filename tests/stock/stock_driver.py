"""The stock client's driver: one Java process that runs many cases, spoken to in JSON lines.

Rules: Maven builds it into `tests/stock/target`, and only when a source file changed; the process
keeps its standard error in `target/driver.log`; every wait has a limit; a case that fails raises
with the driver's own stack trace.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from queue import Empty, Queue
from typing import Any

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
JAR = TARGET / "stock-driver.jar"
STAMP = TARGET / "sources.sha256"
BUILD_TIMEOUT_S = 900
START_TIMEOUT_S = 60
CASE_TIMEOUT_S = 90
NEEDED_JAVA = 17

Facts = dict[str, Any]


class CaseFailed(AssertionError):
    """The case threw; the message is the driver's stack trace and the facts it had by then."""


def missing_tools() -> str | None:
    """What keeps the stock cases from running here, or None."""
    if shutil.which("mvn") is None:
        return "Maven (mvn) is not installed"
    java = shutil.which("java")
    if java is None:
        return "Java is not installed"
    version = subprocess.run(
        [java, "-version"], capture_output=True, text=True, check=False, timeout=60
    ).stderr
    match = re.search(r'version "(\d+)', version)
    if match is None or int(match.group(1)) < NEEDED_JAVA:
        found = version.partition("\n")[0] or "an unknown one"
        return f"Java {NEEDED_JAVA} or newer is needed, not {found}"
    return None


def build() -> None:
    """Build the driver unless its sources are those of the last build."""
    sources = [HERE / "pom.xml", *sorted((HERE / "src").rglob("*.*"))]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(str(source.relative_to(HERE)).encode() + b"\0" + source.read_bytes())
    if JAR.exists() and STAMP.exists() and STAMP.read_text() == digest.hexdigest():
        return
    result = subprocess.run(
        ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "clean", "package"],
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    if result.returncode != 0:
        raise RuntimeError(f"the stock driver does not build:\n{result.stdout}{result.stderr}")
    STAMP.write_text(digest.hexdigest())


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

    def result(self, timeout_s: float = CASE_TIMEOUT_S) -> Facts:
        """Facts at the end of the case."""
        line = self._next(timeout_s)
        if not line.get("ok"):
            raise CaseFailed(_sentence(line))
        return dict(line["facts"])

    def _next(self, timeout_s: float) -> Facts:
        try:
            return self._lines.get(timeout=timeout_s)
        except Empty:
            raise CaseFailed(f"the driver said nothing for {timeout_s} s") from None


def _sentence(line: Facts) -> str:
    return f"{line.get('error', line)}\nfacts: {json.dumps(line.get('facts'), indent=1)}"


class StockDriver:
    """The running Java process."""

    def __init__(self, *, heap: str = "512m") -> None:
        log = (TARGET / "driver.log").open("ab")
        self._process = subprocess.Popen(
            [
                "java",
                f"-Xmx{heap}",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=4",
                "-Dio.netty.tryReflectionSetAccessible=true",
                *("--add-opens", "java.base/java.nio=ALL-UNNAMED"),
                *("--add-opens", "java.base/jdk.internal.misc=ALL-UNNAMED"),
                *("-cp", os.pathsep.join([str(JAR), str(TARGET / "lib" / "*")])),
                *("magnetar.stock.Driver", "--serve"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            encoding="utf-8",
        )
        log.close()
        self._ids = itertools.count(1)
        self._queues: dict[int, Queue[Facts]] = {}
        self._serving = threading.Event()
        self._reader = threading.Thread(target=self._read, name="stock-driver", daemon=True)
        self._reader.start()
        if not self._serving.wait(START_TIMEOUT_S):
            self.close()
            raise RuntimeError(f"the stock driver does not start; read {TARGET / 'driver.log'}")

    def start(self, case: str, url: str, admin_url: str, **args: object) -> StartedCase:
        """Begin a case; `args` are what its Java source asks for."""
        case_id = next(self._ids)
        lines: Queue[Facts] = Queue()
        self._queues[case_id] = lines
        self.write({"id": case_id, "case": case, "url": url, "admin": admin_url, "args": args})
        return StartedCase(self, case_id, lines)

    def write(self, request: Facts) -> None:
        """Send one protocol line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            if line.get("event") == "serving":
                self._serving.set()
                continue
            self._queues[line["id"]].put(line)
        for lines in list(self._queues.values()):
            lines.put({"ok": False, "error": "the driver process has ended"})
