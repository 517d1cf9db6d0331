"""One write on its way to a shard, and its outcome."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

from config import bounds
from storage.metadata.operations import Delete, Put, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.connection import Peer
from storage.metadata.oxia.records import PROOF, ShardRecord
from storage.metadata.store import PutResult

WriteOperation = Put | SequencePut | Delete
Outcome = PutResult | bool | Exception


class EphemeralOwner(Protocol):
    """The session of an ephemeral put, as writes see it."""

    identity: str

    @property
    def lost(self) -> bool:
        """Whether it has ended."""
        ...

    def id_on(self, shard_id: int) -> int | None:
        """The id of the session on a shard; None if it has none there."""
        ...

    def end(self) -> None:
        """Take in that a shard does not know the session any more."""
        ...


class Write:
    """One write on its way to a shard.  `key` is the prefix of a sequence put.

    `expected` is the caller's condition as a version id; `request` may have another one when the
    write is sent again.  `deadline` is of the loop's time.
    """

    __slots__ = (
        "deadline",
        "done",
        "expected",
        "key",
        "operation",
        "put_id",
        "removals_seen",
        "request",
        "resent",
        "session",
        "shard_id",
        "size",
    )

    def __init__(
        self,
        operation: WriteOperation,
        done: "asyncio.Future[PutResult | bool]",
        *,
        put_id: str,
        deadline: float,
        session: EphemeralOwner | None = None,
    ) -> None:
        self.operation = operation
        self.key = operation.prefix if isinstance(operation, SequencePut) else operation.key
        self.done = done
        self.put_id = put_id
        self.deadline = deadline
        self.session = session
        self.expected: int | None = None
        self.request: pb.PutRequest | pb.DeleteRequest | None = None
        self.resent = False
        self.removals_seen = 0
        self.shard_id = -1
        self.size = operation.size

    @property
    def partition(self) -> str | None:
        """The partition key that the caller gave."""
        return self.operation.partition

    @property
    def what(self) -> str:
        """The write as error messages name it."""
        kind = "delete" if isinstance(self.operation, Delete) else "put"
        return f"the {kind} of {self.key!r}"

    def complete(self, outcome: Outcome) -> None:
        """Give the outcome to the caller, if it still waits."""
        if self.done.done():
            return
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class ExclusiveCall:
    """A call that writes on its own and needs the shard for itself: see `ShardWriter`."""

    __slots__ = ("call", "deadline", "done", "size")

    def __init__(
        self,
        call: Callable[[Peer], Coroutine[object, object, object]],
        done: "asyncio.Future[object]",
        deadline: float,
    ) -> None:
        self.call = call
        self.done = done
        self.deadline = deadline
        self.size = 0


def proof_of_leader(loop: asyncio.AbstractEventLoop) -> Write:
    """A put without content: the server that acknowledges it leads the shard."""
    operation = Put(PROOF, b"", None, None, None, (), 0, len(PROOF))
    deadline = loop.time() + bounds.OXIA_REQUEST_TIMEOUT_S
    write = Write(operation, loop.create_future(), put_id="", deadline=deadline)
    write.request = pb.PutRequest(key=PROOF)
    return write


class WriteListener(Protocol):
    """The receiver of acknowledged writes, which gets them before their callers do."""

    def stored(self, write: Write, found: ShardRecord) -> None:
        """Take the record of a put that took effect."""
        ...

    def removed(self, write: Write) -> None:
        """Take a delete that took effect."""
        ...
