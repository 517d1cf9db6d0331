"""Holdings after every release, and the one consumer of each segment."""

from collections.abc import Mapping

from broker.scalable.assignment import Holdings, rebalance, release


def settle(
    holdings: Holdings,
    segments: list[int],
    consumers: set[str],
    places: Mapping[int, int] | None = None,
) -> Holdings:
    """Rebalance, with every former consumer releasing its segments."""
    holdings = rebalance(holdings, segments, consumers, places)
    while holdings.releasing:
        segment_id, former = min(holdings.releasing.items())
        holdings = release(holdings, segment_id, min(former))
        holdings = rebalance(holdings, segments, consumers, places)
    return holdings


def alone(consumers: Mapping[int, frozenset[str]]) -> dict[int, str]:
    """The one consumer of each segment.  Raises if any segment is shared."""
    assert all(len(names) == 1 for names in consumers.values())
    return {segment_id: min(names) for segment_id, names in consumers.items()}
