"""The messages that a compaction keeps: an external partition of key digests, in bounded memory.

Messages are numbered in the order of the topic.  Records of a digest, a number and a mark go to one
of COMPACTION_PARTS parts of a file by the digest; then one part after the other is compared.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from struct import Struct
from typing import BinaryIO, Final

from broker.topics.compaction.entries import Chunk, EntryMessages
from config.bounds import (
    COMPACTION_BUFFER_BYTES,
    COMPACTION_CHUNKED_MESSAGES,
    COMPACTION_PART_KEYS,
    COMPACTION_PARTS,
)

_RECORD: Final = Struct("<16sQ")
_DIGEST_BYTES: Final = 16
_PIECE_BYTES: Final = 1024 * _RECORD.size
_BITS: Final = 8


class NewestMessages:
    """Finds the newest message of each key, among messages that are added in order.

    `add` every entry, `spill` whenever `full`, then iterate `resolve` to its end; after that
    `kept_of` tells which messages of the entries are kept, asked in the same order.  `file` is
    empty, and belongs to this object; `salt` is random, so that digests cannot be made to collide.
    """

    def __init__(
        self, file: BinaryIO, salt: bytes, *, part_keys: int = COMPACTION_PART_KEYS
    ) -> None:
        """`part_keys` bounds the digests that are compared at once."""
        self._file = file
        self._salt = salt
        self._part_keys = part_keys
        self._buffers = [bytearray() for _ in range(COMPACTION_PARTS)]
        self._spans: list[list[tuple[int, int]]] = [[] for _ in range(COMPACTION_PARTS)]
        self._buffered = 0
        self._written = 0
        self._bits = bytearray()
        self._chunks: dict[str, list[int]] = {}
        self._earlier_chunks = array("Q")
        self._last_chunks = array("Q")
        self._asked = 0
        self.messages = 0
        """Number of messages added."""

    @property
    def full(self) -> bool:
        """Whether the records in memory are to be written."""
        return self._buffered >= COMPACTION_BUFFER_BYTES

    # Pass 1

    def add(self, entry: EntryMessages, *, hidden: bool) -> None:
        """Number the messages of the next entry; those of a `hidden` one are never kept."""
        first = self.messages
        self.messages += entry.count
        missing = (self.messages + _BITS - 1) // _BITS - len(self._bits)
        self._bits.extend(bytes(missing))
        if hidden:
            return
        if entry.kept:
            self._keep_all(range(first, self.messages))
        if entry.chunk is not None:
            self._add_chunk(first, entry.chunk)
        for index, key, deletes in entry.keyed:
            digest = blake2b(key, digest_size=_DIGEST_BYTES, key=self._salt).digest()
            self._buffers[digest[0] % COMPACTION_PARTS] += _RECORD.pack(
                digest, (first + index) << 1 | deletes
            )
            self._buffered += _RECORD.size

    def _add_chunk(self, number: int, chunk: Chunk) -> None:
        earlier = self._chunks.setdefault(chunk.uuid, [])
        if not chunk.last:
            earlier.append(number)
            if len(self._chunks) > COMPACTION_CHUNKED_MESSAGES:
                self._keep_all(self._chunks.pop(next(iter(self._chunks))))
            return
        for each in self._chunks.pop(chunk.uuid):
            self._earlier_chunks.append(each)
            self._last_chunks.append(number)

    def spill(self) -> None:
        """Write the records in memory to the file.  May run on a thread, by itself."""
        for part, buffer in enumerate(self._buffers):
            if buffer:
                self._spans[part].append((self._written, len(buffer)))
                self._file.write(buffer)
                self._written += len(buffer)
                self._buffers[part] = bytearray()
        self._buffered = 0

    # Between the passes

    def resolve(self) -> Iterator[int]:
        """Compare the records; yields after each piece of work, with the bytes that it read."""
        for numbers in self._chunks.values():
            self._keep_all(numbers)
        self._chunks.clear()
        for part in range(COMPACTION_PARTS):
            pieces = self._spans[part]
            stored = sum(size for _, size in pieces) + len(self._buffers[part])
            rounds = -(-(stored // _RECORD.size) // self._part_keys)
            for turn in range(rounds):
                newest: dict[bytes, int] = {}
                for piece in self._pieces(part):
                    _take(newest, piece, turn, rounds)
                    yield len(piece)
                for some in _divided(newest.values()):
                    self._keep_all(value >> 1 for value in some if not value & 1)
                    yield 0
        for earlier, last in zip(self._earlier_chunks, self._last_chunks, strict=True):
            if self._is_kept(last):
                self._keep(earlier)

    def _pieces(self, part: int) -> Iterator[bytes]:
        """The records of a part in order, in pieces that take the loop less than a millisecond."""
        for start, size in self._spans[part]:
            for offset in range(0, size, _PIECE_BYTES):
                self._file.seek(start + offset)
                yield self._file.read(min(_PIECE_BYTES, size - offset))
        buffer = self._buffers[part]
        for offset in range(0, len(buffer), _PIECE_BYTES):
            yield bytes(buffer[offset : offset + _PIECE_BYTES])

    # Pass 2

    def kept_of(self, count: int) -> Sequence[int]:
        """The indexes of the kept messages of the next entry, which has `count` messages."""
        first = self._asked
        self._asked += count
        return [index for index in range(count) if self._is_kept(first + index)]

    def _keep_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._keep(number)

    def _keep(self, number: int) -> None:
        self._bits[number // _BITS] |= 1 << number % _BITS

    def _is_kept(self, number: int) -> bool:
        return bool(self._bits[number // _BITS] >> number % _BITS & 1)


def _take(newest: dict[bytes, int], piece: bytes, turn: int, rounds: int) -> None:
    """Note the records of a piece whose digests are compared in this turn."""
    if rounds == 1:
        newest.update(_RECORD.iter_unpack(piece))
        return
    newest.update(each for each in _RECORD.iter_unpack(piece) if each[0][1] % rounds == turn)


def _divided(values: Iterable[int], size: int = 1024) -> Iterator[Sequence[int]]:
    """The values in lists of `size`."""
    some: list[int] = []
    for value in values:
        some.append(value)
        if len(some) == size:
            yield some
            some = []
    yield some
