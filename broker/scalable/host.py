"""The interface of the broker, as scalable topics use it."""

import random
from typing import Protocol

from broker.placement import Placement
from broker.policies.namespaces import Namespaces
from broker.policies.policies_in_force import PoliciesInForce
from broker.policies.topic_policies import TopicPolicies
from broker.topics.offloading import Offloads
from broker.topics.registry import TopicRegistry
from broker.topics.schemas import SchemaRegistry
from broker.topics.subscription_positions import OtherClusters
from broker.topics.topic_counts import TopicCounts
from config.settings import Settings
from storage.clock import Clock
from storage.managed_ledger.factory import ManagedLedgerFactory
from storage.metadata.counted_metadata import CountedMetadata
from storage.metadata.store import Session


class ScalableHost(Protocol):
    """The services of a broker that scalable topics use."""

    settings: Settings
    clock: Clock
    random: random.Random
    metadata: CountedMetadata
    session: Session
    """The session of this process, for its ephemeral records."""
    managed_ledgers: ManagedLedgerFactory
    placement: Placement
    namespaces: Namespaces
    topic_policies: TopicPolicies
    policies: PoliciesInForce
    schemas: SchemaRegistry
    topic_counts: TopicCounts
    topics: TopicRegistry
    offloads: Offloads

    @property
    def replications(self) -> OtherClusters:
        """The other clusters."""
        ...

    @property
    def broker_id(self) -> str:
        """`host:port` of the REST address: Pulsar's broker id."""
        ...
