"""The effect of a batch whose answer was lost, from its records as they are read.  Pure.

The batch cannot arrive any more: its session is over, and the records are read after that.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from storage.metadata.store import MetadataError
from storage.metadata.zookeeper.layout import decode_record
from storage.metadata.zookeeper.requests import Read
from storage.metadata.zookeeper.writes import PlannedWrite


class Effect(enum.Enum):
    """Whether a batch took effect."""

    DONE = "done"
    NONE = "none"
    UNKNOWN = "unknown"


class Evidence(NamedTuple):
    """The effect of a batch; `version` is the one that it gave to its records, if it is known."""

    effect: Effect
    version: int = 0


def effect_of(items: Sequence[PlannedWrite], reads: Sequence[Read]) -> Evidence:
    """The effect of a batch, from reads of its records in its order."""
    # A batch takes effect wholly or not at all, so one of its records decides for all.  An absent
    # record, or one that another process wrote since, proves nothing.
    evidence = Evidence(Effect.UNKNOWN)
    for item, read in zip(items, reads, strict=True):
        if not isinstance(read, tuple):
            continue
        data, stat = read
        # The life in the data is random, and counts rise within a life: no other write made it.
        if item.plan.after is not None and data == item.plan.data:
            return Evidence(Effect.DONE, stat.mzxid)
        if _is_untouched(item, read):
            evidence = Evidence(Effect.NONE)
    return evidence


def _is_untouched(item: PlannedWrite, read: Read) -> bool:
    """Whether the record still is the one that the batch was built on."""
    before = item.undo.record
    if before is None or not isinstance(read, tuple):
        return False
    try:
        node, _ = decode_record(item.plan.key, *read)
    except MetadataError:
        return False
    return (node.life, node.node_version) == (before.life, before.node_version)
