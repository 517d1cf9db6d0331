"""Writes through the connection of a session that took effect, until reads see them."""

import asyncio
from collections.abc import Sequence

from config import bounds
from storage.metadata.store import MetadataError
from storage.metadata.zookeeper import requests
from storage.metadata.zookeeper.client import ZooKeeperClient
from storage.metadata.zookeeper.requests import Answer
from storage.metadata.zookeeper.writes import Outcome, PendingWrite

Outcomes = Sequence[tuple[PendingWrite, Outcome]]


class VisibilityBarrier:
    """Holds back the outcomes of writes through sessions until reads show them.

    Reads go through another connection, whose server may be behind: an outcome is given after a
    `sync` there.  After `ZOOKEEPER_VISIBLE_S` the caller gets an error that says that the write
    took effect.
    """

    def __init__(self, client: ZooKeeperClient, path: str) -> None:
        """`client` is the one of reads, which are below `path`."""
        self._client = client
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[float, Outcomes]] = {}
        self._added = 0

    def add(self, outcomes: Outcomes) -> None:
        """Complete these writes once they can be read."""
        self._added += 1
        self._waiting[self._added] = (self._loop.time() + bounds.ZOOKEEPER_VISIBLE_S, outcomes)
        self._ask(self._added)

    def expire(self) -> None:
        """Fail the writes that have waited for too long."""
        now = self._loop.time()
        for number, (deadline, outcomes) in list(self._waiting.items()):
            if deadline <= now:
                del self._waiting[number]
                for write, _ in outcomes:
                    write.complete(_not_seen(write))

    def pending(self) -> "list[asyncio.Future[Outcome]]":
        """The futures of the writes that wait."""
        return [write.done for _, outcomes in self._waiting.values() for write, _ in outcomes]

    def close(self) -> None:
        """Complete all: nothing is read by this store any more."""
        for number in list(self._waiting):
            self._complete(number)

    def _ask(self, number: int) -> None:
        if number not in self._waiting:
            return

        def answered(answer: Answer) -> None:
            if answer.failure is None:
                self._complete(number)
            else:
                self._loop.call_later(bounds.ZOOKEEPER_RECONNECT_MAX_S, self._ask, number)

        self._client.submit(requests.sync(self._path), answered)

    def _complete(self, number: int) -> None:
        _, outcomes = self._waiting.pop(number, (0.0, ()))
        for write, outcome in outcomes:
            write.complete(outcome)


def _not_seen(write: PendingWrite) -> MetadataError:
    return MetadataError(
        f"The write of {write.name!r} took effect, but the ZooKeeper that is read from did not "
        f"catch up within {bounds.ZOOKEEPER_VISIBLE_S} s, so reads may not see it: read the "
        "record again, and look at ZooKeeper's servers."
    )
