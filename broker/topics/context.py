"""Services of a broker that its topics use, so that a topic does not depend on the broker."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from broker.policies.applied_policies import AppliedPolicies
from broker.topics.producer_names import ProducerNames
from broker.topics.publish_limits import PublishLimits
from broker.topics.throttle import RateLimit
from broker.topics.throttled_sends import ThrottledSends
from config.settings import Settings
from magnetar.protocol.names import TopicName
from storage.clock import Clock
from txn.parts import TransactionParts


@dataclass(frozen=True, slots=True)
class TopicContext:
    """Services that all topics of a process share."""

    clock: Clock
    random: random.Random
    settings: Settings
    producer_names: ProducerNames
    publish_limits: PublishLimits
    transactions: TransactionParts
    policies: Callable[[TopicName], AppliedPolicies]
    """The policies in force for a topic."""
    throttled_sends: ThrottledSends = field(default_factory=ThrottledSends)
    publish_limit: RateLimit | None = None
    """The rate of publishing to all topics together."""
    dispatch_limit: RateLimit | None = None
    """The rate of sending to consumers of all topics together."""
