"""What a segment producer has sent and has no receipt for.  Pure.

Pure.  Rules:

- An answer is for the first SEND of its sequence id that waits, be it not the oldest: Apache Pulsar
  refuses a SEND at once, while receipts of older ones are on their way, and the receipt of one in a
  transaction may come after that of a later one.  What is decided so leaves its place in the order.
- One for a lower sequence id than the first that waits is of something sent twice, and ignored; one
  for a higher id that nothing waits with means that the broker and this client do not agree any
  more: reattach, and send again.
- That the segment takes no more, or that another producer has the topic, is true of what comes
  after: older ones may have their receipts yet (`is_over`).
- Whatever is sent again is sent whole, in order, under the same sequence ids and publish times:
  brokers tell by them what they have.
- A SEND_ERROR says what becomes of everything, see `Verdict`.
"""

import enum
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from magnetar.produce.outgoing import Sent
from magnetar.protocol.checksum import crc32c
from magnetar.protocol.server_error import ServerError


class Verdict(enum.Enum):
    """What an answer of the broker means."""

    IGNORED = "ignored"
    """It is of something that is decided."""
    STORED = "stored"
    """It is taken out: it is stored."""
    REFUSED = "refused"
    """It is taken out: it is not stored, and the broker goes on with the next."""
    DAMAGED = "damaged"
    """It is taken out: it was damaged here."""
    AGAIN = "again"
    """It was damaged on its way, and stays: it is to be sent again, or to be refused."""
    ENDED = "ended"
    """The segment takes no more: once `is_over`, none of it is stored."""
    FENCED = "fenced"
    """Another producer has the topic for itself: once `is_over`, none of it will be stored."""
    REATTACH = "reattach"
    """Nobody knows: reattach, and send it again."""


_BY_CODE: Final[Mapping[int, Verdict]] = MappingProxyType(
    {
        ServerError.TOPIC_TERMINATED_ERROR: Verdict.ENDED,
        ServerError.NOT_ALLOWED_ERROR: Verdict.REFUSED,
        ServerError.PRODUCER_FENCED: Verdict.FENCED,
    }
)


class Pending:
    """Messages of one segment that were sent and have no receipt yet."""

    __slots__ = ("_over_at", "_sent", "_settled")

    def __init__(self) -> None:
        self._sent: deque[Sent] = deque()
        """From the oldest that waits on; with what is decided out of turn."""
        self._settled: set[Sent] = set()
        """Of them, what is decided."""
        self._over_at: int | None = None
        """The lowest sequence id that was answered by ENDED or FENCED."""

    def __len__(self) -> int:
        return len(self._sent) - len(self._settled)

    def __iter__(self) -> Iterator[Sent]:
        return (sent for sent in self._sent if sent not in self._settled)

    @property
    def is_over(self) -> bool:
        """Whether the segment takes no more, and everything older is decided."""
        over_at = self._over_at
        return over_at is not None and (not self._sent or self._sent[0].highest >= over_at)

    def add(self, sends: Sequence[Sent]) -> None:
        """They are being sent, in this order."""
        self._sent.extend(sends)

    def resent(self) -> None:
        """All of it is sent again: the broker says anew what it takes."""
        self._over_at = None

    def receipt(self, sequence_id: int) -> tuple[Verdict, Sent | None]:
        """A SEND_RECEIPT.  What it takes out comes with STORED."""
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

    def error(self, sequence_id: int, code: int) -> tuple[Verdict, Sent | None]:
        """A SEND_ERROR.  What it takes out comes with REFUSED and DAMAGED, what stays: AGAIN."""
        verdict = _BY_CODE.get(code, Verdict.REATTACH)
        if verdict is Verdict.ENDED or verdict is Verdict.FENCED:
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

    def refuse(self, sent: Sent) -> None:
        """Take out what waits; answers of the others may come."""
        self._take(sent)

    def prune(self) -> list[Sent]:
        """Take out what nobody waits for any more; only while no receipt can come."""
        return self.take(lambda sent: not sent.wanted)

    def take(self, chosen: Callable[[Sent], bool]) -> list[Sent]:
        """Take out what is chosen, in order; only while no receipt can come."""
        taken: list[Sent] = []
        for sent in self.take_all():
            (taken if chosen(sent) else self._sent).append(sent)
        return taken

    def take_all(self) -> list[Sent]:
        """All that waits, in order; nothing does afterwards."""
        taken = list(self)
        self._sent.clear()
        self._settled.clear()
        return taken

    def _find(self, sequence_id: int) -> tuple[Verdict, Sent | None]:
        """The first that waits with it; else what an answer for it means."""
        if not self._sent or sequence_id < self._sent[0].sequence_id:
            return Verdict.IGNORED, None
        decided = False
        for sent in self._sent:
            if sequence_id in (sent.sequence_id, sent.highest):
                if sent not in self._settled:
                    return Verdict.IGNORED, sent
                decided = True
        return Verdict.IGNORED if decided else Verdict.REATTACH, None

    def _take(self, sent: Sent) -> None:
        """It is decided."""
        self._settled.add(sent)
        self._forget()

    def _forget(self) -> None:
        """From the oldest on, what is decided."""
        while self._sent and self._sent[0] in self._settled:
            self._settled.remove(self._sent.popleft())
