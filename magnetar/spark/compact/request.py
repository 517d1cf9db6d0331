"""The request of a compaction, and the names of its transaction key and job.

Pure.  The topic that a compaction makes is a *generation*.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from magnetar.spark.errors import InvalidOption

__all__ = ["Compaction", "generation_topic", "job_id", "key_name", "milliseconds"]

_UNITS_MS: Final[Mapping[str, int]] = MappingProxyType(
    {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
)
_DURATION: Final = re.compile(r"(\d+)\s*([smhdw])", re.ASCII)
_GENERATION: Final = re.compile(r"[\w.-]+", re.ASCII)
NAME_BYTES: Final = 200
"""Characters of a topic's name in a key; a longer name is replaced by its hash."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """The request of a compaction."""

    source: str
    target: str
    end: str = "latest"
    tombstones_ms: int | None = None
    """Rows without value that were published longer ago than this are left out; None: none are."""
    keyless: bool = True
    """Whether rows without key are kept."""


def generation_topic(target: str, generation: str | None) -> str:
    """The topic to be made.  Raises `InvalidOption`."""
    if generation is None:
        return target
    if not _GENERATION.fullmatch(generation):
        raise InvalidOption(
            f"The generation is {generation!r}; it ends the name of a topic, so give it letters, "
            "digits, '.', '_' and '-'."
        )
    return f"{target}-{generation}"


def key_name(topic: str) -> str:
    """The name of the transaction key of the compaction that makes this topic."""
    # Named after the topic, so that a later run finds the generation that is there.
    name = f"compact:{topic}"
    return name if len(name.encode()) <= NAME_BYTES else f"compact:{_digest(topic)}"


def job_id(source: str, cut: str) -> str:
    """The job id of a compaction: the topic that it reads, and the hash of the cut's text."""
    name = source if len(source.encode()) <= NAME_BYTES else _digest(source)
    return f"compact {name} {_digest(cut)[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def milliseconds(text: str) -> int:
    """Convert `90s`, `30m`, `12h`, `7d` or `4w` to milliseconds.  Raises `InvalidOption`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidOption(f"{text!r} is no duration; give a number and a unit: 90s, 12h, 7d.")
    return int(found[1]) * _UNITS_MS[found[2]]
