"""Among three brokers, a new leader of a topic gives every ordered consumer what it had."""

from broker.scalable.assignment_record import StoredAssignment
from broker.scalable.topic_store import TopicStore
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.several import TOPIC, OrderedReader, give_up_lead, take_lead

SEGMENTS = 7
GRACE_S = 30
Assigned = dict[str, list[int]]


def assigned(readers: list[OrderedReader]) -> Assigned:
    return {each.name: each.assigned for each in readers}


def is_shared(readers: list[OrderedReader]) -> bool:
    """Whether the readers share all segments, and are attached to what they have."""
    if not all(each.assigned for each in readers):
        return False
    given = sorted(segment for own in assigned(readers).values() for segment in own)
    attached = all(len(each.attached) == len(each.assigned) for each in readers)
    return given == list(range(SEGMENTS)) and attached


async def three(cluster: Cluster) -> list[Node]:
    nodes = [await cluster.add(scalable_consumer_grace_period_s=GRACE_S) for _ in range(3)]
    await until(lambda: all(len(node.placement.candidates) == 3 for node in nodes))
    await nodes[0].broker.scalable.create(TOPIC, segments=SEGMENTS, properties={})
    return nodes


async def joined(cluster: Cluster, names: str) -> list[OrderedReader]:
    """Readers that joined one after the other."""
    readers: list[OrderedReader] = []
    for name in names:
        readers.append(OrderedReader(cluster, name))
        await until(lambda: is_shared(readers))
    return readers


async def stored(cluster: Cluster) -> StoredAssignment | None:
    record = await TopicStore(cluster.metadata).subscription_record(TOPIC, "s")
    return None if record is None else record.assignment


async def until_stored(cluster: Cluster, had: Assigned) -> None:
    shares = {name: frozenset(own) for name, own in had.items()}
    wanted = StoredAssignment(shares, planned=shares)

    async def is_stored() -> bool:
        return await stored(cluster) == wanted

    await until_awaited(is_stored)


async def test_readers_have_what_they_had_at_each_new_leader(cluster: Cluster) -> None:
    nodes = await three(cluster)
    await take_lead(nodes[0])
    readers = await joined(cluster, "cab")
    had = assigned(readers)
    by_name = {n: list(range(at, SEGMENTS, 3)) for at, n in enumerate("abc")}
    assert had != by_name, "the names alone would give the same"
    try:
        await until_stored(cluster, had)
        for happening in ("moves", "dies", "drains"):
            leader = next(node for node in cluster.nodes if node.placement.owns(TOPIC))
            before = [each.registrations for each in readers]
            if happening == "moves":
                await give_up_lead(leader)
            else:
                cluster.nodes.remove(leader)
                await (leader.kill() if happening == "dies" else leader.broker.drain())
                await cluster.add(scalable_consumer_grace_period_s=GRACE_S)

            def are_back(before: list[int] = before) -> bool:
                again = zip(readers, before, strict=True)
                return all(each.registrations > times for each, times in again)

            await until(are_back)
            await until(lambda: is_shared(readers))
            assert assigned(readers) == had, f"the leader {happening}"
            await until_stored(cluster, had)
    finally:
        for reader in readers:
            await reader.close()
