"""A producer of a scalable topic that outlives its broker and follows every change of the layout.

Rules: one send at a time for each key, to the ACTIVE segment that holds the key's hash, until it
has a receipt; what fails is sent again as the layout then is, so that a message may be stored more
than once, but never before its predecessor of the same key has a receipt.
"""

import asyncio
from collections.abc import Mapping
from struct import Struct
from typing import Final, NamedTuple

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.ids import Position
from magnetar.protocol.key_hash import segment_hash
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from tests.chaos.steady_producer import RETRY_PAUSE_S, must_be_loss, position_of
from tests.support.broker_process import BrokerProcess
from tests.support.raw_client import BrokerError, RawClient, RawProducer, Session
from tests.support.waiting import end

CONTENT: Final = Struct(">IQ")
MANAGED: Final = [pb.KeyValue(key=MANAGED_PROPERTY, value="true")]
TRY_AGAIN: Final = frozenset({pb.TopicTerminatedError, pb.ServiceNotReady})


class Stored(NamedTuple):
    """Where a receipt says that a message is."""

    segment: int
    position: Position


class RoutingProducer:
    """Sends under keys 0 to one less than `keys`; each key counts its messages from 0."""

    def __init__(self, topic: str, keys: int) -> None:
        self.topic = topic
        self.receipts: dict[tuple[int, int], Stored] = {}
        self.attempts: dict[tuple[int, int], int] = {}
        self.epoch = -1
        self._next = dict.fromkeys(range(keys), 0)
        self._layout = pb.ScalableTopicDAG()
        self._producers: dict[int, asyncio.Task[RawProducer]] = {}

    @property
    def sent(self) -> Mapping[int, int]:
        """Messages of each key that have a receipt."""
        return self._next

    async def run(self, broker: BrokerProcess, stop: asyncio.Event) -> None:
        """Send until `stop`, on one connection after the other."""
        while not stop.is_set():
            run = broker.run
            try:
                client = await broker.connect()
            except OSError:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            try:
                await self._send_on(client, stop)
            except ConnectionError:
                await must_be_loss(client, broker, run)
            finally:
                await client.close()

    async def _send_on(self, client: RawClient, stop: asyncio.Event) -> None:
        self._producers = {}
        session, update = await client.watch_dag(self.topic, create_if_missing=False)
        self._follow(update)
        work = [asyncio.create_task(self._send_key(client, key, stop)) for key in self._next]
        watch = asyncio.create_task(self._watch(client, session))
        try:
            await asyncio.gather(*work)
        finally:
            await end(watch, *work)

    def _follow(self, update: pb.CommandScalableTopicUpdate) -> None:
        assert not update.HasField("error"), update.message
        assert update.dag.epoch >= self.epoch, "an older layout came after a newer one"
        self.epoch = update.dag.epoch
        self._layout = update.dag

    async def _watch(self, client: RawClient, session: Session) -> None:
        """Take each new layout, and leave the segments that it seals."""
        closing: list[asyncio.Task[None]] = []
        try:
            while True:
                update = await client.wait(session.updates.get(), timeout_s=600)
                self._follow(update.scalable_topic_update)
                closing += [asyncio.create_task(one.close()) for one in self._of_sealed()]
        finally:
            await end(*closing)

    def _of_sealed(self) -> list[RawProducer]:
        """Take out the producers of segments that are no longer ACTIVE."""
        active = {s.segment_id for s in self._layout.segments if s.state == pb.ACTIVE}
        gone = [self._producers.pop(number) for number in list(self._producers.keys() - active)]
        return [
            opened.result()
            for opened in gone
            if opened.done() and not opened.cancelled() and opened.exception() is None
        ]

    async def _send_key(self, client: RawClient, key: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = self._next[key]
            segment = self._route(key)
            opened = self._open(client, segment)
            receipt = None
            try:
                producer = await asyncio.shield(opened)
                if self._producers.get(segment.segment_id) is not opened:
                    continue
                self.attempts[key, number] = self.attempts.get((key, number), 0) + 1
                receipt = await self._send(producer, key, number)
            except BrokerError as error:
                if error.code not in TRY_AGAIN:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)
            if receipt is not None:
                place = Stored(segment.segment_id, position_of(receipt.message_id))
                self.receipts[key, number] = place
                self._next[key] += 1
            elif self._producers.get(segment.segment_id) is opened:
                del self._producers[segment.segment_id]

    async def _send(
        self, producer: RawProducer, key: int, number: int
    ) -> pb.CommandSendReceipt | None:
        """The receipt; None if the broker closed the producer first."""
        metadata = pb.MessageMetadata(partition_key=str(key))
        payload = CONTENT.pack(key, number)
        sending = asyncio.create_task(producer.send(payload, metadata=metadata))
        closed = asyncio.create_task(producer.events.get())
        try:
            await asyncio.wait({sending, closed}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result()
            producer.events.put_nowait(closed.result())
            return None
        finally:
            await end(sending, closed)

    def _open(self, client: RawClient, segment: pb.SegmentInfoProto) -> "asyncio.Task[RawProducer]":
        number = segment.segment_id
        if number not in self._producers:
            name = segment_topic(self.topic, segment)
            options = pb.CommandProducer(metadata=MANAGED if segment.legacy_topic_name else [])
            opening = client.create_producer(name, options)
            self._producers[number] = asyncio.create_task(opening)
        return self._producers[number]

    def _route(self, key: int) -> pb.SegmentInfoProto:
        number = segment_hash(str(key).encode())
        (found,) = (
            segment
            for segment in self._layout.segments
            if segment.state == pb.ACTIVE and segment.hash_start <= number <= segment.hash_end
        )
        return found


def segment_topic(topic: str, segment: pb.SegmentInfoProto) -> str:
    """The name of a segment's own topic, or of the ordinary topic that it is."""
    if segment.legacy_topic_name:
        return segment.legacy_topic_name
    local_name = topic.removeprefix("topic://").removeprefix("persistent://")
    ends = f"{segment.hash_start:04x}-{segment.hash_end:04x}"
    return f"segment://{local_name}/{ends}-{segment.segment_id}"
