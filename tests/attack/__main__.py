"""`python -m tests.attack [NAME...]`: attacks on a broker of their own each, beside a probe.

For each attack: how long the probe's messages and transactions took (median, 99th percentile,
longest), the broker's memory before and after, what it logged meanwhile, what of the
acknowledged messages is missing, how long SIGTERM took.  The status is 1 if a bound is broken.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.processes import resident_mib
from tests.attack.attacks import ATTACKS
from tests.attack.probe import Probe
from tests.attack.secured_attacks import grant, issue_certificates
from tests.attack.target import Attack, Target
from tests.support.broker_process import ROOT, BrokerProcess
from tests.support.security import APP_ROLE, Security

SETTLES_S: Final = 2.0
"""The probe alone, before an attack."""
MEMORY_BACK_S: Final = 30.0
AFTER_FIRST_ROUND_S: Final = 10.0
MEMORY_RATIO: Final = 1.2
PROBE_P99_S: Final = 0.25
STOP_S: Final = 5.0
LOG_BYTES: Final = 256 * 1024
"""What an attack may cost in log: lines that a peer causes are bounded by the second."""
ATTACK_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True)
class Outcome:
    """What an attack did to a broker.  Memory in MiB, log in bytes, times in seconds."""

    name: str
    median_s: float
    p99_s: float
    longest_s: float
    before: float
    after: float
    log_bytes: int
    missing: int
    stop_s: float
    found: Sequence[str] = ()
    """What the attack itself says that the broker should not have done."""

    def broken(self) -> list[str]:
        """The bounds that it broke, in words."""
        late = [] if self.p99_s < PROBE_P99_S else [f"p99 of {PROBE_P99_S * 1000:.0f} ms or more"]
        return late + self.lasting()

    def lasting(self) -> list[str]:
        """The broken bounds that do not depend on how busy the machine is."""
        checks = (
            (self.after <= self.before * MEMORY_RATIO, f"memory above {MEMORY_RATIO} of before"),
            (self.log_bytes <= LOG_BYTES, f"more than {LOG_BYTES // 1024} KiB of log"),
            (not self.missing, "acknowledged messages missing"),
            (self.stop_s < STOP_S, f"SIGTERM took {STOP_S:.0f} s or more"),
        )
        return [text for holds, text in checks if not holds] + [*self.found]


async def undergo(name: str, attack: Attack, directory: Path, share: float = 1.0) -> Outcome:
    """Run one attack, or a share of it, on a new broker."""
    security = Security(directory / "security") if attack.secured else None
    broker = BrokerProcess(directory, {"log_level": "info", **attack.settings}, security=security)
    try:
        await broker.start()
        files = str(security.directory) if security else ""
        target = Target(broker.port, broker.http_port, broker.pid, files, share)
        if security:
            issue_certificates(security)
            await grant(target, APP_ROLE)
        await attack.prepare(target)
        if attack.twice:
            await run_in_a_process(name, target, directory / "findings")
            target = replace(target, round=1)
            await asyncio.sleep(AFTER_FIRST_ROUND_S)
        probe = Probe(broker)
        await probe.start()
        await asyncio.sleep(SETTLES_S)
        before, logged = resident_mib(broker.pid), broker.log_path.stat().st_size
        probe.latencies_s.clear()
        over = asyncio.Event()
        beside = asyncio.create_task(attack.beside(target, over)) if attack.beside else None
        found = [*await run_in_a_process(name, target, directory / "findings")]
        over.set()
        found += await beside if beside else []
        after = await memory_at_rest(broker.pid, before)
        await probe.stop()
        log_bytes = broker.log_path.stat().st_size - logged
        missing = await probe.missing()
        began_s = time.monotonic()
        with suppress(TimeoutError, subprocess.TimeoutExpired):
            await broker.terminate()
        stop_s = time.monotonic() - began_s
        times = sorted(probe.latencies_s)
        return Outcome(
            name,
            times[len(times) // 2],
            times[len(times) * 99 // 100],
            times[-1],
            before,
            after,
            log_bytes,
            len(missing),
            stop_s,
            found,
        )
    finally:
        broker.kill()


async def run_in_a_process(name: str, target: Target, findings: Path) -> Sequence[str]:
    """Run the attack beside this process; what takes too long is ended.

    Returns what it found, in words.
    """
    words = ("-m", "tests.attack.attacks", name, target.words, str(findings))
    process = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=ROOT)
    try:
        async with asyncio.timeout(ATTACK_TIMEOUT_S):
            status = await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
        return [f"the attack did not end within {ATTACK_TIMEOUT_S:.0f} s"]
    if status:
        return [f"the attack failed with status {status}"]
    return findings.read_text().splitlines()


async def memory_at_rest(pid: int, before: float) -> float:
    """The memory once it is back, or `MEMORY_BACK_S` after the attack."""
    deadline_s = time.monotonic() + MEMORY_BACK_S
    while True:
        memory = resident_mib(pid)
        if memory <= before * MEMORY_RATIO or time.monotonic() > deadline_s:
            return memory
        await asyncio.sleep(0.5)


def show(outcomes: list[Outcome]) -> None:
    """Print the table."""
    table = Table("attack", "probe p50, p99, longest (ms)", "memory (MiB)", "log (KiB)", "missing")
    table.add_column("stop (s)")
    table.add_column("bounds broken")
    for each in outcomes:
        table.add_row(
            ATTACKS[each.name].what,
            f"{each.median_s * 1000:.1f}  {each.p99_s * 1000:.0f}  {each.longest_s * 1000:.0f}",
            f"{each.before:.0f} -> {each.after:.0f}",
            f"{each.log_bytes / 1024:.0f}",
            str(each.missing),
            f"{each.stop_s:.1f}",
            "; ".join(each.broken()) or "none",
        )
    Console(width=160).print(table)


async def run_all(names: list[str]) -> list[Outcome]:
    """Run these attacks one after the other."""
    outcomes: list[Outcome] = []
    for name in names:
        print(f"{name}: {ATTACKS[name].what}", flush=True)
        with tempfile.TemporaryDirectory() as directory:
            outcomes.append(await undergo(name, ATTACKS[name], Path(directory)))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.attack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", choices=[[], *ATTACKS], metavar="NAME")
    outcomes = asyncio.run(run_all(parser.parse_args().names or list(ATTACKS)))
    show(outcomes)
    return int(any(each.broken() for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
