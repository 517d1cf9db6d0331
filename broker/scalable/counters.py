"""Counters of one broker's work on scalable topics, for the metrics."""

from collections import Counter
from dataclasses import dataclass, field

from broker.scalable.history import ChangeKind


@dataclass(slots=True)
class ScalableCounters:
    """Counts of the work of this broker since its start.

    Leaders of topics count all but `segments_sealed`, which the owner of a segment counts.
    """

    layout_changes: Counter[ChangeKind] = field(default_factory=Counter)
    """Layouts published after a split, merge, rebucket, migration or prune."""
    segments_sealed: int = 0
    rebalances: int = 0
    """Events after which ordered consumers had other segments."""
    assignments_sent: int = 0
    """Assignments that were sent to ordered consumers, repeated ones included."""
    assignments_too_large: int = 0
    """Changes of assignments that were not stored, because they are too large."""
    controllers_taken_over: int = 0
    """Controllers that began with consumers registered at an earlier one."""
