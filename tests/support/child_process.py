"""A child process that a test starts, breaks and brings back.

Rules: what it needs and writes is in the directory given, its output in a log there; `start`
returns when it serves, and raises `ChildFailed` with the end of the log when it does not come to;
it can be started again on the same ports and data.  It leads a process group of its own, which is
gone when the test is: by `kill`, or by the kernel when the tests themselves are killed.
"""

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
STOP_TIMEOUT_S: Final = 30
POLL_S: Final = 0.01
MOST_WORKERS: Final = 16
BESIDE_VARIABLE: Final = "MAGNETAR_TEST_BESIDE"
"""Set for tests that run beside others: their workers have the upper half of the ports."""
LOG_TAIL: Final = 4000
PORTS: Final = range(20_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections: a client that tries again and
again while the server is down must not be given the server's port, and so reach itself."""


class ChildFailed(AssertionError):
    """The process did not come up, or did not end; the message has the end of its log."""


def ports_of_this_worker() -> range:
    """A slice of `PORTS` for each worker of the tests: none takes the port that another one has
    drawn and not bound yet, or whose broker is about to come back.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    beside = BESIDE_VARIABLE in os.environ
    if not worker and not beside:
        return PORTS
    number = int(worker.removeprefix("gw") or 0) % MOST_WORKERS
    count = len(PORTS) // (2 * MOST_WORKERS)
    first = PORTS.start + (number + MOST_WORKERS * beside) * count
    return range(first, first + count)


@cache
def rotation_of(ports: range) -> Iterator[int]:
    """These ports again and again, from a random one on."""
    first = random.randrange(len(ports))
    return cycle((*ports[first:], *ports[:first]))


def free_port() -> int:
    """A port that nobody listens on now, and that comes again only after all others.

    Who draws a port binds it later, or gives it up for a while: a draw at random from the same
    ports gave one port to two servers of one cluster.
    """
    ports = ports_of_this_worker()
    for port in islice(rotation_of(ports), len(ports)):
        if port_is_free(port):
            return port
    raise AssertionError(f"nobody can listen on any of {ports}")


def port_is_free(port: int) -> bool:
    """Whether a server can listen on this port of 127.0.0.1."""
    with socket.socket() as listener:
        try:
            listener.bind((HOST, port))
        except OSError:
            return False
        return True


def port_is_open(port: int) -> bool:
    """Whether somebody listens on this port of 127.0.0.1."""
    try:
        with socket.create_connection((HOST, port), timeout=1):
            return True
    except OSError:
        return False


def dying_with_its_parent(command: list[str]) -> list[str]:
    """The command, so that the kernel kills it when whoever started it is gone (util-linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command


class ChildProcess(ABC):
    """One process on one directory.  `run` counts the processes started."""

    start_timeout_s: float = 120
    """For a machine that has much else to do."""

    poll_s: float = POLL_S

    stop_patience_s: float | None = None
    """How long `stop` waits before it kills; without, not to end is a failure of the test."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.log_path = directory / f"{name}.log"
        self.run = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @abstractmethod
    def command(self) -> list[str]:
        """What is run; may write what it needs into the directory, which is there."""

    @abstractmethod
    async def is_serving(self) -> bool:
        """Whether it serves.  Asked again and again; errors of connecting mean that it does not."""

    def environment(self) -> Mapping[str, str]:
        """Of the process; that of the tests unless told otherwise."""
        return os.environ

    @property
    def working_directory(self) -> Path:
        """Where the process runs."""
        return self.directory

    # Life

    def spawn(self) -> None:
        """Start the process and return at once."""
        assert self._process is None, f"{self.name} runs already"
        self.run += 1
        self.directory.mkdir(parents=True, exist_ok=True)
        command = dying_with_its_parent(self.command())
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                command,
                cwd=self.working_directory,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    async def start(self) -> None:
        """Start the process and wait until it serves."""
        self.spawn()
        await self.until_serving()

    async def until_serving(self) -> None:
        """Wait until the process that runs serves; if it does not come to, it is killed."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.start_timeout_s
        while loop.time() < deadline:
            ended = self._process.poll() is not None
            if not ended and await self.is_serving():
                return
            if ended:
                break
            await asyncio.sleep(self.poll_s)
        self.kill()
        raise ChildFailed(f"{self.name} does not serve; its log ends so:\n{self._log_tail()}")

    def kill(self) -> None:
        """SIGKILL, and wait for the end.  Nothing happens if no process runs."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_TIMEOUT_S)
            self._process = None

    async def terminate(self) -> int:
        """SIGTERM; returns the exit status."""
        return await self.signalled(signal.SIGTERM)

    async def stop(self) -> None:
        """SIGTERM if it runs, and wait for the end, whatever its status."""
        if self.running and self.stop_patience_s is None:
            await self.terminate()
        elif self.running:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.stop_patience_s):
                    await self.terminate()
        self.kill()

    async def restart(self) -> None:
        """Start it on the same ports and data; what still runs is killed before."""
        self.kill()
        await self.start()

    def pause(self) -> None:
        """SIGSTOP: it neither answers nor notices.  Returns when it has taken effect."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    async def signalled(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit status."""
        self.signal(number)
        return await self.ended()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, and wait for nothing."""
        assert self._process is not None, f"{self.name} does not run"
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the process; returns the exit status."""
        assert self._process is not None, f"{self.name} does not run"
        for _ in range(int(STOP_TIMEOUT_S / POLL_S)):
            status = self._process.poll()
            if status is not None:
                self._process = None
                return status
            await asyncio.sleep(POLL_S)
        raise ChildFailed(f"{self.name} does not end; its log ends so:\n{self._log_tail()}")

    # What is asked about it

    @property
    def running(self) -> bool:
        """Whether the process lives; a paused one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def paused(self) -> bool:
        """Whether the process is stopped by SIGSTOP."""
        if not self.running:
            return False
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    def log(self, *, this_run: bool = False) -> str:
        """What the process wrote, of this run or of all."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start if this_run else 0)
            return log.read().decode("utf-8", "replace")

    def _log_tail(self) -> str:
        return self.log(this_run=True)[-LOG_TAIL:]

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_bytes(self) -> int:
        """The most memory that the process ever had in RAM."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def sockets(self) -> int:
        """Sockets of the process, listening ones included."""
        count = 0
        for link in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                count += os.readlink(link).startswith("socket:")
        return count


async def once_it_is(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float) -> None:
    """Return when the condition holds; a failed test names `what` if it does not come to."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not await condition():
        if loop.time() > deadline:
            raise ChildFailed(f"{what} did not come to hold within {timeout_s} s")
        await asyncio.sleep(POLL_S)
