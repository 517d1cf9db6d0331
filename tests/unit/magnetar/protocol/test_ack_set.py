"""Ack sets against plain sets of indexes, and against java.util.BitSet's words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.protocol.ack_set import (
    MAX_BATCH_SIZE,
    from_words,
    is_pending,
    pending_all,
    to_words,
)
from magnetar.protocol.frame_error import MalformedBatch
from tests.unit.magnetar.protocol.strategies import i64

sizes = st.integers(1, 300)


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, set[int]]:
    size = draw(sizes)
    return size, draw(st.sets(st.integers(0, size - 1)))


def bits(indexes: set[int]) -> int:
    return sum(1 << index for index in indexes)


@pytest.mark.parametrize(
    ("pending", "words"),
    [
        (set(), []),
        ({0}, [1]),
        ({63}, [-(2**63)]),
        ({64}, [0, 1]),
        (set(range(64)), [-1]),
        (set(range(100)), [-1, 2**36 - 1]),
    ],
)
def test_known_words(pending: set[int], words: list[int]) -> None:
    assert to_words(bits(pending)) == words
    assert from_words(words, 128) == bits(pending)


@given(batches())
def test_words_keep_the_indexes(batch: tuple[int, set[int]]) -> None:
    size, indexes = batch
    pending = from_words(to_words(bits(indexes)), size)
    assert {index for index in range(size) if is_pending(pending, index)} == indexes


@given(st.lists(i64, max_size=8), sizes)
def test_bits_beyond_the_batch_do_not_count(words: list[int], size: int) -> None:
    pending = from_words(words, size)
    assert pending < 1 << size
    for index in range(size):
        word = words[index // 64] if index // 64 < len(words) else 0
        assert is_pending(pending, index) == bool(word >> index % 64 & 1)


@pytest.mark.parametrize("size", [0, -1, MAX_BATCH_SIZE + 1, 2**31 - 1])
def test_sizes_that_no_batch_has_make_no_bits(size: int) -> None:
    with pytest.raises(MalformedBatch):
        pending_all(size)
    with pytest.raises(MalformedBatch):
        from_words([1], size)


def test_indexes_outside_the_batch_are_not_pending() -> None:
    assert not is_pending(pending_all(3), -1)
    assert not is_pending(pending_all(3), 3)
