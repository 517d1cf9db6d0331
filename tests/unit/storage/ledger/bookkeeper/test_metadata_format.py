"""Records of ledgers and bookies: the bytes that BookKeeper's own client writes, and its places."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ledger.bookkeeper import ledger_metadata_pb2 as pb
from storage.ledger.bookkeeper.ledger_metadata import (
    BookieId,
    DigestType,
    Ensemble,
    LedgerMetadata,
    LedgerState,
)
from storage.ledger.bookkeeper.metadata_format import (
    LedgerPaths,
    UnreadableRecord,
    check_layout,
    decode_bookie,
    decode_metadata,
    decode_racks,
    encode_metadata,
    is_level,
    long_ledger_id,
    number_of,
    parse_address,
)
from storage.ledger.bookkeeper.metadata_store import BookieAddress
from storage.ledger.store import LedgerError

BOOKIES = tuple(BookieId(f"127.0.0.1:{port}") for port in (7181, 7182, 7183))
FRESH = LedgerMetadata(
    ensemble_size=3,
    write_quorum=2,
    ack_quorum=2,
    ensembles=(Ensemble(0, BOOKIES),),
    digest_type=DigestType.CRC32C,
    password=b"secret",
    creator_token=0,
)
FRESH_BODY = b"".join(
    [
        b"\x08\x02\x10\x03\x18\x00",
        b"\x20" + b"\xff" * 9 + b"\x01",
        b"\x28\x01",
        b"\x32\x32",
        *(b"\x0a\x0e" + bookie.encode() for bookie in BOOKIES),
        b"\x10\x00",
        b"\x38\x03",
        b"\x42\x06secret",
        b"\x48\x02",
        b"\x60\x00",
    ]
)
PREFIX = b"BookieMetadataFormatVersion\t3\n"


def record(body: bytes) -> bytes:
    assert len(body) < 128
    return PREFIX + bytes([len(body)]) + body


def changed(**fields: object) -> bytes:
    """A fresh record in which fields of the message are set, or cleared by None."""
    message = pb.LedgerMetadataFormat.FromString(FRESH_BODY)
    for name, value in fields.items():
        message.ClearField(name)
        if value is not None:
            setattr(message, name, value)
    return record(message.SerializePartialToString())


def test_a_fresh_record_is_byte_for_byte_that_of_java() -> None:
    value = encode_metadata(FRESH)
    assert value == record(FRESH_BODY)
    assert len(value) == 30 + 1 + 85
    assert decode_metadata(value, 1) == FRESH


def test_the_password_is_written_even_when_empty_and_the_token_only_when_there_is_one() -> None:
    value = encode_metadata(replace(FRESH, password=b"", creator_token=None))
    assert value == record(FRESH_BODY.replace(b"\x42\x06secret", b"\x42\x00")[:-2])
    assert decode_metadata(value, 1).creator_token is None


def test_a_closed_record_carries_its_end() -> None:
    closed = replace(
        FRESH,
        state=LedgerState.CLOSED,
        last_entry_id=-1,
        length=0,
        ctime_ms=1_700_000_000_000,
        custom={"application": b"pulsar", "component": b"managed-ledger"},
        ensembles=(Ensemble(0, BOOKIES), Ensemble(7, BOOKIES[::-1])),
    )
    assert decode_metadata(encode_metadata(closed), 1) == closed
    ended = replace(closed, last_entry_id=9, length=1000)
    assert decode_metadata(encode_metadata(ended), 1) == ended


def test_an_end_before_the_close_means_nothing() -> None:
    value = changed(length=5, lastEntryId=3, state=pb.LedgerMetadataFormat.IN_RECOVERY)
    found = decode_metadata(value, 1)
    assert (found.state, found.last_entry_id, found.length) == (LedgerState.IN_RECOVERY, -1, 0)
    assert decode_metadata(changed(lastEntryId=None), 1).last_entry_id == -1


def test_without_ack_quorum_it_is_the_write_quorum() -> None:
    assert decode_metadata(changed(ackQuorumSize=None, quorumSize=3), 1).ack_quorum == 3


def test_unknown_fields_are_kept() -> None:
    extra = b"\xa2\x06\x03new" + b"\xa8\x06\x05"
    found = decode_metadata(record(FRESH_BODY + extra), 1)
    assert found.unknown == extra
    assert replace(found, unknown=b"") == FRESH
    rewritten = encode_metadata(replace(found, state=LedgerState.IN_RECOVERY))
    assert rewritten.endswith(extra)
    assert decode_metadata(rewritten, 1).unknown == extra


@pytest.mark.parametrize("version", [1, 2])
def test_old_formats_are_refused_with_what_to_do(version: int) -> None:
    with pytest.raises(UnreadableRecord, match=f"format {version}.* copy that ledger"):
        decode_metadata(b"BookieMetadataFormatVersion\t%d\nquorumSize: 2\n" % version, 12)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        PREFIX,
        PREFIX + b"\xff" * 5,
        PREFIX + b"\x00",
        b"BookieMetadataFormatVersion\t4\n\x00",
        record(FRESH_BODY)[:-1],
        changed(quorumSize=None),
        changed(digestType=None),
        changed(password=None),
        changed(state=None),
        changed(quorumSize=4),
        changed(ensembleSize=4),
        changed(ackQuorumSize=0),
        changed(ackQuorumSize=3),
        changed(state=pb.LedgerMetadataFormat.CLOSED, lastEntryId=None),
        changed(state=pb.LedgerMetadataFormat.CLOSED, lastEntryId=-2),
        record(FRESH_BODY.replace(b"\x28\x01", b"\x28\x04")),
        record(FRESH_BODY.replace(b"\x38\x03", b"\x38\x05")),
        record(FRESH_BODY.replace(b"\x10\x00", b"\x10\x01")),
    ],
)
def test_unreadable_ledger_metadata_is_refused(value: bytes) -> None:
    with pytest.raises(UnreadableRecord, match="ledger 12 "):
        decode_metadata(value, 12)


@given(st.integers(0, len(PREFIX + FRESH_BODY)), st.integers(0, 255))
def test_a_damaged_record_is_refused_or_read_never_worse(place: int, byte: int) -> None:
    value = bytearray(record(FRESH_BODY))
    value[place] = byte
    try:
        decode_metadata(bytes(value), 1)
    except LedgerError:
        pass


def test_a_long_record_has_a_long_length() -> None:
    long = replace(FRESH, custom={"pulsar/managed-ledger": bytes(20_000)})
    value = encode_metadata(long)
    assert value[30:33] != bytes(3)
    assert decode_metadata(value, 1) == long


# Bookies


def service_info(**fields: object) -> bytes:
    endpoint = {"id": "bookie", "port": 3182, "host": "10.0.0.1", "protocol": "bookie-rpc"}
    other = pb.BookieServiceInfoFormat.Endpoint(id="http", port=8000, host="x", protocol="http")
    bookie = pb.BookieServiceInfoFormat.Endpoint(**(endpoint | fields))  # type: ignore[arg-type]
    info = pb.BookieServiceInfoFormat(endpoints=[other, bookie], properties={"a": "b"})
    return info.SerializeToString()


def test_the_address_of_a_bookie_is_in_its_record() -> None:
    assert service_info().startswith(b"\x32")
    assert decode_bookie(BookieId("left"), service_info()) == BookieAddress("10.0.0.1", 3182)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff\xff",
        service_info(id="other"),
        service_info(protocol="http"),
        service_info(host=""),
        service_info(port=0),
        service_info(port=70_000),
    ],
)
def test_address_without_a_record_is_taken_from_the_bookie_id(value: bytes) -> None:
    assert decode_bookie(BookieId("b:3181"), value) == BookieAddress("b", 3181)
    assert decode_bookie(BookieId("left"), value) is None


@pytest.mark.parametrize(
    ("bookie", "address"),
    [
        ("127.0.0.1:3181", BookieAddress("127.0.0.1", 3181)),
        ("[::1]:3181", BookieAddress("::1", 3181)),
        ("bookie-0.bookies:1", BookieAddress("bookie-0.bookies", 1)),
        ("bookie", None),
        (":3181", None),
        ("b:", None),
        ("b:0", None),
        ("b:65536", None),
        ("b:x", None),
        ("::1:3181", None),
    ],
)
def test_addresses_in_ids(bookie: str, address: BookieAddress | None) -> None:
    assert parse_address(BookieId(bookie)) == address


def test_racks() -> None:
    value = b"""{"default": {"a:1": {"rack": "/r1", "hostname": "a"}, "c:1": {"hostname": "c"}},
        "other": {"b:1": {"rack": "/r2"}}}"""
    assert decode_racks(value) == {"a:1": "/r1", "b:1": "/r2"}
    assert decode_racks(b"") == {}


@pytest.mark.parametrize("value", [b"{", b"[]", b'{"a": 1}', b'{"a": {"b": 1}}', b"\xff"])
def test_racks_of_another_form_are_refused(value: bytes) -> None:
    with pytest.raises(UnreadableRecord, match="set-bookie-rack"):
        decode_racks(value)


# Places

PATHS = LedgerPaths()


@pytest.mark.parametrize(
    ("ledger_id", "path"),
    [
        (0, "/ledgers/00/0000/L0000"),
        (1_200_030_004, "/ledgers/12/0003/L0004"),
        (2**31 - 2, "/ledgers/21/4748/L3646"),
        (2**31 - 1, "/ledgers/000/0000/0021/4748/L3647"),
        (2**63 - 1, "/ledgers/922/3372/0368/5477/L5807"),
    ],
)
def test_places_of_ledgers(ledger_id: int, path: str) -> None:
    assert PATHS.ledger(ledger_id) == path
    assert PATHS.ledger_id(path) == ledger_id
    elsewhere = LedgerPaths("/a/b/")
    assert elsewhere.ledger(ledger_id) == path.replace("/ledgers", "/a/b")
    assert elsewhere.ledger_id(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/ledgers",
        "/ledgers/idgen",
        "/ledgers/12/0003",
        "/ledgers/12/0003/L004",
        "/ledgers/12/0003/L00044",
        "/ledgers/12/0003/0004",
        "/ledgers/99/9999/L9999",
        "/ledgers/000/0000/0000/0000/L0001",
        "/ledgers/12/0003/L0004/x",
        "/ledgersx/12/0003/L0004",
    ],
)
def test_other_places_are_no_ledgers(path: str) -> None:
    assert PATHS.ledger_id(path) is None


@given(st.integers(0, 2**63 - 1))
def test_every_id_has_its_place(ledger_id: int) -> None:
    path = PATHS.ledger(ledger_id)
    assert PATHS.ledger_id(path) == ledger_id
    assert all(is_level(name) for name in path.split("/")[2:-1])


def test_parents_go_up_to_the_root() -> None:
    assert PATHS.parents("/ledgers/12/0003/L0004") == [
        "/ledgers/12/0003",
        "/ledgers/12",
        "/ledgers",
    ]
    assert PATHS.parents(PATHS.id_generator) == ["/ledgers"]
    with pytest.raises(ValueError, match="not below"):
        PATHS.parents("/other/12")


def test_levels_and_names_of_ids() -> None:
    assert [name for name in ("available", "idgen", "LAYOUT", "L0001", "1", "00") if is_level(name)]
    assert number_of("ID-0000000012") == 12
    assert number_of("HOB-0000000001") == 1
    assert [number_of(name) for name in ("ID-12", "ID--2147483648", "0000000012", "ID-x", "")] == [
        None
    ] * 5
    assert long_ledger_id(1, 5) == 2**32 + 5
    with pytest.raises(LedgerError):
        long_ledger_id(2**31, 0)


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1",
        b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1\n",
    ],
)
def test_the_default_layout_is_fine(value: bytes | None) -> None:
    check_layout(value)


@pytest.mark.parametrize(
    "value",
    [
        b"2\norg.apache.bookkeeper.meta.LongHierarchicalLedgerManagerFactory:1",
        b"2\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:2",
        b"1\norg.apache.bookkeeper.meta.HierarchicalLedgerManagerFactory:1",
        b"\xff",
    ],
)
def test_another_layout_is_refused(value: bytes) -> None:
    with pytest.raises(UnreadableRecord, match="layout"):
        check_layout(value)


def test_text_of_a_record_is_that_of_bookkeeper_without_the_password() -> None:
    first = Ensemble(0, (BookieId("a:3181"), BookieId("b:3181")))
    later = Ensemble(7, (BookieId("a:3181"), BookieId("c:3181")))
    record = LedgerMetadata(
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
        ensembles=(first, later),
        digest_type=DigestType.CRC32C,
        password=b"secret",
        custom={"application": b"pulsar"},
    )
    begin = "LedgerMetadata{ensembleSize=2, writeQuorumSize=2, ackQuorumSize=1, "
    end = (
        "digestType=CRC32C, password=OMITTED, "
        "ensembles={0=[a:3181, b:3181], 7=[a:3181, c:3181]}, "
        "customMetadata={application=cHVsc2Fy}}"
    )
    assert record.text == f"{begin}state=OPEN, {end}"
    closed = replace(record, state=LedgerState.CLOSED, last_entry_id=9, length=70)
    assert closed.text == f"{begin}state=CLOSED, length=70, lastEntryId=9, {end}"
