"""What waits becomes what one request carries.  Pure.

Rules:
- A request is applied in this order: its puts, then its deletes.  A put of a key that a delete of
  the same request names would be undone by it, so it begins a new request, and so does a put on a
  sequence under which a delete is.
- A request has a bounded number of operations and bytes; one operation above that goes alone.
- Answers come in the order of the request; outcomes are told in the order of issue.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice

from config import bounds
from storage.metadata.keys import level_of
from storage.metadata.operations import Delete, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.writes import Turn, Write

Answer = pb.PutResponse | pb.DeleteResponse


class Batch:
    """Writes of one request, in order of issue."""

    __slots__ = ("deadline", "writes")

    def __init__(self, writes: list[Write], deadline: float = 0.0) -> None:
        self.writes = writes
        self.deadline = deadline

    def request(self, shard_id: int) -> pb.WriteRequest:
        """What is sent.  It always names the shard: servers end on one that does not."""
        requests = [write.request for write in self.writes]
        return pb.WriteRequest(
            shard=shard_id,
            puts=[each for each in requests if isinstance(each, pb.PutRequest)],
            deletes=[each for each in requests if isinstance(each, pb.DeleteRequest)],
        )

    def answers(self, response: pb.WriteResponse) -> Iterator[tuple[Write, Answer]]:
        """Each write with its answer.  Raises `ValueError` for a response of another request."""
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
    queue: "deque[Write | Turn]",
    *,
    max_operations: int = bounds.OXIA_BATCH_OPERATIONS,
    max_bytes: int = bounds.OXIA_BATCH_BYTES,
) -> Batch:
    """Take from the head of the queue what one request may carry; it ends before a `Turn`.

    Nothing is taken if this fails.
    """
    writes: list[Write] = []
    deleted: set[str] = set()
    levels: set[str] = set()
    size = 0
    for write in islice(queue, max_operations):
        if isinstance(write, Turn) or (writes and size + write.size > max_bytes):
            break
        operation = write.operation
        if isinstance(operation, Delete):
            deleted.add(operation.key)
            levels.add(level_of(operation.key))
        elif deleted:
            sequence = isinstance(operation, SequencePut)
            if write.key in levels if sequence else write.key in deleted:
                break
        writes.append(write)
        size += write.size
    for _ in writes:
        queue.popleft()
    return Batch(writes)
