"""Which bookies a new ensemble gets, and who takes the place of one that failed."""

import random
from collections.abc import Sequence

import pytest

from storage.ledger.bookkeeper.ensemble_choice import (
    NotEnoughBookies,
    choose_ensemble,
    choose_replacements,
)
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.ledger.bookkeeper.metadata_store import BookieAddress, Bookies

HERE = BookieAddress("127.0.0.1", 3181)


def names(text: str) -> list[BookieId]:
    return [BookieId(name) for name in text]


def bookies(writable: str, racks: str = "", read_only: str = "") -> Bookies:
    return Bookies(
        writable=dict.fromkeys(names(writable), HERE),
        read_only=dict.fromkeys(names(read_only), HERE),
        racks={name: f"/{rack}" for name, rack in zip(names(writable), racks, strict=False)},
    )


def mixed(ensemble: Sequence[BookieId], known: Bookies, write_quorum: int) -> int:
    racks = [known.racks.get(bookie, "/default-rack") for bookie in ensemble]
    size = len(racks)
    return sum(
        len({racks[(first + copy) % size] for copy in range(write_quorum)}) > 1
        for first in range(size)
    )


@pytest.mark.parametrize("seed", range(20))
def test_different_writable_bookies(seed: int) -> None:
    known = bookies("abcde", read_only="xyz")
    found = choose_ensemble(known, (), 3, 2, random.Random(seed))
    assert len(set(found)) == 3
    assert set(found) <= set(known.writable)


def test_every_bookie_has_its_turn() -> None:
    rng, known = random.Random(1), bookies("abcd")
    firsts = {choose_ensemble(known, (), 2, 2, rng) for _ in range(200)}
    assert len(firsts) == 12


def test_too_few() -> None:
    with pytest.raises(NotEnoughBookies, match="start more"):
        choose_ensemble(bookies("ab", read_only="cd"), (), 3, 2, random.Random(1))


@pytest.mark.parametrize("seed", range(20))
def test_quarantine_is_kept_out_while_there_are_others(seed: int) -> None:
    known, rng = bookies("abcde"), random.Random(seed)
    assert set(choose_ensemble(known, names("ab"), 3, 2, rng)) == set("cde")
    some = choose_ensemble(known, names("abc"), 3, 2, rng)
    assert {"d", "e"} < set(some)
    assert set(choose_ensemble(known, names("abcde"), 5, 2, rng)) == set("abcde")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("writable", "racks", "size", "quorum"),
    [
        ("abcd", "1112", 2, 2),
        ("abcdef", "111222", 4, 2),
        ("abcde", "11123", 3, 3),
        ("abcdef", "112233", 3, 2),
        ("abcdefgh", "1111112 ", 3, 3),
    ],
)
def test_two_racks_in_each_write_set(
    seed: int, writable: str, racks: str, size: int, quorum: int
) -> None:
    known = bookies(writable, racks)
    found = choose_ensemble(known, (), size, quorum, random.Random(seed))
    assert mixed(found, known, quorum) == size


def test_racks_are_no_condition() -> None:
    known = bookies("abc", "111")
    assert len(choose_ensemble(known, (), 3, 2, random.Random(1))) == 3
    known = bookies("abc", "11")
    assert len(set(choose_ensemble(known, (), 3, 3, random.Random(1)))) == 3


def replace(
    known: Bookies,
    ensemble: str,
    places: Sequence[int],
    failed: str = "",
    apart: str = "",
    quorum: int = 2,
    seed: int = 1,
) -> dict[int, BookieId]:
    return choose_replacements(
        known, names(apart), names(ensemble), places, names(failed), quorum, random.Random(seed)
    )


def test_replacements_are_none_of_the_ensemble_and_none_that_failed() -> None:
    known = bookies("abcdef", read_only="x")
    for seed in range(20):
        found = replace(known, "abc", [0, 2], failed="acd", seed=seed)
        assert set(found) == {0, 2}
        assert set(found.values()) == {"e", "f"}


def test_some_or_none() -> None:
    known = bookies("abcd")
    assert list(replace(known, "abc", [0, 1], failed="ab").values()) == ["d"]
    assert replace(known, "abc", [0], failed="ad") == {}


def test_quarantine_is_the_last_resort_of_replacements_too() -> None:
    known = bookies("abcde", "11112")
    for seed in range(20):
        assert replace(known, "ab", [0], apart="de", seed=seed) == {0: "c"}
        assert replace(known, "abc", [0, 1], apart="d", seed=seed)[0] == "e"
    assert replace(known, "abc", [0], apart="de") == {0: "e"}


def test_replacements_keep_two_racks() -> None:
    known = bookies("abcdef", "121112")
    for seed in range(20):
        assert replace(known, "ab", [1], seed=seed) == {1: "f"}
