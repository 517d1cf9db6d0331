"""`KnownTopics`: the topics of a namespace, from snapshots and diffs of a broker.  Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import google_crc32c

__all__ = ["Change", "KnownTopics", "topics_hash"]


@dataclass(frozen=True, slots=True)
class Change:
    """The topics that were added and removed, in order of names."""

    added: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


def topics_hash(names: Iterable[str]) -> str:
    """CRC32C of the sorted names joined by commas, its bytes little-endian, as eight hex digits."""
    checksum = int(google_crc32c.value(",".join(sorted(names)).encode()))
    return checksum.to_bytes(4, "little").hex()


class KnownTopics:
    """The topics of a namespace that a broker has sent.

    The hash of their names, sent on a reconnect, spares the broker a snapshot if nothing changed.
    """

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of all known topics."""
        return self._names or frozenset()

    @property
    def hash(self) -> str | None:
        """The hash of the known names; None before the first snapshot."""
        return None if self._names is None else topics_hash(self._names)

    def replace(self, names: Iterable[str]) -> Change:
        """Take a snapshot, which is complete; returns the difference."""
        before, self._names = self.names, frozenset(names)
        added, removed = self._names - before, before - self._names
        return Change(tuple(sorted(added)), tuple(sorted(removed)))

    def apply(self, added: Iterable[str], removed: Iterable[str]) -> Change:
        """Take a diff; returns the difference."""
        # A topic in both halves was deleted and created again, so it exists.
        return self.replace((self.names - frozenset(removed)) | frozenset(added))
