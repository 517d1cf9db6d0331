"""A publish path over a ledger, a buffer and peers that do what the test says."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

from broker.topics.deduplication import ProducerSequence
from broker.topics.producer import Producer, ProducerRequest, ProducerState
from broker.topics.publish_limits import PublishLimits
from broker.topics.publishing import PublishPipeline
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.frames import Frame, FrameDecoder, Send
from magnetar.protocol.ids import Position
from magnetar.protocol.message import build_entry
from magnetar.protocol.server_error import MagnetarError
from magnetar.protocol.txn_id import TxnId
from storage.managed_ledger.writer import GroupCallback

ENTRY = b"\x0e\x01" + bytes(30)


class Ledger:
    """Holds appends until the test decides them, in order; takes `room` of them before `refusal`.

    `bite` is how many it takes of those that it is given at once.
    """

    def __init__(self, max_entry_bytes: int = 10**9) -> None:
        self.max_entry_bytes = max_entry_bytes
        self.waiting: deque[GroupCallback] = deque()
        self.refusal: MagnetarError | None = None
        self.room = 0
        self.bite = 10**9
        self.stored = 0

    def append_all(self, entries: Sequence[bytes], done: GroupCallback) -> int:
        takes = min(len(entries), self.bite)
        if self.refusal is not None:
            if not self.room:
                raise self.refusal
            takes = min(takes, self.room)
            self.room -= takes
        self.waiting.extend([done] * takes)
        return takes

    def succeed(self, count: int = 1) -> None:
        """The next ones became durable together."""
        done = [self.waiting.popleft() for _ in range(count)]
        positions = [Position(1, self.stored + index) for index in range(count)]
        self.stored += count
        done[0](positions, None)

    def fail_all(self, error: MagnetarError) -> None:
        for done in list(self.waiting):
            self.waiting.popleft()
            done((), error)


class Buffer:
    """Admits transactions in `joined` at once; others wait until the test answers."""

    def __init__(self) -> None:
        self.joined: set[TxnId] = set()
        self.waiting: deque[tuple[TxnId, Callable[[MagnetarError | None], None]]] = deque()
        self.events: list[tuple[str, TxnId]] = []

    def admit(self, txn: TxnId, then: Callable[[MagnetarError | None], None]) -> bool:
        if txn in self.joined:
            return True
        self.waiting.append((txn, then))
        return False

    def is_joined(self, txn: TxnId) -> bool:
        return txn in self.joined

    def answer(self, error: MagnetarError | None = None) -> None:
        """What waits longest is joined, or refused."""
        txn, then = self.waiting.popleft()
        if error is None:
            self.joined.add(txn)
        then(error)

    def issued(self, txn: TxnId) -> None:
        self.events.append(("issued", txn))

    def not_taken(self, txn: TxnId) -> None:
        self.events.append(("not taken", txn))

    def appended(self, txn: TxnId, position: Position | None, error: MagnetarError | None) -> None:
        self.events.append(("appended" if position is not None else "failed", txn))


class Peer:
    """A connection that remembers what it was told."""

    def __init__(self) -> None:
        self.producers: dict[int, object] = {}
        self.inflight_bytes = 0
        self.paused: set[str] = set()
        self.buffers = 0
        self.remote = "127.0.0.1:1"
        self.tls = False
        self.answers: list[tuple[str, int]] = []
        self.answers_pings = asyncio.Event()
        self.answers_pings.set()
        self._decoder = FrameDecoder(10**6)

    async def echo(self) -> None:
        await self.answers_pings.wait()

    def on_close(self, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def forget_producer(self, producer_id: int, producer: object) -> None:
        self.producers.pop(producer_id, None)

    def put(self, buffer: bytes) -> None:
        self.buffers += 1
        for frame in self._decoder.feed(buffer):
            assert isinstance(frame, Frame)
            self.answers.append(("receipt", frame.command.send_receipt.sequence_id))

    def send_encoded(self, buffer: bytes) -> None:
        self.put(buffer)

    def send(self, command: pb.BaseCommand) -> None:
        if command.HasField("send_error"):
            name = pb.ServerError.Name(command.send_error.error)
            self.answers.append((name, command.send_error.sequence_id))
        elif command.HasField("close_producer"):
            self.answers.append(("closed", command.close_producer.producer_id))

    def pause_reading(self, why: str) -> None:
        self.paused.add(why)

    def resume_reading(self, why: str) -> None:
        self.paused.discard(why)


class Bench:
    """One topic's publish path with producers on peers."""

    def __init__(self, connection_bytes: int = 10**9, *, max_entry_bytes: int = 10**9) -> None:
        self.ledger = Ledger(max_entry_bytes)
        self.limits = PublishLimits(connection_bytes=connection_bytes, total_bytes=10**9)
        self.store = SimpleNamespace(durable=None, unsaved_entries=0, unsaved_bytes=0)
        self.lost: list[MagnetarError] = []
        self.buffer = Buffer()
        self.gone: list[Producer] = []
        self.publishing = PublishPipeline(
            self.ledger,  # type: ignore[arg-type]
            self.limits,
            self.store,  # type: ignore[arg-type]
            self.buffer,  # type: ignore[arg-type]
            self.lost.append,
        )

    def producer_gone(self, producer: Producer) -> None:
        self.gone.append(producer)

    def producer(self, *, enforce: bool = False) -> tuple[Peer, Producer]:
        peer = Peer()
        request = ProducerRequest(connection=peer, producer_id=1)  # type: ignore[arg-type]
        producer = Producer(self, "p", request, 0, 0.0)  # type: ignore[arg-type]
        producer.track(ProducerSequence(), enforce=enforce, resends=False)
        producer.move(ProducerState.OPEN)
        peer.producers[1] = producer
        return peer, producer

    def send_in(self, producer: Producer, number: int, txn: TxnId) -> None:
        """A SEND in a transaction."""
        self.publishing.publish(producer, [sent_in(number, txn)], 0)

    def send(
        self, producer: Producer, number: int, *, count: int = 1, entry: bytes = ENTRY
    ) -> None:
        """What the SEND handler does with `count` of them that came together.

        Nothing, for a producer that has lost its id.
        """
        sends = [sent(number + index, entry) for index in range(count)]
        at = 0
        while at < count and cast("Peer", producer.connection).producers.get(1) is producer:
            at = self.publishing.publish(producer, sends, at)


def entry_in(txn: TxnId | None) -> bytes:
    """An entry of the size of ENTRY, whose message is part of the transaction."""
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
    if txn is not None:
        metadata.txnid_most_bits, metadata.txnid_least_bits = txn.most, txn.least
    room = len(ENTRY) - len(build_entry(metadata, b""))
    return build_entry(metadata, bytes(room))


def sent_in(number: int, txn: TxnId, named: TxnId | None = None) -> Send:
    """A SEND in a transaction, whose message may name another one."""
    entry = entry_in(txn if named is None else named)
    return Send(1, number, 0, 1, entry, plain=False, txnid=(txn.most, txn.least))


def sent(number: int, entry: bytes | None = ENTRY, *, messages: int = 1) -> Send:
    return Send(1, number, 0, messages, entry, plain=entry is not None)
