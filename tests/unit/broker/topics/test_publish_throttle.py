"""Publish rates over the publish path, in virtual time."""

import asyncio
from functools import partial
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.policies.message_rate import MessageRate
from broker.topics.producer import Producer, ProducerState
from broker.topics.publish_errors import MessageRefused
from broker.topics.publish_throttle import Publishing, PublishRates
from broker.topics.throttle import Level, RateLimit, Throttle, ThrottledCounts
from broker.topics.throttled_sends import ThrottledSends
from config.bounds import BROKER_RATE_DEBT_S, THROTTLED_SEND_BYTES, UNTHROTTLED_AT_ONCE
from magnetar.protocol.ack_set import MAX_BATCH_SIZE
from magnetar.protocol.frames import Send
from tests.unit.broker.topics.fakes import settle
from tests.unit.broker.topics.publishing_bench import ENTRY, Bench, Peer, sent
from tests.unit.txn.virtual_time import now_s, run

HELD = len(ENTRY) + THROTTLED_SEND_BYTES


class ThrottledBench(Bench):
    """A publish path behind rates."""

    def __init__(
        self, rate: MessageRate | None, sends: ThrottledSends, of_broker: RateLimit | None = None
    ) -> None:
        super().__init__()
        self.path: Publishing = self.publishing
        self.rates = PublishRates(self.publishing, sends, of_broker, self.use)
        self.rates.apply(rate)

    def use(self, path: Publishing) -> None:
        self.path = path

    def come(self, producer: Producer, *numbers: int, messages: int = 1) -> None:
        """SENDs come, as far as the connection is read."""
        for number in numbers:
            self.path.publish(producer, (sent(number, messages=messages),), 0)

    @property
    def stored(self) -> int:
        """Make everything durable that was appended; returns how many that were so far."""
        while self.ledger.waiting:
            self.ledger.succeed()
        return self.ledger.stored


def bench(
    rate: MessageRate | None, of_broker: RateLimit | None = None, **bounds: int
) -> ThrottledBench:
    return ThrottledBench(rate, ThrottledSends(**bounds), of_broker)


def test_sends_above_the_rate_wait_and_are_answered_in_order() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(5, 0))
        peer, producer = one.producer()
        one.come(producer, *range(20))
        assert one.stored == 5
        await asyncio.sleep(1.01)
        assert one.stored == 10
        await asyncio.sleep(2)
        assert one.stored == 20
        assert peer.answers == [("receipt", number) for number in range(20)]
        assert (producer.pending, one.rates.times_limited) == (0, 1)

    run(scenario())


def test_a_batch_is_taken_as_a_whole_and_paid_off() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(10, 0))
        _, producer = one.producer()
        one.come(producer, 0, messages=30)
        one.come(producer, 1)
        assert one.stored == 1
        await asyncio.sleep(2.0)
        assert one.stored == 1
        await asyncio.sleep(0.2)
        assert one.stored == 2

    run(scenario())


def test_a_rate_in_bytes_holds_too() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(0, 2 * len(ENTRY)))
        _, producer = one.producer()
        one.come(producer, *range(4))
        assert one.stored == 2
        await asyncio.sleep(1.05)
        assert one.stored == 4

    run(scenario())


def test_refused_and_damaged_sends_keep_their_place() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(1, 0))
        peer, producer = one.producer()
        one.come(producer, 0, 1)
        one.path.refuse(producer, sent(2), MessageRefused("No."))
        one.come(producer, 3)
        one.path.damaged(producer, sent(4, None))
        assert one.stored == 1
        await asyncio.sleep(10)
        assert one.stored == 3
        assert peer.answers == [
            ("receipt", 0),
            ("receipt", 1),
            ("NotAllowedError", 2),
            ("receipt", 3),
            ("ChecksumError", 4),
        ]

    run(scenario())


def test_producers_take_turns_and_a_topic_does_not_keep_others_from_the_rate_of_the_broker() -> (
    None
):
    async def scenario() -> None:
        of_broker = RateLimit(MessageRate(10, 0), Level.BROKER)
        topics = [bench(None, of_broker) for _ in range(2)]
        producers = [topics[0].producer()[1], topics[0].producer()[1], topics[1].producer()[1]]
        for producer, topic in zip(producers, (topics[0], topics[0], topics[1]), strict=True):
            topic.come(producer, *range(100))
        await asyncio.sleep(10.05)
        counts = [topic.stored for topic in topics]
        assert sum(counts) == 110
        assert min(counts) >= 45
        sent_by_each = [producer.messages_in for producer in producers[:2]]
        assert abs(sent_by_each[0] - sent_by_each[1]) <= 11

    run(scenario())


def test_one_that_a_rate_has_called_still_waits_for_its_turn_at_the_next_rate() -> None:
    async def scenario() -> None:
        of_topic, of_broker = (
            RateLimit(MessageRate(10, 0), level) for level in (Level.TOPIC, Level.BROKER)
        )
        of_topic.take(10, 0)
        came: list[str] = []
        earlier = partial(came.append, "the one before")

        def called() -> None:
            if not came:
                of_broker.wait(earlier)
            if throttle.allows():
                came.append("this one")

        throttle = Throttle((of_topic, of_broker), called, ThrottledCounts())
        assert not throttle.allows()
        await asyncio.sleep(0.11)
        assert came == ["the one before", "this one"]

    run(scenario())


def test_those_that_wait_for_a_rate_are_woken_one_after_the_other() -> None:
    async def scenario() -> None:
        loop, limit = asyncio.get_running_loop(), RateLimit(MessageRate(10, 0), Level.BROKER)
        limit.take(10, 0)
        sent_by: list[int] = []
        wakes = 0

        def send(one: int) -> None:
            # As dispatchers do, which send in the next turn of the loop.
            if limit.wait_s() > 0:
                wait(one)
            else:
                limit.take(1, 0)
                sent_by.append(one)

        def wait(one: int) -> None:
            def wake() -> None:
                nonlocal wakes
                wakes += 1
                loop.call_soon(send, one)

            limit.wait(wake)

        for one in range(500):
            wait(one)
        await asyncio.sleep(10.05)
        assert sent_by == list(range(100))
        assert wakes <= 110

    run(scenario())


def test_one_that_fails_when_it_is_woken_does_not_keep_the_others() -> None:
    async def scenario() -> None:
        faults: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: faults.append(what))
        limit = RateLimit(MessageRate(10, 0), Level.BROKER)
        limit.take(10, 0)
        woken = asyncio.Event()
        limit.wait(lambda: cast("dict[str, None]", {})["a fault"])
        limit.wait(woken.set)
        await asyncio.wait_for(woken.wait(), 5)
        assert len(faults) == 1

    run(scenario())


@pytest.mark.parametrize("messages", [2**31 - 1, MAX_BATCH_SIZE])
def test_a_send_that_claims_any_number_of_messages_keeps_no_other_topic_waiting_for_long(
    messages: int,
) -> None:
    async def scenario() -> None:
        of_broker = RateLimit(MessageRate(10, 0), Level.BROKER)
        claiming, other = bench(None, of_broker), bench(None, of_broker)
        claiming.come(claiming.producer()[1], 0, messages=messages)
        other.come(other.producer()[1], 0)
        await asyncio.sleep(BROKER_RATE_DEBT_S + 1)
        assert other.stored == 1

    run(scenario())


def test_a_number_of_messages_that_no_batch_has_counts_as_one() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(10, 0))
        _, producer = one.producer()
        for number, messages in enumerate((2**31 - 1, MAX_BATCH_SIZE + 1, 0, -5)):
            one.come(producer, number, messages=messages)
        assert one.stored == 4
        assert producer.messages_in == 4

    run(scenario())


def test_a_connection_is_read_no_further_than_its_bound() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(10, 0), connection_bytes=4 * HELD)
        peer, producer = one.producer()
        other, _ = one.producer()
        one.come(producer, *range(14))
        assert not peer.paused
        one.come(producer, 14)
        assert peer.paused == {"publish rates"}
        assert not other.paused
        while peer.paused:
            await asyncio.sleep(0.01)
        assert one.stored == 13

    run(scenario())


def test_all_connections_with_sends_that_wait_stop_at_the_bound_of_all() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(1, 0), total_bytes=2 * HELD)
        (first, a), (second, b) = one.producer(), one.producer()
        one.come(a, 0, 1, 2)
        one.come(b, 0)
        assert (bool(first.paused), bool(second.paused)) == (False, True)
        await asyncio.sleep(5)
        assert not first.paused
        assert not second.paused
        assert one.stored == 4

    run(scenario())


def test_a_connection_goes_on_when_others_have_less_waiting_whatever_its_own_rate_is() -> None:
    async def scenario() -> None:
        sends = ThrottledSends(total_bytes=8 * HELD)
        slow, fast = (ThrottledBench(MessageRate(0, rate), sends) for rate in (1, 10 * len(ENTRY)))
        (peer, patient), (other, busy) = slow.producer(), fast.producer()
        slow.come(patient, 0, 1)
        fast.come(busy, *range(17))
        assert not other.paused
        slow.come(patient, 2)
        assert peer.paused == {"publish rates"}
        await asyncio.sleep(0.35)
        assert peer.paused
        await asyncio.sleep(0.1)
        assert not peer.paused
        assert (slow.stored, sends.total // HELD) == (1, 4)

    run(scenario())


def test_sends_of_a_producer_that_is_closed_at_once_are_dropped_without_receipts() -> None:
    async def scenario() -> None:
        sends = ThrottledSends()
        one = ThrottledBench(MessageRate(1, 0), sends)
        (peer, gone), (_, stays) = one.producer(), one.producer()
        one.come(gone, 0, 1, 2)
        one.come(stays, 0)
        assert sends.total == 3 * HELD
        gone.close_at_once()
        assert sends.total == HELD
        assert gone.pending == 1
        assert one.stored == 1
        assert one.gone == [gone]
        await asyncio.sleep(1.01)
        assert one.stored == 2
        assert (peer.answers, sends.total) == ([], 0)

    run(scenario())


def test_a_producer_that_is_dismissed_has_nothing_that_waits_and_takes_no_tokens() -> None:
    async def scenario() -> None:
        sends = ThrottledSends()
        one = ThrottledBench(MessageRate(1, 0), sends)
        (peer, dismissed), (_, stays) = one.producer(), one.producer()
        one.come(dismissed, *range(10))
        one.come(stays, 0)
        dismissed.drop_waiting()
        one.come(dismissed, *range(10, 20))
        assert one.stored == 1
        assert (dismissed.pending, sends.total) == (0, HELD)
        await asyncio.sleep(1.01)
        assert one.stored == 2
        assert peer.answers == [("receipt", 0)]

    run(scenario())


def test_a_rate_that_comes_while_those_of_before_were_being_published_stays() -> None:
    async def scenario() -> None:
        one = ThrottledBench(MessageRate(1, 0), ThrottledSends())
        _, producer = one.producer()
        one.come(producer, *range(UNTHROTTLED_AT_ONCE + 5))
        one.rates.apply(None)
        producer.close_at_once()
        one.rates.apply(MessageRate(1, 0))
        await settle()
        assert one.path is not one.publishing

    run(scenario())


def test_close_producer_waits_for_sends_before_it() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(1, 0))
        peer, producer = one.producer()
        one.come(producer, 0, 1)
        closing = asyncio.create_task(producer.close())
        await settle()
        assert one.stored == 1
        assert producer.state is ProducerState.CLOSING
        await asyncio.sleep(1.01)
        assert one.stored == 2
        await closing
        assert peer.answers == [("receipt", 0), ("receipt", 1)]

    run(scenario())


@pytest.mark.parametrize("rate", [None, MessageRate(1000, 0)], ids=["none", "higher"])
def test_another_rate_holds_at_once_for_those_that_wait(rate: MessageRate | None) -> None:
    async def scenario() -> None:
        one = bench(MessageRate(1, 0))
        _, producer = one.producer()
        one.come(producer, *range(900))
        assert one.stored == 1
        one.rates.apply(rate)
        await settle()
        assert one.stored == 900
        assert now_s() == 0
        assert (one.path is one.publishing) is (rate is None)
        assert one.rates.times_limited == 1

    run(scenario())


def test_other_policies_give_no_tokens() -> None:
    async def scenario() -> None:
        one = bench(MessageRate(3, 0))
        _, producer = one.producer()
        one.come(producer, *range(5))
        one.rates.apply(MessageRate(3, 0))
        await settle()
        assert one.stored == 3

    run(scenario())


def test_without_a_rate_nothing_stands_before_the_publish_path() -> None:
    async def scenario() -> None:
        one = bench(None)
        assert one.path is one.publishing

    run(scenario())


RATES = st.sampled_from(
    [None, MessageRate(3, 0), MessageRate(0, 5 * len(ENTRY)), MessageRate(9, 1)]
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 2)),
        st.tuples(st.just("refuse"), st.integers(0, 2)),
        st.tuples(st.just("rate"), RATES),
        st.tuples(st.just("wait"), st.floats(0, 3)),
        st.tuples(st.just("close"), st.integers(0, 2)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS)
def test_rates_that_change_under_load_lose_nothing_and_keep_order(
    steps: list[tuple[str, object]],
) -> None:
    async def scenario() -> None:
        sends = ThrottledSends(connection_bytes=4 * HELD, total_bytes=9 * HELD)
        one = ThrottledBench(MessageRate(2, 0), sends)
        peers, producers = zip(*(one.producer() for _ in range(3)), strict=True)
        expected: list[list[tuple[str, int]]] = [[], [], []]
        closed: set[int] = set()
        for number, (step, of) in enumerate(steps):
            if step == "rate":
                one.rates.apply(cast("MessageRate | None", of))
            elif step == "wait":
                await asyncio.sleep(cast("float", of))
            elif (at := cast("int", of)) in closed:
                continue
            elif step == "close":
                closed.add(at)
                producers[at].close_at_once()
            elif step == "send":
                one.come(producers[at], number)
                expected[at].append(("receipt", number))
            else:
                one.path.refuse(producers[at], sent(number), MessageRefused("No."))
                expected[at].append(("NotAllowedError", number))
            assert one.stored >= 0
        one.rates.apply(None)
        await settle()
        assert one.stored >= 0
        for at in range(3):
            answers = peers[at].answers
            assert answers == expected[at][: len(answers)]
            assert at in closed or len(answers) == len(expected[at])
            assert (producers[at].pending, peers[at].paused) == (0, set())
        assert (sends.total, one.path) == (0, one.publishing)
        assert {producers.index(each) for each in one.gone} == closed

    run(scenario())


class Failing:
    """A publish path that fails on one SEND."""

    def __init__(self, path: Publishing, number: int) -> None:
        self.refuse, self.damaged = path.refuse, path.damaged
        self._path, self._number = path, number

    def publish(self, producer: Producer, sends: "tuple[Send, ...]", at: int) -> int:
        if sends[at].sequence_id == self._number:
            raise RuntimeError("a fault")
        return self._path.publish(producer, sends, at)


def test_a_fault_ends_one_connection_and_the_other_sends_go_on() -> None:
    async def scenario() -> None:
        faults: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: faults.append(what))
        one = bench(None)
        path = cast("Publishing", Failing(one.publishing, 1))
        rates = PublishRates(path, ThrottledSends(), None, one.use)
        rates.apply(MessageRate(1, 0))
        (broken, a), (_, b) = one.producer(), one.producer()
        ended: list[str] = []
        broken.abort = ended.append  # type: ignore[attr-defined]
        one.come(a, 0, 1)
        one.come(b, 2)
        await asyncio.sleep(3)
        assert one.stored == 2
        assert len(faults) == len(ended) == 1
        assert isinstance(broken, Peer)

    run(scenario())
