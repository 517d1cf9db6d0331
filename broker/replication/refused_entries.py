"""`RefusedEntries`: what another cluster refused, and which of it is certainly not stored there.

Apache Pulsar stores what was in flight behind a refused entry.  With deduplication it says of the
refused one afterwards that it was stored before, which is not true.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import structlog

from broker.replication.errors import RemoteRefused
from magnetar.background_tasks import BackgroundTasks, OwnerStopped
from magnetar.protocol.ids import Position
from storage.managed_ledger.cursor import Cursor

POSITIONS: Final = "refused.positions"
REASON: Final = "refused.reason"
_DUPLICATE: Final = (
    " It has stored entries behind this one, so that it takes this one for a duplicate: turn the"
    " deduplication of the namespace off there until it is stored."
)
POSITIONS_WENT_BACK: Final = (
    "The other cluster says that it had this entry before it was sent for the first time: the"
    " positions of this topic went back, as after a restore from a backup, or another cluster of"
    " this name sends to it. Nothing is sent until the topic is deleted there, or what is not to be"
    " sent is skipped here (POST .../subscription/pulsar.repl.CLUSTER/skip_all)."
)
"""Why an entry stands that was certainly not stored under its position before."""

log = structlog.get_logger(__name__)


class RefusedEntries:
    """The entries that another cluster refused and has not stored since, and why.

    Those that are certainly not stored (`RemoteRefused.final`) are noted in the properties of the
    replicator's cursor, so that the next owner of the topic knows them too.
    """

    def __init__(self, cursor: Cursor) -> None:
        """Begin with the entries that `cursor` notes, and that are not acknowledged since."""
        self._cursor = cursor
        self._reasons = dict(_noted(cursor))
        self._noting = False
        self._tasks = BackgroundTasks(log, failure_event="refused_entry_not_noted")

    def __len__(self) -> int:
        return len(self._reasons)

    @property
    def first_reason(self) -> RemoteRefused | None:
        """Why the first of them was refused; None without any."""
        return self._reasons[min(self._reasons)] if self._reasons else None

    def add(self, position: Position, reason: RemoteRefused) -> None:
        """Add an entry, which may have been refused before for another reason."""
        if self.is_certainly_missing(position):
            # Whatever is the matter now, it was certainly not stored before.
            reason = RemoteRefused(str(reason), final=True)
        self._reasons[position] = reason
        if reason.final and not self._noting:
            with suppress(OwnerStopped):
                self._tasks.start(self._note())
                self._noting = True

    def is_certainly_missing(self, position: Position) -> bool:
        """Whether the other cluster does not have an entry, although it may say that it has."""
        reason = self._reasons.get(position)
        return reason is not None and reason.final

    def add_duplicate(self, position: Position) -> RemoteRefused:
        """Add to the reason of a missing entry that the other cluster takes it for a duplicate."""
        reason = str(self._reasons[position])
        if reason != POSITIONS_WENT_BACK:
            reason = reason.removesuffix(_DUPLICATE) + _DUPLICATE
        refused = RemoteRefused(reason, final=True)
        self.add(position, refused)
        return refused

    def remove(self, position: Position) -> None:
        """Remove an entry that is stored now; nothing to do if it was not refused."""
        self._reasons.pop(position, None)

    def remove_acknowledged(self) -> None:
        """Remove the entries that have expired since, or that an operator skipped."""
        for position in [each for each in self._reasons if self._cursor.is_acknowledged(each)]:
            del self._reasons[position]

    async def close(self) -> None:
        """Note nothing more."""
        await self._tasks.stop()

    async def _note(self) -> None:
        try:
            while (noted := self._to_note()) != self._cursor.properties:
                await self._cursor.replace_properties(noted)
        finally:
            self._noting = False

    def _to_note(self) -> dict[str, str]:
        missing = sorted(each for each in self._reasons if self.is_certainly_missing(each))
        if not missing:
            return {}
        return {
            POSITIONS: ",".join(position.text for position in missing),
            REASON: str(self._reasons[missing[0]]),
        }


def _noted(cursor: Cursor) -> Iterator[tuple[Position, RemoteRefused]]:
    """The entries in the properties of a cursor that are not acknowledged."""
    properties = cursor.properties
    if POSITIONS not in properties:
        return
    reason = RemoteRefused(properties[REASON], final=True)
    for text in properties[POSITIONS].split(","):
        ledger_id, entry_id = text.split(":")
        position = Position(int(ledger_id), int(entry_id))
        if not cursor.is_acknowledged(position):
            yield position, reason
