"""Pure: the chunks of messages that are too large for one entry, until the last one is read.

A chunked message counts as one entry at the position of its last chunk, so all its chunks go to one
remote segment, one after the other, and go again if the last one is not stored there.
"""

from dataclasses import dataclass, field

from config.bounds import REPLICATED_CHUNKED_MESSAGES
from magnetar.protocol.ids import Position


@dataclass(slots=True)
class _Group:
    """The chunks of one message, in order, as far as they were read."""

    chunks: int
    begun_ms: int
    positions: list[Position] = field(default_factory=list)


class ChunkGroups:
    """The chunked messages of one segment that are not acknowledged."""

    def __init__(self, limit: int = REPLICATED_CHUNKED_MESSAGES) -> None:
        """Above `limit` messages that are not whole the one that was begun first is given up."""
        self._limit = limit
        self._groups: dict[str, _Group] = {}
        """The messages whose last chunk was not read, by uuid."""
        self._whole: dict[Position, tuple[Position, ...]] = {}
        """All chunks of each whole message, by the entry of each of them."""
        self._dropped: list[Position] = []

    def add(
        self, position: Position, uuid: str, chunk_id: int, chunks: int, begun_ms: int
    ) -> tuple[Position, ...] | None:
        """Take a chunk: the positions before it if it is the last one of a whole message.

        `begun_ms` is now, for `give_up`: in a backlog the publish time says nothing.  A chunk that
        was taken before is answered as it was.  None: the message is not whole yet, or never will
        be; see `dropped`.
        """
        whole = self._whole.get(position)
        if whole is not None:
            return whole[:-1] if position == whole[-1] else None
        group = self._groups.get(uuid)
        if group is None and chunk_id:
            # Of a message that was given up, or begun before the log: it takes no other's place.
            self._dropped.append(position)
            return None
        if group is None or (chunk_id == 0 and position not in group.positions):
            # A producer that begins anew: consumers drop what it sent before.
            self._drop(uuid)
            group = self._groups[uuid] = _Group(chunks, begun_ms)
            if len(self._groups) > self._limit:
                self._drop(next(iter(self._groups)))
        if position in group.positions:
            return None
        if chunk_id != len(group.positions):
            # One that is there already, or one after a gap.
            self._dropped.append(position)
            if chunk_id > len(group.positions):
                self._drop(uuid)
            return None
        group.positions.append(position)
        if len(group.positions) < group.chunks:
            return None
        whole = tuple(self._groups.pop(uuid).positions)
        self._whole.update(dict.fromkeys(whole, whole))
        return whole[:-1]

    def done(self, last: Position) -> tuple[Position, ...]:
        """The entries that are acknowledged with this one: the chunks before it, and itself."""
        whole = self._whole.get(last, (last,))
        for position in whole:
            self._whole.pop(position, None)
        return whole

    def give_up(self, before_ms: int | None = None) -> None:
        """Give up messages that are not whole, those begun before that time, or all of them.

        That is all of them when a log has ended, as nobody will ever get them.
        """
        for uuid, group in list(self._groups.items()):
            if before_ms is None or group.begun_ms < before_ms:
                self._drop(uuid)

    def dropped(self) -> list[Position]:
        """The entries that are not sent, and acknowledged: each is answered once."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _drop(self, uuid: str) -> None:
        group = self._groups.pop(uuid, None)
        if group is not None:
            self._dropped += group.positions
