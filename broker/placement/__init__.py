"""Who owns what, among the brokers that share their stores."""

from broker.placement.placement import (
    BrokerAddress,
    OneBroker,
    OwnedElsewhere,
    Placed,
    Placement,
    PlacementCounters,
    PlacementNotReady,
)

__all__ = [
    "BrokerAddress",
    "OneBroker",
    "OwnedElsewhere",
    "Placed",
    "Placement",
    "PlacementCounters",
    "PlacementNotReady",
]
