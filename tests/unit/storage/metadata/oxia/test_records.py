"""Records: notes, index keys that keep their order, requests that harm no server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata.keys import KeyFamilies, KeyFamily, exact_range, prefix_range
from storage.metadata.operations import Put, SequencePut
from storage.metadata.oxia import oxia_pb2 as pb
from storage.metadata.oxia.records import (
    Note,
    check_put,
    escape_index_key,
    found_record,
    put_request,
    read_note,
    write_note,
)
from storage.metadata.oxia.routing import version_of
from storage.metadata.store import IndexEntry, InvalidMetadataRequest

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
INDEX_KEYS = st.text(st.sampled_from(list("ab./-0\u00e9\U0001f600")), min_size=1, max_size=6)
ENTRIES = st.lists(st.builds(IndexEntry, TEXT, TEXT)).map(tuple)
NO_FAMILIES = KeyFamilies(())


@given(st.none() | TEXT, st.none() | TEXT, ENTRIES)
def test_a_note_is_read_as_written(
    partition: str | None, identity: str | None, indexes: tuple[IndexEntry, ...]
) -> None:
    note = Note("00ff-1a", partition, identity, indexes)
    assert read_note(write_note(note)) == note


@pytest.mark.parametrize(
    "text", ["", "a-client", "magnetar:1 {", "magnetar:1 []", 'magnetar:1 ["p", null, "i"]']
)
def test_other_texts_are_no_notes(text: str) -> None:
    assert read_note(text) is None


@given(INDEX_KEYS, INDEX_KEYS)
def test_index_keys_keep_their_order_without_slashes(one: str, other: str) -> None:
    first, second = escape_index_key(one), escape_index_key(other)
    assert "/" not in first
    assert (first.encode() < second.encode()) == (one.encode() < other.encode())


@given(INDEX_KEYS, INDEX_KEYS)
def test_ranges_of_index_keys_hold_what_they_held(key: str, bound: str) -> None:
    for lo, hi in (exact_range(bound), prefix_range(bound)):
        escaped = escape_index_key(lo) <= escape_index_key(key) < escape_index_key(hi)
        assert escaped == (lo <= key < hi)


def test_a_sequence_put_is_whole() -> None:
    request = put_request(SequencePut("/s/", b"v", "p", (), 0, 1), Note("me-1", "p"))
    assert (request.key, request.partition_key, list(request.sequence_key_delta)) == (
        "/s/",
        "p",
        [1],
    )
    assert not request.HasField("expected_version_id")


@pytest.mark.parametrize(
    "request_",
    [
        pb.PutRequest(key="/s/", sequence_key_delta=[1]),
        pb.PutRequest(key="/s/", sequence_key_delta=[1], partition_key=""),
        pb.PutRequest(key="/s/", sequence_key_delta=[0], partition_key="p"),
        pb.PutRequest(key="/s/", sequence_key_delta=[1, 1], partition_key="p"),
        pb.PutRequest(key="/s", sequence_key_delta=[1], partition_key="p"),
        pb.PutRequest(key="/s/", sequence_key_delta=[1], partition_key="p", expected_version_id=0),
        pb.PutRequest(key="/s/", sequence_key_delta=[1], partition_key="p", session_id=0),
        pb.PutRequest(key="/a", secondary_indexes=[pb.SecondaryIndex(index_name="i")]),
        pb.PutRequest(
            key="/a", secondary_indexes=[pb.SecondaryIndex(index_name="i", secondary_key="a\x01")]
        ),
        pb.PutRequest(
            key="/a", secondary_indexes=[pb.SecondaryIndex(index_name="i/j", secondary_key="a")]
        ),
    ],
)
def test_request_that_harms_a_server_is_refused(request_: pb.PutRequest) -> None:
    with pytest.raises(InvalidMetadataRequest):
        check_put(request_)


def test_zero_is_a_version_and_a_session() -> None:
    put = Put("/a", b"", None, None, None, (), 0, 1)
    request = put_request(put, Note("me-1"), expected=0, session_id=0)
    assert request.HasField("expected_version_id")
    assert request.HasField("session_id")
    assert not request.HasField("partition_key")


def test_stored_record_is_read_with_its_note() -> None:
    indexes = (IndexEntry("i", "a/b"),)
    version = pb.Version(
        version_id=0,
        modifications_count=2,
        created_timestamp=5,
        modified_timestamp=6,
        session_id=0,
        client_identity=write_note(Note("me-1", "p", "who", indexes)),
    )
    found = found_record("/a", b"v", version, 3, NO_FAMILIES)
    assert (found.put_id, found.indexes, found.version_id) == ("me-1", indexes, 0)
    record = found.record
    assert (record.partition, record.ephemeral, record.modifications) == ("p", True, 2)
    assert record.version == version_of(0, 3)


def test_records_of_others_are_explained_by_their_family() -> None:
    families = KeyFamilies(
        [
            KeyFamily(
                "/t/", lambda key, _: key[3:], lambda _, value: (IndexEntry("i", value.decode()),)
            )
        ]
    )
    version = pb.Version(version_id=1, client_identity="a-java-client")
    found = found_record("/t/7", b"v", version, 0, families)
    assert (found.record.partition, found.indexes) == ("7", (IndexEntry("i", "v"),))
    assert found.put_id is None
    plain = found_record("/u", b"v", pb.Version(version_id=1), 0, families)
    assert (plain.record.partition, plain.indexes) == (None, ())
