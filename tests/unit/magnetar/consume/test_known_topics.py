"""The topics of a namespace: snapshots, diffs, and the hash of what is known."""

import pytest

from magnetar.consume.known_topics import Change, KnownTopics, topics_hash

A, B, C = (f"topic://public/default/{name}" for name in "abc")


def test_a_snapshot_replaces_what_was_known() -> None:
    known = KnownTopics()
    assert known.hash is None
    assert known.replace([B, A]) == Change((A, B), ())
    assert known.replace([C, B]) == Change((C,), (A,))
    assert known.names == {B, C}


def test_diff_changes_known_topics_once() -> None:
    known = KnownTopics()
    known.replace([A])
    assert known.apply([B], [A]) == Change((B,), (A,))
    assert not known.apply([B], [A])


def test_topic_deleted_and_created_again_is_known() -> None:
    known = KnownTopics()
    known.replace([A])
    assert not known.apply([A], [A])
    assert known.names == {A}


@pytest.mark.parametrize(
    ("names", "expected"),
    [([], "00000000"), (["a"], "3043d0c1"), (["b", "a"], topics_hash(["a", "b"]))],
)
def test_the_hash_is_of_the_sorted_names(names: list[str], expected: str) -> None:
    assert topics_hash(names) == expected


def test_nothing_known_and_an_empty_namespace_have_different_hashes() -> None:
    known = KnownTopics()
    known.replace([])
    assert known.hash == "00000000"
