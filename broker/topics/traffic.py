"""Pure: rates of a topic's or subscription's traffic, between two readings of its counters."""


class Traffic:
    """Rates by the second, in messages and bytes, in and out; 0 until there were two readings."""

    __slots__ = ("_counts", "_read_s", "bytes_in", "bytes_out", "messages_in", "messages_out")

    def __init__(self) -> None:
        self._counts = (0, 0, 0, 0)
        self._read_s: float | None = None
        self.messages_in = 0.0
        self.bytes_in = 0.0
        self.messages_out = 0.0
        self.bytes_out = 0.0

    def observe(self, now_s: float, *counts: int) -> None:
        """Take a reading: messages and bytes in, messages and bytes out."""
        before, read_s = self._counts, self._read_s
        messages_in, bytes_in, messages_out, bytes_out = counts
        self._counts = (messages_in, bytes_in, messages_out, bytes_out)
        self._read_s = now_s
        if read_s is None or now_s <= read_s:
            return
        took_s = now_s - read_s
        self.messages_in, self.bytes_in, self.messages_out, self.bytes_out = (
            max(0, now - then) / took_s for now, then in zip(self._counts, before, strict=True)
        )

    def as_members(self, *, incoming: bool) -> dict[str, float]:
        """The rates under Pulsar's names; those of a subscription are outgoing only."""
        found = {"msgRateOut": self.messages_out, "msgThroughputOut": self.bytes_out}
        if incoming:
            found |= {"msgRateIn": self.messages_in, "msgThroughputIn": self.bytes_in}
        return found
