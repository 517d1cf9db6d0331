"""Changes that are kept in memory: bounded, the newest of each key."""

from storage.metadata.group import Change, Stored
from storage.metadata.recent_changes import RecentChanges
from storage.metadata.store import Version


def change(key: str, version: int, value: bytes = b"v") -> Change:
    return Change(key, None, Stored(Version(version), 0, 1, 1, None, None, ()), value)


def test_the_newest_change_of_a_key_counts() -> None:
    recent = RecentChanges()
    recent.take([change("/a", 1), change("/b", 2)])
    newest = change("/a", 3)
    recent.take([newest])
    assert recent.find("/a") is newest
    assert recent.find("/c") is None
    assert len(recent) == 2


def test_a_deletion_is_known_as_such() -> None:
    recent = RecentChanges()
    before = change("/a", 1)
    recent.take([before])
    recent.take([Change("/a", before.after, None, b"")])
    found = recent.find("/a")
    assert found is not None
    assert found.record is None
    assert found.before is None, "the record before takes memory"


def test_oldest_change_is_dropped_first() -> None:
    recent = RecentChanges(max_keys=2)
    recent.take([change("/a", 1), change("/b", 2)])
    recent.take([change("/a", 3), change("/c", 4)])
    assert recent.find("/b") is None
    assert recent.find("/a") is not None
    assert recent.find("/c") is not None


def test_bytes_are_bounded_too() -> None:
    recent = RecentChanges(max_bytes=10_000)
    recent.take([change("/a", 1, b"v" * 6000)])
    recent.take([change("/b", 2, b"v" * 6000)])
    assert recent.find("/a") is None
    assert recent.find("/b") is not None
    recent.take([change("/b", 3, b"v" * 60_000)])
    assert len(recent) == 0
    recent.take([change("/c", 4, b"v" * 6000)])
    assert recent.find("/c") is not None
