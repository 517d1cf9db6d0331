"""A number of 64 bits that stands for what is stored of a row: its key and its value.

Pure.  Rules: XXH3 of the value, seeded by that of the key as text in UTF-8 (a key of bytes: as the
base64 that is stored); a row without key has seed 0, a row without value the hash of no bytes under
a seed that is one higher.  Sums of such numbers, modulo 2^64, do not depend on the order of the
rows, so that parts of a segment can be counted apart.
"""

from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64_intdigest

__all__ = ["hash_sum", "row_hash"]

_MASK: Final = (1 << 64) - 1


def row_hash(key: bytes | None, value: bytes | memoryview | None) -> int:
    """Of one row, as it is stored."""
    seed = 0 if key is None else xxh3_64_intdigest(key)
    if value is None:
        return xxh3_64_intdigest(b"", (seed + 1) & _MASK)
    return xxh3_64_intdigest(value, seed)


def hash_sum(hashes: Iterable[int]) -> int:
    """Of many rows."""
    return sum(hashes) & _MASK
