"""Paths, numbers in keys, ranges, and key families: pure text, no store.

A key is a path: it begins with a slash and has no empty part.  A *level* is everything up to the
last slash; keys of one level are ordered bytewise and can be scanned.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from storage.metadata.store import IndexEntry, InvalidMetadataRequest

NUMBER_DIGITS = 20
MAX_NUMBER = 10**NUMBER_DIGITS - 1
LAST = "\U0010ffff"
"""Above every character that keys may hold: `prefix + LAST` ends the range of a prefix."""

UNPRINTABLE = r"\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U0010ffff"
"""Characters that some backend refuses in keys (ZooKeeper's list, and `LAST`)."""

_ESCAPED = re.compile(rf"[%/{UNPRINTABLE}]|\A\.{{1,2}}\Z")


def level_of(key: str) -> str:
    """Everything up to and with the last slash; keys of the same level are siblings."""
    return key[: key.rfind("/") + 1]


def name_of(key: str) -> str:
    """The last part of a path."""
    return key[key.rfind("/") + 1 :]


def level_under(key: str) -> str:
    """The level of the direct children of `key`."""
    return "/" if key == "/" else f"{key}/"


def children_range(key: str) -> tuple[str, str]:
    """Scan bounds of all direct children of `key`."""
    level = level_under(key)
    return level, f"{level}/"


def number(value: int) -> str:
    """A number as text in keys: 20 digits, so that bytewise order is numeric order."""
    if not 0 <= value <= MAX_NUMBER:
        raise InvalidMetadataRequest(
            f"The number {value} does not fit {NUMBER_DIGITS} digits of a key: keep it in range."
        )
    return f"{value:0{NUMBER_DIGITS}d}"


def sequence_key(prefix: str, value: int) -> str:
    """The key that a sequence with this prefix makes of a number."""
    return f"{prefix}-{number(value)}"


def exact_range(index_key: str) -> tuple[str, str]:
    """Index bounds of this one secondary key (keys have no control characters)."""
    return index_key, f"{index_key}\x02"


def prefix_range(prefix: str) -> tuple[str, str]:
    """Bounds of everything that begins with `prefix`, within one level or one index."""
    return prefix, f"{prefix}{LAST}"


def escape_part(text: str) -> str:
    """Any text as one part of a path; different texts give different parts.

    Characters are escaped by percent signs, as in URLs; the empty text becomes "%".
    """
    if not text:
        return "%"
    return _ESCAPED.sub(_percent, text)


def _percent(found: re.Match[str]) -> str:
    encoded = found.group().encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in encoded)


def no_partition(_key: str, _value: bytes) -> str | None:
    """The partition of families whose records are found by their key alone."""
    return None


def no_indexes(_key: str, _value: bytes) -> tuple[IndexEntry, ...]:
    """The index entries of families that are in no index."""
    return ()


@dataclass(frozen=True, slots=True)
class KeyFamily:
    """The rules of partition and index entries for keys that begin with `prefix`.

    `prefix` ends in "/".  Both follow from key and value alone.
    """

    prefix: str
    partition: Callable[[str, bytes], str | None] = no_partition
    indexes: Callable[[str, bytes], tuple[IndexEntry, ...]] = no_indexes


class KeyFamilies:
    """The declared families; the longest prefix wins."""

    __slots__ = ("_by_prefix", "_fallback")

    def __init__(self, families: Iterable[KeyFamily]) -> None:
        self._fallback = KeyFamily("/")
        self._by_prefix: dict[str, KeyFamily] = {}
        for family in families:
            if not family.prefix.endswith("/"):
                raise InvalidMetadataRequest(
                    f"The key family {family.prefix!r} must end in a slash: add it."
                )
            if family.prefix in self._by_prefix:
                raise InvalidMetadataRequest(
                    f"The key family {family.prefix!r} is declared twice: keep one."
                )
            self._by_prefix[family.prefix] = family

    def of(self, key: str) -> KeyFamily:
        """The family of a key; one without partition and indexes if none was declared."""
        end = key.rfind("/")
        while end >= 0:
            family = self._by_prefix.get(key[: end + 1])
            if family is not None:
                return family
            end = key.rfind("/", 0, end)
        return self._fallback

    def partition(self, key: str, value: bytes) -> str | None:
        """The partition key of a record."""
        return self.of(key).partition(key, value)

    def indexes(self, key: str, value: bytes) -> tuple[IndexEntry, ...]:
        """The index entries of a record."""
        return self.of(key).indexes(key, value)
