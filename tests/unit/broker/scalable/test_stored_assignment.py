"""The stored assignment: restarts in every state, other controllers, failing stores."""

import asyncio
import json

import pytest
from structlog.testing import capture_logs

from broker.scalable.assignment_record import StoredAssignment, assignment_from_json
from broker.scalable.assignment_writer import AssignmentWriter
from broker.scalable.counters import ScalableCounters
from broker.scalable.records import SubscriptionKind
from broker.scalable.topic_store import ConcurrentChange, TopicStore
from magnetar.protocol import pulsar_pb2 as pb
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World
from tests.unit.broker.scalable.test_controller import registered, segments, until_told

RECORD = "/topics/public/default/t/subscriptions/s"
LONG_S = 3600


async def node_with(world: World, count: int) -> Node:
    node = await Node(world, scalable_consumer_grace_period_s=LONG_S).start()
    await node.scalable.create(TOPIC, segments=count, properties={})
    return node


async def three_with_six_segments(node: Node) -> dict[str, list[int]]:
    """What c, b and a have after they joined in this order; names alone would share otherwise."""
    for name in "cba":
        await join(node, name)
        node.give_up_waiting()
    return assigned(node)


async def join(node: Node, name: str) -> tuple[Peer, list[int]]:
    peer = node.peer()
    _, answer = await peer.register(name)
    return peer, segments(answer)


def assigned(node: Node, subscription: str = "s") -> dict[str, list[int]]:
    sessions = node.group(subscription).group.sessions
    return {name: sorted(each.assigned) for name, each in sessions.items()}


async def test_every_consumer_has_what_it_had_whoever_comes_first(world: World) -> None:
    node = await node_with(world, 6)
    had = await three_with_six_segments(node)
    by_names = {"a": [0, 3], "b": [1, 4], "c": [2, 5]}
    assert had != by_names, "the record makes no difference otherwise"
    await node.assignment()
    for order in ("abc", "cba", "bca"):
        node = await node.kill()
        for name in order:
            _, own = await join(node, name)
            assert sorted(own) == had[name]
        await node.assignment()
    await node.stop()


async def test_consumer_that_does_not_come_back_keeps_its_share_for_its_grace_period(
    world: World,
) -> None:
    node = await node_with(world, 6)
    had = await three_with_six_segments(node)
    await node.assignment()
    node = await node.kill()
    for name in "ac":
        assert sorted((await join(node, name))[1]) == had[name]
    assert assigned(node) == had
    await node.stop()


async def test_a_consumer_that_does_not_come_back_is_evicted(world: World) -> None:
    node = await node_with(world, 4)
    await join(node, "a")
    await join(node, "b")
    await node.assignment()
    node = await Node(node.world, scalable_consumer_grace_period_s=0).start()
    peer, own = await join(node, "a")
    answer = pb.CommandScalableTopicSubscribeResponse()
    for segment_id in own:
        answer.assignment.segments.add(
            segment_id=segment_id, hash_start=0, hash_end=0, segment_topic=""
        )
    await until_told(peer, [0, 1, 2, 3], answer)
    everything = {"a": frozenset(range(4))}
    assert await node.assignment() == StoredAssignment(everything, planned=everything)
    await node.stop()


async def test_a_clean_restart_keeps_the_assignment_too(world: World) -> None:
    node = await node_with(world, 6)
    had = await three_with_six_segments(node)
    await node.stop()
    node = await Node(world, scalable_consumer_grace_period_s=LONG_S).start()
    for name in "abc":
        assert sorted((await join(node, name))[1]) == had[name]
    await node.stop()


async def test_checkpoint_group_is_restored_and_its_record_goes_with_it(world: World) -> None:
    node = await node_with(world, 4)
    first = node.peer()
    await first.register("b", "g", kind=pb.CHECKPOINT)
    await node.peer().register("a", "g", kind=pb.CHECKPOINT)
    had = assigned(node, "g")
    await node.assignment("g")
    node = await node.kill()
    peers = {name: node.peer() for name in "ab"}
    for name, peer in peers.items():
        _, answer = await peer.register(name, "g", kind=pb.CHECKPOINT)
        assert sorted(segments(answer)) == had[name]
    for peer in peers.values():
        await node.scalable.controllers.unsubscribe(peer.as_connection(), 1)
    controller = node.scalable.controllers.of(TOPIC)
    assert controller is not None
    await until(lambda: controller.idle and not controller.groups)
    assert await node.assignment("g") is None
    assert await node.kind_of("g") is None
    await node.stop()


@pytest.mark.parametrize("dies_after", range(1, 9))
async def test_a_crash_at_any_write_loses_no_segment(world: World, dies_after: int) -> None:
    """Two consumers join, one leaves; the process dies at some write of all that."""
    node = await node_with(world, 4)
    node.mortal.dies_at = len(node.mortal.writes) + dies_after
    peers = {name: node.peer() for name in "ab"}

    async def use() -> None:
        for name, peer in peers.items():
            await peer.register(name)
        await node.scalable.controllers.unsubscribe(peers["a"].as_connection(), 1)

    using = asyncio.ensure_future(use())
    await until(lambda: node.process.dead or using.done())
    using.cancel()
    after = await node.kill()
    for name in "ab":
        await join(after, name)
    after.give_up_waiting()
    now = assigned(after)
    assert sorted(s for own in now.values() for s in own) == [0, 1, 2, 3]
    assert {len(own) for own in now.values()} == {2}
    await after.stop()


async def join_without_a_stored_place(world: World) -> Node:
    """A node where consumer b has both segments, and a is registered without any."""
    node = await node_with(world, 2)
    await join(node, "b")
    await node.assignment()
    await TopicStore(node.metadata).put_consumer(TOPIC, "s", "a")
    return node


async def test_a_joiner_whose_place_was_not_stored_changes_nothing_until_it_comes(
    world: World,
) -> None:
    node = await (await join_without_a_stored_place(world)).kill()
    _, own = await join(node, "b")
    assert own == [0, 1]
    await join(node, "a")
    assert len(assigned(node)["b"]) == 1
    await node.stop()


async def test_a_joiner_whose_place_was_not_stored_and_never_comes_is_forgotten(
    world: World,
) -> None:
    await join_without_a_stored_place(world)
    node = await Node(world, scalable_consumer_grace_period_s=0).start()
    await join(node, "b")
    while await registered(node) != ["b"]:
        await asyncio.sleep(0.01)
    await node.stop()


async def test_a_replaced_controller_changes_the_record_no_more(world: World) -> None:
    old = await node_with(world, 4)
    await join(old, "a")
    await old.assignment()
    new = await Node(world, scalable_consumer_grace_period_s=LONG_S).start()
    await join(new, "a")
    by_new = await new.assignment()
    await join(old, "b")  # It has not learned yet that it was replaced.
    assert await old.assignment() == by_new
    await join(new, "c")
    now = await new.assignment()
    assert now is not None
    assert now.granted.keys() == {"a", "c"}
    await new.stop()


class Writing:
    """A writer of the subscription's record, and the assignment that it has to store."""

    def __init__(self, node: Node) -> None:
        self.present = StoredAssignment()
        self.store = TopicStore(node.metadata)
        self.counters = ScalableCounters()
        self.writer = AssignmentWriter(
            self.store, TOPIC, "s", lambda: self.present, None, self.counters
        )

    async def write(self, name: str) -> StoredAssignment | None:
        """The stored assignment after `name` is the only consumer."""
        self.present = StoredAssignment({name: frozenset()})
        self.writer.changed()
        await self.writer.stored()
        record = await self.store.subscription_record(TOPIC, "s")
        return None if record is None else record.assignment


async def test_a_failing_store_is_asked_again(world: World) -> None:
    node = await node_with(world, 2)
    writing = Writing(node)
    await writing.store.put_subscription(TOPIC, "s", SubscriptionKind.STREAM)
    for applied in (False, True):
        node.mortal.faults[RECORD] = applied
        assert await writing.write(str(applied)) == writing.present
        assert not node.mortal.faults
    assert await writing.write("last") == writing.present, "the conflict was with its own write"
    await node.stop()


@pytest.mark.parametrize("then", ["b", "before"])
async def test_a_write_whose_answer_was_lost_is_known_again_after_another_change(
    world: World, then: str
) -> None:
    node = await node_with(world, 2)
    writing = Writing(node)
    await writing.store.put_subscription(TOPIC, "s", SubscriptionKind.STREAM)
    assert await writing.write("before") == writing.present
    node.mortal.faults[RECORD] = True
    writing.present = StoredAssignment({"a": frozenset()})
    writing.writer.changed()
    await until(lambda: not node.mortal.faults)
    # The next try fails too, and leaves nothing.
    node.mortal.faults[RECORD] = False
    assert await writing.write(then) == writing.present
    assert await writing.write("last") == writing.present
    await node.stop()


async def test_consumers_that_join_at_once_are_all_stored(world: World) -> None:
    """One of them may join in the turn in which the write for the other has ended."""
    node = await node_with(world, 4)
    for number in range(10):
        await asyncio.gather(*(join(node, f"{name}{number}") for name in "ab"))
        assert await node.assignment() == node.group().group.to_store()
    await node.stop()


async def test_assignment_that_is_too_large_is_left_out_and_that_is_logged_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "ASSIGNMENT_RECORD_BYTES", 200)
    node = await node_with(world, 2)
    writing = Writing(node)
    await writing.store.put_subscription(TOPIC, "s", SubscriptionKind.STREAM)
    assert await writing.write("a") == writing.present
    with capture_logs() as logs:
        for name in ("b" * 200, "c" * 200):
            assert await writing.write(name) is None
    (warning,) = [each for each in logs if each["log_level"] == "warning"]
    assert warning["event"] == "assignment_too_large"
    assert writing.counters.assignments_too_large == 2
    node.mortal.faults[RECORD] = True
    assert await writing.write("a") == writing.present, "it is small again"
    node.mortal.faults[RECORD] = True
    assert await writing.write("d" * 200) is None, "the conflict was with its own write"
    assert await writing.write("e") == writing.present
    await node.stop()


async def test_assignment_larger_than_any_record_leaves_consumers_assigned(world: World) -> None:
    """After the restart all that are registered share the segments, as without a record."""
    node = await node_with(world, 2)
    names = [letter * 300_000 for letter in "ab"]
    writing = Writing(node)
    await writing.store.put_subscription(TOPIC, "s", SubscriptionKind.STREAM)
    writing.present = StoredAssignment({name: frozenset({1}) for name in names})
    writing.writer.changed()
    await writing.writer.stored()
    record = await writing.store.subscription_record(TOPIC, "s")
    assert record is not None
    assert record.assignment is None
    assert not writing.writer.busy
    for name in "ba":
        await writing.store.put_consumer(TOPIC, "s", name)
    for name in "ba":
        _, own = await join(node, name)
        assert own == [{"a": 0, "b": 1}[name]]
    await node.stop()


async def test_a_deleted_subscription_does_not_come_back(world: World) -> None:
    node = await node_with(world, 2)
    writing = Writing(node)
    await writing.store.put_subscription(TOPIC, "s", SubscriptionKind.STREAM)
    assert await writing.write("a") == writing.present
    await node.scalable.delete_subscription(TOPIC, "s", force=True)
    assert await writing.write("b") is None
    assert await writing.store.subscriptions(TOPIC) == {}
    await node.stop()


async def test_an_assignment_that_does_not_change_is_written_once(world: World) -> None:
    node = await node_with(world, 4)
    peer, _ = await join(node, "a")
    await node.assignment()
    written = node.mortal.writes.count(f"put {RECORD}")
    for segment_id in range(4):
        await peer.attach(segment_id, "a")
    await peer.register("a")
    await node.assignment()
    assert node.mortal.writes.count(f"put {RECORD}") == written
    await node.stop()


async def test_changes_during_a_write_are_stored_by_one_write(world: World) -> None:
    node = await node_with(world, 4)
    peers = {name: (await join(node, name))[0] for name in "abcd"}
    group = node.group()
    await group.stored()
    written = node.mortal.writes.count(f"put {RECORD}")
    for name in "abc":
        group.unregister(name, peers[name].as_connection(), 1)
    await group.stored()
    assert node.mortal.writes.count(f"put {RECORD}") == written + 1
    await node.stop()


async def test_a_record_of_another_kind_of_broker_is_read(world: World) -> None:
    node = await node_with(world, 2)
    await node.metadata.put(RECORD, b'{"type": "STREAM", "new": 1}')
    await TopicStore(node.metadata).put_consumer(TOPIC, "s", "a")
    _, own = await join(node, "b")
    assert own in ([0], [1]), "without an assignment all that are registered share"
    await node.assignment()
    record = await node.metadata.get(RECORD)
    assert record is not None
    members = json.loads(record.value)
    assert members["new"] == 1
    assert members["type"] == "STREAM"
    await node.stop()


@pytest.mark.parametrize(
    "members",
    [None, 7, {}, {"consumers": 1}, {"consumers": {"a": 1}}, {"consumers": {"a": ["1"]}}],
)
def test_an_unreadable_assignment_is_none(members: object) -> None:
    with pytest.raises(ValueError, match=r"assignment|segments"):
        assignment_from_json(members)


async def test_a_change_of_a_record_that_was_changed_fails(world: World) -> None:
    node = await node_with(world, 1)
    store = TopicStore(node.metadata)
    await store.put_subscription(TOPIC, "s", SubscriptionKind.STREAM)
    read = await store.subscription_record(TOPIC, "s")
    assert read is not None
    assert read.assignment is None
    await store.put_assignment(TOPIC, "s", read, StoredAssignment({"a": frozenset({1})}))
    with pytest.raises(ConcurrentChange):
        await store.put_assignment(TOPIC, "s", read, StoredAssignment())
    await node.stop()
