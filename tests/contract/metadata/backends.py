"""The backends that the contract suite runs on, and what tests need beside the interface.

To add one: append a `Backend` to `BACKENDS`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from storage.clock import SystemClock
from storage.metadata.open import open_metadata_store
from storage.metadata.recent import RecentChanges
from storage.metadata.sqlite import SqliteMetadataStore
from storage.metadata.store import Event, EventKind, MetadataStore, Watch

PATIENCE_S = 20
"""How long a test waits for what must come."""


@dataclass(frozen=True)
class Backend:
    """A kind of store, opened empty in a directory of its own."""

    name: str
    open: Callable[[Path], Awaitable[MetadataStore]]
    shortest_session_ms: int


async def open_memory(_directory: Path) -> MetadataStore:
    return await open_metadata_store("memory:", SystemClock())


async def open_sqlite(directory: Path) -> MetadataStore:
    return await open_metadata_store(f"sqlite:{directory / 'metadata.db'}", SystemClock())


async def open_sqlite_without_memory(directory: Path) -> MetadataStore:
    """So that every read is one of the file."""
    store = await SqliteMetadataStore.open(directory / "metadata.db", SystemClock())
    store._recent = RecentChanges(max_keys=0)
    return store


BACKENDS = (
    Backend("memory", open_memory, shortest_session_ms=60),
    Backend("sqlite", open_sqlite, shortest_session_ms=60),
    Backend("sqlite-file", open_sqlite_without_memory, shortest_session_ms=60),
)


async def next_event(watch: Watch) -> Event:
    """The next event, or a failed test if none comes."""
    return await asyncio.wait_for(anext(watch), PATIENCE_S)


async def events_until(watch: Watch, last: Callable[[Event], bool]) -> list[Event]:
    """Events up to and with the first one that fits."""
    events = [await next_event(watch)]
    while not last(events[-1]):
        events.append(await next_event(watch))
    return events


def brief(event: Event) -> tuple[EventKind, str, bytes | None]:
    """An event as tests compare it."""
    return event.kind, event.key, None if event.record is None else event.record.value
