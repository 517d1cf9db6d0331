"""Paths, numbers, escaping and key families."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.metadata import keys
from storage.metadata.keys import KeyFamilies, KeyFamily
from storage.metadata.operations import check_key
from storage.metadata.store import IndexEntry, InvalidMetadataRequest


def test_parts_of_a_path() -> None:
    assert keys.level_of("/a/b/c") == "/a/b/"
    assert keys.name_of("/a/b/c") == "c"


@given(st.text())
def test_any_text_becomes_one_part(text: str) -> None:
    part = keys.escape_part(text)
    check_key(f"/a/{part}")
    assert keys.level_of(f"/a/{part}") == "/a/"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "%"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("a.b", "a.b"),
        ("/", "%2F"),
        ("%2F", "%252F"),
        ("\x00", "%00"),
        ("\ud800", "%ED%A0%80"),
        (keys.LAST, "%F4%8F%BF%BF"),
        ("ü", "ü"),
    ],
)
def test_hard_texts(text: str, part: str) -> None:
    assert keys.escape_part(text) == part
    check_key(f"/{part}")


@given(st.text(), st.text())
def test_different_texts_make_different_parts(one: str, other: str) -> None:
    assert (keys.escape_part(one) == keys.escape_part(other)) == (one == other)


@given(st.integers(0, keys.MAX_NUMBER), st.integers(0, keys.MAX_NUMBER))
def test_numbers_are_ordered_as_text(one: int, other: int) -> None:
    assert (keys.number(one) < keys.number(other)) == (one < other)
    assert len(keys.number(one)) == 20
    assert keys.sequence_key("/a/", one) == f"/a/-{one:020d}"


@pytest.mark.parametrize("value", [-1, keys.MAX_NUMBER + 1])
def test_numbers_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(InvalidMetadataRequest):
        keys.number(value)


def partition_of(key: str, _value: bytes) -> str:
    return keys.name_of(key)


def indexes_of(_key: str, value: bytes) -> tuple[IndexEntry, ...]:
    return (IndexEntry("i", value.decode()),)


def test_the_longest_prefix_names_the_family() -> None:
    inner = KeyFamily("/txn/id/", partition=partition_of, indexes=indexes_of)
    outer = KeyFamily("/txn/", indexes=indexes_of)
    families = KeyFamilies([outer, inner])
    assert families.of("/txn/id/7") is inner
    assert families.of("/txn/id/7/below") is inner
    assert families.of("/txn/id") is outer
    assert families.of("/txn/other/x") is outer
    assert families.partition("/txn/id/7", b"v") == "7"
    assert families.indexes("/txn/id/7", b"v") == (IndexEntry("i", "v"),)
    assert families.partition("/elsewhere", b"v") is None
    assert families.indexes("/elsewhere", b"v") == ()


def test_families_are_declared_once_and_by_whole_parts() -> None:
    with pytest.raises(InvalidMetadataRequest):
        KeyFamilies([KeyFamily("/a/"), KeyFamily("/a/")])
    with pytest.raises(InvalidMetadataRequest):
        KeyFamilies([KeyFamily("/a")])
