"""Messages that were sent in pieces, put together.

Pure; time is given.  Rules:

- The pieces of a message have one `uuid`, come in order, and each is an entry of its own.
- A piece that is not the next one ends its message: what had come is given up, and so is the piece.
  A piece that came before is dropped alone: it was delivered twice.
- Only so many messages may be incomplete at a time, with so many bytes: the oldest are given up for
  newer ones, save that one alone may have more bytes.  One that is incomplete for too long is given
  up too.  So are pieces that promise more than a limit.
- Who reads in order (`in_order`) gets nothing again that lies before what was acknowledged.  So
  there the oldest are not given up for newer ones: it fails.  And it is known which messages lie
  across a place, complete ones that were not acknowledged (or handed out) included (`open_across`).
- What is given up was seen by nobody.  What is too old is to be acknowledged, since its rest will
  not come any more; anything else is to be asked for again.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from magnetar.bounds import ORDERED_CHUNKED_MESSAGES
from magnetar.consume.received import EntryKey
from magnetar.errors import InvalidMessage
from protocol.pulsar_pb2 import MessageMetadata

__all__ = ["Assembled", "ChunkAssembly", "is_chunk"]


def is_chunk(metadata: MessageMetadata) -> bool:
    """Whether an entry is a piece of a message that has several."""
    return metadata.num_chunks_from_msg > 1


@dataclass(frozen=True, slots=True)
class Assembled:
    """What came of a piece."""

    payload: bytes | None = None
    """The whole payload, compressed as it was sent, if this piece was the last one."""
    chunks: tuple[EntryKey, ...] = ()
    """Then, all its entries."""
    again: tuple[EntryKey, ...] = ()
    """Entries of messages that were given up, to be asked for again."""
    too_old: tuple[EntryKey, ...] = ()
    """Entries that were given up for good."""
    failure: InvalidMessage | None = None
    """More are incomplete than can be kept, and none may be given up."""


@dataclass(slots=True)
class _Pending:
    total: int
    size: int
    since_ms: int
    keys: list[EntryKey] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    received: int = 0

    def takes(self, index: int, size: int) -> bool:
        """Whether the piece of that index and size is the next one."""
        return index == len(self.keys) and self.received + size <= self.size


class ChunkAssembly:
    """The incomplete messages of one segment consumer."""

    __slots__ = (
        "_complete",
        "_expire_after_ms",
        "_held",
        "_in_order",
        "_max_bytes",
        "_max_pending",
        "_max_size",
        "_pending",
    )

    def __init__(
        self,
        max_pending: int,
        expire_after_ms: int,
        max_size: int,
        *,
        max_bytes: int,
        in_order: bool = False,
    ) -> None:
        """`expire_after_ms` 0: never.  Bytes: `max_size` of a message, `max_bytes` of all."""
        self._in_order = in_order
        self._max_pending = max(max_pending, ORDERED_CHUNKED_MESSAGES) if in_order else max_pending
        self._complete: dict[EntryKey, EntryKey] = {}
        """In order: the first entry of those that are complete and not passed, by the last one."""
        self._expire_after_ms = expire_after_ms
        self._max_size = max_size
        self._max_bytes = max_bytes
        self._held = 0
        """Bytes of incomplete messages."""
        self._pending: OrderedDict[str, _Pending] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, key: EntryKey, metadata: MessageMetadata, piece: bytes, now_ms: int) -> Assembled:
        """Take a piece in."""
        too_old = self._expired(now_ms)
        again: tuple[EntryKey, ...] = ()
        pending = self._pending.get(metadata.uuid)
        if pending is not None and key in pending.keys:
            return Assembled(too_old=too_old)
        if self._in_order and (failure := self._too_much(metadata, len(piece))) is not None:
            return Assembled(too_old=too_old, failure=failure)
        if metadata.chunk_id == 0:
            if pending is not None:
                again = self._give_up(metadata.uuid)
            elif len(self._pending) >= self._max_pending:
                again = self._give_up(next(iter(self._pending)))
            pending = self._begin(metadata, now_ms)
        if pending is None or not pending.takes(metadata.chunk_id, len(piece)):
            again += self._give_up(metadata.uuid)
            if self._is_too_old(metadata.publish_time, now_ms):
                too_old += (key,)
            else:
                again += (key,)
            return Assembled(again=again, too_old=too_old)
        while len(self._pending) > 1 and self._held + len(piece) > self._max_bytes:
            again += self._give_up(next(each for each in self._pending if each != metadata.uuid))
        pending.keys.append(key)
        pending.pieces.append(piece)
        pending.received += len(piece)
        self._held += len(piece)
        if len(pending.keys) < pending.total:
            return Assembled(again=again, too_old=too_old)
        self._give_up(metadata.uuid)
        if pending.received != pending.size:
            return Assembled(again=(*again, *pending.keys), too_old=too_old)
        if self._in_order:
            self.waits(pending.keys)
        return Assembled(b"".join(pending.pieces), tuple(pending.keys), again, too_old)

    def clear(self) -> None:
        """It is delivered again: forget it.  Who reads in order keeps what it has."""
        if not self._in_order:
            self._pending.clear()
            self._held = 0

    def waits(self, keys: Sequence[EntryKey]) -> None:
        """In order: a complete message of these entries is not acknowledged, or not handed out."""
        self._complete[keys[-1]] = keys[0]

    def passed(self, key: EntryKey) -> None:
        """In order: everything up to this entry is acknowledged, or handed out."""
        for last in [each for each in self._complete if each <= key]:
            del self._complete[last]

    def open_across(self, key: EntryKey) -> EntryKey | None:
        """In order: the first entry of messages that begin before an entry and end behind it."""
        firsts = [each.keys[0] for each in self._pending.values() if each.keys]
        firsts += [first for last, first in self._complete.items() if last > key]
        return min((first for first in firsts if first <= key), default=None)

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are incomplete."""
        return self._held

    def _too_much(self, metadata: MessageMetadata, size: int) -> InvalidMessage | None:
        """In order: why a piece cannot be kept beside the others."""
        known = metadata.uuid in self._pending
        if not known and metadata.chunk_id:
            return None
        if not known and len(self._pending) >= self._max_pending:
            return _too_many(self._max_pending)
        others = len(self._pending) - known
        if others and self._held + size > self._max_bytes:
            return _too_large(self._max_bytes)
        return None

    def _begin(self, metadata: MessageMetadata, now_ms: int) -> _Pending | None:
        size = metadata.total_chunk_msg_size
        if not 0 <= size <= self._max_size:
            return None
        pending = _Pending(metadata.num_chunks_from_msg, size, now_ms)
        self._pending[metadata.uuid] = pending
        return pending

    def _expired(self, now_ms: int) -> tuple[EntryKey, ...]:
        gone: tuple[EntryKey, ...] = ()
        while self._pending:
            uuid, oldest = next(iter(self._pending.items()))
            if not self._is_too_old(oldest.since_ms, now_ms):
                break
            gone += self._give_up(uuid)
        return gone

    def _is_too_old(self, since_ms: int, now_ms: int) -> bool:
        return 0 < self._expire_after_ms < now_ms - since_ms

    def _give_up(self, uuid: str) -> tuple[EntryKey, ...]:
        pending = self._pending.pop(uuid, None)
        if pending is None:
            return ()
        self._held -= pending.received
        return tuple(pending.keys)


def _too_many(limit: int) -> InvalidMessage:
    return InvalidMessage(
        f"More than {limit} messages in pieces are incomplete, and reading in order none of them "
        "can be left out; look for producers that end in the middle of messages, or give "
        "max_pending_chunked_messages a larger number."
    )


def _too_large(limit: int) -> InvalidMessage:
    return InvalidMessage(
        f"Messages in pieces of more than {limit} bytes are incomplete, and reading in order none "
        "of them can be left out; look for producers that end in the middle of messages, or give "
        "max_pending_chunked_bytes a larger number."
    )
