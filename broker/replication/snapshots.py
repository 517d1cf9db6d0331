"""`Snapshots`: which positions of several clusters' logs belong together.  Pure.

A snapshot says: who has consumed the local log up to one position has consumed the logs of all
other clusters up to positions of theirs.  It is made by markers, which replicators send in the
order of the logs (Apache Pulsar's replicated subscriptions):

S1  A REQUEST is written to the local log.  Each other cluster answers it, when its replicator to
    here reads it, with a RESPONSE that has the last position of its log.
S2  A RESPONSE arrives behind all that its cluster sent before, so the local log has everything that
    the other one had up to the position in it, at or before the RESPONSE's own place in the local
    log - but for messages of third clusters.
S3  With more than one other cluster there is a second round.  What a third cluster had sent to the
    second one before the second one answered arrives here before the third one's second RESPONSE.
    So the positions are those of the first round, and the local one is that of the last RESPONSE of
    the second round.
S4  Each round has an id of its own.  Replicators send again what they have no receipt for, and a
    second RESPONSE to the first REQUEST says nothing about the second round.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from broker.topics.subscription_markers import Snapshot
from magnetar.protocol.ids import EARLIEST, Position
from magnetar.protocol.state_table import StateTable


class SnapshotState(enum.Enum):
    """State of one snapshot; `_MOVES` has the moves between them."""

    FIRST_ROUND = "first round"
    SECOND_ROUND = "second round"
    COMPLETE = "complete"
    DROPPED = "dropped"
    """The snapshot's time is over, or the list of clusters has changed."""


_S = SnapshotState
_MOVES: StateTable[SnapshotState] = StateTable(
    {
        _S.FIRST_ROUND: {_S.SECOND_ROUND, _S.COMPLETE, _S.DROPPED},
        _S.SECOND_ROUND: {_S.COMPLETE, _S.DROPPED},
        _S.COMPLETE: (),
        _S.DROPPED: (),
    },
    defect=RuntimeError,
)


@dataclass(slots=True)
class _Pending:
    """A snapshot that waits for answers."""

    remotes: frozenset[str]
    includes: Position
    """The newest local message when it began."""
    began_s: float
    missing: set[str]
    answers: dict[str, Position] = field(default_factory=dict)
    state: SnapshotState = _S.FIRST_ROUND


@dataclass(frozen=True, slots=True)
class NextRound:
    """All clusters have answered, and are asked once more: write a REQUEST of this id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class CompleteSnapshot:
    """A snapshot is complete: write it to the local log."""

    snapshot: Snapshot
    took_s: float


class Snapshots:
    """The snapshots of one topic that are pending, `max_pending` at most."""

    def __init__(self, new_id: Callable[[], str], *, timeout_s: float, max_pending: int) -> None:
        """`new_id` makes ids that no other cluster uses."""
        self._new_id = new_id
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._pending: dict[str, _Pending] = {}
        """The pending snapshots, by the id of the round that they are in."""
        self._included = EARLIEST
        """The newest local message that a complete snapshot includes."""
        self._answered = False
        """Whether any snapshot was ever completed among these clusters."""

    def __len__(self) -> int:
        return len(self._pending)

    def includes(self, newest: Position) -> bool:
        """Whether a complete snapshot includes the local message at this position."""
        return newest <= self._included

    def renew(self) -> None:
        """Have the next snapshot begin whether or not a message was stored since the last one."""
        self._included = EARLIEST

    def drop_late(self, now_s: float) -> int:
        """Drop those whose time is over; returns how many."""
        late = [
            request_id
            for request_id, each in self._pending.items()
            if each.began_s + self._timeout_s <= now_s
        ]
        for request_id in late:
            self._drop(request_id)
        return len(late)

    def begin(self, now_s: float, newest: Position, remotes: frozenset[str]) -> str | None:
        """Begin a snapshot among the local cluster and `remotes`; returns the id of its REQUEST.

        None if there is nothing to be included since the last one, no place for one more, or no
        answer yet to the only one: a cluster that answers none gets one for each timeout.
        """
        self._drop_among_others(remotes)
        included = max([self._included, *(each.includes for each in self._pending.values())])
        most = self._max_pending if self._answered else 1
        if not remotes or newest <= included or len(self._pending) >= most:
            return None
        request_id = self._new_id()
        self._pending[request_id] = _Pending(remotes, newest, now_s, set(remotes))
        return request_id

    def answer(
        self, request_id: str, cluster: str, there: Position, here: Position, now_s: float
    ) -> NextRound | CompleteSnapshot | None:
        """Take a RESPONSE, which is at `here` in the local log, and says `there` of `cluster`.

        None if others are missing, or nothing of this id is pending: then it is late, or was sent
        twice.
        """
        pending = self._pending.get(request_id)
        if pending is None or cluster not in pending.missing:
            return None
        pending.missing.discard(cluster)
        # S3: the position of the first round.
        pending.answers.setdefault(cluster, there)
        if pending.missing:
            return None
        del self._pending[request_id]
        if pending.state is _S.FIRST_ROUND and len(pending.remotes) > 1:
            self._move(pending, _S.SECOND_ROUND)
            pending.missing.update(pending.remotes)
            second = self._new_id()
            self._pending[second] = pending
            return NextRound(second)
        self._move(pending, _S.COMPLETE)
        self._answered = True
        self._included = max(self._included, pending.includes)
        return CompleteSnapshot(
            Snapshot(request_id, here, pending.answers), now_s - pending.began_s
        )

    def _drop_among_others(self, remotes: frozenset[str]) -> None:
        """Drop those among other clusters than these."""
        for request_id, each in list(self._pending.items()):
            if each.remotes != remotes:
                self._drop(request_id)
                self._answered = False

    def _drop(self, request_id: str) -> None:
        self._move(self._pending.pop(request_id), _S.DROPPED)

    @staticmethod
    def _move(pending: _Pending, to: SnapshotState) -> None:
        pending.state = _MOVES.move(pending.state, to, "A snapshot of replicated subscriptions")
