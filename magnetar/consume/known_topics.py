"""Pure: the topics of a namespace, as far as a broker has told them."""

from collections.abc import Iterable
from dataclasses import dataclass

import google_crc32c

__all__ = ["Change", "KnownTopics", "topics_hash"]


@dataclass(frozen=True, slots=True)
class Change:
    """The topics that came and went, in order of names."""

    added: tuple[str, ...]
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


def topics_hash(names: Iterable[str]) -> str:
    """CRC32C of the sorted names joined by commas, its bytes little-endian, as eight hex digits."""
    checksum = int(google_crc32c.value(",".join(sorted(names)).encode()))
    return checksum.to_bytes(4, "little").hex()


class KnownTopics:
    """The topics of a namespace, as far as a broker has told them.

    Rules: a snapshot is complete, a diff is not; what is told again changes nothing; a topic in
    both halves of a diff was deleted and made anew, so it is there. The hash of all names, told on
    a reconnect, spares the broker a snapshot of what is known.
    """

    __slots__ = ("_names",)

    def __init__(self) -> None:
        self._names: frozenset[str] | None = None

    @property
    def names(self) -> frozenset[str]:
        """All that are known."""
        return self._names or frozenset()

    @property
    def hash(self) -> str | None:
        """The hash of what is known; None if nothing was told yet."""
        return None if self._names is None else topics_hash(self._names)

    def replace(self, names: Iterable[str]) -> Change:
        """A snapshot."""
        before, self._names = self.names, frozenset(names)
        added, removed = self._names - before, before - self._names
        return Change(tuple(sorted(added)), tuple(sorted(removed)))

    def apply(self, added: Iterable[str], removed: Iterable[str]) -> Change:
        """A diff."""
        return self.replace((self.names - frozenset(removed)) | frozenset(added))
