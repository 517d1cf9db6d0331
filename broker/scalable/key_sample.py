"""A sample of the keys of a segment's messages, and how a split would divide its load.  Pure.

A split helps only if it moves load away.  The owner reads a few of the newest entries when a split
is considered, so producing and consuming pay nothing for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from broker.scalable.layout import Segment
from config.bounds import KEY_SAMPLE_LEAST, SPLIT_PARTS_MAX

LARGEST_SHARE: Final = 0.9
"""A split helps if no part keeps more than this share of the load."""


class MalformedSample(ValueError):
    """The JSON is not that of a sample of keys."""


@dataclass(frozen=True, slots=True)
class KeySample:
    """Messages of some entries: how many had a key with each hash (32 bits), and how many no key.

    `keyed_bytes` and `keyless_bytes` are the same in bytes; an owner of an earlier version counts
    no bytes.  All messages of a batch count with the key of its first.  Clients of 5.0.0-M1 choose
    the segment by the low half of the hash, later ones by the high half (see
    `magnetar.protocol.key_hash`).
    """

    keyed: Mapping[int, int]
    keyless: int = 0
    entries: int = 0
    keyed_bytes: Mapping[int, int] = field(default_factory=dict)
    keyless_bytes: int = 0

    @property
    def tells(self) -> bool:
        """Whether there are enough entries to draw a conclusion."""
        return self.entries >= KEY_SAMPLE_LEAST

    @property
    def has_bytes(self) -> bool:
        """Whether bytes were counted."""
        return bool(self.keyed_bytes or self.keyless_bytes)

    @property
    def by_bytes(self) -> "KeySample":
        """The sample with bytes in place of messages, for loads that are too large in bytes.

        Where no bytes were counted it stays as it is.
        """
        if not self.has_bytes:
            return self
        return KeySample(self.keyed_bytes, self.keyless_bytes, self.entries)

    @property
    def messages(self) -> int:
        """The messages of the sampled entries, or their bytes."""
        return sum(self.keyed.values()) + self.keyless

    @property
    def top_share(self) -> float:
        """The share of the most frequent key."""
        return max(self.keyed.values(), default=0) / max(self.messages, 1)

    def largest_share(self, segment: Segment, parts: int) -> float:
        """The share of the load that the busiest of `parts` equal parts of a segment would have.

        Messages without a key are spread over all segments, so each part gets the same of them.
        The clients' generation is that by which more keys lie in the segment; if both have as
        many, it is the one with the larger share.
        """
        low = self._shares(segment, parts, shift=0)
        high = self._shares(segment, parts, shift=16)
        inside = max(sum(low), sum(high))
        fitting = [shares for shares in (low, high) if sum(shares) == inside]
        even = self.keyless / parts
        busiest = max(max(shares) for shares in fitting)
        return (busiest + even) / max(inside + self.keyless, 1)

    def _shares(self, segment: Segment, parts: int, *, shift: int) -> list[int]:
        width = segment.hash_end - segment.hash_start + 1
        found = [0] * parts
        for key, count in self.keyed.items():
            place = ((key >> shift) & 0xFFFF) - segment.hash_start
            if 0 <= place < width:
                found[place * parts // width] += count
        return found

    def helpful_parts(self, segment: Segment, wanted: int, most: int) -> int | None:
        """The fewest parts, from `wanted` to `most`, into which a split moves enough load away.

        None if no such split does: one key, or very few, have nearly all the load.  With too
        few entries nothing speaks against a split.
        """
        if not self.tells:
            return wanted
        for parts in range(wanted, max(wanted, min(most, SPLIT_PARTS_MAX)) + 1):
            if self.largest_share(segment, parts) <= LARGEST_SHARE:
                return parts
        return None

    def to_json(self) -> dict[str, object]:
        """The sample, as its owner sends it."""
        return {
            "keyed": {str(key): count for key, count in self.keyed.items()},
            "keyless": self.keyless,
            "entries": self.entries,
            "keyedBytes": {str(key): size for key, size in self.keyed_bytes.items()},
            "keylessBytes": self.keyless_bytes,
        }

    @classmethod
    def from_json(cls, members: object) -> "KeySample":
        """The sample in an owner's answer.  Raises `MalformedSample`."""
        try:
            if not isinstance(members, dict):
                raise TypeError("it has no hashes")
            return cls(
                _counts(members["keyed"]),
                _count(members["keyless"]),
                _count(members["entries"]),
                _counts(members.get("keyedBytes", {})),
                _count(members.get("keylessBytes", 0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedSample(f"{members!r} is not a sample of keys: {error!r}") from error


def _counts(value: object) -> dict[int, int]:
    if not isinstance(value, dict):
        raise TypeError("it has no hashes")
    return {int(key): _count(number) for key, number in value.items()}


def _count(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a number of messages or bytes")
    return value
