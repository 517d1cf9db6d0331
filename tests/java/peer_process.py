"""Apache Pulsar's own standalone broker as a child process: what the cases are compared with.

Rules: everything it writes is under one directory (`build/stock-peer` unless told otherwise); its
jars are resolved once by Maven; it listens on 127.0.0.1 only; what wipes or starts one has its
directory to itself until it is stopped. By hand: `python -m tests.java.peer_process` starts it and
stops it on Ctrl-C.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from tests.java.peer_security import PeerSecurity
from tests.support.child_process import dying_with_its_parent
from tests.support.tools import built_once, copy_jars, digest_of

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "peer"
DEFAULT_WORK_DIR = HERE.parents[1] / "build" / "stock-peer"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60
CONFIGURATION = "peer.conf"
# What netty, RocksDB and the bookie reach for by reflection on JDK 17.
OPENED_PACKAGES = (
    "java.base/java.lang",
    "java.base/java.nio",
    "java.base/java.util.zip",
    "java.base/jdk.internal.misc",
    "java.base/sun.net",
    "java.base/sun.nio.ch",
    "java.management/sun.management",
)


class PeerFailed(RuntimeError):
    """The peer did not come up; the message says where its log is."""


def resolve_jars(work_dir: Path = DEFAULT_WORK_DIR) -> Path:
    """Directory with the broker's jars, filled by Maven unless it is of this recipe."""
    lib = work_dir / "lib"
    pom = RECIPE / "pom.xml"
    built_once(work_dir / "lib.sha256", digest_of([pom], RECIPE), lambda: copy_jars(pom, lib))
    return lib


class PeerInUse(PeerFailed):
    """Another one runs on the same directory; the message says what to do."""


class PeerProcess:
    """One standalone Pulsar; `start` again after `stop` or `kill` keeps its data."""

    def __init__(
        self,
        port: int,
        http_port: int,
        work_dir: Path = DEFAULT_WORK_DIR,
        *,
        grace_s: int = 5,
        heap: str = "1g",
        security: PeerSecurity | None = None,
    ) -> None:
        """`security`: it asks who its clients are, and has data of its own."""
        self.port = port
        self.http_port = http_port
        self.grace_s = grace_s
        self._heap = heap
        self._jars_dir = work_dir
        self._run_dir = work_dir / ("run" if security is None else "run-secured")
        self._security = security
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._run_dir / "broker.log"

    def wipe(self) -> None:
        """Drop its data and log; only while it does not run.  Raises `PeerInUse`."""
        self._take()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def spawn(self) -> None:
        """Start the process and return at once.  Raises `PeerInUse`."""
        self._take()
        self._run_dir.mkdir(parents=True, exist_ok=True)
        (self._run_dir / CONFIGURATION).write_text(self.configuration())
        command = self.command()
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_its_parent(command),
                cwd=self._run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def configuration(self) -> str:
        """The recipe's, with this process's values."""
        text = (RECIPE / "standalone.conf").read_text()
        for mark, value in (
            ("@PORT@", self.port),
            ("@HTTP_PORT@", self.http_port),
            ("@GRACE@", self.grace_s),
        ):
            text = text.replace(mark, str(value))
        return text if self._security is None else text + self._security.configuration()

    def command(self) -> list[str]:
        """What is run."""
        return self.java(
            "org.apache.pulsar.PulsarStandaloneStarter",
            *("--config", CONFIGURATION, "--no-functions-worker", "--no-stream-storage"),
            *("--metadata-dir", "data/metadata", "--bookkeeper-dir", "data/bookkeeper"),
        )

    def java(self, main: str, *arguments: str) -> list[str]:
        """A program of the peer's class path."""
        opened = [arg for name in OPENED_PACKAGES for arg in ("--add-opens", f"{name}=ALL-UNNAMED")]
        return [
            *("java", f"-Xmx{self._heap}", f"-XX:MaxDirectMemorySize={self._heap}"),
            f"-Dlog4j.configurationFile={RECIPE / 'log4j2.xml'}",
            "-Dio.netty.tryReflectionSetAccessible=true",
            *opened,
            *("-cp", f"{resolve_jars(self._jars_dir)}/*", main, *arguments),
        ]

    def start(self) -> None:
        """Start the process and wait until it answers its health check."""
        self.spawn()
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            if self._healthy():
                return
            time.sleep(0.2)
        self.kill()
        raise PeerFailed(f"the peer did not come up in {START_TIMEOUT_S} s; read {self.log_path}")

    def stop(self) -> None:
        """SIGTERM, and wait; SIGKILL when it takes too long."""
        if self._process is None:
            self._give_back()
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None
        self._give_back()

    def kill(self) -> None:
        """SIGKILL, at once."""
        if self._process is not None:
            if self._process.poll() is None:
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None
        self._give_back()

    def _take(self) -> None:
        """Have the directory alone; also where this process has another one."""
        if self._lock is not None:
            return
        path = self._run_dir.with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "that has just begun"
            lock.close()
            raise PeerInUse(
                f"{self._run_dir} is in use by process {holder}: wait until its tests are over, "
                "or run these against a peer that runs already (--peer=URL,ADMIN)."
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _give_back(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def faults(self) -> str:
        """Not looked for: the peer's log is its own affair."""
        return ""

    def _healthy(self) -> bool:
        # Ready means that namespaces can be listed: the default tenant is made late in the start.
        url = f"{self.admin_url}/admin/v2/namespaces/public"
        headers = {} if self._security is None else dict(self._security.admin_headers)
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, headers=headers), timeout=5
            ) as answer:
                return b"public/default" in answer.read()
        except (OSError, urllib.error.URLError):
            return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Start Apache Pulsar standalone as the peer; Ctrl-C stops it."
    )
    parser.add_argument("--port", type=int, default=7650)
    parser.add_argument("--http-port", type=int, default=7080)
    parser.add_argument("--work-dir", type=Path, default=DEFAULT_WORK_DIR)
    options = parser.parse_args()
    peer = PeerProcess(options.port, options.http_port, options.work_dir)
    try:
        peer.wipe()
        peer.start()
    except PeerFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    print(
        f"peer serves on {peer.url} and {peer.admin_url}, log in {peer.log_path}; Ctrl-C stops it",
        flush=True,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        peer.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
