"""Removal of directories that became empty, so that short-lived levels leave nothing behind."""

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
    """Deletes directories that have become empty, and then their parents.

    It tries some time after a record was removed; ZooKeeper refuses if there are children.  Empty
    directories of a process that died stay until a record is removed there again.
    """

    def __init__(
        self, client: ZooKeeperClient, layout: Layout, removing: Callable[[str], bool]
    ) -> None:
        """`removing` is called with a level before its directory goes; False if it is in use."""
        self._client = client
        self._layout = layout
        self._removing = removing
        self._loop = asyncio.get_running_loop()
        self._levels: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def note(self, level: str) -> None:
        """Note that a record of the level was removed."""
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
            # The directory of a sequence stays, as its numbers must not come back.  The sequence
            # has written them into the directory, so its version is not 0.
            request = requests.delete(self._layout.directory(level), 0)
            self._client.submit(request, bind(self._pruned, level))

    def _pruned(self, level: str, answer: Answer) -> None:
        if answer.failure is None:
            self.note(level_of(level[:-1]))
