"""The bytes of copies, and that nothing else is taken for one."""

import struct
from uuid import UUID

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ledger.bookkeeper import ledger_metadata_pb2 as pb
from storage.offload.context import (
    InvalidOffloadUrl,
    Location,
    OffloadContext,
    copy_of,
    data_key,
    index_key,
    parse_location,
)
from storage.offload.format import (
    BLOCK_HEAD_BYTES,
    Block,
    Checks,
    Index,
    MalformedCopy,
    check_block_head,
    decode_index,
    encode_block,
    encode_frame,
    encode_index,
    parse_entries,
)

UID = UUID("01234567-89ab-cdef-0123-456789abcdef")
ENTRIES = st.lists(st.binary(max_size=50), min_size=1, max_size=20)


def index_of(blocks: int, *, checked: bool = True) -> Index:
    return Index(
        entries=blocks * 3,
        entries_bytes=blocks * 30,
        data_bytes=blocks * 1000,
        blocks=tuple(
            Block(number * 3, number * 1000, number if checked else None)
            for number in range(blocks)
        ),
        checks=Checks(b"d" * 32, b"e" * 32) if checked else None,
        first_published_ms=17 if checked else None,
        last_published_ms=None,
        custom={"pulsar/managed-ledger": b"a/b/persistent/c"},
        created_ms=5,
    )


def test_the_bytes_are_those_of_the_layout() -> None:
    head, body = encode_block(7, [b"ab", b""])
    assert head[:28] == bytes.fromhex("fbdbabcb 0000000000000080 000000000000009a 0000000000000007")
    assert head[28:] == bytes(100)
    assert body == bytes.fromhex("00000002 0000000000000007 6162 00000000 0000000000000008")
    index = encode_index(index_of(2, checked=False))
    magic, length, data, header, blocks, metadata = struct.unpack_from(">IiqqiI", index)
    assert (magic, length, data, header, blocks) == (0xDE47DE47, len(index), 2000, 128, 2)
    assert index[32 + metadata :] == struct.pack(">qiqqiq", 0, 1, 0, 3, 2, 1000)


def test_the_metadata_in_an_index_are_what_pulsars_parsers_take() -> None:
    """They refuse a ledger without bookies, and one with fewer than its ensemble has."""
    index = encode_index(index_of(1))
    length = struct.unpack_from(">i", index, 28)[0]
    metadata = pb.LedgerMetadataFormat.FromString(index[32 : 32 + length])
    (ensemble,) = metadata.segment
    assert (ensemble.firstEntryId, len(ensemble.ensembleMember)) == (0, metadata.ensembleSize)
    assert (metadata.lastEntryId, metadata.length) == (2, 30)
    assert metadata.state == pb.LedgerMetadataFormat.CLOSED
    assert metadata.HasField("digestType")


@given(st.integers(1, 30), st.booleans())
def test_an_index_is_read_as_it_was_written(blocks: int, checked: bool) -> None:
    index = index_of(blocks, checked=checked)
    assert decode_index(encode_index(index)) == index


@given(st.integers(1, 5), st.data())
def test_no_changed_byte_of_an_index_goes_unseen(blocks: int, data: st.DataObject) -> None:
    whole = bytearray(encode_index(index_of(blocks)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MalformedCopy):
        decode_index(bytes(whole))


@given(st.integers(1, 5), st.data())
def test_no_part_of_an_index_is_taken_for_whole(blocks: int, data: st.DataObject) -> None:
    whole = encode_index(index_of(blocks))
    with pytest.raises(MalformedCopy):
        decode_index(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=200), st.booleans())
def test_anything_else_is_refused(junk: bytes, begins_well: bool) -> None:
    with pytest.raises(MalformedCopy):
        decode_index((b"\xde\x47\xde\x47" if begins_well else b"") + junk)


@given(ENTRIES, st.integers(0, 2**40), st.data())
def test_entries_are_parsed_as_far_as_they_are_there(
    entries: list[bytes], first: int, data: st.DataObject
) -> None:
    head, body = encode_block(first, entries)
    check_block_head(head, first, BLOCK_HEAD_BYTES + len(body))
    cut = data.draw(st.integers(0, len(body)))
    parsed = parse_entries(body[:cut], first)
    assert parsed.entries == entries[: len(parsed.entries)]
    assert not parsed.ended
    rest = parse_entries(body[parsed.used :], first + len(parsed.entries))
    assert parsed.entries + rest.entries == entries
    assert rest.used + parsed.used == len(body)


@given(ENTRIES, st.integers(1, 40))
def test_padding_and_the_next_block_end_it(entries: list[bytes], padding: int) -> None:
    _, body = encode_block(0, entries)
    filler = (b"\xfe\xdc\xde\xad" * 10)[:padding]
    parsed = parse_entries(body + filler, 0)
    assert (parsed.entries, parsed.used, parsed.ended) == (entries, len(body), padding >= 4)
    assert parse_entries(body + encode_block(9, [b"x"])[0], 0).ended


def test_an_entry_in_another_place_is_refused() -> None:
    body = encode_frame(3, b"abc") + b"abc"
    with pytest.raises(MalformedCopy, match="entry 3 is where entry 2 is due"):
        parse_entries(body, 2)
    with pytest.raises(MalformedCopy, match="no block"):
        check_block_head(encode_block(3, [b"abc"])[0], 2, 143)


def test_a_newer_version_is_refused_by_name() -> None:
    whole = encode_index(index_of(1)).replace(
        b"magnetar/offload-format\x12\x011", b"magnetar/offload-format\x12\x012"
    )
    body = whole[:-8]
    whole = body + b"MGTX" + google_crc32c.value(body).to_bytes(4, "big")
    with pytest.raises(MalformedCopy, match="newer release"):
        decode_index(whole)


def test_names_of_objects() -> None:
    assert data_key(UID, 12) == f"{UID}-ledger-12"
    assert index_key(UID, 12) == f"{UID}-ledger-12-index"
    assert copy_of(data_key(UID, 12)) == copy_of(index_key(UID, 12)) == (UID, 12)
    for other in ("README", f"{UID}-ledger-", f"{UID}-ledger-1-manifest", f"x{UID}-ledger-1"):
        assert copy_of(other) is None


@pytest.mark.parametrize(
    ("url", "location"),
    [
        ("s3://bucket", Location("s3", "bucket")),
        ("gs://bucket/a/b/", Location("gs", "bucket", "a/b")),
        ("az://box/a", Location("az", "box", "a")),
        ("/var/copies", Location("file", "/var/copies")),
        ("file:///var/a%20b", Location("file", "/var/a b")),
        ("/var/a%b c", Location("file", "/var/a%b c")),
    ],
)
def test_places(url: str, location: Location) -> None:
    found = parse_location(url)
    assert found == location
    assert parse_location(found.url) == found
    assert OffloadContext(UID, found.driver, found.properties).location == found


@pytest.mark.parametrize("url", ["", "copies", "/", "s3://", "ftp://host/x", "file://host/x"])
def test_places_that_are_none(url: str) -> None:
    with pytest.raises(InvalidOffloadUrl, match="write"):
        parse_location(url)


def test_pulsars_driver_metadata_are_understood_and_others_refused() -> None:
    location = Location("s3", "b", "", "eu-central-1", "http://localhost:1")
    assert location.properties == {
        "managedLedgerOffloadDriver": "AWS_S3",
        "bucket": "b",
        "region": "eu-central-1",
        "serviceEndpoint": "http://localhost:1",
    }
    assert OffloadContext(UID, "aws-s3", location.properties).location == location
    assert OffloadContext(UID, "S3", {"bucket": "b"}).location == Location("s3", "b")
    with pytest.raises(InvalidOffloadUrl, match="aliyun-oss"):
        _ = OffloadContext(UID, "aliyun-oss", {"bucket": "b"}).location
