"""Directories that became empty are removed, so that short-lived levels leave nothing behind.

Rules:

- A while after a record was removed its directory is asked to go; ZooKeeper refuses if it has
  children.  So do its parents, one after the other.
- The directory of a sequence stays: its numbers must not come back.
- What a process left behind when it died stays until a record is removed there again.
"""

import asyncio
from collections.abc import Callable
from functools import partial as bind

from config import bounds
from storage.metadata.keys import level_of
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import ZooKeeperClient
from storage.metadata.zookeeper.layout import Layout
from storage.metadata.zookeeper.requests import Answer


class EmptyDirectories:
    """Deletes directories that have become empty."""

    def __init__(
        self, client: ZooKeeperClient, layout: Layout, removing: Callable[[str], bool]
    ) -> None:
        """`removing` hears of a level before its directory goes; False: it is in use."""
        self._client = client
        self._layout = layout
        self._removing = removing
        self._loop = asyncio.get_running_loop()
        self._levels: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def note(self, level: str) -> None:
        """A record of the level was removed."""
        if level == "/" or self._closed:
            return
        self._levels.add(level)
        if self._timer is None:
            self._timer = self._loop.call_later(bounds.ZOOKEEPER_PRUNE_S, self._prune)

    def close(self) -> None:
        """Remove nothing more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _prune(self) -> None:
        self._timer = None
        levels, self._levels = self._levels, set()
        for level in filter(self._removing, levels):
            # A sequence has written its number into the directory, so the version is not 0.
            request = requests.delete(self._layout.directory(level), 0)
            self._client.submit(request, bind(self._pruned, level))

    def _pruned(self, level: str, answer: Answer) -> None:
        if answer.failure is None:
            self.note(level_of(level[:-1]))
