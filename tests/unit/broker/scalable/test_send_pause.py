"""A layout waits for a pause in the SENDs of the client whose producer it closes."""

import asyncio

from broker.scalable.send_pause import PausedSends, SendPause
from broker.topics.producer import Producer
from config.bounds import (
    ECHO_WAIT_S,
    LAYOUT_PUSH_WAIT_S,
    NEW_BATCH_S,
    RECEIPTS_HELD_S,
    SEND_PAUSE_S,
)
from magnetar.protocol.names import SegmentName, parse_topic_name, segment_name
from storage.ledger.store import DiskFull
from tests.unit.broker.topics.publishing_bench import Bench
from tests.unit.txn.virtual_time import in_virtual_time

LAYOUT = ("layout", 0)


@in_virtual_time
async def test_receipts_follow_the_layout_in_the_first_pause() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    SendPause([producer], [], lambda: peer.answers.append(LAYOUT))
    for number in range(3):
        bench.send(producer, number)
        bench.ledger.succeed()
        await asyncio.sleep(SEND_PAUSE_S / 2)
    assert peer.answers == []
    await asyncio.sleep(SEND_PAUSE_S)
    assert peer.answers == [LAYOUT, ("receipt", 0), ("receipt", 1), ("receipt", 2)]
    bench.send(producer, 3)
    bench.ledger.succeed()
    assert peer.answers[4:] == [("receipt", 3)]
    assert not producer.examined


@in_virtual_time
async def test_a_client_that_goes_on_sending_gets_it_right_behind_a_send() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    SendPause([producer], [], lambda: peer.answers.append(LAYOUT))
    sent = 0
    while LAYOUT not in peer.answers:
        bench.send(producer, sent)
        sent += 1
        await asyncio.sleep(0)
        if LAYOUT not in peer.answers:
            await asyncio.sleep(SEND_PAUSE_S / 2)
    loop = asyncio.get_running_loop()
    assert LAYOUT_PUSH_WAIT_S <= loop.time() <= LAYOUT_PUSH_WAIT_S + SEND_PAUSE_S


@in_virtual_time
async def test_of_two_producers_that_it_closes_both_have_just_sent() -> None:
    """Nothing is open then at either, and what its other producers do does not matter."""
    bench = Bench()
    peer, first = bench.producer()
    (_, second), (_, other) = bench.producer(), bench.producer()
    SendPause([first, second], [other], lambda: peer.answers.append(LAYOUT))
    pause_s = NEW_BATCH_S * 2
    number = 0
    while asyncio.get_running_loop().time() < LAYOUT_PUSH_WAIT_S + 2 * pause_s:
        for producer in (first, second, other):
            bench.send(producer, number)
            await asyncio.sleep(pause_s)
        number += 1
    assert peer.answers == []
    bench.send(first, number)
    bench.send(second, number)
    await asyncio.sleep(0)
    assert peer.answers == [LAYOUT]


@in_virtual_time
async def test_a_client_that_is_only_slow_has_not_paused() -> None:
    """Its SENDs come before the answer to the PING."""
    bench = Bench()
    peer, producer = bench.producer()
    peer.answers_pings.clear()
    SendPause([producer], [], lambda: peer.answers.append(LAYOUT))
    await asyncio.sleep(SEND_PAUSE_S * 2)
    bench.send(producer, 0)
    peer.answers_pings.set()
    await asyncio.sleep(SEND_PAUSE_S / 2)
    assert peer.answers == []
    await asyncio.sleep(SEND_PAUSE_S * 2)
    assert peer.answers == [LAYOUT]


@in_virtual_time
async def test_it_waits_for_a_bounded_time() -> None:
    bench = Bench()
    peer, closing = bench.producer()
    _, other = bench.producer()
    SendPause([closing], [other], lambda: peer.answers.append(LAYOUT))
    number = 0
    while LAYOUT not in peer.answers:
        bench.send(other, number)
        number += 1
        await asyncio.sleep(SEND_PAUSE_S / 4)
    assert asyncio.get_running_loop().time() <= 2 * LAYOUT_PUSH_WAIT_S + SEND_PAUSE_S / 4


@in_virtual_time
async def test_a_client_that_answers_no_ping_gets_it_in_the_end() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    peer.answers_pings.clear()
    SendPause([producer], [], lambda: peer.answers.append(LAYOUT))
    # A connection waits for an answer no longer than that.
    asyncio.get_running_loop().call_later(ECHO_WAIT_S, peer.answers_pings.set)
    await asyncio.sleep(2 * LAYOUT_PUSH_WAIT_S)
    assert peer.answers == []
    await asyncio.sleep(ECHO_WAIT_S)
    assert peer.answers == [LAYOUT]


@in_virtual_time
async def test_receipts_precede_the_answer_of_a_close_and_an_error() -> None:
    bench = Bench()
    (left, leaving), (failed, failing) = bench.producer(), bench.producer()
    SendPause([leaving, failing], [], lambda: None)
    for producer in (leaving, failing):
        bench.send(producer, 0)
        bench.ledger.succeed()
    await leaving.close()
    assert left.answers == [("receipt", 0)]
    bench.send(failing, 1)
    bench.ledger.fail_all(DiskFull("Full."))
    assert failed.answers == [("receipt", 0), ("PersistenceError", 1)]
    await asyncio.sleep(SEND_PAUSE_S)
    assert left.answers == [("receipt", 0)]


@in_virtual_time
async def test_a_second_layout_within_the_pause_holds_nothing_back() -> None:
    bench = Bench()
    peer, producer = bench.producer()
    SendPause([producer], [], lambda: peer.answers.append(LAYOUT))
    SendPause([producer], [], lambda: peer.answers.append(("newer", 1)))
    bench.send(producer, 0)
    bench.ledger.succeed()
    await asyncio.sleep(2 * SEND_PAUSE_S)
    assert sorted(peer.answers) == [LAYOUT, ("newer", 1), ("receipt", 0)]
    assert not producer.examined


CLOSING, ACTIVE = (
    segment_name(parse_topic_name(f"segment://public/default/t/{each}"))
    for each in ("0000-7fff-0", "8000-ffff-1")
)


def paused_sends(producers: dict[SegmentName, list[Producer]]) -> PausedSends:
    return PausedSends(lambda segment: producers.get(segment, ()))


@in_virtual_time
async def test_receipts_wait_until_another_broker_has_pushed_the_layout() -> None:
    bench = Bench()
    (ending, closing), (staying, other) = bench.producer(), bench.producer()
    sends = paused_sends({CLOSING: [closing], ACTIVE: [other]})
    asked = asyncio.create_task(sends.pause([CLOSING], [ACTIVE], "b/1"))
    await asyncio.sleep(SEND_PAUSE_S / 2)
    for producer in (closing, other):
        bench.send(producer, 0)
        bench.ledger.succeed()
    await asyncio.sleep(SEND_PAUSE_S / 2)
    assert not asked.done(), "it sent something meanwhile"
    assert await asked
    assert ending.answers == staying.answers == []
    sends.resume("b/1")
    assert ending.answers == staying.answers == [("receipt", 0)]
    assert not closing.examined
    assert not other.examined


@in_virtual_time
async def test_receipts_wait_for_all_brokers_that_push_the_layout() -> None:
    bench = Bench()
    peer, closing = bench.producer()
    sends = paused_sends({CLOSING: [closing]})
    await asyncio.gather(*(sends.pause([CLOSING], [], each) for each in ("b/1", "c/1")))
    bench.send(closing, 0)
    bench.ledger.succeed()
    sends.resume("b/1")
    assert peer.answers == []
    sends.resume("c/1")
    assert peer.answers == [("receipt", 0)]
    sends.resume("c/1")


@in_virtual_time
async def test_receipts_do_not_wait_for_a_broker_that_is_gone() -> None:
    bench = Bench()
    peer, closing = bench.producer()
    await paused_sends({CLOSING: [closing]}).pause([CLOSING], [], "b/1")
    bench.send(closing, 0)
    bench.ledger.succeed()
    assert peer.answers == []
    await asyncio.sleep(RECEIPTS_HELD_S)
    assert peer.answers == [("receipt", 0)]


@in_virtual_time
async def test_receipts_are_sent_after_a_request_that_came_twice() -> None:
    """Its connection was lost; the other broker asks again over the next one."""
    bench = Bench()
    (ending, closing), (staying, other) = bench.producer(), bench.producer()
    sends = paused_sends({CLOSING: [closing], ACTIVE: [other]})
    lost = asyncio.create_task(sends.pause([CLOSING], [ACTIVE], "b/1"))
    await asyncio.sleep(SEND_PAUSE_S / 2)
    lost.cancel()
    assert await sends.pause([CLOSING], [ACTIVE], "b/1")
    for producer in (closing, other):
        bench.send(producer, 0)
        bench.ledger.succeed()
    assert ending.answers == staying.answers == []
    sends.resume("b/1")
    assert ending.answers == staying.answers == [("receipt", 0)]
    await asyncio.sleep(RECEIPTS_HELD_S)
    assert not closing.examined
    assert not other.examined


@in_virtual_time
async def test_nobody_waits_where_there_are_no_senders() -> None:
    loop = asyncio.get_running_loop()
    before_s = loop.time()
    assert not await paused_sends({}).pause([CLOSING], [ACTIVE], "b/1")
    assert loop.time() == before_s
