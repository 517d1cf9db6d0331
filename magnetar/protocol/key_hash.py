"""Hashes of message keys: murmur3 (x86, 32 bit, seed 0), and the parts that Pulsar uses.

Clients choose the segment; a broker never checks it.  Clients after 5.0.0-M1 use the high half of
the hash for the segment and the low half for the bucket; those of 5.0.0-M1 choose differently.  Key
order over several segments holds within one generation of clients.
"""

from typing import Final

import mmh3

KEY_SPACE: Final = 65536
"""The number of hashes that segments and Key_Shared ranges divide: 0 to 65535."""
HashRange = tuple[int, int]
"""The first and the last hash of a range, both included, from 0 to 65535."""


def key_hash(key: bytes) -> int:
    """The raw hash of a key, unsigned: 0 to 2^32 - 1."""
    return int(mmh3.hash(key, 0, signed=False))


def segment_hash_m1(key: bytes) -> int:
    """The hash by which clients of 5.0.0-M1 choose the segment: 0 to 65535."""
    return key_hash(key) & 0xFFFF


def segment_hash(key: bytes) -> int:
    """The hash by which clients after 5.0.0-M1 choose the segment: 0 to 65535."""
    return key_hash(key) >> 16


def sticky_hash(sticky_key: bytes) -> int:
    """The hash by which Key_Shared assigns keys to consumers: 1 to 65535."""
    # 0 means "no hash" in Pulsar's dispatcher, so such keys get 1.
    return key_hash(sticky_key) & 0xFFFF or 1


def coordinator_of_key(transaction_key: str, parallelism: int) -> int:
    """The number of the coordinator, of `parallelism`, that serves a transaction key."""
    return key_hash(transaction_key.encode()) % parallelism
