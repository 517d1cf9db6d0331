"""Key order of a Key_Shared subscription: pure bookkeeping of key hashes and waiting entries."""

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from broker.topics.dispatch.redelivery import ReplayQueue
from broker.topics.dispatch.selection import Candidate, KeyAssignment
from magnetar.protocol.ids import Position

C = TypeVar("C", bound=Candidate)


class KeyOrder(Generic[C]):
    """The holders of the key hashes of a Key_Shared subscription, and the waiting entries.

    A hash is *held* by the consumer that has unacknowledged entries of it.  While one consumer
    holds a hash, no other gets an entry of it, even when the hash has a new owner (it drains).  An
    entry waits behind waiting entries of its hash.  Waiting entries are sent lowest position first,
    as soon as their owner can receive and no other consumer holds the hash.  `allow_out_of_order`
    switches holding off.

    A chunk of which the holder of its hash has the chunks before it is *bound* to that consumer: it
    could acknowledge none of them otherwise.

    A hash can be *blocked* too, for all but one consumer or for all, by entries that wait for the
    end of a transaction.

    When hashes get other owners, all waiting entries are queued anew by `queue_waiting`, in parts,
    as they may be a million.  Until then no waiting entry is sent.
    """

    def __init__(self, assignment: KeyAssignment[C], *, allow_out_of_order: bool = False) -> None:
        self.assignment = assignment
        self._strict = not allow_out_of_order
        self._holders: dict[int, tuple[C, int]] = {}
        self._blocks: dict[int, dict[Position, C | None]] = {}
        self._waiting: dict[Position, int] = {}
        self._waiting_of_hash: dict[int, int] = {}
        self._bound: dict[Position, C] = {}
        # Invariant: an owner's queue has no entry whose hash another consumer holds.  Such entries
        # are in `_draining` until the last entry of the holder is settled.
        self._queues: dict[C | None, ReplayQueue] = {}
        self._draining: dict[int, ReplayQueue] = {}
        self._queueing: Iterator[None] | None = None
        """Queues one waiting entry in each step; None: all are queued."""

    @property
    def waiting(self) -> int:
        """Number of entries that were read and could not be sent yet, or came back."""
        return len(self._waiting)

    def hash_of_waiting(self, position: Position) -> int | None:
        """The hash of an entry, if it waits."""
        return self._waiting.get(position)

    @property
    def queued(self) -> bool:
        """Whether all waiting entries are queued for their owners: see `queue_waiting`."""
        return self._queueing is None

    def has_waiting(self, owner: C) -> bool:
        """Whether an entry waits that `owner` may get now."""
        # A lower one of the same hash may not be queued yet.
        queue = self._queues.get(owner) if self.queued else None
        return queue is not None and bool(len(queue))

    def receiver(self, key_hash: int) -> C | None:
        """The consumer that may get a new entry of this hash now; None when it has to wait."""
        if key_hash in self._waiting_of_hash:
            return None
        owner = self.assignment.owner(key_hash)
        if owner is None or self._held_by_other(key_hash, owner):
            return None
        return owner

    def may_have_rest(self, key_hash: int, consumer: C) -> bool:
        """Whether `consumer`, which has chunks of a message of the hash, may get those left now."""
        holder = self._holders.get(key_hash)
        if self._strict and (holder is None or holder[0] is not consumer):
            return False
        return not self._held_by_other(key_hash, consumer)

    def sent(self, key_hash: int, consumer: C) -> None:
        """Count one more unacknowledged entry of the hash for `consumer`."""
        if self._strict:
            _, count = self._holders.get(key_hash, (consumer, 0))
            self._holders[key_hash] = (consumer, count + 1)

    def settled(self, key_hash: int, consumer: C) -> bool:
        """Count one entry of the hash that was acknowledged or came back.

        True when another consumer may get waiting entries because of that.
        """
        holder = self._holders.get(key_hash)
        if holder is None or holder[0] is not consumer:
            return False
        if holder[1] > 1:
            self._holders[key_hash] = (consumer, holder[1] - 1)
            return False
        del self._holders[key_hash]
        return self._release(key_hash)

    def block(self, position: Position, key_hash: int, consumer: C | None) -> None:
        """Give entries of the hash to no other consumer than this one (None: to none at all).

        That lasts until `unblock` of this position.
        """
        owner = self.assignment.owner(key_hash)
        was_held = self._held_by_other(key_hash, owner)
        self._blocks.setdefault(key_hash, {})[position] = consumer
        if not was_held and self._held_by_other(key_hash, owner):
            self.assignment_changed()
        elif was_held:
            self._release(key_hash)

    def unblock(self, position: Position, key_hash: int) -> None:
        """End a block: its owner may get the waiting entries of the hash."""
        blocks = self._blocks.get(key_hash)
        if blocks is None or position not in blocks:
            return
        del blocks[position]
        if not blocks:
            del self._blocks[key_hash]
        self._release(key_hash)

    def _release(self, key_hash: int) -> bool:
        """Queue the waiting entries of a hash for its owner, if no other consumer holds it."""
        owner = self.assignment.owner(key_hash)
        if self._held_by_other(key_hash, owner):
            return False
        released = self._draining.pop(key_hash, None)
        if released is None:
            return False
        while (position := released.pop()) is not None:
            self._enqueue(position, key_hash)
        return True

    def park(self, position: Position, key_hash: int) -> None:
        """Let an entry wait for its owner."""
        if position in self._waiting:
            return
        self._waiting[position] = key_hash
        self._waiting_of_hash[key_hash] = self._waiting_of_hash.get(key_hash, 0) + 1
        self._enqueue(position, key_hash)

    def bind(self, position: Position, key_hash: int, consumer: C) -> None:
        """Let a chunk wait for the consumer that has those before it."""
        self._bound[position] = consumer
        self.park(position, key_hash)

    def has_bound(self, consumer: C) -> bool:
        """Whether a chunk waits that is bound to a consumer: later ones must not overtake it."""
        return any(each is consumer for each in self._bound.values())

    def first_waiting(self, owner: C) -> Position | None:
        """The lowest waiting entry that `owner` may get now; it stays."""
        queue = self._queues.get(owner) if self.queued else None
        return None if queue is None else queue.first()

    def is_dense(self, owner: C) -> bool:
        """Whether the entries that `owner` may get now are near each other: see `ReplayQueue`."""
        queue = self._queues.get(owner)
        return queue is not None and queue.is_dense()

    def unpark(self, position: Position) -> int | None:
        """Remove an entry that is sent, or was acknowledged; its hash if it waited."""
        key_hash = self._waiting.pop(position, None)
        if key_hash is None:
            return None
        count = self._waiting_of_hash[key_hash] - 1
        if count:
            self._waiting_of_hash[key_hash] = count
        else:
            del self._waiting_of_hash[key_hash]
        draining = self._draining.get(key_hash)
        if draining is not None and position in draining:
            draining.discard(position)
            if not len(draining):
                del self._draining[key_hash]
        else:
            self._queue(self._owner(position, key_hash)).discard(position)
        self._bound.pop(position, None)
        return key_hash

    def consumer_left(self, consumer: C) -> None:
        """Free the hashes of a consumer that left; `park` its unacknowledged entries after that."""
        self._holders = {
            key_hash: holder
            for key_hash, holder in self._holders.items()
            if holder[0] is not consumer
        }
        self._bound = {at: each for at, each in self._bound.items() if each is not consumer}
        for blocks in self._blocks.values():
            for position, each in blocks.items():
                blocks[position] = None if each is consumer else each
        self.assignment_changed()

    def assignment_changed(self) -> None:
        """Let all waiting entries be queued for their new owners, by `queue_waiting`."""
        self._queues.clear()
        self._draining.clear()
        self._queueing = self._queue_all() if self._waiting else None

    def queue_waiting(self, at_most: int) -> bool:
        """Queue so many of the waiting entries that are not queued; returns `queued`."""
        steps = self._queueing
        if steps is not None and sum(1 for _ in islice(steps, at_most)) < at_most:
            self._queueing = None
        return self.queued

    def _queue_all(self) -> Iterator[None]:
        for position in list(self._waiting):
            key_hash = self._waiting.get(position)
            if key_hash is not None:  # not acknowledged meanwhile
                self._enqueue(position, key_hash)
            yield

    def _owner(self, position: Position, key_hash: int) -> C | None:
        """The consumer that a waiting entry is for."""
        bound = self._bound.get(position) if self._bound else None
        return self.assignment.owner(key_hash) if bound is None else bound

    def _enqueue(self, position: Position, key_hash: int) -> None:
        owner = self._owner(position, key_hash)
        if self._held_by_other(key_hash, owner):
            self._draining.setdefault(key_hash, ReplayQueue()).add(position)
        else:
            self._queue(owner).add(position)

    def _held_by_other(self, key_hash: int, owner: C | None) -> bool:
        holder = self._holders.get(key_hash)
        if holder is not None and holder[0] is not owner:
            return True
        blocks = self._blocks.get(key_hash) if self._blocks else None
        return blocks is not None and any(each is not owner for each in blocks.values())

    def _queue(self, owner: C | None) -> ReplayQueue:
        queue = self._queues.get(owner)
        if queue is None:
            queue = self._queues[owner] = ReplayQueue()
        return queue
