"""Reads before writes: the record of a write, and the directory of its level."""

import asyncio
from collections.abc import Callable
from functools import partial as bind
from typing import cast

from config import bounds
from storage.metadata.operations import SequencePut
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import ZooKeeperClient
from storage.metadata.zookeeper.knowledge import Knowledge
from storage.metadata.zookeeper.layout import (
    Directory,
    Layout,
    decode_directory,
    decode_record,
    record_name,
)
from storage.metadata.zookeeper.requests import Answer, Read, Request
from storage.metadata.zookeeper.writes import PendingWrite, defect_at


class Loader:
    """Reads the record and the directory that a write needs to know, many at once.

    All reads asked for in one turn of the loop are one request.
    """

    def __init__(
        self,
        client: ZooKeeperClient,
        layout: Layout,
        knowledge: Knowledge,
        loaded: Callable[[], None],
    ) -> None:
        """`loaded` is called when the reads of writes have arrived, or failed."""
        self._client = client
        self._layout = layout
        self._knowledge = knowledge
        self._loaded = loaded
        self._loop = asyncio.get_running_loop()
        self._asked: list[PendingWrite] = []

    def ask(self, write: PendingWrite) -> None:
        """Read soon.  The answer counts only if nothing newer is known when it arrives."""
        if write.loading:
            return
        write.loading = True
        if not self._asked:
            self._loop.call_soon(self._read_asked)
        self._asked.append(write)

    def verify(self, write: PendingWrite) -> None:
        """Read the records of the first queued write, after a `sync`.

        The answer is newer than every write sent before.  A sequence put always reads in this way,
        because other records decide whether it may begin.
        """
        if write.loading:
            return
        write.loading = True
        self._client.submit(requests.sync(self._layout.records), bind(self._caught_up, write))

    def _caught_up(self, write: PendingWrite, answer: Answer) -> None:
        if answer.failure is None:
            self._submit([write], verify=True)
        else:
            self._arrived([write], True, answer)

    def _read_asked(self) -> None:
        asked, self._asked = self._asked, []
        page = bounds.ZOOKEEPER_READ_NODES // 2
        for start in range(0, len(asked), page):
            self._submit(asked[start : start + page], verify=False)

    def _submit(self, writes: list[PendingWrite], *, verify: bool) -> None:
        try:
            reads = [read for write in writes for read in self._reads(write)]
            done = bind(self._arrived, writes, verify)
            self._client.submit(requests.read_many(reads), done)
        except Exception as error:  # noqa: BLE001 - the writes would seem to load for ever
            for write in writes:
                write.loading = False
                write.complete(defect_at(write, error))
            self._loop.call_soon(self._loaded)

    def _reads(self, write: PendingWrite) -> tuple[Request, Request]:
        request, directory = write.request, self._layout.directory(write.level)
        if isinstance(request, SequencePut):
            return requests.get_data(directory), requests.get_children(directory)
        return requests.get_data(directory), requests.get_data(self._layout.record(request.key))

    def _arrived(self, writes: list[PendingWrite], verify: bool, answer: Answer) -> None:
        for write in writes:
            write.loading = False
        if answer.failure is not None:
            if self._client.connected:  # else the pipeline goes on at the next connection
                self._loop.call_later(bounds.ZOOKEEPER_RECONNECT_MIN_S, self._loaded)
            return
        reads = iter(cast("list[Read]", answer.value))
        for write in writes:
            try:
                self._learn(write, next(reads), next(reads), newer=verify)
            except MetadataError as error:
                write.complete(error)
            except Exception as error:  # noqa: BLE001 - the others go on
                write.complete(defect_at(write, error))
            write.verified = write.verified or verify
        self._loaded()

    def _learn(self, write: PendingWrite, directory: Read, other: Read, *, newer: bool) -> None:
        request, known = write.request, self._knowledge
        if newer or known.directory(write.level) is None:
            known.learn_directory(write.level, _directory(self._layout, write.level, directory))
        if isinstance(request, SequencePut):
            names = other if isinstance(other, list) else []
            write.others = any(record_name(name) is not None for name in names)
        elif newer or not known.knows(request.key):
            node = None
            if isinstance(other, tuple):
                node, _ = decode_record(request.key, *other)
            known.learn_record(request.key, node)


def _directory(layout: Layout, level: str, read: Read) -> Directory | None:
    return decode_directory(layout.directory(level), *read) if isinstance(read, tuple) else None
