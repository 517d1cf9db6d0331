"""Truncation of a topic: every subscription goes to the end, and what is stored is dropped."""

from http import HTTPStatus
from typing import ClassVar

from broker.topics.dispatch.errors import SubscriptionUnavailable
from broker.topics.subscription import Subscription
from broker.topics.topic import Topic
from magnetar.protocol.ids import Position
from magnetar.protocol.server_error import PeerError, ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR
from storage.managed_ledger.stream_ranges import after


class TruncationRefused(PeerError):
    """The topic is being compacted: truncate it afterwards."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR
    http_status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


async def truncate(topic: Topic) -> None:
    """Move all subscriptions behind the messages that may be read now, and drop their ledgers.

    No retention keeps these.  Messages from the first one of an open transaction on stay: they are
    not published yet.  So do those that are published meanwhile.  The compacted ledger goes too.
    Raises `TruncationRefused`, and as `Subscription.seek` and `ManagedLedger.drop_up_to`.
    """
    _require_not_running(topic)
    # First of all, or messages that are published meanwhile would keep the ledger that they are in.
    await topic.ledger.end_ledger()
    _require_not_running(topic)
    last = topic.max_read_position()
    if COMPACTION_CURSOR in topic.subscriptions:
        # Its ledger is a second copy of what goes.  The next compaction makes both anew.
        await topic.unsubscribe(COMPACTION_CURSOR, force=True)
    for subscription in topic.followers:
        if subscription.name != COMPACTION_CURSOR:
            await move_behind(topic, subscription, last)
    # The sequence ids of producers are read from the entries after their last snapshot.
    await topic.sequence_store.save()
    # A compaction that has begun meanwhile reads what would go, and may have copied it by now.
    if COMPACTION_CURSOR in topic.subscriptions:
        raise _refused(topic)
    await topic.ledger.drop_up_to(last)


def _require_not_running(topic: Topic) -> None:
    if topic.compaction.running:
        raise _refused(topic)


def _refused(topic: Topic) -> TruncationRefused:
    return TruncationRefused(
        f"{topic.name} is being compacted: truncate it when its compaction has ended."
    )


async def move_behind(topic: Topic, subscription: Subscription, last: Position) -> None:
    """Have a subscription continue behind a position, unless it has come further or ends meanwhile.

    Raises `TopicUnavailable` if the whole topic is closed, and as `Subscription.seek`.
    """
    if subscription.cursor.mark_delete >= last:
        return
    try:
        await subscription.seek(after(last))
    except SubscriptionUnavailable:
        topic.require_readable()
        if not subscription.closed:
            raise
