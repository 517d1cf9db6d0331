"""The leader: who it is, and what it moves."""

from broker.placement.balance_election import LEADER
from tests.support.waiting import until, until_awaited
from tests.unit.broker.placement.cluster import Cluster, Node

TOPICS = [f"persistent://public/default/t{number}" for number in range(18)]


async def knows_all(node: Node, count: int) -> None:
    await until(lambda: len(node.placement.owners()) == count)


async def rounds(leader: Node) -> int:
    """As many as move something; how much they moved."""
    moved = 0
    while done := await leader.placement.shedding.round():
        moved += done
    return moved


async def test_the_leader_gives_a_new_broker_its_share(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    for number, topic in enumerate(TOPICS):
        await (await (first, second)[number % 2].client()).create_producer(topic)
    await knows_all(first, 18)
    assert await rounds(first) == 0, "even is even"
    third = await cluster.add()
    await knows_all(third, 18)
    assert await third.placement.shedding.round() == 0, "it does not lead"
    moved = await rounds(first)
    assert moved == first.placement.counters.moves == len(third.placement.owned)
    assert [len(node.placement.owned) for node in cluster.nodes] == [6, 6, 6]
    assert {*third.placement.owned} == {*third.broker.topics.loaded()}, "loaded, not only named"
    await knows_all(first, 18)
    assert await rounds(first) == 0


async def test_a_draining_broker_is_given_nothing_and_a_lone_one_keeps_all(
    cluster: Cluster,
) -> None:
    first, second = await cluster.add(), await cluster.add()
    await second.placement.begin_drain()
    await until(lambda: first.placement.candidates == (first.id,))
    for topic in TOPICS:
        await (await first.client()).create_producer(topic)
    assert await rounds(first) == 0


async def test_when_the_leader_goes_another_one_leads(cluster: Cluster) -> None:
    first, second, third = [await cluster.add() for _ in range(3)]
    assert first.placement.is_leader
    await first.kill()
    await until(lambda: second.placement.is_leader or third.placement.is_leader)
    leader = second if second.placement.is_leader else third
    both = (second, third)
    await until(lambda: all(each.placement.leader == leader.placement.me for each in both))
    before = await cluster.metadata.get(LEADER)
    assert before is not None
    await leader.view.expire()

    async def leads_anew() -> bool:
        record = await cluster.metadata.get(LEADER)
        return record is not None and record.version != before.version

    # The one that led believes so until it hears of its session's end.
    await until_awaited(leads_anew)
    record = await cluster.metadata.get(LEADER)
    assert record is not None
    assert record.ephemeral
    await until(lambda: second.placement.leader == third.placement.leader is not None)
    await until(lambda: second.placement.is_leader != third.placement.is_leader)


async def test_topic_that_its_owner_does_not_release_stays(cluster: Cluster) -> None:
    first, second = await cluster.add(), await cluster.add()
    for topic in TOPICS:
        await (await second.client()).create_producer(topic)
    await knows_all(first, 18)
    await second.admin.stop()
    assert await first.placement.shedding.round() == 0
    assert len(second.placement.owned) == 18
    assert first.placement.counters.moves == 0
