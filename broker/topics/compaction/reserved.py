"""Pure: names of subscriptions that no client may use or move."""

from typing import ClassVar

from broker.topics.replication import is_replicator_cursor
from broker.topics.source_positions import REPLICATOR_PREFIX
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


def require_of_clients(name: str) -> None:
    """The same, and for the names of replicators' cursors (Apache Pulsar's)."""
    require_of_users(name)
    if is_replicator_cursor(name):
        raise ReservedSubscription(
            f"Subscription {name!r:.100} would have the name of a replicator's cursor: use a "
            f"name that does not begin with {REPLICATOR_PREFIX!r}."
        )
