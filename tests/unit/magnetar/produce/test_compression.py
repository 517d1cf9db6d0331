"""Payloads come out as they went in, and never larger than was announced."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.bounds import MAX_UNCOMPRESSED_BYTES
from magnetar.compression import CompressionType, compress, decompress
from magnetar.errors import InvalidMessage

COMPRESSED = [kind for kind in CompressionType if kind is not CompressionType.NONE]


@given(st.sampled_from(CompressionType), st.binary(max_size=2000), st.integers(1, 50))
def test_decompressed_payload_equals_the_original(
    kind: CompressionType, data: bytes, times: int
) -> None:
    payload = data * times
    packed = compress(kind, payload)
    assert bytes(decompress(kind, packed, len(payload))) == payload
    assert bytes(decompress(kind, memoryview(packed), len(payload))) == payload


@pytest.mark.parametrize("kind", COMPRESSED)
def test_text_becomes_smaller(kind: CompressionType) -> None:
    assert len(compress(kind, b"the same again " * 1000)) < 2000


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("announced", [1, 999, 1001, 100_000])
def test_another_size_than_announced_is_damage(kind: CompressionType, announced: int) -> None:
    packed = compress(kind, random.Random(1).randbytes(1000))
    with pytest.raises(InvalidMessage, match=str(announced)):
        decompress(kind, packed, announced)


@pytest.mark.parametrize("kind", COMPRESSED)
def test_garbage_is_damage(kind: CompressionType) -> None:
    with pytest.raises(InvalidMessage):
        decompress(kind, b"\xff\xfe\xfd\xfc" * 10, 500)


def test_forms_are_those_of_other_clients() -> None:
    payload = b"abc" * 100
    assert zlib.decompress(compress(CompressionType.ZLIB, payload)) == payload
    assert bytes(decompress(CompressionType.ZLIB, zlib.compress(payload), 300)) == payload
    assert compress(CompressionType.ZSTD, payload)[:4] == b"\x28\xb5\x2f\xfd"
    assert compress(CompressionType.SNAPPY, payload)[:2] == b"\xac\x02"  # varint of 300
    assert compress(CompressionType.LZ4, b"") == b"\x00"


def test_a_bomb_is_not_unpacked() -> None:
    packed = compress(CompressionType.ZSTD, bytes(10_000_000))
    with pytest.raises(InvalidMessage):
        decompress(CompressionType.ZSTD, packed, 1000)
    with pytest.raises(InvalidMessage, match="most"):
        decompress(CompressionType.ZSTD, packed, MAX_UNCOMPRESSED_BYTES + 1)


def test_an_unknown_way_is_said() -> None:
    with pytest.raises(InvalidMessage, match="99"):
        decompress(99, b"abc", 3)
