"""Hashes of message keys: murmur3 (x86, 32 bit, seed 0) and what Pulsar takes of it.

Clients choose the segment, so a broker never checks it; two generations choose differently (after
5.0.0-M1 the high half of the hash is the segment's, the low half the bucket's), and key order over
several segments holds within one generation.
"""

from typing import Final

import mmh3

KEY_SPACE: Final = 65536
"""Hashes of the key space that segments and Key_Shared ranges divide: 0 to 65535."""
HashRange = tuple[int, int]
"""Both ends included, within 0 to 65535."""


def key_hash(key: bytes) -> int:
    """The raw hash of a key, unsigned: 0 to 2^32 - 1."""
    return int(mmh3.hash(key, 0, signed=False))


def segment_hash_m1(key: bytes) -> int:
    """Where 5.0.0-M1 clients place a key: 0 to 65535."""
    return key_hash(key) & 0xFFFF


def segment_hash(key: bytes) -> int:
    """Where clients after 5.0.0-M1 place a key: 0 to 65535."""
    return key_hash(key) >> 16


def sticky_hash(sticky_key: bytes) -> int:
    """The hash by which Key_Shared gives keys to consumers: 1 to 65535.

    0 stands for "no hash" in Pulsar's dispatcher, so the keys of 0 count as 1.
    """
    return key_hash(sticky_key) & 0xFFFF or 1


def coordinator_of_key(transaction_key: str, parallelism: int) -> int:
    """The coordinator that serves a transaction key, of `parallelism` many."""
    return key_hash(transaction_key.encode()) % parallelism
