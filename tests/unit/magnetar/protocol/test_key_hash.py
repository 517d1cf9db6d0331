"""Key hashes: known values of both generations of clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.key_hash import (
    KEY_SPACE,
    key_hash,
    segment_hash,
    segment_hash_m1,
    sticky_hash,
)


@pytest.mark.parametrize(
    ("key", "later", "m1"),
    [
        (b"a", 0x3C25, 0x69B2),
        (b"b", 0x95DE, 0x7E03),
        (b"k3", 0x751E, 0xB87D),
        (b"k6", 0x327A, 0x5AB5),
        (b"k11", 0x2E0C, 0x1F58),
        (b"", 0, 0),
    ],
)
def test_known_values(key: bytes, later: int, m1: int) -> None:
    assert (segment_hash(key), segment_hash_m1(key)) == (later, m1)
    assert key_hash(key) == later << 16 | m1


def test_the_sticky_hash_is_never_0() -> None:
    assert sticky_hash(b"") == 1
    assert sticky_hash(b"a") == 0x69B2


@given(st.binary(max_size=50))
def test_ranges(key: bytes) -> None:
    assert 0 <= segment_hash(key) < KEY_SPACE
    assert 0 <= segment_hash_m1(key) < KEY_SPACE
    assert 1 <= sticky_hash(key) < KEY_SPACE
