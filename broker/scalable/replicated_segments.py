"""Pure: which segments of a topic are sent to another cluster now, and which may be pruned.

R2 and R10 of `../../docs/decisions/replicated-segments.md`.  A segment is *drained* for a
cluster when its log is terminated and the cursor for that cluster has passed its last entry.
"""

from collections.abc import Collection, Mapping

from broker.scalable.layout import Layout


def sending(layout: Layout, drained: Collection[int]) -> list[int]:
    """The segments whose entries may be sent to a cluster: all ancestors of each are drained (R2).

    What a segment's hashes had before is then in that cluster.  Its parents alone do not show that:
    one that was split again before anything was written to it is drained, whatever its own parent
    has left.  An ancestor that the layout does not have any more was drained before it was pruned
    (R10).
    """
    return [
        segment_id
        for segment_id in layout.segments
        if segment_id not in drained and layout.ancestors(segment_id) <= set(drained)
    ]


def is_needed(drained: Mapping[str, bool]) -> bool:
    """Whether a sealed segment stays because a cluster has not got all of it (R10).

    `drained` says of each cursor of a replicator whether it has passed the last entry.
    """
    return not all(drained.values())
