"""The client that a producer name of a segment last belonged to.  Pure."""

from collections.abc import Sequence
from typing import Self

from broker.topics.carried_ids import LiveWriter

_M1_CLIENT = "Pulsar-Java-v5.0.0-M1"


class NameWriter:
    """The client whose producer had a name last, as far as a broker sees it.

    A layout change passes it on with the name's sequence ids.  `request_id` is that of its
    PRODUCER, `m1_hashes` says whether it chooses segments as clients of 5.0.0-M1 do.  `first` is
    the first sequence id that it sent, None while that is not known.
    """

    __slots__ = ("at_seal", "closed_ms", "first", "fresh", "m1_hashes", "request_id", "sent")

    def __init__(self, request_id: int, client_version: str, *, fresh: bool) -> None:
        """`fresh`: it attaches for the first time, so its first SEND here is the first of all."""
        self.request_id = request_id
        self.m1_hashes = client_version.startswith(_M1_CLIENT)
        self.fresh = fresh
        self.sent = False
        self.first: int | None = None
        self.closed_ms: int | None = None
        """The time when it closed its producer; None if it did not, or only lost its connection."""
        self.at_seal = False
        """Whether it was attached when the segment began to be sealed, or later."""

    def is_client(self, request_id: int) -> bool:
        """Whether a PRODUCER with this request id may come from the same client."""
        return LiveWriter(self.request_id, self.first).is_client(request_id)

    def note_sent(self, first: int | None) -> None:
        """Note a SEND, whether it is stored or not, with its first sequence id if that is known."""
        if not self.sent:
            self.sent = True
            self.first = first if self.fresh else None

    def live(self, changed_ms: int) -> LiveWriter | None:
        """The client, if it wrote here and may write to the segments that a layout change made.

        `changed_ms` is when the change began: a client that closed its producer before was through.
        """
        over = self.closed_ms is not None and self.closed_ms <= changed_ms
        if over or not self.sent:
            return None
        found = LiveWriter(self.request_id, self.first)
        # Two clients with small request ids cannot be distinguished.  One that was not attached at
        # the seal is taken for ended.
        return found if self.at_seal or not found.is_client(0) else None

    def to_row(self, *, attached: bool) -> list[object]:
        """Its JSON.

        One that is attached may send before it is saved again, so it counts as one that has sent.
        """
        return [
            self.request_id,
            self.m1_hashes,
            self.fresh,
            self.sent or attached,
            self.first,
            self.closed_ms,
            self.at_seal,
        ]

    @classmethod
    def from_row(cls, row: Sequence[object]) -> Self:
        """Read its JSON.  Raises TypeError, ValueError."""
        request_id, m1_hashes, fresh, sent, first, closed_ms, at_seal = row
        if not isinstance(request_id, int):
            raise TypeError("a request id is a number")
        writer = cls(request_id, _M1_CLIENT if m1_hashes else "", fresh=bool(fresh))
        writer.sent = bool(sent)
        writer.first = first if isinstance(first, int) else None
        writer.closed_ms = closed_ms if isinstance(closed_ms, int) else None
        writer.at_seal = bool(at_seal)
        return writer
