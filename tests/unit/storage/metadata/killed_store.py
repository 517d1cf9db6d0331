"""A process that writes to a SQLite metadata store until it is killed.

    python -m tests.unit.storage.metadata.killed_store PATH ROUND

Prints `key value` for each acknowledged put, one a line.
"""

import asyncio
import os
import sys
from pathlib import Path

from storage.clock import SystemClock
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import IndexEntry

CALLERS = 32


async def write(path: Path, round_number: str) -> None:
    store = await SqliteMetadataStore.open(path, SystemClock())
    session = await store.open_session(timeout_ms=60_000, identity="killed")

    async def call(caller: int) -> None:
        number = 0
        while True:
            key, value = f"/r{round_number}/{caller:02}-{number:06}", f"{caller}x{number}"
            await store.put(key, value.encode(), indexes=[IndexEntry("i", key)])
            os.write(1, f"{key} {value}\n".encode())
            await store.put(
                f"/e/{caller}", value.encode(), session=session, indexes=[IndexEntry("e", value)]
            )
            number += 1

    await asyncio.gather(*(call(caller) for caller in range(CALLERS)))


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2]))
