"""Hints of partitions: bounded, by level."""

from storage.metadata.oxia.partitions import UNKNOWN, PartitionHints


def test_partition_hint_is_the_one_seen_last() -> None:
    hints = PartitionHints()
    assert hints.get("/a") == UNKNOWN
    assert not hints.disagrees("/a", "p")
    hints.note("/a", "p")
    hints.note("/a", None)
    assert hints.get("/a") is None
    assert hints.disagrees("/a", "p")
    assert not hints.disagrees("/a", None)
    hints.forget("/a")
    hints.forget("/a")
    assert hints.get("/a") == UNKNOWN


def test_others_of_a_level() -> None:
    hints = PartitionHints()
    for key, partition in (("/l/a", "p"), ("/l/b", "q"), ("/l/c", None), ("/l/c/d", "q")):
        hints.note(key, partition)
    assert list(hints.others("/l/", "p", "/l/", "/l//")) == [("/l/b", "q"), ("/l/c", None)]
    assert list(hints.others("/l/", "p", "/l/", "/l/c")) == [("/l/b", "q")]
    assert list(hints.others("/other/", "p", "/other/", "/other//")) == []


def test_the_oldest_go_first() -> None:
    hints = PartitionHints(max_keys=2)
    for key in ("/l/a", "/l/b", "/l/a", "/l/c"):
        hints.note(key, "p")
    assert [hints.get(key) for key in ("/l/a", "/l/b", "/l/c")] == ["p", UNKNOWN, "p"]
    assert [key for key, _ in hints.others("/l/", "x", "/l/", "/l//")] == ["/l/a", "/l/c"]
