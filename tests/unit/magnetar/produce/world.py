"""A topic at brokers that exist only in memory, and connections to them, for a whole producer.

Rules: time and order come from a seed.  Whatever is sent arrives in order, late; a connection that
is lost takes along receipts, and SENDs from some point on.  A broker does what the real ones do:

- it stores what a producer has in flight, in order, and answers in order; unless `in_turn`, its
  refusals overtake receipts, as those of Apache Pulsar do;
- of a producer that comes back it drops what it has stored, until the first message that is new;
  unless `knows_resends`, it stores it again, as Apache Pulsar does;
- if it `knows_resends`, who comes back to a sealed segment that has something of it hears so;
- it seals a segment either as Magnetar does (the new layout is told first; attached producers
  finish) or as Apache Pulsar 5.0.0-M1 does (no SEND is taken any more; the layout comes later).
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from magnetar.context import ClientContext
from magnetar.errors import ConnectionLost, MagnetarError, OperationTimedOut, error_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.commands import FIELD_OF_TYPE
from magnetar.protocol.frames import Frame, FrameDecoder, Send
from magnetar.protocol.ids import UNSOLICITED_REQUEST_ID, to_wire
from magnetar.protocol.message import iter_batch, parse_metadata, payload_of
from magnetar.protocol.names import SegmentName, parse_topic_name
from magnetar.protocol.server_error import ServerError
from magnetar.wire.connection import Handler, PeerKind

Kind = pb.BaseCommand
TOPIC = "topic://public/default/t"
BAD = b"bad"
"""How payloads begin that the broker does not allow."""


@dataclass
class Attached:
    """One producer at the broker."""

    connection: "Link"
    producer_id: int
    name: str
    resends: bool
    hole: int | None = None
    """Of what arrived damaged: Magnetar takes nothing that follows it before it comes again."""


@dataclass
class Stored:
    """One message of a segment.  `receipted` when the client has the receipt."""

    key: str
    payload: bytes
    receipted: bool = False


@dataclass
class SegmentAtBroker:
    """One segment.  `sealing`: nobody new; `sealed`: nothing any more."""

    info: pb.SegmentInfoProto
    name: str
    sealing: bool = False
    sealed: bool = False
    stored: list[Stored] = field(default_factory=list)
    attached: dict[int, Attached] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)


class World:
    """See the module's rules.  Stands in for the connection pool."""

    tls = False

    def __init__(self, seed: object, segments: int = 1) -> None:
        self.rng = random.Random(f"world {seed}")
        self.delay_s = (0.0001, 0.02)
        self.in_turn = True
        self.made_at_ms = 1
        self.links: dict[str, Link] = {}
        self.epoch = 0
        self.knows_resends = True
        self.damage: set[bytes] = set()
        """Payloads that arrive damaged, once."""
        self.busy = False
        """Whether another producer has the topic: who asks is answered when it has gone."""
        self.missing = 0
        """How often a segment is said to be none."""
        self.fenced: set[int] = set()
        """Segments that are not ready for producers, as that which M1 seals under load is not."""
        self.segments: dict[int, SegmentAtBroker] = {}
        self.watchers: dict[int, Link] = {}
        self.lost_connections = 0
        self.names = 0
        width = 65536 // segments
        for index in range(segments):
            end = 65535 if index == segments - 1 else (index + 1) * width - 1
            self._add(index * width, end, ())

    @property
    def context(self) -> ClientContext:
        return ClientContext(pool=self, rng=random.Random(1))  # type: ignore[arg-type]

    # Connection pool

    async def of_topic(self, topic: str) -> "Link":
        await asyncio.sleep(self.rng.uniform(*self.delay_s))
        broker = "even" if topic[-1] in "02468" else "odd"
        link = self.links.get(broker)
        if link is None or link.is_lost:
            link = self.links[broker] = Link(self)
        return link

    async def at(self, url: str) -> "Link":
        return await self.of_topic(url)

    # Segments

    def active(self) -> list[SegmentAtBroker]:
        found = [s for s in self.segments.values() if s.info.state == pb.ACTIVE]
        return sorted(found, key=lambda segment: segment.info.hash_start)

    def _add(self, start: int, end: int, parents: tuple[int, ...]) -> None:
        number = len(self.segments)
        info = pb.SegmentInfoProto(
            segment_id=number,
            hash_start=start,
            hash_end=end,
            state=pb.ACTIVE,
            parent_ids=parents,
            created_at_epoch=self.epoch,
            created_at_ms=self.made_at_ms,
        )
        name = str(SegmentName(parse_topic_name(TOPIC), start, end, number))
        self.segments[number] = SegmentAtBroker(info, name)

    def make_anew(self) -> None:
        """The topic is deleted, and made again with one segment."""
        for segment in self.segments.values():
            self._seal(segment)
        self.segments, self.epoch, self.made_at_ms = {}, 0, self.made_at_ms + 1
        self._add(0, 65535, ())
        self.tell_layout()

    def split(self, parent: SegmentAtBroker, *, told_late: bool) -> None:
        start, end = parent.info.hash_start, parent.info.hash_end
        middle = (start + end) // 2
        self._replace([parent], [(start, middle), (middle + 1, end)], told_late=told_late)

    def merge(self, left: SegmentAtBroker, right: SegmentAtBroker, *, told_late: bool) -> None:
        both = (left.info.hash_start, right.info.hash_end)
        self._replace([left, right], [both], told_late=told_late)

    def _replace(
        self, parents: list[SegmentAtBroker], ranges: list[tuple[int, int]], *, told_late: bool
    ) -> None:
        self.epoch += 1
        ids = tuple(parent.info.segment_id for parent in parents)
        for start, end in ranges:
            self._add(start, end, ids)
        for parent in parents:
            parent.info.state = pb.SEALED
            parent.sealing = True
            if told_late:
                self._seal(parent)
            else:
                self.soon(partial(self._seal, parent), 5.0)
        if told_late:
            self.soon(self.tell_layout, self.rng.uniform(0.05, 1.0))
        else:
            self.tell_layout()

    def _seal(self, segment: SegmentAtBroker) -> None:
        segment.sealed = True
        for producer in tuple(segment.attached.values()):
            self._put_out(segment, producer)

    def _put_out(self, segment: SegmentAtBroker, producer: Attached) -> None:
        """The broker closes a producer."""
        segment.attached.pop(producer.producer_id, None)
        close = pb.CommandCloseProducer(
            producer_id=producer.producer_id, request_id=UNSOLICITED_REQUEST_ID
        )
        producer.connection.tell(
            PeerKind.PRODUCER,
            producer.producer_id,
            pb.BaseCommand(type=Kind.CLOSE_PRODUCER, close_producer=close),
        )

    def move(self, segment: SegmentAtBroker) -> None:
        """Close whoever is attached, as when a topic moves."""
        for producer in tuple(segment.attached.values()):
            self._put_out(segment, producer)

    def tell_layout(self) -> None:
        for session, link in tuple(self.watchers.items()):
            self._tell_layout(session, link)

    def _tell_layout(self, session: int, link: "Link") -> None:
        dag = pb.ScalableTopicDAG(
            epoch=self.epoch, segments=[segment.info for segment in self.segments.values()]
        )
        update = pb.CommandScalableTopicUpdate(
            session_id=session, dag=dag, resolved_topic_name=TOPIC
        )
        link.tell(
            PeerKind.LAYOUT,
            session,
            pb.BaseCommand(type=Kind.SCALABLE_TOPIC_UPDATE, scalable_topic_update=update),
        )

    def soon(self, call: Callable[[], None], delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, call)

    # What a client asks

    def serve(self, link: "Link", command: pb.BaseCommand) -> None:
        if command.type == Kind.SCALABLE_TOPIC_LOOKUP:
            session = command.scalable_topic_lookup.session_id
            self.watchers[session] = link
            self._tell_layout(session, link)
        elif command.type == Kind.SCALABLE_TOPIC_CLOSE:
            self.watchers.pop(command.scalable_topic_close.session_id, None)
        elif command.type == Kind.PRODUCER:
            self._producer(link, command.producer)
        elif command.type == Kind.CLOSE_PRODUCER:
            for segment in self.segments.values():
                known = segment.attached.get(command.close_producer.producer_id)
                if known is not None and known.connection is link:
                    del segment.attached[known.producer_id]
            success = pb.CommandSuccess(request_id=command.close_producer.request_id)
            link.answer(success.request_id, pb.BaseCommand(type=Kind.SUCCESS, success=success))

    def _producer(self, link: "Link", request: pb.CommandProducer) -> None:
        segment = next((s for s in self.segments.values() if s.name == request.topic), None)
        if self.busy:
            if link.awaits(request.request_id):
                self.soon(partial(self._producer, link, request), 0.1)
            return
        if segment is None or self.missing > 0:
            self.missing -= 1
            link.answer(request.request_id, error_of(ServerError.TOPIC_NOT_FOUND, "None here."))
            return
        if segment.info.segment_id in self.fenced:
            link.answer(
                request.request_id, error_of(ServerError.SERVICE_NOT_READY, "It is fenced.")
            )
            return
        returns = self.knows_resends and request.epoch and request.producer_name in segment.last
        if segment.sealing and not returns:
            link.answer(
                request.request_id, error_of(ServerError.TOPIC_TERMINATED_ERROR, "It is sealed.")
            )
            return
        if not request.producer_name:
            self.names += 1
        name = request.producer_name or f"named-{self.names}"
        for known in tuple(segment.attached.values()):
            if known.name == name:
                del segment.attached[known.producer_id]
        segment.attached[request.producer_id] = Attached(
            link, request.producer_id, name, request.epoch > 0
        )
        success = pb.CommandProducerSuccess(
            request_id=request.request_id, producer_name=name, schema_version=b""
        )
        link.answer(
            request.request_id,
            pb.BaseCommand(type=Kind.PRODUCER_SUCCESS, producer_success=success),
        )

    def store(self, link: "Link", send: Send) -> None:
        for segment in self.segments.values():
            producer = segment.attached.get(send.producer_id)
            if producer is not None and producer.connection is link:
                self._store(segment, producer, send)

    def _store(self, segment: SegmentAtBroker, producer: Attached, send: Send) -> None:
        assert send.entry is not None
        metadata = parse_metadata(send.entry)
        payload = bytes(payload_of(send.entry))
        assert metadata.producer_name == producer.name, (metadata.producer_name, producer.name)
        found: list[Stored] = []
        if metadata.HasField("num_messages_in_batch"):
            for single, body in iter_batch(payload, metadata.num_messages_in_batch):
                found.append(Stored(single.partition_key, bytes(body)))
        else:
            found.append(Stored(metadata.partition_key, payload))
        highest = max(send.sequence_id, send.highest_sequence_id)
        if producer.hole is not None and send.sequence_id > producer.hole:
            return
        producer.hole = None
        if found[0].payload in self.damage:
            self.damage.remove(found[0].payload)
            if self.knows_resends:
                producer.hole = send.sequence_id
            self._refuse(producer, send, ServerError.CHECKSUM_ERROR)
        elif self._is_sent_again(segment, producer, highest):
            self._receipt(producer, send, -1, [])
        elif segment.sealed:
            self._refuse(producer, send, ServerError.TOPIC_TERMINATED_ERROR)
        elif any(each.payload.startswith(BAD) for each in found):
            self._refuse(producer, send, ServerError.NOT_ALLOWED_ERROR)
        else:
            producer.resends = False
            segment.last[producer.name] = highest
            segment.stored += found
            self._receipt(producer, send, len(segment.stored), found)

    def _is_sent_again(self, segment: SegmentAtBroker, producer: Attached, highest: int) -> bool:
        known = segment.last.get(producer.name, -1)
        return self.knows_resends and producer.resends and highest <= known

    def _refuse(self, producer: Attached, send: Send, code: ServerError) -> None:
        error = pb.CommandSendError(
            producer_id=producer.producer_id,
            sequence_id=send.sequence_id,
            error=cast("pb.ServerError", int(code)),
            message="It is refused.",
        )
        producer.connection.tell(
            PeerKind.PRODUCER,
            producer.producer_id,
            pb.BaseCommand(type=Kind.SEND_ERROR, send_error=error),
            in_turn=self.in_turn,
        )

    def _receipt(self, producer: Attached, send: Send, entry_id: int, stored: list[Stored]) -> None:
        receipt = pb.CommandSendReceipt(
            producer_id=producer.producer_id,
            sequence_id=send.sequence_id,
            highest_sequence_id=send.highest_sequence_id,
            message_id=pb.MessageIdData(ledger_id=1, entry_id=to_wire(entry_id)),
        )

        def seen() -> None:
            for each in stored:
                each.receipted = True

        producer.connection.tell(
            PeerKind.PRODUCER,
            producer.producer_id,
            pb.BaseCommand(type=Kind.SEND_RECEIPT, send_receipt=receipt),
            seen,
        )


class Link:
    """A connection, as the client sees it."""

    max_message_size = 5 * 1024 * 1024
    writable = True
    address = "memory"
    features = pb.FeatureFlags(supports_scalable_topics=True)

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_lost = False
        self.knows_resends = world.knows_resends
        self._handlers: dict[tuple[PeerKind, int], Handler] = {}
        self._answers: dict[int, asyncio.Future[pb.BaseCommand]] = {}
        self._requests = 0
        self._decoder = FrameDecoder(100_000_000)
        self._clock = {"out": 0.0, "in": 0.0}
        self._on_the_way: deque[tuple[asyncio.TimerHandle, Callable[[], None]]] = deque()

    # Connection

    async def request(
        self, command: pb.BaseCommand, timeout_s: float | None = None
    ) -> pb.BaseCommand:
        if self.is_lost:
            raise ConnectionLost("It is lost.")
        self._requests += 1
        number = self._requests
        getattr(command, FIELD_OF_TYPE[command.type]).request_id = number
        answer: asyncio.Future[pb.BaseCommand] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self.send(command)
        try:
            async with asyncio.timeout(30):
                return await answer
        except TimeoutError:
            raise OperationTimedOut("No answer came.") from None
        finally:
            self._answers.pop(number, None)

    def awaits(self, request_id: int) -> bool:
        return request_id in self._answers

    def send(self, command: pb.BaseCommand) -> None:
        copy = pb.BaseCommand.FromString(command.SerializeToString())
        self._out(partial(self.world.serve, self, copy))

    def write(self, *parts: bytes) -> None:
        if self.is_lost:
            raise ConnectionLost("It is lost.")
        for frame in self._decoder.feed(b"".join(parts)):
            assert isinstance(frame, Send)
            assert frame.error is None
            self._out(partial(self.world.store, self, frame))

    def attach(self, kind: PeerKind, number: int, handler: Handler) -> None:
        if self.is_lost:
            raise ConnectionLost("It is lost.")
        self._handlers[kind, number] = handler

    def detach(self, kind: PeerKind, number: int) -> None:
        self._handlers.pop((kind, number), None)

    def detach_all(self, handler: Handler) -> None:
        for key in [key for key, known in self._handlers.items() if known is handler]:
            del self._handlers[key]

    # World

    def tell(
        self,
        kind: PeerKind,
        number: int,
        command: pb.BaseCommand,
        seen: Callable[[], None] = lambda: None,
        *,
        in_turn: bool = True,
    ) -> None:
        def arrive() -> None:
            if self.is_lost:
                return
            handler = self._handlers.get((kind, number))
            if handler is not None:
                seen()
                handler.received(Frame(command))

        if in_turn:
            self._later("in", arrive)
        else:
            self.world.soon(arrive, self.world.delay_s[0])

    def answer(self, request_id: int, answer: pb.BaseCommand | MagnetarError) -> None:
        def arrive() -> None:
            future = self._answers.get(request_id)
            if self.is_lost or future is None or future.done():
                return
            if isinstance(answer, MagnetarError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self._later("in", arrive)

    def lose(self) -> None:
        """Receipts on their way are gone; of what was sent, all from some point on."""
        if self.is_lost:
            return
        world = self.world
        world.lost_connections += 1
        waiting, self._on_the_way = self._on_the_way, deque()
        arrives = world.rng.randrange(len(waiting) + 1)
        for index, (timer, call) in enumerate(waiting):
            timer.cancel()
            if index < arrives:
                call()
        self.is_lost = True
        for segment in world.segments.values():
            for producer in tuple(segment.attached.values()):
                if producer.connection is self:
                    del segment.attached[producer.producer_id]
        for session in [s for s, link in world.watchers.items() if link is self]:
            del world.watchers[session]
        error = ConnectionLost("The connection was lost.")
        for future in self._answers.values():
            if not future.done():
                future.set_exception(error)
        handlers, self._handlers = self._handlers, {}
        for handler in dict.fromkeys(handlers.values()):
            handler.connection_lost(error)

    def _out(self, call: Callable[[], None]) -> None:
        if self.is_lost:
            return

        def arrive() -> None:
            self._on_the_way.popleft()
            call()

        self._on_the_way.append((self._later("out", arrive), call))

    def _later(self, way: str, call: Callable[[], None]) -> asyncio.TimerHandle:
        """In order: nothing overtakes."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self.world.rng.uniform(*self.world.delay_s)
        self._clock[way] = max(self._clock[way], due)
        return loop.call_at(self._clock[way], call)
