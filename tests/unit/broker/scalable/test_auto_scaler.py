"""Owners report loads, and the leader splits, merges and explains."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from structlog.testing import capture_logs

from broker.cli.auto_scale import load_text
from broker.policies.namespaces import AUTO_SCALE_POLICY
from broker.scalable.auto_scale_policy import AutoScalePolicy, InvalidAutoScalePolicy, Rates
from broker.scalable.history import ChangeKind
from broker.scalable.live_topics import LiveTopic
from broker.scalable.load_report import Load
from broker.scalable.records import load_path
from broker.scalable.topic_store import ScalableTopicNotFound, TopicStore
from broker.topics.producer import Producer
from config.bounds import SCALING_EVALUATIONS_AT_ONCE
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.names import NamespaceName, TopicName, parse_topic_name
from tests.support.waiting import until, until_awaited
from tests.unit.broker.scalable.node import TOPIC, Node, Peer, World

SAMPLE_S = 10


class Traffic:
    """Sends to the segments of one topic, by the counters and entries that their owners read."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.peer: Peer = node.peer()
        self.producers: dict[int, Producer] = {}
        self.now_s = 0.0

    async def live(self) -> LiveTopic:
        return await self.node.live()

    async def pass_time(self, seconds: int, rates: dict[int, int] | None = None) -> None:
        """Let time pass with these messages/s to segments, with a sample every 10 s."""
        if not self.now_s:
            self.now_s = asyncio.get_running_loop().time()
            await self.node.scalable.load_reporter.sample(self.now_s)
        for _ in range(0, seconds, SAMPLE_S):
            for segment_id, rate in (rates or {}).items():
                if segment_id not in self.producers:
                    self.producers[segment_id] = await self.peer.produce(segment_id)
                self.producers[segment_id].messages_in += rate * SAMPLE_S
            self.now_s += SAMPLE_S
            self.node.clock.ms += SAMPLE_S * 1000
            await self.node.scalable.load_reporter.sample(self.now_s)

    async def evaluate(self) -> None:
        await self.node.scalable.scaler.evaluate(await self.live())

    async def active(self) -> list[int]:
        return [s.segment_id for s in (await self.live()).layout.active]

    async def causes(self) -> list[tuple[str, str]]:
        """Kind and cause of each entry of the history that has a cause."""
        entries = await self.node.scalable.history(TOPIC)
        return [(each.kind.value, each.cause) for each in entries if each.cause]


async def write_keys(
    node: Node, segment_id: int, keys: Sequence[str], payload: bytes = b"m"
) -> None:
    """Store a message with each key in a segment."""
    topic = await node.segment(segment_id)
    stored: asyncio.Queue[Position | None] = asyncio.Queue()
    for number, key in enumerate(keys):
        metadata = pb.MessageMetadata(
            producer_name="p", sequence_id=number, publish_time=node.clock.now_ms()
        )
        metadata.partition_key = key
        topic.ledger.append(build_entry(metadata, payload), lambda at, _: stored.put_nowait(at))
    for _ in keys:
        assert await stored.get() is not None


@pytest.fixture
async def node(world: World) -> AsyncIterator[Node]:
    node = await Node(world, scalable_topic_auto_scale_enabled=True).start()
    await node.scalable.create(TOPIC, segments=1, properties={})
    yield node
    await node.stop()


async def test_a_busy_segment_is_split_and_the_history_says_why(node: Node) -> None:
    traffic = Traffic(node)
    await write_keys(node, 0, [f"key-{number}" for number in range(100)])
    await traffic.pass_time(20, {0: 15_000})
    await traffic.evaluate()
    assert await traffic.active() == [1, 2]
    ((kind, cause),) = await traffic.causes()
    assert kind == "split"
    assert cause == (
        "rate: Segment 0 has msgRateIn = 15000, and the limit is 10000: segment 0 is split into 2."
    )
    assert node.scalable.scaler.decisions == {("split", "rate"): 1}


@pytest.mark.parametrize("killed", [False, True])
async def test_history_entry_that_is_written_late_has_its_cause(node: Node, killed: bool) -> None:
    traffic = Traffic(node)
    await traffic.pass_time(20, {0: 15_000})
    if killed:
        node.mortal.dies_after("/topics/public/default/t")
        node.scalable.scaler.consider(await node.live())
        await until(lambda: node.process.dead)
        node = await node.kill()
    else:
        node.mortal.faults["/history"] = False
        await traffic.evaluate()
    traffic.peer.close()
    live = await node.live()
    await until(lambda: not live.work.busy)
    ((kind, cause),) = await Traffic(node).causes()
    assert (kind, cause.split(":")[0]) == ("split", "rate")
    await node.stop()


async def test_a_hot_key_is_not_split_and_that_is_explained(node: Node) -> None:
    traffic = Traffic(node)
    await write_keys(node, 0, ["hot"] * 100)
    await traffic.pass_time(20, {0: 15_000})
    await traffic.evaluate()
    await traffic.evaluate()
    assert await traffic.active() == [0]
    ((kind, cause),) = await traffic.causes()
    assert kind == "refusal"
    assert "one key has 100% of the messages of segment 0" in cause
    assert node.scalable.scaler.refusals == {("rate", "hot-key"): 2}
    answer = await node.scalable.explain_scaling(TOPIC)
    assert answer["decision"] is None
    assert answer["segments"] == {
        "0": {
            "msgRateIn": 15_000,
            "bytesRateIn": 0,
            "msgRateOut": 0,
            "bytesRateOut": 0,
            "backlog": 0,
            "quietSinceMs": None,
            "topKeyShare": 1.0,
            "topKeyBytesShare": 1.0,
        }
    }


async def test_a_key_that_is_hot_by_bytes_alone_is_explained(node: Node) -> None:
    traffic = Traffic(node)
    await write_keys(node, 0, [f"key-{number}" for number in range(40)])
    await write_keys(node, 0, ["large"], payload=b"m" * 100_000)
    await traffic.pass_time(20, {0: 100})
    traffic.producers[0].bytes_in += 500_000_000 * SAMPLE_S
    await traffic.pass_time(10, {0: 100})
    await traffic.evaluate()
    assert await traffic.active() == [0]
    ((kind, cause),) = await traffic.causes()
    assert kind == "refusal"
    assert "of the bytes of segment 0" in cause
    answer = await node.scalable.explain_scaling(TOPIC)
    assert isinstance(answer["segments"], dict)
    load = answer["segments"]["0"]
    assert load["topKeyShare"] < 0.05
    assert load["topKeyBytesShare"] > 0.9
    shown = load_text(load)
    assert "one key has 2% of the messages, one 9" in shown
    assert shown.endswith("% of the bytes)")


async def test_a_policy_that_does_not_fit_is_in_the_history(node: Node) -> None:
    contradiction = {AUTO_SCALE_POLICY: {"minSegments": 5, "maxSegments": 4}}
    await node.namespaces.change(TOPIC.namespace_name, lambda record: record.update(contradiction))
    traffic = Traffic(node)
    await traffic.evaluate()
    await traffic.evaluate()
    ((kind, cause),) = await traffic.causes()
    assert kind == "refusal"
    assert "maxSegments = 4 is below minSegments = 5" in cause
    assert node.scalable.scaler.refusals == {("policy", "invalid-policy"): 2}


async def test_a_refusal_after_a_change_is_in_the_history_again(node: Node) -> None:
    traffic = Traffic(node)

    async def refused_at(most: int) -> None:
        override = {AUTO_SCALE_POLICY: {"maxSegments": most}}
        await node.namespaces.change(TOPIC.namespace_name, lambda record: record.update(override))
        for _ in range(2):
            rates = dict.fromkeys(await traffic.active(), 15_000)
            await traffic.pass_time(400, rates)
            await traffic.evaluate()

    for most in (1, 2, 3):
        await refused_at(most)
    kinds = [kind for kind, _ in await traffic.causes()]
    assert sorted(kinds) == ["refusal", "refusal", "refusal", "split", "split"]


async def test_quiet_segments_are_merged_when_the_window_has_passed(node: Node) -> None:
    traffic = Traffic(node)
    await write_keys(node, 0, [f"key-{number}" for number in range(100)])
    await traffic.pass_time(20, {0: 35_000})
    await traffic.evaluate()
    assert await traffic.active() == [1, 2, 3, 4]
    for segment_id in (1, 2, 3, 4):
        await node.segment(segment_id)
    await traffic.pass_time(350)
    await traffic.evaluate()
    assert await traffic.active() == [1, 2, 3, 4]
    await traffic.pass_time(20)
    await traffic.evaluate()
    assert await traffic.active() == [5]
    assert [kind for kind, _ in await traffic.causes()] == ["split", "merge"]


async def test_load_that_moves_below_the_limits_is_quiet_over_many_reports(node: Node) -> None:
    """Reports repeat earlier ones, so the leader misses none between two evaluations."""
    await node.scalable.split(TOPIC, 0)
    traffic = Traffic(node)
    for _ in range(6):
        assert await traffic.active() == [1, 2]
        for rate in (100, 300, 100, 200, 50, 400):
            await traffic.pass_time(10, {1: rate, 2: 500 - rate})
        await traffic.evaluate()
    assert await traffic.active() == [3]


async def test_a_load_is_written_when_it_changes_and_goes_with_its_topic(node: Node) -> None:
    traffic, reporter = Traffic(node), node.scalable.load_reporter
    await node.segment(0)
    await traffic.pass_time(60)
    assert reporter.written_total == 0, "the only segment of a topic, without traffic"
    await traffic.pass_time(600, {0: 100})
    assert reporter.written_total == 1
    await traffic.pass_time(10, {0: 200})
    assert reporter.written_total == 2
    record = await node.metadata.get(load_path(TOPIC, 0))
    assert record is not None
    assert b'"msgRateIn":200.0' in record.value
    await node.scalable.delete(TOPIC, force=True)
    assert await node.metadata.get(load_path(TOPIC, 0)) is None


async def test_a_load_goes_with_its_segment(node: Node) -> None:
    traffic = Traffic(node)
    await traffic.pass_time(10, {0: 100})
    await node.scalable.split(TOPIC, 0)
    traffic.peer.close()
    live = await node.live()
    await until(lambda: not live.work.busy)
    await node.scalable.prune_all()
    assert await node.states() == {1: "ACTIVE", 2: "ACTIVE"}
    assert await node.metadata.get(load_path(TOPIC, 0)) is None


async def test_a_registration_that_lacks_a_segment_splits_one(node: Node) -> None:
    traffic, peer = Traffic(node), node.peer()
    await peer.register("first")
    await peer.register("second")
    live = await node.live()
    await until(lambda: len(live.layout.active) == 2)
    ((kind, cause),) = await traffic.causes()
    assert (kind, cause.split(":")[0]) == ("split", "consumer-count")


async def register_all(node: Node, peer: Peer, consumers: int) -> None:
    """Register so many consumers of one subscription; return when nothing is evaluated."""
    for number in range(consumers):
        await peer.register(f"consumer-{number}")
        await Traffic(node).evaluate()


async def test_consumers_that_can_share_get_more_buckets_instead_of_segments(node: Node) -> None:
    peer = Peer(node, client_version="Pulsar-Java-v5.0.0")
    await register_all(node, peer, 5)
    live = await node.live()
    await until(lambda: [each.entry_buckets for each in live.layout.active] == [8])
    ((kind, cause),) = await Traffic(node).causes()
    assert (kind, cause.split(":")[0]) == ("rebucket", "rebucket")


async def test_automatic_changes_obey_the_most_entry_buckets_of_a_segment(world: World) -> None:
    settings = {"scalable_topic_entry_bucket_max_per_segment": 4}
    node = await Node(world, scalable_topic_auto_scale_enabled=True, **settings).start()
    await node.scalable.create(TOPIC, segments=2, properties={})
    traffic, peer = Traffic(node), Peer(node, client_version="Pulsar-Java-v5.0.0")
    await register_all(node, peer, 11)
    live = await node.live()

    def buckets() -> list[int]:
        return [each.entry_buckets for each in live.layout.active]

    await until(lambda: buckets() == [4, 4])
    assert live.layout.epoch == 1, "both segments in one change"
    node.clock.ms += 61_000

    async def is_refused() -> bool:
        await traffic.evaluate()  # later, if one runs
        return node.scalable.scaler.refusals["rebucket", "max-buckets"] > 0

    await until_awaited(is_refused)
    assert buckets() == [4, 4], "a power of two for 11 consumers would be 8"
    for segment in live.layout.active:
        await node.segment(segment.segment_id)
    await traffic.pass_time(400)
    await traffic.evaluate()
    assert buckets() == [4, 4], "a merge would leave 4 of them, for 11 consumers"
    peer.close()

    async def is_merged() -> bool:
        await traffic.evaluate()  # when the consumers are no longer registered
        return buckets() == [4]

    await until_awaited(is_merged)
    await node.stop()


async def test_one_consumer_that_cannot_share_has_segments_split(node: Node) -> None:
    await Peer(node, client_version="Pulsar-Java-v5.0.0").register("new")
    await node.peer().register("of-M1")
    live = await node.live()
    await until(lambda: len(live.layout.active) == 2)


async def test_a_policy_of_the_topic_outlives_changes_and_processes(
    world: World, node: Node
) -> None:
    override = {"splitMsgRateInThreshold": 100, "mergeMsgRateInThreshold": 10, "minSegments": 2}
    await node.scalable.set_auto_scale_policy(TOPIC, override)
    traffic = Traffic(node)
    await traffic.pass_time(20, {0: 150})
    await traffic.evaluate()
    assert await traffic.active() == [1, 2]
    again = await node.kill()
    assert (await again.scalable.get(TOPIC)).auto_scale_policy == override
    await again.scalable.set_auto_scale_policy(TOPIC, None)
    assert (await again.scalable.get(TOPIC)).auto_scale_policy is None
    await again.stop()


async def test_a_policy_that_does_not_fit_its_namespace_is_refused(node: Node) -> None:
    namespace = NamespaceName("public", "default")
    policy = {"minSegments": 4}
    await node.namespaces.change(
        namespace, lambda record: record.update(scalableTopicAutoScalePolicy=policy)
    )
    with pytest.raises(InvalidAutoScalePolicy, match="maxSegments = 3 is below minSegments = 4"):
        await node.scalable.set_auto_scale_policy(TOPIC, {"maxSegments": 3})
    name = parse_topic_name("topic://public/default/none")
    with pytest.raises(ScalableTopicNotFound):
        await node.scalable.set_auto_scale_policy(name, {"maxSegments": 9})


async def test_the_next_process_keeps_what_the_first_one_split(world: World, node: Node) -> None:
    traffic = Traffic(node)
    await traffic.pass_time(20, {0: 15_000})
    await traffic.evaluate()
    again = await node.kill()
    traffic = Traffic(again)
    await traffic.pass_time(20, {1: 15_000, 2: 10})
    await traffic.evaluate()
    assert await traffic.active() == [1, 2], "split before its cooldown"
    answer = await again.scalable.explain_scaling(TOPIC)
    causes = {each["cause"] for each in answer["refusals"]}  # type: ignore[attr-defined]
    assert "split-cooldown" in causes
    await again.stop()


async def test_a_report_of_a_segment_that_nobody_has_loaded_is_old(node: Node) -> None:
    store = TopicStore(node.metadata)
    await node.scalable.split(TOPIC, 0)
    node.clock.ms += 120_000
    await store.put_load(TOPIC, 1, Load(Rates(50_000)), node.clock.now_ms())
    traffic = Traffic(node)
    await traffic.evaluate()
    assert await traffic.active() == [1, 2]
    assert (await store.loads(TOPIC, [1]))[1].load == Load(Rates())


async def test_an_explanation_writes_nothing_and_changes_no_state(node: Node) -> None:
    store = TopicStore(node.metadata)
    await node.scalable.split(TOPIC, 0)
    live = await node.live()
    await until(lambda: not live.work.busy)
    await node.topics.unload((await node.segment(1)).name)
    node.clock.ms += 120_000
    await store.put_load(TOPIC, 1, Load(Rates(50_000)), node.clock.now_ms())
    node.mortal.writes.clear()
    answer = await node.scalable.explain_scaling(TOPIC)
    assert answer["segments"]["1"]["msgRateIn"] == 0, "nobody has it loaded"  # type: ignore[index]
    assert node.mortal.writes == []
    assert (await store.loads(TOPIC, [1]))[1].load == Load(Rates(50_000))
    await store.put_load(TOPIC, 1, Load(Rates(40_000)), node.clock.now_ms())
    await node.segment(1)
    answer = await node.scalable.explain_scaling(TOPIC)
    assert answer["segments"]["1"]["msgRateIn"] == 40_000, "read anew"  # type: ignore[index]


async def test_a_defect_in_one_evaluation_does_not_hinder_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = parse_topic_name("topic://public/default/u")
    await node.scalable.create(other, segments=2, properties={})
    await node.scalable.split(TOPIC, 0)
    evaluated: list[TopicName] = []

    async def evaluate(live: LiveTopic) -> None:
        evaluated.append(live.name)
        raise OverflowError

    monkeypatch.setattr(node.scalable.scaler, "evaluate", evaluate)
    await node.scalable.scaler.evaluate_all()
    assert set(evaluated) == {TOPIC, other}


async def test_a_topic_at_rest_is_not_evaluated(node: Node) -> None:
    await Traffic(node).pass_time(60, {0: 0})
    await node.scalable.scaler.evaluate_all()
    assert node.scalable.scaler.evaluations_total == 0


async def test_consumers_that_may_come_back_keep_their_segments(node: Node) -> None:
    await node.scalable.split(TOPIC, 0)
    peer = node.peer()
    await peer.register("first")
    await peer.register("second")
    again = await node.kill()
    for segment_id in (1, 2):
        await again.segment(segment_id)
    traffic = Traffic(again)
    await traffic.pass_time(600)
    await traffic.evaluate()
    assert await traffic.active() == [1, 2]
    await again.stop()


async def test_consumers_that_do_not_come_back_keep_no_segments(node: Node) -> None:
    """Nobody makes a controller, which would remove their registrations."""
    await node.scalable.split(TOPIC, 0)
    await node.peer().register("a", kind=pb.CHECKPOINT)
    await node.peer().register("b", kind=pb.CHECKPOINT)
    again = await node.kill()
    await again.scalable.set_consumer_grace(TOPIC, 3600)
    traffic = Traffic(again)
    for _ in range(2):
        await traffic.pass_time(1800, {1: 1, 2: 1})
        await traffic.evaluate()
        assert await traffic.active() == [1, 2]
    await traffic.pass_time(1810, {1: 1, 2: 1})
    await traffic.evaluate()
    assert await traffic.active() == [3]
    await again.stop()


async def test_a_registration_while_the_broker_stops_has_one_answer(node: Node) -> None:
    await node.scalable.scaler.stop()
    _, answer = await node.peer().register("a")
    assert not answer.HasField("error"), answer.message


async def test_a_failed_change_is_explained_and_tried_again(node: Node) -> None:
    traffic = Traffic(node)
    await traffic.pass_time(20, {0: 15_000})
    node.mortal.faults["/topics/public/default/t"] = False
    await traffic.evaluate()
    answer = await node.scalable.explain_scaling(TOPIC)
    assert answer["failure"] == "the test says no: try again."
    assert node.scalable.scaler.failures_total == 1
    await node.scalable.prune_all()
    await traffic.evaluate()
    assert await traffic.active() == [1, 2]
    kinds = [each.kind for each in await node.scalable.history(TOPIC)]
    assert kinds == [ChangeKind.CREATE, ChangeKind.SPLIT]


async def test_slow_topic_does_not_hold_up_the_evaluations_of_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaler, go_on = node.scalable.scaler, asyncio.Event()
    await node.scalable.split(TOPIC, 0)
    others = [parse_topic_name(f"topic://public/default/u{number}") for number in range(30)]
    for name in others:
        await node.scalable.create(name, segments=2, properties={})
    running, most, decided = 0, 0, set[TopicName]()
    effective_policy = scaler.effective_policy

    async def read_slowly(live: LiveTopic) -> AutoScalePolicy:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if live.name == TOPIC:
            await go_on.wait()
        await asyncio.sleep(0)
        running -= 1
        decided.add(live.name)
        return await effective_policy(live)

    monkeypatch.setattr(scaler, "effective_policy", read_slowly)
    evaluating = asyncio.create_task(scaler.evaluate_all())
    await until(lambda: decided == set(others))
    for live in node.scalable.in_memory():
        scaler.consider(live)
    go_on.set()
    await evaluating
    await until(lambda: scaler.evaluations_total == 2 * len(others) + 2 and not running)
    assert 1 < most <= SCALING_EVALUATIONS_AT_ONCE


async def test_scaling_is_logged_with_its_outcome(node: Node) -> None:
    traffic = Traffic(node)
    await traffic.pass_time(20, {0: 15_000})
    node.mortal.faults["/topics/public/default/t"] = False
    with capture_logs() as logs:
        await traffic.evaluate()
    events = [each["event"] for each in logs]
    assert "topic_scaled" not in events
    (failed,) = [each for each in logs if each["event"] == "topic_scaling_failed"]
    assert (failed["action"], failed["segments"]) == ("split", [0])
    await node.scalable.prune_all()
    with capture_logs() as logs:
        await traffic.evaluate()
    events = [each["event"] for each in logs]
    assert events.index("layout_changed") < events.index("topic_scaled")
