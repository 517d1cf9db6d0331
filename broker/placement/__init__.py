"""Ownership of topics, segments and leads among the brokers that share their stores."""

from broker.placement.placement import (
    BrokerAddress,
    LookupResult,
    OneBroker,
    OwnedElsewhere,
    Placement,
    PlacementCounters,
    PlacementNotReady,
)

__all__ = [
    "BrokerAddress",
    "LookupResult",
    "OneBroker",
    "OwnedElsewhere",
    "Placement",
    "PlacementCounters",
    "PlacementNotReady",
]
