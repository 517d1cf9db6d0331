"""`SharedSegment`: a segment that a stream consumer shares with others by entry buckets."""

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final, cast

from magnetar.consume.ack_tracker import Acknowledgement
from magnetar.consume.acknowledgements import DONE, AckTransaction, share_outcome
from magnetar.consume.commands import acks_of
from magnetar.consume.delivery_log import DeliveryLog
from magnetar.consume.message import EntryKey, RawMessage
from magnetar.consume.ordered_segments import OrderedReader, OrderedSegment
from magnetar.consume.receiving import Inbox
from magnetar.consume.segment_consumer import SegmentConsumer, SubscribedSegment
from magnetar.consume.settings import SubscribeSettings
from magnetar.context import ClientContext
from magnetar.errors import MagnetarError
from magnetar.message_id import EntryId

__all__ = ["SharedSegment"]


class SharedSegment(OrderedSegment):
    """A segment that a stream consumer shares with others by entry buckets (PIP-486).

    The broker gives it whole buckets, each in order.  Messages are acknowledged one by one, also
    those up to a message: these are the ones that were handed out until then (`DeliveryLog`).
    """

    def __init__(
        self,
        context: ClientContext,
        segment: SubscribedSegment,
        settings: SubscribeSettings,
        inbox: Inbox[SegmentConsumer],
        reader: OrderedReader,
        log: DeliveryLog,
    ) -> None:
        """`log` may have messages of an earlier consumer of the segment."""
        super().__init__(context, segment, settings, inbox, reader)
        log.attached()
        self.log: Final = log
        self._handed_out = log

    def goes_back(self, messages: Sequence[RawMessage[SegmentConsumer]]) -> bool:
        """Return False: a bucket that comes from another consumer may begin with smaller ids."""
        return False

    def redeliver_all(self) -> None:
        """Request everything that is not acknowledged again, unless the segment is being left."""
        self.log.expect_again()
        super().redeliver_all()

    def detached(self, error: MagnetarError) -> None:
        """Drop the messages in the inbox, as they come again."""
        SegmentConsumer.detached(self, error)

    def acknowledge_up_to(
        self, message_id: EntryId, transaction: AckTransaction | None = None
    ) -> Awaitable[None]:
        """Acknowledge a message and all that were handed out before it, one by one.

        Raises the errors of `acknowledge`.
        """
        self._check_open()
        if transaction is not None:
            return self._acknowledge_all_in(transaction, message_id)
        for each in self.log.acknowledged_up_to(message_id):
            self._acknowledge(each.key, each.batch_index, each.batch_size)
        return DONE

    def _acknowledge_all_in(
        self, transaction: AckTransaction, message_id: EntryId
    ) -> Awaitable[None]:
        # The transaction first: if it refuses, nothing must have changed here.
        said = transaction.acknowledging_on(self.segment.topic, self.settings.subscription)
        found = self.log.said_up_to(message_id)
        if not found:
            return DONE
        outcome: asyncio.Future[None] = self.context.loop.create_future()
        transaction.track(cast("asyncio.Future[object]", outcome))
        held = _merged(ack for each in found for ack in self._tracker.hold(each))
        commands = list(acks_of(self.consumer_id, held, transaction.id))
        task = self._answering.start(self._send_when_joined(said, commands, None))

        def over(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                for each in found:
                    self.log.acknowledged(each)
                outcome.set_result(None)

        task.add_done_callback(over)
        return share_outcome(outcome)

    def over(self, transaction: tuple[int, int], committed: EntryId | None) -> None:
        """Forget a transaction that is over."""
        super().over(transaction, None)


def _merged(acknowledgements: Iterable[Acknowledgement]) -> list[Acknowledgement]:
    """The acknowledgements with one for each entry."""
    found: dict[EntryKey, Acknowledgement] = {}
    for each in acknowledgements:
        known = found.get(each.key)
        if known is None or not each.ack_set:
            found[each.key] = each
        elif known.ack_set:
            words = [one & other for one, other in zip(known.ack_set, each.ack_set, strict=False)]
            done = not any(words)
            found[each.key] = each._replace(ack_set=() if done else words)
    return list(found.values())
