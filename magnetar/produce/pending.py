"""`Pending`: the SENDs of a segment producer that have no receipt yet.  Pure."""

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from magnetar.produce.outgoing import SentEntry
from magnetar.protocol.checksum import crc32c
from magnetar.protocol.server_error import ServerError


class Verdict(enum.Enum):
    """The meaning of an answer to a SEND."""

    IGNORED = "ignored"
    """The SEND was answered before."""
    STORED = "stored"
    """The SEND is stored, and removed from `Pending`."""
    REFUSED = "refused"
    """The SEND is not stored, and removed; the broker goes on with the next one."""
    DAMAGED = "damaged"
    """The SEND was damaged in this process, and is removed."""
    AGAIN = "again"
    """The SEND was damaged on its way, and stays: send it again, or refuse it."""
    ENDED = "ended"
    """The segment accepts no more messages: once `is_over`, no remaining SEND is stored."""
    FENCED = "fenced"
    """Another producer has exclusive access: once `is_over`, no remaining SEND will be stored."""
    REATTACH = "reattach"
    """The outcome is unknown: attach again, and send all again."""


_BY_CODE: Final[Mapping[int, Verdict]] = MappingProxyType(
    {
        ServerError.TOPIC_TERMINATED_ERROR: Verdict.ENDED,
        ServerError.NOT_ALLOWED_ERROR: Verdict.REFUSED,
        ServerError.PRODUCER_FENCED: Verdict.FENCED,
    }
)


class Pending:
    """The SENDs of one segment that have no receipt yet, in order.

    If they are sent again, they are sent whole, in order, with the same sequence ids and publish
    times, by which brokers recognise them.
    """

    __slots__ = ("_over_at", "_sent", "_settled")

    def __init__(self) -> None:
        self._sent: deque[SentEntry] = deque()
        """The SENDs from the oldest without answer on; some later ones may have one."""
        self._settled: set[SentEntry] = set()
        """The SENDs in `_sent` that have an answer."""
        self._over_at: int | None = None
        """The lowest sequence id that was answered by ENDED or FENCED."""

    def __len__(self) -> int:
        return len(self._sent) - len(self._settled)

    def __iter__(self) -> Iterator[SentEntry]:
        return (sent for sent in self._sent if sent not in self._settled)

    @property
    def is_over(self) -> bool:
        """Whether the segment was ended or fenced, and every older SEND has its answer."""
        over_at = self._over_at
        return over_at is not None and (not self._sent or self._sent[0].highest >= over_at)

    def add(self, sends: Sequence[SentEntry]) -> None:
        """Append SENDs that are being written, in this order."""
        self._sent.extend(sends)

    def begin_resend(self) -> None:
        """Forget ENDED and FENCED: all SENDs are written again, and the broker answers again."""
        self._over_at = None

    def receipt(self, sequence_id: int) -> tuple[Verdict, SentEntry | None]:
        """Handle a SEND_RECEIPT; returns the verdict, and with STORED the SEND."""
        if not self._sent:
            return Verdict.IGNORED, None
        first = self._sent[0]
        if first.sequence_id == sequence_id:
            self._sent.popleft()
            if self._settled:
                self._forget()
            return Verdict.STORED, first
        verdict, sent = self._find(sequence_id)
        if sent is None:
            return verdict, None
        self._take(sent)
        return Verdict.STORED, sent

    def error(self, sequence_id: int, code: int) -> tuple[Verdict, SentEntry | None]:
        """Handle a SEND_ERROR; returns the verdict, with REFUSED, DAMAGED and AGAIN the SEND."""
        verdict = _BY_CODE.get(code, Verdict.REATTACH)
        if verdict is Verdict.ENDED or verdict is Verdict.FENCED:
            # This holds for later SENDs; receipts of older ones may still come.
            over_at = self._over_at
            self._over_at = sequence_id if over_at is None else min(over_at, sequence_id)
            return verdict, None
        other, sent = self._find(sequence_id)
        if sent is None:
            return other, None
        if code == ServerError.CHECKSUM_ERROR:
            intact = crc32c(sent.parts[1]) == sent.checksum
            verdict = Verdict.AGAIN if intact else Verdict.DAMAGED
        if verdict is Verdict.REFUSED or verdict is Verdict.DAMAGED:
            self._take(sent)
            return verdict, sent
        return verdict, sent if verdict is Verdict.AGAIN else None

    def refuse(self, sent: SentEntry) -> None:
        """Remove a SEND; answers to others may still come."""
        self._take(sent)

    def prune(self) -> list[SentEntry]:
        """Remove the SENDs for which no caller waits.  Call it only while no receipt can come."""
        return self.take(lambda sent: not sent.wanted)

    def take(self, chosen: Callable[[SentEntry], bool]) -> list[SentEntry]:
        """Remove the chosen SENDs, in order.  Call it only while no receipt can come."""
        taken: list[SentEntry] = []
        for sent in self.take_all():
            (taken if chosen(sent) else self._sent).append(sent)
        return taken

    def take_all(self) -> list[SentEntry]:
        """Remove all SENDs, in order."""
        taken = list(self)
        self._sent.clear()
        self._settled.clear()
        return taken

    def _find(self, sequence_id: int) -> tuple[Verdict, SentEntry | None]:
        """The first SEND without answer with this sequence id; else what an answer to it means.

        It need not be the oldest: Apache Pulsar refuses a SEND before it sends the receipts of
        older ones, and a receipt in a transaction may come after that of a later SEND.
        """
        # An answer to an older SEND: that was sent twice.
        if not self._sent or sequence_id < self._sent[0].sequence_id:
            return Verdict.IGNORED, None
        decided = False
        for sent in self._sent:
            if sequence_id in (sent.sequence_id, sent.highest):
                if sent not in self._settled:
                    return Verdict.IGNORED, sent
                decided = True
        # An answer to a SEND that does not exist: broker and client disagree.
        return Verdict.IGNORED if decided else Verdict.REATTACH, None

    def _take(self, sent: SentEntry) -> None:
        """Mark a SEND as answered."""
        self._settled.add(sent)
        self._forget()

    def _forget(self) -> None:
        """Remove answered SENDs, from the oldest on."""
        while self._sent and self._sent[0] in self._settled:
            self._settled.remove(self._sent.popleft())
