"""What a record that is read says of a batch whose answer was lost.  Pure.

Rules:

- Nothing of the batch can still arrive: its session is over, and what is read is newer than that.
- A batch takes effect wholly or not, so one of its records that tells anything tells all.
- What was written is known by the whole content of the node: the life in it is random, and counts
  rise within a life.
- A record that still is what the batch was built on was not written by it.  Of an absent one, or
  one that others wrote since, nobody can tell.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from storage.metadata.store import MetadataError
from storage.metadata.zookeeper.layout import decode_record
from storage.metadata.zookeeper.requests import Read
from storage.metadata.zookeeper.writes import Planned


class Effect(enum.Enum):
    """Whether a batch took effect."""

    DONE = "done"
    NONE = "none"
    UNKNOWN = "unknown"


class Evidence(NamedTuple):
    """The effect of a batch; `version` is the one that it gave to its records, if it is known."""

    effect: Effect
    version: int = 0


def effect_of(items: Sequence[Planned], reads: Sequence[Read]) -> Evidence:
    """What the records of a batch, as they are read in its order, say of it."""
    evidence = Evidence(Effect.UNKNOWN)
    for item, read in zip(items, reads, strict=True):
        if not isinstance(read, tuple):
            continue
        data, stat = read
        if item.plan.after is not None and data == item.plan.data:
            return Evidence(Effect.DONE, stat.mzxid)
        if _is_untouched(item, read):
            evidence = Evidence(Effect.NONE)
    return evidence


def _is_untouched(item: Planned, read: Read) -> bool:
    before = item.undo.record
    if before is None or not isinstance(read, tuple):
        return False
    try:
        node, _ = decode_record(item.plan.key, *read)
    except MetadataError:
        return False
    return (node.life, node.node_version) == (before.life, before.node_version)
