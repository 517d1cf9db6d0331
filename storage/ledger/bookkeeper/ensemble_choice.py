"""The choice of bookies for an ensemble.  Pure."""

import random
from collections.abc import Collection, Mapping, Sequence

from config import bounds
from storage.ledger.bookkeeper.ledger_metadata import BookieId
from storage.ledger.bookkeeper.metadata_store import Bookies
from storage.ledger.store import LedgerError

DEFAULT_RACK = "/default-rack"


class NotEnoughBookies(LedgerError):
    """Fewer bookies can take entries than the ledger needs."""


def choose_ensemble(
    bookies: Bookies,
    quarantined: Collection[BookieId],
    ensemble_size: int,
    write_quorum: int,
    rng: random.Random,
) -> tuple[BookieId, ...]:
    """Choose different writable bookies for a new ledger.  Raises `NotEnoughBookies`.

    Bookies in quarantine are taken only if there are too few others.  If possible every write set
    is on two racks; a bookie of unknown rack is in `DEFAULT_RACK`.  Else the choice is random, so
    that load spreads.
    """
    healthy = [bookie for bookie in sorted(bookies.writable) if bookie not in quarantined]
    doubtful = [bookie for bookie in sorted(bookies.writable) if bookie in quarantined]
    missing = ensemble_size - len(healthy)
    if missing > len(doubtful):
        raise NotEnoughBookies(
            f"A ledger needs {ensemble_size} bookies, and {len(bookies.writable)} are registered "
            "as writable: start more, or lower the ensemble size."
        )
    best: list[BookieId] = []
    best_score = -1
    for _ in range(bounds.BOOKIE_SHUFFLES):
        rng.shuffle(healthy)
        rng.shuffle(doubtful)
        candidates = healthy + doubtful[: max(missing, 0)]
        found = _spread(candidates, ensemble_size, write_quorum, bookies.racks)
        score = _mixed_write_sets(found, write_quorum, bookies.racks)
        if score > best_score:
            best, best_score = found, score
        if score == ensemble_size or write_quorum < 2:
            break
    return tuple(best)


def choose_replacements(
    bookies: Bookies,
    quarantined: Collection[BookieId],
    ensemble: Sequence[BookieId],
    places: Collection[int],
    failed: Collection[BookieId],
    write_quorum: int,
    rng: random.Random,
) -> dict[int, BookieId]:
    """Choose a new bookie for each of `places` of an ensemble, as far as there are any.

    None of them is in the ensemble or in `failed`.
    """
    changed = list(ensemble)
    chosen: dict[int, BookieId] = {}
    candidates = [
        bookie
        for bookie in sorted(bookies.writable)
        if bookie not in ensemble and bookie not in failed
    ]
    rng.shuffle(candidates)
    candidates.sort(key=lambda bookie: bookie in quarantined)
    for place in sorted(places):
        best: BookieId | None = None
        best_score = (False, -1)
        for bookie in candidates:
            changed[place] = bookie
            mixed = _mixed_write_sets(changed, write_quorum, bookies.racks)
            score = (bookie not in quarantined, mixed)
            if score > best_score:
                best, best_score = bookie, score
        if best is None:
            break
        changed[place] = chosen[place] = best
        candidates.remove(best)
    return chosen


def _spread(
    candidates: list[BookieId], size: int, write_quorum: int, racks: Mapping[BookieId, str]
) -> list[BookieId]:
    """The first candidates, but one of another rack where a write set would have only one."""
    rest = list(candidates)
    found: list[BookieId] = []
    while len(found) < size:
        place = 0
        before = found[-(write_quorum - 1) :] if write_quorum > 1 else []
        seen = {racks.get(bookie, DEFAULT_RACK) for bookie in before}
        if len(seen) == 1 and len(before) == write_quorum - 1:
            others = (
                number
                for number, bookie in enumerate(rest)
                if racks.get(bookie, DEFAULT_RACK) not in seen
            )
            place = next(others, 0)
        found.append(rest.pop(place))
    return found


def _mixed_write_sets(
    ensemble: Sequence[BookieId], write_quorum: int, racks: Mapping[BookieId, str]
) -> int:
    """Number of an ensemble's write sets that are on more than one rack."""
    size = len(ensemble)
    names = [racks.get(bookie, DEFAULT_RACK) for bookie in ensemble]
    return sum(
        len({names[(first + copy) % size] for copy in range(write_quorum)}) > 1
        for first in range(size)
    )
