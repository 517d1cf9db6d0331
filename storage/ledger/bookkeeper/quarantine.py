"""Which bookies are left out of new ensembles for a while, because they failed repeatedly.  Pure.

Rules:

- Only failures of different moments count: a connection that breaks fails everything on it.
- `BOOKIE_ERRORS` failures within `BOOKIE_ERROR_WINDOW_S` put a bookie into quarantine for
  `BOOKIE_QUARANTINE_S`; what happens meanwhile does not make it longer.
- It is a preference of `ensemble_choice`, not a verdict: ensembles in use keep their bookies.
- Times are of one monotonic clock, in seconds, given by the caller.
"""

from collections.abc import Set

from config import bounds
from storage.ledger.bookkeeper.ledger_metadata import BookieId


class Quarantine:
    """Leaves bookies that failed repeatedly out of new ensembles for a while.

    Holds at most `BOOKIE_ERRORS` times for each bookie that failed.
    """

    def __init__(self) -> None:
        self._failures: dict[BookieId, list[float]] = {}
        self._until: dict[BookieId, float] = {}

    def failed(self, bookie: BookieId, now_s: float) -> bool:
        """Note a failure; True if that puts the bookie into quarantine."""
        if now_s < self._until.get(bookie, now_s):
            return False
        recent = [
            at for at in self._failures.get(bookie, ()) if now_s - at < bounds.BOOKIE_ERROR_WINDOW_S
        ]
        if not recent or now_s - recent[-1] >= bounds.BOOKIE_ERROR_SPACING_S:
            recent.append(now_s)
        self._failures[bookie] = recent
        if len(recent) < bounds.BOOKIE_ERRORS:
            return False
        del self._failures[bookie]
        self._until[bookie] = now_s + bounds.BOOKIE_QUARANTINE_S
        return True

    def quarantined(self, now_s: float) -> Set[BookieId]:
        """The bookies to leave out now."""
        self._until = {bookie: until for bookie, until in self._until.items() if now_s < until}
        window = bounds.BOOKIE_ERROR_WINDOW_S
        self._failures = {
            bookie: times for bookie, times in self._failures.items() if now_s - times[-1] < window
        }
        return self._until.keys()
