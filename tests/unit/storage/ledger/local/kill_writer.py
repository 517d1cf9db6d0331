"""Writes under load until it is killed, and says on stdout what it was promised.

Lines: `C ledger` made, `A ledger entry` acknowledged, `D ledger` about to be deleted.
"""

import asyncio
import os
import sys
from pathlib import Path

import structlog

from storage.ledger.local.local_store import LocalLedgerStore
from storage.ledger.store import LedgerError, WritableLedger
from tests.unit.storage.ledger.local.embedded import embedded_store, entry_for

WRITERS = 3
WINDOW = 40
ENTRIES_EACH = 150


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def fill(ledger: WritableLedger) -> None:
    """One ledger's worth of entries with a full window."""
    full = asyncio.get_running_loop().create_future()
    ledger_id = ledger.ledger_id
    appended = 0

    def done(entry_id: int, error: LedgerError | None) -> None:
        if error is not None:
            raise error
        say("A", ledger_id, entry_id)
        if entry_id == ENTRIES_EACH - 1:
            full.set_result(None)
        append()

    def append() -> None:
        nonlocal appended
        if appended < ENTRIES_EACH:
            ledger.append(entry_for(ledger_id, appended), done)
            appended += 1

    for _ in range(WINDOW):
        append()
    await full


async def write(store: LocalLedgerStore, number: int) -> None:
    """Ledger after ledger; every second one is deleted again."""
    before: WritableLedger | None = None
    while True:
        ledger = await store.create(custom={})
        say("C", ledger.ledger_id)
        await fill(ledger)
        if number:
            await ledger.close()
        if before is not None:
            say("D", before.ledger_id)
            await store.delete(before.ledger_id)
            before = None
        else:
            before = ledger


async def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    async with embedded_store(Path(sys.argv[1])) as store:
        await asyncio.gather(*(write(store, number) for number in range(WRITERS)))


asyncio.run(main())
