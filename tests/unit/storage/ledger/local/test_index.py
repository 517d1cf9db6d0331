"""The index in memory and its file answer alike, and damage to the file is found."""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.ledger.local.codec import LogFormatError, crc32c
from storage.ledger.local.index import (
    FLAG_DAMAGED,
    INDEX_HEAD_BYTES,
    MAX_REPLACES,
    Index,
    MemoryIndex,
    Place,
    SealedIndex,
    decode_index_header,
    encode_index,
)

RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 500), st.integers(1, 5)), max_size=30)


def filled(runs: list[tuple[int, int, int]]) -> tuple[MemoryIndex, dict[tuple[int, int], Place]]:
    index = MemoryIndex()
    first_places: dict[tuple[int, int], Place] = {}
    offset = 64
    for ledger_id, first, count in runs:
        for entry_id in range(first, first + count):
            size = (ledger_id * 7 + entry_id) % 90
            index.add(ledger_id, entry_id, offset, size)
            first_places.setdefault((ledger_id, entry_id), Place(offset, size))
            offset += size + 28
    return index, first_places


def places(index: Index) -> dict[tuple[int, int], Place]:
    return {
        (run.ledger_id, entry_id): run.place(entry_id)
        for run in index.runs()
        for entry_id in range(run.first, run.last + 1)
    }


def encoded(index: MemoryIndex, replaces: tuple[int, ...] = ()) -> bytes:
    pieces = encode_index(index, number=4, nonce=2**64 - 1, covers=12345, replaces=replaces)
    return b"".join(pieces)


@given(RUNS)
@example([(0, 1, 1), (0, 0, 2)])
def test_both_forms_agree(runs: list[tuple[int, int, int]]) -> None:
    memory, wanted = filled(runs)
    data = encoded(memory, replaces=(1, 3))
    header = decode_index_header(data[:INDEX_HEAD_BYTES])
    sealed = SealedIndex(header, data)
    assert places(memory) == places(sealed) == wanted
    assert (header.number, header.nonce, header.covers) == (4, 2**64 - 1, 12345)
    assert (header.replaces, header.end, header.records) == ((1, 3), len(data), len(wanted))
    assert header.max_ledger == max((ledger for ledger, _ in wanted), default=-1)
    for ledger_id in range(-1, 11):
        mine = [run for run in sealed.runs() if run.ledger_id == ledger_id]
        assert [run.first for run in sealed.runs_of(ledger_id)] == [run.first for run in mine]
        assert sum(run.payload_bytes for run in memory.runs_of(ledger_id)) == sum(
            place.size for (ledger, _), place in wanted.items() if ledger == ledger_id
        )
    for (ledger_id, entry_id), place in wanted.items():
        assert memory.find(ledger_id, entry_id) == place


def test_every_changed_byte_is_found() -> None:
    data = encoded(filled([(1, 0, 3), (5, 9, 2), (1, 8, 1)])[0], replaces=(1, 2, 3))
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x10
        with pytest.raises(LogFormatError):
            SealedIndex(decode_index_header(bytes(changed)), bytes(changed))


def test_an_index_without_a_checksum_over_its_rows_is_read() -> None:
    """Version 1, as brokers before wrote it."""
    memory, wanted = filled([(1, 0, 3), (5, 9, 2)])
    data = encoded(memory, replaces=(2,))
    new = decode_index_header(data)
    head = struct.pack("<8sIIQQQQQqII", b"MGLEDIDX", 1, 0, 4, 2**64 - 1, 12345, 5, 1, 5, 2,
                       new.runs_crc)  # fmt: skip
    numbers = struct.pack("<Q", 2)
    old = head + struct.pack("<I", crc32c(head + numbers)) + numbers + data[new.runs_at :]
    header = decode_index_header(old[:INDEX_HEAD_BYTES])
    assert (header.rows_crc, header.replaces, header.end) == (None, (2,), len(old))
    assert places(SealedIndex(header, old)) == wanted


def test_truncated_index_is_detected() -> None:
    data = encoded(filled([(1, 0, 3), (5, 9, 2)])[0])
    for cut in range(len(data)):
        with pytest.raises(LogFormatError):
            SealedIndex(decode_index_header(data[:cut]), data[:cut])


def test_flags_and_bound_of_replaced_files() -> None:
    index = filled([(1, 0, 1)])[0]
    pieces = encode_index(index, number=1, nonce=1, covers=1, flags=FLAG_DAMAGED)
    assert decode_index_header(pieces[0]).flags == FLAG_DAMAGED
    with pytest.raises(ValueError, match="at most"):
        encode_index(index, number=1, nonce=1, covers=1, replaces=range(MAX_REPLACES + 1))
    full = b"".join(encode_index(index, number=1, nonce=1, covers=1, replaces=range(MAX_REPLACES)))
    assert decode_index_header(full[:INDEX_HEAD_BYTES]).replaces == tuple(range(MAX_REPLACES))
