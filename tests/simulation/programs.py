"""Programs that publish under a name where the broker deduplicates, over changes of the layout."""

import asyncio
import random
from typing import TYPE_CHECKING

from magnetar.protocol import pulsar_pb2 as pb
from magnetar.protocol.managed_clients import MANAGED_PROPERTY
from magnetar.protocol.names import TopicDomain
from tests.simulation.actors import Sender, segment_topic
from tests.simulation.client import SimulatedClient
from tests.simulation.history import Message
from tests.simulation.loop import Host
from tests.support.raw_client import RawProducer

if TYPE_CHECKING:
    from tests.simulation.world import World

CHECKPOINT = 6
"""Messages that a program sends again at most, when it begins again."""
FIRST_ID = 100
LATER_CLIENT = "Pulsar-Java-v5.0.0"
"""Chooses segments by the bits of the hash by which `Layout.route` does."""
REQUESTS_OF_A_SESSION = 10_000


def program_id(rng: random.Random) -> int:
    """The number from which a program counts its requests: random, as that of Java clients."""
    return rng.randrange(2**40, 2**60)


class Program(Sender):
    """Names its producers as clients of scalable topics do, one for each segment."""

    client_version = LATER_CLIENT
    _segment = ""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self._epochs: dict[str, int] = {}

    def options(self) -> pb.CommandProducer:
        epoch = self._epochs.get(self._segment, -1) + 1
        self._epochs[self._segment] = epoch
        name = f"{self.name}-seg-{self._segment_id()}"
        options = pb.CommandProducer(producer_name=name, epoch=epoch)
        if not self._segment.startswith(f"{TopicDomain.SEGMENT}://"):
            options.metadata.add(key=MANAGED_PROPERTY, value="true")
        return options

    def _segment_id(self) -> str:
        """The id of the segment; that of a topic that is migrated is in the layout only."""
        for topic, layout in self.layouts.items():
            for each in layout.dag.segments:
                if segment_topic(topic, each) == self._segment:
                    return str(each.segment_id)
        return self._segment.rpartition("-")[2]

    async def producer_on(self, client: SimulatedClient, segment: str) -> RawProducer:
        """The producer; those of segments that no message goes to any more are closed."""
        active = {each for topic in self.layouts.values() for each in topic.all_active()}
        for left in [each for each in self.producers if each not in active]:
            await self.producers.pop(left).close()
        return await self.attach(client, segment)

    async def attach(self, client: SimulatedClient, segment: str) -> RawProducer:
        """The producer of a segment."""
        self._segment = segment
        return await super().producer_on(client, segment)

    async def send_one(self, client: SimulatedClient, message: Message, number: int) -> None:
        """Return when it has a receipt.  Raises ConnectionError."""
        producer = await self.producer_for(client, message)
        refusal = await client.wait(self.begin_send(producer, message, sequence_id=number))
        if refusal:
            raise ConnectionError(refusal)


class RestartedProgram(Program):
    """Has ids of its own, and sends all again from its last checkpoint when it begins again."""

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self._since_checkpoint: list[Message] = []

    async def session(self, client: SimulatedClient) -> None:
        # Each connection is that of a new process.
        client.count_from(program_id(self.rng))
        self._epochs = {}
        await self.open(client)
        for message in list(self._since_checkpoint):
            await self.send_one(client, message, message.number)
        while not self.stopping and client.alive:
            message = self.new_message(awaited=True)
            message.once = True
            self._since_checkpoint.append(message)
            await self.send_one(client, message, message.number)
            if len(self._since_checkpoint) >= CHECKPOINT:
                del self._since_checkpoint[: self.rng.randrange(1, CHECKPOINT)]
            if self.rng.random() < 0.1:
                raise ConnectionError("the program is restarted")
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s))


class CountingProgram(Program):
    """Begins at the same id on every segment, as Pulsar's client with `initialSequenceId` does.

    A message without receipt is sent again: to the same segment under the same id, or to a newer
    segment under the next id there.
    """

    def __init__(
        self, world: "World", name: str, host: Host, rng: random.Random, topics: list[str]
    ) -> None:
        super().__init__(world, name, host, rng, topics)
        self._next_request = program_id(rng)
        self._next_ids: dict[str, int] = {}
        self._pending: tuple[Message, str, int] | None = None

    async def session(self, client: SimulatedClient) -> None:
        # The same process goes on with the next connection.
        client.count_from(self._next_request)
        self._next_request += REQUESTS_OF_A_SESSION
        await self.open(client)
        while not self.stopping and client.alive:
            message, segment, number = self._pending or (self.new_message(awaited=True), "", 0)
            layout = self.layouts[message.topic]
            layout.refresh()
            routed = layout.route(message.key)
            if routed != segment:
                number = self._next_ids.get(routed, FIRST_ID)
                self._next_ids[routed] = number + 1
            self._pending = message, routed, number
            await self.send_one(client, message, number)
            self._pending = None
            await asyncio.sleep(self.rng.expovariate(1 / self.world.plan.pause_s))
