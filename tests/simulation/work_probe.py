"""Shows that every ordered consumer has work (B8), when all is quiet.

It sends a message to each entry bucket.  With k consumers of a segment of N buckets, N at least k,
each consumer has a bucket.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.scalable.layout import Layout, Segment
from broker.scalable.records import segment_of
from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.names import parse_topic_name
from tests.simulation.actors import STREAM, Sender
from tests.simulation.client import SimulatedClient
from tests.simulation.history import Message
from tests.simulation.programs import LATER_CLIENT
from tests.simulation.sharing_consumers import SharingConsumer, TransientConsumer

if TYPE_CHECKING:
    from tests.simulation.world import World

TRIES = 6
TRY_S = 20.0


class WorkProbe(Sender):
    """Sends a stamped message to each entry bucket of a topic."""

    client_version = LATER_CLIENT

    def __init__(self, world: "World", topic: str) -> None:
        host = world.loop.new_host("probe")
        super().__init__(world, "probe", host, world.rng, [topic])
        self._name = parse_topic_name(topic)
        self._topic = topic
        self._hashes: dict[str, int] = {}
        self._tried = 0
        self._idle: list[str] = []

    async def session(self, client: SimulatedClient) -> None:
        """Try until as many consumers got a message as should have work; else name the others."""
        self.producers = {}
        while self._tried < TRIES:
            self._tried += 1
            layout = (await self.world.running.broker.scalable.get(self._name)).layout
            sent = await self._send(client, layout)
            await asyncio.sleep(TRY_S)
            got = {
                each.consumer
                for each in self.world.history.deliveries
                if each.subscription == STREAM and each.message in sent
            }
            consumers = self._consumers()
            wanted = self._count_with_work(layout, consumers)
            if len(got) >= wanted:
                self.stopping = True
                return
            self._idle = sorted(each.name for each in consumers if each.name not in got)
            self.note(f"no work for {self._idle}, {wanted} of {len(consumers)} should have some")
        self.world.history.violated(f"no work: {self._idle} got nothing in {TRIES} tries")
        self.stopping = True

    def _consumers(self) -> list[TransientConsumer]:
        return [
            each
            for each in self.world.actors
            if isinstance(each, TransientConsumer) and each.topic == self._topic
        ]

    def _count_with_work(self, layout: Layout, consumers: Sequence[TransientConsumer]) -> int:
        can_share = all(isinstance(each, SharingConsumer) for each in consumers)
        free = [s for s in layout.active if self._segment(s) not in self.world.history.unstamped]
        if can_share and self.world.plan.auto_scale and len(free) == len(layout.active):
            return len(consumers)
        places = sum(s.entry_buckets if can_share and s in free else 1 for s in layout.active)
        return min(places, len(consumers))

    def _segment(self, segment: Segment) -> str:
        return str(segment_of(self._name, segment))

    async def _send(self, client: SimulatedClient, layout: Layout) -> set[str]:
        sent: set[str] = set()
        for segment in layout.active:
            producer = await self.producer_on(client, self._segment(segment))
            for start in (0, *segment.entry_bucket_splits):
                name = f"probe-{self._tried}-{segment.segment_id}-{start}"
                self._hashes[name] = start
                message = Message(name, self._topic, name, self.name, len(sent), awaited=False)
                if not await client.wait(self.begin_send(producer, message)):
                    sent.add(name)
        return sent

    def _content(
        self, messages: Sequence[Message]
    ) -> tuple[pb.MessageMetadata, pb.CommandSend, bytes]:
        metadata, send, payload = super()._content(messages)
        metadata.entry_hash_min = metadata.entry_hash_max = self._hashes[messages[0].name]
        return metadata, send, payload
