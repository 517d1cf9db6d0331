"""Coordinators over a metadata store in memory, with a store that counts, fails and interferes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from storage.metadata.memory import MemoryMetadataStore
from storage.metadata.store import MetadataError, Record
from tests.unit.txn.virtual_time import VirtualClock
from txn.coordinator_elections import Leader
from txn.coordinators import Coordinators
from txn.counters import TransactionCounters
from txn.decisions import Decisions
from txn.parts import TransactionParts
from txn.store import TransactionStore

Hook = Callable[[str, str], Awaitable[None]]


class WatchedStore(MemoryMetadataStore):
    """Counts calls; `before` is awaited before each and may raise."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.calls: list[tuple[str, str]] = []
        self.before: Hook | None = None

    async def _see(self, what: str, key: str) -> None:
        self.calls.append((what, key))
        if self.before is not None:
            await self.before(what, key)

    async def get(self, key: str, **given: object) -> Record | None:
        await self._see("get", key)
        return await super().get(key, **given)  # type: ignore[arg-type]

    async def put(self, key: str, value: bytes, **given: object) -> object:  # type: ignore[override]
        await self._see("put", key)
        return await super().put(key, value, **given)  # type: ignore[arg-type]

    async def delete(self, key: str, **given: object) -> bool:
        await self._see("delete", key)
        return await super().delete(key, **given)  # type: ignore[arg-type]

    async def scan(self, lo: str, hi: str, **given: object) -> object:  # type: ignore[override]
        await self._see("scan", lo)
        return await super().scan(lo, hi, **given)  # type: ignore[arg-type]

    async def scan_index(self, index: str, lo: str, hi: str, **given: object) -> object:  # type: ignore[override]
        await self._see("scan_index", index)
        return await super().scan_index(index, lo, hi, **given)  # type: ignore[arg-type]

    def of_transactions(self) -> list[str]:
        """What was called about headers since the last time this was asked."""
        calls, self.calls = self.calls, []
        return [what for what, key in calls if key.startswith("/txn/id/")]


class World:
    """One metadata store and the processes at it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.metadata = WatchedStore(self.clock)
        self.clock_slack_ms = 0

    def parts(self, name: str = "here", ahead_ms: int = 0) -> TransactionParts:
        counters = TransactionCounters()
        store = TransactionStore(self.metadata, counters)
        clock = VirtualClock()
        clock.shift_ms = ahead_ms
        return TransactionParts(
            store,
            Decisions(store),
            counters,
            clock if ahead_ms else self.clock,
            name,
            False,
            clock_slack_ms=self.clock_slack_ms,
        )

    @asynccontextmanager
    async def coordinators(
        self, name: str = "here", *, parallelism: int = 4, max_open: int = 0, ahead_ms: int = 0
    ) -> AsyncIterator[tuple[Coordinators, TransactionParts]]:
        """Of one process, whose clock is ahead of the world's by so much."""
        parts = self.parts(name, ahead_ms)
        made = Coordinators(
            parts,
            Leader(name, f"pulsar://{name}:6650", None, f"http://{name}:8080"),
            parallelism=parallelism,
            max_open=max_open,
            session_timeout_ms=30_000,
        )
        try:
            await made.start()
            yield made, parts
        finally:
            self.metadata.before = None
            await made.stop()
            await parts.decisions.stop()


def failing(what: str, prefix: str) -> Hook:
    """A hook that fails such calls."""

    async def hook(called: str, key: str) -> None:
        if called == what and key.startswith(prefix):
            raise MetadataError("The disk is full: give it room.")

    return hook


def hold_next(metadata: WatchedStore, what: str, prefix: str) -> asyncio.Event:
    """Make the next such call wait until the event that is returned is set."""
    go_on = asyncio.Event()

    async def hook(called: str, key: str) -> None:
        if called == what and key.startswith(prefix):
            metadata.before = None
            await go_on.wait()

    metadata.before = hook
    return go_on
