"""A whole producer, on virtual time, against brokers in memory: one thing at a time."""

import asyncio
import random
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

from magnetar.bounds import GIVEN_UP_TICK_S, LAYOUT_WAIT_S, SEAL_PATIENCE_S, SEGMENT_DOUBTS
from magnetar.errors import (
    ChecksumFailed,
    ConnectionLost,
    InvalidArgument,
    MagnetarError,
    OperationTimedOut,
    ProducerQueueFull,
    TopicTerminated,
    TransactionFailed,
)
from magnetar.message_id import MessageId
from magnetar.produce.producer import Producer
from magnetar.produce.producer_settings import AccessMode, ProducerSettings
from magnetar.protocol.server_error import InternalError
from magnetar.schema.plain import BYTES
from magnetar.transactions.transaction import Transaction
from tests.simulation.loop import SimulatedLoop
from tests.unit.magnetar.produce.world import TOPIC, Link, World

if TYPE_CHECKING:
    from _collections_abc import dict_items

T = TypeVar("T")


def run(work: Coroutine[None, None, T]) -> T:
    """Run it on a loop with virtual time."""
    loop = SimulatedLoop(random.Random(1))
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(loop.spawn(loop.new_host("client"), work))
    finally:
        loop.bury()
        asyncio.set_event_loop(None)


async def opened(world: World, settings: ProducerSettings | None = None) -> Producer[bytes]:
    producer = Producer(world.context, TOPIC, BYTES, settings or ProducerSettings())
    await producer.open()
    return producer


@pytest.mark.parametrize(
    "given",
    [
        {"event_time_ms": 5.5},
        {"sequence_id": 5.0},
        {"deliver_at_ms": 7.5},
        {"deliver_after_s": "soon"},
        {"deliver_after_s": float("nan")},
        {"sequence_id": -1},
    ],
    ids=str,
)
def test_numbers_that_no_metadata_carries_are_refused_at_once(given: Mapping[str, Any]) -> None:
    async def main() -> None:
        producer = await opened(World(1))
        with pytest.raises(InvalidArgument):
            producer.send_nowait(b"x", **given)
        await producer.close()

    run(main())


class Properties(dict[str, str]):
    """As somebody may change them after they were checked."""

    def __init__(self) -> None:
        super().__init__(a="b")
        self.left = 2

    def items(self) -> "dict_items[str, str]":
        self.left -= 1
        bad = cast("dict[str, str]", {"a": 5})
        return bad.items() if self.left < 0 else super().items()


def test_batch_that_cannot_be_encoded_fails_alone() -> None:
    async def main() -> list[MessageId | BaseException]:
        world = World(1)
        producer = await opened(world, ProducerSettings(batching=False))
        sent = [producer.send_nowait(b"first"), producer.send_nowait(b"x", properties=Properties())]
        sent.append(producer.send_nowait(b"last"))
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        await producer.close()
        assert world.lost_connections == 0
        assert producer._capacity.messages == 0
        return outcomes

    first, bad, last = run(main())
    assert isinstance(first, MessageId)
    assert isinstance(last, MessageId)
    assert isinstance(bad, InternalError)
    assert isinstance(bad, MagnetarError)
    assert "properties" in str(bad)


ONE = ProducerSettings(max_pending_messages=1, send_timeout_s=5)


def test_invalid_send_leaves_its_place_to_the_next_waiter() -> None:
    async def main() -> None:
        producer = await opened(World(1), ONE)
        first = producer.send_nowait(b"first")
        bad = asyncio.ensure_future(producer.send(cast("bytes", object())))
        good = asyncio.ensure_future(producer.send(b"good"))
        with pytest.raises(InvalidArgument):
            await bad
        assert isinstance(await first, MessageId)
        assert isinstance(await good, MessageId)
        await producer.close()

    run(main())


class EndedWork:
    """A transaction that has ended while a message waited for its turn."""

    id = (1, 1)

    def track(self, outcome: object) -> None:
        raise TransactionFailed("It has ended.")


@pytest.mark.parametrize("many", [False, True])
def test_message_that_fails_at_its_turn_leaves_its_place_to_the_next_waiter(many: bool) -> None:
    async def main() -> None:
        producer = await opened(World(1), ONE)
        first = producer.send_nowait(b"first")
        if many:
            values = [cast("bytes", object())]
            bad: asyncio.Future[Any] = asyncio.ensure_future(producer.send_many(values))
        else:
            work = cast("Transaction", EndedWork())
            bad = asyncio.ensure_future(producer.send(b"x", transaction=work))
        waits = asyncio.ensure_future(producer.room())
        with pytest.raises(MagnetarError):
            await bad
        await first
        async with asyncio.timeout(1):
            await waits
        await producer.close()

    run(main())


def test_every_waiter_of_a_full_queue_wakes() -> None:
    async def main() -> None:
        producer = await opened(World(1), ONE)
        producer.send_nowait(b"first")
        await asyncio.gather(*(producer.room() for _ in range(3)))
        await producer.close()

    run(main())


def test_all_waiters_of_a_full_queue_send() -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world, ONE)

        async def send(payload: bytes) -> None:
            while True:
                try:
                    await producer.send_nowait(payload)
                except ProducerQueueFull:
                    await producer.room()
                else:
                    return

        await asyncio.gather(*(send(b"%d" % number) for number in range(20)))
        assert [each.payload for each in world.segments[0].stored] == [
            b"%d" % number for number in range(20)
        ]
        await producer.close()

    run(main())


def test_send_waiting_for_a_full_queue_is_not_overtaken() -> None:
    async def main() -> None:
        producer = await opened(World(1), ProducerSettings(max_pending_messages=2, batching=False))
        first = producer.send_nowait(b"1")
        producer.send_nowait(b"2")
        asked = asyncio.ensure_future(producer.send(b"3", key="k"))
        await asyncio.sleep(0)
        late: list[BaseException] = []

        def at_once(_: object) -> None:
            try:
                producer.send_nowait(b"4", key="k")
            except ProducerQueueFull as error:
                late.append(error)

        first.add_done_callback(at_once)
        await asked
        assert late
        await producer.close()

    run(main())


def cut_off(world: World) -> None:
    """No broker is reached any more."""

    async def nobody(topic: str) -> Link:
        raise ConnectionLost(f"No broker for {topic}.")

    world.of_topic = nobody  # type: ignore[method-assign]
    for link in world.links.values():
        link.lose()


def test_sends_cancelled_without_a_connection_free_the_queue() -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world, ProducerSettings(max_pending_messages=2, send_timeout_s=30))
        await producer.send(b"before")
        cut_off(world)
        given_up = [producer.send_nowait(b"x") for _ in range(2)]
        flush = asyncio.ensure_future(producer.flush())
        waits = asyncio.ensure_future(producer.room())
        await asyncio.sleep(0)
        for future in given_up:
            future.cancel()
        async with asyncio.timeout(2 * GIVEN_UP_TICK_S):
            await waits
            await flush
        await producer.close()

    run(main())


def test_send_waits_for_a_full_queue_up_to_its_timeout() -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world, ONE)
        await producer.send(b"before")
        cut_off(world)
        sends = [asyncio.ensure_future(producer.send(b"x")) for _ in range(3)]
        for send in sends:
            with pytest.raises(OperationTimedOut, match="No broker"):
                await send
        assert asyncio.get_running_loop().time() < 2 * ONE.send_timeout_s + 2
        await producer.close()

    run(main())


@pytest.mark.parametrize("splits", [0, 1], ids=["same", "split before"])
def test_a_topic_that_is_made_anew_is_written_to(splits: int) -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world, ONE)
        await producer.send(b"old")
        for _ in range(splits):
            world.split(world.active()[0], told_late=False)
            await producer.send(b"old", key="k")
        world.make_anew()
        sent = [await producer.send(b"%d" % number, key="k") for number in range(3)]
        assert [message_id.segment_id for message_id in sent] == [0, 0, 0]
        assert [each.payload for each in world.segments[0].stored] == [b"0", b"1", b"2"]
        await producer.close()

    run(main())


def test_that_a_segment_is_missing_is_doubted_first() -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world)
        await producer.send(b"before")
        world.missing = SEGMENT_DOUBTS
        world.move(world.active()[0])
        await producer.send(b"after")
        assert asyncio.get_running_loop().time() < LAYOUT_WAIT_S
        await producer.close()

    run(main())


def test_a_segment_that_stays_missing_is_asked_for_again() -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world, ProducerSettings(send_timeout_s=1000))
        await producer.send(b"before")
        world.missing = SEGMENT_DOUBTS + 1
        world.move(world.active()[0])
        await asyncio.sleep(LAYOUT_WAIT_S / 2)
        with pytest.raises(TopicTerminated):
            await producer.send(b"stranded")
        await producer.send(b"after")
        await producer.close()

    run(main())


def test_what_a_sealed_segment_leaves_unanswered_goes_to_its_children_after_a_while() -> None:
    async def main() -> None:
        world = World(1)
        loop = asyncio.get_running_loop()
        producer = await opened(world)
        await producer.send(b"before")
        parent = world.active()[0]
        early = [producer.send_nowait(b"%d" % number, key="k") for number in range(3)]
        world.fenced.add(parent.info.segment_id)
        world.split(parent, told_late=True)
        since = loop.time()
        await asyncio.sleep(SEAL_PATIENCE_S / 2)
        late = [producer.send_nowait(b"%d" % number, key="k") for number in range(3, 6)]
        stored = await asyncio.gather(*early, *late)
        assert SEAL_PATIENCE_S <= loop.time() - since < SEAL_PATIENCE_S + 2
        (child,) = {where.segment_id for where in stored}
        assert child != parent.info.segment_id
        assert [each.payload for each in world.segments[child].stored] == [
            b"%d" % number for number in range(6)
        ]
        await producer.close()

    run(main())


@pytest.mark.parametrize("sealed", [False, True], ids=["active", "sealed"])
def test_a_segment_that_is_not_ready_for_a_while_gets_what_is_its_own_once(sealed: bool) -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world)
        await producer.send(b"before")
        segment = world.active()[0]
        sent = producer.send_nowait(b"x", key="k")
        await asyncio.sleep(0)
        world.fenced.add(segment.info.segment_id)
        world.move(segment)
        if sealed:
            world.split(segment, told_late=False)
        await asyncio.sleep(SEAL_PATIENCE_S / 2 if sealed else 1.5 * SEAL_PATIENCE_S)
        assert not sent.done()
        world.fenced.clear()
        segment.sealing = segment.sealed = False
        assert (await sent).segment_id == segment.info.segment_id
        assert [each.payload for each in segment.stored] == [b"before", b"x"]
        await producer.close()

    run(main())


@pytest.mark.parametrize("properties", [None, dict.fromkeys("abcdefgh", "")], ids=["plain", "tiny"])
def test_batches_are_not_larger_than_the_broker_takes(
    properties: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Link, "max_message_size", 5000)

    async def main() -> None:
        world = World(1)
        producer = await opened(world, ProducerSettings(batch_max_bytes=2**20))
        sent = [producer.send_nowait(b"%d" % n, properties=properties) for n in range(500)]
        stored = await asyncio.gather(*sent)
        assert len({where.entry.entry_id for where in stored}) < 100
        order = [each.payload for each in world.segments[0].stored]
        assert order == [b"%d" % n for n in range(500)]
        await producer.close()

    run(main())


class Slow:
    """A transaction that never learns of a segment."""

    id = (0, 1)

    def track(self, future: object) -> None:
        pass

    def writing_to(self, topic: str) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("cancelled", [True, False])
def test_send_behind_a_cancelled_one_is_sent(cancelled: bool) -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world, ProducerSettings(send_timeout_s=5))
        await producer.send(b"before")
        head = producer.send_nowait(b"in", transaction=cast("Transaction", Slow()))
        await asyncio.sleep(3)
        behind = producer.send_nowait(b"behind")
        if cancelled:
            head.cancel()
        await behind
        assert head.done()
        assert [each.payload for each in world.segments[0].stored] == [b"before", b"behind"]
        await asyncio.gather(head, return_exceptions=True)
        await producer.close()

    run(main())


@pytest.mark.parametrize("told_late", [False, True], ids=["magnetar", "m1"])
def test_producer_waiting_for_exclusive_access_follows_a_split(told_late: bool) -> None:
    async def main() -> None:
        world = World(1)
        world.busy = True
        settings = ProducerSettings(access_mode=AccessMode.WAIT_FOR_EXCLUSIVE)
        opening = asyncio.ensure_future(opened(world, settings))
        await asyncio.sleep(100)
        world.split(world.active()[0], told_late=told_late)
        if told_late:
            world.busy = False
        await asyncio.sleep(10)
        world.busy = False
        producer = await opening
        assert (await producer.send(b"x", key="k")).segment_id > 0
        await producer.close()

    run(main())


class Work:
    """A transaction that knows every segment."""

    id = (1, 2)

    def track(self, outcome: object) -> None:
        """It would wait for it."""

    def writing_to(self, topic: str) -> None:
        """It knows."""


@pytest.mark.parametrize("knows", ["magnetar", "apache", "pruned"])
@pytest.mark.parametrize("in_transaction", [True, False], ids=["transaction", "plain"])
def test_what_a_sealed_segment_may_have_goes_to_its_children_only_where_nobody_knows(
    in_transaction: bool, knows: str
) -> None:
    """Nobody does at Apache Pulsar, nor where the segment has been pruned meanwhile."""

    async def main() -> None:
        world = World(1)
        world.knows_resends = knows != "apache"
        producer = await opened(world)
        await producer.send(b"before")
        parent = world.active()[0]
        work = cast("Transaction", Work()) if in_transaction else None
        doubtful = producer.send_nowait(b"doubtful", key="k", transaction=work)
        while len(parent.stored) == 1:
            await asyncio.sleep(0.0001)
        assert not doubtful.done()
        link = next(iter(parent.attached.values())).connection
        world.split(parent, told_late=False)
        link.lose()
        if knows == "pruned":
            parent.name = "gone"
        if knows == "magnetar":
            assert (await doubtful).segment_id == parent.info.segment_id
        elif in_transaction:
            with pytest.raises(TransactionFailed, match="it is not known whether"):
                await doubtful
        else:
            assert (await doubtful).segment_id != parent.info.segment_id
        after = await producer.send(b"after", key="k", transaction=work)
        assert after.segment_id != parent.info.segment_id
        stored = [each.payload for each in world.segments[after.segment_id].stored]
        again = knows != "magnetar" and not in_transaction
        assert stored == ([b"doubtful", b"after"] if again else [b"after"])
        await producer.close()

    run(main())


def test_what_a_sealed_segment_does_not_have_goes_to_its_children_in_a_transaction_too() -> None:
    async def main() -> None:
        world = World(1)
        producer = await opened(world)
        await producer.send(b"before")
        parent = world.active()[0]
        world.split(parent, told_late=True)
        work = cast("Transaction", Work())
        where = await producer.send(b"doubtful", key="k", transaction=work)
        assert [each.payload for each in parent.stored] == [b"before"]
        stored = [each.payload for each in world.segments[where.segment_id].stored]
        assert stored == [b"doubtful"]
        await producer.close()

    run(main())


@pytest.mark.parametrize("knows_resends", [True, False], ids=["magnetar", "apache"])
@pytest.mark.parametrize("in_transaction", [True, False], ids=["transaction", "plain"])
def test_what_may_be_stored_is_sent_again_in_a_transaction_only_where_brokers_know_it(
    in_transaction: bool, knows_resends: bool
) -> None:
    async def main() -> None:
        world = World(1)
        world.knows_resends = knows_resends
        producer = await opened(world)
        await producer.send(b"before")
        segment = world.active()[0]
        work = cast("Transaction", Work()) if in_transaction else None
        doubtful = producer.send_nowait(b"doubtful", key="k", transaction=work)
        while len(segment.stored) == 1:
            await asyncio.sleep(0.0001)
        assert not doubtful.done()
        next(iter(segment.attached.values())).connection.lose()
        behind = producer.send_nowait(b"behind", key="k", transaction=work)
        if in_transaction and not knows_resends:
            with pytest.raises(TransactionFailed, match="it is not known whether"):
                await doubtful
        else:
            await doubtful
        await behind
        times = 2 if not in_transaction and not knows_resends else 1
        stored = [each.payload for each in segment.stored]
        assert stored == [b"before", *[b"doubtful"] * times, b"behind"]
        await producer.close()

    run(main())


@pytest.mark.parametrize("knows_resends", [True, False], ids=["magnetar", "apache"])
@pytest.mark.parametrize("in_transaction", [True, False], ids=["transaction", "plain"])
def test_message_that_arrived_damaged_is_sent_again(
    in_transaction: bool, knows_resends: bool
) -> None:
    """With what follows it, as Java clients do; in a transaction never what may be stored."""

    async def main() -> None:
        world = World(1)
        world.knows_resends = knows_resends
        world.damage.add(b"a")
        producer = await opened(world, ProducerSettings(batching=False))
        work = cast("Transaction", Work()) if in_transaction else None
        sends = [producer.send_nowait(each, transaction=work) for each in (b"a", b"b", b"c")]
        if in_transaction and not knows_resends:
            with pytest.raises(ChecksumFailed, match="Abort the transaction"):
                await sends.pop(0)
        await asyncio.gather(*sends)
        await producer.send(b"d")
        again = [] if in_transaction else [b"a", b"b", b"c"]
        stored = [each.payload for each in world.active()[0].stored]
        assert stored == ([b"a", b"b", b"c"] if knows_resends else [b"b", b"c", *again]) + [b"d"]
        await producer.close()

    run(main())


@pytest.mark.parametrize("knows_resends", [True, False], ids=["magnetar", "apache"])
def test_message_damaged_before_sending_fails_alone(
    knows_resends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are stored once, on a broker that takes them at once and on one that does not."""
    monkeypatch.setattr("magnetar.produce.pending.crc32c", lambda _: -1)

    async def main() -> None:
        world = World(1)
        world.knows_resends = knows_resends
        world.damage.add(b"a")
        producer = await opened(world, ProducerSettings(batching=False))
        damaged, *others = [producer.send_nowait(each) for each in (b"a", b"b", b"c")]
        with pytest.raises(ChecksumFailed, match="damaged in this process"):
            await damaged
        await asyncio.gather(*others)
        await producer.send(b"d")
        assert [each.payload for each in world.active()[0].stored] == [b"b", b"c", b"d"]
        await producer.close()

    run(main())
