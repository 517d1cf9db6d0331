"""The services of a broker that connections and command handlers use."""

from typing import TYPE_CHECKING, Protocol

from broker.placement import Placement
from broker.policies.namespaces import Namespaces
from broker.policies.policies_in_force import PoliciesInForce
from broker.scalable.service import ScalableTopics
from broker.topics.registry import TopicRegistry
from broker.topics.schemas import SchemaRegistry
from broker.topics.segment_reads import SegmentReads
from broker.transactions.service import Transactions
from broker.wire.request_share import CostlyRequests
from config.settings import Settings
from storage.clock import Clock

if TYPE_CHECKING:
    from broker.policies.authorizer import Authorizer
    from security.authenticator import Authenticator


class BrokerServices(Protocol):
    """The services behind the binary protocol."""

    settings: Settings
    clock: Clock
    placement: Placement
    namespaces: Namespaces
    policies: PoliciesInForce
    schemas: SchemaRegistry
    topics: TopicRegistry
    transactions: Transactions
    scalable: ScalableTopics
    segment_reads: SegmentReads
    costly_requests: CostlyRequests
    authenticator: "Authenticator | None"
    """Finds out who a peer is; None: authentication is off."""
    authorizer: "Authorizer | None"
    """Decides what roles may do; None: authorization is off."""
    version: str
    serving: bool
    """Whether clients are accepted."""

    @property
    def max_message_size(self) -> int:
        """The largest payload that producers may send."""
        ...
