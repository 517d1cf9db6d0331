"""A broker under observation: what each phase of a load takes, and what others wait meanwhile."""

import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from bench.processes import processor_s, resident_mib
from tests.support.broker_process import ROOT, BrokerProcess

KIB: Final = 1024.0
BESIDE: Final = "persistent://public/default/beside"


class Observed:
    """A broker, with a client of another topic beside it, in a process of its own.

    `figures` has, for each phase: seconds (`<phase>_s`), processor time of the broker
    (`<phase>_cpu_s`), and the longest PING of the other client (`<phase>_ping_ms`), which bounds
    the longest callback of the broker's loop from above.
    """

    def __init__(self, broker: BrokerProcess, directory: Path) -> None:
        self.broker = broker
        self.figures: dict[str, float] = {}
        self._directory = directory
        self._output = directory / "beside.jsonl"
        self._process: subprocess.Popen[bytes] | None = None
        self.phases: list[tuple[str, float, float]] = []
        """Their names, beginnings and ends, by the machine's monotonic clock in seconds."""

    def resident_kib(self) -> float:
        """Resident set of the broker."""
        return resident_mib(self.broker.pid) * KIB

    def disk_kib(self) -> float:
        """The files of the broker's data directory."""
        found = (each.stat() for each in (self._directory / "data").rglob("*") if each.is_file())
        return sum(each.st_size for each in found) / KIB

    @asynccontextmanager
    async def phase(self, name: str) -> AsyncIterator[None]:
        """Measure the block as the phase of that name."""
        began_s, used_s, pid = time.monotonic(), processor_s(self.broker.pid), self.broker.pid
        yield
        ended_s = time.monotonic()
        self.phases.append((name, began_s, ended_s))
        self.figures[f"{name}_s"] = ended_s - began_s
        if self.broker.pid != pid:
            used_s = 0.0  # another process, which has begun in this phase
        self.figures[f"{name}_cpu_s"] = processor_s(self.broker.pid) - used_s

    def start(self) -> None:
        """Let the other client begin."""
        command = [sys.executable, "-m", "bench.bystander"]
        command += ["--port", str(self.broker.port), "--topic", BESIDE]
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=file)

    def end(self) -> None:
        """End the other client, and read what it waited."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        for line in self._output.read_text().splitlines():
            asked_s, what, took_s = json.loads(line)
            for name, began_s, ended_s in self.phases:
                if what == "PING" and began_s <= asked_s < ended_s:
                    key = f"{name}_ping_ms"
                    self.figures[key] = max(self.figures.get(key, 0.0), 1000 * took_s)
