"""Headers survive the way through bytes, and no changed bit, place or file goes unnoticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ledger.local import codec
from storage.ledger.local.codec import FileHeader, LogFormatError

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.builds(FileHeader, U64, U64, U32, U64, U64), st.data())
def test_file_header(header: FileHeader, data: st.DataObject) -> None:
    encoded = codec.encode_file_header(header)
    assert len(encoded) == codec.FILE_HEADER_BYTES
    assert codec.decode_file_header(encoded + b"more") == header
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    with pytest.raises(LogFormatError):
        codec.decode_file_header(flipped(encoded, bit))
    with pytest.raises(LogFormatError):
        codec.decode_file_header(encoded[:-1])


@given(U64, U32, U32, U32, st.data())
def test_group_header(nonce: int, offset: int, body: int, count: int, data: st.DataObject) -> None:
    encoded = codec.encode_group_header(nonce, offset, body, count)
    assert codec.decode_group_header(encoded, nonce, offset) == (body, count)
    assert codec.decode_group_header(encoded, nonce ^ 1, offset) is None
    assert codec.decode_group_header(encoded, nonce, offset ^ 1) is None
    assert codec.decode_group_header(encoded[:-1], nonce, offset) is None
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    assert codec.decode_group_header(flipped(encoded, bit), nonce, offset) is None


@given(U64, I64, I64, U32, U32, st.data())
def test_record_header(
    nonce: int, ledger_id: int, entry_id: int, size: int, crc: int, data: st.DataObject
) -> None:
    seed = codec.record_seed(nonce)
    encoded = codec.encode_record_header(seed, ledger_id, entry_id, size, crc)
    assert len(encoded) == codec.RECORD_HEADER_BYTES
    assert codec.decode_record_header(encoded, seed) == (ledger_id, entry_id, size, crc)
    assert codec.decode_record_header(encoded, codec.record_seed(nonce ^ 1)) is None
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    assert codec.decode_record_header(flipped(encoded, bit), seed) is None


def test_a_group_inside_a_payload_is_not_found() -> None:
    """Somebody stores a log file in a ledger: its groups name other offsets and another nonce."""
    foreign = codec.encode_group_header(nonce=5, offset=100, body_bytes=0, records=0)
    data = bytes(100) + foreign + bytes(10) + codec.encode_group_header(6, 138, 0, 0)
    assert codec.find_group(data, 0, len(data), nonce=6) == 138
    assert codec.find_group(data, 0, 138, nonce=6) is None


def test_a_newer_version_is_named() -> None:
    encoded = bytearray(codec.encode_file_header(FileHeader(1, 2)))
    encoded[8] = 9
    body = bytes(encoded[:-4])
    with pytest.raises(LogFormatError, match="version 9"):
        codec.decode_file_header(body + codec.crc32c(body).to_bytes(4, "little"))
