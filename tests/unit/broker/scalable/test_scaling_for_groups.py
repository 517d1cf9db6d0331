"""Splits, rebuckets and merges for several groups of ordered consumers on one topic."""

from collections.abc import AsyncIterator, Mapping

import pytest

from broker.scalable import layout as layouts
from broker.scalable.auto_scale_policy import AutoScalePolicy, Rates
from broker.scalable.consumer_groups import ConsumerGroup
from broker.scalable.layout import Layout
from broker.scalable.load_report import SegmentLoad
from broker.scalable.scale_decision import Action, Cause, Rule, Situation, Verdict, decide
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World

NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
SHARING_CLIENT = "Pulsar-Java-v5.0.0"


def decided(
    layout: Layout,
    *groups: ConsumerGroup,
    msg_in: float = 0,
    max_buckets: int = 1024,
    reserved: int = 0,
) -> Verdict:
    """The verdict on segments that have had this rate for an hour, and that hold many keys."""
    loads = {
        each.segment_id: SegmentLoad(Rates(msg_in), quiet_since_ms=NOW_MS - HOUR_MS)
        for each in layout.active
    }
    return decide(
        Situation(
            layout,
            AutoScalePolicy(),
            NOW_MS,
            loads,
            groups,
            reserved=reserved,
            max_buckets=max_buckets,
            samples=dict.fromkeys(loads),
        )
    )


def segments(count: int, buckets: int = 1) -> Layout:
    return layouts.initial(count, now_ms=NOW_MS - HOUR_MS, bucket_budget=count * buckets)


def causes(verdict: Verdict) -> Mapping[Rule, Cause]:
    return {each.rule: each.cause for each in verdict.refusals}


def checkpoint(consumers: int) -> ConsumerGroup:
    return ConsumerGroup(consumers, is_stream=False)


def sharers(consumers: int) -> ConsumerGroup:
    return ConsumerGroup(consumers, can_share=True)


def test_consumers_that_cannot_share_keep_segments_beside_a_group_that_can() -> None:
    """A CHECKPOINT group never shares, nor does a STREAM group of older clients."""
    for needing in (checkpoint(4), ConsumerGroup(4)):
        verdict = decided(segments(4), needing, sharers(1))
        assert verdict.decision is None
        assert causes(verdict)[Rule.MERGE] is Cause.CONSUMERS_NEED_THEM


def test_segments_are_merged_down_to_the_consumers_that_cannot_share() -> None:
    decision = decided(segments(4), checkpoint(2), sharers(4)).decision
    assert decision is not None
    assert decision.segment_ids == (0, 1, 2), "2 are left, with 4 buckets together"
    decision = decided(segments(4), sharers(4)).decision
    assert decision is not None
    assert decision.segment_ids == (0, 1, 2, 3)


def test_consumers_that_cannot_share_get_segments_beside_a_group_that_can() -> None:
    for lacking in (checkpoint(8), ConsumerGroup(8)):
        decision = decided(segments(1), lacking, sharers(1), msg_in=500).decision
        assert decision is not None
        assert (decision.action, decision.parts) == (Action.SPLIT, 8)


def test_each_group_counts_for_what_it_can_use() -> None:
    """8 sharers need buckets; the 2 consumers that cannot share have a segment each."""
    decision = decided(segments(2), checkpoint(2), sharers(8), msg_in=500).decision
    assert decision is not None
    assert (decision.action, decision.bucket_count) == (Action.REBUCKET, 4)
    # A third one needs a segment more, however little traffic there is.
    decision = decided(segments(2), checkpoint(3), sharers(8), msg_in=500).decision
    assert decision is not None
    assert (decision.action, decision.parts) == (Action.SPLIT, 2)


def test_a_merge_leaves_a_bucket_for_each_sharing_consumer() -> None:
    full = segments(2, buckets=4)
    verdict = decided(full, sharers(8), max_buckets=4)
    assert verdict.decision is None
    assert causes(verdict)[Rule.MERGE] is Cause.CONSUMERS_NEED_THEM
    assert "8 ordered consumers share 8 entry buckets" in verdict.refusals[-1].why
    assert decided(full, sharers(8), max_buckets=8).decision is not None
    assert decided(full, sharers(4), max_buckets=4).decision is not None


def test_a_merge_takes_only_the_neighbours_whose_buckets_can_be_spared() -> None:
    """4 segments of 4 buckets, of which one can have 8: a merge of 3 would take 4 of the 16."""
    decision = decided(segments(4, buckets=4), sharers(13), max_buckets=8).decision
    assert decision is not None
    assert decision.segment_ids == (0, 1)
    # The pair with the lowest rates cannot be spared, another one can.
    some = layouts.initial(4, now_ms=NOW_MS - HOUR_MS, bucket_budget=4)
    for segment_id in (0, 1):
        some = layouts.rebucket(some, [segment_id], 4, now_ms=NOW_MS - HOUR_MS).layout
    decision = decided(some, sharers(10), max_buckets=4).decision
    assert decision is not None
    assert decision.segment_ids == (2, 3)


def test_consumers_that_have_too_few_buckets_keep_those() -> None:
    assert decided(segments(2, buckets=4), sharers(20), max_buckets=4).decision is None


@pytest.fixture
async def node(world: World) -> AsyncIterator[Node]:
    node = await Node(world, scalable_topic_auto_scale_enabled=True).start()
    await node.scalable.create(TOPIC, segments=1, properties={})
    yield node
    await node.stop()


async def test_checkpoint_consumers_get_segments_beside_a_sharing_consumer(node: Node) -> None:
    await Peer(node, client_version=SHARING_CLIENT).register("sharing")
    checkpoints = Peer(node, client_version=SHARING_CLIENT)
    for number in range(2):
        await checkpoints.register(f"checkpoint-{number}", "of-checkpoints", kind=pb.CHECKPOINT)
    live = await node.live()
    await until(lambda: len(live.layout.active) == 2)


async def test_an_m1_group_gets_segments_beside_a_larger_group_that_shares(node: Node) -> None:
    new, old = Peer(node, client_version=SHARING_CLIENT), node.peer()
    for number in range(3):
        await new.register(f"new-{number}")
    for number in range(2):
        await old.register(f"old-{number}", "of-m1")
    live = await node.live()
    await until(lambda: len(live.layout.active) == 2)
