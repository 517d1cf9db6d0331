"""A bounded cache of the records that the writer of a store wrote last."""

from collections.abc import Iterable, Sequence

from config.bounds import METADATA_RECENT_KEYS
from storage.metadata import group
from storage.metadata.group import Change, Stored
from storage.metadata.operations import BeginSession, Delete, Operation, Put
from storage.metadata.store import ABSENT


class KnownRecords:
    """The versions of the records that were written last, so that most writes need no read.

    Only one connection writes, so the last state that it wrote is the stored one.  Bounded: the
    keys that were written longest ago go first, and a key that is not here may have any state.
    Values are not kept.
    """

    __slots__ = ("_max_keys", "_stored")

    def __init__(self, *, max_keys: int = METADATA_RECENT_KEYS) -> None:
        self._stored: dict[str, Stored | None] = {}
        self._max_keys = max_keys

    def __len__(self) -> int:
        return len(self._stored)

    def take(self, changes: Iterable[Change]) -> None:
        """Remember committed changes."""
        stored = self._stored
        for change in changes:
            stored.pop(change.key, None)
            stored[change.key] = change.after
        while len(stored) > self._max_keys:
            del stored[next(iter(stored))]

    def clear(self) -> None:
        """Forget everything: a commit has reported an error and may have taken effect."""
        self._stored.clear()

    def view(self, operations: Sequence[Operation], sessions: set[int]) -> "AssumedView | None":
        """The state as far as the operations touch it; None if it must be read.

        It need not be read for operations on known records and for puts of records that must not
        exist yet.  That these do not exist, and are not below a sequence, is an assumption: the
        save has to verify it.
        """
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
    """A state in which no record exists but the known ones, and there are no sequences."""

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
