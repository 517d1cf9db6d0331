"""Logs cut at every byte and with every byte changed: nothing is invented, nothing lost quietly."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.ledger.local import codec
from storage.ledger.local.codec import FileHeader
from storage.ledger.local.scan import LogScan, scan_log

Entry = tuple[int, int, bytes]
HEADER = FileHeader(number=3, nonce=0xABCDEF, previous=2, previous_end=99)
GROUPS: list[list[Entry]] = [
    [(1, 0, b"a"), (2, 0, b"bb" * 10)],
    [(1, 1, b""), (1, 2, b"c" * 40), (7, 0, b"d")],
    [(2, 1, b"e" * 5)],
    [(1, 3, b"f"), (2, 2, b"g" * 9)],
]


def build_log(groups: list[list[Entry]]) -> tuple[bytes, list[int]]:
    """A log file, and where each group ends."""
    data = codec.encode_file_header(HEADER)
    ends = []
    for group in groups:
        body = b"".join(
            codec.encode_record_header(HEADER.seed, ledger, entry, len(value), codec.crc32c(value))
            + value
            for ledger, entry, value in group
        )
        data += codec.encode_group_header(HEADER.nonce, len(data), len(body), len(group)) + body
        ends.append(len(data))
    return data, ends


def contents(data: bytes, scan: LogScan) -> dict[tuple[int, int], bytes | None]:
    """What reading through the index gives: None for what does not verify."""
    found: dict[tuple[int, int], bytes | None] = {}
    for run in scan.index.runs():
        for entry_id in range(run.first, run.last + 1):
            offset, size = run.place(entry_id)
            value = data[offset + codec.RECORD_HEADER_BYTES :][:size]
            header = codec.decode_record_header(data[offset:], codec.record_seed(scan.nonce))
            assert header is not None
            good = header.payload_crc == codec.crc32c(value) and len(value) == size
            found[run.ledger_id, entry_id] = value if good else None
    return found


def expected(groups: list[list[Entry]]) -> dict[tuple[int, int], bytes]:
    return {(ledger, entry): value for group in groups for ledger, entry, value in group}


ALL = expected(GROUPS)
ORDER = [(ledger, entry) for group in GROUPS for ledger, entry, _ in group]


def test_a_whole_log() -> None:
    data, _ = build_log(GROUPS)
    scan = scan_log(data)
    assert contents(data, scan) == ALL
    assert (scan.end, scan.tail_bytes, scan.damages) == (len(data), 0, [])
    assert scan.header == HEADER
    assert scan.last_group is not None
    assert [record[:2] for record in scan.last_group.records] == [(1, 3), (2, 2)]


def test_file_truncated_at_any_byte_keeps_its_whole_records() -> None:
    """A cut is a torn tail: whole groups stay, of the torn one the whole records before the cut."""
    data, ends = build_log(GROUPS)
    for cut in range(codec.FILE_HEADER_BYTES, len(data)):
        scan = scan_log(data[:cut])
        found = contents(data, scan)
        whole = sum(end <= cut for end in ends)
        assert list(expected(GROUPS[:whole]).items() - found.items()) == []
        assert sorted(found) == sorted(ORDER[: len(found)])
        assert len(found) <= len(expected(GROUPS[: whole + 1]))
        assert all(found[key] == ALL[key] for key in found)
        assert scan.damages == []
        assert scan.end + scan.tail_bytes == cut


def test_a_torn_file_header_is_no_log() -> None:
    data, _ = build_log(GROUPS)
    for cut in range(codec.FILE_HEADER_BYTES):
        scan = scan_log(data[:cut])
        assert (scan.index.records, scan.end, scan.unreadable) == (0, 0, False)


def test_file_truncated_before_the_proven_end_is_damaged() -> None:
    data, ends = build_log(GROUPS)
    for cut in range(codec.FILE_HEADER_BYTES, len(data)):
        scan = scan_log(data[:cut], proven_end=len(data))
        assert scan.damages, cut
        assert scan.end == len(data)
        found = contents(data, scan)
        whole = sum(end <= cut for end in ends)
        assert expected(GROUPS[:whole]).items() <= found.items()


def test_bytes_behind_the_proven_end_do_not_count() -> None:
    data, ends = build_log(GROUPS)
    scan = scan_log(data, proven_end=ends[1])
    assert contents(data, scan) == expected(GROUPS[:2])
    assert (scan.end, scan.tail_bytes, scan.damages) == (ends[1], len(data) - ends[1], [])
    assert scan.last_group is None


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_every_byte_changed(mask: int) -> None:
    """In a durable group a change is damage, loudly; in the last one it ends the log there."""
    data, ends = build_log(GROUPS)
    for at in range(codec.FILE_HEADER_BYTES, len(data)):
        changed = bytearray(data)
        changed[at] ^= mask
        broken = bytes(changed)
        scan = scan_log(broken)
        found = contents(broken, scan)
        assert all(value in (None, ALL[key]) for key, value in found.items())
        hit = next(number for number, end in enumerate(ends) if at < end)
        others = [group for number, group in enumerate(GROUPS) if number not in (hit, 3)]
        assert expected(others).items() <= found.items(), at
        if hit == len(GROUPS) - 1:
            assert scan.damages == []
            assert sorted(found) == sorted(ORDER[: len(found)])
            assert None not in found.values()
        else:
            assert scan.damages, at
            assert expected(GROUPS[3:]).items() <= found.items()
            assert scan.end == len(data)


def test_a_changed_payload_costs_only_its_own_entry() -> None:
    data, _ = build_log(GROUPS)
    at = data.index(b"c" * 40)
    broken = data[:at] + b"X" + data[at + 1 :]
    found = contents(broken, scan_log(broken))
    assert found == {**ALL, (1, 2): None}


def test_a_damaged_file_header_does_not_hide_the_entries() -> None:
    data, _ = build_log(GROUPS)
    broken = b"\0" * 8 + data[8:]
    scan = scan_log(broken)
    assert contents(broken, scan) == ALL
    assert scan.damages


def test_without_header_and_first_group_the_file_is_unreadable_not_empty() -> None:
    data, ends = build_log(GROUPS)
    broken = b"\0" * ends[0] + data[ends[0] :]
    scan = scan_log(broken)
    assert scan.unreadable
    assert scan.damages
    assert scan.index.records == 0


ENTRIES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=60)), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(ENTRIES, st.data())
def test_reordered_pages_of_the_last_group(
    groups: list[list[tuple[int, bytes]]], data: st.DataObject
) -> None:
    """Sectors of the group that was not synced may be missing in any order."""
    counters = {ledger: itertools.count() for ledger in range(4)}
    numbered = [[(ledger, next(counters[ledger]), value) for ledger, value in g] for g in groups]
    whole, ends = build_log(numbered)
    start = ends[-2] if len(ends) > 1 else codec.FILE_HEADER_BYTES
    torn = bytearray(whole)
    for sector in range(start, len(whole), 32):
        if data.draw(st.booleans()):
            torn[sector : sector + 32] = bytes(len(torn[sector : sector + 32]))
    broken = bytes(torn)
    scan = scan_log(broken)
    found = contents(broken, scan)
    order = [(ledger, entry) for group in numbered for ledger, entry, _ in group]
    assert sorted(found) == sorted(order[: len(found)])
    assert expected(numbered[:-1]).items() <= found.items() <= expected(numbered).items()
    assert scan.damages == []
