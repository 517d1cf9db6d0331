"""The CRC32C (Castagnoli) of entries, and the two magics with which an entry may begin.

A stored entry always begins with `0x0e01, crc32c`; the checksum covers the bytes after it: metadata
size, metadata and payload.
"""

from collections.abc import Callable
from typing import Final

import google_crc32c

crc32c: Final[Callable[[bytes], int]] = google_crc32c.value

CHECKSUM_MAGIC: Final = b"\x0e\x01"
BROKER_METADATA_MAGIC: Final = b"\x0e\x02"
CHECKED_FROM: Final = 6
"""The offset in an entry of the first byte that its checksum covers."""


def seal_entry(checked: bytes) -> bytes:
    """The entry with this checksummed part: magic and CRC32C, then `checked`."""
    return b"".join((CHECKSUM_MAGIC, crc32c(checked).to_bytes(4, "big"), checked))


def uses_compiled_checksum() -> bool:
    """Whether the CRC32C is compiled code; the pure Python code is 1,000 times slower."""
    return str(google_crc32c.implementation) == "c"
