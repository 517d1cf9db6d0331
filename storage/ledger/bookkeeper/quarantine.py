"""Quarantine of bookies that failed repeatedly: new ensembles avoid them for a while.  Pure."""

from collections.abc import Set

from config import bounds
from storage.ledger.bookkeeper.ledger_metadata import BookieId


class Quarantine:
    """The bookies in quarantine, and the recent failures of others.

    `BOOKIE_ERRORS` failures within `BOOKIE_ERROR_WINDOW_S` put a bookie into quarantine for
    `BOOKIE_QUARANTINE_S`; failures meanwhile do not prolong it.  Ensembles in use keep their
    bookies.  Times are seconds of one monotonic clock of the caller.
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
        # A connection that breaks fails all its requests at once: these are one failure.
        if not recent or now_s - recent[-1] >= bounds.BOOKIE_ERROR_SPACING_S:
            recent.append(now_s)
        self._failures[bookie] = recent
        if len(recent) < bounds.BOOKIE_ERRORS:
            return False
        del self._failures[bookie]
        self._until[bookie] = now_s + bounds.BOOKIE_QUARANTINE_S
        return True

    def quarantined(self, now_s: float) -> Set[BookieId]:
        """The bookies that are in quarantine now."""
        self._until = {bookie: until for bookie, until in self._until.items() if now_s < until}
        window = bounds.BOOKIE_ERROR_WINDOW_S
        self._failures = {
            bookie: times for bookie, times in self._failures.items() if now_s - times[-1] < window
        }
        return self._until.keys()
