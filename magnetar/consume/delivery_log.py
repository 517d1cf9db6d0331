"""`DeliveryLog`: the messages that were handed out of a shared segment, in order.  Pure."""

from collections.abc import Iterable

from magnetar.consume.acknowledgements import OutstandingMessages
from magnetar.consume.message import RawMessage
from magnetar.message_id import EntryId

__all__ = ["DeliveryLog", "SharedEntryId"]


class SharedEntryId(EntryId):
    """The id of a message that was handed out of a shared segment.

    In a position vector it stands for the messages that were handed out until then, and not for all
    smaller ids: other consumers have some of these.
    """

    __slots__ = ()


class DeliveryLog(OutstandingMessages):
    """The messages handed out of a shared segment that are not acknowledged, in that order.

    It is the order of ids within each entry bucket only: a bucket that another consumer had before
    comes later.  Consumers of the segment that follow each other use one log.
    """

    __slots__ = ("_again", "_earlier", "_now", "_pending", "_settled")

    def __init__(self) -> None:
        super().__init__()
        self._now: dict[EntryId, None] = {}
        self._earlier: dict[EntryId, None] = {}
        """Messages of earlier attachments; they come again, here or at another consumer."""
        self._pending: set[EntryId] = set()
        """Messages that a transaction has acknowledged, without an answer yet."""
        self._settled: set[EntryId] = set()
        """Messages of earlier attachments that were acknowledged since."""
        self._again: set[EntryId] = set()
        """Messages that were expected again, and not handed out since."""

    def __len__(self) -> int:
        return len(self._now)

    @property
    def is_empty(self) -> bool:
        """Whether everything that was handed out is acknowledged."""
        return not (self._now or self._earlier or self._again)

    def is_open(self, message_id: EntryId) -> bool:
        """Whether a message is not acknowledged."""
        return any(message_id in known for known in (self._now, self._earlier, self._again))

    def is_settled(self, message_id: EntryId) -> bool:
        """Whether a message that came again is acknowledged already."""
        return message_id in self._settled

    def comes_again(self, message_id: EntryId) -> bool:
        """Whether a message must be handed out again before it can be acknowledged."""
        return message_id in self._again

    # Deliveries

    def add(self, received: "RawMessage[object]") -> None:
        """Note a message that is handed out."""
        message_id = received.entry_id
        self._earlier.pop(message_id, None)
        self._again.discard(message_id)
        self._now[message_id] = None

    def take_back(self, received: "RawMessage[object]") -> None:
        """Undo `add`: the message was not handed out after all."""
        self._now.pop(received.entry_id, None)
        self._wake_if_empty()

    # Acknowledgements

    def acknowledged(self, message_id: EntryId) -> None:
        """Note that a message is acknowledged."""
        self._now.pop(message_id, None)
        self._pending.discard(message_id)
        self._wake_if_empty()

    def acknowledged_up_to(self, message_id: EntryId) -> list[EntryId]:
        """Note that the messages up to this one are acknowledged; returns those that were not."""
        found = self.said_up_to(message_id)
        for each in found:
            self.acknowledged(each)
        return found

    def said_up_to(self, message_id: EntryId) -> list[EntryId]:
        """Note that a transaction acknowledges up to a message; returns those not yet in one."""
        earlier = list(self._earlier)
        if message_id in self._now:
            now = _up_to(self._now, message_id)
        elif message_id in self._earlier:
            earlier, now = _up_to(earlier, message_id), []
        else:
            return []
        for each in earlier:
            del self._earlier[each]
            self._settled.add(each)
        now = [each for each in now if each not in self._pending]
        self._pending.update(now)
        return [*earlier, *now]

    # Attachments

    def attached(self) -> None:
        """Begin a new attachment, on which everything comes again."""
        self._settled.clear()
        for each in self._now:
            if each in self._pending:
                self._settled.add(each)
            else:
                self._earlier[each] = None
        self._clear()

    def give_up(self) -> None:
        """End the attachment: the messages can be acknowledged on a later one only."""
        self.attached()

    def expect_again(self) -> None:
        """Expect everything again: no message can be acknowledged before it is handed out again."""
        self._again.update(self._now, self._earlier)
        self._earlier.clear()
        self._settled.clear()
        self._clear()

    def _clear(self) -> None:
        self._now.clear()
        self._pending.clear()
        self._wake_if_empty()

    async def all_acknowledged(self) -> None:
        """Wait until every message of this attachment is acknowledged."""
        while self._now:
            await self._changed()

    def _wake_if_empty(self) -> None:
        if not self._now:
            self._wake()


def _up_to(known: Iterable[EntryId], message_id: EntryId) -> list[EntryId]:
    found: list[EntryId] = []
    for each in known:
        found.append(each)
        if each == message_id:
            break
    return found
