"""Pure: how many of a bounded number of things each role owns."""

from collections import Counter


class OwnerShares:
    """Counts things by the roles that own them.  No role may take all: it leaves as many as it has.

    Any role may make some of these things, also one without a grant.  What has no owner, None or
    an empty name, is not counted here.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, owner: str | None) -> int:
        """How many things an owner has."""
        return self._counts[owner] if owner else 0

    def is_used_up(self, owner: str | None, left: int) -> bool:
        """Whether an owner has as many as there are `left` for everybody, or more."""
        return bool(owner) and self.count(owner) >= left

    def add(self, owner: str | None) -> None:
        """Count one more."""
        if owner:
            self._counts[owner] += 1

    def remove(self, owner: str | None) -> None:
        """Count one less, if any is counted."""
        if owner and self._counts[owner] > 1:
            self._counts[owner] -= 1
        elif owner:
            del self._counts[owner]

    def clear(self) -> None:
        """Count nothing any more."""
        self._counts.clear()
