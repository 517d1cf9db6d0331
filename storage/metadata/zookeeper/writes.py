"""Writes on their way, batches of them, and their errors."""

import asyncio
from typing import Protocol

import structlog

from config import bounds
from storage.metadata.keys import level_of
from storage.metadata.operations import SequencePut
from storage.metadata.store import MetadataDefect, MetadataError, PutResult, SessionLost
from storage.metadata.zookeeper.client import ZooKeeperClient
from storage.metadata.zookeeper.knowledge import Undo
from storage.metadata.zookeeper.plan import Plan, Write
from storage.metadata.zookeeper.requests import Answer, MultiResult, Request

_log = structlog.get_logger(__name__)

Outcome = PutResult | bool


class SessionConnection(Protocol):
    """The session of an ephemeral record, as writes need it."""

    @property
    def lost(self) -> bool:
        """Whether the session has ended."""
        ...

    @property
    def client(self) -> ZooKeeperClient:
        """The connection of the session."""
        ...


class PendingWrite:
    """One write, from its call to its outcome."""

    __slots__ = (
        "asked_at",
        "done",
        "loading",
        "others",
        "request",
        "session",
        "tries",
        "verified",
    )

    def __init__(self, request: Write, session: SessionConnection | None, now: float) -> None:
        self.request = request
        self.session = session
        self.asked_at = now
        self.done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.loading = False
        self.verified = False
        """The state that it needs was read behind a sync, with nothing in flight, since its last
        try."""
        self.others = False
        """For a sequence put: the level had records."""
        self.tries = 0

    @property
    def level(self) -> str:
        """The level of the key that the write changes."""
        request = self.request
        return request.prefix if isinstance(request, SequencePut) else level_of(request.key)

    @property
    def name(self) -> str:
        """The key or prefix that the write changes."""
        request = self.request
        return request.prefix if isinstance(request, SequencePut) else request.key

    def complete(self, outcome: Outcome | Exception) -> None:
        """Give the outcome to the caller, if it still waits."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class PlannedWrite:
    """A write in a batch, with its plan and the state before."""

    __slots__ = ("plan", "undo", "write")

    def __init__(self, write: PendingWrite, plan: Plan, undo: Undo) -> None:
        self.write = write
        self.plan = plan
        self.undo = undo


class Batch:
    """Writes that are sent as one multi: they take effect together or not at all."""

    __slots__ = ("_keys", "answer", "items", "session", "size")

    def __init__(self) -> None:
        self.session: SessionConnection | None = None
        """The session of its writes."""
        self.items: list[PlannedWrite] = []
        self.answer: Answer | None = None
        self.size = 0
        self._keys: set[str] = set()

    def takes(self, write: PendingWrite) -> bool:
        """Whether another write may join."""
        if not self.items:
            return True
        return (
            write.session is self.session
            and not write.tries
            and not self.items[0].write.tries
            and len(self.items) < bounds.ZOOKEEPER_BATCH_WRITES
            # All changes of a multi get one number, and versions are these numbers.
            and write.name not in self._keys
        )

    def fits(self, plan: Plan) -> bool:
        """Whether the requests of a plan fit into the bound of bytes."""
        return not self.items or self.size + plan.size <= bounds.ZOOKEEPER_BATCH_BYTES

    def add(self, item: PlannedWrite) -> None:
        """Add a write."""
        self.session = item.write.session
        self.items.append(item)
        self.size += item.plan.size
        self._keys.add(item.plan.key)

    def requests(self) -> list[Request]:
        """The requests of all writes, without the guard's."""
        return [request for item in self.items for request in item.plan.requests]

    @property
    def took_effect(self) -> bool:
        """Whether the answer says that it took effect."""
        result = self._result
        return result is not None and result.failed is None

    @property
    def is_lost(self) -> bool:
        """Whether the answer was lost, so that only the guard shows the effect of the write."""
        return self.answer is not None and self.answer.failure is not None

    @property
    def failed(self) -> bool:
        """Whether it surely had no effect."""
        result = self._result
        return result is not None and result.failed is not None

    @property
    def failed_at_guard(self) -> bool:
        """Whether its first operation failed, as the batch before it had no effect."""
        result = self._result
        return result is not None and result.failed == 0

    def to_blame(self) -> PlannedWrite | None:
        """The write whose operation failed; None if it was the guard's, or none."""
        result = self._result
        if result is None or not result.failed:
            return None
        place = result.failed - 1
        for item in self.items:
            if place < len(item.plan.requests):
                return item
            place -= len(item.plan.requests)
        return None

    @property
    def _result(self) -> MultiResult | None:
        value = self.answer and self.answer.value
        return value if isinstance(value, MultiResult) else None


def session_lost() -> SessionLost:
    """The error of a put of a session that has ended."""
    return SessionLost("The session has ended: open a new one and put the ephemerals again.")


def contended(write: PendingWrite) -> MetadataError:
    """The error of a write whose record other processes changed at each try."""
    return MetadataError(
        f"{write.name!r} was changed by others {bounds.ZOOKEEPER_TRIES} times while it was to be "
        "written; nothing was stored: try again."
    )


def outcome_unknown(write: PendingWrite) -> MetadataError:
    """The error of a write that was sent and has no answer."""
    return MetadataError(
        f"ZooKeeper did not say whether the write of {write.name!r} took effect, so that is "
        "unknown: read the record, and look at ZooKeeper's servers."
    )


def defect_at(write: PendingWrite, error: Exception) -> MetadataDefect:
    """The error of a write that was not sent because of a bug of this store; it is logged."""
    _log.error("write_failed_unexpectedly", key=write.name, exc_info=error)
    failed = MetadataDefect(
        f"The write of {write.name!r} could not be made ({error!r}); nothing was stored: this is "
        "a bug, report it with the log."
    )
    failed.__cause__ = error
    return failed


def not_settled(write: PendingWrite, error: Exception) -> MetadataError:
    """The error of a write that was sent before a bug of this store."""
    failed = MetadataError(
        f"Whether the write of {write.name!r} took effect is unknown, as its answer could not be "
        f"worked off ({error!r}): read the record; this is a bug, report it with the log."
    )
    failed.__cause__ = error
    return failed


def not_stored() -> MetadataError:
    """The error of a write that was not sent in time."""
    return MetadataError(
        f"ZooKeeper took no write for {bounds.ZOOKEEPER_REQUEST_S} s; nothing was stored: look at "
        "its servers and try again."
    )
