"""Pure: acknowledged entries after the mark-delete position, and acknowledged bits of batches."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from magnetar.protocol.ids import Position

BLOCK = 1024
_BLOCK_BYTES = BLOCK // 8
_BLOCK_WORDS = BLOCK // 64
_FULL = (1 << BLOCK) - 1
_EMPTY_BLOCK = bytes(_BLOCK_BYTES)


class AckRanges:
    """A set of positions.

    `words` and `add_words` use the words of `java.util.BitSet`: signed 64-bit, lowest first,
    trailing zero words left out.
    """

    __slots__ = ("_ledgers", "count")

    def __init__(self) -> None:
        # Blocks of BLOCK bits by ledger and block number.  So an acknowledgement costs the same in
        # any order, a long run is skipped block by block, and memory follows the spread of the
        # entries, not their number.
        self._ledgers: dict[int, dict[int, int]] = {}
        self.count = 0
        """Number of positions in the set."""

    def __contains__(self, position: Position) -> bool:
        blocks = self._ledgers.get(position.ledger_id)
        if blocks is None:
            return False
        index, bit = divmod(position.entry_id, BLOCK)
        return bool(blocks.get(index, 0) >> bit & 1)

    def add(self, position: Position) -> bool:
        """Add one position; False if it was in the set."""
        blocks = self._ledgers.get(position.ledger_id)
        if blocks is None:
            blocks = self._ledgers[position.ledger_id] = {}
        index, bit = divmod(position.entry_id, BLOCK)
        old = blocks.get(index, 0)
        new = old | 1 << bit
        if new == old:
            return False
        blocks[index] = new
        self.count += 1
        return True

    def add_range(self, ledger_id: int, first: int, last: int) -> None:
        """Add entries first..last inclusive."""
        if first > last:
            return
        blocks = self._ledgers.setdefault(ledger_id, {})
        for index, mask in _masks(first, last):
            old = blocks.get(index, 0)
            blocks[index] = old | mask
            self.count += (mask & ~old).bit_count()

    def discard_range(self, ledger_id: int, first: int, last: int) -> None:
        """Remove entries first..last inclusive, as far as they are in the set."""
        blocks = self._ledgers.get(ledger_id)
        if blocks is None or first > last:
            return
        for index, mask in _masks(first, last):
            self._keep(blocks, index, ~mask)
        if not blocks:
            del self._ledgers[ledger_id]

    def discard_up_to(self, position: Position) -> None:
        """Remove all positions at or before `position`."""
        ledger_id, entry_id = position
        for earlier in [ledger for ledger in self._ledgers if ledger < ledger_id]:
            self.count -= sum(bits.bit_count() for bits in self._ledgers.pop(earlier).values())
        blocks = self._ledgers.get(ledger_id)
        if blocks is None or entry_id < 0:
            return
        last_block, bit = divmod(entry_id, BLOCK)
        for index in [index for index in blocks if index <= last_block]:
            self._keep(blocks, index, _FULL << (bit + 1) if index == last_block else 0)
        if not blocks:
            del self._ledgers[ledger_id]

    def clear(self) -> None:
        """Remove all positions."""
        self._ledgers.clear()
        self.count = 0

    def _keep(self, blocks: dict[int, int], index: int, mask: int) -> None:
        old = blocks.get(index)
        if old is None:
            return
        new = old & mask
        self.count -= old.bit_count() - new.bit_count()
        if new:
            blocks[index] = new
        else:
            del blocks[index]

    def run_end(self, position: Position) -> int | None:
        """Last entry id of the run of acknowledged entries that `position` is in, or None."""
        blocks = self._ledgers.get(position.ledger_id)
        if blocks is None:
            return None
        index, bit = divmod(position.entry_id, BLOCK)
        ones = _trailing_ones(blocks.get(index, 0) >> bit)
        if ones == 0:
            return None
        end = position.entry_id + ones
        while ones == BLOCK - bit:
            index, bit = index + 1, 0
            ones = _trailing_ones(blocks.get(index, 0))
            end += ones
        return end - 1

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Runs as (ledger id, first, last), ascending."""
        for ledger_id in sorted(self._ledgers):
            blocks = self._ledgers[ledger_id]
            done = -1
            for index in sorted(blocks):
                bits = blocks[index]
                base = index * BLOCK
                while bits:
                    zeros = (bits & -bits).bit_length() - 1
                    first = base + zeros
                    if first <= done:
                        bits &= -1 << (done + 1 - base) if done < base + BLOCK else 0
                        continue
                    end = self.run_end(Position(ledger_id, first))
                    done = first if end is None else end
                    yield ledger_id, first, done

    def run_count(self) -> int:
        """Number of runs that `ranges` would give."""
        total = 0
        for blocks in self._ledgers.values():
            for index, bits in blocks.items():
                carry = blocks.get(index - 1, 0) >> (BLOCK - 1)
                total += (bits & ~(bits << 1 | carry)).bit_count()
        return total

    def word_count(self) -> int:
        """About the number of words that `words` would give."""
        return sum((max(blocks) + 1) * _BLOCK_WORDS for blocks in self._ledgers.values())

    def words(self) -> dict[int, tuple[int, ...]]:
        """For each ledger the words of its bit set, from entry 0 on."""
        found: dict[int, tuple[int, ...]] = {}
        for ledger_id in sorted(self._ledgers):
            blocks = self._ledgers[ledger_id]
            data = b"".join(
                blocks[index].to_bytes(_BLOCK_BYTES, "little") if index in blocks else _EMPTY_BLOCK
                for index in range(max(blocks) + 1)
            )
            found[ledger_id] = _words_of(data)
        return found

    def add_words(self, ledger_id: int, words: Sequence[int], entries: int) -> None:
        """Add the set bits of `words` that stand for the first `entries` entries of a ledger."""
        data = struct.pack(f"<{len(words)}q", *words)
        for start in range(0, len(data), _BLOCK_BYTES):
            base = start * 8
            if base >= entries:
                return
            bits = int.from_bytes(data[start : start + _BLOCK_BYTES], "little")
            bits &= (1 << min(BLOCK, entries - base)) - 1
            if bits:
                blocks = self._ledgers.setdefault(ledger_id, {})
                old = blocks.get(base // BLOCK, 0)
                blocks[base // BLOCK] = old | bits
                self.count += (bits & ~old).bit_count()


def _masks(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Block indexes and the bits in them that stand for entries first..last."""
    first_block, first_bit = divmod(first, BLOCK)
    last_block, last_bit = divmod(last, BLOCK)
    for index in range(first_block, last_block + 1):
        mask = _FULL
        if index == last_block:
            mask = (1 << (last_bit + 1)) - 1
        if index == first_block:
            mask &= _FULL << first_bit
        yield index, mask & _FULL


def _trailing_ones(bits: int) -> int:
    return (bits ^ (bits + 1)).bit_length() - 1


def _words_of(data: bytes) -> tuple[int, ...]:
    used = (len(data.rstrip(b"\0")) + 7) // 8
    return struct.unpack_from(f"<{used}q", data)


class BatchBits:
    """Partly acknowledged batches, with the bits of their remaining messages.

    Bits are those of `magnetar.protocol.ack_set`: a set bit is *not* acknowledged.
    """

    __slots__ = ("_remaining",)

    def __init__(self, remaining: Mapping[Position, int] | None = None) -> None:
        self._remaining: dict[Position, int] = dict(remaining or {})

    def __len__(self) -> int:
        return len(self._remaining)

    def items(self) -> Iterable[tuple[Position, int]]:
        """Positions and the bits that remain in each."""
        return self._remaining.items()

    def get(self, position: Position) -> int | None:
        """Remaining bits of a partly acknowledged batch."""
        return self._remaining.get(position)

    def narrow(self, position: Position, ack_set: int) -> int:
        """Keep only the bits that are in `ack_set` too, and return them; 0 forgets the batch."""
        remaining = self._remaining.get(position)
        remaining = ack_set if remaining is None else remaining & ack_set
        if remaining:
            self._remaining[position] = remaining
        else:
            self._remaining.pop(position, None)
        return remaining

    def discard(self, position: Position) -> None:
        """Forget one batch."""
        self._remaining.pop(position, None)

    def discard_up_to(self, position: Position) -> None:
        """Forget every batch at or before `position`."""
        for passed in [at for at in self._remaining if at <= position]:
            del self._remaining[passed]

    def clear(self) -> None:
        """Forget all."""
        self._remaining.clear()
