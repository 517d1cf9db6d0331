"""Pure: names of Apache Pulsar's transaction coordinators and logs, which are no topics here.

v4 clients find coordinator k by a lookup of partition k of a topic that only exists as a name.  The
names of Pulsar's transaction logs are refused: a client that opens one expects its records.
"""

from typing import ClassVar, Final

from magnetar.protocol.names import NamespaceName, TopicDomain, TopicName
from magnetar.protocol.server_error import PeerError, ServerError

_SYSTEM: Final = NamespaceName("pulsar", "system")
COORDINATORS: Final = TopicName(
    TopicDomain.PERSISTENT, _SYSTEM.tenant, _SYSTEM.namespace, "transaction_coordinator_assign"
)
"""The name whose partition k stands for coordinator k."""
_LOG_PREFIX: Final = "__transaction_log_"
_PENDING_ACK_SUFFIX: Final = "__transaction_pending_ack"


class ReservedTopicName(PeerError):
    """The name belongs to transaction coordinators, and no topic may have it."""

    code: ClassVar[ServerError] = ServerError.NOT_ALLOWED_ERROR


def names_coordinators(name: TopicName) -> bool:
    """Whether it is the name of the coordinators, or of one of them, in any domain."""
    return name.namespace_name == _SYSTEM and name.partitioned.local_name == COORDINATORS.local_name


def coordinator_of(name: TopicName) -> int | None:
    """The coordinator that a name stands for; None for any other name."""
    is_one = name.domain is TopicDomain.PERSISTENT and names_coordinators(name)
    return name.partition_index if is_one else None


def require_not_reserved(name: TopicName) -> None:
    """Raise `ReservedTopicName` for the persistent names of coordinators and of their logs."""
    if name.domain is not TopicDomain.PERSISTENT:
        return
    local_name = name.partitioned.local_name
    is_log = name.namespace_name == _SYSTEM and local_name.startswith(_LOG_PREFIX)
    if is_log or names_coordinators(name) or local_name.endswith(_PENDING_ACK_SUFFIX):
        raise ReservedTopicName(
            f"{name} is reserved for transaction coordinators, and is no topic here: use another "
            "name."
        )
