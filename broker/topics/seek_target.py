"""The message to which a subscription is moved, or at which it begins."""

from dataclasses import dataclass

from broker.topics.dispatch.last_message import batch_size_at
from broker.topics.subscription import Subscription
from magnetar.protocol.ack_set import pending_all, to_words
from magnetar.protocol.ids import EARLIEST, LATEST, Position


@dataclass(frozen=True, slots=True)
class SeekTarget:
    """The first message to be delivered, or (`excluded`) the one before it.

    A negative `batch_index` means the whole entry.
    """

    position: Position
    batch_index: int = -1
    excluded: bool = False

    @property
    def at_edge(self) -> bool:
        """Whether the target is before or after all messages."""
        return self.position in (EARLIEST, LATEST)

    @property
    def start(self) -> Position:
        """The start of a new subscription: the position before the entry of the target."""
        if self.at_edge:
            return self.position
        return Position(self.position.ledger_id, self.position.entry_id - 1)

    @property
    def first_entry(self) -> Position:
        """The position of the first entry of which something is delivered.

        Without a batch index `excluded` leaves out the whole entry.
        """
        if self.at_edge or self.batch_index >= 0 or not self.excluded:
            return self.position
        return self.position.following

    @property
    def within_entry(self) -> bool:
        """Whether a subscription that begins at the entry still has to be moved to the target."""
        return self.batch_index > 0 or self.excluded

    async def seek(self, subscription: Subscription) -> None:
        """Move the subscription to the target."""
        if self.at_edge:
            await subscription.seek(self.position)
            return
        size = 1
        if self.batch_index >= 0:
            size = max(size, await batch_size_at(subscription.ledger, self.position))
        first = min(max(self.batch_index, 0), size - 1) + self.excluded
        if first == size or (self.excluded and self.batch_index < 0):
            behind = self.position.following
            await subscription.seek(behind)
        elif first == 0:
            await subscription.seek(self.position)
        else:
            left = pending_all(size) >> first << first
            await subscription.seek(self.position, to_words(left), size)
