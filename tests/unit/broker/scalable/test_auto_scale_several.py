"""Automatic splits over several brokers: owners report, and only the leader decides."""

from broker.scalable.auto_scale_policy import Rates
from broker.scalable.load_report import Load
from broker.scalable.topic_store import TopicStore
from tests.support.waiting import until
from tests.unit.broker.placement.cluster import Cluster, Node
from tests.unit.broker.scalable.several import TOPIC, hold, segment, take_lead

WHOLE = segment(0, 0xFFFF, 0)
LOWER = segment(0, 0x7FFF, 0)


async def two(cluster: Cluster) -> tuple[Node, Node]:
    nodes = [await cluster.add(scalable_topic_auto_scale_enabled=True) for _ in range(2)]
    await until(lambda: all(len(node.placement.candidates) == 2 for node in nodes))
    return nodes[0], nodes[1]


async def report(node: Node, segment_id: int, msg_in: float) -> None:
    """Store a load report as the owner of a segment does."""
    broker = node.broker
    load = Load(Rates(msg_in))
    await TopicStore(broker.metadata).put_load(TOPIC, segment_id, load, broker.clock.now_ms())


async def active(node: Node) -> list[int]:
    return [s.segment_id for s in (await node.broker.scalable.get(TOPIC)).layout.active]


async def test_the_leader_splits_a_segment_that_another_broker_owns(cluster: Cluster) -> None:
    owner, leader = await two(cluster)
    await owner.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(owner, WHOLE)
    await take_lead(leader)
    await report(owner, 0, 50_000)
    await owner.broker.scalable.scaler.evaluate_all()
    assert owner.broker.scalable.scaler.evaluations_total == 0
    await leader.broker.scalable.get(TOPIC)
    await leader.broker.scalable.scaler.evaluate_all()
    assert await active(leader) == [1, 2, 3, 4, 5]
    assert leader.broker.scalable.scaler.decisions == {("split", "rate"): 1}


async def test_the_next_leader_waits_for_the_cooldown_of_the_one_before(cluster: Cluster) -> None:
    owner, leader = await two(cluster)
    await owner.broker.scalable.create(TOPIC, segments=1, properties={})
    await hold(owner, WHOLE)
    await take_lead(leader)
    await report(owner, 0, 15_000)
    await leader.broker.scalable.get(TOPIC)
    await leader.broker.scalable.scaler.evaluate_all()
    assert await active(leader) == [1, 2]
    await leader.stop()
    # Housekeeping may take the lead at once, as the topic has a sealed segment.
    placement = owner.placement
    await until(lambda: placement.known_owner(TOPIC) is None or placement.owns(TOPIC))
    await hold(owner, segment(0, 0x7FFF, 1))
    await report(owner, 1, 15_000)
    await owner.broker.scalable.scaler.evaluate_all()
    scaler = owner.broker.scalable.scaler
    assert placement.owns(TOPIC)
    assert scaler.refusals == {("rate", "split-cooldown"): 1}
    assert await active(owner) == [1, 2]


async def test_a_topic_without_a_leader_is_led_by_the_owner_of_its_first_segment(
    cluster: Cluster,
) -> None:
    first, second = await two(cluster)
    await first.broker.scalable.create(TOPIC, segments=2, properties={})
    await hold(second, segment(0x8000, 0xFFFF, 1))
    await hold(first, LOWER)
    await second.broker.scalable.get(TOPIC)
    await second.broker.scalable.scaler.evaluate_all()
    assert not second.placement.owns(TOPIC)
    await first.broker.scalable.scaler.evaluate_all()
    assert first.placement.owns(TOPIC)
    assert first.broker.scalable.scaler.evaluations_total == 1
