"""The segments that each ordered consumer of a scalable topic has, as REST shows them."""

from tests.support.broker_process import BrokerProcess
from tests.support.waiting import until_awaited

Assigned = dict[str, list[int]]
"""Segment ids by consumer name."""
READY_S = 60


async def assigned(broker: BrokerProcess, topic: str, subscription: str = "s") -> Assigned:
    """The segments of each connected consumer; empty while no broker leads the topic."""
    status, stats = await broker.rest("GET", f"/scalable/public/default/{topic}/stats")
    if status == 503:
        return {}
    assert status == 200, stats
    assert isinstance(stats, dict)
    found = stats["subscriptions"].get(subscription, {"consumers": []})
    # Before the first consumer is back there is no controller, and segment consumers are listed.
    registered = [each for each in found["consumers"] if "segmentIds" in each]
    return {each["consumerName"]: each["segmentIds"] for each in registered if each["connected"]}


async def until_assigned(
    broker: BrokerProcess, topic: str, consumers: int, places: int, subscription: str = "s"
) -> Assigned:
    """Wait until so many consumers are connected and have `places` segments in all.

    A segment counts once for each consumer that has it.  Returns the segments of each consumer.
    """
    found: Assigned = {}

    async def is_complete() -> bool:
        nonlocal found
        found = await assigned(broker, topic, subscription)
        given = [segment for own in found.values() for segment in own]
        return len(found) == consumers and len(given) == places

    await until_awaited(is_complete, READY_S)
    return found
