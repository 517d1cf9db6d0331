"""Batches of waiting writes, each as one request.  Pure."""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from config import bounds
from storage.metadata.keys import level_of
from storage.metadata.operations import Delete, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.writes import ExclusiveCall, Write

Answer = pb.PutResponse | pb.DeleteResponse


class Batch:
    """The writes of one request, in order of issue."""

    __slots__ = ("deadline", "writes")

    def __init__(self, writes: list[Write], deadline: float = 0.0) -> None:
        self.writes = writes
        self.deadline = deadline

    def request(self, shard_id: int) -> pb.WriteRequest:
        """The request to send."""
        requests = [write.request for write in self.writes]
        return pb.WriteRequest(
            shard=shard_id,  # servers end on a request without it
            puts=[each for each in requests if isinstance(each, pb.PutRequest)],
            deletes=[each for each in requests if isinstance(each, pb.DeleteRequest)],
        )

    def answers(self, response: pb.WriteResponse) -> Iterator[tuple[Write, Answer]]:
        """Each write with its answer, in order of issue.

        Raises `ValueError` for a response of another request.
        """
        puts, deletes = iter(response.puts), iter(response.deletes)
        deleted = sum(isinstance(write.operation, Delete) for write in self.writes)
        if (len(self.writes) - deleted, deleted) != (len(response.puts), len(response.deletes)):
            raise ValueError(
                f"a request of {len(self.writes)} operations was answered with "
                f"{len(response.puts)} puts and {len(response.deletes)} deletes"
            )
        for write in self.writes:
            if isinstance(write.operation, Delete):
                yield write, next(deletes)
            else:
                yield write, next(puts)


def take_batch(
    queue: "deque[Write | ExclusiveCall]",
    *,
    max_operations: int = bounds.OXIA_BATCH_OPERATIONS,
    max_bytes: int = bounds.OXIA_BATCH_BYTES,
) -> Batch:
    """Take writes from the head of the queue: as many as one request may carry.

    It ends before an `ExclusiveCall`.  A write above the bound of bytes goes alone.  Nothing is
    taken if this raises.
    """
    writes: list[Write] = []
    deleted: set[str] = set()
    levels: set[str] = set()
    size = 0
    for write in islice(queue, max_operations):
        if isinstance(write, ExclusiveCall) or (writes and size + write.size > max_bytes):
            break
        operation = write.operation
        if isinstance(operation, Delete):
            deleted.add(operation.key)
            levels.add(level_of(operation.key))
        elif deleted:
            # Servers apply the puts of a request, then its deletes.  So a put of a key that is
            # deleted in this request, or on a sequence with a delete under it, goes into the next.
            sequence = isinstance(operation, SequencePut)
            if write.key in levels if sequence else write.key in deleted:
                break
        writes.append(write)
        size += write.size
    for _ in writes:
        queue.popleft()
    return Batch(writes)
