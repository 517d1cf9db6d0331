"""What the writing side of a store knows of records without looking: those it wrote last.

Rules:
- Only one connection writes, so what it wrote last is what is stored.
- After a commit that reported an error nothing is known.
- Bounded: the keys that were written longest ago go first.  What is not here may be anything.
- A group whose operations touch only known records, or make records that must not be there yet,
  needs no look at all.  That they are not there, and that their level is no sequence's, is then an
  assumption, which the save has to verify.
"""

from collections.abc import Iterable, Sequence

from config.bounds import METADATA_RECENT_KEYS
from storage.metadata import group
from storage.metadata.group import Change, Stored
from storage.metadata.operations import BeginSession, Delete, Operation, Put
from storage.metadata.store import ABSENT


class KnownRecords:
    """The versions of the records that were written last, so that most writes need no read.

    Values are not kept.
    """

    __slots__ = ("_max_keys", "_stored")

    def __init__(self, *, max_keys: int = METADATA_RECENT_KEYS) -> None:
        self._stored: dict[str, Stored | None] = {}
        self._max_keys = max_keys

    def __len__(self) -> int:
        return len(self._stored)

    def take(self, changes: Iterable[Change]) -> None:
        """These were committed."""
        stored = self._stored
        for change in changes:
            stored.pop(change.key, None)
            stored[change.key] = change.after
        while len(stored) > self._max_keys:
            del stored[next(iter(stored))]

    def clear(self) -> None:
        """Nobody knows what became of a commit."""
        self._stored.clear()

    def view(self, operations: Sequence[Operation], sessions: set[int]) -> "AssumedView | None":
        """The state as far as these touch it; None: it must be looked up."""
        stored = self._stored
        for operation in operations:
            match operation:
                case Put(key=key, expect=expect):
                    if expect != ABSENT and key not in stored:
                        return None
                case Delete(key=key):
                    if key not in stored:
                        return None
                case BeginSession():
                    pass
                case _:
                    return None
        return AssumedView(stored, sessions)


class AssumedView(group.View):
    """What is not known is not there, and there are no sequences."""

    __slots__ = ("_sessions", "_stored")

    def __init__(self, stored: dict[str, Stored | None], sessions: set[int]) -> None:
        self._stored = stored
        self._sessions = sessions

    def stored(self, key: str) -> Stored | None:
        """See `View.stored`."""
        return self._stored.get(key)

    def sequence(self, prefix: str) -> group.Sequence | None:
        """See `View.sequence`."""
        return None

    def count_children(self, level: str) -> int:
        """See `View.count_children`."""
        return 0

    def session_exists(self, session_id: int) -> bool:
        """See `View.session_exists`."""
        return session_id in self._sessions

    def session_keys(self, session_id: int) -> Iterable[str]:
        """See `View.session_keys`."""
        return ()
