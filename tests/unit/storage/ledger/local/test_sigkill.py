"""SIGKILL under load, again and again on one data directory: every promise is kept."""

import asyncio
import random
import subprocess
import sys
from pathlib import Path

from magnetar.protocol.ids import LedgerId
from storage.ledger.store import NoSuchLedger
from tests.unit.storage.ledger.local.embedded import embedded_store, entry_for
from tests.unit.storage.ledger.local.support import read_all

ROOT = Path(__file__).resolve().parents[5]
ROUNDS = 6


class Promises:
    """What the writers said before they were killed."""

    def __init__(self) -> None:
        self.acknowledged: dict[LedgerId, int] = {}
        self.deleting: set[LedgerId] = set()

    def note(self, line: str) -> None:
        kind, *numbers = line.split()
        ledger_id = LedgerId(int(numbers[0]))
        if kind == "C":
            assert ledger_id not in self.acknowledged, "an id was given twice"
            self.acknowledged[ledger_id] = 0
        elif kind == "A":
            assert int(numbers[1]) == self.acknowledged[ledger_id]
            self.acknowledged[ledger_id] += 1
        else:
            self.deleting.add(ledger_id)


def write_and_kill(path: Path, promises: Promises, lines: int) -> None:
    command = [sys.executable, "-m", "tests.unit.storage.ledger.local.kill_writer", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout is not None
        for number, line in enumerate(writer.stdout):
            if number == lines:
                writer.kill()
            if line.endswith("\n"):
                promises.note(line)
        assert writer.wait(20) == -9


async def check(path: Path, promises: Promises) -> None:
    async with embedded_store(path) as store:
        for ledger_id, acknowledged in promises.acknowledged.items():
            try:
                ledger = await store.open(ledger_id)
            except NoSuchLedger:
                assert ledger_id in promises.deleting
                continue
            found = await read_all(ledger)
            assert len(found) >= acknowledged
            assert found == [entry_for(ledger_id, entry_id) for entry_id in range(len(found))]
        await store.reclaim()


async def test_sigkill_under_load(tmp_path: Path) -> None:
    rng = random.Random(11)
    promises = Promises()
    path = tmp_path / "data"
    for _ in range(ROUNDS):
        await asyncio.to_thread(write_and_kill, path, promises, rng.randint(200, 4000))
        await check(path, promises)
    assert sum(promises.acknowledged.values()) > 1000
    assert promises.deleting
    await check(path, promises)
