"""CRC32C (Castagnoli) of entries, and the two magics that may open one.

A stored entry always begins `0x0e01, crc32c`; the checksum covers what follows it: metadata size,
metadata, payload.
"""

from collections.abc import Callable
from typing import Final

import google_crc32c

crc32c: Final[Callable[[bytes], int]] = google_crc32c.value

CHECKSUM_MAGIC: Final = b"\x0e\x01"
BROKER_METADATA_MAGIC: Final = b"\x0e\x02"
CHECKED_FROM: Final = 6
"""Offset in an entry of the first byte that its checksum covers."""


def seal_entry(checked: bytes) -> bytes:
    """The entry whose checksummed part is `checked`: magic and CRC32C in front of it."""
    return b"".join((CHECKSUM_MAGIC, crc32c(checked).to_bytes(4, "big"), checked))


def uses_compiled_checksum() -> bool:
    """Whether the CRC32C comes from compiled code; the pure Python one is 1,000 times slower."""
    return str(google_crc32c.implementation) == "c"
