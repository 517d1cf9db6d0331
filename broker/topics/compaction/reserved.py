"""Pure: the subscription of compaction, which no client may use or move."""

from typing import ClassVar

from magnetar.protocol.server_error import PeerError, ServerError
from storage.managed_ledger.compacted_record import COMPACTION_CURSOR


class ReservedSubscription(PeerError):
    """The subscription is the broker's own."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def require_of_users(name: str) -> None:
    """Raise `ReservedSubscription` for the subscription that keeps data until it is compacted."""
    if name == COMPACTION_CURSOR:
        raise ReservedSubscription(
            f"Subscription {COMPACTION_CURSOR!r} belongs to compaction, which alone moves it: use "
            "another name. Deleting it drops the compacted data."
        )
