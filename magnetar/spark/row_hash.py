"""A number of 64 bits that stands for what is stored of a row: its key and its value.

Pure.  Sums of such numbers, modulo 2^64, do not depend on the order of the rows, so parts of a
segment can be counted apart.
"""

from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64_intdigest

__all__ = ["hash_sum", "row_hash"]

_MASK: Final = (1 << 64) - 1


def row_hash(key: bytes | None, value: bytes | memoryview | None) -> int:
    """The hash of one row, as it is stored: XXH3 of the value, seeded by the XXH3 of the key.

    A key is text in UTF-8; a key of bytes is the base64 that is stored.  Without a key the seed is
    0.  A row without a value has the hash of no bytes, under a seed that is one higher.
    """
    seed = 0 if key is None else xxh3_64_intdigest(key)
    if value is None:
        return xxh3_64_intdigest(b"", (seed + 1) & _MASK)
    return xxh3_64_intdigest(value, seed)


def hash_sum(hashes: Iterable[int]) -> int:
    """The sum of the hashes of many rows, modulo 2^64."""
    return sum(hashes) & _MASK
