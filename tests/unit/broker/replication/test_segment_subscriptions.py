"""The owners of segments move replicated subscriptions, as a leader between two clusters asks."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from broker.replication.replicated_segment import ReplicatedSegment
from broker.replication.segment_subscriptions import SegmentSubscriptions
from broker.replication.subscription_backlog import NONE_LEFT
from broker.scalable.records import ScalableTopicRecord, segment_of
from broker.scalable.segment_requests import (
    TakeAnswer,
    TakePositions,
    ViewSubscriptions,
)
from broker.scalable.subscription_exchange import SubscriptionExchange
from broker.topics.completeness import Completeness
from broker.topics.segment_sources import StaleSender
from broker.topics.subscription import Subscription
from broker.topics.subscription_positions import (
    CopiesAnswered,
    CopiesLeft,
    FirstCopy,
    PositionsTold,
    SubscriptionState,
    first_left,
)
from broker.topics.topic import Topic
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import EARLIEST, LATEST
from magnetar.protocol.names import SegmentName, TopicName, parse_topic_name
from tests.support.bounds import set_bound
from tests.support.waiting import until
from tests.unit.broker.replication.conftest import Cluster, replicating
from tests.unit.broker.replication.test_scalable_topic_backlogs import publish
from tests.unit.broker.replication.test_scalable_topics import (
    KEYS,
    PATH,
    TOPIC,
    Pair,
    Written,
    client_of,
    entries_of,
    is_done,
    make,
    segments_of,
    split,
    writing,
)
from tests.unit.broker.topics.test_topic_memory import unreachable_objects

SUB = "sub"
BOTH = frozenset({"east", "west"})
NEVER_MS = 10**9


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    """East and west, which keep all messages, and have the subscription in each segment.

    Their brokers ask each other nothing by themselves.
    """
    settings = {"replicated_subscriptions_snapshot_frequency_ms": NEVER_MS}
    east, west = Cluster(tmp_path, "east", **settings), Cluster(tmp_path, "west", **settings)
    async with replicating(east, west):
        for each in (east, west):
            await each.keep_messages()
            await make(each)
            await subscribe(each)
        yield east, west


async def record_of(cluster: Cluster) -> ScalableTopicRecord:
    return await cluster.broker.scalable.get(parse_topic_name(TOPIC))


async def names_of(cluster: Cluster) -> dict[int, SegmentName]:
    layout = (await record_of(cluster)).layout
    name = parse_topic_name(TOPIC)
    return {each: segment_of(name, found) for each, found in layout.segments.items()}


async def segment(cluster: Cluster, segment_id: int = 0) -> Topic:
    name = (await names_of(cluster))[segment_id]
    return await cluster.broker.scalable.local_segments.open(name)


async def subscribe(cluster: Cluster) -> None:
    """Make the subscription at the begin of each segment; nothing is missing in it."""
    for each in await names_of(cluster):
        topic = await segment(cluster, each)
        await topic.create_subscription(
            SUB, EARLIEST, replicated=True, completeness=Completeness(clusters=BOTH)
        )


async def subscription(cluster: Cluster, segment_id: int = 0) -> Subscription:
    return (await segment(cluster, segment_id)).subscriptions[SUB]


async def acknowledge(cluster: Cluster, indexes: Sequence[int], segment_id: int = 0) -> None:
    """Acknowledge the entries of a segment with these numbers."""
    topic = await segment(cluster, segment_id)
    positions = [topic.ledger.entry_at(each) for each in indexes]
    topic.subscriptions[SUB].acknowledge(None, [(each, (), 0) for each in positions])


async def left(cluster: Cluster, segment_id: int = 0) -> list[int]:
    """The numbers of the entries that are not acknowledged."""
    topic = await segment(cluster, segment_id)
    cursor = topic.subscriptions[SUB].cursor
    entries = await entries_of(topic)
    return [n for n, each in enumerate(entries) if not cursor.is_acknowledged(each.position)]


async def state_of(cluster: Cluster, other: Cluster, segment_id: int = 0) -> SubscriptionState:
    name = (await names_of(cluster))[segment_id]
    return await ViewSubscriptions(name, other.name).run(cluster.broker.scalable.local_segments)


class Question:
    """What a leader asks another cluster of one topic; each step may be left out, or come late."""

    def __init__(self, home: Cluster, other: Cluster) -> None:
        self.home, self.other = home, other
        self.states: dict[int, SubscriptionState] = {}
        self.answers: dict[int, CopiesLeft] = {}

    async def collect(self) -> None:
        """Ask the owners at home."""
        for each in await names_of(self.home):
            self.states[each] = await state_of(self.home, self.other, each)
        self.record = await record_of(self.home)

    async def told(self) -> PositionsTold:
        """What the other cluster is told."""
        incarnation = self.record.incarnation
        assert incarnation is not None
        layout = self.record.layout
        return PositionsTold(
            self.home.name,
            incarnation,
            layout.epoch,
            frozenset(layout.segments),
            {
                SUB: {
                    each: state.below[SUB]
                    for each, state in self.states.items()
                    if SUB in state.below
                }
            },
        )

    async def ask(self) -> None:
        """Ask the owners in the other cluster."""
        for each, name in (await names_of(self.other)).items():
            request = TakePositions(name, await self.told())
            self.answers[each] = await request.run(self.other.broker.scalable.local_segments)

    async def tell(self) -> None:
        """Tell the owners at home."""
        layout = (await record_of(self.other)).layout
        found = await self.other.broker.scalable.replicated.read((await names_of(self.other))[0])
        names = await names_of(self.home)
        for source, state in self.states.items():
            copies = {
                each: FirstCopy(answer.first[SUB][source], answer.terminated)
                for each, answer in self.answers.items()
                if SUB in answer.first
            }
            active = [each.segment_id for each in layout.active]
            first = first_left(active, layout.segments.keys(), copies)
            if first is None or state.answered is None:
                continue
            answer = CopiesAnswered(
                self.other.name, state.answered, state.below, {SUB: first}, found.incarnation
            )
            await TakeAnswer(names[source], answer).run(self.home.broker.scalable.local_segments)

    async def run(self) -> None:
        """All of it."""
        await self.collect()
        await self.ask()
        await self.tell()


async def write(cluster: Cluster, rounds: int = 1, label: str = "w") -> Written:
    """Write entries of one message each."""
    written: Written = {}
    async with writing(cluster, written, label, batching=False) as writer:
        await writer.write(rounds)
    return written


def entries_in(cluster: Cluster) -> int:
    """The entries of all loaded segments."""
    return sum(each.ledger.entry_count for each in segments_of(cluster))


async def written_in(home: Cluster, other: Cluster, rounds: int = 1, label: str = "w") -> int:
    """Write entries, which the other cluster gets; their number."""
    before = entries_in(other)
    count = sum(map(len, (await write(home, rounds, label)).values()))
    await until(lambda: entries_in(other) == before + count and is_done(home))
    return count


async def positions_of(cluster: Cluster) -> SegmentSubscriptions:
    """What the owner of segment 0 runs."""
    found = (await segment(cluster)).replication
    assert isinstance(found, ReplicatedSegment)
    return found.positions


async def track_at_most(monkeypatch: pytest.MonkeyPatch, entries: int, pair: Pair) -> None:
    """Let the owners begin anew, with room for so many entries."""
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES", entries)
    for each in pair:
        await (await subscription(each)).seek(EARLIEST)


async def test_copies_are_acknowledged_below_what_their_home_has_acknowledged(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, [0, 1, 3])
    await Question(east, west).run()
    assert await left(west) == list(range(2, count))


async def test_home_acknowledges_below_the_first_copy_that_is_left(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(west, [0, 1, 3])
    await Question(east, west).run()
    assert await left(east) == list(range(2, count))


async def test_messages_of_both_clusters_do_not_wait_for_each_other(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await written_in(west, east)
    await acknowledge(east, range(count))
    await acknowledge(west, range(count, 2 * count))
    await Question(east, west).run()
    await Question(west, east).run()
    assert await left(east) == await left(west) == []


async def test_acknowledgements_of_the_other_cluster_outlive_a_restart(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, range(5))
    question = Question(east, west)
    await question.collect()
    await west.stop()
    await west.start()
    await question.ask()
    await acknowledge(west, range(8))
    await Question(east, west).run()
    assert await left(east) == await left(west) == list(range(8, count))
    for each in pair:
        await each.stop()
    for each in pair:
        await each.start()
    assert await left(east) == await left(west) == list(range(8, count))


async def test_answer_moves_nothing_that_was_sent_after_the_question(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    question = Question(east, west)
    await question.collect()
    await acknowledge(west, range(count))
    await question.ask()
    written = await write(east, label="later")
    await until(lambda: is_done(east))
    await question.tell()
    assert await left(east) == list(range(count, count + sum(map(len, written.values()))))


async def cut_off(work: Coroutine[object, object, None], moved: Subscription) -> None:
    """Cancel what acknowledges entries of a subscription, once it has begun with that."""
    before = moved.backlog
    task = asyncio.create_task(work)
    while moved.backlog == before:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert 0 < moved.backlog < before


async def test_rest_of_a_question_that_is_cut_off_moves_with_the_next_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "EXPIRED_AT_ONCE", 2)
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, range(count))
    question = Question(east, west)
    await question.collect()
    await cut_off(question.ask(), await subscription(west))
    await question.run()
    assert await left(west) == []


async def test_rest_of_an_answer_that_is_cut_off_moves_with_the_next_one(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "EXPIRED_AT_ONCE", 2)
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(west, range(count))
    question = Question(east, west)
    await question.collect()
    await question.ask()
    await cut_off(question.tell(), await subscription(east))
    await question.run()
    assert await left(east) == []


async def test_more_entries_than_are_tracked_are_read_as_others_are_acknowledged(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await track_at_most(monkeypatch, 5, pair)
    count = await written_in(east, west, 2)
    await acknowledge(west, range(count))
    for done in (5, 10, 15):
        await Question(east, west).run()
        assert await left(east) == list(range(done, count))
    await acknowledge(east, range(count))
    question = Question(east, west)
    await question.run()
    assert question.answers[0].first[SUB][0] == NONE_LEFT


async def test_loop_turns_while_many_subscriptions_take_note_of_entries(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES_AT_ONCE", 2)
    east, west = pair
    count = await written_in(east, west)
    topic = await segment(east)
    for name in ("second", "third"):
        await topic.create_subscription(name, EARLIEST, replicated=True)
    reading = asyncio.create_task((await positions_of(east)).state(west.name))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > count
    assert (await reading).below.keys() == {SUB, "second", "third"}


async def test_full_home_tells_no_more_than_it_has_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await track_at_most(monkeypatch, 3, pair)
    count = await written_in(east, west)
    await acknowledge(west, [0, 2])
    for _ in range(2):
        await Question(east, west).run()
        assert await left(east) == list(range(1, count))
        assert await left(west) == [1, *range(3, count)]


async def test_cluster_that_has_not_read_its_log_does_not_say_that_no_copy_is_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    east, west = pair
    await track_at_most(monkeypatch, 3, pair)
    own = await written_in(west, east)
    count = await written_in(east, west)
    await acknowledge(east, range(own))
    question = Question(east, west)
    await question.run()
    assert question.answers[0].first == {SUB: {0: EARLIEST}}
    assert await left(east) == list(range(own, own + count))


async def test_seek_back_begins_anew_and_stays_in_its_cluster(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, range(count))
    await Question(east, west).run()
    await (await subscription(east)).seek(EARLIEST)
    state = await state_of(east, west)
    assert state.below[SUB] == (await segment(east)).ledger.entry_at(0)
    assert await left(west) == []
    await acknowledge(east, [0])
    # The west has no copy left of any of them, and says so.
    await Question(east, west).run()
    assert await left(east) == []


async def test_subscription_without_the_note_is_neither_told_of_nor_moved(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, [0])
    topic = await segment(west)
    await topic.set_replicated(topic.subscriptions[SUB], replicated=False)
    question = Question(east, west)
    await question.run()
    assert question.answers[0] == CopiesLeft(False, {}, frozenset())
    assert await left(west) == list(range(count))
    await topic.unsubscribe(SUB, force=True)
    await question.run()
    assert question.answers[0] == CopiesLeft(False, {}, frozenset({SUB}))
    await west.replicate(west.name)
    await until(lambda: not topic.policies.replication_clusters)
    await question.run()
    assert question.answers[0] == CopiesLeft(False, {}, frozenset())
    topic = await segment(east)
    await topic.set_replicated(topic.subscriptions[SUB], replicated=False)
    assert await state_of(east, west) == SubscriptionState(None, {}, settled=True)


async def test_question_with_an_older_layout_is_refused_and_moves_nothing(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, [0])
    question = Question(east, west)
    await question.collect()
    await split(east, 0)
    written = await write(east, label="later")
    await until(lambda: is_done(east))
    with pytest.raises(StaleSender, match="read it again"):
        await question.ask()
    total = count + sum(map(len, written.values()))
    assert await left(west) == list(range(total))
    await Question(east, west).run()
    assert await left(west) == list(range(1, total))


async def test_copies_from_pruned_segments_are_acknowledged(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await split(east, 0)
    written = await write(east, label="later")
    await until(lambda: is_done(east))
    question = Question(east, west)
    await question.collect()
    told = await question.told()
    pruned = replace(
        told,
        segments=told.segments - {0},
        below={SUB: {each: at for each, at in told.below[SUB].items() if each}},
    )
    name = (await names_of(west))[0]
    answer = await TakePositions(name, pruned).run(west.broker.scalable.local_segments)
    assert answer.first[SUB].keys() == {1, 2}
    total = count + sum(map(len, written.values()))
    assert await left(west) == list(range(count, total))


async def test_positions_of_another_incarnation_move_nothing(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, range(count))
    question = Question(east, west)
    await question.collect()
    told = await question.told()
    name = (await names_of(west))[0]
    other = replace(told, incarnation=told.incarnation ^ 1)
    answer = await TakePositions(name, other).run(west.broker.scalable.local_segments)
    assert answer.first == {SUB: {0: NONE_LEFT}}
    assert await left(west) == list(range(count))


async def late(cluster: Cluster) -> bool:
    """Whether the subscription may lack messages of east, as its note says."""
    cursor = (await subscription(cluster)).cursor
    return "east" not in Completeness.parse(cursor.replication_note).clusters


async def test_a_late_subscription_tells_no_more_than_it_was_told_until_home_is_past(
    pair: Pair,
) -> None:
    east, west = pair
    count = await written_in(east, west)
    topic = await segment(west)
    await topic.unsubscribe(SUB, force=False)
    await topic.create_subscription(SUB, LATEST, replicated=True)
    question = Question(east, west)
    await question.run()
    assert question.answers[0].late == {SUB}
    assert question.answers[0].first == (await question.told()).below
    assert await left(east) == list(range(count))
    # Of another incarnation nothing is here, and that says nothing of this one.
    other = replace(await question.told(), incarnation=5)
    await TakePositions((await names_of(west))[0], other).run(west.broker.scalable.local_segments)
    assert await late(west)
    await acknowledge(east, range(count - 1))
    await question.run()
    assert await late(west)
    await acknowledge(east, [count - 1])
    await question.run()
    assert question.answers[0].first == {SUB: {0: NONE_LEFT}}
    assert not question.answers[0].late
    assert not await late(west)


async def test_the_end_of_a_segment_makes_a_late_subscription_complete(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    topic = await segment(west)
    await topic.unsubscribe(SUB, force=False)
    await split(east, 0)
    await written_in(east, west, label="children")
    await topic.create_subscription(SUB, LATEST, replicated=True)
    await acknowledge(east, range(count))
    question = Question(east, west)
    await question.run()
    # Nothing more can come of the parent, and its last position is not known here any more.
    assert (await question.told()).below[SUB][0] == NONE_LEFT
    assert question.answers[0].first[SUB][0] == NONE_LEFT
    assert await late(west)
    for each in (1, 2):
        await acknowledge(east, range(len(await left(east, each))), each)
    await question.run()
    assert not await late(west)


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_another_incarnation_there_had_is_consumed_at_home_alone(
    pair: Pair, restarts: bool
) -> None:
    east, west = pair
    gone = await written_in(east, west)
    question = Question(east, west)
    await question.run()
    assert await left(east) == list(range(gone))
    await west.ask("DELETE", f"{PATH}?force=true")
    await make(west)
    await subscribe(west)
    if restarts:
        await east.stop()
        await east.start()
    count = sum(map(len, (await write(east, label="again")).values()))
    await until(lambda: entries_in(west) == count and is_done(east))
    await question.run()
    assert await left(east) == list(range(gone + count))
    # That is told once, of what had been sent by then.
    later = await written_in(east, west, label="later")
    await acknowledge(west, range(count + later))
    await question.run()
    assert await left(east) == list(range(gone + count))


@pytest.mark.parametrize("restarts", [False, True])
async def test_what_was_sent_as_another_incarnation_is_consumed_in_each_cluster_alone(
    pair: Pair, restarts: bool
) -> None:
    east, west = pair
    count = await written_in(east, west)
    if restarts:
        await east.stop()
        await east.start()
    await east.ask("POST", f"{PATH}/replication/incarnation")
    # The west has no copies from this incarnation.
    question = Question(east, west)
    await question.run()
    assert question.answers[0].first == {SUB: {0: NONE_LEFT}}
    assert await left(east) == list(range(count))
    later = await written_in(east, west)
    await acknowledge(west, range(count, count + later))
    await Question(east, west).run()
    assert await left(east) == list(range(count))


async def test_aborted_entries_are_passed_over_and_open_ones_awaited(pair: Pair) -> None:
    east, west = pair
    written: Written = {}
    aborted: Written = {}
    async with (
        writing(east, written, batching=False) as writer,
        writing(east, aborted, "aborted", batching=False) as gone,
    ):
        await writer.write(1)
        never = await gone.client.transaction()
        await gone.write(1, transaction=never)
        await writer.write(1)
        await until(lambda: entries_in(east) == 3 * len(KEYS))
        first_open = (await segment(east)).ledger.entry_at(len(KEYS))
        await state_of(east, west)
        await acknowledge(east, range(len(KEYS)))
        state = await state_of(east, west)
        assert state.below[SUB] <= first_open
        await never.abort()
    await until(lambda: entries_in(west) == 2 * len(KEYS) and is_done(east))
    await state_of(east, west)
    assert await left(east) == list(range(2 * len(KEYS), 3 * len(KEYS)))
    await Question(east, west).run()
    assert await left(east) == list(range(2 * len(KEYS), 3 * len(KEYS)))
    assert await left(west) == list(range(len(KEYS), 2 * len(KEYS)))
    await acknowledge(west, range(len(KEYS), 2 * len(KEYS)))
    await Question(east, west).run()
    assert await left(east) == []


async def test_chunked_message_moves_with_its_last_chunk(pair: Pair) -> None:
    east, west = pair
    size = east.broker.max_message_size + 100
    async with client_of(east) as client, client.producer(TOPIC, chunking=True) as producer:
        for _ in range(2):
            await producer.send(b"x" * size, key="k")
    await until(lambda: entries_in(east) == 4 and is_done(east))
    await until(lambda: entries_in(west) == 4)
    await acknowledge(east, [0])
    await Question(east, west).run()
    assert await left(west) == [0, 1, 2, 3]
    await acknowledge(east, [1])
    await Question(east, west).run()
    assert await left(west) == [2, 3]
    await acknowledge(west, [2, 3])
    await Question(east, west).run()
    assert await left(east) == []


async def test_message_whose_last_chunk_came_too_late_to_be_sent_stays_at_home(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_bound(monkeypatch, "REPLICATED_CHUNKS_WAIT_S", -1)
    east, west = pair
    first, last = (
        pb.MessageMetadata(
            uuid="u",
            chunk_id=number,
            num_chunks_from_msg=2,
            total_chunk_msg_size=2,
            publish_time=1,
        )
        for number in range(2)
    )
    for chunk in (first, last):
        await publish(east, [b"a"], [chunk])
        await until(lambda: is_done(east))
    await publish(east, [b"whole"])
    await until(lambda: entries_in(west) == 1 and is_done(east))
    await acknowledge(west, [0])
    await Question(east, west).run()
    assert await left(east) == [0, 1]


async def test_entries_from_before_the_list_are_consumed_at_home_alone(pair: Pair) -> None:
    east, west = pair
    await east.replicate(east.name)
    topic = await segment(east)
    await until(lambda: not topic.replicator_cursors)
    early = sum(map(len, (await write(east, label="early")).values()))
    await east.replicate(east.name, west.name)
    await until(lambda: bool(topic.replicator_cursors))
    count = await written_in(east, west)
    await acknowledge(west, range(count))
    await Question(east, west).run()
    assert await left(east) == list(range(early))


async def test_broker_that_replicates_no_subscriptions_moves_none(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    await acknowledge(east, range(count))
    await west.stop()
    west.settings["enable_replicated_subscriptions"] = False
    await west.start()
    question = Question(east, west)
    await question.run()
    assert question.answers[0] == CopiesLeft(False, {}, frozenset())
    assert await left(west) == list(range(count))
    assert (await subscription(west)).cursor.replicated
    assert (await state_of(west, east)).settled
    await (await segment(west)).unsubscribe(SUB, force=True)
    await question.run()
    assert question.answers[0] == CopiesLeft(False, {}, frozenset())


async def test_owner_is_settled_once_all_is_acknowledged_and_told(pair: Pair) -> None:
    east, west = pair
    count = await written_in(east, west)
    assert not (await state_of(east, west)).settled
    await Question(east, west).run()
    # Entries are left.
    assert not (await state_of(east, west)).settled
    await acknowledge(east, range(count))
    # The west does not know it.
    assert not (await state_of(east, west)).settled
    await Question(east, west).run()
    assert (await state_of(east, west)).settled


async def test_owner_of_copies_alone_is_settled(pair: Pair) -> None:
    east, west = pair
    await written_in(east, west)
    await written_in(west, east)
    await acknowledge(west, range(len(KEYS), 2 * len(KEYS)))
    await Question(west, east).run()
    assert (await state_of(west, east)).settled
    await written_in(east, west)
    assert not (await state_of(east, west)).settled
    assert (await state_of(west, east)).settled


@pytest.fixture
async def quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Pair, list[tuple[TopicName, str]]]]:
    """The same clusters with a short period, and whom the east says to ask; it is not asked."""
    settings = {"replicated_subscriptions_snapshot_frequency_ms": 20}
    east, west = Cluster(tmp_path, "east", **settings), Cluster(tmp_path, "west", **settings)
    asked: list[tuple[TopicName, str]] = []

    def note(_: SubscriptionExchange, topic: TopicName, other: str) -> None:
        if other == west.name:
            asked.append((topic, other))

    monkeypatch.setattr(SubscriptionExchange, "ask_soon", note)
    async with replicating(east, west):
        for each in (east, west):
            await make(each)
            await subscribe(each)
        yield (east, west), asked


async def test_leader_is_reminded_of_news_and_nothing_runs_without(
    quick: tuple[Pair, list[tuple[TopicName, str]]],
) -> None:
    (east, west), asked = quick
    count = await written_in(east, west)
    await until(lambda: bool(asked))
    assert set(asked) == {(parse_topic_name(TOPIC), "west")}
    await acknowledge(east, range(count))
    await Question(east, west).run()
    running = await positions_of(east)
    await until(lambda: running.quiet)
    asked.clear()
    running.news()
    await until(lambda: running.quiet)
    assert asked == []
    await written_in(east, west)
    await until(lambda: bool(asked))
    await acknowledge(east, range(count, 2 * count))
    await Question(east, west).run()
    await until(lambda: running.quiet)


async def test_unexpected_error_does_not_end_that_the_leader_is_reminded(
    quick: tuple[Pair, list[tuple[TopicName, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (east, west), asked = quick
    failures: list[str] = []

    def fail(_: ReplicatedSegment, cluster: str) -> None:
        failures.append(cluster)
        raise RuntimeError("a defect")

    with monkeypatch.context() as broken:
        broken.setattr(ReplicatedSegment, "last_sent", fail)
        await written_in(east, west)
        failures.clear()
        # What came until now is looked at, in vain.
        await until(lambda: failures)
        await asyncio.sleep(0.1)
    asked.clear()
    await until(lambda: bool(asked))


async def test_what_is_acknowledged_behind_others_leaves_its_room_where_there_is_little(
    quick: tuple[Pair, list[tuple[TopicName, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (east, west), _ = quick
    room = east.broker.replications.subscription_entries
    count = await written_in(east, west)
    await until(lambda: room.held == count)
    set_bound(monkeypatch, "REPLICATED_SUBSCRIPTION_ENTRIES_OF_BROKER", count)
    await acknowledge(east, range(1, count))
    await until(lambda: room.held == 1)


async def test_leader_is_reminded_when_the_other_cluster_has_got_what_is_acknowledged(
    quick: tuple[Pair, list[tuple[TopicName, str]]],
) -> None:
    (east, west), asked = quick
    count = await written_in(east, west)
    await acknowledge(east, range(count))
    await Question(east, west).run()
    running = await positions_of(east)
    await until(lambda: running.quiet)
    await west.stop()
    await write(east)
    await acknowledge(east, range(count, 2 * count))
    # Nothing is to be told of what the west does not have.
    await until(lambda: running.quiet)
    asked.clear()
    await west.start()
    await until(lambda: bool(asked))


async def test_deleted_subscription_takes_no_room_from_those_of_other_segments(pair: Pair) -> None:
    east, west = pair
    await written_in(east, west)
    await Question(east, west).run()
    rooms = [each.broker.replications.subscription_entries for each in pair]
    assert all(each.held for each in rooms)
    for each in pair:
        await (await segment(each)).unsubscribe(SUB, force=True)
    await until(lambda: not any(each.held for each in rooms))


async def test_closed_segment_with_a_replicated_subscription_is_freed_at_once(pair: Pair) -> None:
    east, west = pair
    await written_in(east, west)
    await Question(east, west).run()
    with unreachable_objects() as found:
        for cluster in pair:
            for name in [each.name for each in segments_of(cluster)]:
                await cluster.broker.topics.unload(name)
        await asyncio.sleep(0.1)
    assert found == []


async def test_consumer_has_its_subscription_replicated_and_children_keep_that(pair: Pair) -> None:
    east, _ = pair
    client = await east.client()
    wish = pb.CommandSubscribe(replicate_subscription_state=True)
    await client.subscribe(str((await names_of(east))[0]), "wished", wish)
    await client.subscribe(str((await names_of(east))[0]), "plain")
    await client.close()
    await split(east, 0)
    for each in (0, 1, 2):
        found = (await segment(east, each)).subscriptions
        noted = {name: subscription.cursor.replicated for name, subscription in found.items()}
        assert noted == {"wished": True, SUB: True, "plain": False}
