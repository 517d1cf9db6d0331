"""The producer for threads, over a core whose receipts come when the test says so."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from magnetar.errors import (
    AlreadyClosed,
    MessageTooLarge,
    OperationTimedOut,
    ProducerQueueFull,
)
from magnetar.message_id import EntryId, MessageId
from magnetar.produce.producer import Producer as AsyncProducer
from magnetar.produce.producer_settings import ProducerSettings
from magnetar.sync.bridge import Bridge
from magnetar.sync.producer import Producer, SendFuture
from tests.support.waiting import TIMEOUT_S

TOPIC = "topic://public/default/x"


class Core:
    """As much of the core's producer as the face for threads uses; all on the bridge's loop."""

    def __init__(self, room: int, max_pending_messages: int) -> None:
        self.settings = ProducerSettings(max_pending_messages=max_pending_messages)
        self.topic = TOPIC
        self.sent: list[bytes] = []
        self.waiting: deque[asyncio.Future[MessageId]] = deque()
        self.closed = False
        self.automatic = False
        self._room = room
        self._changed = asyncio.Event()

    def send_nowait(self, value: bytes, **options: object) -> "asyncio.Future[MessageId]":
        if self.closed:
            raise AlreadyClosed("It is closed.")
        if len(self.waiting) >= self._room:
            raise ProducerQueueFull("No room.")
        future: asyncio.Future[MessageId] = asyncio.get_running_loop().create_future()
        self.sent.append(value)
        self.waiting.append(future)
        if self.automatic:
            asyncio.get_running_loop().call_soon(self.receipt)
        return future

    async def room(self) -> None:
        while len(self.waiting) >= self._room and not self.closed:
            self._changed.clear()
            await self._changed.wait()
        if self.closed:
            raise AlreadyClosed("It is closed.")

    async def flush(self) -> None:
        while self.waiting:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        self.closed = True
        for future in self.waiting:
            future.set_exception(AlreadyClosed("It was closed."))
        self.waiting.clear()
        self._changed.set()

    def receipt(self, error: Exception | None = None) -> None:
        future = self.waiting.popleft()
        if error is None:
            future.set_result(MessageId(EntryId(0, len(self.sent)), 0))
        else:
            future.set_exception(error)
        self._changed.set()


Make = Callable[..., tuple[Producer[bytes], Core]]


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    made = Bridge()
    yield made
    made.close()


@pytest.fixture
def make(bridge: Bridge) -> Make:
    def made(
        *, room: int = 10**6, messages_max: int = 1000, automatic: bool = False
    ) -> tuple[Producer[bytes], Core]:
        core = Core(room, messages_max)
        core.automatic = automatic
        return Producer(bridge, cast("AsyncProducer[bytes]", core)), core

    return made


def numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


def test_messages_go_to_the_core_in_order_whichever_way_they_are_sent(make: Make) -> None:
    producer, core = make(automatic=True)
    for index, value in enumerate(numbers(300)):
        if index % 50 == 49:
            assert producer.send(value).entry.ledger_id == 0
        else:
            producer.send_nowait(value)
    producer.flush()
    assert core.sent == numbers(300)


def test_order_holds_when_the_core_queue_is_full(make: Make) -> None:
    producer, core = make(room=3, automatic=True)
    for value in numbers(200):
        producer.send_nowait(value)
    producer.flush()
    assert core.sent == numbers(200)


def test_each_threads_messages_keep_their_order(make: Make) -> None:
    producer, core = make(room=7, automatic=True)

    def send(thread: int) -> None:
        for number in range(100):
            producer.send(f"{thread}/{number}".encode())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send, range(4)))
    assert len(core.sent) == 400
    for thread in range(4):
        mine = [value for value in core.sent if value.startswith(b"%d/" % thread)]
        assert mine == [b"%d/%d" % (thread, number) for number in range(100)]


def test_full_queue_refuses_sends_until_a_receipt(make: Make, bridge: Bridge) -> None:
    producer, core = make(messages_max=2)
    first = producer.send_nowait(b"0")
    producer.send_nowait(b"1")
    with pytest.raises(ProducerQueueFull, match="call room"):
        producer.send_nowait(b"2")
    with pytest.raises(OperationTimedOut):
        producer.room(timeout_s=0.01)
    bridge.call(core.receipt)
    producer.room(timeout_s=TIMEOUT_S)
    producer.send_nowait(b"2")
    assert first.result(TIMEOUT_S) == MessageId(EntryId(0, 2), 0)


def test_send_waits_for_a_free_place(make: Make, bridge: Bridge) -> None:
    producer, core = make(messages_max=1)
    producer.send_nowait(b"0")
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(producer.send, b"1")
        bridge.call(core.receipt)
        while len(core.sent) < 2:
            bridge.call(lambda: None)
        bridge.call(core.receipt)
        sending.result(TIMEOUT_S)
    assert core.sent == [b"0", b"1"]


def test_an_error_comes_by_the_future(make: Make, bridge: Bridge) -> None:
    producer, core = make()
    future = producer.send_nowait(b"0")
    bridge.call(core.receipt, MessageTooLarge("Too large."))
    with pytest.raises(MessageTooLarge):
        future.result(TIMEOUT_S)
    producer.flush()


def test_flush_raises_the_first_unread_error(make: Make, bridge: Bridge) -> None:
    producer, core = make()
    seen = producer.send_nowait(b"0")
    for value in (b"1", b"2"):
        producer.send_nowait(value)
    bridge.call(core.receipt, MessageTooLarge("zero"))
    bridge.call(core.receipt, MessageTooLarge("one"))
    bridge.call(core.receipt, MessageTooLarge("two"))
    assert seen.exception(TIMEOUT_S) is not None
    with pytest.raises(MessageTooLarge, match="one"):
        producer.flush()
    producer.flush()


def test_message_cancelled_before_it_reached_the_core_is_not_sent(
    make: Make, bridge: Bridge
) -> None:
    producer, core = make(room=1)
    producer.send_nowait(b"0")
    held = producer.send_nowait(b"1")
    producer.send_nowait(b"2")
    bridge.call(lambda: None)
    assert held.cancel()
    bridge.call(core.receipt)
    while len(core.sent) < 2:
        bridge.call(lambda: None)
    bridge.call(core.receipt)
    producer.flush()
    assert core.sent == [b"0", b"2"]


def test_message_that_reached_the_core_cannot_be_cancelled(make: Make, bridge: Bridge) -> None:
    producer, core = make()
    future = producer.send_nowait(b"0")
    bridge.call(lambda: None)
    assert not future.cancel()
    bridge.call(core.receipt)
    future.result(TIMEOUT_S)


def test_closing_passes_on_what_was_given_and_fails_what_is_left(make: Make) -> None:
    producer, core = make()
    futures = [producer.send_nowait(value) for value in numbers(5)]
    producer.close()
    producer.close()
    assert core.sent == numbers(5)
    for future in futures:
        with pytest.raises(AlreadyClosed):
            future.result(TIMEOUT_S)
    with pytest.raises(AlreadyClosed):
        producer.send(b"5")


def test_when_the_client_ends_nobody_is_left_waiting(make: Make, bridge: Bridge) -> None:
    producer, core = make(room=1)
    bridge.at_end(core.close)
    futures = [producer.send_nowait(value) for value in numbers(3)]
    bridge.close()
    for future in futures:
        with pytest.raises(AlreadyClosed):
            future.result(TIMEOUT_S)
    with pytest.raises(AlreadyClosed):
        producer.send_nowait(b"3")
    producer.close()


def test_callbacks_run_on_the_clients_thread(make: Make, bridge: Bridge) -> None:
    producer, core = make()
    seen: list[int] = []
    done = threading.Event()

    def called(future: "SendFuture") -> None:
        seen.append(threading.get_ident())
        done.set()

    producer.send_nowait(b"0").add_done_callback(called)  # type: ignore[arg-type]
    bridge.call(core.receipt)
    assert done.wait(TIMEOUT_S)
    assert seen == [bridge.call(threading.get_ident)]
